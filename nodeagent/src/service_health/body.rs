//! The answers of a health check node port (A23, A24).

use hyper::StatusCode;
use hyper::header::{HeaderName, HeaderValue};
use kplane_model::ServiceName;
use serde::Serialize;
use serde_json::ser::{PrettyFormatter, Serializer};

use kplane_http::{self as http, Answer};

/// The header in which weighted load balancers read how many endpoints the node has.
const WEIGHT: HeaderName = HeaderName::from_static("x-load-balancing-endpoint-weight");

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    service: Service<'a>,
    local_endpoints: u32,
    service_proxy_healthy: bool,
}

#[derive(Serialize)]
struct Service<'a> {
    namespace: &'a str,
    name: &'a str,
}

/// Returns the answer for a Service with this number of ready endpoints on the node, for any path.
pub(super) fn answer(service: &ServiceName, local_endpoints: u32, healthy: bool) -> Answer {
    let body = Body {
        service: Service {
            namespace: &service.namespace,
            name: &service.name,
        },
        local_endpoints,
        service_proxy_healthy: healthy,
    };
    let mut bytes = Vec::with_capacity(192);
    let tabs = PrettyFormatter::with_indent(b"\t");
    // The value has only text, numbers and fixed keys, and goes into memory, so nothing can fail.
    let _ = body.serialize(&mut Serializer::with_formatter(&mut bytes, tabs));
    let status = if local_endpoints > 0 && healthy {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    let mut answer = http::answer(status, http::JSON, bytes);
    answer.headers_mut().insert(WEIGHT, HeaderValue::from(local_endpoints));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    /// The body is byte for byte what kube-proxy prints.
    #[tokio::test]
    async fn a24_headers_and_body() {
        let web = ServiceName::new("shop", "web");
        let answer = answer(&web, 3, true);
        assert_eq!(answer.status(), 200);
        let header = |name: &str| answer.headers()[name].to_str().unwrap().to_owned();
        assert_eq!(header("content-type"), "application/json");
        assert_eq!(header("x-content-type-options"), "nosniff");
        assert_eq!(header("x-load-balancing-endpoint-weight"), "3");
        let bytes = answer.into_body().collect().await.unwrap().to_bytes();
        let expected = "{\n\t\"service\": {\n\t\t\"namespace\": \"shop\",\n\t\t\"name\": \"web\"\n\t},\n\
                        \t\"localEndpoints\": 3,\n\t\"serviceProxyHealthy\": true\n}";
        assert_eq!(String::from_utf8_lossy(&bytes), expected);
    }

    #[test]
    fn a23_200_needs_an_endpoint_and_a_healthy_proxy() {
        let web = ServiceName::new("shop", "web");
        let status = |count, healthy| answer(&web, count, healthy).status().as_u16();
        assert_eq!(
            [
                status(1, true),
                status(0, true),
                status(1, false),
                status(0, false)
            ],
            [200, 503, 503, 503]
        );
    }
}
