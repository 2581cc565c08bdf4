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
use kplane_netlink::{Batch, CommitError, Errno, NfSocket};

use super::super::uapi::*;
use super::capture::CaptureError;
use super::expressions::{ExpressionWriter, NFT_SOCKET_MARK, NFT_SOCKET_TRANSPARENT};
use super::own_table::{self, BaseChain, OwnTable};
use crate::proxy_address::DIVERT_TABLES as TABLES;

/// The hook is `NF_INET_PRE_ROUTING`, and the priority `NF_IP_PRI_MANGLE`: before the kernel looks for a route.
const CHAIN: BaseChain = BaseChain::new("prerouting", "filter", 0, -150);

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
                if rejections.iter().any(|rejection| rejection.errno == Errno::EPERM) =>
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
    own_table::commit(socket, |flags| structure(table, family, marks, flags)).map(drop)
}

/// Returns the operations that create the table, in place of one that an earlier process left.
fn structure(table: &'static str, family: Family, marks: DivertMarks, flags: u32) -> Batch {
    let mut batch = Batch::new();
    let table = OwnTable {
        family,
        name: table,
    };
    let comment = "kplane: brings answers to the agent's userspace proxy";
    table.push_new(&mut batch, flags, comment);
    table.push_chain(&mut batch, &CHAIN);
    table.push_rule(&mut batch, CHAIN.name, |list| {
        let mut rule = ExpressionWriter(list);
        rule.socket(NFT_SOCKET_MARK);
        rule.compare(&marks.own.to_ne_bytes());
        rule.socket(NFT_SOCKET_TRANSPARENT);
        rule.compare(&[1]);
        rule.set_mark(marks.answers);
        rule.verdict(NF_ACCEPT);
    });
    batch
}
