//! Ports that belong to the cluster's own programs, so that no Service may use them.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::net::Protocol;

/// Ports on which kubelet listens: its API (10250) and its health checks (10248).
pub const KUBELET_PORTS: [u16; 2] = [10250, 10248];

/// Default port of the health checks of kube-proxy and of an agent.
pub const HEALTHZ_PORT: u16 = 10256;

/// Default port of the metrics of kube-proxy and of an agent.
pub const METRICS_PORT: u16 = 10249;

/// Default mark of kplane's own connections. Rules compare the whole mark, so that other marks with
/// the same bits do not match. No other known program uses its bits: not kube-proxy (0x4000,
/// 0x8000), CNI portmap (0x2000), AWS (0x80), Cilium (0xf00), Weave, Tailscale or Calico (0x10000
/// and up). Bit 0 is avoided because many examples use it.
pub const OWN_MARK: u32 = 0x50;

/// The program that listens on a reserved port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Holder {
    /// kplane's control plane.
    ControlPlane,
    /// kplane's node agents.
    NodeAgent,
    /// kubelet.
    Kubelet,
    /// The Kubernetes API server.
    ApiServer,
    /// Another program that clusters have, with its name.
    Known(&'static str),
    /// A program of the node's own: ports below [`FIRST_FREE_PORT`].
    Node,
    /// A port that the operator listed.
    Listed,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ControlPlane => "kplane's control plane listens",
            Self::NodeAgent => "kplane's node agent listens",
            Self::Kubelet => "kubelet listens",
            Self::ApiServer => "the Kubernetes API server listens",
            Self::Known(name) => {
                return write!(f, "{name} listens ({EXCEPTIONS})");
            }
            Self::Node => {
                return write!(
                    f,
                    "a program of the node may listen, as on all ports below {FIRST_FREE_PORT} ({EXCEPTIONS})"
                );
            }
            Self::Listed => "no Service may be (--reserved-ports)",
        })
    }
}

/// Where an operator allows ports of [`usual_holder`].
const EXCEPTIONS: &str = "--allow-external-ips lists exceptions";

/// The first port on which Linux lets unprivileged programs listen (`ip_unprivileged_port_start`). The programs to which
/// people log in, and those that routers and DNS clients trust, listen below it: sshd, bgpd, DNS servers.
pub const FIRST_FREE_PORT: u16 = 1024;

/// Ports of programs that most clusters have on their nodes: kubernetes.io/docs/reference/networking/ports-and-protocols,
/// etcd's metrics, the cloud's controllers, the exporter that nearly every monitoring has, and the tunnels in which a pod
/// network carries all packets of other Pods (RFC 7348, Linux' own VXLAN port, RFC 8926, Flannel's and Calico's
/// WireGuard).
const USUAL: [(RangeInclusive<u16>, Protocol, Holder); 12] = {
    use Protocol::{Tcp, Udp};
    const TUNNEL: Holder = Holder::Known("a tunnel of the pod network");
    [
        (2379..=2381, Tcp, Holder::Known("etcd")),
        (6443..=6443, Tcp, Holder::ApiServer),
        (9100..=9100, Tcp, Holder::Known("the node exporter")),
        (10255..=10255, Tcp, Holder::Kubelet),
        (10257..=10257, Tcp, Holder::Known("kube-controller-manager")),
        (
            10258..=10258,
            Tcp,
            Holder::Known("cloud-controller-manager"),
        ),
        (10259..=10259, Tcp, Holder::Known("kube-scheduler")),
        (4789..=4789, Udp, TUNNEL),
        (6081..=6081, Udp, TUNNEL),
        (8472..=8472, Udp, TUNNEL),
        (51820..=51821, Udp, TUNNEL),
        // Cilium's WireGuard.
        (51871..=51871, Udp, TUNNEL),
    ]
};

/// Returns the program that usually listens at a port of a node's address. An operator may know better.
pub fn usual_holder(protocol: Protocol, port: u16) -> Option<Holder> {
    let known = USUAL.iter().find(|(range, of, _)| *of == protocol && range.contains(&port));
    let node = || (port < FIRST_FREE_PORT).then_some(Holder::Node);
    known.map(|(_, _, holder)| *holder).or_else(node)
}

