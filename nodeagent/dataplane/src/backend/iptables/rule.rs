//! Rules as types, and their text exactly as `iptables-save` prints it.
//!
//! Rules that are read back are compared as text. So the text is that of `iptables-save`, not the shortest
//! that `iptables-restore` accepts. A rule consists of enums, addresses, numbers, hashes, names of interfaces
//! (of a validated alphabet) and comments (of another one), so a rule is always one line.

use std::fmt;
use std::fmt::Write as _;

use kplane_model::{Cidr, EndpointAddr, Family, Protocol};

use super::name::{BuiltIn, ChainName, lower};
use super::text::{Address, Label};
use crate::backend::PodInterface;
use kplane_netlink::ipvs::ServerKey;

/// A rule without the name of its chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::backend) struct Rule {
    /// The packet's source.
    source: Option<(Sense, Cidr)>,
    /// The packet's destination.
    destination: Option<(Sense, Cidr)>,
    /// The interface on which the packet arrived.
    input: Option<(Sense, PodInterface)>,
    /// The packet's protocol.
    protocol: Option<Protocol>,
    /// Further conditions, in the order in which the kernel evaluates them.
    matches: Vec<Match>,
    /// The action for the packet.
    target: Target,
}

/// Sense of a condition: it must be true, or it must be false.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backend) enum Sense {
    Is,
    IsNot,
}

impl fmt::Display for Sense {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Is => "",
            Self::IsNot => "! ",
        })
    }
}

/// A condition of an extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::backend) enum Match {
    /// No condition: a comment that names the purpose of the rule.
    Comment(Comment),
    /// The source is one of the node's addresses.
    SourceLocal,
    /// The source is none of the node's addresses.
    SourceElsewhere,
    /// The destination is one of the node's addresses.
    DestinationLocal,
    /// The packet did not arrive through a port of a bridge.
    NotBridged,
    /// Parts of the packet, such as `dst,dst` or `dst`, are in an IP set.
    InSet(&'static str, &'static str),
    /// The packet belongs to a connection to an IPVS virtual server.
    Virtual(ServerKey),
    /// The destination port is in a range, both ends included. Needs a rule with a protocol.
    Ports(u16, u16),
    /// The state of the packet's flow.
    State(Sense, States),
    /// The bit of the mark is set.
    Marked(Sense, Mark),
    /// The whole mark has this value.
    MarkIs(Mark),
    /// True for one packet out of this many, at random.
    OneOf(usize),
    /// The source was stored on a list, less than this many seconds ago. Older entries are removed (C4).
    Remembered {
        /// The list, which has the name of the endpoint's chain.
        list: ChainName,
        /// Idle timeout.
        seconds: u32,
        /// Family of the addresses.
        family: Family,
    },
    /// Always true: stores the source on a list.
    Remember {
        /// The list, which has the name of the endpoint's chain.
        list: ChainName,
        /// Family of the addresses.
        family: Family,
    },
    /// Always true: counts the packet.
    Count(Counter),
}

/// States of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backend) enum States {
    /// The first packet of a flow.
    New,
    /// Packets that belong to no flow and begin none.
    Invalid,
    /// Packets of a known flow.
    Established,
    /// Packets of a known flow, and those whose destination was translated.
    EstablishedOrTranslated,
}

impl States {
    fn as_str(self) -> &'static str {
        match self {
            Self::New => "NEW",
            Self::Invalid => "INVALID",
            Self::Established => "RELATED,ESTABLISHED",
            Self::EstablishedOrTranslated => "RELATED,ESTABLISHED,DNAT",
        }
    }
}

/// A packet mark: the bit that asks for masquerading (C5), or the mark of kplane's own connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backend) struct Mark(u32);

impl Mark {
    /// Returns the mark with this bit, 0..=31.
    pub(in crate::backend) fn bit(bit: u8) -> Self {
        Self(1_u32.wrapping_shl(u32::from(bit)))
    }

    /// Returns a mark that is compared as a whole.
    pub(in crate::backend) fn whole(mark: u32) -> Self {
        Self(mark)
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Counters of nfacct, which kube-proxy's metrics report (C7, C8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backend) enum Counter {
    /// Packets dropped because connection tracking found them invalid.
    InvalidDropped,
    /// Packets for a node port on the loopback address.
    LocalhostAccepted,
}

impl Counter {
    pub(super) const ALL: [Self; 2] = [Self::InvalidDropped, Self::LocalhostAccepted];

    /// Returns the counter's name, which is kube-proxy's.
    pub(in crate::backend) fn as_str(self) -> &'static str {
        match self {
            Self::InvalidDropped => "ct_state_invalid_dropped_pkts",
            Self::LocalhostAccepted => "localhost_nps_accepted_pkts",
        }
    }
}

