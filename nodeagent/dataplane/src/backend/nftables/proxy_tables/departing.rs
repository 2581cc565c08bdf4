//! A table that leads preStop hooks of this node's Pods to the agent.
//!
//! ```text
//! table ip kplane-departing {         flag owner: ends with the process, and no other program changes it
//!   set ranges { daddr, interval }    of the node's Pods
//!   set pods   { daddr }              Pods outside of the ranges
//!   chain output { type nat hook output priority -120
//!     tcp dport PORT daddr @ranges dnat to LOOPBACK:PORT
//!     tcp dport PORT daddr @pods dnat to LOOPBACK:PORT
//!   }
//! }
//! ```
//!
//! Only packets of the node's own processes come through the chain. It stands before those of Services, and policies do not
//! see the packets, because they stay on the node.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use kplane_model::{Cidr, Family, Protocol};
use kplane_netlink::{Batch, CommitError, Label, NetlinkError, NfSocket, Operation};

use super::super::element::Key;
#[allow(
    clippy::wildcard_imports,
    reason = "constants named as in the kernel's headers"
)]
use super::super::uapi::*;
use super::super::userdata;
use super::expressions::{Expressions, FIRST, encode_key};
use super::{NFT_TABLE_F_OWNER, knows_no_owner};
use crate::proxy_address::DEPARTING_TABLE as TABLE;

const RANGES: &str = "ranges";
const PODS: &str = "pods";
const CHAIN: &str = "output";

/// `NF_INET_LOCAL_OUT`.
const HOOK: u32 = 3;
/// Before the table of the userspace proxy, which is -110.
const PRIORITY: i32 = -120;

/// nft's type numbers (`enum datatypes`).
const TYPE_IPADDR: u32 = 7;
const TYPE_IP6ADDR: u32 = 8;

/// Most elements of a set: they must fit into one attribute of 64 KiB.
const ELEMENTS: usize = 1024;

/// A table that the kernel does not take.
#[derive(Debug, thiserror::Error)]
pub enum DepartingError {
    /// The kernel cannot be asked.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The kernel refused the change.
    #[error("table {TABLE}: {0}")]
    Refused(#[from] CommitError),
}

/// The table of one family. It ends with this object, where the kernel knows owners.
#[derive(Debug)]
pub struct DepartingTable {
    family: Family,
    socket: NfSocket,
    owned: bool,
}

impl DepartingTable {
    /// Creates the table, which leads this port to the same port of the loopback address. `addresses`: see
    /// [`DepartingTable::set`].
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn create(
        family: Family,
        port: u16,
        addresses: (&[Cidr], &[IpAddr]),
    ) -> Result<Self, DepartingError> {
        let mut socket = NfSocket::open()?;
        let create = |flags| structure(family, port, flags, addresses).seal(None);
        let owned = match socket.commit(create(NFT_TABLE_F_OWNER)) {
            Err(CommitError::Rejected { rejections, .. }) if knows_no_owner(&rejections) => {
                socket.commit(create(0))?;
                false
            }
            result => result.map(|()| true)?,
        };
        Ok(Self {
            family,
            socket,
            owned,
        })
    }

    /// Returns whether no other program can change the table.
    #[must_use]
    pub fn is_owned(&self) -> bool {
        self.owned
    }

    /// Replaces the ranges of the node's Pods, which do not overlap, and the Pods outside of them.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn set(&mut self, addresses: (&[Cidr], &[IpAddr])) -> Result<(), DepartingError> {
        let mut batch = Batch::new();
        for set in [RANGES, PODS] {
            let flush = operation("delete elements", msg::DELSETELEM, 0, self.family);
            // Without elements, the message means all of them.
            batch.push(flush, |w| {
                w.str(NFTA_SET_ELEM_LIST_TABLE, TABLE);
                w.str(NFTA_SET_ELEM_LIST_SET, set);
            });
        }
        push_addresses(&mut batch, self.family, addresses);
        Ok(self.socket.commit(batch.seal(None))?)
    }
}

/// Returns the address at which the agent listens for hooks.
#[must_use]
pub fn loopback(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::LOCALHOST.into(),
        Family::V6 => Ipv6Addr::LOCALHOST.into(),
    }
}

fn operation(action: &'static str, kind: u16, flags: u16, family: Family) -> Operation {
    Operation {
        label: Label {
            action,
            object: TABLE,
        },
        kind,
        flags,
        family: nfproto(family),
    }
}

