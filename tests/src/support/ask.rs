//! One question in any protocol, and what became of it.

use std::fmt;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use kplane_model::{Family, Protocol};
use kplane_rig::client::{self, Outcome, Probe};
use kplane_rig::{sctp, vm};

use super::world::{Client, Net};

/// How soon a refusal must come: well before TCP repeats a SYN.
pub const PATIENCE: Duration = Duration::from_millis(500);
/// How soon an answer must come of which it does not matter how soon: after a second SYN, since an
/// ICMP error (what iptables' REJECT sends) does not reach the first of a TCP client over IPv6 here.
const IN_THE_END: Duration = Duration::from_millis(2_500);
/// The same in a virtual machine.
const IN_THE_END_IN_VM: Duration = Duration::from_secs(20);
/// How long silence is listened to.
pub const SILENCE: Duration = Duration::from_millis(200);

/// What became of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It reached an endpoint, which saw this source.
    Hit {
        endpoint: SocketAddr,
        source: IpAddr,
    },
    /// The sender was told that nobody is there.
    Refused,
    /// The sender's own kernel did not send it (`EPERM`): refused or dropped on its way out.
    Denied,
    /// Nothing came back.
    Silent,
    Other(String),
}

impl Seen {
    /// Refused, as far as the sender can tell.
    pub fn is_refused(&self) -> bool {
        matches!(self, Self::Refused | Self::Denied)
    }

    /// Dropped, as far as the sender can tell.
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

/// A client's question to one address.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    pub client: Client,
    pub protocol: Protocol,
    pub to: SocketAddr,
    pub timeout: Duration,
    /// The client's own, unless said otherwise.
    pub source: IpAddr,
}

impl fmt::Display for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} to {} {}", self.client, self.protocol, self.to)
    }
}

impl Question {
    pub fn new(client: Client, protocol: Protocol, to: SocketAddr) -> Self {
        Self {
            client,
            protocol,
            to,
            timeout: if vm::is_inside() {
                IN_THE_END_IN_VM
            } else {
                IN_THE_END
            },
            source: client.source(Family::of(to.ip())),
        }
    }

    /// From another of the client's addresses.
    pub fn source(self, source: IpAddr) -> Self {
        Self { source, ..self }
    }

    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Asks once.
    pub fn ask(&self, net: &Net) -> Result<Seen> {
        let mut seen = Vec::new();
        self.repeat(net, |answer| {
            seen.push(answer);
            false
        })?;
        seen.pop().ok_or_else(|| anyhow!("{self}: no outcome"))
    }

    /// Asks, each time as a new connection, until `go_on` says no.
    pub fn repeat(&self, net: &Net, mut go_on: impl FnMut(Seen) -> bool + Send) -> Result<()> {
        let protocol = match self.protocol {
            Protocol::Tcp => client::Protocol::Tcp,
            Protocol::Udp => client::Protocol::Udp,
            Protocol::Sctp => return self.repeat_sctp(net, go_on),
        };
        let probe = Probe::new(protocol, self.to)
            .source(self.source)
            .timeout(self.timeout);
        net.ns(self.client)?.run(|| {
            while go_on(of_outcome(probe.here())) {}
            Ok(())
        })
    }

    fn repeat_sctp(&self, net: &Net, mut go_on: impl FnMut(Seen) -> bool) -> Result<()> {
        let ns = net.ns(self.client)?;
        loop {
            let from = Some(self.source);
            let seen = match net.watch.probe_from(ns, from, self.to, self.timeout) {
                Ok(outcome) => of_sctp(outcome),
                Err(error) if is_denied(&error) => Seen::Denied,
                Err(error) => return Err(error),
            };
            if !go_on(seen) {
                return Ok(());
            }
        }
    }
}

/// Asks once; a packet that gets lost is no answer.
pub fn ask(net: &Net, client: Client, protocol: Protocol, to: SocketAddr) -> Result<Seen> {
    Question::new(client, protocol, to).ask(net)
}

/// Wants an endpoint to answer in TCP and UDP.
pub fn answers(net: &Net, client: Client, to: SocketAddr) -> Result<()> {
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let seen = ask(net, client, protocol, to)?;
        ensure!(
            matches!(seen, Seen::Hit { .. }),
            "{client:?} to {protocol} {to}: {seen}"
        );
    }
    Ok(())
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
