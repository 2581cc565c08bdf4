//! Connections that the control plane asks the agent to try, for `kpctl why --try`.
//!
//! They are plain TCP connections of the node: they pass the rules of Services like those of any program on it. Nothing
//! is sent.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use kplane_proto::v1 as pb;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

/// Maximum number of connections for one question: 16 endpoints, and the Service itself.
pub(crate) const MOST: usize = 17;
/// Longest time to wait for each of them.
const PATIENCE: Duration = Duration::from_secs(1);

/// Tries to connect to all addresses at once; returns the outcomes in the same order.
pub(crate) async fn connect(addresses: &[String]) -> Vec<pb::Attempt> {
    join_all(addresses.iter().take(MOST).map(|address| one(address))).await
}

/// Returns what became of one of them.
pub(crate) fn attempt(
    address: &str,
    outcome: pb::AttemptOutcome,
    took: Duration,
    error: String,
) -> pb::Attempt {
    pb::Attempt {
        address: address.to_owned(),
        outcome: outcome.into(),
        took_us: u32::try_from(took.as_micros()).unwrap_or(u32::MAX),
        error,
    }
}

async fn one(address: &str) -> pb::Attempt {
    let attempt = |outcome, took, error| attempt(address, outcome, took, error);
    let Ok(to) = address.parse::<SocketAddr>() else {
        let error = "this is no address with a port".to_owned();
        return attempt(pb::AttemptOutcome::Unspecified, Duration::ZERO, error);
    };
    let start = Instant::now();
    let connected = timeout(PATIENCE, TcpStream::connect(to)).await;
    let took = start.elapsed();
    match connected {
        Ok(Ok(_)) => attempt(pb::AttemptOutcome::Connected, took, String::new()),
        Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => {
            attempt(pb::AttemptOutcome::Refused, took, error.to_string())
        }
        Ok(Err(error)) => attempt(pb::AttemptOutcome::Unspecified, took, error.to_string()),
        Err(_) => attempt(pb::AttemptOutcome::Silent, took, String::new()),
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn each_outcome_is_said() {
        let open = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addresses = [&open, &closed].map(|socket| socket.local_addr().unwrap().to_string());
        drop(closed);
        let [open, closed] = addresses;
        let tried = connect(&[open, closed, "nowhere".to_owned()]).await;
        let outcomes: Vec<_> = tried.iter().map(pb::Attempt::outcome).collect();
        let expected = [
            pb::AttemptOutcome::Connected,
            pb::AttemptOutcome::Refused,
            pb::AttemptOutcome::Unspecified,
        ];
        assert_eq!(outcomes, expected, "{tried:?}");
        let many = vec!["nowhere".to_owned(); 100];
        assert_eq!(connect(&many).await.len(), MOST);
    }
}
