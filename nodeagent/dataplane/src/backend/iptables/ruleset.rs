//! Everything that a family's tables must hold of ours, and what a change does to them. Pure.
//!
//! What is kept of a chain is its digest: it is enough to tell whether a chain has to be written,
//! and whether what was read back is what was written.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hasher as _;

use kplane_model::{Family, ServiceKey};
use siphasher::sip128::{Hasher128 as _, SipHasher13};

use super::dispatch::{Dispatch, List, Overlay};
use super::layout::{Jump, constants, jumps};
use super::name::{BuiltIn, ChainName, TableName};
use super::stage::Staging;
use crate::backend::{Change, Failure, Lookups, PodInterface};
use crate::plan::{FrontendAddr, NodePlan};

/// What shapes the rules besides plans, for one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The family.
    pub family: Family,
    /// Bit of the packet mark that asks for masquerading, 0..=31 (C5).
    pub masquerade_bit: u8,
    /// Mark of our own connections, which no rule applies to in layout tree; 0 = none.
    pub own_mark: u32,
    /// The tools know `MASQUERADE --random-fully` (iptables 1.6.2 or later, C5).
    pub random_fully: bool,
    /// Node ports are served on the loopback address too, IPv4 only (C8).
    pub localhost_nodeports: bool,
    /// `nf_conntrack_tcp_be_liberal` is set: packets of no known flow are not dropped (C7).
    pub tcp_be_liberal: bool,
    /// The counters of nfacct are there (C7, C8).
    pub counters: bool,
    /// Packets that come in there count as from pods, besides those from the plan's pod sources.
    pub pod_interface: Option<PodInterface>,
    /// How Services are found by their addresses.
    pub layout: Layout,
}

impl Settings {
    /// The settings that kube-proxy has by default, in our default layout.
    #[must_use]
    pub fn new(family: Family) -> Self {
        Self {
            family,
            masquerade_bit: 14,
            own_mark: 0,
            random_fully: true,
            localhost_nodeports: true,
            tcp_be_liberal: false,
            counters: false,
            pod_interface: None,
            layout: Layout::Tree,
        }
    }
}

/// How Services are found by their addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// One list of all of them, as kube-proxy has it.
    Compat,
    /// A tree of short chains, by address prefix.
    #[default]
    Tree,
}

/// What is known of the rules of a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// Of the lines of its rules, as `iptables-save` prints them.
    digest: u128,
    /// Their number.
    rules: u32,
}

impl Content {
    /// One rule more: its line as `iptables-save` prints it, without counters and end of line.
    /// How many blanks are between words does not matter: some extensions print two.
    pub fn push(&mut self, line: &str) {
        let mut hasher = SipHasher13::new();
        hasher.write_u128(self.digest);
        for word in line.split_ascii_whitespace() {
            hasher.write(word.as_bytes());
            hasher.write_u8(b' ');
        }
        self.digest = hasher.finish128().as_u128();
        self.rules += 1;
    }

    /// Of whole lines.
    #[must_use]
    pub fn of(lines: &str) -> Self {
        let mut content = Self::default();
        lines.lines().for_each(|line| content.push(line));
        content
    }

    /// The number of rules.
    #[must_use]
    pub fn rules(self) -> u32 {
        self.rules
    }
}

/// What was found of ours in a family's tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    chains: HashMap<(TableName, ChainName), Content>,
    /// How often each rule of a built-in chain is there: table and line.
    pub(in crate::backend) jumps: HashMap<(TableName, String), usize>,
}

impl Found {
    /// A chain is there (`:NAME - [0:0]`).
    pub fn chain(&mut self, table: TableName, name: ChainName) {
        self.chains.entry((table, name)).or_default();
    }

    /// A rule of a chain of ours, in order: its line (`-A NAME ..`).
    pub fn rule(&mut self, table: TableName, name: ChainName, line: &str) {
        self.chains.entry((table, name)).or_default().push(line);
    }

    /// A rule of a built-in chain that jumps to a chain of ours: its line (`-A INPUT ..`).
    pub fn jump(&mut self, table: TableName, line: &str) {
        *self.jumps.entry((table, line.to_owned())).or_default() += 1;
    }

    /// Takes no notice of a chain that is there and empty; says whether there was one.
    pub(super) fn forget_empty(&mut self, id: &ChainId) -> bool {
        let empty = self.chains.get(id).is_some_and(|c| c.rules == 0);
        empty && self.chains.remove(id).is_some()
    }

    /// A chain is as it was written.
    pub(in crate::backend) fn put(&mut self, table: TableName, chain: &Written) {
        self.chains.insert((table, chain.name), chain.content);
    }

    /// A rule of a built-in chain is there so often.
    pub(in crate::backend) fn set_jumps(&mut self, table: TableName, line: String, count: usize) {
        self.jumps.insert((table, line), count);
    }

