//! The part of the driver that handles the rules.

use super::{IpvsDataPath, interrupted, unreadable};
use crate::backend::driver::StepError;
use crate::backend::iptables::{self, FoundRules};
use crate::backend::ipvs::machine::Kernel;
use crate::backend::ipvs::rules::{self, RuleFacts, Steps};
use crate::backend::ipvs::sets::SetId;
use crate::backend::ipvs::state::IpvsState;

/// The rules in the kernel.
#[derive(Debug, Default)]
pub(super) struct InstalledRules {
    pub(super) found: FoundRules,
    /// The facts for which the rules were written.
    shape: Option<RuleFacts>,
    /// The generation in which the rules are known to be these.
    known: Option<u32>,
}

impl InstalledRules {
    /// Forgets in which generation the rules were read, so that they are read again.
    pub(super) fn forget(&mut self) {
        self.known = None;
    }

    /// Returns whether the rules need not be read again until a program changes any.
    pub(super) fn are_sure(&self) -> bool {
        self.known.is_some()
    }
}

impl<K: Kernel> IpvsDataPath<K> {
    /// Returns the steps for the rules; usually there are none.
    pub(super) fn steps(&mut self, state: &IpvsState, complete: bool) -> Steps {
        let shape = self.shape(state);
        if !complete && self.rules.shape.as_ref() == Some(&shape) {
            return Steps::default();
        }
        let steps = rules::compare(&shape, &self.rules.found);
        self.rules.shape = Some(shape);
        steps
    }

    pub(super) fn restore(&mut self, steps: &[iptables::TableChange]) -> Result<u64, StepError> {
        if steps.is_empty() {
            return Ok(0);
        }
        self.rules.known = None;
        let bytes = self.kernel.restore(steps).map_err(interrupted)?;
        rules::accept(&mut self.rules.found, steps);
        Ok(bytes)
    }

    pub(super) fn shape(&self, state: &IpvsState) -> RuleFacts {
        RuleFacts {
            settings: iptables::RuleSettings {
                masquerade_bit: self.settings.masquerade_bit,
                pod_interface: self.settings.pod_interface,
                ..iptables::RuleSettings::new(self.family)
            },
            node: self.node.clone(),
            external_ips: [SetId::ExternalIp, SetId::ExternalIpLocal]
                .iter()
                .any(|set| state.entries(*set).0 > 0),
            denied: state.denied(),
            drop_invalid: self.settings.ipvs.drop_invalid,
            lacks: self.lacks,
        }
    }

    /// Reads the rules, unless it is certain that no program changed them.
    pub(super) fn read_rules(&mut self) -> Result<(), StepError> {
        let generation = self.kernel.generation();
        let sure = generation.is_some() && self.rules.known == generation;
        if sure {
            return Ok(());
        }
        self.rules.found = self.kernel.rules().map_err(unreadable)?;
        self.rules.known = generation.filter(|before| self.kernel.generation() == Some(*before));
        Ok(())
    }
}
