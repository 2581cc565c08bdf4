//! Restrictions of the operator on what Services may have; they are the same for all Services.
//!
//! Anyone who may write a Service may name any address in it (CVE-2020-8554). Some addresses with a
//! port are reserved, because the cluster's own programs listen there. A Service at the control
//! plane's own address would take over the agents' streams, and deleting that Service would not
//! reach any agent.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use clap::ValueEnum;
use kplane_model::{
    HEALTHZ_PORT, Holder, KUBELET_PORTS, METRICS_PORT, ParsePortRangeError, PortRange, Protocol,
    ProxyEndpoints, ProxyNamespaces, ReservedPorts, parse_ip, usual_holder,
};
use nix::ifaddrs::getifaddrs;

use crate::convert::ExternalIps;

/// Default ports of the control plane: agents, status, readiness and metrics.
const CONTROL_PLANE_PORTS: [u16; 3] = [7465, 7466, 7467];
/// The device that holds the addresses of Services in mode ipvs. Its addresses are not the
/// machine's own.
const SERVICES_LINK: &str = "kube-ipvs0";
/// Environment variable with the address of the pod that this process runs in.
const POD_IP: &str = "POD_IP";

/// Restrictions on what Services may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Admission {
    /// Allowed external addresses.
    pub external_ips: ExternalIps,
    /// Addresses with ports, and node ports, that no Service gets.
    pub reserved: Reserved,
    /// Maximum number of elements of all Services of one namespace; 0 = no limit.
    pub namespace_elements: usize,
    /// The Services that the agents' userspace proxy serves.
    pub proxying: Proxying,
    /// What the operator says of NetworkPolicies; `None` = nothing.
    pub network_policies: Option<Enforce>,
    /// The source names Pods, even if nodes enforce no NetworkPolicies.
    pub watch_pods: bool,
}

impl Admission {
    /// Returns whether nodes enforce NetworkPolicies.
    pub fn enforces(&self) -> bool {
        self.network_policies == Some(Enforce::On)
    }
}

/// What nodes do about NetworkPolicies. Without a word of the operator, nodes that enforced some keep them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Enforce {
    /// They enforce them.
    On,
    /// They enforce none, and remove those that they have.
    Off,
}

/// Restrictions on the agents' userspace proxy, which has the node's own rights on the network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proxying {
    /// Namespaces whose Services may ask for it.
    pub services: ProxyNamespaces,
    /// The endpoints to which it may connect.
    pub endpoints: ProxyEndpoints,
}

impl From<ExternalIps> for Admission {
    fn from(external_ips: ExternalIps) -> Self {
        Self {
            external_ips,
            ..Self::default()
        }
    }
}

/// Addresses with ports, and node ports, that no Service gets in any cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Ports on the addresses of all nodes, and node ports.
    on_nodes: ReservedPorts,
    /// Ports on other addresses.
    elsewhere: HashMap<IpAddr, ReservedPorts>,
    /// Places on nodes that Services may have although programs of nodes usually listen there.
    excepted: Vec<ReservedPlace>,
}

impl Default for Reserved {
    /// Reserves the default ports of all programs.
    fn default() -> Self {
        let reserved = CONTROL_PLANE_PORTS.into_iter().fold(Self::empty(), |reserved, port| {
            reserved.on_nodes(port, Holder::ControlPlane)
        });
        reserved.with_agents()
    }
}

impl Reserved {
    fn empty() -> Self {
        Self {
            on_nodes: ReservedPorts::default(),
            elsewhere: HashMap::new(),
            excepted: Vec::new(),
        }
    }

    /// Reserves ports for a control plane that listens at `listeners` on a machine with the
    /// addresses `own`, and for agents with their default ports.
    pub fn new(listeners: &[SocketAddr], own: &[IpAddr]) -> Self {
        Self::empty().with_listeners(Holder::ControlPlane, listeners, own).with_agents()
    }

    /// Adds a program that listens on a machine with the addresses `own`.
    #[must_use]
    pub fn with_listeners(self, holder: Holder, listeners: &[SocketAddr], own: &[IpAddr]) -> Self {
        listeners.iter().fold(self, |mut reserved, listener| {
            let port = listener.port();
            let addresses = match listener.ip() {
                ip if ip.is_unspecified() => own,
                ip => &[ip][..],
            };
            for ip in addresses {
                let ports = reserved.elsewhere.entry(ip.to_canonical()).or_default();
                *ports = std::mem::take(ports).with(port, holder);
            }
            reserved.on_nodes(port, holder)
        })
    }

