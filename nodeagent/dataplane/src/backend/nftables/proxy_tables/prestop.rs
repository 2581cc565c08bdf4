//! A table that leads preStop hooks of this node's Pods to the agent.
//!
//! ```text
//! table ip kplane-departing {         flag owner: ends with the process, and no other program changes it
//!   set ranges { daddr, interval }    of the node's Pods
//!   set pods   { daddr }              Pods outside of the ranges
//!   set served { daddr }              Pods that serve at the port themselves
//!   chain output { type nat hook output priority -120
//!     tcp dport PORT daddr @served accept
//!     tcp dport PORT daddr @ranges dnat to LOOPBACK:PORT
//!     tcp dport PORT daddr @pods dnat to LOOPBACK:PORT
//!   }
//! }
//! ```
//!
//! Only packets of the node's own processes come through the chain. It stands before those of Services, and policies do not
//! see the packets, because they stay on the node.
//!
//! An agent that ends leaves a table behind, whose elements end by themselves. While they are there, kubelet's attempts to
//! connect are lost instead of refused, so kubelet tries again, and reaches the next agent:
//!
//! ```text
//! table ip kplane-departed {
//!   set ranges { daddr, interval, timeout }
//!   set pods   { daddr, timeout }
//!   set served { daddr, timeout }
//!   chain output { type filter hook output priority 0
//!     tcp dport PORT daddr @served accept
//!     tcp dport PORT daddr @ranges drop
//!     tcp dport PORT daddr @pods drop
//!   }
//! }
//! ```

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use kplane_model::{Cidr, Family, Protocol};
use kplane_netlink::{Batch, CommitError, NetlinkError, NfSocket};

use super::super::element::Key;
use super::super::uapi::*;
use super::expressions::{ExpressionWriter, FIRST};
use super::own_table::{BaseChain, OwnTable, address_key, commit};
use crate::proxy_address::{DEPARTED_TABLE, PRESTOP_TABLE as TABLE};

const RANGES: &str = "ranges";
const PODS: &str = "pods";
const SERVED: &str = "served";

/// The hook is `NF_INET_LOCAL_OUT`, before the table of the userspace proxy, which is at -110.
const CHAIN: BaseChain = BaseChain::new("output", "nat", 3, -120);

/// The same hook behind all that gives connections another destination: packets to the agent that ends have one.
const DROPS: BaseChain = BaseChain::new("output", "filter", 3, 0);

/// Time for which hooks wait for the next agent.
const AWAY: Duration = Duration::from_secs(10);

/// Most elements of a set: they must fit into one attribute of 64 KiB.
const ELEMENTS: usize = 1024;

/// A table that the kernel does not take.
#[derive(Debug, thiserror::Error)]
pub enum PrestopTableError {
    /// The kernel cannot be asked.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The kernel refused the change.
    #[error("table {TABLE}: {0}")]
    Refused(#[from] CommitError),
}

/// The addresses of the node's Pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HookAddresses {
    /// Ranges of Pods, which do not overlap.
    pub ranges: Vec<Cidr>,
    /// Pods outside of the ranges.
    pub pods: Vec<IpAddr>,
    /// Pods that serve at the port of hooks. They are left alone.
    pub served: Vec<IpAddr>,
}

/// The table of one family. It ends with this object, where the kernel knows owners.
#[derive(Debug)]
pub struct PrestopTable {
    family: Family,
    socket: NfSocket,
    owned: bool,
    /// Whether the table has taken the place of the one that the agent before this one left.
    arrived: bool,
}

