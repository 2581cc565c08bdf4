//! NetworkPolicies in the kernel: `table ip kplane-policy` and `table ip6 kplane-policy`.
//!
//! The tables' chains and rules are constant, and all state is elements of their sets. They stand beside the tables of
//! Services, and are the same whatever the backend is: they judge the first packet of a connection after its destination
//! was chosen, and before its source is masqueraded. Ids such as NP6 refer to the list of semantics of NetworkPolicies.

mod before;
mod blocks;
mod content;
mod deciding;
mod departed;
mod elsewhere;
mod expand;
mod followed;
mod grants;
mod held;
mod judge;
mod limits;
mod numbers;
mod objects;
mod phases;
mod ported;
mod pricing;
mod refused;
mod report;
mod shares;
mod side;
mod subjects;
mod suspects;
mod tiers;

#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::time::Duration;

use kplane_netlink::Errno;
use kplane_netlink::nflog::GROUP;

use kplane_model::{Cidr, Family, PolicyKey, PolicyObject};

pub use self::followed::Followed;
use self::side::{PART, PolicySide, ReadBack};
use self::suspects::Suspects;
pub use self::suspects::Tell;
use crate::backend::nftables::{Cost, PolicyTable, PolicyTables, can_log};
use crate::backend::{ApplyError, Verification};
use crate::conntrack::{AnyFlow, Sweeper};
pub use kplane_netlink::nflog::{Logged, PacketLog};

/// An object of all families that is new or changed (`Some`), or gone (`None`).
pub type PolicyPart<'a> = (PolicyKey, Option<&'a PolicyObject>);

/// A change of a family's policies, as the engine hands it over.
#[derive(Clone, Copy, Debug)]
pub struct PolicyChange<'a> {
    /// The objects.
    pub objects: &'a [PolicyPart<'a>],
    /// Whether `objects` is the complete state. The first change is, and each one after an error.
    pub complete: bool,
    /// Whether unknown Pods of the node are cut off although there is no policy, because nobody knows yet which there are.
    pub closed: bool,
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
    /// Number of transactions that the kernel does not have yet: [`Enforcer::go_on`] sends them.
    pub rest: usize,
    /// Changes by another program that were repaired before this one, and the program's name; human-readable.
    pub repaired: Option<String>,
}

impl PolicyApplied {
    fn add(&mut self, cost: Cost) {
        self.bytes += cost.bytes;
        self.encode += cost.encode;
        self.kernel += cost.kernel;
    }
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

/// Opens the log of denied packets in this thread's network namespace, which only one program can have.
///
/// # Errors
/// The reason why there is none, human-readable.
pub fn open_log() -> Result<PacketLog, String> {
    if !can_log() {
        return Err(
            "this kernel logs no packets for programs (modules nft_log, nfnetlink_log)".to_owned(),
        );
    }
    PacketLog::open().map_err(|error| match error.errno() {
        // The kernel has the same number for both.
        Some(Errno::EPERM | Errno::EBUSY) => format!(
            "another program of the node reads the packets of log group {GROUP}, or the agent lacks CAP_NET_ADMIN"
        ),
        _ => error.to_string(),
    })
}

/// Both families' tables.
#[derive(Debug)]
pub struct Enforcer {
    tables: PolicyTables,
    sides: [PolicySide; 2],
    sweeper: Option<Sweeper>,
    suspects: Suspects,
}

impl Enforcer {
    /// Returns an enforcer that knows nothing yet, for the tables beside a backend
    /// ([`Backend::policies`](crate::backend::Backend::policies)). Connections live on, whatever policies say later:
    /// see [`Enforcer::cut_connections`].
    pub fn new(tables: PolicyTables) -> Self {
        Self {
            tables,
            sides: Family::ALL.map(PolicySide::new),
            sweeper: None,
            suspects: Suspects::default(),
        }
    }

    /// From now on, sets policies aside at which the process has died twice. `left` is the text that the processes before it
    /// left, and `tell` takes the text for the next one.
    pub fn remember_deaths(&mut self, left: &str, tell: Tell) {
        self.suspects = Suspects::new(left, tell);
    }

    /// From now on, connections end that policies deny (NP13): [`Enforcer::judge_flows`] has to judge what the sweeper hands
    /// over.
    pub fn cut_connections(&mut self, sweeper: Sweeper) {
        self.sweeper = Some(sweeper);
    }

    /// Has those of these flows of one family cut that policies deny now.
    pub fn judge_flows(&mut self, flows: Vec<AnyFlow>) {
        let family = flows.first().map(|flow| Family::of(flow.source));
        if let (Some(sweeper), Some(family)) = (&self.sweeper, family) {
            sweeper.cut(family, self.sides[family as usize].denied(flows));
        }
    }

    /// Applies the whole of a change, as [`Enforcer::begin`] and [`Enforcer::go_on`] do in parts.
    ///
    /// # Errors
    /// As these.
    pub fn apply(
        &mut self,
        family: Family,
        change: PolicyChange<'_>,
    ) -> Result<PolicyApplied, ApplyError> {
        let mut applied = self.begin(family, change)?;
        while applied.rest > 0 {
            self.go_on(family, &mut applied)?;
        }
        Ok(applied)
    }

