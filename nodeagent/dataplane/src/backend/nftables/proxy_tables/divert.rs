//! A table that brings answers to the userspace proxy though they are going to a client: answers of endpoints that see
//! the client's address (U51).
//!
//! ```text
//! table ip kplane-divert {            flag owner: ends with the process
//!   chain prerouting { type filter; priority -150
//!     socket mark OWN socket transparent 1 meta mark set MARK accept
//!   }
//! }
//! ```
//!
//! A policy rule delivers packets with the second mark to this node.

use kplane_model::Family;
use kplane_netlink::{AttributeWriter, Batch, CommitError, Errno, Label, NfSocket, Operation};

#[allow(
    clippy::wildcard_imports,
    reason = "constants named as in the kernel's headers"
)]
use super::super::uapi::*;
use super::super::userdata;
use super::capture::CaptureError;
use super::expressions::{Expressions, NFT_SOCKET_MARK, NFT_SOCKET_TRANSPARENT};
use super::{NFT_TABLE_F_OWNER, knows_no_owner};
use crate::proxy_address::DIVERT_TABLES as TABLES;

const CHAIN: &str = "prerouting";

/// `NF_INET_PRE_ROUTING`.
const HOOK: u32 = 0;

/// Priority of the chain (`NF_IP_PRI_MANGLE`): before the kernel looks for a route.
const PRIORITY: i32 = -150;

/// The marks of a table.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct DivertMarks {
    /// The mark of the proxy's sockets.
    pub(in crate::backend) own: u32,
    /// The mark that answers to them get.
    pub(in crate::backend) answers: u32,
}

/// The table of one family. It ends with this object.
#[derive(Debug)]
pub(in crate::backend) struct DivertTable {
    _owner: NfSocket,
}

impl DivertTable {
    /// Creates the table.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(in crate::backend) fn create(
        family: Family,
        marks: DivertMarks,
    ) -> Result<Self, CaptureError> {
        let mut owner = NfSocket::open()?;
        let [first, second] = TABLES;
        match commit(&mut owner, first, family, marks) {
            Err(CommitError::Rejected { rejections, .. })
                if rejections
                    .iter()
                    .any(|rejection| rejection.errno == Errno::EPERM) =>
            {
                commit(&mut owner, second, family, marks)?;
            }
            result => result?,
        }
        Ok(Self { _owner: owner })
    }
}

/// Creates a table. A kernel that does not know owners gets one without, which has no effect without this process.
fn commit(
    socket: &mut NfSocket,
    table: &'static str,
    family: Family,
    marks: DivertMarks,
) -> Result<(), CommitError> {
    let create = |flags| structure(table, family, marks, flags).seal(None);
    match socket.commit(create(NFT_TABLE_F_OWNER)) {
        Err(CommitError::Rejected { rejections, .. }) if knows_no_owner(&rejections) => {
            socket.commit(create(0))
        }
        result => result,
    }
}

/// Returns the operations that create the table, in place of one that an earlier process left.
fn structure(table: &'static str, family: Family, marks: DivertMarks, flags: u32) -> Batch {
    let mut batch = Batch::new();
    let operation = |action, kind, flags| Operation {
        label: Label {
            action,
            object: table,
        },
        kind,
        flags,
        family: nfproto(family),
    };
    let create = NLM_F_CREATE;
    let name = |w: &mut AttributeWriter<'_>| w.str(NFTA_TABLE_NAME, table);
    // Adding an existing table is no error; deleting a missing one is.
    batch.push(operation("add table", msg::NEWTABLE, create), name);
    batch.push(operation("delete table", msg::DELTABLE, 0), name);
    batch.push(operation("add table", msg::NEWTABLE, create), |w| {
        w.str(NFTA_TABLE_NAME, table);
        w.u32(NFTA_TABLE_FLAGS, flags);
        let comment = "kplane: brings answers to the agent's userspace proxy";
        w.bytes(NFTA_TABLE_USERDATA, &userdata::comment(comment));
    });
    batch.push(operation("add chain", msg::NEWCHAIN, create), |w| {
        w.str(NFTA_CHAIN_TABLE, table);
        w.str(NFTA_CHAIN_NAME, CHAIN);
        w.str(NFTA_CHAIN_TYPE, "filter");
        w.u32(NFTA_CHAIN_POLICY, NF_ACCEPT);
        w.nest(NFTA_CHAIN_HOOK, |w| {
            w.u32(NFTA_HOOK_HOOKNUM, HOOK);
            w.bytes(NFTA_HOOK_PRIORITY, &PRIORITY.to_be_bytes());
        });
    });
    let append = create | NLM_F_APPEND;
    batch.push(operation("add rule", msg::NEWRULE, append), |w| {
        w.str(NFTA_RULE_TABLE, table);
        w.str(NFTA_RULE_CHAIN, CHAIN);
        w.nest(NFTA_RULE_EXPRESSIONS, |list| {
            let mut rule = Expressions(list);
            rule.socket(NFT_SOCKET_MARK);
            rule.compare(&marks.own.to_ne_bytes());
            rule.socket(NFT_SOCKET_TRANSPARENT);
            rule.compare(&[1]);
            rule.set_mark(marks.answers);
            rule.verdict(NF_ACCEPT);
        });
    });
    batch
}
