//! The few requests to etcd itself, over its JSON gateway.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::server::ETCD_PORT;

/// Longest wait: etcd answers at once or hangs.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Compacts all revisions but the newest, and returns that one. Call it inside the namespace.
pub(super) fn compact() -> Result<i64> {
    // Any key will do: the answer's header has the revision.
    let answer = post("/v3/kv/range", &json!({ "key": "AA==" }))?;
    let revision: i64 = answer["header"]["revision"]
        .as_str()
        .with_context(|| format!("no revision in {answer}"))?
        .parse()?;
    let order = json!({ "revision": revision, "physical": true });
    post("/v3/kv/compaction", &order)?;
    Ok(revision)
}

/// Checks that etcd serves. Call it inside the namespace.
pub(super) fn is_ready() -> Result<()> {
    post("/v3/kv/range", &json!({ "key": "AA==" })).map(drop)
}

/// Sends a request over HTTP/1.0, so that the answer ends with the connection.
fn post(path: &str, body: &Value) -> Result<Value> {
    let body = body.to_string();
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, ETCD_PORT))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    write!(
        stream,
        "POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no answer of HTTP from etcd")?;
    let status = head.lines().next().unwrap_or_default();
    ensure!(status.contains(" 200"), "etcd: {path}: {status}: {body}");
    serde_json::from_str(body).with_context(|| format!("etcd: {path}: {body}"))
}
