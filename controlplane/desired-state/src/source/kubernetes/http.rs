//! The HTTP edge: requests to the API server, and its answers.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use http::{Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use kube::client::Body;
use parking_lot::Mutex;
use tokio::time::timeout;

use super::endpoints::Shapes;
use super::parse::{self, Encoding, RawEvent, Read};
use super::resource::{Resource, escaped};
use super::transport::{ObjectPage, PageRequest, Transport, Unreadable, Watch, WatchEvent};
use kplane_model::one_line;

use crate::k8s::ObjectId;
use crate::kubernetes::{Api, Failure};

/// Maximum wait for the beginning of an answer, and between two pieces of a list: a loaded server
/// takes seconds for a large one.
const PATIENCE: Duration = Duration::from_secs(30);
/// Duration of a watch: the server ends it after this many seconds plus a random part of the
/// spread.
const WATCH_SECONDS: u32 = 290;
const WATCH_SECONDS_SPREAD: u32 = 60;
/// Maximum size of a page in bytes: 250 MiB is 100,000 slices of 100 endpoints in one piece.
const MAX_PAGE_BYTES: usize = 256 << 20;
/// Maximum size of one event in bytes: objects have at most 1.5 MiB in etcd, and some more as JSON.
const MAX_EVENT_BYTES: usize = 16 << 20;
/// Maximum size of an error's explanation in bytes.
const MAX_STATUS_BYTES: usize = 64 << 10;
/// Kinds of answers: without managedFields, which is half of some lists, from servers that offer it (KEP-5958; K39).
/// Others ignore the parameter.
const ACCEPTED: &str = "application/json;drop=metadata.managedFields, application/json";
/// Kinds of answers where protobuf can be read.
const ACCEPTED_FIRST: &str = "application/vnd.kubernetes.protobuf;drop=metadata.managedFields, \
    application/vnd.kubernetes.protobuf, application/json;drop=metadata.managedFields, application/json";
/// Beginning of protobuf's `Content-Type`.
const PROTOBUF: &[u8] = b"application/vnd.kubernetes.protobuf";
/// Size of the number before each event in protobuf: its length.
const LENGTH_BYTES: usize = 4;

/// One resource of a real API server.
#[derive(Debug)]
pub(super) struct Http {
    api: Arc<Api>,
    resource: Resource,
    shapes: Arc<Mutex<Shapes>>,
}

impl Http {
    pub(super) fn new(api: Arc<Api>, resource: Resource) -> Self {
        Self {
            api,
            resource,
            shapes: Arc::default(),
        }
    }

    async fn get(&self, query: &str) -> Result<Response<Body>, Failure> {
        let selectors = self.resource.selectors();
        let separator = if selectors.is_empty() { "" } else { "&" };
        let accepted = match self.resource.message() {
            Some(_) => ACCEPTED_FIRST,
            None => ACCEPTED,
        };
        let uri = format!("{}?{query}{separator}{selectors}", self.resource.path());
        match self.send(&uri, accepted).await {
            Err(Failure::Forbidden(_)) if self.is_undefined().await => Err(Failure::NotServed),
            answer => answer,
        }
    }

    /// Returns whether no definition (CRD) adds the resource. The server refuses a list of what it does not have, too, if no
    /// right names it.
    async fn is_undefined(&self) -> bool {
        let Resource::ClusterPolicies { .. } = self.resource else {
            return false;
        };
        let Some((version, name)) = self.resource.path().rsplit_once('/') else {
            return false;
        };
        let answer = match self.send(version, ACCEPTED).await {
            Ok(answer) => answer,
            Err(failure) => return failure == Failure::NotServed,
        };
        let body = collect(answer.into_body(), MAX_PAGE_BYTES).await;
        let name = format!("\"{name}\"");
        body.is_ok_and(|body| !body.windows(name.len()).any(|found| found == name.as_bytes()))
    }

