//! What happens in a simulation: a size, and a list of steps that a seed chooses.

use std::time::Duration;

use kplane_desired_state::admission::Enforce;
use kplane_proto::v1::Capability;

use crate::dice::Dice;
use crate::source::{CLIFF, Lacking};
use crate::truth::{OF_SERVICES, SLICES};

/// A simulation before it runs.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) replicas: usize,
    pub(crate) nodes: u8,
    pub(crate) services: u8,
    /// Snapshots a second that a replica admits.
    pub(crate) snapshots: u32,
    /// Links between machines break, and replicas look for dead nodes.
    pub(crate) dark: bool,
    /// Nodes enforce NetworkPolicies.
    pub(crate) policies: bool,
    /// Nodes have ranges for their Pods.
    pub(crate) ranged: bool,
    /// The time that a replica's first list of a kind takes.
    pub(crate) listing: Duration,
    /// Operators freeze nodes.
    pub(crate) orders: bool,
    /// Most elements of NetworkPolicies that a kernel takes in one transaction, and most operations that agents send at once.
    pub(crate) narrow: [Option<usize>; 2],
    /// Each step, and the time after it.
    pub(crate) steps: Vec<(Step, Duration)>,
}

/// One thing that happens. Numbers of objects that do not exist are harmless, so that steps can be left out.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// A Service is written; the bits choose what it has.
    Service(u8, u8),
    /// A Service is deleted, with its slices.
    NoService(u8),
    /// A slice of a Service is written; a seed chooses its pods.
    Slice(u8, u8, u64),
    NoSlice(u8, u8),
    /// A Node is written, in a zone.
    Node(u8, u8),
    NoNode(u8),
    /// Something that NetworkPolicies are about is written or deleted, which a seed chooses.
    Policies(u64),
    /// Several changes at once, before anybody sees one of them.
    Batch(Vec<Self>),
    /// A replica's watches say nothing, or are up to date again.
    Lag(usize, bool),
    /// A replica's watch of one kind says some of what it has to say.
    Watch(usize, usize, usize),
    /// A replica loses touch with the API server, or finds it again.
    CutOff(usize, bool),
    /// A replica lists Services and slices again; the list may lack some.
    List(usize, Lacking),
    Kill(usize),
    /// A replica starts with an older state, with a list that lacks some objects, and in doubt.
    Start(usize, u64, Lacking, bool),
    Drain(usize),
    Approve(usize),
    /// A replica finds some nodes out of reach, by their bits, and some of them dead.
    Mark(usize, u8, u8),
    /// A replica has other flags from its next start on.
    Flags(usize, Flags),
    /// An operator freezes a node or all, or thaws them.
    Order(Option<u8>, bool),
    /// The connection of an agent breaks.
    Reset(u8),
    /// The connection of an agent carries nothing any more, and neither side learns of it.
    BlackHole(u8),
    /// The connections of an agent are slow from now on.
    Delay(u8, Duration),
    /// An agent's connection carries nothing to the agent for a time.
    Stall(u8, Duration),
    /// An agent does nothing for a time.
    Freeze(u8, Duration),
    /// An agent ends in order, and starts again.
    Restart(u8),
    /// An agent dies, and starts again after a time.
    Crash(u8, Crash, Duration),
    /// A node is cut off from everybody for a time.
    Dark(u8, Duration),
    /// Some nodes, by their bits, are cut off from all control planes for a time.
    Apart(u8, Duration),
    /// Some nodes are cut off from all control planes and all other nodes for a time.
    Split(u8, Duration),
    /// The kernel refuses a Service, or a family, or the answer to a change is lost.
    Kernel(u8, Fault),
    /// Another program removes a Service from a node's kernel.
    Drift(u8, u8),
    /// Exchanges with a node's tables of NetworkPolicies fail from now on, in one family.
    Tables(u8, bool, TableFault),
    /// Another program removes elements of NetworkPolicies, or the table, after so many changes of the agent.
    Disturb(u8, bool, Damage, u64),
    /// Another program does that now, and the kernel's report is lost.
    Unseen(u8, bool, Damage),
    /// Another program copies a node's tables of NetworkPolicies, for later.
    Copy(u8),
    /// The reports are lost of all that other programs changed.
    Deaf(u8),
    /// An agent dies with one of its next changes of NetworkPolicies, which the kernel takes.
    Die(u8, u64),
    /// A node gets an agent of another version: it lacks capabilities, as bits, and one that does gives its tables of
    /// NetworkPolicies no owner.
    Version(u8, u64),
    /// A Pod of a slice is about to end, which a number chooses, and its preStop hook asks.
    Leave(u8, u8, u64),
    /// A Pod of a slice is being deleted, which a number chooses, or is gone.
    Ending(u8, u8, u64),
}

