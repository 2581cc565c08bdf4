//! What a backend cannot do: serve one ServicePort, or start on this machine.

use kplane_model::ServiceKey;

/// The reason why one ServicePort is not in the data path as planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The ServicePort.
    pub key: ServiceKey,
    /// The problem, human-readable.
    pub reason: String,
    /// Whether the ServicePort is served, but not in every respect.
    pub degraded: bool,
}

impl Failure {
    /// Creates the failure of a ServicePort that is not served.
    pub(in crate::backend) fn unserved(key: &ServiceKey, reason: impl Into<String>) -> Self {
        Self {
            degraded: false,
            ..Self::degraded(key, reason)
        }
    }

    /// Creates the failure of a ServicePort that is served, but not in every respect.
    pub(in crate::backend) fn degraded(key: &ServiceKey, reason: impl Into<String>) -> Self {
        Self {
            key: key.clone(),
            reason: reason.into(),
            degraded: true,
        }
    }
}

/// A backend that cannot start on this machine. The text names the missing part, in one line.
#[derive(Debug, thiserror::Error)]
#[error("backend {backend}: {reason}")]
pub struct OpenError {
    /// Name of the backend.
    pub backend: &'static str,
    /// The missing part, and what to do about it.
    pub reason: String,
}

impl OpenError {
    /// Creates the error of a backend.
    pub(in crate::backend) fn new(backend: &'static str, reason: impl Into<String>) -> Self {
        Self {
            backend,
            reason: reason.into(),
        }
    }
}