    async fn send(&self, uri: &str, accepted: &'static str) -> Result<Response<Body>, Failure> {
        let request = Request::get(uri)
            .header(header::ACCEPT, accepted)
            .body(Body::empty())
            .map_err(|error| Failure::Malformed(error.to_string()))?;
        let client = self.api.client();
        let answer = timeout(PATIENCE, client.send(request))
            .await
            .map_err(|_| Failure::Silent(PATIENCE))?
            .map_err(|error| self.api.failure(&error))?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        Err(refusal(answer).await)
    }
}

impl Transport for Http {
    type Watch = HttpWatch;

    fn resource(&self) -> &Resource {
        &self.resource
    }

    fn set_resource(&mut self, resource: Resource) {
        self.resource = resource;
    }

    async fn page(&mut self, request: &PageRequest) -> Result<ObjectPage, Failure> {
        use std::fmt::Write as _;
        let mut query = format!("limit={}", request.limit);
        if let Some(next) = &request.next {
            // Writing to a string cannot fail.
            let _ = write!(query, "&continue={}", escaped(next));
        }
        let answer = self.get(&query).await?;
        let encoding = encoding(&answer);
        let body = collect(answer.into_body(), MAX_PAGE_BYTES).await?;
        let raw = parse::page(&self.resource, encoding, &body)?;
        let mut page = ObjectPage {
            version: raw.version,
            next: raw.next,
            changed: raw.changed,
            ..ObjectPage::default()
        };
        for item in raw.items {
            match item {
                Ok(Read::Object(object)) => page.objects.push(object),
                Ok(Read::Endpoints(endpoints)) => {
                    let mut shapes = self.shapes.lock();
                    page.objects.extend(shapes.put(&endpoints).0);
                }
                Err(unreadable) => page.unreadable.push(unreadable),
            }
        }
        Ok(page)
    }

    async fn watch(&mut self, version: u64) -> Result<HttpWatch, Failure> {
        let seconds = WATCH_SECONDS + rand::random_range(0..WATCH_SECONDS_SPREAD);
        let query = format!(
            "watch=true&allowWatchBookmarks=true&timeoutSeconds={seconds}&resourceVersion={version}"
        );
        let answer = self.get(&query).await?;
        Ok(HttpWatch {
            encoding: encoding(&answer),
            body: answer.into_body(),
            resource: self.resource.clone(),
            shapes: Arc::clone(&self.shapes),
            buffer: BytesMut::new(),
            scanned: 0,
        })
    }

    async fn renew(&mut self) {
        if let Err(error) = self.api.renew().await {
            tracing::warn!("{error}; continuing with the current credentials");
        }
    }

    fn server(&self) -> String {
        self.api.server()
    }
}

/// An open watch.
#[derive(Debug)]
pub(super) struct HttpWatch {
    encoding: Encoding,
    body: Body,
    resource: Resource,
    shapes: Arc<Mutex<Shapes>>,
    /// Received bytes without a complete event yet.
    buffer: BytesMut,
    /// Number of bytes at the beginning of the buffer that are known to contain no end of a line.
    scanned: usize,
}

impl HttpWatch {
    /// Takes all complete events from the buffer.
    fn events(&mut self) -> Result<Vec<WatchEvent>, Failure> {
        let mut said = Vec::new();
        while let Some(event) = self.event()? {
            if !event.trim_ascii().is_empty() {
                self.hear(&event, &mut said)?;
            }
        }
        if self.buffer.is_empty() {
            // The buffer is replaced, so that its memory is freed after a large burst.
            self.buffer = BytesMut::new();
        }
        Ok(said)
    }

    /// Takes a complete event from the buffer, if there is one.
    fn event(&mut self) -> Result<Option<BytesMut>, Failure> {
        let (event, waiting) = match self.encoding {
            Encoding::Json => {
                let event = self.line();
                (event, self.buffer.len())
            }
            Encoding::Protobuf => self.frame(),
        };
        if event.is_none() && waiting > MAX_EVENT_BYTES {
            return Err(Failure::Malformed(format!(
                "an event of more than {} MiB",
                MAX_EVENT_BYTES >> 20
            )));
        }
        Ok(event)
    }

