//! Pods that are being deleted. Their endpoints count as terminating ones at once.
//!
//! When a Pod is deleted, kubelet ends its processes, and a controller of Kubernetes writes into its EndpointSlices that it is
//! terminating. kubelet is often the first of the two: connections that proxies still lead there are refused. Who knows of the
//! Pod itself leads no new connection there, a little earlier than the slice says so. Slices that others write count as written.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use kplane_model::{Endpoint, PodName, ServiceName};

use super::holding::service_name;
use super::{Cause, Index, SliceEntry, Verb};
use crate::convert;
use crate::k8s::{self, ObjectId};

/// The Pods that are being deleted, as the index knows them.
#[derive(Debug, Default)]
pub(super) struct Terminating {
    /// The source names Pods.
    watched: bool,
    /// These Pods, and those that are gone and still in a slice.
    pods: HashMap<PodName, Ending>,
    /// The slices with each Pod whose conditions follow from those of Pods.
    slices: HashMap<PodName, Vec<ObjectId>>,
}

/// A Pod that is being deleted.
#[derive(Debug)]
struct Ending {
    addresses: Vec<IpAddr>,
    /// The first time at which this is known.
    since: SystemTime,
    /// Only slices name the Pod by now.
    gone: bool,
}

impl Terminating {
    pub(super) fn new(watched: bool) -> Self {
        Self {
            watched,
            ..Self::default()
        }
    }

    /// Replaces what a slice says. The work is proportional to its endpoints.
    pub(super) fn replace(
        &mut self,
        id: &ObjectId,
        before: Option<&SliceEntry>,
        after: Option<&SliceEntry>,
    ) {
        let both = || [before, after].map(|slice| slice.into_iter().flat_map(pods_of));
        let [was, is] = both();
        if !self.watched || was.eq(is) {
            return;
        }
        let [before, after] = both().map(Iterator::collect::<BTreeSet<_>>);
        for pod in before.difference(&after) {
            let name = PodName::of(id.namespace.clone(), Arc::clone(pod));
            self.leaves(&name, id);
        }
        for pod in after.difference(&before) {
            let name = PodName::of(id.namespace.clone(), Arc::clone(pod));
            let slices = self.slices.entry(name).or_insert_with(|| Vec::with_capacity(1));
            slices.push(id.clone());
        }
    }

    /// Takes a Pod out of a slice. One that is gone is forgotten with its last slice.
    fn leaves(&mut self, pod: &PodName, slice: &ObjectId) {
        let Some(slices) = self.slices.get_mut(pod) else {
            return;
        };
        slices.retain(|id| id != slice);
        if slices.is_empty() {
            self.slices.remove(pod);
            if self.pods.get(pod).is_some_and(|ending| ending.gone) {
                self.pods.remove(pod);
            }
        }
    }
}

/// Returns the Pods of a slice, if its conditions follow from theirs. All its ports have the same.
fn pods_of(slice: &SliceEntry) -> impl Iterator<Item = &Arc<str>> {
    let ports = if slice.follows_pods { slice.ports.first() } else { None };
    ports
        .into_iter()
        .flat_map(|port| &port.endpoints)
        .filter_map(|endpoint| endpoint.pod.as_ref())
        .filter(|name| !name.is_empty())
}

impl Index {
    /// Takes notice of a Pod, which may be being deleted.
    pub(super) fn note_pod(
        &mut self,
        id: &ObjectId,
        pod: &k8s::Pod,
        changed_at: Option<SystemTime>,
    ) {
        if !self.terminating.watched {
            return;
        }
        let name = service_name(id);
        if pod.metadata.deletion_timestamp.is_none() {
            if self.terminating.pods.remove(&name).is_some() {
                self.note_services_of(&name, None);
            }
            return;
        }
        let addresses = convert::pod_addresses(&pod.status);
        let known = self.terminating.pods.get_mut(&name);
        if let Some(known) = known
            && (addresses.is_empty() || known.addresses == addresses)
        {
            known.gone = false;
            return;
        }
        let since = changed_at.or(self.pending.observed_at).unwrap_or(SystemTime::UNIX_EPOCH);
        let ending = Ending {
            addresses,
            since,
            gone: false,
        };
        self.terminating.pods.insert(name.clone(), ending);
        let version = pod.metadata.resource_version.number();
        let cause = Cause::new(id.clone(), version, &"being deleted".into(), Verb::Changed);
        self.note_services_of(&name, self.is_synced().then_some(&cause));
    }

    /// Takes notice that a Pod is gone. Slices may name it for a while.
    pub(super) fn note_pod_gone(&mut self, id: &ObjectId) {
        let name = service_name(id);
        if self.terminating.slices.contains_key(&name) {
            if let Some(ending) = self.terminating.pods.get_mut(&name) {
                ending.gone = true;
            }
        } else {
            self.terminating.pods.remove(&name);
        }
    }

    /// Has the Services of a Pod computed anew.
    fn note_services_of(&mut self, pod: &PodName, cause: Option<&Cause>) {
        let slices = self.terminating.slices.get(pod).into_iter().flatten();
        let services = slices.filter_map(|id| self.slices.get(id)).map(|slice| &slice.service);
        for service in services.collect::<BTreeSet<_>>() {
            self.pending.note(Some(service.clone()), cause.cloned());
            self.pending.services.insert(service.clone());
        }
    }

    /// Marks the endpoints of Pods that are being deleted.
    pub(super) fn mark_terminating(&self, service: &ServiceName, endpoints: &mut [Endpoint]) {
        if self.terminating.pods.is_empty() || self.publishes_unready(service) {
            return;
        }
        for endpoint in endpoints.iter_mut().filter(|endpoint| endpoint.ready) {
            if self.ending(service, endpoint).is_some() {
                (endpoint.ready, endpoint.terminating) = (false, true);
            }
        }
    }

    fn publishes_unready(&self, service: &ServiceName) -> bool {
        self.services.get(service).is_some_and(|entry| entry.origin.publishes_unready)
    }

    /// Returns what is known of an endpoint's Pod, if that is being deleted. Another Pod may have its name and not its
    /// address.
    fn ending(&self, service: &ServiceName, endpoint: &Endpoint) -> Option<&Ending> {
        let pod = PodName::of(service.namespace.clone(), endpoint.pod.clone()?);
        let ending = self.terminating.pods.get(&pod)?;
        let mut slices = self.terminating.slices.get(&pod)?.iter();
        let is_its = |id| self.slices.get(id).is_some_and(|slice| slice.service == *service);
        (ending.addresses.contains(&endpoint.addr.ip) && slices.any(is_its)).then_some(ending)
    }

    /// Returns the Pods of a Service that are being deleted and that slices call ready, each with the first time at which
    /// that is known; sorted.
    pub(super) fn terminating_of(&self, name: &ServiceName) -> Vec<(Arc<str>, SystemTime)> {
        if self.terminating.pods.is_empty() || self.publishes_unready(name) {
            return Vec::new();
        }
        let ending: BTreeSet<_> = self
            .listed_of(name)
            .flat_map(|listed| &listed.endpoints)
            .filter(|endpoint| endpoint.ready)
            .filter_map(|endpoint| {
                Some((endpoint.pod.clone()?, self.ending(name, endpoint)?.since))
            })
            .collect();
        ending.into_iter().collect()
    }
}