    /// The chains and what is in them.
    #[must_use]
    pub fn chains(&self) -> &HashMap<(TableName, ChainName), Content> {
        &self.chains
    }
}

/// What one family's tables hold of ours.
#[derive(Clone, Debug)]
pub struct Ruleset {
    pub(super) settings: Settings,
    /// `None` before the first change.
    pub(super) node: Option<NodePlan>,
    /// Rules about endpoints do not say which (C12); decided at each complete change.
    pub(super) large: bool,
    pub(super) chains: HashMap<ChainId, Held>,
    /// How often each rule of a built-in chain is there: table and line.
    pub(super) jumps: HashMap<(TableName, String), usize>,
    pub(super) services: HashMap<ServiceKey, Holdings>,
    /// Who has a place.
    pub(super) places: HashMap<FrontendAddr, ServiceKey>,
    /// In the order of [`List::ALL`].
    pub(super) lists: Vec<Dispatch>,
    /// Ports of health checks, and for whom they are: the ports of a Service share one.
    pub(super) health: BTreeMap<u16, BTreeSet<ServiceKey>>,
}

/// A chain of a table.
pub(super) type ChainId = (TableName, ChainName);

/// A chain that is there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    pub(super) content: Content,
    /// Belongs to a ServicePort.
    pub(super) owned: bool,
}

/// What one ServicePort has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Holdings {
    /// Chains in table nat.
    pub(super) chains: Vec<ChainName>,
    pub(super) places: Vec<FrontendAddr>,
    pub(super) health: Option<u16>,
}

/// A change that has been worked out and not been accepted yet.
#[derive(Debug, Default)]
pub struct Staged {
    /// To be carried out one after the other: at no time is anything unserved that is served
    /// before and after (design invariant 2). Empty if there is nothing to do.
    pub steps: Vec<Step>,
    /// ServicePorts that cannot be programmed as planned.
    pub failures: Vec<Failure>,
    /// What is so afterwards.
    pub(super) after: After,
}

/// What a staged change makes of a ruleset.
#[derive(Debug, Default)]
pub(super) struct After {
    pub(super) complete: bool,
    pub(super) node: NodePlan,
    pub(super) large: bool,
    pub(super) chains: HashMap<ChainId, Option<Content>>,
    pub(super) services: Vec<(ServiceKey, Option<Holdings>)>,
    pub(super) places: HashMap<FrontendAddr, Option<ServiceKey>>,
    pub(super) lists: Vec<Overlay>,
    pub(super) health: BTreeMap<u16, BTreeSet<ServiceKey>>,
    pub(super) jumps: HashMap<(TableName, String), usize>,
}

impl Staged {
    /// Number of chains written, chains deleted and jumps set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.steps.iter().map(Step::len).sum()
    }

    /// There is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of rules written.
    #[must_use]
    pub fn rules(&self) -> usize {
        let written = self.steps.iter().flat_map(|step| &step.write);
        written.map(|chain| chain.content.rules as usize).sum()
    }
}

/// A change of one table: all of it at once, where it is small enough.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The table.
    pub table: TableName,
    /// Chains with new content, in an order in which each jumps to those before it only.
    pub write: Vec<Written>,
    /// Chains that go, in an order in which each is jumped to by those before it only.
    pub delete: Vec<ChainName>,
    /// Jumps from built-in chains.
    pub jumps: Vec<JumpOp>,
}

impl Step {
    /// No change.
    pub(in crate::backend) fn new(table: TableName) -> Self {
        Self {
            table,
            write: Vec::new(),
            delete: Vec::new(),
            jumps: Vec::new(),
        }
    }

    /// Number of chains written, chains deleted and jumps set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.write.len() + self.delete.len() + self.jumps.len()
    }

    /// There is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Puts chains behind those to which they jump.
    pub(super) fn sort(&mut self) {
        let many = self.write.len();
        let order = |chain: &Written| (chain.name.rank(), Reverse(chain.depth));
        self.write
            .sort_by_cached_key(|chain| (order(chain), chain.name.place_among(many)));
        self.delete
            .sort_by_cached_key(|name| (Reverse(name.rank()), *name));
    }
}

/// A chain with its new rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The chain.
    pub name: ChainName,
    /// How many bits lead to it in a dispatch tree; 0 for others.
    pub(in crate::backend) depth: u8,
    /// The lines of all its rules (`-A NAME ..`), each with its end of line.
    pub lines: String,
    /// Of those lines.
    pub content: Content,
}

impl Written {
    /// A chain that stays although nobody needs it any more, without rules.
    pub(super) fn emptied(name: ChainName) -> Self {
        Self {
            name,
            depth: 0,
            lines: String::new(),
            content: Content::default(),
        }
    }
}

/// A change of a built-in chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JumpOp {
    /// The built-in chain.
    pub chain: BuiltIn,
    /// Put first, or taken away once.
    pub insert: bool,
    /// The rule, without `-A NAME` (starts with a blank).
    pub rule: String,
}

