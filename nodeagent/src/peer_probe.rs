//! Connections by which the control plane finds out whether another node is dead.
//!
//! An agent tries the ports of kubelet and of an agent's health checks, and no others, so that a control plane cannot
//! have it search for open ports. Nothing is sent.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, join_all};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use kplane_model::{HEALTHZ_PORT, KUBELET_PORTS};
use kplane_proto::v1 as pb;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Maximum number of nodes in one question.
const NODES: usize = 4;
/// Maximum number of addresses of one node.
const ADDRESSES: usize = 2;
/// Longest time to wait for a node.
const PATIENCE: Duration = Duration::from_millis(500);

/// Finds out which nodes answer. Tests script it.
pub type PeerProbe =
    Arc<dyn Fn(pb::ReachQuestion) -> BoxFuture<'static, pb::Reached> + Send + Sync>;

/// Tries to connect to all nodes of a question at once.
pub fn peer_probe(question: pb::ReachQuestion) -> BoxFuture<'static, pb::Reached> {
    async move {
        let nodes = question.nodes.iter().take(NODES);
        let nodes = join_all(nodes.map(|node| answers(&node.addresses))).await;
        pb::Reached { nodes }
    }
    .boxed()
}

/// Returns whether any port of a node answers: a refusal is an answer, too.
async fn answers(addresses: &[String]) -> bool {
    let addresses = addresses
        .iter()
        .take(ADDRESSES)
        .filter_map(|address| address.parse::<IpAddr>().ok());
    let places = addresses.filter(is_of_a_machine).flat_map(|ip| {
        let [kubelet, _] = KUBELET_PORTS;
        [kubelet, HEALTHZ_PORT].map(|port| SocketAddr::new(ip, port))
    });
    let mut tried: FuturesUnordered<_> = places.map(connects).collect();
    while let Some(answered) = tried.next().await {
        if answered {
            return true;
        }
    }
    false
}

fn is_of_a_machine(ip: &IpAddr) -> bool {
    let is_broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
    !(ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() || is_broadcast)
}

async fn connects(place: SocketAddr) -> bool {
    match timeout(PATIENCE, TcpStream::connect(place)).await {
        Ok(Ok(_)) => true,
        Ok(Err(error)) => error.kind() == ErrorKind::ConnectionRefused,
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(addresses: &[&str]) -> pb::ReachTarget {
        pb::ReachTarget {
            addresses: addresses.iter().map(|address| (*address).into()).collect(),
        }
    }

    #[test]
    fn only_addresses_of_machines_are_tried() {
        let of = |ip: &str| is_of_a_machine(&ip.parse().unwrap());
        assert!(of("192.0.2.1") && of("2001:db8::1"));
        for ip in [
            "127.0.0.1",
            "::1",
            "0.0.0.0",
            "255.255.255.255",
            "224.0.0.1",
            "ff02::1",
        ] {
            assert!(!of(ip), "{ip}");
        }
    }

    /// A refusal is an answer as a connection is, and an error of this machine is none.
    #[tokio::test]
    async fn whoever_answers_is_there() {
        let bound = || {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
            socket
        };
        let (refusing, listening) = (bound(), bound().listen(1).unwrap());
        for (place, is_there) in [
            (listening.local_addr().unwrap(), true),
            (refusing.local_addr().unwrap(), true),
            (SocketAddr::from(([255; 4], 80)), false),
        ] {
            assert_eq!(connects(place).await, is_there, "{place}");
        }
    }

    #[tokio::test]
    async fn a_question_is_bounded_and_what_is_no_address_does_not_answer() {
        let nodes = vec![target(&["nowhere", "127.0.0.1"]); 100];
        let reached = peer_probe(pb::ReachQuestion { nodes }).await;
        assert_eq!(reached.nodes, [false; NODES]);
    }
}
