//! One question to an address in any protocol, and the fate of its packets.

use std::fmt;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result};
use kplane_model::Protocol;

use crate::client::{self, Outcome, Probe};
use crate::netns::NetNs;
use crate::sctp::{self, Watch};

/// The fate of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It reached an endpoint, which saw this source.
    Hit {
        /// The endpoint's own address and port.
        endpoint: SocketAddr,
        /// The client's address as the endpoint saw it.
        source: IpAddr,
    },
    /// A refusal came back.
    Refused,
    /// The sender's own kernel did not send it (`EPERM`): refused or dropped on its way out.
    Denied,
    /// Nothing came back.
    Silent,
    /// Any other outcome.
    Other(String),
}

/// A question from a namespace to one address.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// The client's namespace.
    pub ns: &'a NetNs,
    /// The protocol.
    pub protocol: Protocol,
    /// The client's address.
    pub source: IpAddr,
    /// The address that is asked.
    pub to: SocketAddr,
    /// The longest wait for an answer.
    pub timeout: Duration,
    /// The watch on the endpoints, which SCTP needs.
    pub watch: Option<&'a Watch>,
}

impl Seen {
    /// Returns whether it was refused, as far as the sender can know.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        matches!(self, Self::Refused | Self::Denied)
    }

    /// Returns whether it was dropped, as far as the sender can know.
    #[must_use]
    pub fn is_dropped(&self) -> bool {
        matches!(self, Self::Silent | Self::Denied)
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hit { endpoint, source } => write!(f, "{endpoint} reached from {source}"),
            Self::Refused => f.write_str("refused"),
            Self::Denied => f.write_str("not sent"),
            Self::Silent => f.write_str("no answer"),
            Self::Other(what) => f.write_str(what),
        }
    }
}

impl Question<'_> {
    /// Asks, each time as a new connection, until `go_on` returns false.
    ///
    /// # Errors
    /// The namespace could not be entered, or an SCTP packet could not be sent.
    pub fn repeat(&self, mut go_on: impl FnMut(Seen) -> bool + Send) -> Result<()> {
        let Some(protocol) = client::Protocol::of(self.protocol) else {
            while go_on(self.once_sctp()?) {}
            return Ok(());
        };
        let probe = Probe::new(protocol, self.to)
            .source(self.source)
            .timeout(self.timeout);
        self.ns.run(|| {
            while go_on(of_outcome(probe.here())) {}
            Ok(())
        })
    }

    fn once_sctp(&self) -> Result<Seen> {
        let watch = self.watch.context("SCTP needs a watch on the endpoints")?;
        let from = Some(self.source);
        match watch.probe_from(self.ns, from, self.to, self.timeout) {
            Ok(outcome) => Ok(of_sctp(outcome)),
            Err(error) if is_denied(&error) => Ok(Seen::Denied),
            Err(error) => Err(error),
        }
    }
}

fn of_outcome(outcome: Outcome) -> Seen {
    match outcome {
        Outcome::Reply(reply) => Seen::Hit {
            endpoint: reply.local,
            source: reply.peer.ip(),
        },
        Outcome::Refused => Seen::Refused,
        Outcome::TimedOut => Seen::Silent,
        Outcome::Other(error) if error.kind() == ErrorKind::PermissionDenied => Seen::Denied,
        other => Seen::Other(other.to_string()),
    }
}

fn of_sctp(outcome: sctp::Outcome) -> Seen {
    match outcome {
        sctp::Outcome::Arrived(arrival) if !arrival.checksum_valid => {
            Seen::Other(format!("wrong checksum: {arrival:?}"))
        }
        sctp::Outcome::Arrived(arrival) => Seen::Hit {
            endpoint: arrival.dst,
            source: arrival.src.ip(),
        },
        sctp::Outcome::Refused => Seen::Refused,
        sctp::Outcome::TimedOut => Seen::Silent,
        sctp::Outcome::Unreachable => Seen::Other("unreachable".to_owned()),
    }
}

fn is_denied(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<std::io::Error>();
    cause.is_some_and(|error| error.kind() == ErrorKind::PermissionDenied)
}
