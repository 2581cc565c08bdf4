//! A packet's way through the chains of both tables: each step of a rule does what the kernel's expression does.

use std::collections::BTreeSet;
use std::net::IpAddr;

use kplane_model::{EndpointAddr, Protocol, ip_bits};

use super::super::affinity::Group;
use super::super::affinity_id::{AffinityId, GroupPart};
use super::super::chain::{Chain, HookPoint, RuleStep};
use super::super::element::{Data, Element};
use super::super::fields::Field;
use super::super::policy_step::PolicyStep;
use super::super::schema::{Balancer, Set};
use super::super::table_kind::TableKind;
use super::super::word::{Word, WordStep, draw_mask};
use super::held::{HeldTable, Loaded};

/// `IPPROTO_ICMP` (linux/in.h), for protocols without ports.
const PORTLESS: u8 = 1;

/// A packet that reaches the machine, or that the machine sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TestPacket {
    /// The sender. One of the machine's own addresses says that the machine sends it.
    pub source: IpAddr,
    /// The destination. That of a known connection is behind destination NAT.
    pub destination: IpAddr,
    /// The protocol and the destination's port; `None` = a protocol without ports.
    pub port: Option<(Protocol, u16)>,
    /// The packet's part in its connection.
    pub flow: PacketFlow,
}

/// A packet's part in its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketFlow {
    /// The first one.
    New,
    /// A later one of a connection without an answer.
    Unanswered,
    /// The first one that conntrack sees of a TCP connection in its midst.
    Midstream,
    /// One of a known connection.
    Known,
    /// One of a known connection with the mark `CUT`, from the side that began it.
    Cut,
    /// An answer of such a connection.
    CutReply,
}

impl TestPacket {
    /// Returns the first packet of a connection.
    pub const fn new(source: IpAddr, destination: IpAddr, port: Option<(Protocol, u16)>) -> Self {
        Self {
            source,
            destination,
            port,
            flow: PacketFlow::New,
        }
    }

    fn to(&self) -> EndpointAddr {
        EndpointAddr {
            ip: self.destination,
            port: self.port.map_or(0, |(_, port)| port),
        }
    }
}

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PacketFate {
    /// It goes on.
    Passes {
        /// The destination, behind destination NAT; port 0 = a protocol without ports.
        to: EndpointAddr,
        /// Whether its source becomes an address of the machine.
        masqueraded: bool,
    },
    /// The sender gets an error, by a rule of this table.
    Refused(TableKind),
    /// It is dropped, by a rule of this table.
    Dropped(TableKind),
}

/// The outcome of a chain.
#[derive(Clone, Copy, Debug)]
enum ChainEnd {
    /// The packet goes back to the chain from which it came.
    Returns,
    /// The packet leaves the base chain, and goes on.
    Accepts,
    Fate(PacketFate),
}

/// The outcome of a step.
enum StepEnd {
    Misses,
    Matches,
    Ends(ChainEnd),
}

/// A packet on its way.
#[derive(Debug)]
pub(super) struct PacketWalk<'a> {
    /// Tables of one family.
    tables: &'a [&'a HeldTable],
    own: &'a BTreeSet<IpAddr>,
    first: &'a TestPacket,
    /// The destination as it is now.
    to: EndpointAddr,
    draw: u32,
    /// The largest number from which an index was drawn.
    modulus: u32,
    is_translated: bool,
    is_cut: bool,
    is_marked: bool,
    is_masqueraded: bool,
    /// `meta priority`
    number: u32,
    pub(super) remembered: Vec<(AffinityId, EndpointAddr)>,
    /// Number of keys that rules looked up in sets and maps.
    pub(super) look_ups: usize,
}

