//! The page: what `kpctl` shows, for a browser, on the status port and behind the same rights.
//!
//! A **sheet** (`sheet`) is a path with its query. It consists of sections (`html`), which `answers` makes of the
//! answers that `kpctl` gets, in `kpctl`'s words (`terminal`). Every sheet works without scripts. One small script
//! follows one stream of events (`live`), which replaces the sections that have changed. Text becomes markup in one
//! place, `html::Html::text`, and the policy that each answer has lets a browser run nothing but that script.

mod answers;
mod cards;
mod changes;
mod guard;
mod html;
mod lists;
mod live;
mod map;
mod matrix;
mod overview;
mod reasons;
mod sheet;
mod strip;
mod terminal;
mod trend;

#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use axum::routing::any;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::header::{
    ACCEPT_ENCODING, CACHE_CONTROL, CONNECTION, CONTENT_ENCODING, CONTENT_SECURITY_POLICY,
    CONTENT_TYPE, HeaderName, LOCATION, REFERRER_POLICY, VARY, X_CONTENT_TYPE_OPTIONS,
};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, StatusCode, Version};
use kplane_agents::hub::Hub;
use kplane_agents::identity::{Authenticator, Caller};
use kplane_agents::peers::Peers;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;

use self::answers::{AnswerSources, Problem};
use self::html::{Document, Html, Origin, POLICY, Section};
use self::live::{Content, Live};
use self::sheet::Sheet;
use self::trend::Trend;
use crate::server::{RecorderServer, StatusServer};

/// Where the page is.
const ROOT: &str = "/page/";
/// Time between two signs of life of a quiet stream.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);
/// Cost of a sheet, of the questions that a caller may ask.
const COST: u32 = 5;
/// Smallest answer that is compressed, in bytes.
const WORTH_COMPRESSING: usize = 1024;

/// The page.
pub struct Page {
    authenticator: Arc<Authenticator>,
    answers: Arc<AnswerSources>,
    live: Arc<Live>,
}

impl Page {
    /// Creates the page. Must be called on a runtime.
    pub fn new(
        hub: &Arc<Hub>,
        authenticator: &Arc<Authenticator>,
        peers: Option<Arc<Peers>>,
    ) -> Self {
        let trend = Arc::<Trend>::default();
        tokio::spawn(Arc::clone(&trend).follow(Arc::clone(hub)));
        Self {
            authenticator: Arc::clone(authenticator),
            answers: Arc::new(AnswerSources {
                hub: Arc::clone(hub),
                status: StatusServer::new(Arc::clone(hub)).with(peers.clone()),
                recorder: RecorderServer::new(Arc::clone(hub), peers.clone()),
                peers,
                trend,
            }),
            live: Arc::default(),
        }
    }

    /// Adds the page to the services of a port. The port may then take HTTP/1.1, which browsers speak in plain text;
    /// the services keep to HTTP/2, because a browser lets any site send HTTP/1.1 requests.
    pub fn beside(self, services: Router) -> Router {
        let page = Router::new()
            .route("/", any(|| async { moved(ROOT) }))
            .route("/page", any(|| async { moved(ROOT) }))
            .route(ROOT, any(answer))
            .route("/page/{*path}", any(answer))
            .with_state(Arc::new(self));
        services.layer(axum::middleware::from_fn(http2_only)).merge(page)
    }
}

/// Refuses requests to services that do not come over HTTP/2.
async fn http2_only(request: Request, next: Next) -> Response {
    match request.version() {
        Version::HTTP_2 => next.run(request).await,
        _ => {
            let mut answer = Response::new(Body::from(
                "this port serves gRPC, over HTTP/2; the page is at /page/\n",
            ));
            *answer.status_mut() = StatusCode::HTTP_VERSION_NOT_SUPPORTED;
            once(&mut answer);
            answer
        }
    }
}

fn moved(to: &'static str) -> Response {
    let mut answer = Response::new(Body::empty());
    *answer.status_mut() = StatusCode::SEE_OTHER;
    let to = HeaderValue::from_static(to);
    answer.headers_mut().insert(LOCATION, to);
    once(&mut answer);
    answer
}

/// Ends a connection of HTTP/1.1 after its answer, so that idle browsers hold none.
fn once(answer: &mut Response) {
    let close = HeaderValue::from_static("close");
    answer.headers_mut().insert(CONNECTION, close);
}

async fn answer(State(page): State<Arc<Page>>, request: Request) -> Response {
    let (head, _) = request.into_parts();
    let mut answer = match page.answer(&head).await {
        Ok(answer) => answer,
        Err(problem) => problem.answer(&head.headers),
    };
    if head.version < Version::HTTP_2 {
        once(&mut answer);
    }
    answer
}

impl Page {
    async fn answer(&self, request: &Parts) -> Result<Response, Problem> {
        let caller = guard::admit(&self.authenticator, request).await?;
        let charged = caller.charge(COST);
        charged.map_err(|refusal| Problem::from(tonic::Status::from(refusal)))?;
        let path = request.uri.path().strip_prefix(ROOT).unwrap_or_default();
        let query = request.uri.query();
        if path == "live" {
            return self.live(caller, query);
        }
        let sheet = Sheet::find(path, query).ok_or_else(nothing)?;
        let sections = self.answers.sections(&sheet, Some(&caller)).await?;
        let (title, command, live) = (sheet.title(), sheet.command(), sheet.address());
        let document = Document {
            title: &title,
            origin: self.answers.origin(),
            current: sheet.current(),
            sections: &sections,
            command: command.as_deref(),
            live: sheet.is_live().then_some(&*live),
        };
        Ok(page(StatusCode::OK, &document, &request.headers))
    }

