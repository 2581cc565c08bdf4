//! Standing orders of operators about the fleet: which nodes are frozen, since when, by whom and why, and what
//! was approved. No I/O.
//!
//! The newest order that names a node decides, and an order about all nodes names each. So `freeze --all` and then
//! `thaw --node a` leaves all nodes but `a` frozen.
//!
//! All replicas follow one document of orders (`place.rs`). The stream of a frozen node sends nothing once its agent
//! holds something (`streams/outbound.rs`), so agents that do not know such orders are frozen as well. Heartbeats
//! carry the order to newer agents, which report it.

mod approval;
mod backend;
mod store;
#[cfg(test)]
mod tests;

pub use approval::{APPROVAL_LASTS, Approval};
pub use backend::{Backend, Unchanged};
pub use store::OverrideStore;

use std::collections::BTreeMap;
use std::fmt;

use approval::MAX_APPROVALS;
use kplane_model::NodeName;
use kplane_proto::v1 as pb;
use serde::{Deserialize, Serialize};

/// Version of the document.
const VERSION: u32 = 1;
/// Maximum number of orders in force.
pub const MAX_OVERRIDES: usize = 1_000;
/// Longest document that is read, in bytes.
const MAX_BYTES: usize = 900 * 1024;
/// Greatest number of an order in a document: more than a fleet gets in centuries, and far from where numbers wrap.
const MAX_NUMBER: u64 = 1 << 53;
/// Longest reason, in bytes.
pub const MAX_REASON: usize = 256;
/// Longest name of a node or a caller, in bytes.
pub const MAX_NAME: usize = 253;

/// The nodes that an order is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// All nodes, also those that join later.
    All,
    /// One node.
    Node(String),
}

/// An order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Override {
    /// The number of the order; later orders have greater ones.
    number: u64,
    /// The nodes.
    scope: Scope,
    /// Whether the nodes are frozen; otherwise they are not.
    pub frozen: bool,
    /// The operator; empty if the caller was not named.
    pub by: String,
    /// Time of the order, milliseconds since 1970.
    pub at_ms: u64,
    /// The reason that the operator gave, or empty.
    pub reason: String,
}

/// Says who froze or thawed, and why.
impl fmt::Display for Override {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.frozen { "frozen" } else { "thawed" })?;
        if !self.by.is_empty() {
            write!(f, " by {}", self.by)?;
        }
        match self.reason.as_str() {
            "" => Ok(()),
            reason => write!(f, ": {reason}"),
        }
    }
}

impl From<Override> for pb::Frozen {
    fn from(order: Override) -> Self {
        Self {
            since_ms: order.at_ms,
            by: order.by,
            reason: order.reason,
        }
    }
}

/// A new order, not yet in force.
#[derive(Clone, Debug)]
pub struct Wish {
    /// The nodes.
    pub scopes: Vec<Scope>,
    /// Whether to freeze them, or to thaw them.
    pub frozen: bool,
    /// The operator.
    pub by: String,
    /// Time, milliseconds since 1970.
    pub at_ms: u64,
    /// The reason.
    pub reason: String,
}

/// All orders in force.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// The number of the newest order.
    number: u64,
    latest: BTreeMap<Scope, Override>,
    /// Approvals, oldest first.
    approvals: Vec<Approval>,
}

/// A change of the orders in force.
#[derive(Clone, Debug)]
pub(super) enum Change {
    Override(Wish),
    Approve(Approval),
}

#[derive(Serialize, Deserialize)]
struct Document {
    version: u32,
    number: u64,
    #[serde(rename = "orders")]
    overrides: Vec<Override>,
    #[serde(default)]
    approvals: Vec<Approval>,
}

/// The reason why a document cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Damaged {
    /// It is larger than any that kplane writes.
    #[error("it is larger than {MAX_BYTES} bytes")]
    Large,
    /// It is not JSON of the expected form.
    #[error("{0}")]
    Syntax(#[from] serde_json::Error),
    /// A newer version of kplane wrote it.
    #[error("it has version {0}; this control plane knows version {VERSION}")]
    Version(u32),
    /// It contains more orders, or longer texts, than kplane writes.
    #[error("it breaks the limits of {MAX_OVERRIDES} orders and {MAX_NAME} bytes a name")]
    Limits,
    /// An order has a number that kplane does not give.
    #[error("it has the order number {0}, which is not one of kplane's")]
    Number(u64),
}

/// There would be too many orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "there are {MAX_OVERRIDES} orders about single nodes, which is the limit; use --all, or thaw nodes first"
)]
pub struct TooMany;

impl Overrides {
    /// Returns the order that freezes a node.
    pub fn frozen(&self, node: &NodeName) -> Option<&Override> {
        let own = self.latest.get(&Scope::Node(node.to_string()));
        let all = self.latest.get(&Scope::All);
        let newest = own.into_iter().chain(all).max_by_key(|order| order.number);
        newest.filter(|order| order.frozen)
    }

