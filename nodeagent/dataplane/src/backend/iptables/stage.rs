//! Works out the effect of a change on a ruleset.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use kplane_model::{Protocol, ServiceKey};

use super::dispatch::{Dispatch, List, Overlay};
use super::layout::{Pods, constants, jumps, spare_ours, to_node_ports};
use super::name::{ChainName, TableName};
use super::prefix::Point;
use super::rule::Rule;
use super::ruleset::{
    After, ChainDigest, ChainId, JumpOp, PortRules, Ruleset, StagedRules, TableChange, Written,
};
use super::service::{self, Writer};
use crate::backend::{Change, Failure};
use crate::plan::{FrontendAddr, ServicePlan};

/// Least number of endpoints of a large cluster. Rules for endpoints have no comments that name them there
/// (C12).
const LARGE: usize = 1_001;

impl Ruleset {
    /// Works out the effect of a change.
    pub fn stage(&self, change: Change<'_>) -> StagedRules {
        Staging::new(self, change).run(change)
    }
}

/// A change while its steps are being worked out.
struct Staging<'a> {
    ruleset: &'a Ruleset,
    pods: Pods,
    after: After,
    failures: Vec<Failure>,
    /// Chains that ServicePorts of the change had before.
    released: HashSet<ChainName>,
    /// Chains that ServicePorts of the change have afterwards.
    taken: HashSet<ChainName>,
    /// The step of table nat, as far as it is worked out.
    nat: TableChange,
    /// Buffer for the lines of one chain.
    lines: String,
    /// Every chain that must exist; only for a complete change.
    wanted: HashSet<ChainId>,
}

impl<'a> Staging<'a> {
    fn new(ruleset: &'a Ruleset, change: Change<'_>) -> Self {
        let plans = change.services.iter().filter_map(|(_, plan)| plan.as_ref());
        let large = if change.complete {
            plans.map(service::endpoints).sum::<usize>() >= LARGE
        } else {
            ruleset.large
        };
        let after = After {
            complete: change.complete,
            node: change.node.clone(),
            large,
            lists: vec![Overlay::new(); List::ALL.len()],
            ..After::default()
        };
        Self {
            ruleset,
            pods: Pods::new(&ruleset.settings, change.node),
            after,
            failures: Vec::new(),
            released: HashSet::new(),
            taken: HashSet::new(),
            nat: TableChange::new(TableName::Nat),
            lines: String::new(),
            wanted: HashSet::new(),
        }
    }

    fn run(mut self, change: Change<'_>) -> StagedRules {
        // Everything is released first, so that another ServicePort may claim it afterwards.
        if change.complete {
            for (key, holdings) in &self.ruleset.services {
                self.release(key, holdings);
            }
        } else {
            for (key, _) in change.services {
                if let Some(holdings) = self.ruleset.services.get(key) {
                    self.release(key, holdings);
                }
            }
        }
        for (key, plan) in change.services {
            match plan {
                Some(plan) => self.claim(key, plan),
                None => self.after.services.push((key.clone(), None)),
            }
        }
        self.health_entries();
        for (over, list) in self.after.lists.iter_mut().zip(&self.ruleset.lists) {
            over.retain(|point, entry| list.get(*point) != entry.as_ref());
        }
        let steps = self.steps();
        StagedRules {
            steps,
            failures: self.failures,
            after: self.after,
        }
    }

    /// Releases what a ServicePort holds. The ServicePort may claim it again.
    fn release(&mut self, key: &ServiceKey, holdings: &PortRules) {
        self.released.extend(&holdings.chains);
        for at in &holdings.frontends {
            let point = Point::of(*at);
            for (over, list) in self.after.lists.iter_mut().zip(&self.ruleset.lists) {
                if list.list().holds(*at) && list.get(point).is_some() {
                    over.insert(point, None);
                }
            }
        }
        if let Some(port) = holdings.health {
            self.health(port).remove(key);
        }
    }

    fn claim(&mut self, key: &ServiceKey, plan: &ServicePlan) {
        let pods = std::mem::take(&mut self.pods);
        let writer = Writer::new(plan, &pods, !self.after.large);
        let mut holdings = PortRules::default();
        match self.chains(&writer) {
            Ok(chains) => {
                holdings.chains = chains.iter().map(|(name, _)| *name).collect();
                let mut nat = std::mem::replace(&mut self.nat, TableChange::new(TableName::Nat));
                for (name, rules) in chains {
                    self.put(&mut nat, name, 0, &rules);
                }
                self.nat = nat;
                for frontend in &plan.frontends {
                    holdings.frontends.push(frontend.at);
                    let point = Point::of(frontend.at);
                    for (list, entry) in writer.entries(frontend) {
                        self.overlay(list).insert(point, Some(entry));
                    }
                }
                if let Some(port) = plan.health_check_node_port {
                    holdings.health = Some(port);
                    self.health(port).insert(key.clone());
                }
            }
            Err(reason) => self.fail(key, reason),
        }
        self.after.services.push((key.clone(), Some(holdings)));
        self.pods = pods;
    }