impl<'a> PacketWalk<'a> {
    pub(super) fn new(
        tables: &'a [&'a HeldTable],
        own: &'a BTreeSet<IpAddr>,
        packet: &'a TestPacket,
        draw: u32,
    ) -> Self {
        Self {
            tables,
            own,
            first: packet,
            to: packet.to(),
            draw,
            modulus: 1,
            is_translated: false,
            is_cut: matches!(packet.flow, PacketFlow::Cut | PacketFlow::CutReply),
            is_marked: false,
            is_masqueraded: false,
            number: 0,
            remembered: Vec::new(),
            look_ups: 0,
        }
    }

    /// Returns the fates of a packet for all draws.
    pub(super) fn fates(
        tables: &[&HeldTable],
        own: &BTreeSet<IpAddr>,
        packet: &TestPacket,
    ) -> BTreeSet<PacketFate> {
        let mut fates = BTreeSet::new();
        let (mut draw, mut draws) = (0, 1);
        while draw < draws {
            let mut walk = PacketWalk::new(tables, own, packet, draw);
            fates.insert(walk.fate());
            draws = walk.modulus;
            draw += 1;
        }
        fates
    }

    /// Sends the packet through the hooks.
    pub(super) fn fate(&mut self) -> PacketFate {
        let is_sent_here = self.is_own(self.first.source);
        let first = if is_sent_here { HookPoint::Output } else { HookPoint::Prerouting };
        if let Some(fate) = self.hook(first) {
            return fate;
        }
        let rest: &[HookPoint] = match (is_sent_here, self.is_own(self.to.ip)) {
            (true, true) => &[HookPoint::Postrouting, HookPoint::Input],
            (true, false) => &[HookPoint::Postrouting],
            (false, true) => &[HookPoint::Input],
            (false, false) => &[HookPoint::Forward, HookPoint::Postrouting],
        };
        let ended = rest.iter().find_map(|point| self.hook(*point));
        ended.unwrap_or(PacketFate::Passes {
            to: self.to,
            masqueraded: self.is_masqueraded,
        })
    }

    fn is_own(&self, ip: IpAddr) -> bool {
        ip.is_loopback() || self.own.contains(&ip)
    }

    fn is_new(&self) -> bool {
        self.is_first() || self.first.flow == PacketFlow::Unanswered
    }

    fn is_first(&self) -> bool {
        matches!(self.first.flow, PacketFlow::New | PacketFlow::Midstream)
    }

    /// Sends the packet through the base chains at a hook. Only first packets meet NAT.
    fn hook(&mut self, point: HookPoint) -> Option<PacketFate> {
        let is_first = self.is_first();
        let mut chains: Vec<_> = self
            .tables
            .iter()
            .flat_map(|table| table.base.iter().map(move |chain| (*table, chain)))
            .filter_map(|(table, chain)| Some((chain.hook?, table, chain)))
            .filter(|(hook, ..)| hook.point == point && (is_first || hook.chain_type != "nat"))
            .collect();
        chains.sort_by_key(|(hook, ..)| hook.priority);
        let fate =
            chains.into_iter().find_map(|(_, table, chain)| match self.chain(table, chain) {
                ChainEnd::Fate(fate) => Some(fate),
                ChainEnd::Returns | ChainEnd::Accepts => None,
            });
        let keeps_word = fate.is_none() && self.number & Word::OURS != 0;
        assert!(
            !keeps_word,
            "{:?} leaves {point:?} with {:#x}",
            self.first, self.number
        );
        fate
    }

    /// Sends the packet to a chain by name.
    fn go(&mut self, table: &HeldTable, name: &str) -> ChainEnd {
        let chain = table.chains.get(name);
        chain.map_or(ChainEnd::Returns, |chain| self.chain(table, chain))
    }

    /// Sends the packet to a chain of a group.
    fn go_to_group(&mut self, table: &HeldTable, id: AffinityId, part: GroupPart) -> ChainEnd {
        let chains = table.group(id).map(Group::chains).unwrap_or_default();
        let chain = chains.iter().find(|chain| chain.name == id.name(part));
        chain.map_or(ChainEnd::Returns, |chain| self.chain(table, chain))
    }

    fn chain(&mut self, table: &HeldTable, chain: &Chain) -> ChainEnd {
        for rule in &chain.rules {
            for step in &rule.steps {
                match self.step(table, *step) {
                    StepEnd::Matches => {}
                    StepEnd::Misses => break,
                    StepEnd::Ends(end) => return end,
                }
            }
        }
        ChainEnd::Returns
    }

    /// Follows the verdict of a map.
    fn lead(&mut self, table: &HeldTable, data: Option<Data>) -> StepEnd {
        match data {
            Some(Data::Pick(id)) => jump(self.go_to_group(table, id, GroupPart::Pick)),
            Some(Data::Keep(id)) => StepEnd::Ends(self.go_to_group(table, id, GroupPart::Keep)),
            Some(Data::Split(id)) => StepEnd::Ends(self.go_to_group(table, id, GroupPart::Split)),
            Some(Data::Draw(balancer, class)) => jump(self.go(table, balancer.chain(class))),
            Some(Data::Endpoint(_) | Data::Number(_)) | None => StepEnd::Misses,
        }
    }

    fn step(&mut self, table: &HeldTable, step: RuleStep) -> StepEnd {
        let kind = table.layout.table();
        let fate = |fate| StepEnd::Ends(ChainEnd::Fate(fate));
        match step {
            RuleStep::In(set) => matches(self.has(table, set)),
            RuleStep::NotIn(set) => matches(!self.has(table, set)),
            RuleStep::Lead(set) => {
                let element = self.find(table, set, self.key(set.fields()));
                self.lead(table, element.and_then(|element| element.data))
            }
            RuleStep::OriginalLead(set) => {
                let element = self.original(table, set);
                self.lead(table, element.and_then(|element| element.data))
            }
            RuleStep::OriginalIn(set) => matches(self.original(table, set).is_some()),
            RuleStep::OriginalNotIn(set) => matches(self.original(table, set).is_none()),
            RuleStep::NotFromPodInterface => StepEnd::Matches,
            // Packets come from no interface, and kplane's own connections are none of theirs.
            RuleStep::FromPodInterface | RuleStep::OfOurs => StepEnd::Misses,
            RuleStep::NewConnection => matches(self.is_new()),
            RuleStep::Dnatted => matches(self.is_translated),
            RuleStep::NotDnatted => matches(!self.is_translated),
            RuleStep::Unanswered => matches(self.first.flow == PacketFlow::Unanswered),
            RuleStep::Word(step) => self.word_step(table, step),
            RuleStep::ToThisNode => matches(self.is_own(self.to.ip)),
            RuleStep::FromThisNode => matches(self.is_own(self.first.source)),
            RuleStep::NotToLoopback => matches(!self.to.ip.is_loopback()),
            RuleStep::ToLoopback => matches(self.to.ip.is_loopback()),
            RuleStep::Count(_) => StepEnd::Matches,
            RuleStep::Is(protocol) => matches(self.protocol() == protocol.number()),
            RuleStep::Marked => matches(self.is_marked),
            RuleStep::SetMark => {
                self.is_marked = true;
                StepEnd::Matches
            }
            RuleStep::FlipMark => {
                self.is_marked = !self.is_marked;
                StepEnd::Matches
            }
            RuleStep::Dnat(balancer, class) => self.draw(table, balancer, class.modulus()),
            RuleStep::UseRemembered(id) => {
                self.look_ups += 1;
                self.translate(table.remembered(id, self.first.source))
            }
            RuleStep::Remember(id, _) => {
                self.look_ups += 1;
                self.remembered.push((id, self.to));
                StepEnd::Matches
            }
            RuleStep::GotoKeep(id) => self.lead(table, Some(Data::Keep(id))),
            RuleStep::Masquerade => {
                self.is_masqueraded = true;
                StepEnd::Ends(ChainEnd::Accepts)
            }
            RuleStep::TcpReset | RuleStep::Unreachable => fate(PacketFate::Refused(kind)),
            RuleStep::Jump(chain) => jump(self.go(table, chain)),
            RuleStep::Goto(chain) => StepEnd::Ends(self.go(table, chain)),
            RuleStep::Return => StepEnd::Ends(ChainEnd::Returns),
            RuleStep::Drop => fate(PacketFate::Dropped(kind)),
            RuleStep::Policy(step) => self.policy_step(table, step),
        }
    }

    fn word_step(&mut self, table: &HeldTable, step: WordStep) -> StepEnd {
        match step {
            WordStep::LookUp(map) => return self.look_up(table, map, map.fields()),
            WordStep::Equals(mask, value) => return matches(self.number & mask == value),
            WordStep::HasAny(mask) => return matches(self.number & mask != 0),
            WordStep::Draw(map) => {
                let mut key = Loaded::default();
                key[0] = (self.number & draw_mask(map)).into();
                let element = self.find(table, map, key);
                return self.lead(table, element.and_then(|element| element.data));
            }
            WordStep::First(balancer) => self.number = Word(self.number).first(balancer).0,
            WordStep::Forget => self.number = 0,
        }
        StepEnd::Matches
    }

    fn policy_step(&mut self, table: &HeldTable, step: PolicyStep) -> StepEnd {
        let flow = self.first.flow;
        match step {
            PolicyStep::KnownConnection => matches(flow == PacketFlow::Known),
            PolicyStep::IsCut => matches(self.is_cut),
            PolicyStep::TakeUp => matches(std::mem::take(&mut self.is_cut)),
            PolicyStep::Reply => matches(flow == PacketFlow::CutReply),
            // Packets are no errors, and none of ICMPv6.
            PolicyStep::Related
            | PolicyStep::Invalid
            | PolicyStep::Neighbour
            | PolicyStep::Listeners(_) => StepEnd::Misses,
            PolicyStep::MidStream => {
                matches(flow == PacketFlow::Midstream && self.protocol() == Protocol::Tcp.number())
            }
            PolicyStep::AddressIn(field, set) => {
                let key = self.key(&[field]);
                matches(self.find(table, Set::Policy(set), key).is_some())
            }
            PolicyStep::AddressNotIn(field, set) => {
                let key = self.key(&[field]);
                matches(self.find(table, Set::Policy(set), key).is_none())
            }
            PolicyStep::Anybody => {
                self.number = 0;
                StepEnd::Matches
            }
            PolicyStep::Number(field, set) => self.look_up(table, Set::Policy(set), &[field]),
            PolicyStep::NumberOf(set) => {
                let set = Set::Policy(set);
                self.look_up(table, set, set.fields())
            }
            PolicyStep::IsNumber(number) => matches(self.number == number),
            PolicyStep::Limit | PolicyStep::Log(_) | PolicyStep::Count(_) => StepEnd::Matches,
            PolicyStep::Accept => StepEnd::Ends(ChainEnd::Accepts),
        }
    }

    /// Keeps the number that a map has.
    fn look_up(&mut self, table: &HeldTable, set: Set, fields: &[Field]) -> StepEnd {
        match self.find(table, set, self.key(fields)).and_then(|element| element.data) {
            Some(Data::Number(number)) => {
                self.number = number;
                StepEnd::Matches
            }
            _ => StepEnd::Misses,
        }
    }

    fn draw(&mut self, table: &HeldTable, balancer: Balancer, modulus: u32) -> StepEnd {
        self.modulus = self.modulus.max(modulus);
        let set = Set::Endpoints(balancer);
        let mut key = self.key(set.fields());
        let index = set.fields().iter().position(|field| *field == Field::Index);
        if let Some(place) = index.and_then(|index| key.get_mut(index)) {
            *place = u128::from(self.draw % modulus);
        }
        let element = self.find(table, set, key);
        self.translate(element.and_then(|element| element.data?.endpoint()))
    }

    fn translate(&mut self, endpoint: Option<EndpointAddr>) -> StepEnd {
        let Some(endpoint) = endpoint else {
            return StepEnd::Misses;
        };
        (self.to, self.is_translated) = (endpoint, true);
        StepEnd::Ends(ChainEnd::Accepts)
    }

    /// Looks a key up, and counts that.
    fn find<'t>(&mut self, table: &'t HeldTable, set: Set, key: Loaded) -> Option<&'t Element> {
        self.look_ups += 1;
        table.find(set, key)
    }

    fn has(&mut self, table: &HeldTable, set: Set) -> bool {
        self.find(table, set, self.key(set.fields())).is_some()
    }

    /// Returns the element that a set has for the destination that the packet had at first.
    fn original<'t>(&mut self, table: &'t HeldTable, set: Set) -> Option<&'t Element> {
        self.find(table, set, self.key_with(set.fields(), self.first.to()))
    }

    fn protocol(&self) -> u8 {
        self.first.port.map_or(PORTLESS, |(protocol, _)| protocol.number())
    }

    fn key(&self, fields: &[Field]) -> Loaded {
        self.key_with(fields, self.to)
    }

    /// Loads the fields of a key.
    fn key_with(&self, fields: &[Field], to: EndpointAddr) -> Loaded {
        let mut key = Loaded::default();
        for (place, field) in key.iter_mut().zip(fields) {
            *place = match field {
                Field::Source => ip_bits(self.first.source),
                Field::Destination => ip_bits(to.ip),
                Field::Protocol => self.protocol().into(),
                Field::Port => to.port.into(),
                Field::Number | Field::NetworkNumber => self.number.into(),
                Field::Index => 0,
            };
        }
        key
    }
}

fn matches(is_so: bool) -> StepEnd {
    if is_so { StepEnd::Matches } else { StepEnd::Misses }
}

/// Returns the outcome of a jump: behind a chain that returns, the rule goes on.
fn jump(end: ChainEnd) -> StepEnd {
    match end {
        ChainEnd::Returns => StepEnd::Matches,
        end => StepEnd::Ends(end),
    }
}
