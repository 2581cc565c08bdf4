//! The ServicePorts that need the objects which the kernel refused.

use std::collections::{HashMap, HashSet};

use kplane_model::ServiceKey;

use super::{IpvsState, Op};
use kplane_netlink::ipvs::Command;

impl IpvsState {
    /// Returns one ServicePort that needs it for each operation. Reads the whole state once, so it is for
    /// failures only.
    pub(in super::super) fn owners(&self, ops: &HashSet<Op>) -> HashMap<Op, ServiceKey> {
        let mut owners = HashMap::new();
        if ops.is_empty() {
            return owners;
        }
        for op in ops {
            if let Op::Ipvs(command) = op {
                let claim = self.claims.get(&server_of(command));
                owners.extend(claim.map(|claim| (*op, claim.owner.clone())));
            }
        }
        for (key, demand) in &self.services {
            let entries = demand.entries.iter().map(|(set, entry)| Op::Entry(*set, *entry, true));
            let addresses = demand.addresses.iter().map(|ip| Op::Address(*ip, true));
            for op in entries.chain(addresses).filter(|op| ops.contains(op)) {
                owners.entry(op).or_insert_with(|| key.clone());
            }
        }
        owners
    }
}

fn server_of(command: &Command) -> kplane_netlink::ipvs::ServerKey {
    match command {
        Command::AddServer(key, _)
        | Command::SetServer(key, _)
        | Command::DeleteServer(key)
        | Command::AddReal(key, ..)
        | Command::SetReal(key, ..)
        | Command::DeleteReal(key, _) => *key,
    }
}
