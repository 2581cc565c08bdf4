//! Questions to the cluster's DNS that the control plane asks the agent to put, for `kpctl probe --dns`.
//!
//! They are packets of UDP from the node: they pass the rules of Services like those of any program on it.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use kplane_model::Family;
use kplane_proto::v1 as pb;
use tokio::net::UdpSocket;
use tokio::time::{Instant, timeout};

use crate::attempts::{MOST, attempt};

/// Times to wait for an answer to the first packet, and to the one that repeats it: a second in all.
const WAITS: [Duration; 2] = [Duration::from_millis(400), Duration::from_millis(600)];
/// Longest name, and longest label of it, in bytes (RFC 1035, 2.3.4).
const NAME: usize = 253;
const LABEL: u8 = 63;

/// Asks all servers at once; returns the outcomes in the same order.
pub(crate) async fn ask(question: &pb::DnsQuestion) -> Vec<pb::Attempt> {
    let servers = question.servers.iter().take(MOST);
    join_all(servers.map(|server| one(server, &question.name))).await
}

async fn one(server: &str, name: &str) -> pb::Attempt {
    use pb::AttemptOutcome::{Connected, Refused, Silent, Unspecified};
    let (Ok(to), Some(query)) = (server.parse(), query(rand::random(), name)) else {
        let error = "this is no address with a port, or no name to ask for".to_owned();
        return attempt(server, Unspecified, Duration::ZERO, error);
    };
    let start = Instant::now();
    let answer = exchange(to, &query).await;
    let took = start.elapsed();
    match answer {
        Ok(0) => attempt(server, Connected, took, String::new()),
        Ok(code) => attempt(server, Unspecified, took, refusal(code)),
        Err(error) => {
            let outcome = match error.kind() {
                ErrorKind::TimedOut => Silent,
                ErrorKind::ConnectionRefused => Refused,
                _ => Unspecified,
            };
            attempt(server, outcome, took, error.to_string())
        }
    }
}

/// Sends a query, and once more if nothing comes back; returns the answer's code.
async fn exchange(to: SocketAddr, query: &[u8]) -> io::Result<u8> {
    let any = Family::of(to.ip()).unspecified();
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(to).await?;
    for wait in WAITS {
        socket.send(query).await?;
        if let Ok(code) = timeout(wait, receive(&socket, query)).await {
            return code;
        }
    }
    Err(ErrorKind::TimedOut.into())
}

/// Waits for the answer to a query; returns its code.
async fn receive(socket: &UdpSocket, query: &[u8]) -> io::Result<u8> {
    let mut answer = [0; 512];
    loop {
        let length = socket.recv(&mut answer).await?;
        let answer = answer.get(..length).unwrap_or_default();
        if let Some(code) = code(query, answer) {
            return Ok(code);
        }
    }
}

/// Returns a query for the IPv4 address of a name (RFC 1035, 4.1); `None` if it is no name.
fn query(id: u16, name: &str) -> Option<Vec<u8>> {
    let name = name.trim_end_matches('.');
    let mut query = id.to_be_bytes().to_vec();
    // Recursion is desired; one question.
    query.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in name.split('.') {
        let length = u8::try_from(label.len()).ok()?;
        (1..=LABEL).contains(&length).then_some(())?;
        query.push(length);
        query.extend(label.as_bytes());
    }
    // The root, type A, class IN.
    query.extend([0, 0, 1, 0, 1]);
    (name.len() <= NAME).then_some(query)
}

/// Returns the code of an answer (RFC 1035, 4.1.1); `None` if it is not the answer to this query.
fn code(query: &[u8], answer: &[u8]) -> Option<u8> {
    const IS_ANSWER: u8 = 0x80;
    let &[high, low, flags, code] = answer.first_chunk()?;
    let is_ours = query.starts_with(&[high, low]) && flags & IS_ANSWER != 0;
    is_ours.then_some(code & 0x0f)
}

/// Returns what a code says (RFC 1035, 4.1.1).
fn refusal(code: u8) -> String {
    match code {
        2 => "the DNS server answers that it failed (SERVFAIL)".to_owned(),
        3 => "the DNS server answers that there is no such name (NXDOMAIN)".to_owned(),
        5 => "the DNS server refuses the question (REFUSED)".to_owned(),
        code => format!("the DNS server answers with RCODE {code}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_as_rfc_1035_has_it() {
        let wanted = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x0akubernetes\x07default\0\0\x01\0\x01";
        for name in ["kubernetes.default", "kubernetes.default."] {
            assert_eq!(query(0x1234, name).unwrap(), wanted);
        }
        let long = [&"a.".repeat(126), "bcd"].concat();
        for name in ["", "a..b", &"x".repeat(64), &long] {
            assert_eq!(query(1, name), None, "{name}");
        }
    }

    #[test]
    fn only_the_answer_to_the_query_counts() {
        let query = query(0x1234, "a").unwrap();
        assert_eq!(code(&query, &query), None, "the query itself");
        assert_eq!(code(&query, b"\x12\x34\x81"), None, "cut");
        assert_eq!(code(&query, b"\x12\x35\x81\x80\0\x01"), None, "another's");
        assert_eq!(code(&query, b"\x12\x34\x81\x83\0\x01"), Some(3));
    }

    #[tokio::test]
    async fn each_outcome_is_said_and_a_lost_packet_is_sent_again() {
        let [good, silent, closed] = [(); 3].map(|()| UdpSocket::bind("127.0.0.1:0"));
        let (good, silent, closed) = (
            good.await.unwrap(),
            silent.await.unwrap(),
            closed.await.unwrap(),
        );
        let servers = [&good, &silent, &closed].map(|of| of.local_addr().unwrap().to_string());
        drop(closed);
        let server = tokio::spawn(async move {
            let mut packet = [0; 512];
            // The first packet is lost.
            good.recv_from(&mut packet).await.unwrap();
            let (length, from) = good.recv_from(&mut packet).await.unwrap();
            packet[2] |= 0x80;
            good.send_to(&packet[..length], from).await.unwrap();
        });
        let question = pb::DnsQuestion {
            name: "kubernetes.default".to_owned(),
            servers: [&servers[..], &["nowhere".to_owned()]].concat(),
        };
        let tried = ask(&question).await;
        server.await.unwrap();
        let outcomes: Vec<_> = tried.iter().map(pb::Attempt::outcome).collect();
        let expected = [
            pb::AttemptOutcome::Connected,
            pb::AttemptOutcome::Silent,
            pb::AttemptOutcome::Refused,
            pb::AttemptOutcome::Unspecified,
        ];
        assert_eq!(outcomes, expected, "{tried:?}");
    }
}
