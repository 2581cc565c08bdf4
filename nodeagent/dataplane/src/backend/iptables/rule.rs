//! Rules, typed, and their text exactly as `iptables-save` prints it.
//!
//! What is read back is compared as text, so the text is `iptables-save`'s, not the shortest that
//! `iptables-restore` takes. A rule is made of enums, addresses, numbers, hashes, names of
//! interfaces (a validated alphabet) and comments (the same); so a rule is always one line.

use std::fmt;
use std::fmt::Write as _;

use kplane_model::{Cidr, EndpointAddr, Family, Protocol};

use super::name::{BuiltIn, ChainName, lower};
use super::text::{Address, Label};
use crate::backend::PodInterface;
use kplane_netlink::ipvs::ServerKey;

/// A rule without the chain it is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::backend) struct Rule {
    /// The packet's source.
    source: Option<(Sense, Cidr)>,
    /// The packet's destination.
    destination: Option<(Sense, Cidr)>,
    /// The interface through which it came in.
    input: Option<(Sense, PodInterface)>,
    /// Its protocol.
    protocol: Option<Protocol>,
    /// Further conditions, in the order in which they are looked at.
    matches: Vec<Match>,
    /// What becomes of it.
    target: Target,
}

/// Whether a condition must hold or must not.
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
    /// No condition: says what the rule is for.
    Comment(Comment),
    /// The source is one of the node's addresses.
    SourceLocal,
    /// The source is none of the node's addresses.
    SourceElsewhere,
    /// The destination is one of the node's addresses.
    DestinationLocal,
    /// It did not come in through a port of a bridge.
    NotBridged,
    /// Parts of the packet, such as `dst,dst` or `dst`, are in an IP set.
    InSet(&'static str, &'static str),
    /// It belongs to a connection to an IPVS virtual server.
    Virtual(ServerKey),
    /// The destination port is in a range, both ends included; goes with the rule's protocol.
    Ports(u16, u16),
    /// The state of the packet's flow.
    State(Sense, States),
    /// The bit of the mark is set.
    Marked(Sense, Mark),
    /// The whole mark is this one.
    MarkIs(Mark),
    /// True for one packet out of so many.
    OneOf(usize),
    /// The source was remembered on a list, less than so many seconds ago; older ones go (C4).
    Remembered {
        /// The list has the name of the endpoint's chain.
        list: ChainName,
        /// Idle timeout.
        seconds: u32,
        /// Of the addresses.
        family: Family,
    },
    /// Always true: remembers the source.
    Remember {
        /// The list has the name of the endpoint's chain.
        list: ChainName,
        /// Of the addresses.
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
    /// Belongs to no flow and begins none.
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

/// A packet mark: the bit that asks for masquerading (C5), or that of our own connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backend) struct Mark(u32);

impl Mark {
    /// Bit 0..=31.
    pub(in crate::backend) fn bit(bit: u8) -> Self {
        Self(1_u32.wrapping_shl(u32::from(bit)))
    }

    /// All of it.
    pub(in crate::backend) fn whole(mark: u32) -> Self {
        Self(mark)
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Counters of nfacct, which kube-proxy's metrics show (C7, C8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backend) enum Counter {
    /// Dropped because connection tracking could make nothing of them.
    InvalidDropped,
    /// Came for a node port on the loopback address.
    LocalhostAccepted,
}

impl Counter {
    pub(super) const ALL: [Self; 2] = [Self::InvalidDropped, Self::LocalhostAccepted];

    /// The counter's name, as kube-proxy makes it.
    pub(in crate::backend) fn as_str(self) -> &'static str {
        match self {
            Self::InvalidDropped => "ct_state_invalid_dropped_pkts",
            Self::LocalhostAccepted => "localhost_nps_accepted_pkts",
        }
    }
}

/// What a rule is for, as kube-proxy says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::backend) enum Comment {
    /// Text of ours.
    Fixed(&'static str),
    /// The ServicePort's name alone.
    Name(Label),
    /// The ServicePort's name, and text of ours behind it.
    Of(Label, &'static str),
    /// Text of ours, the ServicePort's name, and text of ours.
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

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backend) enum Target {
    /// Nothing: it goes on to the next rule.
    Continue,
    /// To a chain, and back behind this rule if that decides nothing.
    Jump(ChainName),
    /// It may pass.
    Accept,
    /// It vanishes.
    Drop,
    /// Back to the chain it came from.
    Return,
    /// Its sender is told.
    Reject(Family),
    /// The bit of its mark is set.
    SetMark(Mark),
    /// The bit of its mark is flipped.
    FlipMark(Mark),
    /// Its source becomes the node's.
    Masquerade {
        /// Source ports are chosen at random.
        random_fully: bool,
    },
    /// Its destination becomes an endpoint.
    Dnat(EndpointAddr),
}

impl Rule {
    /// A rule for every packet.
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

    /// A rule that jumps to a chain.
    pub(in crate::backend) fn jump(chain: ChainName) -> Self {
        Self::new(Target::Jump(chain))
    }

    /// The same with another target.
    pub(in crate::backend) fn with(mut self, target: Target) -> Self {
        self.target = target;
        self
    }

    /// With a condition on the source. A range of everything is none.
    pub(in crate::backend) fn source(mut self, sense: Sense, range: Cidr) -> Self {
        let always = range.prefix_len() == 0 && sense == Sense::Is;
        self.source = (!always).then_some((sense, range));
        self
    }

    /// With a condition on the destination. A range of everything is none.
    pub(in crate::backend) fn destination(mut self, sense: Sense, range: Cidr) -> Self {
        let always = range.prefix_len() == 0 && sense == Sense::Is;
        self.destination = (!always).then_some((sense, range));
        self
    }

    /// With a condition on the interface.
    pub(in crate::backend) fn input(mut self, sense: Sense, interface: PodInterface) -> Self {
        self.input = Some((sense, interface));
        self
    }

    /// With a protocol.
    pub(in crate::backend) fn protocol(mut self, protocol: Protocol) -> Self {
        self.protocol = Some(protocol);
        self
    }

    /// With a protocol and one destination port.
    pub(in crate::backend) fn port(self, protocol: Protocol, port: u16) -> Self {
        self.protocol(protocol).when(Match::Ports(port, port))
    }

    /// With a condition more.
    pub(in crate::backend) fn when(mut self, condition: Match) -> Self {
        self.matches.push(condition);
        self
    }

    /// With a comment, if there is one.
    pub(in crate::backend) fn comment(self, comment: Option<Comment>) -> Self {
        match comment {
            Some(comment) => self.when(Match::Comment(comment)),
            None => self,
        }
    }

    /// Appends the line of the rule, `-A` and end of line included.
    pub(in crate::backend) fn push(&self, chain: ChainName, to: &mut String) {
        // Writing to a string cannot fail.
        let _ = writeln!(to, "-A {chain}{self}");
    }

    /// The line of a rule of a built-in chain as `iptables-save` prints it, without end of line.
    pub(in crate::backend) fn line_in(&self, chain: BuiltIn) -> String {
        format!("-A {chain}{self}")
    }
}

impl fmt::Display for Rule {
    /// Everything behind the chain's name, each word with a blank before it.
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
            // A destination port has a meaning with a protocol only.
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

/// An interface, or with `+` behind it all whose names begin so.
struct Interface(PodInterface);

impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, prefix) = self.0.pattern();
        // A name has no room for more than 15 characters: such a prefix is the whole name.
        let more = prefix && name.len() < PodInterface::MAX_NAME;
        write!(f, "{name}{}", if more { "+" } else { "" })
    }
}

/// All of an address counts.
fn mask(family: Family) -> &'static str {
    match family {
        Family::V4 => "255.255.255.255",
        Family::V6 => "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
    }
}

/// One in `count` as it is printed: kube-proxy writes ten decimals, the kernel keeps 31 bits, and
/// `iptables-save` prints eleven decimals of those.
fn probability(count: usize) -> String {
    // 2^31.
    const ONE: f64 = 2_147_483_648.0;
    // More endpoints than a u32 holds are no more likely for it.
    let count = f64::from(u32::try_from(count).unwrap_or(u32::MAX));
    let written = (1e10 / count).round() / 1e10;
    format!("{:.11}", (written * ONE).round() / ONE)
}
