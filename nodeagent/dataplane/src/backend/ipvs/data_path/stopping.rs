//! A kernel that stops after some operations, as if the agent had been killed then. It serves tests on a real
//! kernel.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kplane_model::IpvsScheduler;

use super::super::machine::{Kernel, KernelError, Reading, RefusedOp};
use super::super::sets::{Entry, SetId};
use super::super::state::Op;
use super::open_on;
use crate::backend::iptables::{Flavour, FoundRules, TableChange};
use crate::backend::{self, Backend, OpenError};

/// Number of operations that both families together may still do.
#[derive(Clone, Debug)]
pub struct OperationBudget(Arc<AtomicUsize>);

impl OperationBudget {
    /// Returns a budget of this many operations: entries of sets, servers, addresses. All rules of a step are
    /// one operation.
    pub fn new(operations: usize) -> Self {
        Self(Arc::new(AtomicUsize::new(operations)))
    }

    /// Sets the budget to this many operations.
    pub fn set(&self, operations: usize) {
        self.0.store(operations, Ordering::SeqCst);
    }

    /// Returns the number of operations left.
    pub fn left(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    /// Takes up to this many operations. Returns the number taken.
    fn take(&self, wanted: usize) -> usize {
        let less = |left: usize| Some(left.saturating_sub(wanted));
        let taken = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        taken.unwrap_or_else(|left| left).min(wanted)
    }

    fn one(&self) -> Result<(), KernelError> {
        match self.take(1) {
            0 => Err(KernelError::Stopped),
            _ => Ok(()),
        }
    }
}

/// A kernel with a budget. Reads are free.
#[derive(Debug)]
struct Stopping<K> {
    kernel: K,
    budget: OperationBudget,
}

/// Opens a backend that stops for good when the budget is used up.
///
/// # Errors
/// See [`open`](super::super::open).
pub fn open_stopping(
    settings: &backend::Settings,
    budget: &OperationBudget,
) -> Result<Backend, OpenError> {
    open_on(settings, |kernel| {
        let budget = budget.clone();
        Stopping { kernel, budget }
    })
}

impl<K: Kernel> Kernel for Stopping<K> {
    fn read(&mut self) -> Result<Reading, KernelError> {
        self.kernel.read()
    }

    fn rules(&mut self) -> Result<FoundRules, KernelError> {
        self.kernel.rules()
    }

    fn generation(&mut self) -> Option<u32> {
        self.kernel.generation()
    }

    fn perform(&mut self, ops: &[Op]) -> Result<(Vec<RefusedOp>, u64), KernelError> {
        let count = self.budget.take(ops.len());
        let done = self.kernel.perform(ops.get(..count).unwrap_or(ops))?;
        if count < ops.len() {
            return Err(KernelError::Stopped);
        }
        Ok(done)
    }

    fn grow(&mut self, set: SetId, held: &HashSet<Entry>, to: usize) -> Result<u32, KernelError> {
        self.budget.one()?;
        self.kernel.grow(set, held, to)
    }

    fn restore(&mut self, steps: &[TableChange]) -> Result<u64, KernelError> {
        self.budget.one()?;
        self.kernel.restore(steps)
    }

    fn has_loaded(&self, scheduler: IpvsScheduler) -> bool {
        self.kernel.has_loaded(scheduler)
    }

    fn has_scheduler(&mut self, scheduler: IpvsScheduler) -> Result<bool, KernelError> {
        self.kernel.has_scheduler(scheduler)
    }

    fn flavour(&self) -> Flavour {
        self.kernel.flavour()
    }
}
