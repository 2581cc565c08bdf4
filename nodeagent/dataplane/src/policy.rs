//! NetworkPolicies in the kernel: `table ip kplane-policy` and `table ip6 kplane-policy`.
//!
//! The tables' chains and rules are constant, and all state is elements of their sets. They stand beside the tables of
//! Services, and are the same whatever the backend is: they judge the first packet of a connection after its destination
//! was chosen, and before its source is masqueraded. Ids such as NP6 refer to the list of semantics of NetworkPolicies.

use std::os::fd::OwnedFd;
use std::time::Duration;

use kplane_model::{Cidr, Family, PolicyKey, PolicyObject};

use crate::backend::{ApplyError, Verification};

/// A change of a family's policies, as the engine hands it over.
#[derive(Clone, Copy, Debug)]
pub struct PolicyChange<'a> {
    /// Objects of all families that are new or changed (`Some`), or gone (`None`).
    pub objects: &'a [(PolicyKey, Option<&'a PolicyObject>)],
    /// Whether `objects` is the complete state. The first change is, and each one after an error.
    pub complete: bool,
    /// Ranges of the node's Pods, of all families: while there is a policy, addresses in them that no Pod is known to
    /// have are cut off (NP19).
    pub pod_ranges: &'a [Cidr],
}

/// The outcome of a change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyApplied {
    /// Number of operations sent to the kernel; 0 when it already held everything.
    pub operations: u64,
    /// Number of bytes sent to the kernel.
    pub bytes: u64,
    /// Time for working out what changes.
    pub plan: Duration,
    /// Time for encoding.
    pub encode: Duration,
    /// Time until the kernel's acknowledgement.
    pub kernel: Duration,
    /// All parts that are not enforced as written now, not only those of this change. Nothing of them is open.
    pub failures: Vec<PolicyFailure>,
    /// Changes by another program that were repaired before this one, and the program's name; human-readable.
    pub repaired: Option<String>,
}

/// The reason why a part of the policies is not enforced as written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyFailure {
    /// The Pod or policy.
    pub key: PolicyKey,
    /// The problem, human-readable.
    pub reason: String,
}

/// Sizes of what a family enforces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyCounts {
    /// Policies that select a Pod of this node.
    pub policies: u64,
    /// Pods of this node.
    pub pods: u64,
    /// Pods of this node that some policy isolates.
    pub isolated: u64,
    /// Elements in the kernel.
    pub elements: u64,
}

/// Both families' tables.
#[derive(Debug)]
pub struct Enforcer {
    _private: (),
}

impl Enforcer {
    /// Returns one for a data path that enforces nothing: an error as soon as there is a policy.
    #[must_use]
    pub fn none() -> Self {
        Self { _private: () }
    }

    /// Applies a change of a family. Does nothing to the kernel while there is no policy.
    ///
    /// # Errors
    /// [`ApplyError`]: no part of the change counts as applied.
    pub fn apply(
        &mut self,
        _family: Family,
        _change: PolicyChange<'_>,
    ) -> Result<PolicyApplied, ApplyError> {
        Ok(PolicyApplied::default())
    }

    /// Reads a family's table back, and repairs what differs.
    ///
    /// # Errors
    /// [`ApplyError`] when it cannot be read.
    pub fn verify(&mut self, _family: Family) -> Result<Verification, ApplyError> {
        Ok(Verification::Equal)
    }

    /// Repairs changes by other programs, as the kernel reported them.
    ///
    /// # Errors
    /// As [`Enforcer::verify`].
    pub fn mend(&mut self, _family: Family) -> Result<Verification, ApplyError> {
        Ok(Verification::Equal)
    }

    /// Returns a descriptor that is readable when there are reports of the kernel to read; `None` if the backend's
    /// notifications cover the tables, or there is no table yet.
    #[must_use]
    pub fn readiness(&self) -> Option<OwnedFd> {
        None
    }

    /// Reads the reports. Returns, by family, whether another program changed the tables, which [`Enforcer::mend`]
    /// repairs.
    pub fn meddled(&mut self) -> [bool; 2] {
        [false; 2]
    }

    /// Returns the sizes of what a family enforces.
    #[must_use]
    pub fn counts(&self, _family: Family) -> PolicyCounts {
        PolicyCounts::default()
    }
}
