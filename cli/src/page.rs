//! The control plane's page, for a browser on this machine: a small server on a loopback address, which forwards requests
//! with the user's credentials.
//!
//! A program that reaches the server acts with the user's rights. So it listens on loopback only, answers under a path that no
//! other program can guess, accepts requests that name its own address, which other sites' scripts cannot (DNS rebinding),
//! and forwards to the page and to nothing else.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use http::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST, TRANSFER_ENCODING,
};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::{LocalSet, spawn_local};
use tonic::body::Body;
use tower::{Service as _, ServiceExt as _};

use crate::client::{Error, Line};
use crate::connection::{Route, plane_cause};

/// The path of the page at the control plane.
const PAGE: &str = "/page/";
/// Bytes of the path that nobody can guess.
const SECRET_BYTES: usize = 16;
/// Connections of browsers at a time.
const CONNECTIONS: usize = 32;

type Answer = Response<Body>;

/// The server for browsers.
pub(crate) struct PageServer {
    listener: TcpListener,
    place: PageAddress,
    link: Uplink,
}

/// The address of the server.
#[derive(Debug)]
struct PageAddress {
    address: SocketAddr,
    /// The path before [`PAGE`], with a slash at its beginning.
    prefix: String,
}

impl PageServer {
    /// Opens a port on a loopback address; 0 = a free one.
    pub(crate) async fn open(line: Line, route: Route, port: u16) -> std::io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", port)).await?;
        let secret: [u8; SECRET_BYTES] = rand::random();
        let secret: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
        let place = PageAddress {
            address: listener.local_addr()?,
            prefix: format!("/{secret}"),
        };
        Ok(Self {
            listener,
            place,
            link: Uplink(Mutex::new((Some(line), route))),
        })
    }

    /// Returns the address for a browser.
    pub(crate) fn url(&self) -> String {
        let PageAddress { address, prefix } = &self.place;
        format!("http://{address}{prefix}{PAGE}")
    }

    /// Serves browsers; never ends by itself.
    pub(crate) async fn serve(self) -> std::io::Result<Infallible> {
        let Self {
            listener,
            place,
            link,
        } = self;
        let parts = Rc::new((place, link));
        let room = Arc::new(Semaphore::new(CONNECTIONS));
        let serve = async move {
            loop {
                // The semaphore is never closed.
                let seat = Arc::clone(&room).acquire_owned().await.ok();
                let (stream, _) = listener.accept().await?;
                let parts = Rc::clone(&parts);
                spawn_local(async move {
                    converse(stream, parts).await;
                    drop(seat);
                });
            }
        };
        LocalSet::new().run_until(serve).await
    }
}

/// Answers the requests of one connection.
async fn converse(stream: TcpStream, parts: Rc<(PageAddress, Uplink)>) {
    let service = service_fn(move |request| {
        let parts = Rc::clone(&parts);
        async move { Ok::<_, Infallible>(answer(&parts, &request).await) }
    });
    // A browser that goes away is no news.
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

async fn answer((place, link): &(PageAddress, Uplink), request: &Request<Incoming>) -> Answer {
    match place.forwarded(request) {
        Ok(path) => link
            .ask(&path, request.headers())
            .await
            .unwrap_or_else(|error| text(StatusCode::BAD_GATEWAY, &error.to_string())),
        Err((code, reason)) => text(code, reason),
    }
}

fn text(code: StatusCode, text: &str) -> Answer {
    let body = Full::new(Bytes::from(format!("{text}\n")));
    let mut answer = Response::new(Body::new(body.map_err(|never| match never {})));
    *answer.status_mut() = code;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    answer.headers_mut().insert(CONTENT_TYPE, plain);
    answer
}

impl PageAddress {
    /// Returns the control plane's path and query for a request, or the reason why it is not forwarded.
    fn forwarded<B>(&self, request: &Request<B>) -> Result<String, (StatusCode, &'static str)> {
        let host = request.headers().get(HOST);
        let host = host.and_then(|host| host.to_str().ok());
        if host != Some(&*self.address.to_string()) {
            return Err((StatusCode::FORBIDDEN, "this server has another name"));
        }
        let uri = request.uri();
        let path = uri.path().strip_prefix(&*self.prefix);
        let path = path.filter(|path| path.starts_with(PAGE) && !path.contains("..")).ok_or((
            StatusCode::NOT_FOUND,
            "nothing is here: open the address that kpctl page has printed",
        ))?;
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return Err((StatusCode::METHOD_NOT_ALLOWED, "the page only shows things"));
        }
        Ok(match uri.query() {
            Some(query) => format!("{path}?{query}"),
            None => path.to_owned(),
        })
    }
}

