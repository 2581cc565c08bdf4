//! The part of the driver that handles the rules.

use super::{Side, StepError};
use crate::backend::iptables::{self, Found};
use crate::backend::ipvs::kernel::Kernel;
use crate::backend::ipvs::rules::{self, Shape, Steps};
use crate::backend::ipvs::sets::SetId;

/// The rules in the kernel.
#[derive(Debug, Default)]
pub(super) struct Rules {
    pub(super) found: Found,
    /// The facts for which the rules were written.
    shape: Option<Shape>,
    /// The generation in which the rules are known to be these.
    known: Option<u32>,
}

impl Rules {
    /// Returns whether the rules need not be read again until a program changes any.
    pub(super) fn are_sure(&self) -> bool {
        self.known.is_some()
    }
}

impl<K: Kernel> Side<K> {
    /// Returns the steps for the rules; usually there are none.
    pub(super) fn steps(&mut self, complete: bool) -> Steps {
        let shape = self.shape();
        if !complete && self.rules.shape.as_ref() == Some(&shape) {
            return Steps::default();
        }
        let steps = rules::compare(&shape, &self.rules.found);
        self.rules.shape = Some(shape);
        steps
    }

    pub(super) fn restore(&mut self, steps: &[iptables::Step]) -> Result<u64, StepError> {
        if steps.is_empty() {
            return Ok(0);
        }
        self.rules.known = None;
        let bytes = self.kernel.restore(steps)?;
        rules::accept(&mut self.rules.found, steps);
        Ok(bytes)
    }

    pub(super) fn shape(&self) -> Shape {
        Shape {
            settings: iptables::Settings {
                masquerade_bit: self.settings.masquerade_bit,
                pod_interface: self.settings.pod_interface,
                ..iptables::Settings::new(self.family)
            },
            node: self.node.clone(),
            external_ips: [SetId::ExternalIp, SetId::ExternalIpLocal]
                .iter()
                .any(|set| self.state.entries(*set).0 > 0),
            denied: self.state.denied(),
            drop_invalid: self.settings.ipvs.drop_invalid,
            lacks: self.lacks,
        }
    }

    /// Reads the rules, unless it is certain that no program changed them.
    pub(super) fn read_rules(&mut self) -> Result<(), StepError> {
        let generation = self.kernel.generation();
        let sure = generation.is_some() && self.rules.known == generation;
        if self.known && sure {
            return Ok(());
        }
        self.rules.found = self.kernel.rules()?;
        self.rules.known = generation.filter(|_| generation == self.kernel.generation());
        Ok(())
    }
}
