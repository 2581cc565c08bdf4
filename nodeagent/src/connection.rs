//! The connection to a control plane, as other parts of the agent see it.

use kplane_model::one_line;
use kplane_proto::v1 as pb;
use tokio::sync::watch;

/// The state of the connection. Without one, the agent serves the node as before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connection {
    /// Whether a stream is open and the control plane has welcomed the agent.
    pub live: bool,
    /// The start of the current state, milliseconds since 1970.
    pub since_ms: u64,
    /// The reason why there is no connection, human-readable; empty while there is one.
    pub reason: String,
    /// The number of times that a control plane showed an older state than the node holds, since the start.
    pub older_states: u64,
    /// The operator's order that freezes the node, by the last control plane that was connected.
    pub frozen: Option<Frozen>,
}

impl Connection {
    /// Shows other parts of the agent whether the node is frozen.
    pub(crate) fn freeze(of: &watch::Sender<Self>, frozen: Option<&Frozen>) {
        of.send_if_modified(|connection| {
            let changed = connection.frozen.as_ref() != frozen;
            if changed {
                connection.frozen = frozen.cloned();
            }
            changed
        });
    }
}

/// An operator's order that freezes the node: the agent gets no updates, and keeps the kernel as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frozen {
    /// The time of the order, milliseconds since 1970 by the control plane's clock.
    pub since_ms: u64,
    /// The operator; empty = not known.
    pub by: String,
    /// The reason that the operator gave, or empty.
    pub reason: String,
}

impl From<pb::Frozen> for Frozen {
    fn from(reported: pb::Frozen) -> Self {
        Self {
            since_ms: reported.since_ms,
            by: one_line(&reported.by),
            reason: one_line(&reported.reason),
        }
    }
}