/// A range of ports, first and last included; both are in 1..=65535.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    first: u16,
    last: u16,
}

impl PortRange {
    /// Creates a range of one port.
    pub fn single(port: u16) -> Self {
        Self {
            first: port,
            last: port,
        }
    }

    /// Returns whether a port is inside.
    pub fn contains(self, port: u16) -> bool {
        RangeInclusive::new(self.first, self.last).contains(&port)
    }
}

/// The error for text that is neither a port nor a range of ports.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither a port nor a range of ports: use a form such as 22 or 2379-2380")]
pub struct ParsePortRangeError(pub String);

impl FromStr for PortRange {
    type Err = ParsePortRangeError;

    /// Parses `22` or `2379-2380`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let port = |text: &str| {
            let digits = text.bytes().all(|b| b.is_ascii_digit());
            text.parse().ok().filter(|port| digits && *port != 0)
        };
        let range = || {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            let (first, last) = (port(first)?, port(last)?);
            (first <= last).then_some(Self { first, last })
        };
        range().ok_or_else(|| ParsePortRangeError(text.to_owned()))
    }
}

/// Ports that are reserved on a set of addresses, such as every node's addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReservedPorts {
    /// Port ranges, each for one protocol (`None` = all), and the program that listens there.
    rules: Vec<(PortRange, Option<Protocol>, Holder)>,
}

impl ReservedPorts {
    /// Adds a TCP port.
    #[must_use]
    pub fn with(mut self, port: u16, holder: Holder) -> Self {
        let rule = (PortRange::single(port), Some(Protocol::Tcp), holder);
        if port != 0 && !self.rules.contains(&rule) {
            self.rules.push(rule);
        }
        self
    }

    /// Adds ports that the operator lists, for all protocols.
    #[must_use]
    pub fn and_listed(mut self, ports: impl IntoIterator<Item = PortRange>) -> Self {
        let rules = ports.into_iter().map(|range| (range, None, Holder::Listed));
        self.rules.extend(rules);
        self
    }

    /// Returns the holder of a port, if the port is reserved.
    pub fn holder(&self, protocol: Protocol, port: u16) -> Option<Holder> {
        let (_, _, holder) = self.rules.iter().find(|(range, only, _)| {
            range.contains(port) && only.is_none_or(|only| only == protocol)
        })?;
        Some(*holder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_as_people_write_them() {
        let range: PortRange = "2379-2380".parse().unwrap();
        let inside = [2378, 2379, 2380, 2381].map(|port| range.contains(port));
        assert_eq!(inside, [false, true, true, false]);
        assert_eq!("22".parse(), Ok(PortRange::single(22)));
        for wrong in [
            "", "0", "-", "22-", "-22", "3-2", "65536", "+22", "22-23-24", "ssh", "1 ",
        ] {
            assert!(wrong.parse::<PortRange>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn ports_that_programs_of_nodes_usually_have() {
        let taken = [
            22, 53, 179, 1023, 2379, 2380, 6443, 9100, 10255, 10257, 10259,
        ];
        let free = [1024, 2378, 4789, 8080, 10260, 30000];
        let tcp = |port: &u16| usual_holder(Protocol::Tcp, *port).is_some();
        assert!(taken.iter().all(tcp) && !free.iter().any(tcp));
        let udp = [53, 4789, 8472, 51820, 2379].map(|port| usual_holder(Protocol::Udp, port));
        assert_eq!(
            udp.map(|holder| holder.is_some()),
            [true, true, true, true, false]
        );
        let line = Holder::Known("etcd").to_string();
        assert_eq!(line, "etcd listens (--allow-external-ips lists exceptions)");
    }

    #[test]
    fn programs_hold_tcp_ports_and_the_operator_holds_all_protocols() {
        let ports = ReservedPorts::default()
            .with(10250, Holder::Kubelet)
            .with(0, Holder::ControlPlane)
            .and_listed(["53".parse().unwrap()]);
        assert_eq!(ports.holder(Protocol::Tcp, 10250), Some(Holder::Kubelet));
        assert_eq!(ports.holder(Protocol::Udp, 10250), None);
        assert_eq!(ports.holder(Protocol::Udp, 53), Some(Holder::Listed));
        assert_eq!(ports.holder(Protocol::Tcp, 0), None);
    }
}