    /// Returns the chains of a ServicePort, if no other ServicePort has them. Two ServicePorts have the same
    /// chains only if Kubernetes would not accept their names.
    fn chains(&mut self, writer: &Writer<'_>) -> Result<Vec<(ChainName, Vec<Rule>)>, String> {
        let chains = writer.chains();
        for (name, _) in &chains {
            let held = self.ruleset.chains.get(&(TableName::Nat, *name));
            let others = held.is_some_and(|held| held.owned) && !self.released.contains(name);
            if others || self.taken.contains(name) {
                return Err(format!("chain {name} belongs to another ServicePort"));
            }
        }
        self.taken.extend(chains.iter().map(|(name, _)| *name));
        Ok(chains)
    }

    /// Returns the ServicePorts that use a port of health checks.
    fn health(&mut self, port: u16) -> &mut BTreeSet<ServiceKey> {
        let before = || self.ruleset.health.get(&port).cloned().unwrap_or_default();
        self.after.health.entry(port).or_insert_with(before)
    }

    fn fail(&mut self, key: &ServiceKey, reason: String) {
        self.failures.push(Failure::unserved(key, reason));
    }

    fn overlay(&mut self, list: List) -> &mut Overlay {
        &mut self.after.lists[list as usize]
    }

    /// Adds one entry for each port of health checks, whichever ServicePorts use it.
    fn health_entries(&mut self) {
        for (port, owners) in &self.after.health {
            let entry = owners.first().map(service::health_entry);
            let at = FrontendAddr::NodePort {
                protocol: Protocol::Tcp,
                port: *port,
            };
            self.after.lists[List::Health as usize].insert(Point::of(at), entry);
        }
    }

    /// Returns the steps of the change. Rules in table nat translate packets, and rules in table filter
    /// refuse them. A frontend that loses its endpoints is refused first, and a frontend that gets endpoints is
    /// translated first.
    fn steps(&mut self) -> Vec<TableChange> {
        let lists = std::mem::take(&mut self.after.lists);
        let nothing = vec![Overlay::new(); List::ALL.len()];
        // A complete change compares every chain.
        let before = if self.after.complete {
            self.ruleset.lists.iter().map(Dispatch::all_gone).collect()
        } else {
            nothing
        };
        let filter = || List::ALL.into_iter().filter(|list| list.table() == TableName::Filter);
        let has = |goes: bool| {
            filter()
                .flat_map(|list| lists[list as usize].values())
                .any(|entry| entry.is_none() == goes)
        };
        let (loses, gains) = (has(true), has(false));
        let nat = self.nat(&before, &lists);
        let mut steps = Vec::with_capacity(4);
        match (loses, gains) {
            (true, true) if !nat.is_empty() => {
                let first: Vec<Overlay> = lists.iter().map(without_losses).collect();
                steps.push(self.filter(&before, &first));
                steps.push(nat);
                steps.push(self.filter(&first, &lists));
            }
            (true, false) => {
                steps.push(nat);
                steps.push(self.filter(&before, &lists));
            }
            _ => {
                steps.push(self.filter(&before, &lists));
                steps.push(nat);
            }
        }
        let mut mangle = TableChange::new(TableName::Mangle);
        self.constants(&mut mangle);
        steps.push(mangle);
        self.unwanted(&mut steps);
        self.after.lists = lists;
        steps.retain(|step| !step.is_empty());
        steps.iter_mut().for_each(TableChange::sort);
        steps
    }

    fn nat(&mut self, before: &[Overlay], after: &[Overlay]) -> TableChange {
        let mut step = std::mem::replace(&mut self.nat, TableChange::new(TableName::Nat));
        self.constants(&mut step);
        self.lists(&mut step, before, after);
        let gone: Vec<ChainName> = self.released.difference(&self.taken).copied().collect();
        gone.into_iter().for_each(|name| self.delete(&mut step, name));
        self.jumps(&mut step);
        step
    }

    fn filter(&mut self, before: &[Overlay], after: &[Overlay]) -> TableChange {
        let mut step = TableChange::new(TableName::Filter);
        self.constants(&mut step);
        self.lists(&mut step, before, after);
        self.jumps(&mut step);
        step
    }

    /// Returns whether the node's settings are new, or may be.
    fn node_changed(&self) -> bool {
        self.after.complete || self.ruleset.node.as_ref() != Some(&self.after.node)
    }

    /// Adds the chains that always exist.
    fn constants(&mut self, step: &mut TableChange) {
        if !self.node_changed() {
            return;
        }
        let (settings, table) = (&self.ruleset.settings, step.table);
        let now = constants(settings, &self.after.node);
        for constant in now.iter().filter(|constant| constant.table == table) {
            match &constant.rules {
                Some(rules) => self.put(step, constant.name, 0, rules),
                None => self.ensure(step, constant.name),
            }
        }
        let before = self.ruleset.node.as_ref().map(|node| constants(settings, node));
        for old in before.into_iter().flatten().filter(|old| old.table == table) {
            if now.iter().all(|constant| constant.name != old.name) {
                self.delete(step, old.name);
            }
        }
    }

