//! The connection to a control plane, as far as others need to know of it.

/// Whether the control plane is there. Without it the node is served as it last was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// A stream is open and welcome.
    pub live: bool,
    /// Since when it is (not), milliseconds since 1970.
    pub since_ms: u64,
    /// Why not, for people; empty while it is.
    pub reason: String,
}
