//! The causes of changes: which object changed, and what changed in it. The flight recorder keeps them.
//!
//! The work is proportional to the object that changed, as its conversion is. Nothing is noted before the picture is
//! complete.

mod details;

pub use details::{Details, EndpointChange, EndpointState, FieldChange};

use std::collections::BTreeMap;
use std::sync::Arc;

use kplane_model::{ServiceName, ServicePort};

use super::holding::service_name;
use super::{Index, Pending, SliceEntry};
use crate::k8s::{Kind, ObjectId};
use crate::source::Located;

/// Maximum number of causes of a batch that are kept for each Service.
const CAUSES: usize = 8;

/// What happened to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// The source named it for the first time.
    Added,
    /// It changed.
    Changed,
    /// It is gone.
    Removed,
}

/// An object that changed, and what changed in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// The object.
    pub object: ObjectId,
    /// Its `resourceVersion`; 0 = unknown.
    pub version: u64,
    /// Its place, such as `shop.yaml, document 2, line 14`; empty if the source has none.
    pub location: Arc<str>,
    /// What happened to it.
    pub verb: Verb,
    /// Time of the change that led to it, milliseconds since 1970 by the writer's clock; 0 = unknown.
    pub written_ms: u64,
    /// What changed in it.
    pub details: Details,
}

impl Cause {
    /// Creates a cause without details.
    pub(super) fn new(object: ObjectId, version: u64, location: &Arc<str>, verb: Verb) -> Self {
        Self {
            object,
            version,
            location: Arc::clone(location),
            verb,
            written_ms: 0,
            details: Details::default(),
        }
    }
}

/// The causes of a batch, by the Service that each concerns; `None` for those that concern more, such as Nodes.
#[derive(Debug, Default)]
pub struct Causes {
    by_service: BTreeMap<Option<ServiceName>, Vec<Arc<Cause>>>,
}

impl Causes {
    /// Adds a cause, unless there are many.
    pub(super) fn add(&mut self, service: Option<ServiceName>, cause: Cause) {
        let causes = self.by_service.entry(service).or_default();
        if causes.len() < CAUSES {
            causes.push(Arc::new(cause));
        }
    }

    /// Returns the causes that are about a Service.
    pub fn of(&self, service: &ServiceName) -> &[Arc<Cause>] {
        let key = Some(service.clone());
        self.by_service.get(&key).map_or(&[], Vec::as_slice)
    }

    /// Returns the Services with causes of their own that say what changed.
    pub fn services(&self) -> impl Iterator<Item = &ServiceName> {
        self.by_service
            .iter()
            .filter(|(_, causes)| causes.iter().any(|cause| !cause.details.is_empty()))
            .filter_map(|(service, _)| service.as_ref())
    }

    /// Returns a few causes that are about other objects.
    pub fn others(&self) -> impl Iterator<Item = &Arc<Cause>> {
        self.by_service.values().flatten()
    }
}

/// Compares the ports of a Service, if a cause is noted.
pub(super) fn compare_ports(
    cause: &mut Option<Cause>,
    before: &[ServicePort],
    after: &[ServicePort],
) {
    if let Some(cause) = cause {
        cause.details.compare_ports(before, after);
    }
}

impl Pending {
    /// Adds the cause of a change, if causes are noted.
    pub(super) fn note(&mut self, service: Option<ServiceName>, cause: Option<Cause>) {
        if let Some(cause) = cause {
            self.causes.add(service, cause);
        }
    }
}

impl Index {
    /// Begins the cause of a change, once the picture is complete.
    pub(super) fn cause(&self, located: &Located) -> Option<Cause> {
        if !self.is_synced() {
            return None;
        }
        let id = located.object.id();
        let known = match id.kind {
            Kind::Service => self.services.contains_key(&service_name(&id)),
            Kind::EndpointSlice => self.slices.contains_key(&id),
            Kind::Node => self.nodes.contains_key(&id.name),
            Kind::ServiceCidr => self.cidrs.contains_key(&id.name),
            Kind::NetworkPolicy | Kind::Namespace | Kind::Pod | Kind::ClusterNetworkPolicy => {
                return None;
            }
        };
        let verb = if known { Verb::Changed } else { Verb::Added };
        let version = located.object.metadata().resource_version.number();
        Some(Cause::new(id, version, &located.location, verb))
    }

    /// Notes that an object goes, before it does.
    pub(super) fn note_removal(&mut self, id: &ObjectId) {
        if !self.is_synced() {
            return;
        }
        let mut cause = Cause::new(id.clone(), 0, &Arc::default(), Verb::Removed);
        let service = match id.kind {
            Kind::Service => {
                let name = service_name(id);
                if let Some(entry) = self.services.get(&name) {
                    cause.details.compare_ports(&entry.ports, &[]);
                }
                Some(name)
            }
            Kind::EndpointSlice => self.slices.get(id).map(|entry| {
                cause.details.compare_slices(&entry.ports, &[]);
                entry.service.clone()
            }),
            Kind::Node | Kind::ServiceCidr => None,
            Kind::NetworkPolicy | Kind::Namespace | Kind::Pod | Kind::ClusterNetworkPolicy => {
                return;
            }
        };
        self.pending.causes.add(service, cause);
    }

    /// Notes how a slice that is stored now differs from what it was.
    pub(super) fn note_slice(
        &mut self,
        id: &ObjectId,
        before: Option<&SliceEntry>,
        cause: Option<Cause>,
    ) {
        let (Some(mut cause), Some(now)) = (cause, self.slices.get(id)) else {
            return;
        };
        let was = before.map_or(&[][..], |before| &before.ports);
        cause.written_ms = now.trigger_ms;
        cause.details.compare_slices(was, &now.ports);
        self.pending.causes.add(Some(now.service.clone()), cause);
    }
}
