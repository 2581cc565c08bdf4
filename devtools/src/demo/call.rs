//! One call of a Service port: repeated until every endpoint has answered, and judged.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use kplane_model::Protocol;
use kplane_rig::client::{Outcome, Probe, TIMEOUT};
use kplane_rig::netns::NetNs;
use kplane_rig::sctp;

use super::expect::{Expect, SeenAs};
use super::world::{Caller, Role, speaks};

/// Time without any answer that counts as silence: a thousand times what an answer takes.
const SILENCE: Duration = Duration::from_millis(250);
/// Least calls per endpoint, so that a wrong endpoint beside the right ones is found.
const ROUNDS: usize = 2;
/// Most calls per endpoint: the chance to miss one of 100 endpoints is below 1 in 10^6.
const MOST_ROUNDS: usize = 20;
/// Calls to a Service with session affinity.
const STICKY_CALLS: usize = 4;
/// Calls after the first failure, to find out whether all fail.
const AFTERMATH: usize = 3;

/// A caller and the address that it calls.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    /// The caller.
    pub(crate) caller: Caller,
    /// The caller's address.
    pub(crate) source: IpAddr,
    /// The kind of the called address.
    pub(crate) kind: &'static str,
    /// The address called.
    pub(crate) to: SocketAddr,
    /// The protocol of the call.
    pub(crate) protocol: Protocol,
    /// The address of the node whose kernel handles it.
    pub(crate) node_ip: IpAddr,
    /// The outcome that is expected.
    pub(crate) expect: Expect,
    /// Names of pods, for messages.
    pub(crate) names: Arc<Names>,
    /// The namespaces where SCTP packets are captured, because there is no SCTP server.
    pub(crate) watched: Vec<NetNs>,
}

/// Names of pods by address.
pub(crate) type Names = BTreeMap<IpAddr, String>;

/// The results of a call.
#[derive(Clone, Debug, Default)]
pub(crate) struct Finding {
    /// Number of times the call was made.
    pub(crate) calls: u64,
    /// Number of answers by endpoint.
    pub(crate) answers: BTreeMap<SocketAddr, u64>,
    /// Number of other outcomes, and of wrong answers.
    pub(crate) wrong: BTreeMap<String, u64>,
}

/// The outcome of a single call.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Seen {
    Answer { by: SocketAddr, peer: IpAddr },
    Refused,
    Silence,
    Other(String),
}

impl Call {
    /// Calls until every expected endpoint has answered, or it is clear that one will not.
    pub(crate) fn make(&self) -> Result<Finding> {
        let (least, most) = match &self.expect {
            Expect::Answer { sticky: true, .. } => (STICKY_CALLS, STICKY_CALLS),
            Expect::Answer { from, .. } => (from.len() * ROUNDS, (from.len() + 1) * MOST_ROUNDS),
            Expect::Refused => (ROUNDS, ROUNDS),
            Expect::Silence => (1, 1),
        };
        self.make_times(least, most)
    }

    /// Calls at least `least` and at most `most` times.
    pub(crate) fn make_times(&self, least: usize, most: usize) -> Result<Finding> {
        if self.protocol == Protocol::Sctp {
            // SCTP probes enter namespaces themselves.
            return self.repeat(least, most);
        }
        self.caller.ns.run(|| self.repeat(least, most))
    }

    fn repeat(&self, least: usize, most: usize) -> Result<Finding> {
        let mut finding = Finding::default();
        let (mut made, mut left) = (0, most);
        while left > 0 && (made < least || self.missing(&finding).next().is_some()) {
            self.judge(&self.once()?, &mut finding);
            made += 1;
            left -= 1;
            if !finding.wrong.is_empty() {
                left = left.min(AFTERMATH);
                if made >= AFTERMATH + least {
                    break;
                }
            }
        }
        finding.calls = made as u64;
        if finding.wrong.is_empty() && !matches!(self.expect, Expect::Answer { sticky: true, .. }) {
            let missing: Vec<SocketAddr> = self.missing(&finding).collect();
            for endpoint in missing {
                finding
                    .wrong
                    .insert(format!("{} never answered", self.name(endpoint)), 1);
            }
        }
        Ok(finding)
    }

