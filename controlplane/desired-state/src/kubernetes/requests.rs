//! Counts of all requests to the API server, under the names that Kubernetes' own components have for them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use http::{Request, Response};
use parking_lot::Mutex;
use tower::Service;

/// Upper bounds of the durations in seconds, as in client-go.
const BOUNDS: [f64; 12] = [
    0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0,
];
/// Maximum number of series of each metric. There is a handful of methods, codes and servers.
const MAX_SERIES: usize = 256;

/// Method, code and host of requests.
type RequestKind = (String, String, String);

/// A histogram in seconds: the sum, and the number of values up to each bound.
pub type Distribution = (f64, Vec<(f64, u64)>);

/// The counts.
#[derive(Debug, Default)]
pub struct Requests(Mutex<RequestCounts>);

#[derive(Debug, Default)]
struct RequestCounts {
    by_kind: BTreeMap<RequestKind, u64>,
    /// Durations until the head of the answer, by method and host.
    durations: BTreeMap<(String, String), Histogram>,
}

#[derive(Debug, Default)]
struct Histogram {
    sum: f64,
    counts: [u64; BOUNDS.len() + 1],
}

impl Requests {
    fn count(&self, method: String, code: String, host: String, took: Duration) {
        let mut counts = self.0.lock();
        let kind = (method.clone(), code, host.clone());
        if counts.by_kind.len() < MAX_SERIES || counts.by_kind.contains_key(&kind) {
            *counts.by_kind.entry(kind).or_default() += 1;
        }
        let key = (method, host);
        if counts.durations.len() < MAX_SERIES || counts.durations.contains_key(&key) {
            let histogram = counts.durations.entry(key).or_default();
            let seconds = took.as_secs_f64();
            histogram.sum += seconds;
            let bucket = BOUNDS.partition_point(|bound| *bound < seconds);
            if let Some(count) = histogram.counts.get_mut(bucket) {
                *count += 1;
            }
        }
    }

    /// Returns the number of requests by method, code and host. The code of a request without an answer is `<error>`.
    pub fn all(&self) -> BTreeMap<RequestKind, u64> {
        self.0.lock().by_kind.clone()
    }

    /// Returns the durations until the head of the answer, by method and host.
    pub fn durations(&self) -> Vec<((String, String), Distribution)> {
        let counts = self.0.lock();
        counts
            .durations
            .iter()
            .map(|(key, histogram)| {
                let bounds = BOUNDS.iter().copied().chain([f64::INFINITY]);
                let counts = bounds.zip(histogram.counts).collect();
                (key.clone(), (histogram.sum, counts))
            })
            .collect()
    }
}

/// A service whose requests are counted.
#[derive(Clone, Debug)]
pub(super) struct Counted<S> {
    pub(super) inner: S,
    pub(super) requests: Arc<Requests>,
}

impl<S, B, R> Service<Request<B>> for Counted<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let method = request.method().to_string();
        let host = request.uri().authority().map_or_else(String::new, ToString::to_string);
        let requests = Arc::clone(&self.requests);
        let started = Instant::now();
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            let code = match &answer {
                Ok(answer) => answer.status().as_str().to_owned(),
                Err(_) => "<error>".to_owned(),
            };
            requests.count(method, code, host, started.elapsed());
            answer
        })
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use tower::{ServiceExt as _, service_fn};

    use super::*;

    #[tokio::test]
    async fn requests_are_counted_by_method_code_and_host() {
        let requests = Arc::new(Requests::default());
        let service = service_fn(|request: Request<()>| async move {
            let refused = request.uri().path() == "/secret";
            let code = if refused { 403 } else { 200 };
            let mut answer = Response::new(());
            *answer.status_mut() = http::StatusCode::from_u16(code).unwrap_or_default();
            Ok::<_, Infallible>(answer)
        });
        let counted = Counted {
            inner: service,
            requests: Arc::clone(&requests),
        };
        for path in ["/a", "/b", "/secret"] {
            let uri = format!("https://10.0.0.1:6443{path}");
            let request = Request::get(uri).body(()).unwrap();
            counted.clone().oneshot(request).await.unwrap();
        }
        let kind = |code: &str| {
            (
                "GET".to_owned(),
                code.to_owned(),
                "10.0.0.1:6443".to_owned(),
            )
        };
        let all = requests.all();
        assert_eq!((all[&kind("200")], all[&kind("403")]), (2, 1));
        let (_, (_, counts)) = &requests.durations()[0];
        let total: u64 = counts.iter().map(|(_, count)| count).sum();
        assert_eq!((counts.len(), total), (13, 3));
    }
}
