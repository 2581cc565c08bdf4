//! One question in any protocol, and what became of it.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use kplane_model::{Family, Protocol};
pub use kplane_rig::ask::Seen;
use kplane_rig::{ask, vm};

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
            timeout: if vm::is_inside() { IN_THE_END_IN_VM } else { IN_THE_END },
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
    pub fn repeat(&self, net: &Net, go_on: impl FnMut(Seen) -> bool + Send) -> Result<()> {
        self.in_net(net)?.repeat(go_on)
    }

    /// The same in a world's namespaces.
    pub(crate) fn in_net<'a>(&self, net: &'a Net) -> Result<ask::Question<'a>> {
        Ok(ask::Question {
            ns: net.ns(self.client)?,
            protocol: self.protocol,
            source: self.source,
            to: self.to,
            timeout: self.timeout,
            watch: Some(&net.watch),
        })
    }
}

/// Asks once; a packet that gets lost is no answer.
pub fn ask(net: &Net, client: Client, protocol: Protocol, to: SocketAddr) -> Result<Seen> {
    Question::new(client, protocol, to).ask(net)
}

/// Asks once, and wants an endpoint to answer; returns it, and the source that it saw.
pub fn hit(
    net: &Net,
    client: Client,
    protocol: Protocol,
    to: SocketAddr,
) -> Result<(SocketAddr, IpAddr)> {
    match ask(net, client, protocol, to)? {
        Seen::Hit { endpoint, source } => Ok((endpoint, source)),
        seen => Err(anyhow!("{client:?} to {protocol} {to}: {seen}")),
    }
}

/// Asks once, and wants a refusal.
pub fn refused(net: &Net, client: Client, protocol: Protocol, to: SocketAddr) -> Result<()> {
    let seen = ask(net, client, protocol, to)?;
    ensure!(seen.is_refused(), "{client:?} to {protocol} {to}: {seen}");
    Ok(())
}

/// Asks once, and wants no answer.
pub fn silent(net: &Net, client: Client, protocol: Protocol, to: SocketAddr) -> Result<()> {
    let question = Question::new(client, protocol, to).timeout(SILENCE);
    let seen = question.ask(net)?;
    ensure!(seen == Seen::Silent, "{question}: {seen}");
    Ok(())
}

/// Returns all pairs of two lists, by the first.
pub fn pairs<A: Copy, B: Copy, const N: usize, const M: usize>(
    one: [A; N],
    other: [B; M],
) -> impl Iterator<Item = (A, B)> {
    one.into_iter().flat_map(move |a| other.into_iter().map(move |b| (a, b)))
}

/// Wants an endpoint to answer in TCP and UDP.
pub fn answers(net: &Net, client: Client, to: SocketAddr) -> Result<()> {
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        hit(net, client, protocol, to)?;
    }
    Ok(())
}
