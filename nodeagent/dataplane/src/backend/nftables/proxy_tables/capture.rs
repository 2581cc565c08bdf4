//! A table that leads connections and datagrams for Services to a socket of this process, before table `kplane` would
//! lead them to an endpoint (U51).
//!
//! ```text
//! table ip kplane-capture {           flag owner: ends with the process, so that table kplane serves then
//!   set places  { daddr . protocol . port }
//!   set ports   { protocol . port }   node ports
//!   set nodes   { daddr, interval }   addresses with node ports
//!   set local   { protocol . port }   node ports that are only served on loopback addresses
//!   set lease   { daddr, timeout 1s } holds ADDRESS as long as the agent sends datagrams there
//!   chain lease { type filter; hook output; priority -310
//!     meta mark OWN daddr ADDRESS update @lease { daddr }
//!   }
//!   chain prerouting, output { type nat; priority -110
//!     ADDRESS != @lease return            the agent hangs: the kernel's own rules serve
//!     meta mark OWN return
//!     daddr 127.0.0.0/8 return            only in chain prerouting: from another machine; or daddr ::1
//!     daddr . protocol . port @places  dnat to ADDRESS:PORT
//!     daddr @nodes fib daddr type local protocol . port @ports  dnat to ADDRESS:PORT
//!     daddr 127.0.0.0/8 protocol . port @local  dnat to ADDRESS:PORT     only in chain output; or daddr ::1
//!   }
//! }
//! ```
//!
//! nft's `redirect` would drop packets of an interface without addresses, as many networks give pods.

mod rules;

use std::net::SocketAddr;

use kplane_model::{Cidr, Family, FrontendAddr};
use kplane_netlink::{
    AttributeWriter, Batch, CommitError, Errno, Label, NetlinkError, NfSocket, Operation,
};

use self::rules::{CHAINS, Rules};
use super::super::element::{Destination, Key, NodePort};
#[allow(
    clippy::wildcard_imports,
    reason = "constants named as in the kernel's headers"
)]
use super::super::uapi::*;
use super::super::userdata;
use super::expressions::{Expressions, encode_key};
use super::{NFT_TABLE_F_OWNER, knows_no_owner};
use crate::proxy_address::{CAPTURE_TABLE as TABLE, LOCAL_PORTS as LOCAL};

const PLACES: &str = "places";
const PORTS: &str = "ports";
const NODES: &str = "nodes";
const LEASE: &str = "lease";

/// Time for which a datagram of the agent renews the lease, in milliseconds.
const LEASE_MS: u64 = 1000;

/// nft's type numbers (`enum datatypes`).
const TYPE_IPADDR: u32 = 7;
const TYPE_IP6ADDR: u32 = 8;
const TYPE_INET_PROTOCOL: u32 = 12;
const TYPE_INET_SERVICE: u32 = 13;
const TYPE_BITS: u32 = 6;

/// Most elements of one transaction, which must fit into one attribute of 64 KiB: each takes up to 36 bytes.
const ELEMENTS: usize = 1024;

/// A table that the kernel does not take.
#[derive(Debug, thiserror::Error)]
pub(in crate::backend) enum CaptureError {
    /// The kernel cannot be asked.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The kernel refused the change.
    #[error("table {TABLE}: {0}")]
    Refused(#[from] CommitError),
}

impl CaptureError {
    /// Returns whether the kernel has no nf_tables, lacks a part of it, or does not let this process use it.
    pub(in crate::backend) fn is_missing(&self) -> bool {
        let errno = match self {
            Self::Netlink(error) => error.errno(),
            Self::Refused(CommitError::Refused(errno)) => Some(*errno),
            Self::Refused(CommitError::Rejected { rejections, .. }) => {
                rejections.first().map(|rejection| rejection.errno)
            }
            Self::Refused(_) => None,
        };
        matches!(
            errno,
            Some(
                Errno::EOPNOTSUPP
                    | Errno::ENOENT
                    | Errno::EINVAL
                    | Errno::EPERM
                    | Errno::EAFNOSUPPORT
                    | Errno::EPROTONOSUPPORT
            )
        )
    }
}

/// A place that the table leads to the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::backend) enum Place {
    /// An address, or a node port on the addresses that have node ports.
    Of(FrontendAddr),
    /// A node port on loopback addresses only.
    OnLoopback(NodePort),
}

