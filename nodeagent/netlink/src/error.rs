//! What can go wrong between us and the kernel, and what is known afterwards.

use nix::errno::Errno;

use super::batch::Label;
use super::message::Request;

/// A question to the kernel failed. Questions change nothing and may be asked again.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The socket could not be made.
    #[error("cannot open a netfilter netlink socket: {0}")]
    Open(Errno),
    /// Sending or receiving failed. `ENOBUFS` means that answers were lost, `EAGAIN` that none
    /// came in time.
    #[error("{what}: netlink socket: {errno}")]
    Socket {
        /// What was asked.
        what: &'static str,
        /// The socket's error.
        errno: Errno,
    },
    /// The kernel answered with an error.
    #[error("{what}: refused by the kernel: {errno}{}", in_its_words(reason.as_deref()))]
    Refused {
        /// What was asked.
        what: &'static str,
        /// The kernel's error.
        errno: Errno,
        /// The kernel's words, if any.
        reason: Option<String>,
    },
    /// The rules changed during each attempt to dump them.
    #[error("{what}: the kernel's rules changed during each of {attempts} attempts")]
    KeepsChanging {
        /// What was asked.
        what: &'static str,
        /// How often we tried.
        attempts: u32,
    },
    /// The answer is not one that the kernel gives.
    #[error("{what}: unexpected answer")]
    Unexpected {
        /// What was asked.
        what: &'static str,
    },
}

impl NetlinkError {
    /// The kernel's or the socket's error number, if there is one.
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Open(errno) | Self::Socket { errno, .. } | Self::Refused { errno, .. } => {
                Some(*errno)
            }
            Self::KeepsChanging { .. } | Self::Unexpected { .. } => None,
        }
    }
}

/// A batch was not committed, or we do not know.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// The kernel refused these operations, in order and at least one. Nothing was applied.
    #[error("{}", first_of(rejections, *operations))]
    Rejected {
        /// How many operations the batch had.
        operations: usize,
        /// The refused ones. The kernel tries all of them before it gives up.
        rejections: Vec<Rejection>,
    },
    /// The kernel refused the batch as a whole, before its first or after its last operation.
    /// Nothing was applied.
    #[error("transaction refused by the kernel: {0}")]
    Refused(Errno),
    /// Somebody changed the rules since the generation that the batch is based on. Nothing was
    /// applied.
    #[error("the kernel's rules changed since they were read")]
    GenerationMoved,
    /// The batch is longer than the socket's send buffer allows. Nothing was sent.
    #[error("transaction of {bytes} bytes is over the socket's limit of {limit}")]
    TooBig {
        /// Length of the batch.
        bytes: usize,
        /// [`super::NfSocket::max_batch_bytes`].
        limit: usize,
    },
    /// The batch was sent but its acknowledgement was lost: it may or may not be applied. Read the
    /// generation and the table before deciding; do not send it again blindly.
    #[error("outcome of the transaction unknown: {0}")]
    OutcomeUnknown(Errno),
}

/// One refused operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// Position in the batch, from 0.
    pub index: usize,
    /// What the operation does.
    pub what: Label,
    /// The kernel's error.
    pub errno: Errno,
    /// The kernel's words, if any.
    pub reason: Option<String>,
    /// The attribute that the kernel pointed at, with its header, if it did: of a list of elements
    /// the one that was refused.
    pub attribute: Option<Vec<u8>>,
}

/// A request that was refused; others with it were not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Position among the requests, from 0.
    pub index: usize,
    /// The kernel's error.
    pub errno: Errno,
    /// Its number: some subsystems have numbers that [`Errno`] does not know.
    pub code: i32,
    /// The kernel's words, if any.
    pub reason: Option<String>,
}

impl Refusal {
    /// As an error of the request, one of `requests`.
    #[must_use]
    pub fn into_error(self, requests: &[Request]) -> NetlinkError {
        NetlinkError::Refused {
            what: requests.get(self.index).map_or("request", |r| r.what),
            errno: self.errno,
            reason: self.reason,
        }
    }
}

fn in_its_words(reason: Option<&str>) -> String {
    reason.map_or_else(String::new, |text| format!(" ({text})"))
}

fn first_of(rejections: &[Rejection], operations: usize) -> String {
    let Some(first) = rejections.first() else {
        return "transaction refused by the kernel".to_owned();
    };
    let more = match rejections.len() {
        0 | 1 => String::new(),
        n => format!("; {} more refused", n - 1),
    };
    format!(
        "operation {} of {operations} ({}) refused by the kernel: {}{}{more}",
        first.index + 1,
        first.what,
        first.errno,
        in_its_words(first.reason.as_deref()),
    )
}
