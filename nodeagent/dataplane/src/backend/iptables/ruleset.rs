//! All of kplane's objects that a family's tables must hold, and the changes of them that `stage.rs` works out. This
//! module is pure.
//!
//! For each chain, only a digest is kept. The digest shows whether a chain has to be written, and whether the
//! content read back is the content written.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hasher as _;

use kplane_model::ServiceKey;
use siphasher::sip128::{Hasher128 as _, SipHasher13};

use super::dispatch::{Dispatch, List, Overlay};
use super::layout::{Jump, constants, jumps};
use super::name::{BuiltIn, ChainName, TableName};
use super::settings::RuleSettings;
use crate::backend::{Failure, Lookups};
use crate::plan::{FrontendAddr, NodePlan};

/// The known facts about the rules of a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChainDigest {
    /// Digest of the lines of the rules, as `iptables-save` prints them.
    digest: u128,
    /// Number of the rules.
    rules: u32,
}

impl ChainDigest {
    /// Adds a rule: its line as `iptables-save` prints it, without counters and end of line. The number of
    /// blanks between words does not matter, because some extensions print two.
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

    /// Returns the content for whole lines.
    pub fn of(lines: &str) -> Self {
        let mut content = Self::default();
        lines.lines().for_each(|line| content.push(line));
        content
    }

    /// Returns the number of rules.
    pub fn rules(self) -> u32 {
        self.rules
    }
}

/// kplane's objects that were found in a family's tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundRules {
    chains: HashMap<(TableName, ChainName), ChainDigest>,
    /// Number of copies of each rule of a built-in chain, by table and line.
    pub(in crate::backend) jumps: HashMap<(TableName, String), usize>,
}

impl FoundRules {
    /// Adds a chain (`:NAME - [0:0]`).
    pub fn chain(&mut self, table: TableName, name: ChainName) {
        self.chains.entry((table, name)).or_default();
    }

    /// Adds a rule of one of kplane's chains, in order: its line (`-A NAME ..`).
    pub fn rule(&mut self, table: TableName, name: ChainName, line: &str) {
        self.chains.entry((table, name)).or_default().push(line);
    }

    /// Adds a rule of a built-in chain that jumps to one of kplane's chains: its line (`-A INPUT ..`).
    pub fn jump(&mut self, table: TableName, line: &str) {
        *self.jumps.entry((table, line.to_owned())).or_default() += 1;
    }

    /// Removes a chain from the record if it is empty. Returns whether it was.
    pub(super) fn forget_empty(&mut self, id: &ChainId) -> bool {
        let empty = self.chains.get(id).is_some_and(|c| c.rules == 0);
        empty && self.chains.remove(id).is_some()
    }

    /// Records a chain as it was written.
    pub(in crate::backend) fn put(&mut self, table: TableName, chain: &Written) {
        self.chains.insert((table, chain.name), chain.content);
    }

    /// Records the number of copies of a rule of a built-in chain.
    pub(in crate::backend) fn set_jumps(&mut self, table: TableName, line: String, count: usize) {
        self.jumps.insert((table, line), count);
    }

    /// Returns the chains and their content.
    pub fn chains(&self) -> &HashMap<(TableName, ChainName), ChainDigest> {
        &self.chains
    }
}

/// kplane's objects in one family's tables.
#[derive(Clone, Debug)]
pub struct Ruleset {
    pub(super) settings: RuleSettings,
    /// Plan of the node; `None` before the first change.
    pub(super) node: Option<NodePlan>,
    /// Whether the cluster is large, so that rules for endpoints have no comments that name them (C12).
    /// Decided at each complete change.
    pub(super) large: bool,
    pub(super) chains: HashMap<ChainId, HeldChain>,
    /// Number of copies of each rule of a built-in chain, by table and line.
    pub(super) jumps: HashMap<(TableName, String), usize>,
    pub(super) services: HashMap<ServiceKey, PortRules>,
    /// The lists, in the order of [`List::ALL`].
    pub(super) lists: Vec<Dispatch>,
    /// Ports of health checks, each with its ServicePorts: the ports of a Service share one.
    pub(super) health: BTreeMap<u16, BTreeSet<ServiceKey>>,
}

