//! The driver's human-readable view of virtual servers, as of its last read, without asking the kernel.

use std::time::Instant;

use kplane_model::{Family, ServiceName};

use super::super::LINK;
use super::super::state::{IpvsState, Op};
use super::{IpvsDataPath, Kernel};
use crate::backend::{Inspection, ServerCounts};
use kplane_netlink::ipvs::Command;

/// The result of the last read of one family.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// The counts; stored because counting reads the whole state.
    pub(super) counts: Option<ServerCounts>,
    /// The time when connections were counted.
    pub(super) at: Option<Instant>,
}

impl<K: Kernel> IpvsDataPath<K> {
    /// Returns the virtual servers of a Service; the state is `None` while it is not known.
    pub(super) fn inspection(
        &self,
        state: Option<&IpvsState>,
        service: &ServiceName,
    ) -> Inspection {
        let age = self.seen.at.map(|at| at.elapsed()).unwrap_or_default();
        match state {
            Some(state) => Inspection {
                servers: state.inspect(service),
                age,
                error: String::new(),
            },
            None => Inspection {
                servers: Vec::new(),
                age,
                error: format!(
                    "the agent does not know what the kernel holds of {} at the moment",
                    self.family
                ),
            },
        }
    }
}

/// Describes the object of an operation, human-readable.
pub(super) fn described(op: &Op) -> String {
    match op {
        Op::Ipvs(
            Command::AddServer(key, _) | Command::SetServer(key, _) | Command::DeleteServer(key),
        ) => format!("virtual server {key}"),
        Op::Ipvs(
            Command::AddReal(key, real, _)
            | Command::SetReal(key, real, _)
            | Command::DeleteReal(key, real),
        ) => format!("real server {real} of {key}"),
        Op::Entry(set, entry, _) => format!("entry {entry} of IP set {}", set.name(Family::V4)),
        Op::Address(ip, _) => format!("address {ip} of {LINK}"),
    }
}