    fn line(&mut self) -> Option<BytesMut> {
        let end = self.buffer.get(self.scanned..).and_then(memchr);
        let Some(end) = end else {
            self.scanned = self.buffer.len();
            return None;
        };
        let line = self.buffer.split_to(self.scanned + end + 1);
        self.scanned = 0;
        Some(line)
    }

    /// Takes a frame, or returns the size of the one that is not there yet.
    fn frame(&mut self) -> (Option<BytesMut>, usize) {
        let Some(length) = self.buffer.first_chunk::<LENGTH_BYTES>() else {
            return (None, 0);
        };
        let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
        if self.buffer.len() - LENGTH_BYTES < length {
            return (None, length);
        }
        self.buffer.advance(LENGTH_BYTES);
        (Some(self.buffer.split_to(length)), length)
    }

    fn hear(&mut self, event: &[u8], said: &mut Vec<WatchEvent>) -> Result<(), Failure> {
        match parse::event(&self.resource, self.encoding, event)? {
            None => {}
            Some(RawEvent::Put(version, Ok(Read::Object(object)))) => {
                said.push(WatchEvent::Put(object, version));
            }
            Some(RawEvent::Gone(version, Ok(Read::Object(object)))) => {
                said.push(WatchEvent::Gone(object.id(), version));
            }
            Some(RawEvent::Put(version, Ok(Read::Endpoints(endpoints)))) => {
                let (slices, gone) = self.shapes.lock().put(&endpoints);
                said.extend(slices.into_iter().map(|slice| WatchEvent::Put(slice, version)));
                said.extend(gone.into_iter().map(|id| WatchEvent::Gone(id, version)));
            }
            Some(RawEvent::Gone(version, Ok(Read::Endpoints(endpoints)))) => {
                let gone = self.shapes.lock().gone(&endpoints);
                said.extend(gone.into_iter().map(|id| WatchEvent::Gone(id, version)));
            }
            // A deleted object's name is enough, even if the object cannot be read.
            Some(RawEvent::Gone(
                version,
                Err(Unreadable {
                    namespace, name, ..
                }),
            )) => {
                let kind = self.resource.kind();
                let id = ObjectId {
                    kind,
                    namespace,
                    name,
                };
                said.push(WatchEvent::Gone(id, version));
            }
            Some(RawEvent::Put(version, Err(unreadable))) => {
                said.push(WatchEvent::Unreadable(unreadable, version));
            }
            Some(RawEvent::Bookmark(version)) => said.push(WatchEvent::Bookmark(version)),
            Some(RawEvent::Error(failure)) => return Err(failure),
        }
        Ok(())
    }
}

impl Watch for HttpWatch {
    async fn next(&mut self) -> Result<Option<Vec<WatchEvent>>, Failure> {
        loop {
            let Some(frame) = self.body.frame().await else {
                return Ok(None);
            };
            let frame = frame.map_err(|error| Failure::of_client(&error))?;
            if let Ok(data) = frame.into_data() {
                self.buffer.extend_from_slice(&data);
                let said = self.events()?;
                if !said.is_empty() {
                    return Ok(Some(said));
                }
            }
        }
    }
}

/// Returns how an answer is written. A server without protobuf writes JSON.
fn encoding(answer: &Response<Body>) -> Encoding {
    let kind = answer.headers().get(header::CONTENT_TYPE);
    if kind.is_some_and(|kind| kind.as_bytes().starts_with(PROTOBUF)) {
        Encoding::Protobuf
    } else {
        Encoding::Json
    }
}

fn memchr(bytes: &[u8]) -> Option<usize> {
    bytes.iter().position(|byte| *byte == b'\n')
}

