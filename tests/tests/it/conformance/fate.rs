//! What became of a packet, and when two fates are the same. Pure.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use kplane_model::{Cidr, Family, Protocol};

use kplane_tests::support::{Client, Question, Seen, node_ip, second_ip};

/// One way in which a connection ended.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum End {
    /// It reached an endpoint.
    Hit {
        endpoint: SocketAddr,
        source: Whom,
    },
    /// The client was told at once.
    Refused,
    /// The client was told only when it asked again, a second later.
    RefusedLate,
    /// The client's own kernel did not send it.
    Denied,
    /// Nothing came back, and nobody got it.
    Silent,
    /// The node passed it on as it was.
    Passed,
    Other(String),
}

/// Whom an endpoint takes for the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Whom {
    /// The client.
    Itself,
    /// The node that handles the client's packets.
    Node,
    Other(IpAddr),
}

/// All ends that were seen of many connections.
pub(crate) type Fate = BTreeSet<End>;

/// A question of a scenario, asked many times.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    pub(crate) question: Question,
    /// Connections of one client reach the same endpoint, and it is not said which.
    pub(crate) sticky: bool,
    /// The line of `scenarios.txt`, or 0.
    pub(crate) line: usize,
}

impl Packet {
    pub(crate) fn new(question: Question) -> Self {
        Self {
            question,
            sticky: false,
            line: 0,
        }
    }

    pub(crate) fn on_line(self, line: usize) -> Self {
        Self { line, ..self }
    }

    /// With session affinity.
    pub(crate) fn sticky(self) -> Self {
        Self {
            sticky: true,
            ..self
        }
    }

    /// How one connection of this packet ended.
    pub(crate) fn end(&self, seen: Seen) -> End {
        match seen {
            Seen::Hit { endpoint, source } => End::Hit {
                endpoint,
                source: self.whom(source),
            },
            Seen::Refused => End::Refused,
            Seen::Denied => End::Denied,
            Seen::Silent => End::Silent,
            Seen::Other(what) => End::Other(what),
        }
    }

    /// Whether the sender learns of a refusal by the first call that looks, which may be sending or receiving.
    fn is_told_once(&self, fate: &Fate) -> bool {
        let mut ends = fate.iter();
        self.question.protocol == Protocol::Udp
            && ends.all(|end| matches!(end, End::Refused | End::Denied))
    }

    fn whom(&self, source: IpAddr) -> Whom {
        let client = self.question.client;
        if source == self.question.source {
            return Whom::Itself;
        }
        let family = Family::of(source);
        // Load-balancer addresses that node-1 has itself.
        let vips = ["198.19.0.0/16", "fd96:0:0:2::/64"][family as usize];
        let is_vip = vips.parse().is_ok_and(|vips: Cidr| vips.contains(source));
        let is_first = client.node() == 1 && (source == second_ip(family) || is_vip);
        match is_first || source == node_ip(client.node(), family) {
            true => Whom::Node,
            false => Whom::Other(source),
        }
    }

    /// Whether two fates are the same to a user.
    pub(crate) fn same(&self, one: &Fate, other: &Fate) -> bool {
        if self.is_told_once(one) && self.is_told_once(other) {
            return true;
        }
        if !self.sticky || one == other {
            return one == other;
        }
        // Affinity: both chose, and not the same need be chosen.
        let (Some(one), Some(other)) = (only_hit(one), only_hit(other)) else {
            return false;
        };
        // Whoever chose the client itself masquerades it (A15).
        let is_hairpin = |endpoint: SocketAddr| endpoint.ip() == self.question.source;
        one.1 == other.1 || is_hairpin(one.0) || is_hairpin(other.0)
    }
}

impl fmt::Display for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.question.fmt(f)?;
        let usual = self.question.client.source(Family::of(self.question.source));
        if self.question.source != usual {
            write!(f, " from {}", self.question.source)?;
        }
        if self.line > 0 {
            write!(f, " (scenarios.txt:{})", self.line)?;
        }
        Ok(())
    }
}

fn only_hit(fate: &Fate) -> Option<(SocketAddr, Whom)> {
    match fate.iter().collect::<Vec<_>>()[..] {
        [End::Hit { endpoint, source }] => Some((*endpoint, *source)),
        _ => None,
    }
}

/// In words.
pub(crate) fn reported(fate: &Fate) -> String {
    let ends: Vec<String> = fate.iter().map(ToString::to_string).collect();
    ends.join(", ")
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hit { endpoint, source } => match source {
                Whom::Itself => write!(f, "{endpoint} from the client"),
                Whom::Node => write!(f, "{endpoint} from the node"),
                Whom::Other(ip) => write!(f, "{endpoint} from {ip}"),
            },
            Self::Refused => f.write_str("refused"),
            Self::RefusedLate => f.write_str("refused late"),
            Self::Denied => f.write_str("not sent"),
            Self::Silent => f.write_str("dropped"),
            Self::Passed => f.write_str("passed on"),
            Self::Other(what) => f.write_str(what),
        }
    }
}

/// The clients that handle their packets on the node that has load-balancer addresses itself.
pub(crate) fn asked_by_node(packet: &Packet) -> bool {
    packet.question.client == Client::Node
}