    /// Returns how many objects of a change the engine takes over at once.
    pub fn lot(&self) -> usize {
        self.tables.part().unwrap_or(PART)
    }

    /// Takes over some objects of a change of a family. [`Enforcer::begin`] takes over the rest, and sends what they all
    /// lead to.
    pub fn take_over(&mut self, family: Family, objects: &[PolicyPart<'_>]) {
        self.sides[family as usize].take_over(objects, &mut self.suspects);
    }

    /// Sends the next part of a change; `applied` is its outcome up to now.
    ///
    /// # Errors
    /// [`ApplyError`]: no part of the change counts as applied.
    pub fn go_on(&mut self, family: Family, applied: &mut PolicyApplied) -> Result<(), ApplyError> {
        let sent = self.sides[family as usize].go_on(applied);
        self.applied(family, applied, sent)
    }

    /// Applies the first part of a change of a family. Does nothing to the kernel while there is no policy.
    ///
    /// The first change turns the table that an earlier process left into the new one step by step: connections notice
    /// nothing of a restart.
    ///
    /// # Errors
    /// [`ApplyError`]: no part of the change counts as applied. So it is with any policy where the backend programs
    /// nothing that could enforce it.
    pub fn begin(
        &mut self,
        family: Family,
        change: PolicyChange<'_>,
    ) -> Result<PolicyApplied, ApplyError> {
        let begun = self.sides[family as usize].begin(&mut self.tables, &mut self.suspects, change);
        let mut applied = PolicyApplied::default();
        let sent = begun.map(|begun| applied = begun);
        self.applied(family, &applied, sent)?;
        Ok(applied)
    }

    /// Follows a part of a change.
    fn applied(
        &mut self,
        family: Family,
        applied: &PolicyApplied,
        sent: Result<(), ApplyError>,
    ) -> Result<(), ApplyError> {
        if !self.sides.iter().any(PolicySide::has_table) {
            self.tables.close();
        }
        sent?;
        if applied.rest > 0 {
            return Ok(());
        }
        let lost = self.sides[family as usize].take_lost();
        if let Some(sweeper) = &self.sweeper {
            sweeper.judge(family, lost);
        }
        Ok(())
    }

    /// Has all connections judged that policies judge: some may have begun while another program's change was in effect.
    fn sweep(&self, family: Family) {
        if let Some(sweeper) = &self.sweeper {
            sweeper.judge(family, self.sides[family as usize].content.judged());
        }
    }

    /// Sets the Pods whose denied packets are logged for the agent, from the next change of each family on.
    pub fn follow(&mut self, followed: &Followed) {
        for side in &mut self.sides {
            side.content.followed = followed.clone();
        }
    }

    /// Reads a family's table back, and repairs what differs.
    ///
    /// # Errors
    /// [`ApplyError`] when it cannot be read.
    pub fn verify(&mut self, family: Family) -> Result<Verification, ApplyError> {
        self.read_back(family, PolicyTable::verify)
    }

    /// Repairs changes by other programs, as the kernel reported them.
    ///
    /// # Errors
    /// As [`Enforcer::verify`].
    pub fn repair(&mut self, family: Family) -> Result<Verification, ApplyError> {
        self.read_back(family, PolicyTable::repair)
    }

    fn read_back(
        &mut self,
        family: Family,
        read_back: ReadBack,
    ) -> Result<Verification, ApplyError> {
        let looked = self.sides[family as usize].read_back(read_back);
        if let Ok(Verification::Repaired(_)) = looked {
            self.sweep(family);
        }
        looked
    }

    /// Returns the number of [`Enforcer::readiness`]'s descriptor, which differs for each; 0 = there is none.
    pub fn generation(&self) -> u64 {
        self.tables.generation()
    }

    /// Returns a descriptor that is readable when there are reports of the kernel to read; `None` if the backend's
    /// notifications cover the tables, or there is no table yet.
    pub fn readiness(&self) -> Option<OwnedFd> {
        self.tables.readiness()
    }

    /// Reads the reports. Returns, by family, whether another program changed the tables, which [`Enforcer::repair`]
    /// repairs.
    pub fn drifted(&mut self) -> [bool; 2] {
        if !self.sides.iter().any(PolicySide::has_table) {
            return [false; 2];
        }
        let drifted = self.tables.drifted();
        Family::ALL
            .map(|family| drifted[family as usize] && self.sides[family as usize].has_table())
    }

    /// Returns whether the kernel may have a family's table, of this process or an earlier one.
    pub fn may_have_table(&self, family: Family) -> bool {
        self.sides[family as usize].may_have_table()
    }

    /// Returns the sizes of what a family enforces.
    pub fn counts(&self, family: Family) -> PolicyCounts {
        self.sides[family as usize].content.counts()
    }
}
