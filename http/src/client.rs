//! A small HTTP client for tests and tools.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Time limit of one step.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// A response.
#[derive(Clone, Debug)]
pub struct Reply {
    /// The status code.
    pub status: u16,
    /// Header fields; names are in lower case.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: String,
}

impl Reply {
    /// Returns a header field by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        let header = self.headers.iter().find(|(key, _)| key == name);
        header.map(|(_, value)| value.as_str())
    }
}

/// Sends a request; returns `None` when no server listens or the connection breaks.
pub async fn ask(address: SocketAddr, request: &str) -> Option<Reply> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let mut lines = head.lines();
    let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let headers = lines.filter_map(|line| line.split_once(": "));
    Some(Reply {
        status,
        headers: headers
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect(),
        body: body.to_owned(),
    })
}

/// Sends a plain GET request.
pub async fn get(address: SocketAddr, path: &str) -> Option<Reply> {
    ask(address, &format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")).await
}

/// Repeats a GET request until `wanted` accepts the reply. `None` means that no server listens.
pub async fn until(
    address: SocketAddr,
    path: &str,
    wanted: impl Fn(Option<&Reply>) -> bool,
) -> Option<Reply> {
    let deadline = std::time::Instant::now() + DEADLINE;
    loop {
        let reply = get(address, path).await;
        if wanted(reply.as_ref()) {
            return reply;
        }
        assert!(
            std::time::Instant::now() < deadline,
            "{address} stays {reply:?}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Repeats a GET request until the reply has a given status code.
#[expect(
    clippy::unwrap_used,
    reason = "there is an answer: the condition asks for one"
)]
pub async fn becomes(address: SocketAddr, path: &str, status: u16) -> Reply {
    let reply = until(address, path, |reply| {
        reply.is_some_and(|r| r.status == status)
    })
    .await;
    reply.unwrap()
}
