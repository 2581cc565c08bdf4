//! Real tables are read in bounded time, without memory for each entry.

use std::io::{Error, ErrorKind};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use kplane_dataplane::backend::{AffinityPort, Kind};
use kplane_dataplane::connected::{ConnectedQuestion, connected};
use kplane_model::{Family, KeyParts, Protocol, ServiceKey, ServiceName};
use kplane_netlink::NfSocket;
use kplane_netlink::conntrack::Selection;
use kplane_rig::kernel::in_netns;
use nix::sys::resource::{UsageWho, getrusage};

use crate::reported::track;

/// Number of entries in the large table.
const MANY: u32 = 100_000;
const WITHIN: Duration = Duration::from_secs(4);

#[test]
fn a_huge_table_is_read_in_bounded_time_and_memory() {
    in_netns(|| {
        track();
        fill();
        let address = |last| IpAddr::from([127, 1, 0, last]);
        let question = ConnectedQuestion {
            ports: vec![AffinityPort {
                key: ServiceKey::from(KeyParts {
                    service: ServiceName::new("shop", "dns"),
                    port_name: "dns".into(),
                    protocol: Protocol::Udp,
                    family: Family::V4,
                }),
                addresses: vec![address(1), address(2)],
                port: 1_007,
                node_port: None,
                endpoints: Vec::new(),
            }],
            ..ConnectedQuestion::default()
        };
        let memory = || getrusage(UsageWho::RUSAGE_SELF).unwrap().max_rss();
        let (before, start) = (memory(), Instant::now());
        let listed = connected(Kind::Iptables, None, &question, WITHIN).unwrap();
        let (took, grew) = (start.elapsed(), memory() - before);
        println!("{} entries read in {took:?}, {grew} KiB more", listed.read);
        assert!(listed.read >= u64::from(MANY), "{}", listed.read);
        assert!(took < WITHIN && grew < 4 << 10, "{took:?}, {grew} KiB");
        let late = connected(Kind::Nftables, None, &question, Duration::ZERO).unwrap_err();
        assert!(late.contains("too many entries"), "{late}");
        // The kernel finds the flows of one end.
        let [from, to] = [[127, 0, 0, 8], [127, 2, 0, 1]].map(IpAddr::from);
        UdpSocket::bind((from, 0)).unwrap().send_to(b"?", (to, 53)).unwrap();
        for selection in [Selection::From(from), Selection::RepliesFrom(to, None)] {
            let (mut listed, mut socket) = (0, NfSocket::open().unwrap());
            socket.dump_each(selection.request(Family::V4), |_| listed += 1).unwrap();
            assert_eq!(listed, 1, "{selection:?}");
        }
    });
}

/// Fills the table with flows of UDP.
fn fill() {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut left = MANY;
    for ip in 1_u8.. {
        for port in 1_000_u16..60_000 {
            let to = SocketAddr::new(IpAddr::from([127, 1, 0, ip]), port);
            // Nobody listens, which the next call says.
            let refused = |error: Error| error.kind() == ErrorKind::ConnectionRefused;
            while socket.send_to(b"?", to).is_err_and(refused) {}
            left -= 1;
            if left == 0 {
                return;
            }
        }
    }
}