    /// Adds the places that the operator lists.
    #[must_use]
    pub fn with_listed(mut self, listed: &[ReservedPlace]) -> Self {
        for place in listed {
            let ports = match place.ip {
                Some(ip) => self.elsewhere.entry(ip).or_default(),
                None => &mut self.on_nodes,
            };
            *ports = std::mem::take(ports).and_listed([place.ports]);
        }
        self
    }

    /// Adds places on nodes that the operator allows.
    #[must_use]
    pub fn except(mut self, places: &[ReservedPlace]) -> Self {
        self.excepted.extend(places);
        self
    }

    /// Adds the default ports of agents and kubelet.
    fn with_agents(self) -> Self {
        let agents = [HEALTHZ_PORT, METRICS_PORT].map(|port| (port, Holder::NodeAgent));
        let kubelet = KUBELET_PORTS.map(|port| (port, Holder::Kubelet));
        agents.into_iter().chain(kubelet).fold(self, |reserved, (port, holder)| {
            reserved.on_nodes(port, holder)
        })
    }

    fn on_nodes(mut self, port: u16, holder: Holder) -> Self {
        self.on_nodes = self.on_nodes.with(port, holder);
        self
    }

    /// Returns the holder of a port on a node's address.
    pub fn holder_on_node(&self, ip: IpAddr, protocol: Protocol, port: u16) -> Option<Holder> {
        self.on_nodes.holder(protocol, port).or_else(|| {
            let usual = usual_holder(protocol, port)?;
            let is_excepted = self.excepted.iter().any(|place| place.contains(ip, port));
            (!is_excepted).then_some(usual)
        })
    }

    /// Returns the holder of a node port. The range of node ports is the operator's choice, so that only programs count
    /// that are certainly there.
    pub fn holder_of_node_port(&self, protocol: Protocol, port: u16) -> Option<Holder> {
        self.on_nodes.holder(protocol, port)
    }

    /// Returns the holder of a port on an address that need not be a node's.
    pub fn holder_at(&self, ip: IpAddr, protocol: Protocol, port: u16) -> Option<Holder> {
        self.elsewhere.get(&ip)?.holder(protocol, port)
    }
}

/// One entry of `--reserved-ports` or `--allow-external-ips`: ports on the addresses of all nodes, or on one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservedPlace {
    /// The address; `None` = all addresses of nodes.
    ip: Option<IpAddr>,
    ports: PortRange,
}

impl ReservedPlace {
    fn contains(&self, ip: IpAddr, port: u16) -> bool {
        self.ip.is_none_or(|own| own == ip) && self.ports.contains(port)
    }
}

/// The value of `--allow-external-ips`: whether Services may have externalIPs, and which places on nodes, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedExternalIps {
    /// Services may have externalIPs.
    pub allowed: bool,
    /// Places on nodes that Services may have although programs of nodes usually listen there.
    pub on_nodes: Vec<ReservedPlace>,
}

impl FromStr for AllowedExternalIps {
    type Err = ParseReservedPlaceError;

    /// Parses `true`, `false`, or a list of places such as `80,443,192.0.2.1:53`, which allows all others as well.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let on_nodes = match text {
            "true" | "false" => Vec::new(),
            places => places.split(',').map(str::parse).collect::<Result<_, _>>()?,
        };
        Ok(Self {
            allowed: text != "false",
            on_nodes,
        })
    }
}

/// The error for text that is not a [`ReservedPlace`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseReservedPlaceError {
    /// The ports are invalid.
    #[error(transparent)]
    Ports(#[from] ParsePortRangeError),
    /// The address is invalid.
    #[error("{0:?} is not an IP address: use a form such as 192.0.2.1:6443 or [2001:db8::1]:6443")]
    Address(String),
}

impl FromStr for ReservedPlace {
    type Err = ParseReservedPlaceError;

    /// Parses `22`, `2379-2380`, `192.0.2.1:6443` or `[2001:db8::1]:6443`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let (ip, ports) = match text.rsplit_once(':') {
            None => (None, text),
            Some((ip, ports)) => {
                let wrong = || ParseReservedPlaceError::Address(ip.to_owned());
                let inner = ip.strip_prefix('[').and_then(|ip| ip.strip_suffix(']'));
                let bare = inner.unwrap_or(ip);
                let parsed = parse_ip(bare).map_err(|_| wrong())?;
                if parsed.is_ipv6() != inner.is_some() {
                    return Err(wrong());
                }
                (Some(parsed), ports)
            }
        };
        let ports = ports.parse()?;
        Ok(Self { ip, ports })
    }
}

