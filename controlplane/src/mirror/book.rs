//! The names of all published ServicePorts, with what the guard needs to know of each.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use kplane_model::{ServiceKey, ServiceName};

use super::kept::Kept;
use crate::index::{Loss, Totals};
use crate::publish::PortChange;

/// One published ServicePort.
#[derive(Clone, Copy, Debug)]
struct Port {
    endpoints: usize,
    /// Some endpoint is usable somewhere.
    has_any: bool,
}

/// All published ServicePorts, by Service.
#[derive(Debug, Default)]
pub(super) struct Book {
    services: BTreeMap<ServiceName, BTreeMap<ServiceKey, Port>>,
    endpoints: usize,
    /// Number of Services with a usable endpoint.
    served: usize,
}

impl Book {
    pub(super) fn totals(&self) -> Totals {
        Totals {
            services: self.services.len(),
            endpoints: self.endpoints,
        }
    }

    /// Returns all ServicePorts.
    pub(super) fn keys(&self) -> impl Iterator<Item = &ServiceKey> {
        self.services.values().flat_map(BTreeMap::keys)
    }

    /// Returns all ServicePorts of a Service.
    pub(super) fn ports_of(&self, service: &ServiceName) -> impl Iterator<Item = &ServiceKey> {
        let ports = self.services.get(service).into_iter();
        ports.flat_map(BTreeMap::keys)
    }

    pub(super) fn contains(&self, service: &ServiceName) -> bool {
        self.services.contains_key(service)
    }

    /// Records a change that is published.
    pub(super) fn note(&mut self, key: &ServiceKey, change: Option<&PortChange>) {
        let program = change.map(|change| change.program.as_ref());
        let after = match program {
            // Only objects of single nodes changed.
            Some(None) => return,
            Some(Some(program)) => Some(Port {
                endpoints: program.endpoints,
                has_any: program.has_any,
            }),
            None => None,
        };
        let was_served = self.is_served(&key.service);
        let before = match after {
            Some(port) => {
                let ports = self.services.entry(key.service.clone()).or_default();
                ports.insert(key.clone(), port)
            }
            None => self.take(key),
        };
        self.endpoints += after.map_or(0, |port| port.endpoints);
        self.endpoints -= before.map_or(0, |port| port.endpoints);
        self.served += usize::from(self.is_served(&key.service));
        self.served -= usize::from(was_served);
    }

    fn take(&mut self, key: &ServiceKey) -> Option<Port> {
        let Entry::Occupied(mut ports) = self.services.entry(key.service.clone()) else {
            return None;
        };
        let port = ports.get_mut().remove(key);
        if ports.get().is_empty() {
            ports.remove();
        }
        port
    }

    fn is_served(&self, service: &ServiceName) -> bool {
        let ports = self.services.get(service);
        ports.is_some_and(|ports| ports.values().any(|port| port.has_any))
    }

    /// Returns the ServicePorts that would lose their last endpoint.
    pub(super) fn emptied_by(
        &self,
        changes: &BTreeMap<ServiceKey, Option<PortChange>>,
    ) -> Vec<ServiceKey> {
        let bare = changes.iter().filter_map(|(key, change)| {
            let program = change.as_ref()?.program.as_ref()?;
            let before = self.services.get(&key.service)?.get(key)?;
            (before.has_any && !program.has_any).then(|| key.clone())
        });
        bare.collect()
    }

    /// Returns the loss if nothing were kept.
    pub(super) fn loss(&self, kept: &Kept) -> Loss {
        let (gone, bare) = self.lost(kept);
        Loss {
            services: gone.len(),
            of_services: self.services.len(),
            emptied: bare.len(),
            of_served: self.served,
            ..Loss::default()
        }
    }

    /// Returns the Services that would go, and those that would lose their last endpoint, if nothing were kept.
    pub(super) fn lost<'a>(
        &self,
        kept: &'a Kept,
    ) -> (BTreeSet<&'a ServiceName>, BTreeSet<&'a ServiceName>) {
        let affected: BTreeSet<&ServiceName> = kept.ports.keys().map(|key| &key.service).collect();
        let (mut gone, mut bare) = (BTreeSet::new(), BTreeSet::new());
        for service in affected {
            let Some(ports) = self.services.get(service) else {
                continue;
            };
            let mut stay = ports
                .iter()
                .filter(|(key, _)| !matches!(kept.ports.get(*key), Some(None)))
                .peekable();
            if stay.peek().is_none() {
                gone.insert(service);
            } else if self.is_served(service)
                && !stay.any(|(key, port)| port.has_any && !kept.ports.contains_key(key))
            {
                bare.insert(service);
            }
        }
        (gone, bare)
    }
}