/// The table of one family.
#[derive(Debug)]
pub(in crate::backend) struct CaptureTable {
    family: Family,
    socket: NfSocket,
}

/// The settings of a table.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct CaptureSettings {
    /// The socket's address.
    pub(in crate::backend) socket: SocketAddr,
    /// The mark of connections that are left alone.
    pub(in crate::backend) own_mark: u32,
}

impl CaptureTable {
    /// Creates the table. A kernel that does not know owners gets one without: after a crash of this process, clients
    /// of its places are refused until it starts again.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(in crate::backend) fn create(
        family: Family,
        settings: CaptureSettings,
    ) -> Result<Self, CaptureError> {
        let mut socket = NfSocket::open()?;
        match socket.commit(structure(family, settings, NFT_TABLE_F_OWNER).seal(None)) {
            Err(CommitError::Rejected { rejections, .. }) if knows_no_owner(&rejections) => {
                tracing::info!(%family, "the kernel knows no owners of tables (Linux 5.12)");
                socket.commit(structure(family, settings, 0).seal(None))?;
            }
            result => result?,
        }
        Ok(Self { family, socket })
    }

    /// Deletes places, and adds others, of which the table has none yet.
    ///
    /// # Errors
    /// The kernel's refusal; nothing of the rest is in effect then.
    pub(in crate::backend) fn change(
        &mut self,
        delete: &[Place],
        add: &[Place],
    ) -> Result<(), CaptureError> {
        let all = [
            (msg::DELSETELEM, 0, delete),
            (msg::NEWSETELEM, NLM_F_CREATE, add),
        ];
        for (kind, flags, places) in all {
            for part in places.chunks(ELEMENTS) {
                let mut batch = Batch::new();
                for set in [PLACES, PORTS, LOCAL] {
                    let keys = part.iter().filter_map(|place| key(*place, set));
                    push_elements(&mut batch, self.family, (kind, flags, set), keys);
                }
                self.socket.commit(batch.seal(None))?;
            }
        }
        Ok(())
    }

    /// Deletes all places, so that the kernel serves them.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(in crate::backend) fn clear(&mut self) -> Result<(), CaptureError> {
        let mut batch = Batch::new();
        for set in [PLACES, PORTS, LOCAL] {
            push_flush(&mut batch, self.family, set);
        }
        Ok(self.socket.commit(batch.seal(None))?)
    }

    /// Replaces the addresses with node ports.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(in crate::backend) fn set_nodes(&mut self, ranges: &[Cidr]) -> Result<(), CaptureError> {
        let mut batch = Batch::new();
        push_flush(&mut batch, self.family, NODES);
        let keys = ranges.iter().copied().map(Key::Range);
        push_elements(
            &mut batch,
            self.family,
            (msg::NEWSETELEM, NLM_F_CREATE, NODES),
            keys,
        );
        Ok(self.socket.commit(batch.seal(None))?)
    }
}

fn operation(action: &'static str, kind: u16, flags: u16, family: u8) -> Operation {
    Operation {
        label: Label {
            action,
            object: TABLE,
        },
        kind,
        flags,
        family,
    }
}

/// Returns the operations that create the table, in place of one that an earlier process left.
fn structure(family: Family, settings: CaptureSettings, flags: u32) -> Batch {
    let mut batch = Batch::new();
    let proto = nfproto(family);
    let create = NLM_F_CREATE;
    let name = |w: &mut AttributeWriter<'_>| w.str(NFTA_TABLE_NAME, TABLE);
    // Adding an existing table is no error; deleting a missing one is.
    batch.push(operation("add table", msg::NEWTABLE, create, proto), name);
    batch.push(operation("delete table", msg::DELTABLE, 0, proto), name);
    batch.push(operation("add table", msg::NEWTABLE, create, proto), |w| {
        w.str(NFTA_TABLE_NAME, TABLE);
        w.u32(NFTA_TABLE_FLAGS, flags);
        let comment = "kplane: leads Services to the agent's userspace proxy";
        w.bytes(NFTA_TABLE_USERDATA, &userdata::comment(comment));
    });
    let (address_type, address_len) = match family {
        Family::V4 => (TYPE_IPADDR, 4),
        Family::V6 => (TYPE_IP6ADDR, 16),
    };
    let port = TYPE_INET_PROTOCOL << TYPE_BITS | TYPE_INET_SERVICE;
    let sets = [
        (
            PLACES,
            address_type << (2 * TYPE_BITS) | port,
            address_len + 8,
            0,
        ),
        (PORTS, port, 8, 0),
        (NODES, address_type, address_len, NFT_SET_INTERVAL),
        (LOCAL, port, 8, 0),
        (
            LEASE,
            address_type,
            address_len,
            NFT_SET_TIMEOUT | NFT_SET_EVAL,
        ),
    ];
    for (id, (set, key_type, key_len, flags)) in (1..).zip(sets) {
        batch.push(operation("add set", msg::NEWSET, create, proto), |w| {
            w.str(NFTA_SET_TABLE, TABLE);
            w.str(NFTA_SET_NAME, set);
            w.u32(NFTA_SET_FLAGS, flags);
            w.u32(NFTA_SET_KEY_TYPE, key_type);
            w.u32(NFTA_SET_KEY_LEN, key_len);
            w.u32(NFTA_SET_ID, id);
            if set == LEASE {
                w.bytes(NFTA_SET_TIMEOUT, &LEASE_MS.to_be_bytes());
            }
        });
    }
    push_chains(&mut batch, family, settings);
    batch
}

