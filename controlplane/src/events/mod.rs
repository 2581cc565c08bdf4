//! Kubernetes events: what people see with `kubectl describe` and `kubectl get events`.
//!
//! ```text
//! issues, fleet -> Picture -> problems -> Announcer -> Limits -> Writer -> API server
//! ```
//!
//! Everything up to the limits is pure: a picture and a clock go in, events come out. A problem that
//! lasts is announced once, and again as long as it lasts before the API server forgets it; when all
//! that was announced of an object is over, that is said as well. Events have names made from what they
//! say, so that a second replica that sees the same finds the event there.
//!
//! Best effort: nothing waits for an event, and what cannot be written is counted and dropped.

mod announce;
mod limits;
mod problems;
mod task;
mod write;

#[cfg(test)]
mod tests;

pub use task::{Scope, run};

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use kplane_model::{Issue, NodeName};

use crate::fleet::AgentRecord;
use crate::index::Held;
use crate::k8s::{Kind, Uid};

/// Longest note that the API accepts, in bytes (`events.k8s.io/v1`: 1 kB).
const MAX_NOTE: usize = 1_024;
/// So much of an object's name begins the name of its event: together at most 253 bytes.
const MAX_OBJECT_NAME: usize = 230;
/// Nodes that a note names before it only counts them.
const NODES_NAMED: usize = 10;

/// What events are about: the state of everything at one moment.
#[derive(Clone, Debug, Default)]
struct Picture {
    /// Problems with the input.
    issues: Arc<Vec<Issue>>,
    /// What is served although the source does not name it any more.
    held: Option<Arc<Held>>,
    /// Nodes that exist, have an agent or had one.
    nodes: BTreeMap<NodeName, NodePicture>,
}

#[derive(Clone, Debug, Default)]
struct NodePicture {
    /// There is a Node object.
    known: bool,
    /// What its agent said last.
    agent: Option<Arc<AgentRecord>>,
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

/// Why there is an event: what `kubectl get events` shows in the column REASON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Reason {
    /// An agent begins (J1).
    Starting,
    /// It has a backend that Kubernetes has deprecated (D1, J1).
    IpvsDeprecation,
    /// A Service cannot be served as it is written.
    ServiceRefused,
    /// A Service wants a place that belongs to another one.
    AddressConflict,
    /// An EndpointSlice cannot be served as it is written.
    EndpointSliceRefused,
    /// A Node cannot be understood.
    NodeRefused,
    /// A ServiceCIDR cannot be understood.
    ServiceCidrRefused,
    /// A Service, or its endpoints, are not named any more and are served all the same.
    ServiceHeld,
    /// Whatever was wrong with a Service is no longer.
    ServiceAccepted,
    /// A Service is not in the kernels of some nodes.
    ServiceNotProgrammed,
    /// It is again.
    ServiceProgrammed,
    /// A health check node port cannot be opened (J1).
    FailedToStartServiceHealthcheck,
    /// It is open now.
    StartedServiceHealthcheck,
    /// A node has no agent any more and holds what it held.
    ProxyStale,
    /// It has one again.
    ProxyConnected,
    /// A node's kernel does not take what it must hold.
    SyncFailing,
    /// It does again.
    SyncRecovered,
    /// Somebody else changed a node's rules, and they were put right.
    RulesRepaired,
    /// A node serves what its source does not name (any more).
    HoldingServices,
    /// It does not.
    HoldingEnded,
}

impl Reason {
    fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "Starting",
            Self::IpvsDeprecation => "IPVSDeprecation",
            Self::ServiceRefused => "ServiceRefused",
            Self::AddressConflict => "AddressConflict",
            Self::EndpointSliceRefused => "EndpointSliceRefused",
            Self::NodeRefused => "NodeRefused",
            Self::ServiceCidrRefused => "ServiceCIDRRefused",
            Self::ServiceHeld => "ServiceHeld",
            Self::ServiceAccepted => "ServiceAccepted",
            Self::ServiceNotProgrammed => "ServiceNotProgrammed",
            Self::ServiceProgrammed => "ServiceProgrammed",
            Self::FailedToStartServiceHealthcheck => "FailedToStartServiceHealthcheck",
            Self::StartedServiceHealthcheck => "StartedServiceHealthcheck",
            Self::ProxyStale => "ProxyStale",
            Self::ProxyConnected => "ProxyConnected",
            Self::SyncFailing => "SyncFailing",
            Self::SyncRecovered => "SyncRecovered",
            Self::RulesRepaired => "RulesRepaired",
            Self::HoldingServices => "HoldingServices",
            Self::HoldingEnded => "HoldingEnded",
        }
    }

    /// What was being done: the API wants a word for it.
    fn action(self) -> &'static str {
        match self {
            Self::Starting | Self::IpvsDeprecation | Self::ProxyStale | Self::ProxyConnected => {
                "StartKubeProxy"
            }
            Self::ServiceRefused
            | Self::AddressConflict
            | Self::EndpointSliceRefused
            | Self::NodeRefused
            | Self::ServiceCidrRefused
            | Self::ServiceHeld
            | Self::ServiceAccepted => "Read",
            Self::FailedToStartServiceHealthcheck | Self::StartedServiceHealthcheck => "Listen",
            Self::ServiceNotProgrammed
            | Self::ServiceProgrammed
            | Self::SyncFailing
            | Self::SyncRecovered
            | Self::RulesRepaired
            | Self::HoldingServices
            | Self::HoldingEnded => "Program",
        }
    }

    /// How the end of a problem is told, where it helps anybody.
    fn recovery(self) -> Option<(Self, &'static str)> {
        match self {
            Self::ServiceRefused | Self::AddressConflict => Some((
                Self::ServiceAccepted,
                "nothing is wrong with the Service any more",
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
            Self::SyncFailing => Some((
                Self::SyncRecovered,
                "the node's kernel holds what it must hold again",
            )),
            Self::HoldingServices => Some((
                Self::HoldingEnded,
                "the node serves what its source names, and nothing else",
            )),
            _ => None,
        }
    }

    fn is_warning(self) -> bool {
        !matches!(
            self,
            Self::Starting
                | Self::ServiceAccepted
                | Self::ServiceProgrammed
                | Self::StartedServiceHealthcheck
                | Self::ProxyConnected
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
    /// At most [`MAX_NOTE`] bytes.
    note: String,
    /// Tells it from others that say the same, such as two starts.
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

    /// Its name in the API: the same on every replica that says the same of the same object, and so
    /// again at once. [`DefaultHasher::new`] has no secret; other versions of the library may hash in
    /// another way, which costs one event twice.
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

/// The beginning of a text, if it is too long for a note.
fn clip(text: &str) -> String {
    const MORE: &str = "...";
    if text.len() <= MAX_NOTE {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(MAX_NOTE - MORE.len());
    format!("{}{MORE}", &text[..end])
}

/// Names of nodes for a note: `a, b and 3 more`.
fn node_names<'a>(nodes: impl ExactSizeIterator<Item = &'a NodeName>) -> String {
    let count = nodes.len();
    let named: Vec<&str> = nodes.take(NODES_NAMED).map(|name| &**name).collect();
    let more = count - named.len();
    match more {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}
