//! The writer: turns one event into one request.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event as ApiEvent;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kplane_desired_state::k8s::{Kind, Uid};
use kplane_desired_state::kubernetes::{Api, Asked, Failure, Unanswered};
use kplane_util::bounded::make_room;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;

use super::{Event, MAX_NOTE};

/// Value of `reportingController`.
const CONTROLLER: &str = "kplane";
/// Longest `reportingInstance` that the API accepts, in bytes.
const MAX_INSTANCE: usize = 128;
/// Namespace for events of objects without a namespace.
const NODE_NAMESPACE: &str = "default";
/// Maximum time for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time for which written events are remembered: the API server forgets events after an hour, by
/// default.
const REMEMBERED_FOR: Duration = Duration::from_secs(3_600);
/// Maximum number of events that are remembered, to count them when they happen again. 100 bytes
/// each.
const REMEMBERED: usize = 4_096;

pub(super) const CREATE: Asked = Asked::new("create", "events", "events.k8s.io");
const PATCH: Asked = Asked::new("patch", CREATE.resource, CREATE.group);

/// An event that was not written.
#[derive(Debug)]
pub(super) enum Unwritten {
    /// Another attempt would not help.
    Refused(Asked, Failure),
    /// The server may take it later.
    Later(Asked, Failure),
}

/// Decides whether to try again.
impl From<Unanswered> for Unwritten {
    fn from(Unanswered { asked, failure }: Unanswered) -> Self {
        match failure {
            Failure::Forbidden(_)
            | Failure::NotServed
            | Failure::Gone
            | Failure::Refused { .. }
            | Failure::Malformed(_) => Self::Refused(asked, failure),
            _ => Self::Later(asked, failure),
        }
    }
}

/// A writer of events.
#[derive(Debug)]
pub(super) struct Writer {
    api: Arc<Api>,
    /// Value of `reportingInstance`.
    instance: String,
    /// Number of occurrences and time of the last write, by the event's name.
    written: HashMap<String, (i32, Instant)>,
}

impl Writer {
    /// Creates a writer with the credentials of `api`, for the process on `machine`.
    pub(super) fn new(api: Arc<Api>, machine: &str) -> Self {
        let mut instance = format!("{CONTROLLER}-{machine}");
        instance.truncate(instance.floor_char_boundary(MAX_INSTANCE));
        Self {
            api,
            instance,
            written: HashMap::new(),
        }
    }

    /// Writes an event: as a new event, or as another occurrence in a series.
    ///
    /// # Errors
    /// [`Unwritten`], which says whether another attempt may help.
    pub(super) async fn write(&mut self, event: &Event, uid: Option<Uid>) -> Result<(), Unwritten> {
        let now = Instant::now();
        let name = event.api_name(uid.as_ref());
        self.forget(now);
        let before = self.written.get(&name).map(|(count, _)| *count);
        let mut count = 1;
        if let Some(before) = before {
            count = before.saturating_add(1);
            if self.again(event, &name, count).await? {
                self.written.insert(name, (count, now));
                return Ok(());
            }
        }
        self.create(event, &name, uid).await?;
        self.written.insert(name, (count, now));
        Ok(())
    }

    /// Updates an existing event that happened again; returns false when the event no longer
    /// exists.
    async fn again(&self, event: &Event, name: &str, count: i32) -> Result<bool, Unwritten> {
        let last = MicroTime(Timestamp::now());
        let series = json!({"series": {"count": count, "lastObservedTime": last}});
        let (params, patch) = (PatchParams::default(), Patch::Merge(series));
        let events = self.events(event);
        let request = events.patch(name, &params, &patch);
        match self.api.ask(PATCH, PATIENCE, request).await {
            Ok(_) => Ok(true),
            Err(Unanswered {
                failure: Failure::NotServed,
                ..
            }) => Ok(false),
            Err(unanswered) => Err(unanswered.into()),
        }
    }

    async fn create(&self, event: &Event, name: &str, uid: Option<Uid>) -> Result<(), Unwritten> {
        let written = self.to_api(event, name, uid);
        let params = PostParams::default();
        let events = self.events(event);
        let request = events.create(&params, &written);
        match self.api.ask(CREATE, PATIENCE, request).await {
            Ok(_) => Ok(()),
            // Another replica, or an earlier process, wrote the same event, so this one is not
            // needed.
            Err(unanswered) if unanswered.is_conflict() => Ok(()),
            Err(unanswered) => Err(unanswered.into()),
        }
    }

    fn events(&self, event: &Event) -> kube::Api<ApiEvent> {
        kube::Api::namespaced(self.api.client(), namespace(event))
    }

    fn to_api(&self, event: &Event, name: &str, uid: Option<Uid>) -> ApiEvent {
        let object = &event.object;
        let uid = match object.kind {
            // kubelet and kube-proxy do the same, and `kubectl describe node` expects it.
            Kind::Node => Some(object.name.to_string()),
            _ => uid.map(|uid| uid.to_string()),
        };
        debug_assert!(event.note.len() <= MAX_NOTE);
        ApiEvent {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                namespace: Some(namespace(event).to_owned()),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(Timestamp::now())),
            action: Some(event.reason.action().to_owned()),
            reason: Some(event.reason.as_str().to_owned()),
            note: Some(event.note.clone()),
            type_: Some(if event.reason.is_warning() { "Warning" } else { "Normal" }.to_owned()),
            regarding: Some(ObjectReference {
                api_version: Some(object.kind.api_version().to_owned()),
                kind: Some(object.kind.as_str().to_owned()),
                namespace: Some(object.namespace.to_string()).filter(|name| !name.is_empty()),
                name: Some(object.name.to_string()),
                uid,
                ..ObjectReference::default()
            }),
            reporting_controller: Some(CONTROLLER.to_owned()),
            reporting_instance: Some(self.instance.clone()),
            ..ApiEvent::default()
        }
    }

    fn forget(&mut self, now: Instant) {
        // Events that are forgotten are written as new ones instead of being counted.
        make_room(&mut self.written, REMEMBERED, |(_, at)| {
            now.saturating_duration_since(*at) < REMEMBERED_FOR
        });
    }
}

fn namespace(event: &Event) -> &str {
    match &*event.object.namespace {
        "" => NODE_NAMESPACE,
        namespace => namespace,
    }
}