    /// Returns the stream of a sheet's changes.
    fn live(&self, caller: Caller, query: Option<&str>) -> Result<Response, Problem> {
        let query = query.unwrap_or_default().as_bytes();
        let mut values = form_urlencoded::parse(query);
        let address = values.find(|(name, _)| name == "sheet").ok_or_else(nothing)?.1;
        let sheet = Sheet::at(&address).filter(Sheet::is_live).ok_or_else(nothing)?;
        let permit =
            caller.watch().map_err(|refusal| Problem::from(tonic::Status::from(refusal)))?;
        let full = || Problem {
            code: StatusCode::TOO_MANY_REQUESTS,
            text: "too many different sheets are open in browsers: reload this one to see it anew"
                .to_owned(),
        };
        let content = self.live.follow(&self.answers, &sheet).ok_or_else(full)?;
        let (sender, receiver) = mpsc::channel(4);
        tokio::spawn(async move {
            let reason = tokio::select! {
                reason = tell(content, &sender) => reason,
                refusal = caller.ended() => refusal.text,
            };
            // The viewer may have gone.
            let _ = sender.send(Ok(event("ended", &reason))).await;
            drop(permit);
        });
        let mut answer = Response::new(Body::from_stream(ReceiverStream::new(receiver)));
        head(answer.headers_mut(), "text/event-stream");
        Ok(answer)
    }
}

fn nothing() -> Problem {
    Problem {
        code: StatusCode::NOT_FOUND,
        text: "there is no such sheet".to_owned(),
    }
}

impl Problem {
    /// Returns the problem as a sheet.
    fn answer(&self, headers: &HeaderMap) -> Response {
        let mut html = Html::default();
        html.element("p", "bad", &self.text);
        if matches!(self.code, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            html.raw("<p>In a terminal, <code>kpctl page</code> opens this page with the rights of your kubeconfig.</p>");
        }
        let document = Document {
            title: self.code.canonical_reason().unwrap_or("Error"),
            origin: Origin::default(),
            current: "",
            sections: &[Section::new("problem", "Problem", html)],
            command: None,
            live: None,
        };
        page(self.code, &document, headers)
    }
}

/// Returns a document as an answer, compressed if the browser takes that.
fn page(code: StatusCode, document: &Document<'_>, headers: &HeaderMap) -> Response {
    let html = document.html();
    let plain = html.as_str().as_bytes();
    let worth_it = plain.len() > WORTH_COMPRESSING && takes_gzip(headers);
    let packed = worth_it.then(|| pack(plain)).flatten();
    let is_packed = packed.is_some();
    let mut answer = Response::new(Body::from(packed.unwrap_or_else(|| plain.to_vec())));
    *answer.status_mut() = code;
    head(answer.headers_mut(), "text/html; charset=utf-8");
    let headers = answer.headers_mut();
    headers.insert(VARY, HeaderValue::from_static("accept-encoding"));
    if is_packed {
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    answer
}

fn takes_gzip(headers: &HeaderMap) -> bool {
    let value = headers.get(ACCEPT_ENCODING);
    let value = value.and_then(|value| value.to_str().ok());
    value.is_some_and(|value| value.split(',').any(|coding| coding.trim() == "gzip"))
}

fn pack(plain: &[u8]) -> Option<Vec<u8>> {
    let mut packer = GzEncoder::new(Vec::new(), Compression::fast());
    packer.write_all(plain).ok()?;
    packer.finish().ok()
}

/// Adds the headers of every answer.
fn head(headers: &mut HeaderMap, kind: &'static str) {
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    for (name, value) in [
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    if let Ok(policy) = HeaderValue::from_str(&POLICY) {
        headers.insert(CONTENT_SECURITY_POLICY, policy);
    }
}

/// Sends the sections that change, until the viewer goes; returns the reason of the end.
async fn tell(
    mut content: watch::Receiver<Content>,
    outbox: &mpsc::Sender<Result<Bytes, Infallible>>,
) -> String {
    let mut shown: Arc<Vec<Section>> = Arc::default();
    loop {
        let now = content.borrow_and_update().clone();
        let Some(now) = now else {
            return "not live: what this sheet shows is gone".to_owned();
        };
        for section in now.iter().filter(|section| !shown.contains(section)) {
            let text = serde_json::json!([section.id, section.html.as_str()]).to_string();
            if outbox.send(Ok(event("section", &text))).await.is_err() {
                return String::new();
            }
        }
        shown = now;
        tokio::select! {
            changed = content.changed() => if changed.is_err() {
                return "not live: the control plane ends".to_owned();
            },
            () = tokio::time::sleep(SIGN_OF_LIFE) => {
                if outbox.send(Ok(Bytes::from_static(b": alive\n\n"))).await.is_err() {
                    return String::new();
                }
            }
            () = outbox.closed() => return String::new(),
        }
    }
}

/// Returns an event of a stream; `data` is one line.
fn event(kind: &str, data: &str) -> Bytes {
    Bytes::from(format!(
        "event: {kind}\ndata: {}\n\n",
        data.replace(['\n', '\r'], " ")
    ))
}