/// Returns the operations that create the table, in place of one that an earlier process left.
fn structure(family: Family, port: u16, flags: u32, addresses: (&[Cidr], &[IpAddr])) -> Batch {
    let mut batch = Batch::new();
    let operation = |action, kind, flags| operation(action, kind, flags, family);
    let create = NLM_F_CREATE;
    // Adding an existing table is no error; deleting a missing one is.
    for (action, kind, flags) in [
        ("add table", msg::NEWTABLE, create),
        ("delete table", msg::DELTABLE, 0),
    ] {
        batch.push(operation(action, kind, flags), |w| {
            w.str(NFTA_TABLE_NAME, TABLE);
        });
    }
    batch.push(operation("add table", msg::NEWTABLE, create), |w| {
        w.str(NFTA_TABLE_NAME, TABLE);
        w.u32(NFTA_TABLE_FLAGS, flags);
        let comment = "kplane: leads preStop hooks of Pods to the agent";
        w.bytes(NFTA_TABLE_USERDATA, &userdata::comment(comment));
    });
    let (key_type, key_len) = match family {
        Family::V4 => (TYPE_IPADDR, 4),
        Family::V6 => (TYPE_IP6ADDR, 16),
    };
    for (id, (set, flags)) in (1..).zip([(RANGES, NFT_SET_INTERVAL), (PODS, 0)]) {
        batch.push(operation("add set", msg::NEWSET, create), |w| {
            w.str(NFTA_SET_TABLE, TABLE);
            w.str(NFTA_SET_NAME, set);
            w.u32(NFTA_SET_FLAGS, flags);
            w.u32(NFTA_SET_KEY_TYPE, key_type);
            w.u32(NFTA_SET_KEY_LEN, key_len);
            w.u32(NFTA_SET_ID, id);
        });
    }
    batch.push(operation("add chain", msg::NEWCHAIN, create), |w| {
        w.str(NFTA_CHAIN_TABLE, TABLE);
        w.str(NFTA_CHAIN_NAME, CHAIN);
        w.str(NFTA_CHAIN_TYPE, "nat");
        w.u32(NFTA_CHAIN_POLICY, NF_ACCEPT);
        w.nest(NFTA_CHAIN_HOOK, |w| {
            w.u32(NFTA_HOOK_HOOKNUM, HOOK);
            w.bytes(NFTA_HOOK_PRIORITY, &PRIORITY.to_be_bytes());
        });
    });
    for set in [RANGES, PODS] {
        batch.push(
            operation("add rule", msg::NEWRULE, create | NLM_F_APPEND),
            |w| {
                w.str(NFTA_RULE_TABLE, TABLE);
                w.str(NFTA_RULE_CHAIN, CHAIN);
                w.nest(NFTA_RULE_EXPRESSIONS, |list| {
                    let mut rule = Expressions(list);
                    rule.meta(NFT_META_L4PROTO, FIRST);
                    rule.compare(&[Protocol::Tcp.number()]);
                    rule.payload(FIRST, (NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2));
                    rule.compare(&port.to_be_bytes());
                    rule.destination(family);
                    rule.is_in(set);
                    rule.lead_to(family, SocketAddr::new(loopback(family), port));
                });
            },
        );
    }
    push_addresses(&mut batch, family, addresses);
    batch
}

/// Adds the addresses of a family to the sets.
fn push_addresses(batch: &mut Batch, family: Family, (ranges, pods): (&[Cidr], &[IpAddr])) {
    let ranges = ranges.iter().filter(|range| range.family() == family);
    let pods = pods.iter().filter(|pod| Family::of(**pod) == family);
    let ranges = ranges.map(|range| Key::Range(*range)).take(ELEMENTS);
    let pods = pods.map(|pod| Key::Ip(*pod)).take(ELEMENTS);
    let sets: [(_, Vec<Key>); 2] = [(RANGES, ranges.collect()), (PODS, pods.collect())];
    for (set, keys) in sets.into_iter().filter(|(_, keys)| !keys.is_empty()) {
        batch.push(
            operation("add elements", msg::NEWSETELEM, NLM_F_CREATE, family),
            |w| {
                w.str(NFTA_SET_ELEM_LIST_TABLE, TABLE);
                w.str(NFTA_SET_ELEM_LIST_SET, set);
                w.nest(NFTA_SET_ELEM_LIST_ELEMENTS, |list| {
                    keys.into_iter().for_each(|key| encode_key(list, key));
                });
            },
        );
    }
}