/// A chain of a table.
pub(super) type ChainId = (TableName, ChainName);

/// A chain that exists.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldChain {
    pub(super) content: ChainDigest,
    /// Whether the chain belongs to a ServicePort.
    pub(super) owned: bool,
}

/// The objects of one ServicePort.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PortRules {
    /// The chains in table nat.
    pub(super) chains: Vec<ChainName>,
    pub(super) frontends: Vec<FrontendAddr>,
    pub(super) health: Option<u16>,
}

/// A change that has been worked out and not been accepted yet.
#[derive(Debug, Default)]
pub struct StagedRules {
    /// Steps to execute one after the other. At no time is a frontend unserved that is served before and after
    /// (invariant: no-gap). Empty if there is nothing to do.
    pub steps: Vec<TableChange>,
    /// ServicePorts that cannot be programmed as planned.
    pub failures: Vec<Failure>,
    /// The state after the change.
    pub(super) after: After,
}

/// The state of a ruleset after a staged change.
#[derive(Debug, Default)]
pub(super) struct After {
    pub(super) complete: bool,
    pub(super) node: NodePlan,
    pub(super) large: bool,
    pub(super) chains: HashMap<ChainId, Option<ChainDigest>>,
    pub(super) services: Vec<(ServiceKey, Option<PortRules>)>,
    pub(super) lists: Vec<Overlay>,
    pub(super) health: BTreeMap<u16, BTreeSet<ServiceKey>>,
    pub(super) jumps: HashMap<(TableName, String), usize>,
}

impl StagedRules {
    /// Returns the number of chains written, chains deleted and jumps set.
    pub fn len(&self) -> usize {
        self.steps.iter().map(TableChange::len).sum()
    }

    /// Returns whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of rules written.
    pub fn rules(&self) -> usize {
        self.steps
            .iter()
            .flat_map(|step| &step.write)
            .map(|chain| chain.content.rules as usize)
            .sum()
    }
}

/// A change of one table; atomic if it is small enough.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableChange {
    /// The table.
    pub table: TableName,
    /// Chains with new content, in an order in which each jumps only to chains before it.
    pub write: Vec<Written>,
    /// Chains to delete, in an order in which only chains before it jump to each.
    pub delete: Vec<ChainName>,
    /// Jumps from built-in chains.
    pub jumps: Vec<JumpOp>,
}

impl TableChange {
    /// Returns a step without changes.
    pub(in crate::backend) fn new(table: TableName) -> Self {
        Self {
            table,
            write: Vec::new(),
            delete: Vec::new(),
            jumps: Vec::new(),
        }
    }

    /// Returns the number of chains written, chains deleted and jumps set.
    pub fn len(&self) -> usize {
        self.write.len() + self.delete.len() + self.jumps.len()
    }

    /// Returns whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sorts chains so that each comes behind the chains to which it jumps.
    pub(super) fn sort(&mut self) {
        let many = self.write.len();
        let order = |chain: &Written| (chain.name.rank(), Reverse(chain.depth));
        self.write
            .sort_by_cached_key(|chain| (order(chain), chain.name.place_among(many)));
        self.delete.sort_by_cached_key(|name| (Reverse(name.rank()), *name));
    }
}

/// A chain with its new rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The chain.
    pub name: ChainName,
    /// Number of bits that lead to the chain in a dispatch tree; 0 for other chains.
    pub(in crate::backend) depth: u8,
    /// The lines of all its rules (`-A NAME ..`), each with its end of line.
    pub lines: String,
    /// The known facts about these lines.
    pub content: ChainDigest,
}

