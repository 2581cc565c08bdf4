//! Objects that are served although the source no longer names them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use kplane_model::ServiceName;

use crate::k8s::{Kind, ObjectId};

/// Maximum number of example names.
const EXAMPLES: usize = 8;

/// Services that are served although the source no longer names them or their endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Number of Services that are not named.
    pub services: usize,
    /// Number of Services that are named, and keep endpoints that are not.
    pub without_endpoints: usize,
    /// Number of NetworkPolicies, Namespaces and Pods that are not named.
    pub policies: usize,
    /// Reason why their absence is not believed, human-readable.
    pub reason: Arc<str>,
    /// Start of this state.
    pub since: SystemTime,
    /// The first of the names, at most 8.
    pub examples: Vec<ServiceName>,
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            services,
            without_endpoints,
            reason,
            ..
        } = self;
        match (services, without_endpoints) {
            (0, 0) if self.policies > 0 => {
                let kept = self.policies;
                write!(f, "{kept} NetworkPolicies, Namespaces and Pods are kept")?;
            }
            (0, 0) => write!(f, "Nodes are kept")?,
            (0, emptied) => write!(f, "the last endpoints of {emptied} Services are kept")?,
            (gone, 0) => write!(f, "{gone} Services are kept")?,
            (gone, emptied) => write!(
                f,
                "{gone} Services, and the last endpoints of {emptied} other Services, are kept"
            )?,
        }
        write!(
            f,
            ": {reason}; restore them in the source, or run `kpctl approve` to remove them"
        )
    }
}

/// The source's statement that an object is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// The source no longer names the object; a later list may confirm that.
    Nothing,
    /// The source named the object as deleted; only the operator may confirm that.
    Gone,
}

/// Objects whose deletion is held back.
#[derive(Debug)]
pub(super) struct Holding {
    objects: BTreeMap<ObjectId, Said>,
    reason: Arc<str>,
    since: SystemTime,
    services: usize,
}

impl Holding {
    pub(super) fn new(since: SystemTime) -> Self {
        Self {
            objects: BTreeMap::new(),
            reason: "".into(),
            since,
            services: 0,
        }
    }

    /// Holds another object, with the newest reason.
    pub(super) fn add(&mut self, id: ObjectId, said: Said) {
        let is_service = id.kind == Kind::Service;
        if self.objects.insert(id, said).is_none() {
            self.services += usize::from(is_service);
        }
    }

    pub(super) fn explain(&mut self, reason: &str) {
        self.reason = reason.into();
    }

    /// Stops holding an object that is back or gone; returns false if it was not held.
    pub(super) fn remove(&mut self, id: &ObjectId) -> bool {
        let held = self.objects.remove(id).is_some();
        self.services -= usize::from(held && id.kind == Kind::Service);
        held
    }

    pub(super) fn contains(&self, id: &ObjectId) -> bool {
        self.objects.contains_key(id)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Returns the number of Services among the objects.
    pub(super) fn services(&self) -> usize {
        self.services
    }

    pub(super) fn objects(&self) -> impl Iterator<Item = &ObjectId> {
        self.objects.keys()
    }

    /// Returns the objects of a kind that a later list of the source may confirm as gone.
    pub(super) fn unnamed(&self, kind: Kind) -> Vec<ObjectId> {
        self.objects
            .iter()
            .filter(|(id, said)| id.kind == kind && **said == Said::Nothing)
            .map(|(id, _)| id.clone())
            .collect()
    }

    /// Returns a human-readable summary. The Services in `without_endpoints` are named, and keep
    /// endpoints that are not.
    pub(super) fn describe(
        &self,
        without_endpoints: impl ExactSizeIterator<Item = ServiceName>,
    ) -> Held {
        let services = self.objects.keys().filter(|id| id.kind == Kind::Service).map(service_name);
        let emptied = without_endpoints.len();
        let mut examples: Vec<_> =
            services.take(EXAMPLES).chain(without_endpoints.take(EXAMPLES)).collect();
        examples.sort();
        examples.truncate(EXAMPLES);
        Held {
            services: self.services,
            without_endpoints: emptied,
            policies: self.objects.keys().filter(|id| is_policy(id.kind)).count(),
            reason: self.reason.clone(),
            since: self.since,
            examples,
        }
    }
}

/// Returns whether a kind is one that only NetworkPolicies need.
fn is_policy(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::NetworkPolicy | Kind::Namespace | Kind::Pod | Kind::ClusterNetworkPolicy
    )
}

/// Returns the name of a Service object.
pub(super) fn service_name(id: &ObjectId) -> ServiceName {
    ServiceName::of(id.namespace.clone(), id.name.clone())
}