/// The way to the control plane, which is made anew when it breaks or when the credentials end.
struct Uplink(Mutex<(Option<Line>, Route)>);

impl Uplink {
    /// Asks for a path. A lost connection is made anew once.
    async fn ask(&self, path: &str, headers: &HeaderMap) -> Result<Answer, Error> {
        let mut last = false;
        loop {
            let line = self.line().await?;
            match line.ask(path, headers).await {
                Ok(answer) if answer.status() == StatusCode::UNAUTHORIZED && !last => {
                    self.forget(true).await;
                }
                Err(_) if !last => self.forget(false).await,
                answer => return answer.map(returned),
            }
            last = true;
        }
    }

    async fn line(&self) -> Result<Line, Error> {
        let (line, route) = &mut *self.0.lock().await;
        match line {
            Some(line) => Ok(line.clone()),
            None => {
                let new = Line::open(route).await?;
                Ok(line.insert(new).clone())
            }
        }
    }

    async fn forget(&self, credentials: bool) {
        let (line, route) = &mut *self.0.lock().await;
        *line = None;
        if credentials {
            route.forget_credentials();
        }
    }
}

impl Line {
    async fn ask(&self, path: &str, headers: &HeaderMap) -> Result<Answer, Error> {
        let mut request = Request::new(Body::empty());
        // The path comes from a request that was parsed.
        *request.uri_mut() = path.parse().map_err(|_| self.lost("the path is invalid"))?;
        for name in [ACCEPT, ACCEPT_ENCODING] {
            if let Some(value) = headers.get(&name) {
                request.headers_mut().insert(name, value.clone());
            }
        }
        if let Some(token) = self.bearer.header() {
            request.headers_mut().insert(AUTHORIZATION, token.clone());
        }
        let mut channel = self.channel.clone();
        let ready = channel.ready().await.map_err(|error| self.lost(&plane_cause(&error)))?;
        let answer = ready.call(request);
        // Only the head: a stream of changes has no end.
        match tokio::time::timeout(self.timeout, answer).await {
            Ok(answer) => answer.map_err(|error| self.lost(&plane_cause(&error))),
            Err(_) => Err(Error::Timeout {
                server: self.server.clone(),
                timeout: self.timeout,
            }),
        }
    }
}

/// Removes what is about the connection to the control plane.
fn returned(mut answer: Answer) -> Answer {
    *answer.version_mut() = http::Version::HTTP_11;
    for name in [CONNECTION, TRANSFER_ENCODING] {
        answer.headers_mut().remove(name);
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> PageAddress {
        PageAddress {
            address: ([127, 0, 0, 1], 4321).into(),
            prefix: "/5ec2e7".to_owned(),
        }
    }

    fn ask(host: &str, path: &str, method: Method) -> Result<String, StatusCode> {
        let request =
            Request::builder().uri(path).header(HOST, host).method(method).body(()).unwrap();
        place().forwarded(&request).map_err(|(code, _)| code)
    }

    #[test]
    fn only_the_page_is_forwarded_and_only_to_those_who_know_the_path() {
        let host = "127.0.0.1:4321";
        let get = |path: &str| ask(host, path, Method::GET);
        assert_eq!(
            get("/5ec2e7/page/nodes?state=x").unwrap(),
            "/page/nodes?state=x"
        );
        for path in [
            "/",
            "/page/",
            "/5ec2e7",
            "/5ec2e7/kplane.v1.StatusService/Approve",
            "/5ec2e7/page/../kplane.v1.StatusService/Approve",
            "/5ec2e8/page/",
        ] {
            assert_eq!(get(path), Err(StatusCode::NOT_FOUND), "{path}");
        }
    }

    #[test]
    fn other_names_and_methods_are_refused() {
        let path = "/5ec2e7/page/";
        for host in [
            "evil.example:4321",
            "localhost:4321",
            "127.0.0.1",
            "127.0.0.1:4322",
        ] {
            assert_eq!(
                ask(host, path, Method::GET),
                Err(StatusCode::FORBIDDEN),
                "{host}"
            );
        }
        let post = ask("127.0.0.1:4321", path, Method::POST);
        assert_eq!(post, Err(StatusCode::METHOD_NOT_ALLOWED));
    }
}
