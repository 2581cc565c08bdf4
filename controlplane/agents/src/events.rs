//! Kubernetes events, as `kubectl describe` and `kubectl get events` show them.
//!
//! ```text
//! issues, fleet -> Picture -> problems -> Announcer -> Limits -> Writer -> API server
//! ```
//!
//! Everything up to the limits is pure: a snapshot and a clock go in, events come out. A problem is
//! announced once, and again before the API server forgets the event if it lasts that long. When
//! all announced problems of an object are over, an event reports that too. The name of an event is
//! a hash of its content, so a second replica with the same problem finds the existing event.
//!
//! Events are best effort: no other code waits for an event, and events that cannot be written are
//! counted and dropped.

mod announce;
mod limits;
mod problems;
mod task;
mod write;

#[cfg(test)]
mod tests;

pub use task::{EventScope, run};

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use kplane_desired_state::index::Held;
use kplane_desired_state::k8s::{Kind, Uid};
use kplane_model::{Issue, NodeName, Reason as Code};
use kplane_proto::v1::Departure;

use crate::fleet::AgentRecord;

/// Longest note that the API accepts, in bytes (`events.k8s.io/v1`: 1 kB).
const MAX_NOTE: usize = 1_024;
/// Longest part of an object's name at the start of its event's name, in bytes: the whole name has
/// at most 253.
const MAX_OBJECT_NAME: usize = 230;
/// Maximum number of nodes that a note names; further nodes are only counted.
const NODES_NAMED: usize = 10;

/// The input of events: the state of the control plane at one moment.
#[derive(Clone, Debug, Default)]
struct Snapshot {
    /// Problems with the input.
    issues: Arc<Vec<Issue>>,
    /// Objects that are served although the source no longer names them.
    held: Option<Arc<Held>>,
    /// The latest Pods that waited to end, with their numbers.
    departures: Vec<(u64, Arc<Departure>)>,
    /// Nodes that exist, have an agent or had one.
    nodes: BTreeMap<NodeName, NodeSnapshot>,
}

#[derive(Clone, Debug, Default)]
struct NodeSnapshot {
    /// A Node object exists.
    known: bool,
    /// The latest record of the node's agent.
    agent: Option<Arc<AgentRecord>>,
    /// The reason why the node is suspected, if it is.
    suspected: Option<String>,
}

/// The object that an event is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Object {
    kind: Kind,
    /// Empty for cluster-wide kinds.
    namespace: Arc<str>,
    name: Arc<str>,
}

impl Object {
    fn node(name: &NodeName) -> Self {
        Self {
            kind: Kind::Node,
            namespace: "".into(),
            name: name.clone(),
        }
    }
}

/// The reason of an event, as `kubectl get events` shows it in the column REASON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Reason {
    /// An agent has started (J1).
    Starting,
    /// An agent has a backend that Kubernetes has deprecated (D1, J1).
    IpvsDeprecation,
    /// An agent has a backend that nobody chose (K21).
    DefaultMode,
    /// An object cannot be served as written, for a reason that `docs/reasons.md` explains.
    Refused(Code),
    /// A Service, or its endpoints, are no longer named by the source, but still served.
    ServiceHeld,
    /// All problems of a Service have been resolved.
    ServiceAccepted,
    /// All problems of a NetworkPolicy have been resolved.
    PolicyAccepted,
    /// A Service is not in the kernels of some nodes.
    ServiceNotProgrammed,
    /// A Service is in the kernels of all nodes again.
    ServiceProgrammed,
    /// A health check node port cannot be opened (J1).
    FailedToStartServiceHealthcheck,
    /// A health check node port has been opened after a failure.
    StartedServiceHealthcheck,
    /// A node has lost its agent; the kernel keeps its state.
    ProxyStale,
    /// A node has an agent again.
    ProxyConnected,
    /// A node's stream is gone, and its neighbours do not reach it.
    NodeSuspected,
    /// A node is suspected no more.
    NodeReached,
    /// A node's kernel does not accept the desired state.
    SyncFailing,
    /// A node's kernel accepts the desired state again.
    SyncRecovered,
    /// Another program changed a node's rules, and the agent repaired them.
    RulesRepaired,
    /// A node serves objects that its source does not name, or no longer names.
    HoldingServices,
    /// A node no longer serves such objects.
    HoldingEnded,
    /// A Pod ended although some kernels may still have led to it.
    EndedEarly,
}

