//! The part of the driver that finds the ServicePorts because of which a change is refused.
//!
//! Nothing is tried on the tables that serve. Parts of the change are executed in separate network
//! namespaces, by the same programs and the same kernel.

use super::super::restore::parts;
use super::super::ruleset::Ruleset;
use super::tables::Tables;
use super::{IptablesDataPath, failed_restore};
use crate::backend::Change;
use crate::backend::driver::StepError;

impl<T: Tables> IptablesDataPath<T> {
    /// Reads the tables again, to find chains that other programs need, and changes to kplane's chains.
    pub(super) fn find_needed(&mut self, ruleset: &Ruleset) -> Result<(), StepError> {
        let listing = self.read()?;
        let was_adopted = ruleset.node.is_none();
        let difference = ruleset.difference(&listing.found);
        if !was_adopted && let Some(difference) = difference {
            return Err(StepError::Drifted(difference));
        }
        self.kept = listing.needed.into_iter().collect();
        Ok(())
    }

    /// Tries whether a part of a change is accepted. A single ServicePort is at fault only if the rules are
    /// accepted without it.
    pub(super) fn try_out(&mut self, part: Change<'_>) -> Result<(), StepError> {
        let refused = match self.execute_elsewhere(part) {
            Err(refused @ StepError::Refused(_)) if part.services.len() == 1 => refused,
            result => return result,
        };
        let without = Change {
            services: &[],
            ..part
        };
        match self.execute_elsewhere(without) {
            Ok(()) => Err(refused),
            Err(error) => Err(StepError::interrupted(error)),
        }
    }

    fn execute_elsewhere(&mut self, part: Change<'_>) -> Result<(), StepError> {
        let staged = Ruleset::new(self.settings).stage(Change {
            complete: true,
            ..part
        });
        let limits = self.tables.limits();
        let texts = staged.steps.iter().flat_map(|step| parts(step, limits));
        let tried = self.tables.try_out(&texts.collect::<String>());
        tried.map_err(failed_restore)
    }
}