impl Ruleset {
    /// Of tables that hold nothing of ours.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self::adopt(settings, Found::default())
    }

    /// Of tables that hold what was found: nobody owns any of it yet. The next change has to be a
    /// complete one; it leaves alone what is as it should be, and deletes what nobody claims.
    #[must_use]
    pub fn adopt(settings: Settings, found: Found) -> Self {
        let held = |content| Held {
            content,
            owned: false,
        };
        let chains = found.chains.into_iter();
        Self {
            node: None,
            large: false,
            chains: chains.map(|(id, content)| (id, held(content))).collect(),
            jumps: found.jumps,
            services: HashMap::new(),
            places: HashMap::new(),
            lists: List::ALL.map(|list| Dispatch::new(list, &settings)).into(),
            health: BTreeMap::new(),
            settings,
        }
    }

    /// Works out what a change does.
    #[must_use]
    pub fn stage(&self, change: Change<'_>) -> Staged {
        Staging::new(self, change).run(change)
    }

    /// The kernel holds a staged change now.
    pub fn accept(&mut self, staged: Staged) {
        let after = staged.after;
        if after.complete {
            self.services.clear();
            self.chains.values_mut().for_each(|held| held.owned = false);
        }
        for (id, content) in after.chains {
            match content {
                Some(content) => {
                    let owned = false;
                    self.chains.insert(id, Held { content, owned });
                }
                None => {
                    self.chains.remove(&id);
                }
            }
        }
        for (key, holdings) in after.services {
            match holdings {
                Some(holdings) => {
                    self.own(&holdings);
                    self.services.insert(key, holdings);
                }
                None => {
                    self.services.remove(&key);
                }
            }
        }
        for (at, owner) in after.places {
            match owner {
                Some(owner) => self.places.insert(at, owner),
                None => self.places.remove(&at),
            };
        }
        for (port, owners) in after.health {
            if owners.is_empty() {
                self.health.remove(&port);
            } else {
                self.health.insert(port, owners);
            }
        }
        for (list, over) in self.lists.iter_mut().zip(after.lists) {
            list.accept(over);
        }
        self.jumps.extend(after.jumps);
        self.node = Some(after.node);
        self.large = after.large;
    }

    /// The chains of a ServicePort are nobody else's.
    fn own(&mut self, holdings: &Holdings) {
        for name in &holdings.chains {
            if let Some(held) = self.chains.get_mut(&(TableName::Nat, *name)) {
                held.owned = true;
            }
        }
    }

    /// How what was found differs from what there must be, for people; `None` if it does not.
    #[must_use]
    pub fn difference(&self, found: &Found) -> Option<String> {
        let none = NodePlan::default();
        let constants = constants(&self.settings, self.node.as_ref().unwrap_or(&none));
        let is_any = |id: &ChainId| {
            let mut any = constants.iter().filter(|constant| constant.rules.is_none());
            any.any(|constant| (constant.table, constant.name) == *id)
        };
        let mut differences: Vec<String> = Vec::new();
        for (id @ (table, name), held) in &self.chains {
            match found.chains.get(id) {
                None => differences.push(format!("{table} {name} is gone")),
                Some(content) if *content == held.content || is_any(id) => {}
                Some(_) => differences.push(format!("{table} {name} has other rules")),
            }
        }
        let others = found
            .chains
            .keys()
            .filter(|id| !self.chains.contains_key(id));
        differences.extend(others.map(|(table, name)| format!("{table} {name} is not ours")));
        for jump in jumps() {
            let line = jump.rule.line_in(jump.from);
            if !found.jumps.contains_key(&(jump.table, line)) {
                let Jump { table, from, rule } = jump;
                differences.push(format!("{table} {from} lacks the rule{rule}"));
            }
        }
        differences.sort();
        let (first, count) = (differences.first()?, differences.len());
        Some(match count {
            1 => first.clone(),
            _ => format!("{first}, and {} more", count - 1),
        })
    }

    /// The number of rules of a chain.
    pub(super) fn rules_of(&self, table: TableName, name: ChainName) -> u64 {
        let held = self.chains.get(&(table, name));
        held.map_or(0, |held| u64::from(held.content.rules))
    }

    /// Looks at everything: not for each change.
    #[must_use]
    pub fn lookups(&self) -> Lookups {
        let services = &self.lists[List::Services as usize];
        Lookups {
            list: services.len() as u64,
            now: services.longest_way() as u64,
        }
    }

    /// Number of addresses of Services, with protocol and port.
    pub(super) fn addresses(&self) -> u64 {
        self.lists[List::Services as usize].len() as u64
    }

    /// The number of rules in a table.
    #[must_use]
    pub fn rules_in(&self, table: TableName) -> u64 {
        let of_table = self.chains.iter().filter(|((t, _), _)| *t == table);
        of_table
            .map(|(_, held)| u64::from(held.content.rules))
            .sum()
    }
}
