//! The places that this agent itself uses, which no Service gets on this node: where it listens, and
//! the mark of its own connections.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use kplane_desired_state::admission::{Reserved as ForAllNodes, own_addresses};
use kplane_model::{Holder, KUBELET_PORTS, ReservedPorts};
use kplane_util::dial::Dialer;

use crate::config::Config;
use kplane_dataplane::backend::Kind;
use kplane_dataplane::plan::{NodeSettings, Reserved};

/// The places that an agent uses.
pub(crate) struct OwnPlaces {
    listeners: Vec<SocketAddr>,
    addresses: Vec<IpAddr>,
    mark: u32,
    backend: Kind,
}

impl OwnPlaces {
    /// Returns the places of an agent with this configuration, on this machine.
    pub(crate) fn new(config: &Config) -> Self {
        let listeners = [config.healthz, config.metrics].into_iter().flatten();
        Self {
            listeners: listeners.collect(),
            addresses: own_addresses(),
            mark: config.backend_settings.own_mark,
            backend: config.backend,
        }
    }

    /// Returns a dialer whose connections the node's rules leave alone.
    pub(crate) fn dialer(&self) -> Dialer {
        Dialer::new(self.mark)
    }

    /// Adds the places that no Service gets on this node to the settings. The control planes are not
    /// known yet.
    pub(crate) fn settings(&self, settings: NodeSettings) -> NodeSettings {
        let kubelet = KUBELET_PORTS.map(|port| (port, Holder::Kubelet));
        let ours = self.listeners.iter().map(|listener| (listener.port(), Holder::NodeAgent));
        let ports = ours.chain(kubelet).fold(ReservedPorts::default(), |ports, (port, holder)| {
            ports.with(port, holder)
        });
        let reserved = Reserved {
            ports,
            own: self.addresses.iter().copied().collect(),
            peers: BTreeSet::new(),
            whole_peers: self.backend.describe().has_virtual_servers,
        };
        NodeSettings {
            reserved,
            ..settings
        }
    }

    /// Returns the places that a control plane in this process, which serves its status at an address,
    /// refuses for all Services.
    pub(crate) fn for_all_nodes(&self, status: Option<SocketAddr>) -> ForAllNodes {
        ForAllNodes::new(status.as_slice(), &self.addresses).with_listeners(
            Holder::NodeAgent,
            &self.listeners,
            &self.addresses,
        )
    }
}
