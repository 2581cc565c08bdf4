//! A backend that accepts everything and does nothing.

use std::collections::BTreeMap;

use kplane_model::{Family, ServiceKey};

use super::{Applied, ApplyError, Backend, Change, Kind, Verification};
use crate::plan::ServicePlan;

/// Remembers the plans it was given, so that tests can look at them.
#[derive(Debug, Default)]
pub struct Noop {
    services: BTreeMap<ServiceKey, ServicePlan>,
}

impl Noop {
    /// What would be in the data path.
    #[must_use]
    pub fn services(&self) -> &BTreeMap<ServiceKey, ServicePlan> {
        &self.services
    }
}

impl Backend for Noop {
    fn name(&self) -> &'static str {
        Kind::Noop.name()
    }

    fn apply(&mut self, change: Change<'_>) -> Result<Applied, ApplyError> {
        if change.complete {
            self.services.retain(|key, _| key.family != change.family);
        }
        for (key, plan) in change.services {
            match plan {
                Some(plan) => self.services.insert(key.clone(), plan.clone()),
                None => self.services.remove(key),
            };
        }
        Ok(Applied::default())
    }

    fn verify(&mut self, _family: Family) -> Result<Verification, ApplyError> {
        Ok(Verification::Equal)
    }
}