impl Step {
    /// Returns the group of the step, all of which a seed may leave out.
    fn group(&self) -> Option<u32> {
        Some(match self {
            Self::Service(..)
            | Self::NoService(_)
            | Self::Slice(..)
            | Self::NoSlice(..)
            | Self::Node(..)
            | Self::NoNode(_)
            | Self::Policies(_)
            | Self::Batch(_) => return None,
            Self::Lag(..) | Self::Watch(..) | Self::CutOff(..) => 0,
            Self::List(..) | Self::Approve(_) => 1,
            Self::Kill(_) | Self::Start(..) | Self::Drain(_) => 2,
            Self::Reset(_) | Self::BlackHole(_) => 3,
            Self::Delay(..) | Self::Stall(..) => 4,
            Self::Freeze(..) => 5,
            Self::Restart(_) | Self::Crash(..) => 6,
            Self::Dark(..) | Self::Apart(..) | Self::Split(..) | Self::Mark(..) => 7,
            Self::Kernel(..) | Self::Drift(..) => 8,
            Self::Tables(..) => 9,
            Self::Disturb(..) => 10,
            Self::Die(..) => 11,
            Self::Order(..) => 12,
            Self::Flags(..) => 13,
            Self::Copy(_) => return None,
            Self::Deaf(_) => 14,
            Self::Unseen(..) => 15,
            Self::Version(..) => 17,
            Self::Leave(..) => 18,
            Self::Ending(..) => 19,
        })
    }
}

/// The flags of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flags {
    pub(crate) policies: Option<Enforce>,
    /// The cliff guard: see [`CLIFF`].
    pub(crate) cliff: (usize, usize),
    /// The capabilities that its version lacks, as bits.
    pub(crate) lacks: u64,
}

impl Flags {
    pub(crate) fn usual(policies: bool) -> Self {
        Self {
            policies: policies.then_some(Enforce::On),
            cliff: CLIFF,
            lacks: 0,
        }
    }

    /// Returns flags of which one is not as usual.
    fn some(dice: &mut Dice, policies: bool) -> Self {
        let usual = Self::usual(policies);
        match dice.below(8) {
            0..4 if policies => Self {
                policies: None,
                ..usual
            },
            4 if policies => Self {
                policies: Some(Enforce::Off),
                ..usual
            },
            _ => Self {
                cliff: [(100, 1), (60, 3), (10, 1)][usize::from(dice.small(3))],
                ..usual
            },
        }
    }
}

/// What a crash leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Crash {
    /// The cache file of the moment.
    Process,
    /// An older cache file.
    OldFile,
    /// A cache file that was written in part.
    TornFile,
    NoFile,
    /// The machine was reset: its kernel is empty, and its connections do not end.
    Machine,
}

/// The behaviour of a kernel from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Refuse(u8),
    Family(bool),
    LostAnswer(bool),
    None,
}