    /// Returns the endpoints that have not answered yet.
    fn missing<'a>(&'a self, finding: &'a Finding) -> impl Iterator<Item = SocketAddr> + 'a {
        let from = match &self.expect {
            Expect::Answer { from, .. } => Some(from),
            Expect::Refused | Expect::Silence => None,
        };
        let all = from.into_iter().flat_map(BTreeSet::iter).copied();
        all.filter(|endpoint| !finding.answers.contains_key(endpoint))
    }

    fn judge(&self, seen: &Seen, finding: &mut Finding) {
        let wrong = match (seen, &self.expect) {
            (Seen::Answer { by, peer }, expect) => {
                *finding.answers.entry(*by).or_default() += 1;
                self.misfit(*by, *peer, expect)
            }
            (Seen::Refused, Expect::Refused) | (Seen::Silence, Expect::Silence) => None,
            (Seen::Refused, _) => Some("refused".to_owned()),
            (Seen::Silence, _) => Some("no answer".to_owned()),
            (Seen::Other(what), _) => Some(what.clone()),
        };
        if let Some(wrong) = wrong {
            *finding.wrong.entry(wrong).or_default() += 1;
        }
    }

    /// Returns the error in an answer, if any.
    fn misfit(&self, by: SocketAddr, peer: IpAddr, expect: &Expect) -> Option<String> {
        let who = self.name(by);
        let Expect::Answer { from, seen_as, .. } = expect else {
            return Some(format!("{who} answered"));
        };
        if !from.contains(&by) {
            return Some(format!("{who} answered, which it must not"));
        }
        // Packets that are delivered on the node itself pass no postrouting.
        if by.ip() == self.node_ip {
            return None;
        }
        let itself = by.ip() == self.source;
        let expected = match seen_as {
            SeenAs::Caller if !itself => self.source,
            SeenAs::Caller | SeenAs::Node => self.node_ip,
        };
        (peer != expected).then(|| format!("{who} sees {peer}, not {expected}"))
    }

    /// Returns the name of the pod behind an endpoint.
    fn name(&self, endpoint: SocketAddr) -> String {
        self.names
            .get(&endpoint.ip())
            .cloned()
            .unwrap_or_else(|| endpoint.to_string())
    }

    /// Returns the errors in the results on one line; `None` if there are none.
    pub(crate) fn complaint(&self, finding: &Finding) -> Option<String> {
        let times = |(what, times): (&String, &u64)| match times {
            1 => what.clone(),
            times => format!("{what} ({times} times)"),
        };
        let wrong: Vec<String> = finding.wrong.iter().map(times).collect();
        let expected = match &self.expect {
            Expect::Answer { from, .. } => {
                let names: Vec<String> = from.iter().map(|endpoint| self.name(*endpoint)).collect();
                format!("an answer from {}", names.join(", "))
            }
            Expect::Refused => "a refusal".to_owned(),
            Expect::Silence => "silence".to_owned(),
        };
        let made = finding.calls;
        let wrong = (!wrong.is_empty()).then(|| wrong.join(", "))?;
        Some(format!(
            "{self}: {wrong}; of {made} connections, each should get {expected}"
        ))
    }

    /// Calls once, from the namespace of the calling thread unless it is SCTP.
    fn once(&self) -> Result<Seen> {
        let silence = self.expect == Expect::Silence;
        let timeout = if silence { SILENCE } else { TIMEOUT };
        let Some(protocol) = speaks(self.protocol) else {
            return self.once_sctp(timeout);
        };
        let probe = Probe::new(protocol, self.to)
            .source(self.source)
            .timeout(timeout);
        Ok(match probe.here() {
            Outcome::Reply(reply) => Seen::Answer {
                by: reply.local,
                peer: reply.peer.ip(),
            },
            Outcome::Refused => Seen::Refused,
            Outcome::TimedOut => Seen::Silence,
            Outcome::Unreachable => Seen::Other("unreachable".to_owned()),
            Outcome::Other(error) => self.local_error(&error),
        })
    }

