//! The nftables backend, which programs nf_tables directly over netlink: it writes the table and its
//! elements, and reads both back.
//!
//! The table has a constant shape ([`push_structure`]); Services and endpoints are elements
//! ([`push_elements`]). `layout.rs` describes a packet's way through the table.
//!
//! A change is a handful of operations on elements in one transaction, whatever the number of Services.
//! `transactions.rs` splits the few changes that one transaction cannot make without a gap.

mod access;
mod adopt;
mod affinity;
mod affinity_id;
mod chain;
mod clients;
mod data_path;
mod decode;
mod denied;
mod element;
mod fields;
mod frontend;
mod groups;
mod guarded;
mod layout;
mod lookup;
mod loopback;
#[doc(hidden)]
pub mod memory;
mod policies;
mod policy_layout;
mod policy_rule;
mod policy_schema;
mod policy_step;
mod probe;
pub(in crate::backend) mod proxy_tables;
mod readback;
mod remembered;
mod repair;
mod rule;
mod schema;
mod slices;
mod stale;
mod structure;
mod table;
mod table_kind;
mod tables;
mod transactions;
pub(crate) mod uapi;
mod userdata;
mod watch;
mod word;

#[cfg(test)]
mod tests;

pub(crate) use access::Cost;
pub use affinity::Group;
pub use affinity_id::AffinityId;
pub use denied::{DeniedPod, denied_packets, denied_pods};
pub use element::{Data, Destination, Element, ElementOp, Key, NodePort, push_elements};
pub(crate) use frontend::Ops;
pub(in crate::backend) use lookup::look_up;
pub use loopback::LoopbackCounts;
pub use policies::PolicyTables;
pub(crate) use policies::{FoundPolicies, PolicyTable, refused_keys};
pub use policy_schema::{ACCEPT, CUT, DENY, PASS, PolicySet};
pub use probe::{ProbeError, can_log, probe};
pub use proxy_tables::{HookAddresses, PrestopTable, PrestopTableError};
pub use readback::{
    ReadError, StructureState, decode_elements, read_elements, read_elements_of, read_structure,
};
pub(in crate::backend) use remembered::remembered;
pub(crate) use repair::Contents;
#[cfg(test)]
pub(crate) use repair::everything;
pub use schema::{Balancer, CLASSES, Carries, Class, Set, TABLE, TABLE_COMMENT, TableSettings};
pub use structure::{push_delete_table, push_structure};
pub use table_kind::{POLICY_TABLE, TableKind};
pub use tables::TableLayout;

use super::{Backend, Description, Failures, ModeMetrics, OpenError};

/// The facts that hold for this backend on every machine.
pub(super) const DESCRIPTION: Description = Description {
    name: "nftables",
    summary: "nf_tables, programmed directly over netlink",
    deprecation: None,
    programs_kernel: true,
    shares_names: false,
    has_virtual_servers: false,
    is_proxy: false,
    needs: &[],
    leaves_conntrack_entries: true,
    metrics: ModeMetrics {
        full_and_partial: true,
        failures: Failures::Nftables,
        rules: false,
    },
};

/// Opens the backend for this thread's network namespace, after a check that the kernel accepts kplane's
/// table.
///
/// # Errors
/// [`OpenError`] names the missing part.
pub fn open(settings: &super::Settings) -> Result<Backend, OpenError> {
    data_path::open(settings.into())
}

impl From<&super::Settings> for TableSettings {
    fn from(settings: &super::Settings) -> Self {
        Self {
            masquerade_bit: settings.masquerade_bit,
            own_mark: settings.own_mark,
            pod_interface: settings.pod_interface,
            refuse_loopback: settings.refuse_loopback,
        }
    }
}