/// The faults of exchanges with a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TableFault {
    /// So many changes are refused.
    Busy(u32),
    /// So many changes are taken, and not answered.
    Lost(u32),
    /// So many reads fail.
    Unread(u32),
    /// Another program changes a table of its own before so many changes.
    Contended(u32),
    /// The kernel refuses each element that allows the Pod with this address something.
    Refused(usize),
    Broken,
    None,
}

/// What another program removes, or adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Damage {
    Table,
    /// The tables of both families.
    Tables,
    /// It adds what its copy has.
    Old,
    Elements,
    /// One element of so many.
    Some(usize),
}

/// Tells the dice of links from those of everything else.
const LINKS: u64 = 0x11_4b5;
/// The same of NetworkPolicies.
const POLICIES: u64 = 0x9011_c1e5;
/// The same of nodes that are out of reach, where links do not break.
const MARKS: u64 = 0xdead;
/// The same of what seeds have besides, and of the groups of steps that they leave out.
const SWARM: u64 = 0x5_3a63;
/// The same of versions.
const VERSIONS: u64 = 0x7e_2510;
/// The same of Pods that end.
const HOOKS: u64 = 0x40_0c5;
/// The same of Pods that are being deleted.
const ENDINGS: u64 = 0xe4d;

impl Plan {
    /// Returns the plan of a seed.
    pub(crate) fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let mut links = Dice::new(seed ^ LINKS);
        let dark = links.one_in(4);
        let mut policies = Dice::new(seed ^ POLICIES);
        let mut swarm = Dice::new(seed ^ SWARM);
        let groups = groups(&mut swarm);
        let mut plan = Self {
            seed,
            replicas: 1 + usize::from(dice.small(3)),
            nodes: 1 + dice.small(3) + if dark { 3 } else { 0 },
            dark,
            policies: policies.one_in(2),
            ranged: !policies.one_in(4),
            listing: Duration::from_millis(if policies.one_in(3) { 150 } else { 5 }),
            services: 3 + dice.small(6),
            snapshots: if dice.one_in(4) { 1 } else { 500 },
            orders: groups & ORDERS != 0 && swarm.one_in(3),
            narrow: [(); 2].map(|()| limit(&mut swarm, groups)),
            steps: Vec::new(),
        };
        if dark && !links.one_in(3) {
            // Neighbours are agents of the same replica here.
            plan.replicas = 1;
        }
        for node in 0..plan.nodes {
            plan.push(Step::Node(node, dice.small(2)), Duration::ZERO);
        }
        for service in 0..plan.services {
            plan.push(Step::Service(service, dice.small(128)), Duration::ZERO);
            plan.push(Step::Slice(service, 0, dice.number()), Duration::ZERO);
        }
        if plan.policies {
            let few = groups & MORE != 0 && swarm.one_in(4);
            for _ in 0..if few { swarm.below(4) } else { 8 + policies.below(14) } {
                plan.push(Step::Policies(policies.number()), Duration::ZERO);
            }
        }
        let other_flags = groups & FLAGS != 0 && swarm.one_in(3);
        if other_flags {
            plan.push(plan.flags(&mut swarm), Duration::ZERO);
        }
        for replica in 0..plan.replicas {
            let lacking = plan.lacking(&mut dice, 12);
            let late = if dice.one_in(3) { dice.below(8) } else { 0 };
            let doubt = dice.one_in(12);
            plan.push(Step::Start(replica, late, lacking, doubt), dice.time(20));
        }
        let last = plan.steps.len() - 1;
        plan.steps[last].1 = Duration::from_millis(100 + dice.below(900));
        // Fewer kinds of steps are more of each kind.
        let times = if groups & USUAL == USUAL { 1 } else { 2 };
        for _ in 0..times * (10 + dice.below(30)) {
            let step = plan.step(&mut dice);
            let wait = match dice.below(40) {
                0 => dice.time(20_000),
                1..8 => dice.time(3_000),
                8..20 => dice.time(200),
                _ => dice.time(20),
            };
            plan.push(step, wait);
        }
        let longest = if groups & MORE != 0 && swarm.one_in(2) { 60_000 } else { SHORT };
        plan.break_links(&mut links, last + 1, longest);
        plan.mark_nodes(&mut Dice::new(seed ^ MARKS), last + 1);
        plan.change_policies(&mut policies, last + 1);
        plan.give_orders(&mut swarm, last + 1);
        plan.change_flags(&mut swarm, last + 1, other_flags);
        plan.disturb_more(&mut swarm, last + 1, groups);
        plan.change_versions(last + 1, groups);
        plan.keep(last, groups);
        plan
    }

    /// Takes out the steps after the start that are of no group that is played.
    fn keep(&mut self, last: usize, groups: u64) {
        let is_played = |step: &Step| step.group().is_none_or(|group| groups >> group & 1 == 1);
        let mut at = 0..;
        self.steps.retain(|(step, _)| at.next() <= Some(last) || is_played(step));
    }

    /// Adds orders of operators to the steps after the start.
    fn give_orders(&mut self, dice: &mut Dice, after: usize) {
        for _ in 0..if self.orders { 1 + dice.below(6) } else { 0 } {
            let node = (!dice.one_in(4)).then(|| dice.small(self.nodes));
            let step = Step::Order(node, !dice.one_in(3));
            let at = self.place(dice, after);
            let most = if dice.one_in(3) { 9_000 } else { 100 };
            self.steps.insert(at, (step, dice.time(most)));
        }
    }

    /// Adds further faults of the tables of NetworkPolicies to the steps after the start.
    fn disturb_more(&mut self, dice: &mut Dice, after: usize, groups: u64) {
        let is_disturbed = groups & MORE != 0 && self.policies && dice.one_in(2);
        for _ in 0..if is_disturbed { 2 + dice.below(6) } else { 0 } {
            let (node, v6) = (dice.small(self.nodes.min(2)), dice.one_in(2));
            let count = dice.below(4);
            let damage = match dice.below(6) {
                0 => Damage::Tables,
                1 => Damage::Table,
                2 => Damage::Some(2),
                _ => Damage::Old,
            };
            let step = match dice.below(8) {
                0 => Step::Tables(
                    node,
                    v6,
                    TableFault::Contended(1 + u32::from(dice.small(20))),
                ),
                1 => Step::Tables(node, v6, TableFault::Refused(usize::from(dice.small(8)))),
                2 => Step::Copy(node),
                3 => Step::Deaf(node),
                4..6 => Step::Unseen(node, v6, damage),
                _ => Step::Disturb(node, v6, damage, count),
            };
            let at = self.place(dice, after);
            self.steps.insert(at, (step, dice.time(100)));
        }
    }

    /// Adds changes of versions to the steps after the start, and Pods that end.
    fn change_versions(&mut self, after: usize, groups: u64) {
        let dice = &mut Dice::new(self.seed ^ VERSIONS);
        let changes = groups & OTHER_VERSIONS != 0 && dice.one_in(2);
        for _ in 0..if changes { 1 + dice.below(5) } else { 0 } {
            let lacks = if dice.one_in(3) { 0 } else { lacks(dice) };
            let at = self.place(dice, after);
            if dice.one_in(2) {
                // One that knows no NetworkPolicies is not served where there are some.
                let knows_none = self.policies && dice.one_in(4);
                let lacks = lacks | if knows_none { POLICIES_KNOWN & dice.number() } else { 0 };
                let step = Step::Version(dice.small(self.nodes), lacks);
                self.steps.insert(at, (step, dice.time(2_000)));
                continue;
            }
            let replica = usize::try_from(dice.below(self.replicas as u64)).unwrap_or(0);
            let usual = Flags::usual(self.policies);
            let flags = Step::Flags(replica, Flags { lacks, ..usual });
            let start = Step::Start(replica, 0, Lacking::default(), false);
            let starts = [(flags, Duration::ZERO), (start, dice.time(2_000))];
            self.steps.splice(at..at, starts);
        }
        self.end_pods(after, groups);
    }

    /// Adds Pods that end to the steps after the start.
    fn end_pods(&mut self, after: usize, groups: u64) {
        let dice = &mut Dice::new(self.seed ^ HOOKS);
        let ends = groups & ENDS != 0 && !self.dark;
        for _ in 0..if ends { 2 + dice.below(8) } else { 0 } {
            let (service, slice) = (dice.small(self.services), dice.small(SLICES));
            let at = self.place(dice, after);
            let step = Step::Leave(service, slice, dice.number());
            self.steps.insert(at, (step, dice.time(400)));
        }
        let dice = &mut Dice::new(self.seed ^ ENDINGS);
        let ends = groups & DELETIONS != 0 && self.policies;
        for _ in 0..if ends { 2 + dice.below(10) } else { 0 } {
            let (service, slice) = (dice.small(self.services), dice.small(SLICES));
            let at = self.place(dice, after);
            let step = Step::Ending(service, slice, dice.number());
            self.steps.insert(at, (step, dice.time(400)));
        }
    }

    /// Adds starts of replicas with other flags to the steps after the start.
    fn change_flags(&mut self, dice: &mut Dice, after: usize, changes: bool) {
        for _ in 0..if changes { 1 + dice.below(4) } else { 0 } {
            let flags = self.flags(dice);
            let Step::Flags(replica, _) = flags else {
                continue;
            };
            let at = self.place(dice, after);
            let start = Step::Start(replica, 0, Lacking::default(), false);
            let starts = [(flags, Duration::ZERO), (start, dice.time(3_000))];
            self.steps.splice(at..at, starts);
        }
    }

    fn flags(&self, dice: &mut Dice) -> Step {
        let replica = usize::try_from(dice.below(self.replicas as u64)).unwrap_or(0);
        Step::Flags(replica, Flags::some(dice, self.policies))
    }

    /// Adds changes of NetworkPolicies to the steps after the start.
    fn change_policies(&mut self, dice: &mut Dice, after: usize) {
        for _ in 0..if self.policies { 8 + dice.below(20) } else { 0 } {
            let replica = usize::try_from(dice.below(self.replicas as u64)).unwrap_or(0);
            let step = match dice.below(24) {
                0..14 => Step::Policies(dice.number()),
                14..17 => Step::Batch(
                    (0..2 + dice.below(6)).map(|_| Step::Policies(dice.number())).collect(),
                ),
                17..19 => {
                    let kind = OF_SERVICES + usize::from(dice.small(4));
                    Step::Watch(replica, kind, 1 + usize::from(dice.small(3)))
                }
                19..21 => Step::List(replica, lacking_policies(dice)),
                _ => disturb_tables(dice, self.nodes),
            };
            let at = self.place(dice, after);
            let most = if dice.one_in(8) { 3_000 } else { 100 };
            self.steps.insert(at, (step, dice.time(most)));
        }
    }

    /// Returns a random place among the steps after the start.
    fn place(&self, dice: &mut Dice, after: usize) -> usize {
        let len = (self.steps.len() - after) as u64;
        after + usize::try_from(dice.below(len)).unwrap_or(0)
    }

    /// Adds broken links to the steps after the start.
    fn break_links(&mut self, dice: &mut Dice, after: usize, longest: u64) {
        for _ in 0..if self.dark { 3 + dice.below(6) } else { 0 } {
            let all = (1 << self.nodes) - 1;
            let is_all = longest > SHORT && dice.one_in(3);
            let mask = if is_all { all } else { 1 + dice.small(all) };
            let time = Duration::from_secs(1) + dice.time(longest);
            let step = match dice.below(4) {
                0..2 => Step::Dark(dice.small(self.nodes), time),
                2 => Step::Apart(mask, time),
                _ => Step::Split(mask, time),
            };
            let at = self.place(dice, after);
            let most = if dice.one_in(2) { 1_000 + longest } else { 100 };
            let wait = dice.time(most);
            self.steps.insert(at, (step, wait));
        }
    }

    /// Adds changes of what replicas find out of reach to the steps after the start.
    fn mark_nodes(&mut self, dice: &mut Dice, after: usize) {
        let is_marked = !self.dark && dice.one_in(2);
        for _ in 0..if is_marked { 2 + dice.below(8) } else { 0 } {
            let replica = usize::try_from(dice.below(self.replicas as u64)).unwrap_or(0);
            let [suspected, dead] = [(); 2].map(|()| dice.small(1 << self.nodes));
            let dead = if dice.one_in(2) { suspected } else { dead };
            let suspected = if dice.one_in(4) { 0 } else { suspected };
            let at = self.place(dice, after);
            let most = if dice.one_in(4) { 3_000 } else { 100 };
            self.steps.insert(at, (Step::Mark(replica, suspected, dead), dice.time(most)));
        }
    }

    fn push(&mut self, step: Step, wait: Duration) {
        self.steps.push((step, wait));
    }

    fn step(&self, dice: &mut Dice) -> Step {
        let replica = usize::try_from(dice.below(self.replicas as u64)).unwrap_or(0);
        let node = dice.small(self.nodes);
        match dice.below(64) {
            0..20 => self.write(dice),
            20..24 => Step::Batch((0..2 + dice.below(5)).map(|_| self.write(dice)).collect()),
            24..26 => Step::Lag(replica, true),
            26..28 => Step::Lag(replica, false),
            28..31 => {
                let kind = usize::from(dice.small(3));
                Step::Watch(replica, kind, 1 + usize::from(dice.small(3)))
            }
            31 => Step::CutOff(replica, true),
            32 => Step::CutOff(replica, false),
            33..36 => Step::List(replica, self.lacking(dice, 2)),
            36..38 => Step::Kill(replica),
            38..42 => {
                let late = if dice.one_in(2) { dice.below(8) } else { 0 };
                Step::Start(replica, late, self.lacking(dice, 4), dice.one_in(6))
            }
            42 => Step::Drain(replica),
            43 => Step::Approve(replica),
            44..47 => Step::Reset(node),
            47 => Step::BlackHole(node),
            48 => Step::Delay(node, dice.time(100)),
            49..51 => Step::Stall(node, dice.time(4_000)),
            51..53 => Step::Freeze(node, dice.time(18_000)),
            53..55 => Step::Restart(node),
            55..58 => Step::Crash(node, crash(dice), dice.time(3_000)),
            58..62 => Step::Kernel(node, self.fault(dice)),
            _ => Step::Drift(node, dice.small(self.services)),
        }
    }

    fn write(&self, dice: &mut Dice) -> Step {
        let service = dice.small(self.services);
        match dice.below(16) {
            0..3 => Step::Service(service, dice.small(128)),
            3..5 => Step::NoService(service),
            5..13 => Step::Slice(service, dice.small(3), dice.number()),
            13 => Step::NoSlice(service, dice.small(3)),
            14 => Step::Node(dice.small(self.nodes), dice.small(3)),
            _ => Step::NoNode(dice.small(self.nodes)),
        }
    }

    /// Returns some Services for a list to lack, once in so many times.
    fn lacking(&self, dice: &mut Dice, times: u64) -> Lacking {
        if !dice.one_in(times) {
            return Lacking::default();
        }
        let mut some = || {
            let all = (1_u16 << self.services) - 1;
            let random = u16::try_from(dice.below(1 << 16)).unwrap_or(0);
            match dice.below(4) {
                0 => all,
                1 => 1 << dice.small(self.services),
                2 => random & all,
                _ => 0,
            }
        };
        Lacking {
            services: some(),
            slices: some(),
            ..Lacking::default()
        }
    }

    fn fault(&self, dice: &mut Dice) -> Fault {
        match dice.below(6) {
            0..2 => Fault::Refuse(dice.small(self.services)),
            2 => Fault::Family(dice.one_in(2)),
            3 => Fault::LostAnswer(dice.one_in(2)),
            _ => Fault::None,
        }
    }
}

