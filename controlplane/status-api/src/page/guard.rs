//! Who may see the page. The authenticator decides, as for `kpctl`; this module keeps browsers from lending their user's rights
//! to other sites.

use std::net::IpAddr;
use std::sync::Arc;

use http::header::HOST;
use http::request::Parts;
use http::{HeaderMap, Method, StatusCode};
use kplane_agents::connection_limits::TransportIdentity;
use kplane_agents::identity::{Authenticator, Caller, Right};
use tonic::Status;

use super::answers::Problem;
use crate::server::{self, connection};

/// Admits a request.
///
/// # Errors
/// The problem, for the caller.
pub(super) async fn admit(
    authenticator: &Arc<Authenticator>,
    request: &Parts,
) -> Result<Caller, Problem> {
    if !matches!(request.method, Method::GET | Method::HEAD) {
        return Err(Problem {
            code: StatusCode::METHOD_NOT_ALLOWED,
            text: "the page only shows things: use GET".to_owned(),
        });
    }
    let connection = connection(&request.extensions).map_err(Status::from)?;
    if *connection.identity() == TransportIdentity::PlainText {
        let host = request.uri.host().map(str::to_owned).or_else(|| host_of(&request.headers));
        named(host.as_deref().unwrap_or_default())?;
    }
    same_site(&request.headers)?;
    let right = Some(Right::ReadStatus);
    let admitted = server::admit(authenticator, connection, &request.headers, right).await;
    Ok(admitted.map_err(Status::from)?)
}

fn refused(text: String) -> Problem {
    Problem {
        code: StatusCode::FORBIDDEN,
        text,
    }
}

fn host_of(headers: &HeaderMap) -> Option<String> {
    let host = headers.get(HOST)?.to_str().ok()?;
    let authority: http::uri::Authority = host.parse().ok()?;
    Some(authority.host().to_owned())
}

/// Refuses names of hosts on a port in plain text, which proves no identity: another site could give its name the
/// address of this port, and its scripts would read the page (DNS rebinding).
fn named(host: &str) -> Result<(), Problem> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    if bare.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok() {
        return Ok(());
    }
    Err(refused(format!(
        "the page is not served under the name {bare:?}: this port has no TLS. Open it by address, or with: kpctl page"
    )))
}

/// Refuses what other sites load. Links from other sites are fine: they only show the page.
fn same_site(headers: &HeaderMap) -> Result<(), Problem> {
    let value = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let foreign = matches!(value("sec-fetch-site"), Some("cross-site" | "same-site"));
    if foreign && value("sec-fetch-mode") != Some("navigate") {
        Err(refused("another site asked for the page".to_owned()))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn names_of_hosts_are_refused_in_plain_text() {
        for good in ["localhost", "127.0.0.1", "[::1]", "192.0.2.7"] {
            assert!(named(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
        ] {
            assert_eq!(named(bad).unwrap_err().code, StatusCode::FORBIDDEN, "{bad}");
        }
    }

    #[test]
    fn other_sites_may_link_and_nothing_else() {
        let headers = |site: &'static str, mode: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert("sec-fetch-site", HeaderValue::from_static(site));
            headers.insert("sec-fetch-mode", HeaderValue::from_static(mode));
            headers
        };
        assert!(same_site(&HeaderMap::new()).is_ok());
        assert!(same_site(&headers("same-origin", "cors")).is_ok());
        assert!(same_site(&headers("none", "navigate")).is_ok());
        assert!(same_site(&headers("cross-site", "navigate")).is_ok());
        assert!(same_site(&headers("cross-site", "no-cors")).is_err());
        assert!(same_site(&headers("same-site", "cors")).is_err());
    }
}
