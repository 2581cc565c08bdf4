//! The ConfigMap, in an API server that follows a script.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use http::{Method, Request, Response};
use http_body_util::BodyExt as _;
use kplane_desired_state::kubernetes::Api;
use kube::client::Body;
use serde_json::{Value, json};

use super::*;
use crate::overrides::Unchanged;

/// The API server.
#[derive(Default)]
struct Server {
    map: Option<Value>,
    version: u64,
    writes: usize,
    /// What happens at the next requests, the last one first.
    script: Vec<Twist>,
}

#[derive(Clone, Debug)]
enum Twist {
    /// Another replica writes these orders before.
    Meanwhile(Box<Overrides>),
    /// The write is made, and its answer is lost.
    Lost,
    /// Nothing is done, and the answer is an error.
    Fails,
}

impl Server {
    fn put(&mut self, overrides: &Overrides) {
        self.version += 1;
        self.map = Some(json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {
                "name": "kplane-orders", "namespace": "kplane", "labels": { "team": "a" },
                "resourceVersion": self.version.to_string(),
            },
            "data": { "orders.json": overrides.write() },
        }));
    }

    fn overrides(&self) -> Overrides {
        let map = self.map.as_ref().unwrap();
        Overrides::read(map["data"]["orders.json"].as_str().unwrap()).unwrap()
    }

    fn answer(&mut self, method: &Method, path: &str, body: &Value) -> (u16, Value) {
        let failed = |code: u16, reason| {
            (
                code,
                json!({ "kind": "Status", "code": code, "reason": reason, "message": "" }),
            )
        };
        if *method == Method::GET {
            let found = self.map.clone();
            return found.map_or_else(|| failed(404, "NotFound"), |map| (200, map));
        }
        let twist = self.script.pop();
        match &twist {
            Some(Twist::Meanwhile(overrides)) => self.put(overrides),
            Some(Twist::Fails) => return failed(500, "InternalError"),
            Some(Twist::Lost) | None => {}
        }
        let now = self.map.as_ref().map(|map| &map["metadata"]["resourceVersion"]);
        let is_create = *method == Method::POST;
        assert_eq!(is_create, path.ends_with("/configmaps"), "{path}");
        match (now, is_create) {
            (Some(_), true) => return failed(409, "AlreadyExists"),
            (Some(now), false) if *now != body["metadata"]["resourceVersion"] => {
                return failed(409, "Conflict");
            }
            _ => {}
        }
        self.writes += 1;
        self.version += 1;
        let mut map = body.clone();
        map["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.map = Some(map.clone());
        match twist {
            Some(Twist::Lost) => failed(504, "Timeout"),
            _ => (200, map),
        }
    }
}

/// Returns the place in a server.
fn place(server: &Arc<Mutex<Server>>) -> Backend {
    let server = Arc::clone(server);
    let service = tower::service_fn(move |request: Request<Body>| {
        let server = Arc::clone(&server);
        async move {
            let (head, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let body = serde_json::from_slice(&body).unwrap_or_default();
            let answer = server.lock().unwrap().answer(&head.method, head.uri.path(), &body);
            let response = Response::builder().status(answer.0);
            let body = Body::from(answer.1.to_string().into_bytes());
            Ok::<_, Infallible>(response.body(body).unwrap())
        }
    });
    Backend::ConfigMap {
        api: Arc::new(Api::of(kube::Client::new(service, "default"))),
        namespace: "kplane".to_owned(),
    }
}

async fn freeze(place: &Backend, name: &str) -> Result<Overrides, Unchanged> {
    let change = Change::Override(wish(true, &[node(name)]));
    place.change(&Overrides::default(), &change).await
}

#[tokio::test(start_paused = true)]
async fn of_two_orders_at_the_same_time_none_is_lost() {
    let server = Arc::<Mutex<Server>>::default();
    let place = place(&server);
    let other = Overrides::default().with(&wish(true, &[node("b")])).unwrap();
    // The other one creates the document first, and then changes it first.
    server.lock().unwrap().script = vec![Twist::Meanwhile(Box::new(other.clone()))];
    freeze(&place, "a").await.unwrap();
    let more = server.lock().unwrap().overrides();
    assert!(is_frozen(&more, "a") && is_frozen(&more, "b"));
    let more = more.with(&wish(true, &[node("c")])).unwrap();
    server.lock().unwrap().script = vec![Twist::Meanwhile(Box::new(more))];
    let overrides = freeze(&place, "d").await.unwrap();
    let server = server.lock().unwrap();
    assert_eq!(overrides, server.overrides());
    for name in ["a", "b", "c", "d"] {
        assert!(is_frozen(&overrides, name), "{name}");
    }
    let map = server.map.as_ref().unwrap();
    assert_eq!(
        map["metadata"]["labels"]["team"], "a",
        "the rest of the object stays"
    );
}

#[tokio::test(start_paused = true)]
async fn a_write_that_was_not_confirmed_is_looked_at_again() {
    let server = Arc::<Mutex<Server>>::default();
    let place = place(&server);
    server.lock().unwrap().script = vec![Twist::Lost];
    let overrides = freeze(&place, "a").await.unwrap();
    assert!(is_frozen(&overrides, "a"));
    assert_eq!(server.lock().unwrap().writes, 1, "it was made");
    server.lock().unwrap().script = vec![Twist::Fails];
    let overrides = freeze(&place, "b").await.unwrap();
    assert!(is_frozen(&overrides, "b"));
    assert_eq!(server.lock().unwrap().writes, 2, "it was not made at first");
    server.lock().unwrap().script = vec![Twist::Fails, Twist::Fails];
    let unsure = freeze(&place, "c").await.unwrap_err();
    assert!(
        unsure.is_unsure() && unsure.to_string().contains("kpctl status"),
        "{unsure}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_damaged_document_is_not_written_over() {
    let server = Arc::<Mutex<Server>>::default();
    let place = place(&server);
    freeze(&place, "a").await.unwrap();
    server.lock().unwrap().map.as_mut().unwrap()["data"] = json!({ "orders.json": "{" });
    let refused = freeze(&place, "b").await.unwrap_err();
    assert!(refused.to_string().contains("damaged"), "{refused}");
    assert_eq!(server.lock().unwrap().writes, 1);
}
