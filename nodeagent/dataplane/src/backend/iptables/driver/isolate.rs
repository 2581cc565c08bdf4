//! Finds the ServicePorts because of which a change is refused.
//!
//! Nothing is tried on the tables that serve. Parts of the change are executed in separate network
//! namespaces, by the same programs and the same kernel, until the failing ServicePorts are found.

use kplane_model::ServiceKey;

use super::super::restore::parts;
use super::super::ruleset::Ruleset;
use super::tables::Tables;
use super::{Side, StepError};
use crate::backend::{Applied, Change, Failure};
use crate::plan::ServicePlan;
use crate::process::RunError;

type Plans = [(ServiceKey, Option<ServicePlan>)];

impl<T: Tables> Side<T> {
    /// Applies a refused change without the ServicePorts that cannot be programmed.
    pub(super) fn isolate(
        &mut self,
        change: Change<'_>,
        error: &RunError,
    ) -> Result<Applied, StepError> {
        let family = self.settings.family;
        self.look_again(change)?;
        tracing::warn!(%family, %error, "looking for the ServicePort that iptables refuses");
        let mut guilty = Vec::new();
        if let Err(reason) = self.search(change, change.services, &mut guilty) {
            tracing::warn!(%family, %reason, "which ServicePort it is cannot be found out");
        }
        let refused = |key: &ServiceKey| guilty.iter().any(|failure| failure.key == *key);
        let innocent: Vec<_> = change
            .services
            .iter()
            .filter(|(key, _)| !refused(key))
            .cloned()
            .collect();
        let applied = self.apply(Change {
            services: &innocent,
            ..change
        });
        let mut applied = applied.inspect_err(|_| self.ruleset = None)?;
        applied.failures.extend(guilty);
        Ok(applied)
    }

    /// Reads the tables again, to find chains that other programs need, and changes to kplane's chains.
    fn look_again(&mut self, change: Change<'_>) -> Result<(), StepError> {
        let listing = self.read()?;
        if let Some(ruleset) = self.ruleset.take() {
            if let Some(difference) = ruleset.difference(&listing.found) {
                return Err(StepError::Drifted(difference));
            }
            self.ruleset = Some(ruleset);
        } else if change.complete {
            self.ruleset = Some(Ruleset::adopt(self.settings, listing.found));
        }
        self.kept = listing.needed.into_iter().collect();
        Ok(())
    }

    fn search(
        &mut self,
        change: Change<'_>,
        part: &Plans,
        guilty: &mut Vec<Failure>,
    ) -> Result<(), RunError> {
        let error = match self.try_part(change, part) {
            Ok(()) => return Ok(()),
            Err(error @ RunError::Failed { .. }) => error,
            Err(error) => return Err(error),
        };
        match part {
            // The change fails even without ServicePorts.
            [] => Err(error),
            [(key, _)] => {
                self.try_part(change, &[])?;
                guilty.push(Failure {
                    key: key.clone(),
                    reason: format!("iptables-restore {error}"),
                    degraded: false,
                });
                Ok(())
            }
            part => {
                let (first, second) = part.split_at(part.len() / 2);
                self.search(change, first, guilty)?;
                self.search(change, second, guilty)
            }
        }
    }

    fn try_part(&mut self, change: Change<'_>, part: &Plans) -> Result<(), RunError> {
        let staged = Ruleset::new(self.settings).stage(Change {
            services: part,
            complete: true,
            ..change
        });
        let limits = self.tables.limits();
        let texts = staged.steps.iter().flat_map(|step| parts(step, limits));
        self.tables.try_out(&texts.collect::<String>())
    }
}
