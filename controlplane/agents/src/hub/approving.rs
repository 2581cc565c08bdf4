//! Approvals of operators, of this replica and of others.

use std::time::SystemTime;

use kplane_desired_state::index::{Held, HeldState};

use super::index::IndexOwner;
use super::{Closing, IndexHandle};
use crate::overrides::Approval;

/// Number of approvals that are remembered, so that none is taken twice: more than a document has.
const APPROVALS: usize = 64;

/// The number of held objects that the operator saw before approving their removal.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Services that are not named.
    pub services: usize,
    /// Services whose last endpoints are not named.
    pub without_endpoints: usize,
}

/// The result of the operator's approval.
#[derive(Clone, Debug)]
pub struct Approved {
    /// The held objects that were removed.
    pub released: Option<Held>,
    /// The doubt that the approval resolved; empty if there was none.
    pub doubt: String,
    /// The first revision with the approval.
    pub revision: u64,
    /// Held objects and doubts that the operator saw.
    pub held_state: HeldState,
    /// A random number of the approval, so that this replica does not take it again.
    pub id: u64,
}

/// More is held than the operator saw, so nothing was released.
#[derive(Clone, Debug, thiserror::Error)]
#[error("more objects are held than were approved, so nothing was removed: {0}")]
pub struct HeldMore(Held);

/// The right to approve what is held. It leads to nothing else of the index.
#[derive(Clone, Debug)]
pub struct Approvals(IndexHandle);

impl IndexHandle {
    /// Returns the right to approve what is held.
    pub fn approvals(&self) -> Approvals {
        Approvals(self.clone())
    }
}

impl Approvals {
    /// Confirms the source's state on behalf of the operator: removes the objects that are held,
    /// and makes agents do the same.
    ///
    /// # Errors
    /// [`Closing`]; [`HeldMore`] within.
    pub async fn approve(&self, seen: Seen) -> Result<Result<Approved, HeldMore>, Closing> {
        self.0.ask(move |owner| owner.approve(seen)).await
    }

    /// Takes an approval that another replica was given, if it covers what this replica holds and was not taken before.
    ///
    /// # Errors
    /// [`Closing`].
    pub async fn take(&self, approval: Approval) -> Result<bool, Closing> {
        self.0.ask(move |owner| owner.take(&approval)).await
    }
}

impl IndexOwner {
    /// Approves what the operator saw.
    fn approve(&mut self, seen: Seen) -> Result<Approved, HeldMore> {
        if let Some(held) = self.index.held()
            && (held.services > seen.services || held.without_endpoints > seen.without_endpoints)
        {
            return Err(HeldMore(held));
        }
        let (id, held_state) = (rand::random(), self.index.held_state());
        let doubt = self.index.trust().doubt().to_owned();
        let released = self.approve_now(id);
        Ok(Approved {
            released,
            doubt,
            revision: self.hub.store().head().borrow().revision,
            held_state,
            id,
        })
    }

    /// Takes an approval of another replica; returns whether it was of use.
    fn take(&mut self, approval: &Approval) -> bool {
        let known = self.approvals.contains(&approval.id);
        let covered = !known
            && self.index.needs_approval()
            && self.index.held_state().is_covered_by(&approval.held_state);
        if covered {
            self.approve_now(approval.id);
        }
        covered
    }

    /// Removes what is held; returns it.
    fn approve_now(&mut self, id: u64) -> Option<Held> {
        if self.approvals.len() >= APPROVALS {
            self.approvals.pop_front();
        }
        self.approvals.push_back(id);
        let (released, outcome) = self.index.approve(SystemTime::now());
        self.share(outcome, None);
        released
    }
}
