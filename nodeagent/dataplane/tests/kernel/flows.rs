//! Flows are counted in real tables: exactly, in bounded time, without memory for each.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use kplane_dataplane::backend::Kind;
use kplane_dataplane::flows::{FlowTarget, count};
use kplane_model::Protocol;
use kplane_rig::kernel::{in_netns, nft};
use nix::sys::resource::{UsageWho, getrusage};

/// Number of entries in the large table.
const MANY: u32 = 100_000;
const WITHIN: Duration = Duration::from_secs(4);

/// Rules that lead an address of a Service to an endpoint, and make the kernel track all flows.
const RULES: &str = "
table ip t {
    chain out {
        type nat hook output priority -100; policy accept;
        ip daddr 127.0.0.100 tcp dport 80 dnat to 127.0.0.5
    }
}
table ip6 t {
    chain out {
        type filter hook output priority 0; policy accept;
        ct state new accept
    }
}
";

/// Makes the kernel track the flows of the loopback interface.
pub(crate) fn track() {
    let up = Command::new("ip")
        .args(["link", "set", "lo", "up"])
        .status();
    assert!(up.unwrap().success());
    nft(&["-f", "-"], RULES);
}

fn target(at: SocketAddr, protocol: Protocol) -> FlowTarget {
    FlowTarget {
        ip: at.ip(),
        port: Some((protocol, at.port())),
    }
}

#[test]
fn flows_are_counted_by_endpoint_and_closed_ones_are_not() {
    in_netns(|| {
        track();
        let endpoint: SocketAddr = ([127, 0, 0, 5], 80).into();
        let six: SocketAddr = "[::1]:5353".parse().unwrap();
        let server = TcpListener::bind(endpoint).unwrap();
        let connect = |to: [u8; 4]| {
            let client = TcpStream::connect(SocketAddr::from((to, 80))).unwrap();
            (client, server.accept().unwrap().0)
        };
        let through: Vec<_> = (0..3).map(|_| connect([127, 0, 0, 100])).collect();
        let direct = connect([127, 0, 0, 5]);
        let udp = UdpSocket::bind("[::1]:0").unwrap();
        udp.send_to(b"?", six).unwrap();
        let targets = [
            target(endpoint, Protocol::Tcp),
            target(six, Protocol::Udp),
            target(endpoint, Protocol::Udp),
            FlowTarget {
                ip: endpoint.ip(),
                port: None,
            },
        ];
        let counts = |targets: &[FlowTarget]| {
            let counts = count(Kind::Nftables, targets, WITHIN).unwrap().counts;
            let counts = counts.iter().map(|count| (count.flows, count.direct));
            counts.collect::<Vec<_>>()
        };
        // All at once, and each selected by the kernel.
        assert_eq!(counts(&targets), [(3, 1), (0, 1), (0, 0), (3, 1)]);
        for (target, expected) in targets.iter().zip([(3, 1), (0, 1), (0, 0), (3, 1)]) {
            assert_eq!(counts(&[*target]), [expected], "{target:?}");
        }
        drop((through, direct));
        let until = Instant::now() + WITHIN;
        while counts(&targets[..1]) != [(0, 0)] {
            assert!(Instant::now() < until, "{:?}", counts(&targets));
        }
    });
}

#[test]
fn a_huge_table_is_counted_in_bounded_time_and_memory() {
    in_netns(|| {
        track();
        fill();
        let some: SocketAddr = ([127, 1, 0, 1], 1_007).into();
        let other: SocketAddr = ([127, 1, 0, 1], 1_008).into();
        let all = [target(some, Protocol::Udp), target(other, Protocol::Udp)];
        let memory = || getrusage(UsageWho::RUSAGE_SELF).unwrap().max_rss();
        for targets in [&all[..1], &all[..]] {
            let (before, start) = (memory(), Instant::now());
            let counted = count(Kind::Iptables, targets, WITHIN).unwrap();
            let (took, grew) = (start.elapsed(), memory() - before);
            println!("{} entries read in {took:?}, {grew} KiB more", counted.read);
            assert!(counted.counts.iter().all(|count| count.direct == 1));
            if targets.len() > 1 {
                assert!(counted.read >= u64::from(MANY), "{}", counted.read);
            }
            assert!(took < WITHIN && grew < 4 << 10, "{took:?}, {grew} KiB");
        }
        let late = count(Kind::Nftables, &all, Duration::ZERO).unwrap_err();
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