/// The time for which links usually break, in milliseconds, at most.
const SHORT: u64 = 8_000;

/// The groups of steps that all seeds had at first, and some of the others, as bits.
const USUAL: u64 = (1 << 12) - 1;
const ORDERS: u64 = 1 << 12;
const FLAGS: u64 = 1 << 13;
const MORE: u64 = 1 << 16;
const OTHER_VERSIONS: u64 = 1 << 17;
const ENDS: u64 = 1 << 18;
const DELETIONS: u64 = 1 << 19;

/// Returns the groups of steps that a seed plays, as bits. Few kinds of steps lead further than all at once.
fn groups(dice: &mut Dice) -> u64 {
    match dice.below(4) {
        0 => USUAL,
        1 => u64::MAX,
        2 => dice.number(),
        _ => dice.number() & dice.number(),
    }
}

/// The capabilities that agents and control planes need not have, as bits.
const BESIDE: u64 = bit(Capability::Ranges)
    | bit(Capability::Packed)
    | bit(Capability::Beats)
    | bit(Capability::Urgent)
    | bit(Capability::Draining);
const POLICIES_KNOWN: u64 = bit(Capability::Policies) | bit(Capability::ClusterPolicies);

const fn bit(capability: Capability) -> u64 {
    1 << (capability as u64 - 1)
}

