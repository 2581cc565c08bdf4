//! Schedulers that Services ask for, an extension of D7. Where the kernel lacks one, the node's scheduler is
//! used.

use std::collections::BTreeMap;

use kplane_model::IpvsScheduler;

use crate::backend::Failure;
use crate::backend::ipvs::machine::{Kernel, KernelError};
use crate::backend::ipvs::scheduler::missing_scheduler;
use crate::plan::ServicePlan;

/// The schedulers that were asked for, and whether the kernel has each.
#[derive(Debug, Default)]
pub(super) struct Schedulers(BTreeMap<IpvsScheduler, bool>);

impl Schedulers {
    /// Returns the scheduler for a plan: its own, or the node's if the plan has none or the kernel lacks it.
    pub(super) fn choose(
        &mut self,
        plan: &ServicePlan,
        of_node: IpvsScheduler,
        kernel: &mut impl Kernel,
        failures: &mut Vec<Failure>,
    ) -> Result<IpvsScheduler, KernelError> {
        let Some(own) = plan.ipvs_scheduler.filter(|own| *own != of_node) else {
            return Ok(of_node);
        };
        let has = match self.0.get(&own) {
            Some(has) => *has,
            None => kernel.has_scheduler(own)?,
        };
        self.0.insert(own, has);
        if has {
            return Ok(own);
        }
        failures.push(Failure::degraded(
            &plan.key,
            format!("{}; {of_node} is used until then", missing_scheduler(own)),
        ));
        Ok(of_node)
    }

    /// Returns a missing scheduler that has been loaded since. This checks the loaded modules, because a
    /// question to the kernel would make the kernel try to load the scheduler again and again.
    pub(super) fn came(&self, kernel: &impl Kernel) -> Option<IpvsScheduler> {
        let mut missing = self.0.iter().filter(|(_, has)| !**has);
        let came = missing.find(|(scheduler, _)| kernel.has_loaded(**scheduler));
        came.map(|(scheduler, _)| *scheduler)
    }

    /// Forgets the schedulers that Services ask for. A complete change names them all again.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
