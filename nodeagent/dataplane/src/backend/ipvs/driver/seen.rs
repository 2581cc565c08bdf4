//! The driver's human-readable view of virtual servers, as of its last read, without asking the kernel.

use std::time::Instant;

use kplane_model::{Family, ServiceName};

use super::super::{LINK, state::Op};
use super::{Driver, Kernel};
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

impl<K: Kernel> Driver<K> {
    pub(super) fn counts(&self, family: Family) -> Option<ServerCounts> {
        let side = self.sides[family as usize].as_ref().ok()?;
        side.seen.counts.clone()
    }

    /// Returns the virtual servers of a Service, IPv4 first. The age is that of the older read.
    pub(super) fn inspection(&self, service: &ServiceName) -> Inspection {
        let mut told = Inspection::default();
        for (family, side) in Family::ALL.into_iter().zip(&self.sides) {
            let Ok(side) = side else { continue };
            if side.known {
                told.servers.extend(side.state.inspect(service));
            } else {
                told.error = format!("what the kernel holds of {family} is not known just now");
            }
            let age = side.seen.at.map(|at| at.elapsed());
            told.age = told.age.max(age.unwrap_or_default());
        }
        told
    }
}

/// Describes the object of an operation, human-readable.
pub(super) fn told(op: &Op) -> String {
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
