//! Services that ask for more resources than a node may spend on one Service.
//!
//! Current control planes trim such Services before sending them; old ones do not. The size of a
//! Service depends on all its ports together. All its ports are therefore planned again when the
//! Service becomes oversized or stops being so.

use std::collections::{BTreeMap, BTreeSet};

use kplane_model::{Allowance, ServiceKey, ServiceName, ServiceSize};

use super::{Desired, Dirty, View};

/// The allowances of oversized Services.
#[derive(Debug, Default)]
pub(super) struct Oversized(BTreeMap<ServiceName, Allowance>);

impl Desired {
    /// Returns the allowance of a Service, if the Service is oversized.
    pub fn allowance(&self, service: &ServiceName) -> Option<Allowance> {
        self.oversized.0.get(service).copied()
    }

    /// Updates the sizes of the Services in an update. Work: their ports.
    pub(super) fn note_sizes(&mut self, dirty: &mut Dirty) {
        let mut names: Vec<ServiceName> = Vec::new();
        for key in &dirty.services {
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
                dirty.services.extend(keys);
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