/// Reads a whole body. Small bodies usually come in one piece, which costs no copy.
async fn collect(mut body: Body, most: usize) -> Result<Bytes, Failure> {
    let mut all = BytesMut::new();
    loop {
        let frame = timeout(PATIENCE, body.frame()).await;
        let Some(frame) = frame.map_err(|_| Failure::Silent(PATIENCE))? else {
            return Ok(all.freeze());
        };
        let frame = frame.map_err(|error| Failure::of_client(&error))?;
        if let Ok(data) = frame.into_data() {
            if all.len() + data.len() > most {
                let reason = format!("an answer of more than {most} bytes");
                return Err(Failure::Malformed(reason));
            }
            all.extend_from_slice(&data);
        }
    }
}

/// Classifies an answer other than success.
async fn refusal(answer: Response<Body>) -> Failure {
    let code = answer.status();
    let after = answer
        .headers()
        .get(header::RETRY_AFTER)
        .and_then(|value| value.to_str().ok()?.trim().parse().ok());
    let encoding = encoding(&answer);
    let body = collect(answer.into_body(), MAX_STATUS_BYTES).await;
    let status = body.map_or_else(
        |_| Default::default(),
        |body| parse::status(encoding, &body),
    );
    let message = match status.message.as_str() {
        "" => StatusCode::canonical_reason(&code).unwrap_or("no reason given"),
        message => message,
    };
    Failure::of_status(
        code.as_u16(),
        &one_line(message),
        after.map(Duration::from_secs),
    )
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;
    use crate::k8s::Object;
    use crate::kubernetes::Access;

    #[tokio::test]
    async fn k39_lists_are_asked_for_without_managed_fields() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let master = listener.local_addr().unwrap().to_string();
        let api = Api::new(Access::Anonymous { master }, 0).await.unwrap();
        let http = Http::new(Arc::new(api), Resource::Services);
        let served = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";
            stream.write_all(answer).await.unwrap();
            String::from_utf8(head).unwrap()
        };
        let (answer, head) = tokio::join!(http.get("limit=1"), served);
        assert_eq!(answer.unwrap().status(), StatusCode::OK);
        let kind = "application/vnd.kubernetes.protobuf";
        let drop = "drop=metadata.managedFields";
        let accept =
            format!("accept: {kind};{drop}, {kind}, application/json;{drop}, application/json\r\n");
        assert!(head.contains(&accept), "{head}");
    }

    /// Hears bytes that come one by one.
    fn heard(encoding: Encoding, bytes: &[u8]) -> Result<Vec<WatchEvent>, Failure> {
        let mut watch = HttpWatch {
            encoding,
            body: Body::empty(),
            resource: Resource::Services,
            shapes: Arc::default(),
            buffer: BytesMut::new(),
            scanned: 0,
        };
        let mut all = Vec::new();
        for byte in bytes {
            watch.buffer.extend_from_slice(&[*byte]);
            all.extend(watch.events()?);
        }
        Ok(all)
    }

    #[test]
    fn both_encodings_of_a_watch_are_the_same_events_in_any_pieces() {
        let json = heard(Encoding::Json, include_bytes!("parse/answers/watch.json")).unwrap();
        let protobuf = include_bytes!("parse/answers/watch.pb");
        assert_eq!(json, heard(Encoding::Protobuf, protobuf).unwrap());
        assert!(matches!(json[0], WatchEvent::Put(Object::Service(_), 1..)));
        assert_eq!(*json.last().unwrap(), WatchEvent::Bookmark(231));
    }

    #[test]
    fn an_event_that_is_too_large_is_refused_at_its_length() {
        assert_eq!(
            heard(Encoding::Protobuf, &[0, 0, 0, 0, 0, 16]),
            Ok(Vec::new())
        );
        let error = format!("{:?}", heard(Encoding::Protobuf, &[1, 0, 0, 1]));
        assert!(error.contains("more than 16 MiB"), "{error}");
    }
}