impl PrestopTable {
    /// Creates the table, which leads this port to the same port of the loopback address.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn create(
        family: Family,
        port: u16,
        addresses: &HookAddresses,
    ) -> Result<Self, PrestopTableError> {
        let mut socket = NfSocket::open()?;
        let owned = commit(&mut socket, |flags| {
            let mut batch = structure(Role::Leads, family, port, flags, addresses);
            if leads_hooks(addresses) {
                departed(family).push_absent(&mut batch);
            }
            batch
        })?;
        Ok(Self {
            family,
            socket,
            owned,
            arrived: leads_hooks(addresses),
        })
    }

    /// Returns whether no other program can change the table.
    pub fn is_owned(&self) -> bool {
        self.owned
    }

    /// Replaces the addresses of the node's Pods.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn set(&mut self, addresses: &HookAddresses) -> Result<(), PrestopTableError> {
        let mut batch = Batch::new();
        for set in [RANGES, PODS, SERVED] {
            table(self.family).push_flush(&mut batch, set);
        }
        push_addresses(&mut batch, table(self.family), addresses);
        let arrives = !self.arrived && leads_hooks(addresses);
        if arrives {
            departed(self.family).push_absent(&mut batch);
        }
        self.socket.commit(batch.seal(None))?;
        self.arrived |= arrives;
        Ok(())
    }

    /// Ends the table. For ten seconds, new hooks at this port wait for the next agent.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn leave(mut self, port: u16, addresses: &HookAddresses) -> Result<(), PrestopTableError> {
        let mut batch = structure(Role::Drops, self.family, port, 0, addresses);
        table(self.family).push_absent(&mut batch);
        Ok(self.socket.commit(batch.seal(None))?)
    }
}

/// The purpose of a table for the packets of hooks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// They go to the agent.
    Leads,
    /// They are lost, for some seconds.
    Drops,
}

/// Returns whether the table leads hooks of any address to the agent.
fn leads_hooks(addresses: &HookAddresses) -> bool {
    !addresses.ranges.is_empty() || !addresses.pods.is_empty()
}

fn table(family: Family) -> OwnTable {
    OwnTable {
        family,
        name: TABLE,
    }
}

fn departed(family: Family) -> OwnTable {
    OwnTable {
        family,
        name: DEPARTED_TABLE,
    }
}

/// Returns the operations that create the table, in place of one that an earlier process left.
fn structure(
    role: Role,
    family: Family,
    port: u16,
    flags: u32,
    addresses: &HookAddresses,
) -> Batch {
    let mut batch = Batch::new();
    let (table, chain, comment, timeout) = match role {
        Role::Leads => {
            let comment = "kplane: leads preStop hooks of Pods to the agent";
            (table(family), CHAIN, comment, 0)
        }
        Role::Drops => {
            let comment = "kplane: preStop hooks wait for the next agent, for some seconds";
            (departed(family), DROPS, comment, NFT_SET_TIMEOUT)
        }
    };
    table.push_new(&mut batch, flags, comment);
    for (id, (set, flags)) in (1..).zip([(RANGES, NFT_SET_INTERVAL), (PODS, 0), (SERVED, 0)]) {
        let set = (set, flags | timeout, address_key(family));
        table.push_set(&mut batch, id, set, |w| {
            if role == Role::Drops {
                let ms = AWAY.as_secs() * 1_000;
                w.bytes(NFTA_SET_TIMEOUT, &ms.to_be_bytes());
            }
        });
    }
    table.push_chain(&mut batch, &chain);
    for set in [SERVED, RANGES, PODS] {
        table.push_rule(&mut batch, chain.name, |list| {
            let mut rule = ExpressionWriter(list);
            rule.meta(NFT_META_L4PROTO, FIRST);
            rule.compare(&[Protocol::Tcp.number()]);
            rule.payload(FIRST, (NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2));
            rule.compare(&port.to_be_bytes());
            rule.destination(family);
            rule.is_in(set);
            match role {
                _ if set == SERVED => rule.verdict(NF_ACCEPT),
                Role::Leads => rule.lead_to(family, SocketAddr::new(family.loopback(), port)),
                Role::Drops => rule.verdict(NF_DROP.cast_unsigned()),
            }
        });
    }
    push_addresses(&mut batch, table, addresses);
    batch
}

/// Adds the addresses of a family to the sets.
fn push_addresses(batch: &mut Batch, table: OwnTable, addresses: &HookAddresses) {
    let family = table.family;
    let add = || table.operation("add elements", msg::NEWSETELEM, NLM_F_CREATE);
    let ranges = addresses
        .ranges
        .iter()
        .filter(|range| range.family() == family)
        .map(|range| Key::Range(*range))
        .take(ELEMENTS);
    table.push_elements(batch, add(), RANGES, ranges);
    for (set, ips) in [(PODS, &addresses.pods), (SERVED, &addresses.served)] {
        let ips = ips
            .iter()
            .filter(|ip| Family::of(**ip) == family)
            .map(|ip| Key::Ip(*ip))
            .take(ELEMENTS);
        table.push_elements(batch, add(), set, ips);
    }
}