impl Written {
    /// Returns a chain without rules, for one that stays although no ServicePort needs it any more.
    pub(super) fn emptied(name: ChainName) -> Self {
        Self {
            name,
            depth: 0,
            lines: String::new(),
            content: ChainDigest::default(),
        }
    }
}

/// A change of a built-in chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JumpOp {
    /// The built-in chain.
    pub chain: BuiltIn,
    /// Whether to insert the rule at the front, or to delete one copy of it.
    pub insert: bool,
    /// The rule, without `-A NAME` (starts with a blank).
    pub rule: String,
}

impl Ruleset {
    /// Returns the ruleset of tables that hold no objects of kplane.
    pub fn new(settings: RuleSettings) -> Self {
        Self::adopt(settings, FoundRules::default())
    }

    /// Returns the ruleset of tables in which these objects were found. No ServicePort owns any of them yet.
    /// The next change has to be a complete one. It leaves correct objects alone, and deletes those that no
    /// ServicePort claims.
    pub fn adopt(settings: RuleSettings, found: FoundRules) -> Self {
        let held = |content| HeldChain {
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
            lists: List::ALL.map(|list| Dispatch::new(list, &settings)).into(),
            health: BTreeMap::new(),
            settings,
        }
    }

    /// Records that the kernel holds a staged change.
    pub fn accept(&mut self, staged: StagedRules) {
        let after = staged.after;
        if after.complete {
            self.services.clear();
            self.chains.values_mut().for_each(|held| held.owned = false);
        }
        for (id, content) in after.chains {
            match content {
                Some(content) => {
                    let owned = false;
                    self.chains.insert(id, HeldChain { content, owned });
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

    /// Records that the chains belong to a ServicePort.
    fn own(&mut self, holdings: &PortRules) {
        for name in &holdings.chains {
            if let Some(held) = self.chains.get_mut(&(TableName::Nat, *name)) {
                held.owned = true;
            }
        }
    }

    /// Returns the difference between the objects that were found and those that must exist, human-readable;
    /// `None` if there is none.
    pub fn difference(&self, found: &FoundRules) -> Option<String> {
        let none = NodePlan::default();
        let constants = constants(&self.settings, self.node.as_ref().unwrap_or(&none));
        let is_any = |id: &ChainId| {
            constants
                .iter()
                .filter(|constant| constant.rules.is_none())
                .any(|constant| (constant.table, constant.name) == *id)
        };
        let mut differences: Vec<String> = Vec::new();
        for (id @ (table, name), held) in &self.chains {
            match found.chains.get(id) {
                None => differences.push(format!("{table} {name} is gone")),
                Some(content) if *content == held.content || is_any(id) => {}
                Some(_) => differences.push(format!("{table} {name} has other rules")),
            }
        }
        let others = found.chains.keys().filter(|id| !self.chains.contains_key(id));
        differences
            .extend(others.map(|(table, name)| format!("{table} {name} is another program's")));
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

    /// Returns the number of rules of a chain.
    pub(super) fn rules_of(&self, table: TableName, name: ChainName) -> u64 {
        let held = self.chains.get(&(table, name));
        held.map_or(0, |held| u64::from(held.content.rules))
    }

    /// Returns the lengths of the way to a Service. This reads all lists, so it is too slow for each change.
    pub fn lookups(&self) -> Lookups {
        let services = &self.lists[List::Services as usize];
        Lookups {
            list: services.len() as u64,
            now: services.longest_way() as u64,
        }
    }

    /// Returns the number of addresses of Services, with protocol and port.
    pub(super) fn addresses(&self) -> u64 {
        self.lists[List::Services as usize].len() as u64
    }

    /// Returns the number of rules in a table.
    pub fn rules_in(&self, table: TableName) -> u64 {
        self.chains
            .iter()
            .filter(|((t, _), _)| *t == table)
            .map(|(_, held)| u64::from(held.content.rules))
            .sum()
    }
}