impl Reason {
    fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "Starting",
            Self::IpvsDeprecation => "IPVSDeprecation",
            Self::DefaultMode => "KubeProxyDefaultMode",
            Self::Refused(code) => code.code(),
            Self::ServiceHeld => "ServiceHeld",
            Self::ServiceAccepted => "ServiceAccepted",
            Self::PolicyAccepted => "PolicyAccepted",
            Self::ServiceNotProgrammed => "ServiceNotProgrammed",
            Self::ServiceProgrammed => "ServiceProgrammed",
            Self::FailedToStartServiceHealthcheck => "FailedToStartServiceHealthcheck",
            Self::StartedServiceHealthcheck => "StartedServiceHealthcheck",
            Self::ProxyStale => "ProxyStale",
            Self::ProxyConnected => "ProxyConnected",
            Self::NodeSuspected => "NodeSuspected",
            Self::NodeReached => "NodeReached",
            Self::SyncFailing => "SyncFailing",
            Self::SyncRecovered => "SyncRecovered",
            Self::RulesRepaired => "RulesRepaired",
            Self::HoldingServices => "HoldingServices",
            Self::HoldingEnded => "HoldingEnded",
            Self::EndedEarly => "EndedEarly",
        }
    }

    /// Returns the `action` of the event, which the API requires.
    fn action(self) -> &'static str {
        match self {
            Self::Starting
            | Self::IpvsDeprecation
            | Self::DefaultMode
            | Self::ProxyStale
            | Self::ProxyConnected => "StartKubeProxy",
            Self::NodeSuspected | Self::NodeReached => "Reach",
            Self::Refused(_) | Self::ServiceHeld | Self::ServiceAccepted | Self::PolicyAccepted => {
                "Read"
            }
            Self::FailedToStartServiceHealthcheck | Self::StartedServiceHealthcheck => "Listen",
            Self::ServiceNotProgrammed
            | Self::ServiceProgrammed
            | Self::SyncFailing
            | Self::SyncRecovered
            | Self::RulesRepaired
            | Self::HoldingServices
            | Self::HoldingEnded
            | Self::EndedEarly => "Program",
        }
    }

    /// Returns the reason and note of the event that reports the end of a problem, for problems
    /// where this helps.
    fn recovery(self, of: Kind) -> Option<(Self, &'static str)> {
        match self {
            Self::Refused(_) if of == Kind::Service => Some((
                Self::ServiceAccepted,
                "the problems of the Service are resolved",
            )),
            Self::Refused(_) if of == Kind::NetworkPolicy => Some((
                Self::PolicyAccepted,
                "the problems of the NetworkPolicy are resolved",
            )),
            Self::ServiceNotProgrammed => Some((
                Self::ServiceProgrammed,
                "the kernels of all nodes hold the Service again",
            )),
            Self::FailedToStartServiceHealthcheck => Some((
                Self::StartedServiceHealthcheck,
                "the health check node port is open on all nodes",
            )),
            Self::ProxyStale => Some((
                Self::ProxyConnected,
                "the node's agent is connected to the control plane again",
            )),
            Self::NodeSuspected => Some((
                Self::NodeReached,
                "the node is suspected no more: it has a stream, or a neighbour reaches it",
            )),
            Self::SyncFailing => Some((
                Self::SyncRecovered,
                "the node's kernel holds the desired state again",
            )),
            Self::HoldingServices => Some((
                Self::HoldingEnded,
                "the node no longer serves objects that are missing from the source",
            )),
            _ => None,
        }
    }

    fn is_warning(self) -> bool {
        !matches!(
            self,
            Self::Starting
                | Self::ServiceAccepted
                | Self::PolicyAccepted
                | Self::ServiceProgrammed
                | Self::StartedServiceHealthcheck
                | Self::ProxyConnected
                | Self::NodeReached
                | Self::SyncRecovered
                | Self::HoldingEnded
        )
    }
}

/// An event to be written.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Event {
    object: Object,
    reason: Reason,
    /// Text of at most [`MAX_NOTE`] bytes.
    note: String,
    /// Random number that distinguishes events with the same content, such as two starts.
    instance: u64,
}

impl Event {
    fn new(object: Object, reason: Reason, note: &str) -> Self {
        Self {
            object,
            reason,
            note: clip(note),
            instance: 0,
        }
    }

    /// Returns the event's name in the API. All replicas give the same name to the same content
    /// about the same object, also when the event is repeated. [`DefaultHasher::new`] has no
    /// secret. Another version of the library may hash differently; then one event is written
    /// twice.
    fn api_name(&self, uid: Option<&Uid>) -> String {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        uid.hash(&mut hasher);
        let name = &self.object.name;
        let beginning = &name[..name.floor_char_boundary(MAX_OBJECT_NAME)];
        let beginning = beginning.trim_end_matches(['.', '-']);
        format!("{beginning}.{:016x}", hasher.finish())
    }
}

/// Cuts a text to the length of a note.
fn clip(text: &str) -> String {
    const MORE: &str = "...";
    if text.len() <= MAX_NOTE {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(MAX_NOTE - MORE.len());
    format!("{}{MORE}", &text[..end])
}

/// Lists the names of nodes for a note: `a, b and 3 more`.
fn node_names<'a>(nodes: impl ExactSizeIterator<Item = &'a NodeName>) -> String {
    let count = nodes.len();
    let named: Vec<&str> = nodes.take(NODES_NAMED).map(|name| &**name).collect();
    let more = count - named.len();
    match more {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}
