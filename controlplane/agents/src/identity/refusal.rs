//! Refusals of callers: the status that they get, and the counters.

use std::sync::atomic::{AtomicU64, Ordering};

use tonic::{Code, Status};

use super::Port;

/// The reason of a refusal; the value of a metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalReason {
    /// The caller proved no identity.
    NoCredential,
    /// The proof is invalid, or the API server does not accept it.
    BadCredential,
    /// The proof has ended.
    Ended,
    /// The proof is of another node than the one that the caller names.
    OtherNode,
    /// The proof is not an agent's.
    NotAnAgent,
    /// The node does not exist, or is another one of the same name.
    NoSuchNode,
    /// The caller lacks the right.
    NoRight,
    /// The caller asks too much.
    TooMuch,
    /// The identity or the right cannot be checked at the moment.
    Unavailable,
}

impl RefusalReason {
    /// All reasons, in the order of their values.
    pub const ALL: [Self; 9] = [
        Self::NoCredential,
        Self::BadCredential,
        Self::Ended,
        Self::OtherNode,
        Self::NotAnAgent,
        Self::NoSuchNode,
        Self::NoRight,
        Self::TooMuch,
        Self::Unavailable,
    ];

    /// Returns the name in metrics and in the audit log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoCredential => "no-credential",
            Self::BadCredential => "bad-credential",
            Self::Ended => "ended",
            Self::OtherNode => "other-node",
            Self::NotAnAgent => "not-an-agent",
            Self::NoSuchNode => "no-such-node",
            Self::NoRight => "no-right",
            Self::TooMuch => "too-much",
            Self::Unavailable => "unavailable",
        }
    }

    /// Returns the status of the answer.
    fn code(self) -> Code {
        match self {
            Self::NoCredential | Self::BadCredential | Self::Ended => Code::Unauthenticated,
            Self::OtherNode | Self::NotAnAgent | Self::NoRight => Code::PermissionDenied,
            Self::NoSuchNode => Code::NotFound,
            Self::TooMuch => Code::ResourceExhausted,
            Self::Unavailable => Code::Unavailable,
        }
    }
}

/// A refusal of a caller.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Refusal {
    /// The reason.
    pub reason: RefusalReason,
    /// The explanation for the caller, with a hint. Never a secret.
    pub text: String,
}

impl Refusal {
    /// Creates a refusal.
    pub fn new(reason: RefusalReason, text: impl Into<String>) -> Self {
        Self {
            reason,
            text: text.into(),
        }
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        Self::new(refusal.reason.code(), refusal.text)
    }
}

/// Counters of refusals.
#[derive(Debug, Default)]
pub(super) struct Refusals([[AtomicU64; RefusalReason::ALL.len()]; Port::ALL.len()]);

impl Refusals {
    pub(super) fn count(&self, port: Port, reason: RefusalReason) {
        let counter = self.0.get(port as usize);
        if let Some(counter) = counter.and_then(|port| port.get(reason as usize)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns all counters.
    pub(super) fn all(&self) -> Vec<(Port, RefusalReason, u64)> {
        Port::ALL
            .iter()
            .zip(&self.0)
            .flat_map(|(port, counters)| {
                RefusalReason::ALL
                    .iter()
                    .zip(counters)
                    .map(|(reason, count)| (*port, *reason, count.load(Ordering::Relaxed)))
            })
            .collect()
    }
}