    /// Adds the lists of a table, and the chains that hold them.
    fn lists(&mut self, step: &mut TableChange, before: &[Overlay], after: &[Overlay]) {
        let (ruleset, table) = (self.ruleset, step.table);
        let mut roots: BTreeMap<ChainName, (bool, Vec<Rule>)> = BTreeMap::new();
        for list in List::ALL.into_iter().filter(|list| list.table() == table) {
            let (before, after) = (&before[list as usize], &after[list as usize]);
            let dispatch = &ruleset.lists[list as usize];
            let touched = self.node_changed() || before != after;
            roots.entry(list.chain()).or_default().0 |= touched;
            if before != after {
                let changed = dispatch.change(before, after);
                for (name, (depth, rules)) in changed.put {
                    self.put(step, name, depth, &rules);
                }
                for name in changed.gone {
                    self.delete(step, name);
                }
            }
        }
        // A chain is written as a whole, with all of its lists.
        for list in List::ALL.into_iter().filter(|list| list.table() == table) {
            if let Some((true, rules)) = roots.get_mut(&list.chain()) {
                rules.extend(ruleset.lists[list as usize].root(&after[list as usize]));
            }
        }
        for (name, (touched, mut rules)) in roots {
            if (table, name) == (TableName::Nat, ChainName::SERVICES) {
                rules.extend(to_node_ports(&ruleset.settings, &self.after.node));
            }
            if let Some(rule) = spare_ours(&ruleset.settings, &self.after.node, name) {
                rules.insert(0, rule);
            }
            if touched {
                self.put(step, name, 0, &rules);
            }
        }
    }

    /// Adds the jumps from built-in chains: each exactly once.
    fn jumps(&mut self, step: &mut TableChange) {
        if !self.after.complete {
            return;
        }
        for jump in jumps().into_iter().filter(|jump| jump.table == step.table) {
            let id = (jump.table, jump.rule.line_in(jump.from));
            let staged = self.after.jumps.get(&id);
            let count = staged.or(self.ruleset.jumps.get(&id)).copied().unwrap_or(0);
            let insert = count == 0;
            let op = JumpOp {
                chain: jump.from,
                insert,
                rule: jump.rule.to_string(),
            };
            let times = if insert { 1 } else { count - 1 };
            step.jumps.extend(std::iter::repeat_n(op, times));
            self.after.jumps.insert(id, 1);
        }
    }

    /// Deletes the objects that no ServicePort claimed, with a complete change.
    fn unwanted(&mut self, steps: &mut [TableChange]) {
        if !self.after.complete {
            return;
        }
        let unwanted: Vec<ChainId> = self
            .ruleset
            .chains
            .keys()
            .filter(|id| !self.wanted.contains(id))
            .copied()
            .collect();
        for (table, name) in unwanted {
            // This is the last step of a table, after which nothing jumps to the chain.
            if let Some(step) = steps.iter_mut().rfind(|step| step.table == table) {
                self.delete(step, name);
            }
        }
    }

    /// Returns the content of a chain after the steps so far.
    fn current(&self, id: ChainId) -> Option<ChainDigest> {
        match self.after.chains.get(&id) {
            Some(staged) => *staged,
            None => self.ruleset.chains.get(&id).map(|held| held.content),
        }
    }

    /// Writes a chain if its content differs.
    fn put(&mut self, step: &mut TableChange, name: ChainName, depth: u8, rules: &[Rule]) {
        self.lines.clear();
        let lines = &mut self.lines;
        rules.iter().for_each(|rule| rule.push(name, lines));
        let content = ChainDigest::of(lines);
        let id = (step.table, name);
        if self.after.complete {
            self.wanted.insert(id);
        }
        if self.current(id) == Some(content) {
            return;
        }
        self.after.chains.insert(id, Some(content));
        step.write.push(Written {
            name,
            depth,
            lines: self.lines.clone(),
            content,
        });
    }

    /// Creates a chain if it does not exist. An existing chain stays as it is.
    fn ensure(&mut self, step: &mut TableChange, name: ChainName) {
        match self.current((step.table, name)) {
            None => self.put(step, name, 0, &[]),
            Some(_) => {
                self.wanted.insert((step.table, name));
            }
        }
    }

    fn delete(&mut self, step: &mut TableChange, name: ChainName) {
        let id = (step.table, name);
        self.wanted.remove(&id);
        if self.current(id).is_some() {
            self.after.chains.insert(id, None);
            step.delete.push(name);
        }
    }
}

/// Returns only the additions and changes.
fn without_losses(over: &Overlay) -> Overlay {
    over.iter()
        .filter(|(_, entry)| entry.is_some())
        .map(|(point, entry)| (*point, entry.clone()))
        .collect()
}
