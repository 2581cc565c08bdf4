//! The connection to a control plane, as other parts of the agent see it.

/// The state of the connection. Without one, the agent serves the node as before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Whether a stream is open and the control plane has welcomed the agent.
    pub live: bool,
    /// The start of the current state, milliseconds since 1970.
    pub since_ms: u64,
    /// The reason why there is no connection, human-readable; empty while there is one.
    pub reason: String,
    /// The number of times that a control plane showed an older state than the node holds, since the start.
    pub older_states: u64,
}
