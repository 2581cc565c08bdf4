//! A backend that accepts everything and does nothing.

use std::collections::BTreeMap;

use kplane_model::{Family, ServiceKey};

use super::{
    Applied, ApplyError, Backend, Change, Description, Failures, ModeMetrics, Side, Verification,
};
use crate::plan::ServicePlan;

/// The facts that hold for this backend on every machine.
pub(super) const DESCRIPTION: Description = Description {
    name: "noop",
    summary: "Accepts everything and does nothing: for tests and dry runs",
    deprecation: None,
    programs_kernel: false,
    shares_names: false,
    has_virtual_servers: false,
    is_proxy: false,
    needs: &[],
    leaves_conntrack_entries: false,
    metrics: ModeMetrics {
        full_and_partial: true,
        failures: Failures::Nftables,
        rules: false,
    },
};

/// Opens the backend.
pub fn open() -> Backend {
    open_with(|_| Box::new(Noop::default()))
}

/// Opens a backend with data paths of the caller's own, for tests.
pub fn open_with(side: impl FnMut(Family) -> Box<dyn Side>) -> Backend {
    Backend::new(&DESCRIPTION, Family::ALL.map(side))
}

/// One family that keeps its plans in memory, for tests.
#[derive(Debug, Default)]
pub struct Noop {
    services: BTreeMap<ServiceKey, ServicePlan>,
}

impl Noop {
    /// Returns the ServicePorts that a real data path would hold.
    pub fn services(&self) -> &BTreeMap<ServiceKey, ServicePlan> {
        &self.services
    }
}

impl Side for Noop {
    fn apply(&mut self, change: Change<'_>) -> Result<Applied, ApplyError> {
        if change.complete {
            self.services.clear();
        }
        for (key, plan) in change.services {
            match plan {
                Some(plan) => self.services.insert(key.clone(), plan.clone()),
                None => self.services.remove(key),
            };
        }
        Ok(Applied::default())
    }

    fn verify(&mut self) -> Result<Verification, ApplyError> {
        Ok(Verification::Equal)
    }
}
