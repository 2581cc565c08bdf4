//! Who gets the page, with which headers, and whether what `kpctl` knows stands on it.

mod audit;

use std::fs;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use http::header::{AUTHORIZATION, CONTENT_SECURITY_POLICY, HOST};
use http::{Method, Request, StatusCode, Version};
use http_body_util::BodyExt as _;
use kplane_agents::connection_limits::{ConnectionGuard, TransportIdentity};
use kplane_agents::hub::Hub;
use kplane_agents::identity::{Authenticator, AuthenticatorConfig};
use kplane_desired_state::admission::Admission;
use tower::ServiceExt as _;

use super::Page;

const TOKENS: &str = "reads,anna,1\nelse,bert,2\nclients,carl,3\n";
const RULES: &str = "rules:
- {users: [anna, carl], verbs: [get], paths: [/kplane/status]}
- {users: [carl], verbs: [get], paths: [/kplane/clients]}
";

/// A page whose callers are `anna`, who may read, `bert`, who may not, and `carl`, who may see clients, too.
fn router() -> Router {
    open().1
}

fn open() -> (Arc<Hub>, Router) {
    let folder = tempfile::tempdir().unwrap();
    let [tokens, rules] = ["tokens.csv", "rules.yaml"].map(|name| folder.path().join(name));
    fs::write(&tokens, TOKENS).unwrap();
    fs::write(&rules, RULES).unwrap();
    let config = AuthenticatorConfig {
        token_auth_file: Some(tokens),
        authorization_file: Some(rules),
        ..AuthenticatorConfig::default()
    };
    let (hub, _) = Hub::sample_with_index("manifests", Admission::default());
    let authenticator = Authenticator::open(&config, Arc::clone(&hub), None).unwrap();
    let service = Router::new().fallback(|| async { "a service" });
    let router = Page::new(&hub, &authenticator, None).beside(service);
    (hub, router)
}

fn request(caller: TransportIdentity, path: &str) -> Request<Body> {
    let mut request = Request::builder()
        .uri(path)
        .header(HOST, "127.0.0.1:7466")
        .body(Body::empty())
        .unwrap();
    request.extensions_mut().insert(ConnectionGuard::of(caller));
    request
}

async fn ask(router: &Router, request: Request<Body>) -> (StatusCode, String) {
    let answer = router.clone().oneshot(request).await.unwrap();
    let code = answer.status();
    let policy = answer.headers().get(CONTENT_SECURITY_POLICY).cloned();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    let text = String::from_utf8(body.to_vec()).unwrap();
    if text.starts_with("<!doctype") {
        let policy = policy.unwrap();
        assert!(policy.to_str().unwrap().contains("default-src 'none'"));
    }
    (code, text)
}

fn with(token: Option<&str>, path: &str) -> Request<Body> {
    let mut request = request(TransportIdentity::Anonymous, path);
    if let Some(token) = token {
        let header = format!("Bearer {token}").parse().unwrap();
        request.headers_mut().insert(AUTHORIZATION, header);
    }
    request
}

#[tokio::test]
async fn the_map_needs_the_right_to_see_clients_and_is_not_shared() {
    let router = router();
    let map = "/page/map?namespace=shop&name=web";
    let (code, text) = ask(&router, with(Some("reads"), map)).await;
    assert_eq!(code, StatusCode::FORBIDDEN, "{text}");
    assert!(text.contains("/kplane/clients"), "{text}");
    let (code, text) = ask(&router, with(Some("clients"), map)).await;
    assert_eq!(code, StatusCode::OK, "{text}");
    assert!(
        text.contains("kpctl get graph shop/web") && text.contains("agent.flows"),
        "{text}"
    );
    assert!(!text.contains("data-live"));
    for token in ["reads", "clients"] {
        let live = with(Some(token), "/page/live?sheet=map");
        assert_eq!(ask(&router, live).await.0, StatusCode::NOT_FOUND);
    }
}

#[tokio::test]
async fn only_callers_with_the_right_see_the_page() {
    let router = router();
    let of = |token: Option<&str>| with(token, "/page/");
    for (token, wanted) in [
        (None, StatusCode::UNAUTHORIZED),
        (Some("wrong"), StatusCode::UNAUTHORIZED),
        (Some("else"), StatusCode::FORBIDDEN),
        (Some("reads"), StatusCode::OK),
    ] {
        let (code, text) = ask(&router, of(token)).await;
        assert_eq!(code, wanted, "{token:?}: {text}");
        assert_eq!(text.contains("nodes in sync"), wanted == StatusCode::OK);
        assert_eq!(text.contains("kpctl page"), wanted != StatusCode::OK);
    }
    let mut live = of(None);
    *live.uri_mut() = "/page/live?sheet=fleet".parse().unwrap();
    assert_eq!(ask(&router, live).await.0, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn in_plain_text_only_browsers_that_name_the_address_see_it() {
    let router = router();
    let good = request(TransportIdentity::PlainText, "/page/");
    assert_eq!(ask(&router, good).await.0, StatusCode::OK);
    let mut rebound = request(TransportIdentity::PlainText, "/page/");
    let evil = "evil.example:7466".parse().unwrap();
    rebound.headers_mut().insert(HOST, evil);
    assert_eq!(ask(&router, rebound).await.0, StatusCode::FORBIDDEN);
    let mut loaded = request(TransportIdentity::PlainText, "/page/");
    let foreign = "cross-site".parse().unwrap();
    loaded.headers_mut().insert("sec-fetch-site", foreign);
    assert_eq!(ask(&router, loaded).await.0, StatusCode::FORBIDDEN);
    let mut changed = request(TransportIdentity::PlainText, "/page/");
    *changed.method_mut() = Method::POST;
    assert_eq!(
        ask(&router, changed).await.0,
        StatusCode::METHOD_NOT_ALLOWED
    );
    for path in [
        "/page/nothing",
        "/page/node",
        "/page/live",
        "/page/live?sheet=nothing",
    ] {
        let answer = ask(&router, request(TransportIdentity::PlainText, path)).await;
        assert_eq!(answer.0, StatusCode::NOT_FOUND, "{path}");
    }
}

#[tokio::test]
async fn services_keep_to_http2() {
    let router = router();
    for path in [
        "/kplane.v1.StatusService/Approve",
        "/grpc.health.v1.Health/Check",
    ] {
        let old = request(TransportIdentity::PlainText, path);
        let (code, _) = ask(&router, old).await;
        assert_eq!(code, StatusCode::HTTP_VERSION_NOT_SUPPORTED);
        let mut new = request(TransportIdentity::PlainText, path);
        *new.version_mut() = Version::HTTP_2;
        assert_eq!(
            ask(&router, new).await,
            (StatusCode::OK, "a service".to_owned())
        );
    }
}
