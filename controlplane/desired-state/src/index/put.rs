//! Services and EndpointSlices that are new or changed.

use std::sync::Arc;
use std::time::SystemTime;

use kplane_model::Issue;

use super::causes::{self, Cause};
use super::holding::service_name;
use super::{Index, SliceEntry};
use crate::convert;
use crate::k8s::{EndpointSlice, ObjectId, Service};

impl Index {
    pub(super) fn put_service(
        &mut self,
        id: &ObjectId,
        service: &Service,
        location: Arc<str>,
        mut cause: Option<Cause>,
    ) -> Vec<Issue> {
        let name = service_name(id);
        let converted = convert::service(service, &location, &self.external_ips);
        match converted.skipped {
            Some(reason) => drop(self.skipped.insert(name.clone(), reason)),
            None => drop(self.skipped.remove(&name)),
        }
        let entry = self.services.entry(name.clone()).or_default();
        entry.created.clone_from(&service.metadata.creation_timestamp);
        entry.uid = service.metadata.uid;
        entry.location = location;
        self.address_claims.replace_user(&name, &entry.ports, &converted.ports);
        causes::compare_ports(&mut cause, &entry.ports, &converted.ports);
        entry.ports = converted.ports;
        entry.origin = converted.origin;
        entry.held = false;
        self.pending.note(Some(name.clone()), cause);
        self.pending.services.insert(name);
        converted.issues
    }

    pub(super) fn put_slice(
        &mut self,
        id: &ObjectId,
        slice: &EndpointSlice,
        location: &str,
        changed_at: Option<SystemTime>,
        cause: Option<Cause>,
    ) -> Vec<Issue> {
        let converted = convert::slice(slice, location);
        let trigger_ms = converted.trigger_ms;
        let before_ms = self.slices.get(id).map_or(0, |slice| slice.trigger_ms);
        let Some(service) = converted.service else {
            self.delete_slice(id);
            return converted.issues;
        };
        let before = self.unlink_slice(id);
        if let (Some(at), Some(family)) = (changed_at, converted.family)
            && trigger_ms != before_ms
        {
            self.triggers.note(&service, family, trigger_ms, at);
        }
        self.link_slice(id, &service);
        self.pending.services.insert(service.clone());
        self.slices.insert(
            id.clone(),
            SliceEntry {
                service: service.clone(),
                family: converted.family,
                ports: converted.ports,
                addresses: converted.addresses,
                follows_pods: converted.follows_pods,
                trigger_ms,
            },
        );
        self.note_living(id);
        self.terminating.replace(id, before.as_ref(), self.slices.get(id));
        self.note_api_servers(&service);
        self.note_slice(id, before.as_ref(), cause);
        converted.issues
    }

    pub(super) fn delete_slice(&mut self, id: &ObjectId) {
        let before = self.unlink_slice(id);
        self.terminating.replace(id, before.as_ref(), None);
    }
}
