//! The kernel's reports of connections: only those that a rule leads elsewhere come, with their ends.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use kplane_netlink::Monitor;
use kplane_netlink::conntrack::{Ending, Reported};
use kplane_rig::kernel::{in_netns, nft};
use kplane_rig::wait::eventually;

const WITHIN: Duration = Duration::from_secs(10);

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
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status();
    assert!(up.unwrap().success());
    nft(&["-f", "-"], RULES);
}

#[test]
fn the_kernel_itself_keeps_back_what_is_not_translated() {
    in_netns(|| {
        track();
        let endpoint: SocketAddr = ([127, 0, 0, 5], 80).into();
        let service: SocketAddr = ([127, 0, 0, 100], 80).into();
        let mut monitor = Monitor::of_connections(true).unwrap();
        // Untranslated: established, and refused. Refused entries end at once.
        let server = TcpListener::bind(endpoint).unwrap();
        drop(TcpStream::connect(endpoint).unwrap());
        let refusing = SocketAddr::from(([127, 0, 0, 5], 81));
        assert!(TcpStream::connect(refusing).is_err());
        drop(TcpStream::connect(service).unwrap());
        drop(server);
        assert!(TcpStream::connect(service).is_err());
        let mut seen = Vec::new();
        let mut messages = 0;
        eventually(WITHIN, "both connections are reported", || {
            let whole = monitor.drain(|message| {
                messages += 1;
                seen.extend(Reported::parse(message));
            });
            assert!(whole);
            let ends: Vec<_> = seen.iter().map(|of| of.ending).collect();
            if ends == [None, None, Some(Ending::Failed)] {
                Ok(())
            } else {
                Err(format!("{ends:?}"))
            }
        })
        .unwrap();
        let (service, endpoint) = (Some(service), Some(endpoint));
        for of in &seen {
            let ends = (Some(of.connection.to), Some(of.connection.endpoint));
            assert_eq!(ends, (service, endpoint));
        }
        assert_eq!(messages, seen.len());
    });
}
