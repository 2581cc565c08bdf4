//! The owners of virtual servers that are found at start.

use std::collections::HashSet;
use std::net::IpAddr;

use kplane_model::Protocol;

use super::Snapshot;
use crate::backend::ipvs::sets::{Entry, SetId};
use kplane_netlink::ipvs::ServerKey;

/// PlacesInSets of virtual servers, as they are in the sets.
pub(in super::super) struct FrontendsInSets {
    frontends: HashSet<ServerKey>,
    node_ports: HashSet<(Protocol, u16)>,
}

impl FrontendsInSets {
    pub(in super::super) fn new(snapshot: &Snapshot) -> Self {
        let of = |set| snapshot.entries.get(&set).into_iter().flatten();
        let sets = [
            SetId::ClusterIp,
            SetId::ExternalIp,
            SetId::ExternalIpLocal,
            SetId::LoadBalancer,
            SetId::NodePortSctp,
        ];
        let place = |entry: &Entry| match *entry {
            Entry::IpPort(ip, protocol, port) => Some(ServerKey { ip, protocol, port }),
            _ => None,
        };
        let port = |protocol| {
            let (set, _) = SetId::of_node_ports(protocol);
            of(set).filter_map(move |entry| match *entry {
                Entry::Port(port) => Some((protocol, port)),
                _ => None,
            })
        };
        Self {
            frontends: sets.into_iter().flat_map(of).filter_map(place).collect(),
            node_ports: port(Protocol::Tcp).chain(port(Protocol::Udp)).collect(),
        }
    }

    /// Returns whether a virtual server is kube-proxy's or kplane's, given the addresses of kplane's device.
    pub(in super::super) fn has(&self, key: ServerKey, ours: &HashSet<IpAddr>) -> bool {
        if self.frontends.is_empty() && self.node_ports.is_empty() {
            return ours.contains(&key.ip);
        }
        let node_port =
            !ours.contains(&key.ip) && self.node_ports.contains(&(key.protocol, key.port));
        node_port || self.frontends.contains(&key)
    }
}
