//! Real tables are read in bounded time, without memory for each entry.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use kplane_dataplane::backend::{AffinityPort, Kind};
use kplane_dataplane::connected::{ConnectedQuestion, connected};
use kplane_model::{Family, KeyParts, Protocol, ServiceKey, ServiceName};
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
            loop {
                match socket.send_to(b"?", to) {
                    Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
                    sent => break sent.map(drop).unwrap(),
                }
            }
            left -= 1;
            if left == 0 {
                return;
            }
        }
    }
}