/// Returns capabilities that a version lacks.
fn lacks(dice: &mut Dice) -> u64 {
    BESIDE & if dice.one_in(3) { u64::MAX } else { dice.number() }
}

/// Returns a small limit, if there is one.
fn limit(dice: &mut Dice, groups: u64) -> Option<usize> {
    (groups & MORE != 0 && dice.one_in(3)).then(|| 1 + usize::from(dice.small(12)))
}

/// Returns a fault of tables of NetworkPolicies.
fn disturb_tables(dice: &mut Dice, nodes: u8) -> Step {
    // The first two nodes have Pods.
    let (node, v6) = (dice.small(nodes.min(2)), dice.one_in(2));
    let count = 1 + dice.below(3);
    let times = u32::try_from(count).unwrap_or(1);
    match dice.below(12) {
        0..2 => Step::Tables(node, v6, TableFault::Busy(times)),
        2..4 => Step::Tables(node, v6, TableFault::Lost(times)),
        4 => Step::Tables(node, v6, TableFault::Unread(times)),
        5 => Step::Tables(node, v6, TableFault::Broken),
        6 => Step::Tables(node, v6, TableFault::None),
        7..10 => Step::Die(node, count),
        _ => {
            let damage = match dice.below(3) {
                0 => Damage::Table,
                1 => Damage::Elements,
                _ => Damage::Some(2),
            };
            Step::Disturb(node, v6, damage, if dice.one_in(2) { 0 } else { count })
        }
    }
}

/// Returns some objects of NetworkPolicies for a list to lack, half of the times.
fn lacking_policies(dice: &mut Dice) -> Lacking {
    let mut some = || {
        let random = u16::try_from(dice.below(1 << 12)).unwrap_or(0);
        match dice.below(8) {
            0 => u16::MAX,
            1 => random,
            2..4 => 1 << dice.small(12),
            _ => 0,
        }
    };
    Lacking {
        pods: some(),
        policies: some(),
        ..Lacking::default()
    }
}

fn crash(dice: &mut Dice) -> Crash {
    match dice.below(6) {
        0..2 => Crash::Process,
        2 => Crash::OldFile,
        3 => Crash::TornFile,
        4 => Crash::NoFile,
        _ => Crash::Machine,
    }
}