    fn once_sctp(&self, timeout: Duration) -> Result<Seen> {
        let pods: Vec<&NetNs> = self.watched.iter().collect();
        let outcome = match sctp::init_probe(&self.caller.ns, &pods, self.to, timeout) {
            Ok(outcome) => outcome,
            Err(error) => match error.root_cause().downcast_ref::<io::Error>() {
                Some(error) => return Ok(self.local_error(error)),
                None => return Err(error),
            },
        };
        Ok(match outcome {
            sctp::Outcome::Arrived(arrival) if !arrival.checksum_valid => {
                Seen::Other("a broken checksum".to_owned())
            }
            sctp::Outcome::Arrived(arrival) => Seen::Answer {
                by: arrival.dst,
                peer: arrival.src.ip(),
            },
            sctp::Outcome::Refused => Seen::Refused,
            sctp::Outcome::Unreachable => Seen::Other("unreachable".to_owned()),
            sctp::Outcome::TimedOut => Seen::Silence,
        })
    }

    /// Returns the outcome of a local error: a node that drops or rejects its own packets reports
    /// that to their sender.
    fn local_error(&self, error: &io::Error) -> Seen {
        let denied = error.kind() == ErrorKind::PermissionDenied;
        match self.expect {
            Expect::Refused if denied && self.caller.role == Role::Node => Seen::Refused,
            Expect::Silence if denied && self.caller.role == Role::Node => Seen::Silence,
            _ => Seen::Other(error.to_string()),
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let node = &self.caller.node;
        match self.caller.role {
            Role::Client => write!(f, "client via {node}")?,
            Role::Guest => write!(f, "client {} via {node}", self.source)?,
            Role::Pod => write!(f, "pod {}", self.caller.ns.name())?,
            Role::Node => write!(f, "{node} itself")?,
        }
        write!(f, " to {} {}/{}", self.kind, self.to, self.protocol)
    }
}

impl Finding {
    /// Returns whether all calls went as expected.
    pub(crate) fn is_right(&self) -> bool {
        self.wrong.is_empty()
    }

    /// Adds the counts of another finding, without its errors.
    pub(crate) fn add(&mut self, other: &Self) {
        self.calls += other.calls;
        for (endpoint, count) in &other.answers {
            *self.answers.entry(*endpoint).or_default() += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(expect: Expect) -> Result<Call> {
        let caller = Caller {
            role: Role::Pod,
            node: "n".to_owned(),
            ns: NetNs::new("test")?,
            ips: Vec::new(),
        };
        Ok(Call {
            caller,
            source: [10, 0, 0, 1].into(),
            kind: "ClusterIP",
            to: ([7, 7, 7, 7], 80).into(),
            protocol: Protocol::Tcp,
            node_ip: [9, 9, 9, 9].into(),
            expect,
            names: Arc::default(),
            watched: Vec::new(),
        })
    }

    #[test]
    fn answers_are_judged() {
        let (own, other) = (([10, 0, 0, 1], 80).into(), ([10, 0, 0, 2], 80).into());
        let expect = Expect::Answer {
            from: [own, other].into(),
            seen_as: SeenAs::Caller,
            sticky: false,
        };
        // Without privileges no call is possible.
        let Ok(call) = call(expect.clone()) else {
            return;
        };
        let peer = |ip: [u8; 4]| ip.into();
        assert_eq!(call.misfit(other, peer([10, 0, 0, 1]), &expect), None);
        assert_eq!(call.misfit(own, peer([9, 9, 9, 9]), &expect), None);
        assert!(call.misfit(own, peer([10, 0, 0, 1]), &expect).is_some());
        assert!(call.misfit(other, peer([9, 9, 9, 9]), &expect).is_some());
        assert!(
            call.misfit(([10, 0, 0, 3], 80).into(), peer([10, 0, 0, 1]), &expect)
                .is_some()
        );
        let mut finding = Finding::default();
        call.judge(&Seen::Silence, &mut finding);
        call.judge(&Seen::Silence, &mut finding);
        assert_eq!(finding.wrong, BTreeMap::from([("no answer".to_owned(), 2)]));
    }
}