/// Returns the addresses of this machine or pod: the addresses of its interfaces, and the one from
/// the environment. Loopback and link-local addresses are left out, since no Service may have them.
pub fn own_addresses() -> Vec<IpAddr> {
    let named = std::env::var(POD_IP).ok().and_then(|text| parse_ip(&text).ok());
    let interfaces = getifaddrs()
        .inspect_err(|error| {
            tracing::warn!(
                %error,
                "cannot read the addresses of this machine; its ports are reserved on the \
                         addresses of nodes only"
            );
        })
        .into_iter()
        .flatten()
        .filter(|interface| interface.interface_name != SERVICES_LINK)
        .filter_map(|interface| {
            let address = interface.address?;
            address
                .as_sockaddr_in()
                .map(|v4| IpAddr::V4(v4.ip()))
                .or_else(|| Some(IpAddr::V6(address.as_sockaddr_in6()?.ip())))
        });
    named.into_iter().chain(interfaces).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn listed_places_are_read_as_people_write_them() {
        let place = |text: &str| text.parse::<ReservedPlace>();
        let listed = ["22", " 2379-2380", "192.0.2.1:6443", "[2001:db8::1]:1-9"];
        let places: Vec<_> = listed.iter().map(|text| place(text).unwrap()).collect();
        let reserved = Reserved::default().with_listed(&places);
        let tcp = Protocol::Tcp;
        for protocol in Protocol::ALL {
            assert_eq!(
                reserved.holder_of_node_port(protocol, 2380),
                Some(Holder::Listed)
            );
        }
        let (v4, v6) = (ip("192.0.2.1"), ip("2001:db8::1"));
        assert_eq!(reserved.holder_at(v4, tcp, 6443), Some(Holder::Listed));
        assert_eq!(reserved.holder_at(v6, tcp, 9), Some(Holder::Listed));
        assert_eq!(reserved.holder_at(v6, tcp, 10), None);
        for wrong in [
            "",
            "x",
            "1.2.3:4",
            "2001:db8::1:22",
            "[1.2.3.4]:22",
            "1.2.3.4:",
            ":22",
        ] {
            assert!(place(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_operator_excepts_ports_of_nodes_but_none_that_is_reserved() {
        let allowed: AllowedExternalIps = "443,192.0.2.1:53,10250".parse().unwrap();
        assert!(allowed.allowed);
        let listed = ["443", "80"].map(|text| text.parse().unwrap());
        let reserved = Reserved::default().except(&allowed.on_nodes);
        let at = |reserved: &Reserved, ip: &str, port| {
            let address = ip.parse().unwrap();
            reserved.holder_on_node(address, Protocol::Tcp, port)
        };
        assert_eq!(at(&reserved, "192.0.2.1", 443), None);
        assert_eq!(at(&reserved, "192.0.2.1", 53), None);
        assert_eq!(at(&reserved, "192.0.2.2", 53), Some(Holder::Node));
        assert_eq!(at(&reserved, "192.0.2.2", 80), Some(Holder::Node));
        assert_eq!(at(&reserved, "192.0.2.1", 10250), Some(Holder::Kubelet));
        let reserved = reserved.with_listed(&listed);
        assert_eq!(at(&reserved, "192.0.2.1", 443), Some(Holder::Listed));
        for (text, whether) in [("true", true), ("false", false)] {
            let parsed: AllowedExternalIps = text.parse().unwrap();
            assert_eq!((parsed.allowed, parsed.on_nodes.len()), (whether, 0));
        }
        assert!("yes".parse::<AllowedExternalIps>().is_err());
    }

    #[test]
    fn a_wildcard_means_the_machines_own_addresses() {
        let listeners = ["0.0.0.0:9443", "192.0.2.7:9444"].map(|text| text.parse().unwrap());
        let reserved = Reserved::new(&listeners, &[ip("198.51.100.1")]);
        let at = |ip, port| reserved.holder_at(ip, Protocol::Tcp, port);
        assert_eq!(at(ip("198.51.100.1"), 9443), Some(Holder::ControlPlane));
        assert_eq!(at(ip("198.51.100.1"), 9444), None);
        assert_eq!(at(ip("192.0.2.7"), 9444), Some(Holder::ControlPlane));
        // The control plane may run on a node whose addresses it cannot see.
        let on_nodes = |port| reserved.holder_of_node_port(Protocol::Tcp, port);
        assert_eq!([9443, 9444].map(on_nodes), [Some(Holder::ControlPlane); 2]);
        assert_eq!(on_nodes(10250), Some(Holder::Kubelet));
        assert_eq!(on_nodes(7465), None);
    }
}
