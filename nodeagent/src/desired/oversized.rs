//! Services that ask for more than a node is made to hold for one.
//!
//! A control plane cuts them before it sends them; an old one does not. What a Service asks for is a
//! matter of all its ports together, so these are planned together when it begins or ceases to be too
//! much.

use std::collections::{BTreeMap, BTreeSet};

use kplane_model::{Allowance, ServiceKey, ServiceName, ServiceSize};

use super::{Desired, Touched, View};

/// What such Services get.
#[derive(Debug, Default)]
pub(super) struct Oversized(BTreeMap<ServiceName, Allowance>);

impl Desired {
    /// What a Service gets, if it asks for more.
    #[must_use]
    pub fn allowance(&self, service: &ServiceName) -> Option<Allowance> {
        self.oversized.0.get(service).copied()
    }

    /// Looks at the Services of an update. Work: their ports.
    pub(super) fn note_sizes(&mut self, touched: &mut Touched) {
        let mut names: Vec<ServiceName> = Vec::new();
        for key in &touched.services {
            if names.last() != Some(&key.service) {
                names.push(key.service.clone());
            }
        }
        for service in names {
            let size = self.size(&service);
            let now = (!size.fits()).then(|| size.allowance());
            let before = match now {
                Some(now) => self.oversized.0.insert(service.clone(), now),
                None => self.oversized.0.remove(&service),
            };
            if now != before {
                let ports = self.ports_of(&service);
                let keys: BTreeSet<ServiceKey> =
                    ports.map(|(program, _)| program.port.key.clone()).collect();
                touched.services.extend(keys);
            }
        }
    }

    fn size(&self, service: &ServiceName) -> ServiceSize {
        let mut size = ServiceSize::default();
        for (program, local) in self.ports_of(service) {
            size.add(&program.port, endpoints((program, local)));
        }
        size
    }
}

fn endpoints((program, local): View<'_>) -> usize {
    let shared = program.endpoints.len().max(program.serving_others.len());
    shared.max(local.map_or(0, |local| local.endpoints.len()))
}