/// Adds the operations that create the chains.
fn push_chains(batch: &mut Batch, family: Family, settings: CaptureSettings) {
    let (proto, create) = (nfproto(family), NLM_F_CREATE);
    for (chain, kind, hook, priority, rules) in CHAINS {
        batch.push(operation("add chain", msg::NEWCHAIN, create, proto), |w| {
            w.str(NFTA_CHAIN_TABLE, TABLE);
            w.str(NFTA_CHAIN_NAME, chain);
            w.str(NFTA_CHAIN_TYPE, kind);
            w.u32(NFTA_CHAIN_POLICY, NF_ACCEPT);
            w.nest(NFTA_CHAIN_HOOK, |w| {
                w.u32(NFTA_HOOK_HOOKNUM, hook);
                w.bytes(NFTA_HOOK_PRIORITY, &priority.to_be_bytes());
            });
        });
        for rule in rules {
            batch.push(
                operation("add rule", msg::NEWRULE, create | NLM_F_APPEND, proto),
                |w| {
                    w.str(NFTA_RULE_TABLE, TABLE);
                    w.str(NFTA_RULE_CHAIN, chain);
                    w.nest(NFTA_RULE_EXPRESSIONS, |list| {
                        let to = Expressions(list);
                        Rules { to, family }.rule(*rule, settings);
                    });
                },
            );
        }
    }
}

/// Adds an operation that deletes all elements of a set.
fn push_flush(batch: &mut Batch, family: Family, set: &'static str) {
    let flush = operation("delete elements", msg::DELSETELEM, 0, nfproto(family));
    // Without elements, the message means all of them.
    batch.push(flush, |w| {
        w.str(NFTA_SET_ELEM_LIST_TABLE, TABLE);
        w.str(NFTA_SET_ELEM_LIST_SET, set);
    });
}

/// Adds an operation on the elements that belong into a set.
fn push_elements(
    batch: &mut Batch,
    family: Family,
    (kind, flags, set): (u16, u16, &'static str),
    keys: impl Iterator<Item = Key>,
) {
    let mut keys = keys.peekable();
    if keys.peek().is_none() {
        return;
    }
    batch.push(
        operation("change elements", kind, flags, nfproto(family)),
        |w| {
            w.str(NFTA_SET_ELEM_LIST_TABLE, TABLE);
            w.str(NFTA_SET_ELEM_LIST_SET, set);
            w.nest(NFTA_SET_ELEM_LIST_ELEMENTS, |list| {
                for key in keys {
                    encode_key(list, key);
                }
            });
        },
    );
}

/// Returns the key of a place in a set; `None` if it belongs into another one.
fn key(place: Place, set: &str) -> Option<Key> {
    match place {
        Place::Of(FrontendAddr::Address { ip, protocol, port }) if set == PLACES => {
            Some(Key::Service(Destination { ip, protocol, port }))
        }
        Place::Of(FrontendAddr::NodePort { protocol, port }) if set == PORTS => {
            Some(Key::NodePort(NodePort { protocol, port }))
        }
        Place::OnLoopback(port) if set == LOCAL => Some(Key::NodePort(port)),
        _ => None,
    }
}
