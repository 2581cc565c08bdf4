//! Taking everything of ours out of the data path: servers, addresses, rules, sets.

use super::super::kernel::{Kernel, KernelError, LINK};
use super::super::state::State;
use super::{Side, StepError};
use kplane_netlink::{Errno, delete_link};

impl<K: Kernel> Side<K> {
    /// Removes everything of this family that is ours, as far as it can be.
    pub(super) fn remove(&mut self) -> Vec<StepError> {
        self.known = false;
        self.state = State::default();
        let reading = match self.kernel.read() {
            Ok(reading) => reading,
            Err(error) => return vec![error.into()],
        };
        self.take(reading, true);
        let protected = &self.settings.ipvs.exclude_cidrs;
        let ops = self.state.compare(protected);
        let mut errors = Vec::new();
        match self.kernel.perform(&ops.clear) {
            Ok((refused, _)) => {
                let reasons = refused.into_iter().map(|refused| refused.reason);
                errors.extend(reasons.map(StepError::Left));
            }
            Err(error) => errors.push(error.into()),
        }
        if let Err(error) = self.kernel.remove_rules() {
            errors.push(StepError::Left(error));
        }
        match self.kernel.remove_sets() {
            Ok(left) => errors.extend(left.into_iter().map(StepError::Left)),
            Err(error) => errors.push(error.into()),
        }
        self.state = State::default();
        errors
    }
}

/// Removes the device.
pub(super) fn link() -> Result<(), StepError> {
    match delete_link(LINK) {
        Err(error) if error.errno() != Some(Errno::ENODEV) => Err(KernelError::Link(error).into()),
        _ => Ok(()),
    }
}
