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
use kplane_netlink::{Batch, CommitError, Errno, NetlinkError, NfSocket};

use self::rules::{CHAINS, RuleWriter};
use super::super::element::{Destination, Key, NodePort};
use super::super::uapi::*;
use super::expressions::ExpressionWriter;
use super::own_table::{OwnTable, address_key, commit};
use crate::proxy_address::{CAPTURE_TABLE as TABLE, LOCAL_PORTS as LOCAL};

const PLACES: &str = "places";
const PORTS: &str = "ports";
const NODES: &str = "nodes";
const LEASE: &str = "lease";

/// Time for which a datagram of the agent renews the lease, in milliseconds.
const LEASE_MS: u64 = 1000;

/// nft's type numbers (`enum datatypes`).
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
            Self::Refused(error) => error.errno(),
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

/// A frontend that the table leads to the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::backend) enum CapturedFrontend {
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
    /// of its frontends are refused until it starts again.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(in crate::backend) fn create(
        family: Family,
        settings: CaptureSettings,
    ) -> Result<Self, CaptureError> {
        let mut socket = NfSocket::open()?;
        if !commit(&mut socket, |flags| structure(family, settings, flags))? {
            tracing::info!(%family, "the kernel knows no owners of tables (Linux 5.12)");
        }
        Ok(Self { family, socket })
    }

    /// Deletes frontends, and adds others, of which the table has none yet.
    ///
    /// # Errors
    /// The kernel's refusal; nothing of the rest is in effect then.
    pub(in crate::backend) fn change(
        &mut self,
        delete: &[CapturedFrontend],
        add: &[CapturedFrontend],
    ) -> Result<(), CaptureError> {
        let all = [
            (msg::DELSETELEM, 0, delete),
            (msg::NEWSETELEM, NLM_F_CREATE, add),
        ];
        let table = table(self.family);
        for (kind, flags, frontends) in all {
            for part in frontends.chunks(ELEMENTS) {
                let mut batch = Batch::new();
                for set in [PLACES, PORTS, LOCAL] {
                    let keys = part.iter().filter_map(|place| key(*place, set));
                    let change = table.operation("change elements", kind, flags);
                    table.push_elements(&mut batch, change, set, keys);
                }
                self.socket.commit(batch.seal(None))?;
            }
        }
        Ok(())
    }

    /// Deletes all frontends, so that the kernel serves them.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(in crate::backend) fn clear(&mut self) -> Result<(), CaptureError> {
        let mut batch = Batch::new();
        for set in [PLACES, PORTS, LOCAL] {
            table(self.family).push_flush(&mut batch, set);
        }
        Ok(self.socket.commit(batch.seal(None))?)
    }

    /// Replaces the addresses with node ports.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(in crate::backend) fn set_nodes(&mut self, ranges: &[Cidr]) -> Result<(), CaptureError> {
        let mut batch = Batch::new();
        let table = table(self.family);
        table.push_flush(&mut batch, NODES);
        let keys = ranges.iter().copied().map(Key::Range);
        let change = table.operation("change elements", msg::NEWSETELEM, NLM_F_CREATE);
        table.push_elements(&mut batch, change, NODES, keys);
        Ok(self.socket.commit(batch.seal(None))?)
    }
}

fn table(family: Family) -> OwnTable {
    OwnTable {
        family,
        name: TABLE,
    }
}

/// Returns the operations that create the table, in place of one that an earlier process left.
fn structure(family: Family, settings: CaptureSettings, flags: u32) -> Batch {
    let (mut batch, table) = (Batch::new(), table(family));
    let comment = "kplane: leads Services to the agent's userspace proxy";
    table.push_new(&mut batch, flags, comment);
    let (address_type, address_len) = address_key(family);
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
        table.push_set(&mut batch, id, (set, flags, (key_type, key_len)), |w| {
            if set == LEASE {
                w.bytes(NFTA_SET_TIMEOUT, &LEASE_MS.to_be_bytes());
            }
        });
    }
    push_chains(&mut batch, table, settings);
    batch
}

/// Adds the operations that create the chains.
fn push_chains(batch: &mut Batch, table: OwnTable, settings: CaptureSettings) {
    for (chain, rules) in CHAINS {
        table.push_chain(batch, &chain);
        for rule in rules {
            table.push_rule(batch, chain.name, |list| {
                let (to, family) = (ExpressionWriter(list), table.family);
                RuleWriter { to, family }.rule(*rule, settings);
            });
        }
    }
}

/// Returns the key of a frontend in a set; `None` if it belongs into another one.
fn key(place: CapturedFrontend, set: &str) -> Option<Key> {
    match place {
        CapturedFrontend::Of(FrontendAddr::Address { ip, protocol, port }) if set == PLACES => {
            Some(Key::Service(Destination { ip, protocol, port }))
        }
        CapturedFrontend::Of(FrontendAddr::NodePort { protocol, port }) if set == PORTS => {
            Some(Key::NodePort(NodePort { protocol, port }))
        }
        CapturedFrontend::OnLoopback(port) if set == LOCAL => Some(Key::NodePort(port)),
        _ => None,
    }
}