    /// Returns whether nothing is in force.
    fn is_empty(&self) -> bool {
        self.latest.is_empty() && self.approvals.is_empty()
    }

    /// Returns the approvals that replicas may still take.
    pub fn approvals(&self, now_ms: u64) -> impl Iterator<Item = &Approval> {
        self.approvals.iter().filter(move |approval| approval.is_in_force(now_ms))
    }

    /// Returns the newer one of the orders of a document, if there is one, and the orders in force.
    fn newer<'a>(document: Option<&'a Self>, in_force: &'a Self) -> &'a Self {
        document
            .filter(|document| document.number >= in_force.number)
            .unwrap_or(in_force)
    }

    /// Returns why a document cannot replace these orders, if it is older: it was restored from a copy.
    fn outdated(&self, document: &Self) -> Option<String> {
        (document.number < self.number).then(|| {
            format!(
                "the document ends with order {}, and order {} is in force: somebody has restored an older copy. The \
                 next `kpctl freeze` or `kpctl thaw` writes the orders in force over it; a control plane that starts \
                 takes what the document says",
                document.number, self.number
            )
        })
    }

    /// Returns the orders with a change in force.
    fn changed(&self, change: &Change) -> Result<Self, TooMany> {
        match change {
            Change::Override(wish) => self.with(wish),
            Change::Approve(approval) => {
                let mut next = self.clone();
                let over = |one: &Approval| !one.is_in_force(approval.at_ms);
                next.approvals.retain(|one| one.id != approval.id && !over(one));
                next.approvals.push(approval.clone());
                let surplus = next.approvals.len().saturating_sub(MAX_APPROVALS);
                next.approvals.drain(..surplus);
                Ok(next)
            }
        }
    }

    /// Returns whether a change is in force, as far as the document shows it.
    fn has(&self, change: &Change) -> bool {
        match change {
            Change::Approve(approval) => self.approvals.contains(approval),
            Change::Override(wish) => wish.scopes.iter().all(|scope| {
                let order = self.latest.get(scope);
                order.is_some_and(|order| {
                    (order.frozen, order.at_ms, &order.by) == (wish.frozen, wish.at_ms, &wish.by)
                })
            }),
        }
    }

    /// Returns the orders with a new one in force.
    ///
    /// # Errors
    /// [`TooMany`].
    pub fn with(&self, wish: &Wish) -> Result<Self, TooMany> {
        let mut next = self.clone();
        for scope in &wish.scopes {
            next.number += 1;
            if *scope == Scope::All {
                next.latest.clear();
            }
            let order = Override {
                number: next.number,
                scope: scope.clone(),
                frozen: wish.frozen,
                by: wish.by.clone(),
                at_ms: wish.at_ms,
                reason: wish.reason.clone(),
            };
            next.latest.insert(scope.clone(), order);
        }
        next.forget();
        if next.latest.len() > MAX_OVERRIDES { Err(TooMany) } else { Ok(next) }
    }

    /// Forgets thaws that undo nothing.
    fn forget(&mut self) {
        let all_frozen = self.latest.get(&Scope::All).is_some_and(|all| all.frozen);
        self.latest.retain(|_, order| order.frozen || all_frozen);
    }

    /// Reads a document.
    ///
    /// # Errors
    /// [`Damaged`].
    pub fn read(text: &str) -> Result<Self, Damaged> {
        if text.len() > MAX_BYTES {
            return Err(Damaged::Large);
        }
        let document: Document = serde_json::from_str(text)?;
        if document.version != VERSION {
            return Err(Damaged::Version(document.version));
        }
        let is_bounded = |order: &Override| {
            let name = match &order.scope {
                Scope::All => "",
                Scope::Node(name) => name,
            };
            name.len().max(order.by.len()).max(order.reason.len()) <= MAX_REASON
        };
        let approvals = &document.approvals;
        let are_bounded = document.overrides.iter().all(is_bounded)
            && approvals.iter().all(Approval::is_bounded)
            && approvals.len() <= MAX_APPROVALS;
        if document.overrides.len() > MAX_OVERRIDES || !are_bounded {
            return Err(Damaged::Limits);
        }
        let newest = document.overrides.iter().map(|order| order.number).max();
        let number = document.number.max(newest.unwrap_or_default());
        if number > MAX_NUMBER {
            return Err(Damaged::Number(number));
        }
        Ok(Self {
            number,
            latest: document
                .overrides
                .into_iter()
                .map(|order| (order.scope.clone(), order))
                .collect(),
            approvals: document.approvals,
        })
    }

    /// Writes the document.
    pub fn write(&self) -> String {
        let document = Document {
            version: VERSION,
            number: self.number,
            overrides: self.latest.values().cloned().collect(),
            approvals: self.approvals.clone(),
        };
        // Numbers, booleans and texts are always JSON.
        serde_json::to_string_pretty(&document).unwrap_or_default()
    }
}
