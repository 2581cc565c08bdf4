//! Changes of Services, oldest first.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::SystemTime;

use kplane_model::ServiceName;

use crate::index::{Cause, Causes};
use crate::publish::ServiceChange;
use kplane_util::clock::millis;

/// Maximum number of changes, and of their bytes.
const MAX_CHANGES: usize = 100_000;
const MAX_BYTES: usize = 24 << 20;
/// Maximum number of Services of one publication that are recorded. A publication with more is a start or a change of
/// everything, and says nothing about a Service.
const MAX_SERVICES: usize = 10_000;
/// Maximum number of causes that are about other objects than the Service.
const INDIRECT: usize = 3;

/// A change of one Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The Service.
    pub service: ServiceName,
    /// Revision that a node must reach to hold it; 0 = nothing that nodes hold changed.
    pub revision: u64,
    /// Time at which the control plane observed it, milliseconds since 1970.
    pub observed_ms: u64,
    /// Time at which streams could read it, milliseconds since 1970.
    pub published_ms: u64,
    /// Whether nodes share what changed.
    pub shared: bool,
    /// The objects that caused it.
    pub causes: Box<[Arc<Cause>]>,
    /// Whether the causes are about other objects.
    pub indirect: bool,
}

/// The changes of a Service that are recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The latest ones, newest first.
    pub changes: Vec<Change>,
    /// Number of older ones.
    pub older: usize,
    /// Time from which on the record is complete, milliseconds since 1970.
    pub since_ms: u64,
}

/// The record of changes.
#[derive(Debug)]
pub(super) struct Changes {
    kept: VecDeque<Change>,
    bytes: usize,
    since_ms: u64,
}

impl Default for Changes {
    fn default() -> Self {
        Self {
            kept: VecDeque::new(),
            bytes: 0,
            since_ms: millis(SystemTime::now()),
        }
    }
}

impl Change {
    /// Returns the memory that the change takes; an estimate from above, since changes of one batch share causes.
    fn bytes(&self) -> usize {
        let causes: usize = self.causes.iter().map(|cause| bytes_of(cause)).sum();
        size_of::<Self>() + self.service.namespace.len() + self.service.name.len() + 64 + causes
    }
}

fn bytes_of(cause: &Cause) -> usize {
    let text = |text: &String| text.capacity();
    let fields: usize = cause
        .details
        .fields
        .iter()
        .map(|field| {
            size_of_val(field) + text(&field.field) + text(&field.before) + text(&field.after)
        })
        .sum();
    let endpoints = cause.details.endpoints.capacity() * size_of::<crate::index::EndpointChange>();
    size_of::<Cause>() + cause.object.name.len() + cause.object.namespace.len() + fields + endpoints
}

impl Changes {
    /// Adds one publication.
    pub(super) fn add(
        &mut self,
        touched: &[ServiceChange],
        causes: &Causes,
        observed_at: SystemTime,
        published_at: SystemTime,
    ) {
        let mut services: BTreeMap<&ServiceName, (u64, bool)> = BTreeMap::new();
        for one in touched {
            let place = services.entry(&one.service).or_default();
            *place = (place.0.max(one.revision), place.1 || one.shared);
        }
        for service in causes.services() {
            services.entry(service).or_default();
        }
        if services.len() > MAX_SERVICES {
            return;
        }
        for (service, (revision, shared)) in services {
            let own = causes.of(service);
            let others = || causes.others().take(INDIRECT).cloned().collect();
            self.push(Change {
                service: service.clone(),
                revision,
                observed_ms: millis(observed_at),
                published_ms: millis(published_at),
                shared,
                causes: if own.is_empty() { others() } else { own.into() },
                indirect: own.is_empty(),
            });
        }
    }

    fn push(&mut self, change: Change) {
        self.bytes += change.bytes();
        self.kept.push_back(change);
        while self.kept.len() > MAX_CHANGES || self.bytes > MAX_BYTES {
            let Some(oldest) = self.kept.pop_front() else {
                return;
            };
            self.bytes -= oldest.bytes();
            self.since_ms = oldest.published_ms;
        }
    }

    /// Returns the latest changes of a Service.
    pub(super) fn of(&self, service: &ServiceName, limit: usize) -> Found {
        let mut all = self.kept.iter().rev();
        let mut its = all.by_ref().filter(|change| change.service == *service);
        let changes = its.by_ref().take(limit).cloned().collect();
        Found {
            changes,
            older: its.count(),
            since_ms: self.since_ms,
        }
    }

    /// Returns the number of changes, and of their bytes.
    pub(super) fn size(&self) -> (usize, usize) {
        (self.kept.len(), self.bytes)
    }
}
