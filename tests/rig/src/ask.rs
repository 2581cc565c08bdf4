//! Questions to an address in any protocol, and the fate of their packets.

use std::collections::BTreeMap;
use std::fmt;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result};
use kplane_model::Protocol;

use crate::client::{self, Outcome, Probe};
use crate::netns::NetNs;
use crate::sctp::{self, Watch};

/// Connections after the first wrong one, to find out whether all are.
const AFTERMATH: usize = 3;

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

/// The expected fate of connections to one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expect {
    /// They reach these endpoints and no others. With each endpoint stand the sources that it may
    /// see; none means any.
    Reach(BTreeMap<SocketAddr, Vec<IpAddr>>),
    /// They are refused.
    Refused,
    /// They get no answer.
    Dropped,
}

/// The fate of several connections.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Number of connections.
    pub made: usize,
    /// Number of answers by endpoint.
    pub answers: BTreeMap<SocketAddr, usize>,
    /// Number of wrong outcomes.
    pub wrong: BTreeMap<String, usize>,
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
    pub fn is_refused(&self) -> bool {
        matches!(self, Self::Refused | Self::Denied)
    }

    /// Returns whether it was dropped, as far as the sender can know.
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

impl fmt::Display for Expect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reach(endpoints) => {
                let endpoints: Vec<String> = endpoints.keys().map(ToString::to_string).collect();
                write!(f, "an answer from {}", endpoints.join(", "))
            }
            Self::Refused => f.write_str("a refusal"),
            Self::Dropped => f.write_str("no answer"),
        }
    }
}

impl Expect {
    /// Returns the endpoints that may answer, each with the sources that it may see.
    pub fn endpoints(&self) -> BTreeMap<SocketAddr, Vec<IpAddr>> {
        match self {
            Self::Reach(endpoints) => endpoints.clone(),
            Self::Refused | Self::Dropped => BTreeMap::new(),
        }
    }

    /// Returns the error in an outcome, if any.
    pub fn misfit(&self, seen: &Seen) -> Option<String> {
        let right = match (self, seen) {
            (Self::Reach(endpoints), Seen::Hit { endpoint, source }) => {
                let sources = endpoints.get(endpoint);
                sources.is_some_and(|sources| sources.is_empty() || sources.contains(source))
            }
            (Self::Reach(_), _) => false,
            (Self::Refused, seen) => seen.is_refused(),
            (Self::Dropped, seen) => seen.is_dropped(),
        };
        (!right).then(|| seen.to_string())
    }
}

impl Found {
    /// Returns the wrong outcomes on one line; `None` if there are none.
    pub fn complaint(&self, expect: &Expect) -> Option<String> {
        let times = |(what, times): (&String, &usize)| format!("{what} ({times} times)");
        let wrong: Vec<String> = self.wrong.iter().map(times).collect();
        let (made, wrong) = (self.made, wrong.join(", "));
        let text = format!("{wrong}; of {made} connections, each should get {expect}");
        (!wrong.is_empty()).then_some(text)
    }
}

impl Question<'_> {
    /// Asks at least `least` times, and goes on until every expected endpoint has answered, but no
    /// more than `most` times. Ends soon after a wrong outcome. If both numbers are equal, it does
    /// not matter which endpoints answered.
    ///
    /// # Errors
    /// As [`Question::repeat`].
    pub fn explore(&self, expect: &Expect, least: usize, most: usize) -> Result<Found> {
        let mut missing = expect.endpoints();
        let (mut found, mut end) = (Found::default(), most);
        self.repeat(|seen| {
            found.made += 1;
            if let Seen::Hit { endpoint, .. } = seen {
                *found.answers.entry(endpoint).or_default() += 1;
                missing.remove(&endpoint);
            }
            if let Some(wrong) = expect.misfit(&seen) {
                *found.wrong.entry(wrong).or_default() += 1;
                end = end.min(found.made + AFTERMATH);
            }
            found.made < end && (found.made < least || !missing.is_empty())
        })?;
        // A fixed number of connections need not reach all.
        if found.wrong.is_empty() && least < most {
            let never = |endpoint| (format!("{endpoint} never answered"), 1);
            found.wrong = missing.into_keys().map(never).collect();
        }
        Ok(found)
    }

    /// Asks, each time as a new connection, until `go_on` returns false.
    ///
    /// # Errors
    /// The namespace could not be entered, or an SCTP packet could not be sent.
    pub fn repeat(&self, mut go_on: impl FnMut(Seen) -> bool + Send) -> Result<()> {
        let Some(protocol) = client::Protocol::of(self.protocol) else {
            while go_on(self.once_sctp()?) {}
            return Ok(());
        };
        let probe = Probe::new(protocol, self.to).source(self.source).timeout(self.timeout);
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
