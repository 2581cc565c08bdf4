//! Human-readable views of virtual and real servers. This module is pure.

use kplane_model::{EndpointAddr, ServiceKey, ServiceName};

use super::{Claim, DRAINS, HeldReal, HeldServer, IpvsState};
use crate::backend::{Connections, Drain, RealServer, ServerCounts, VirtualServer};
use kplane_netlink::ipvs::{Real, ServerKey};

impl HeldReal {
    pub(super) fn new(real: &Real) -> Self {
        Self {
            weight: real.translated.then_some(real.weight),
            connections: Connections {
                active: real.active,
                inactive: real.inactive,
            },
        }
    }
}

impl IpvsState {
    /// Returns the counts of all of kplane's virtual servers. Reads the whole state, so it is called once per
    /// read of the kernel.
    pub(in super::super) fn counts(&self) -> ServerCounts {
        let mut counts = ServerCounts::default();
        let mut drains = Vec::new();
        for (server, held) in &self.held {
            let claim = self.claims.get(server);
            counts.virtual_servers += 1;
            for (at, real) in &held.reals {
                counts.real_servers += 1;
                counts.connections.active += real.connections.active;
                counts.connections.inactive += real.connections.inactive;
                if let Some(claim) = claim.filter(|claim| claim.drains(*at, real.weight)) {
                    drains.push((real.connections, *server, *at, &claim.owner));
                }
            }
        }
        counts.draining = drains.len() as u64;
        drains.sort_unstable_by_key(|(connections, server, at, _)| {
            (std::cmp::Reverse(*connections), *server, *at)
        });
        drains.truncate(ServerCounts::DRAINS);
        let drain = |(connections, server, at, key): (_, ServerKey, _, &ServiceKey)| Drain {
            key: key.clone(),
            server: server.at(),
            at,
            connections,
        };
        counts.drains = drains.into_iter().map(drain).collect();
        counts
    }

    /// Returns the virtual servers that exist for a Service, sorted. Reads the names of all ServicePorts, so
    /// it is only for questions by users.
    pub(in super::super) fn inspect(&self, service: &ServiceName) -> Vec<VirtualServer> {
        let ports = self.services.iter().filter(|(key, _)| key.service == *service);
        let wanted = ports
            .flat_map(|(key, demand)| demand.servers.iter().map(move |wanted| (wanted.key, key)));
        let mut servers: Vec<(ServerKey, VirtualServer)> = wanted
            .filter_map(|(server, key)| {
                let claim = self.claims.get(&server).filter(|c| c.owner == *key)?;
                let held = self.held.get(&server)?;
                Some((server, reported(server, claim, held)))
            })
            .collect();
        servers.sort_unstable_by_key(|(server, _)| *server);
        servers.into_iter().map(|(_, reported)| reported).collect()
    }
}

impl Claim {
    /// Returns whether a real server exists only for its remaining connections.
    pub(super) fn drains(&self, at: EndpointAddr, weight: Option<u32>) -> bool {
        weight == Some(DRAINS) && self.reals.binary_search(&at).is_err()
    }
}

fn reported(server: ServerKey, claim: &Claim, held: &HeldServer) -> VirtualServer {
    let reals = held.reals.iter();
    VirtualServer {
        key: claim.owner.clone(),
        at: server.at(),
        scheduler: held.mode.map_or("", |mode| mode.scheduler.as_str()),
        persistent_s: held.mode.and_then(|mode| mode.persistent_s),
        reals: reals
            .map(|(at, real)| RealServer {
                at: *at,
                weight: real.weight.unwrap_or_default(),
                connections: real.connections,
                draining: claim.drains(*at, real.weight),
            })
            .collect(),
    }
}
