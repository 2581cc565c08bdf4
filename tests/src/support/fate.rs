//! What became of packets, and when two fates are the same. Pure.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use kplane_model::{Cidr, Family, Protocol};

use super::ask::{Question, Seen};
use super::service::node_ip;
use super::world::{Client, second_ip};

/// One way in which a connection ended.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// It reached an endpoint.
    Hit {
        endpoint: SocketAddr,
        source: Source,
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

/// Source an endpoint takes for the client; one that reaches itself always sees the node (A15).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    Client,
    /// The node that handles the client's packets.
    Node,
    Other(IpAddr),
}

/// All ends that were seen of many connections.
pub type Ends = BTreeSet<End>;

/// A question of a scenario, asked many times.
#[derive(Clone, Copy, Debug)]
pub struct Packet {
    pub question: Question,
    /// Connections of one client reach the same endpoint, and it is not said which.
    pub sticky: bool,
    /// The line of `scenarios.txt`, or 0.
    pub line: usize,
}

impl Packet {
    pub fn new(question: Question) -> Self {
        Self {
            question,
            sticky: false,
            line: 0,
        }
    }

    pub fn on_line(self, line: usize) -> Self {
        Self { line, ..self }
    }

    /// With session affinity.
    pub fn sticky(self) -> Self {
        Self {
            sticky: true,
            ..self
        }
    }

    /// How one connection of this packet ended.
    pub fn end(&self, seen: Seen) -> End {
        match seen {
            Seen::Hit { endpoint, source } => End::Hit {
                endpoint,
                source: self.source(source),
            },
            Seen::Refused => End::Refused,
            Seen::Denied => End::Denied,
            Seen::Silent => End::Silent,
            Seen::Other(what) => End::Other(what),
        }
    }

    /// Whether the sender learns of a refusal by the first call that looks, which may be sending or receiving.
    fn is_told_once(&self, fate: &Ends) -> bool {
        let mut ends = fate.iter();
        self.question.protocol == Protocol::Udp
            && ends.all(|end| matches!(end, End::Refused | End::Denied))
    }

    fn source(&self, source: IpAddr) -> Source {
        let client = self.question.client;
        if source == self.question.source {
            return Source::Client;
        }
        let family = Family::of(source);
        // Load-balancer addresses that node-1 has itself.
        let vips = ["198.19.0.0/16", "fd96:0:0:2::/64"][family as usize];
        let is_vip = vips.parse().is_ok_and(|vips: Cidr| vips.contains(source));
        let is_first = client.node() == 1 && (source == second_ip(family) || is_vip);
        if is_first || source == node_ip(client.node(), family) {
            Source::Node
        } else {
            Source::Other(source)
        }
    }

    /// Whether two fates are the same to a user.
    pub fn same(&self, one: &Ends, other: &Ends) -> bool {
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

fn only_hit(fate: &Ends) -> Option<(SocketAddr, Source)> {
    match fate.iter().collect::<Vec<_>>()[..] {
        [End::Hit { endpoint, source }] => Some((*endpoint, *source)),
        _ => None,
    }
}

/// In words.
pub fn reported(fate: &Ends) -> String {
    let ends: Vec<String> = fate.iter().map(ToString::to_string).collect();
    ends.join(", ")
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hit { endpoint, source } => match source {
                Source::Client => write!(f, "{endpoint} from the client"),
                Source::Node => write!(f, "{endpoint} from the node"),
                Source::Other(ip) => write!(f, "{endpoint} from {ip}"),
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
pub fn asked_by_node(packet: &Packet) -> bool {
    packet.question.client == Client::Node
}
