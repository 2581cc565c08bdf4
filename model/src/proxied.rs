//! The treatment that a Service asks of the userspace proxy (`userspace.md`, U50..U53).

/// A Service's wish that the agents' userspace proxy serves it, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proxied {
    /// Whether another endpoint is tried when the first does not take a connection (U52).
    pub retry: bool,
}

impl Default for Proxied {
    fn default() -> Self {
        Self { retry: true }
    }
}