/// The purpose of a rule, in kube-proxy's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::backend) enum Comment {
    /// A fixed text.
    Fixed(&'static str),
    /// The ServicePort's name alone.
    Name(Label),
    /// The ServicePort's name, followed by a fixed text.
    Of(Label, &'static str),
    /// A fixed text, the ServicePort's name, and another fixed text.
    About(&'static str, Label, &'static str),
    /// The ServicePort's name and one of its endpoints.
    Endpoint(Label, EndpointAddr),
    /// The ServicePort's name and its firewall chain.
    NotAccepted(Label, ChainName),
}

impl fmt::Display for Comment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(text) => f.write_str(text),
            Self::Name(label) => label.fmt(f),
            Self::Of(label, text) => write!(f, "{label} {text}"),
            Self::About(before, label, after) => write!(f, "{before} {label} {after}"),
            Self::Endpoint(label, endpoint) => write!(f, "{label} -> {}", Address::port(*endpoint)),
            Self::NotAccepted(label, chain) => {
                write!(f, "{label} traffic not accepted by {chain}")
            }
        }
    }
}

/// The action of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backend) enum Target {
    /// No action: the packet goes on to the next rule.
    Continue,
    /// The packet goes to a chain. If that chain decides nothing, the packet goes on behind this rule.
    Jump(ChainName),
    /// The packet is accepted.
    Accept,
    /// The packet is dropped silently.
    Drop,
    /// The packet returns to the chain from which it came.
    Return,
    /// The packet is refused, and its sender gets an error.
    Reject(Family),
    /// The bit of the packet's mark is set.
    SetMark(Mark),
    /// The bit of the packet's mark is flipped.
    FlipMark(Mark),
    /// The packet's source becomes an address of the node.
    Masquerade {
        /// Whether source ports are chosen at random.
        random_fully: bool,
    },
    /// The packet's destination becomes an endpoint.
    Dnat(EndpointAddr),
}

impl Rule {
    /// Returns a rule for every packet.
    pub(in crate::backend) fn new(target: Target) -> Self {
        Self {
            source: None,
            destination: None,
            input: None,
            protocol: None,
            matches: Vec::new(),
            target,
        }
    }

    /// Returns a rule that jumps to a chain.
    pub(in crate::backend) fn jump(chain: ChainName) -> Self {
        Self::new(Target::Jump(chain))
    }

    /// Returns the same rule with another target.
    pub(in crate::backend) fn with(mut self, target: Target) -> Self {
        self.target = target;
        self
    }

    /// Adds a condition on the source. A range of everything adds no condition.
    pub(in crate::backend) fn source(mut self, sense: Sense, range: Cidr) -> Self {
        let always = range.prefix_len() == 0 && sense == Sense::Is;
        self.source = (!always).then_some((sense, range));
        self
    }

    /// Adds a condition on the destination. A range of everything adds no condition.
    pub(in crate::backend) fn destination(mut self, sense: Sense, range: Cidr) -> Self {
        let always = range.prefix_len() == 0 && sense == Sense::Is;
        self.destination = (!always).then_some((sense, range));
        self
    }

    /// Adds a condition on the interface.
    pub(in crate::backend) fn input(mut self, sense: Sense, interface: PodInterface) -> Self {
        self.input = Some((sense, interface));
        self
    }

    /// Sets the protocol.
    pub(in crate::backend) fn protocol(mut self, protocol: Protocol) -> Self {
        self.protocol = Some(protocol);
        self
    }

    /// Sets the protocol and adds a condition on the destination port.
    pub(in crate::backend) fn port(self, protocol: Protocol, port: u16) -> Self {
        self.protocol(protocol).when(Match::Ports(port, port))
    }

    /// Adds a condition.
    pub(in crate::backend) fn when(mut self, condition: Match) -> Self {
        self.matches.push(condition);
        self
    }

    /// Adds a comment, if there is one.
    pub(in crate::backend) fn comment(self, comment: Option<Comment>) -> Self {
        match comment {
            Some(comment) => self.when(Match::Comment(comment)),
            None => self,
        }
    }

    /// Appends the line of the rule, including `-A` and the end of line.
    pub(in crate::backend) fn push(&self, chain: ChainName, to: &mut String) {
        // Writing to a string cannot fail.
        let _ = writeln!(to, "-A {chain}{self}");
    }

    /// Returns the line of a rule of a built-in chain as `iptables-save` prints it, without the end of line.
    pub(in crate::backend) fn line_in(&self, chain: BuiltIn) -> String {
        format!("-A {chain}{self}")
    }
}

