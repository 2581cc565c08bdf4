//! What a snapshot lacks.

use std::collections::{BTreeMap, BTreeSet};

use kplane_model::{DesiredKey, DesiredObject, ServiceName};

use super::serves;
use crate::desired::staged::Staged;
use crate::desired::{Desired, Slot};

/// The existing Services that a snapshot lacks.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// The number of existing Services.
    pub(super) services: usize,
    /// The number of existing Services that have endpoints.
    pub(super) serving: usize,
    pub(super) gone: BTreeSet<ServiceName>,
    pub(super) bare: BTreeSet<ServiceName>,
}

impl Desired {
    pub(super) fn losses(&self, staged: &Staged) -> Losses {
        // A Service does not count as lost if a part of it is deleted by name, or is invalid.
        let mut named = BTreeMap::<&ServiceName, bool>::new();
        for (key, change) in &staged.named {
            if let DesiredKey::Service(key) = key {
                let program = change.as_ref().and_then(|object| object.object.as_ref().ok());
                let has = program.is_none_or(|object| match &**object {
                    DesiredObject::Service(program) => serves(program),
                    DesiredObject::Local(_) | DesiredObject::Node(_) | DesiredObject::Policy(_) => {
                        false
                    }
                });
                *named.entry(&key.service).or_default() |= has;
            }
        }
        let mut lost = Losses::default();
        for (service, served) in self.by_service() {
            lost.services += 1;
            lost.serving += usize::from(served);
            match named.get(service) {
                None => drop(lost.gone.insert(service.clone())),
                Some(false) if served => drop(lost.bare.insert(service.clone())),
                Some(_) => {}
            }
        }
        lost
    }

    /// Returns the existing Services, and whether they have endpoints. Work: all ServicePorts.
    pub(super) fn by_service(&self) -> Vec<(&ServiceName, bool)> {
        let mut services: Vec<(&ServiceName, bool)> = Vec::new();
        for program in self.objects.values().filter_map(Slot::service) {
            let (name, served) = (&program.port.key.service, serves(program));
            match services.last_mut() {
                Some((last, any)) if *last == name => *any |= served,
                _ => services.push((name, served)),
            }
        }
        services
    }
}
