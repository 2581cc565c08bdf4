//! Errors in the exchange with the kernel, and what is known after each.

use nix::errno::Errno;

use super::batch::Label;
use super::message::Request;

/// A failed request to the kernel. Requests that only read change nothing and may be repeated.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The socket could not be created.
    #[error("cannot open a netfilter netlink socket: {0}")]
    Open(Errno),
    /// Sending or receiving failed. `ENOBUFS` means that answers were lost, `EAGAIN` that none came
    /// in time.
    #[error("{what}: netlink socket: {errno}")]
    Socket {
        /// The name of the request.
        what: &'static str,
        /// The socket's error.
        errno: Errno,
    },
    /// The kernel answered with an error.
    #[error("{what}: refused by the kernel: {errno}{}", in_its_words(reason.as_deref()))]
    Refused {
        /// The name of the request.
        what: &'static str,
        /// The kernel's error.
        errno: Errno,
        /// The kernel's message, if any.
        reason: Option<String>,
    },
    /// The rules changed during each attempt to dump them.
    #[error("{what}: the kernel's rules changed during each of {attempts} attempts")]
    KeepsChanging {
        /// The name of the request.
        what: &'static str,
        /// The number of attempts.
        attempts: u32,
    },
    /// The answer does not have the form that the kernel uses.
    #[error("{what}: unexpected answer")]
    Unexpected {
        /// The name of the request.
        what: &'static str,
    },
}

impl NetlinkError {
    /// Returns the kernel's or the socket's error number, if there is one.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Open(errno) | Self::Socket { errno, .. } | Self::Refused { errno, .. } => {
                Some(*errno)
            }
            Self::KeepsChanging { .. } | Self::Unexpected { .. } => None,
        }
    }
}

/// A batch that was not committed, or whose outcome is unknown.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// The kernel refused these operations, in order and at least one. Nothing was applied.
    #[error("{}", first_of(rejections, *operations))]
    Rejected {
        /// The number of operations in the batch.
        operations: usize,
        /// The refused operations. The kernel tries all operations before it gives up.
        rejections: Vec<Rejection>,
    },
    /// The kernel refused the batch as a whole, before its first or after its last operation.
    /// Nothing was applied.
    #[error("transaction refused by the kernel: {0}")]
    Refused(Errno),
    /// Another transaction changed the rules since the generation that the batch is based on.
    /// Nothing was applied.
    #[error("the kernel's rules changed since they were read")]
    GenerationMoved,
    /// The batch is longer than the socket's send buffer allows. Nothing was sent.
    #[error("transaction of {bytes} bytes is over the socket's limit of {limit}")]
    TooBig {
        /// The length of the batch.
        bytes: usize,
        /// [`super::NfSocket::max_batch_bytes`].
        limit: usize,
    },
    /// The batch was sent but its acknowledgement was lost, so it may or may not be applied. The
    /// caller must read the generation and the table before deciding, and must not send the batch
    /// again blindly.
    #[error("outcome of the transaction unknown: {0}")]
    OutcomeUnknown(Errno),
}

impl CommitError {
    /// Returns the kernel's error number for the batch, or for the first operation that it refused.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Rejected { rejections, .. } => rejections.first().map(|refused| refused.errno),
            Self::Refused(errno) => Some(*errno),
            Self::GenerationMoved | Self::TooBig { .. } | Self::OutcomeUnknown(_) => None,
        }
    }
}

/// One refused operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// The position in the batch, from 0.
    pub index: usize,
    /// The name of the operation.
    pub what: Label,
    /// The kernel's error.
    pub errno: Errno,
    /// The kernel's message, if any.
    pub reason: Option<String>,
    /// The attribute that the kernel refused, with its header, if the kernel named one. For a list
    /// of elements it is the refused element.
    pub attribute: Option<Vec<u8>>,
}

/// A refused request; other requests sent with it were not refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The position among the requests, from 0.
    pub index: usize,
    /// The kernel's error.
    pub errno: Errno,
    /// The number of the error: some subsystems have numbers that [`Errno`] does not know.
    pub code: i32,
    /// The kernel's message, if any.
    pub reason: Option<String>,
}

impl Refusal {
    /// Converts the refusal into an error of its request, which is one of `requests`.
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
    let Some((first, more)) = rejections.split_first() else {
        return "transaction refused by the kernel".to_owned();
    };
    let more = match more.len() {
        0 => String::new(),
        more => format!("; {more} more refused"),
    };
    format!(
        "operation {} of {operations} ({}) refused by the kernel: {}{}{more}",
        first.index.saturating_add(1),
        first.what,
        first.errno,
        in_its_words(first.reason.as_deref()),
    )
}