impl fmt::Display for Rule {
    /// Writes everything behind the chain's name, with a blank before each word.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((sense, range)) = self.source {
            write!(f, " {sense}-s {}", Address::range(range))?;
        }
        if let Some((sense, range)) = self.destination {
            write!(f, " {sense}-d {}", Address::range(range))?;
        }
        if let Some((sense, interface)) = self.input {
            write!(f, " {sense}-i {}", Interface(interface))?;
        }
        if let Some(protocol) = self.protocol {
            write!(f, " -p {}", lower(protocol))?;
        }
        for condition in &self.matches {
            condition.write(self.protocol, f)?;
        }
        if let (Some(protocol), Target::Dnat(_)) = (self.protocol, self.target) {
            // A destination port is only valid together with a protocol.
            write!(f, " -m {}", lower(protocol))?;
        }
        self.target.fmt(f)
    }
}

impl Match {
    fn write(&self, protocol: Option<Protocol>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Comment(comment) => write!(f, " -m comment --comment \"{comment}\""),
            Self::SourceLocal => f.write_str(" -m addrtype --src-type LOCAL"),
            Self::SourceElsewhere => f.write_str(" -m addrtype ! --src-type LOCAL"),
            Self::DestinationLocal => f.write_str(" -m addrtype --dst-type LOCAL"),
            Self::NotBridged => f.write_str(" -m physdev ! --physdev-is-in"),
            Self::InSet(set, parts) => write!(f, " -m set --match-set {set} {parts}"),
            Self::Virtual(ServerKey { ip, protocol, port }) => {
                let number = protocol.number();
                write!(
                    f,
                    " -m ipvs --vproto {number} --vaddr {} --vport {port}",
                    Address(*ip)
                )
            }
            Self::Ports(first, last) => {
                let Some(protocol) = protocol else {
                    return Ok(());
                };
                write!(f, " -m {} --dport {first}", lower(protocol))?;
                if first == last {
                    return Ok(());
                }
                write!(f, ":{last}")
            }
            Self::State(sense, states) => {
                write!(f, " -m conntrack {sense}--ctstate {}", states.as_str())
            }
            Self::Marked(sense, mark) => write!(f, " -m mark {sense}--mark {mark}/{mark}"),
            Self::MarkIs(mark) => write!(f, " -m mark --mark {mark}"),
            Self::OneOf(count) => {
                let probability = probability(*count);
                write!(f, " -m statistic --mode random --probability {probability}")
            }
            Self::Remembered {
                list,
                seconds,
                family,
            } => {
                write!(f, " -m recent --rcheck --seconds {seconds} --reap")?;
                write!(f, " --name {list} --mask {} --rsource", mask(*family))
            }
            Self::Remember { list, family } => {
                let mask = mask(*family);
                write!(f, " -m recent --set --name {list} --mask {mask} --rsource")
            }
            Self::Count(counter) => write!(f, " -m nfacct --nfacct-name {}", counter.as_str()),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Continue => Ok(()),
            Self::Jump(chain) => write!(f, " -j {chain}"),
            Self::Accept => f.write_str(" -j ACCEPT"),
            Self::Drop => f.write_str(" -j DROP"),
            Self::Return => f.write_str(" -j RETURN"),
            Self::Reject(Family::V4) => {
                f.write_str(" -j REJECT --reject-with icmp-port-unreachable")
            }
            Self::Reject(Family::V6) => {
                f.write_str(" -j REJECT --reject-with icmp6-port-unreachable")
            }
            Self::SetMark(mark) => write!(f, " -j MARK --set-xmark {mark}/{mark}"),
            Self::FlipMark(mark) => write!(f, " -j MARK --set-xmark {mark}/0x0"),
            Self::Masquerade { random_fully } => {
                f.write_str(" -j MASQUERADE")?;
                if *random_fully {
                    f.write_str(" --random-fully")?;
                }
                Ok(())
            }
            Self::Dnat(to) => write!(f, " -j DNAT --to-destination {}", Address::port(*to)),
        }
    }
}

/// An interface, or, with `+` behind it, all interfaces whose names begin with this prefix.
struct Interface(PodInterface);

impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, prefix) = self.0.pattern();
        // The kernel limits names to 15 characters, so a prefix of that length is the whole name.
        let more = prefix && name.len() < PodInterface::MAX_NAME;
        write!(f, "{name}{}", if more { "+" } else { "" })
    }
}

/// Returns the mask that covers the whole address.
fn mask(family: Family) -> &'static str {
    family.pick("255.255.255.255", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")
}

/// Returns one in `count` as `iptables-save` prints it: kube-proxy writes ten decimals, the kernel keeps 31
/// bits of these, and `iptables-save` prints eleven decimals of those.
fn probability(count: usize) -> String {
    // 2^31.
    const ONE: f64 = 2_147_483_648.0;
    // Beyond a u32, the number of endpoints makes no difference any more.
    let count = f64::from(u32::try_from(count).unwrap_or(u32::MAX));
    let written = (1e10 / count).round() / 1e10;
    format!("{:.11}", (written * ONE).round() / ONE)
}
