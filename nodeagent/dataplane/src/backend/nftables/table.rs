//! The content of a family's table, and what a change does to it. This module is pure: no I/O.
//!
//! A change is staged against the state, committed by the caller, and accepted only when the kernel has
//! acknowledged it. So the state never claims more than the kernel holds (invariant: acknowledged).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::net::IpAddr;

use kplane_model::{Cidr, EndpointAddr, ServiceKey};

use super::affinity::Group;
use super::affinity_id::AffinityId;
use super::element::{Destination, Element, Key};
use super::frontend::{Entry, Ops, diff, elements, place_of};
use super::groups::{Groups, StagedGroups, sticky};
use super::repair::Contents;
use super::schema::{Class, Set};
use super::word::DRAWS;
use crate::backend::{Change, Failure};
use crate::plan::{Frontend, FrontendAddr, NodePlan, ServicePlan};

/// The elements of one table, by purpose.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    /// The entry of each place. Entries that were found in the kernel and that no ServicePort has claimed yet
    /// are among them.
    frontends: HashMap<FrontendAddr, Entry>,
    services: HashMap<ServiceKey, Holdings>,
    cluster_ips: Counted<IpAddr>,
    /// The ClusterIPs outside the ranges of ClusterIPs, each of which is a range of its own.
    pub(super) lone_ips: BTreeSet<IpAddr>,
    hairpin: Counted<Destination>,
    affinity: Groups,
    node: NodePlan,
    /// The elements of the maps of classes: [`DRAWS`], from the first change on.
    pub(super) draws: BTreeSet<Element>,
    /// Invalid elements that were found in the kernel. The next complete change deletes them.
    pub(super) strays: Vec<Element>,
}

/// The objects of one ServicePort in the table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Holdings {
    frontends: Vec<FrontendAddr>,
    cluster_ip: IpAddr,
    hairpin: Vec<Destination>,
}

/// Objects that several ServicePorts may need, with the number of these ServicePorts. Objects found in the
/// kernel have a count of 0.
#[derive(Clone, Debug)]
struct Counted<T>(HashMap<T, usize>);

impl<T> Default for Counted<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

/// A change that has been worked out and not been accepted yet.
#[derive(Debug, Default)]
pub(super) struct StagedTable {
    /// Operations in groups. Each group leaves all frontends complete, so a transaction may end behind any
    /// group.
    pub(super) groups: Vec<Ops>,
    /// ServicePorts that cannot be programmed as planned.
    pub(super) failures: Vec<Failure>,
    /// Groups of session affinity that may remember removed endpoints.
    pub(super) stale: Vec<AffinityId>,
    affinity: StagedGroups,
    /// In order, so that the same change leads to the same transactions.
    frontends: BTreeMap<FrontendAddr, Option<Entry>>,
    services: Vec<(ServiceKey, Option<Holdings>)>,
    cluster_ips: HashMap<IpAddr, usize>,
    /// The lone ClusterIPs that come, and those that go.
    lone_ips: [Vec<IpAddr>; 2],
    hairpin: HashMap<Destination, usize>,
    node: NodePlan,
    complete: bool,
}

impl StagedTable {
    /// Number of operations.
    pub(super) fn len(&self) -> usize {
        self.groups.iter().map(Ops::len).sum()
    }
}

impl Table {
    /// Works out the operations of a change.
    pub(super) fn stage(&self, change: Change<'_>) -> StagedTable {
        let complete = change.complete;
        let mut staging = TableStaging {
            table: self,
            staged: StagedTable {
                node: change.node.clone(),
                complete,
                ..StagedTable::default()
            },
            cluster_ips: HashMap::new(),
            hairpin: HashMap::new(),
        };
        // Everything is released first, so that another ServicePort may claim it afterwards.
        if complete {
            staging.release_all();
        } else {
            for (key, _) in change.services {
                staging.release(key);
            }
        }
        for (key, plan) in change.services {
            staging.claim(key, plan.as_ref());
        }
        staging.finish()
    }

    /// Records that the kernel holds a staged change.
    pub(super) fn accept(&mut self, staged: StagedTable) {
        if staged.complete {
            self.services.clear();
            self.strays.clear();
        }
        for (at, entry) in staged.frontends {
            match entry {
                Some(entry) => self.frontends.insert(at, entry),
                None => self.frontends.remove(&at),
            };
        }
        for (key, held) in staged.services {
            match held {
                Some(held) => self.services.insert(key, held),
                None => self.services.remove(&key),
            };
        }
        self.cluster_ips.accept(staged.cluster_ips);
        let [added, deleted] = staged.lone_ips;
        self.lone_ips.extend(added);
        for ip in deleted {
            self.lone_ips.remove(&ip);
        }
        self.hairpin.accept(staged.hairpin);
        self.affinity.accept(staged.affinity);
        self.node = staged.node;
        if self.draws != *DRAWS {
            self.draws.clone_from(&DRAWS);
        }
    }

    /// Returns a table with the content that was found in the kernel. No ServicePort owns anything in it yet.
    pub(super) fn adopt(
        frontends: impl Iterator<Item = (FrontendAddr, Entry)>,
        cluster_ips: BTreeSet<IpAddr>,
        hairpin: BTreeSet<Destination>,
        node: NodePlan,
        strays: Vec<Element>,
    ) -> Self {
        Self {
            frontends: frontends.collect(),
            services: HashMap::new(),
            cluster_ips: Counted(cluster_ips.into_iter().map(|ip| (ip, 0)).collect()),
            lone_ips: BTreeSet::new(),
            hairpin: Counted(hairpin.into_iter().map(|key| (key, 0)).collect()),
            affinity: Groups::default(),
            node,
            draws: BTreeSet::new(),
            strays,
        }
    }

    /// Returns the ClusterIPs that become lone ones, and those that are none any more. All of them are compared
    /// only if all may differ.
    fn stage_lone(
        &self,
        node: &NodePlan,
        cluster_ips: &HashMap<IpAddr, usize>,
        [added, deleted]: [&[IpAddr]; 2],
        complete: bool,
    ) -> [Vec<IpAddr>; 2] {
        let is_lone = |ip: &&IpAddr| !node.service_cidrs.iter().any(|range| range.contains(**ip));
        let lone: BTreeSet<IpAddr> = if complete || node.service_cidrs != self.node.service_cidrs {
            self.cluster_ips
                .0
                .keys()
                .filter(|ip| cluster_ips.get(ip) != Some(&0))
                .chain(added)
                .filter(is_lone)
                .copied()
                .collect()
        } else {
            return [
                added.iter().filter(is_lone).copied().collect(),
                deleted.iter().filter(|ip| self.lone_ips.contains(ip)).copied().collect(),
            ];
        };
        [
            lone.difference(&self.lone_ips).copied().collect(),
            self.lone_ips.difference(&lone).copied().collect(),
        ]
    }

    /// Adds groups that were found in the kernel. No ServicePort owns them yet.
    pub(super) fn adopt_groups(&mut self, groups: &[Group]) {
        self.affinity.adopt(groups);
    }

    /// Returns the endpoints that a group may remember, sorted; `None` while they are not known.
    pub(super) fn may_remember(&self, id: AffinityId) -> Option<&[EndpointAddr]> {
        self.affinity.endpoints(id)
    }

    /// Returns the frontends of a ServicePort.
    pub(super) fn frontends(&self, key: &ServiceKey) -> &[FrontendAddr] {
        let held = self.services.get(key);
        held.map_or(&[], |held| &held.frontends)
    }
}

impl Contents for Table {
    fn groups(&self) -> BTreeSet<Group> {
        self.affinity.all()
    }

    fn elements(&self) -> BTreeSet<Element> {
        let frontends = self.frontends.iter().flat_map(|(at, entry)| elements(*at, entry));
        let cluster_ips = self.cluster_ips.0.keys().map(|ip| cluster_ip_element(*ip));
        let lone_ips = self.lone_ips.iter().map(|ip| lone_ip_element(*ip));
        let hairpin = self.hairpin.0.keys().map(|key| hairpin_element(*key));
        let node = node_sets(&self.node)
            .into_iter()
            .flat_map(|(set, ranges)| ranges.iter().map(move |range| range_element(set, *range)));
        let strays = self.strays.iter().copied();
        let draws = self.draws.iter().copied();
        let places = frontends.chain(cluster_ips).chain(lone_ips).chain(hairpin);
        draws.chain(places).chain(node).chain(strays).collect()
    }

    /// The work is that of building all elements of the key's place.
    fn element(&self, set: Set, key: Key) -> Option<Element> {
        let same = |element: &Element| (element.set, element.key) == (set, key);
        let stray = self.strays.iter().copied().find(same);
        let own = match (key, place_of(key)) {
            (_, Some(at)) => {
                let entry = self.frontends.get(&at)?;
                elements(at, entry).into_iter().find(same)
            }
            (Key::Ip(ip), None) => {
                let there = self.cluster_ips.0.contains_key(&ip);
                there.then(|| cluster_ip_element(ip)).filter(same)
            }
            (Key::Hairpin(endpoint), None) => {
                let there = self.hairpin.0.contains_key(&endpoint);
                there.then(|| hairpin_element(endpoint)).filter(same)
            }
            (Key::Number(_), None) => self.draws.iter().copied().find(same),
            (_, None) => None,
        };
        own.or(stray)
    }
}

impl<T: Copy + Eq + Hash> Counted<T> {
    /// Returns the counts after `changes`, and what needs elements now and needed them before.
    fn stage(
        &self,
        changes: &HashMap<T, isize>,
        complete: bool,
    ) -> (HashMap<T, usize>, [Vec<T>; 2]) {
        let mut after = HashMap::new();
        let (mut added, mut deleted) = (Vec::new(), Vec::new());
        for (key, change) in changes {
            let before = self.0.get(key).copied();
            let count = before.unwrap_or(0).saturating_add_signed(*change);
            match (before, count) {
                (None, 1..) => added.push(*key),
                (Some(_), 0) => deleted.push(*key),
                _ => {}
            }
            after.insert(*key, count);
        }
        if complete {
            // These objects were found in the kernel, and no ServicePort needs them.
            let unclaimed: Vec<T> = self
                .0
                .iter()
                .filter(|(key, count)| **count == 0 && !after.contains_key(key))
                .map(|(key, _)| *key)
                .collect();
            for key in unclaimed {
                deleted.push(key);
                after.insert(key, 0);
            }
        }
        (after, [added, deleted])
    }

    fn accept(&mut self, after: HashMap<T, usize>) {
        for (key, count) in after {
            if count == 0 {
                self.0.remove(&key);
            } else {
                self.0.insert(key, count);
            }
        }
    }
}

/// A change while its operations are being worked out.
struct TableStaging<'a> {
    table: &'a Table,
    staged: StagedTable,
    cluster_ips: HashMap<IpAddr, isize>,
    hairpin: HashMap<Destination, isize>,
}

impl TableStaging<'_> {
    /// Releases everything.
    fn release_all(&mut self) {
        for at in self.table.frontends.keys() {
            self.staged.frontends.insert(*at, None);
        }
        for held in self.table.services.values() {
            self.uncount(held);
        }
        self.table.affinity.release_all(&mut self.staged.affinity);
    }

    /// Releases what a ServicePort holds. The ServicePort may claim it again.
    fn release(&mut self, key: &ServiceKey) {
        if let Some(held) = self.table.services.get(key) {
            for at in &held.frontends {
                self.staged.frontends.insert(*at, None);
            }
            self.uncount(held);
            self.table.affinity.release(key, &mut self.staged.affinity);
        }
    }

    fn uncount(&mut self, held: &Holdings) {
        *self.cluster_ips.entry(held.cluster_ip).or_default() -= 1;
        for key in &held.hairpin {
            *self.hairpin.entry(*key).or_default() -= 1;
        }
    }

    fn claim(&mut self, key: &ServiceKey, plan: Option<&ServicePlan>) {
        let Some(plan) = plan else {
            self.staged.services.push((key.clone(), None));
            return;
        };
        let mut frontends = Vec::with_capacity(plan.frontends.len());
        for frontend in &plan.frontends {
            match self.claim_frontend(plan, frontend) {
                Ok(()) => frontends.push(frontend.at),
                Err(reason) => self.fail(key, format!("{}: {reason}", frontend.at), false),
            }
        }
        self.staged.affinity.claim(plan);
        let protocol = key.protocol;
        let hairpin: Vec<Destination> = plan
            .local
            .iter()
            .map(|local| Destination {
                ip: local.ip,
                protocol,
                port: local.port,
            })
            .collect();
        *self.cluster_ips.entry(plan.cluster_ip).or_default() += 1;
        for local in &hairpin {
            *self.hairpin.entry(*local).or_default() += 1;
        }
        let held = Holdings {
            frontends,
            cluster_ip: plan.cluster_ip,
            hairpin,
        };
        self.staged.services.push((key.clone(), Some(held)));
    }

    fn claim_frontend(&mut self, plan: &ServicePlan, frontend: &Frontend) -> Result<(), String> {
        let inside = frontend.inside.as_ref().map_or(0, Vec::len);
        let endpoints = frontend.endpoints.len().max(inside);
        let most = Class::MAX_ENDPOINTS;
        if endpoints > most {
            return Err(format!(
                "{endpoints} endpoints are more than {most}; split the Service"
            ));
        }
        let before = self.table.frontends.get(&frontend.at);
        let entry = Entry::next(before, frontend, sticky(plan, frontend));
        self.staged.frontends.insert(frontend.at, Some(entry));
        Ok(())
    }

    fn fail(&mut self, key: &ServiceKey, reason: String, degraded: bool) {
        self.staged.failures.push(Failure {
            key: key.clone(),
            reason,
            degraded,
        });
    }

    fn finish(mut self) -> StagedTable {
        let complete = self.staged.complete;
        let table = self.table;
        let mut first = diff_node(&table.node, &self.staged.node);
        if complete {
            first.delete.extend(&table.strays);
        }
        first.delete.extend(table.draws.difference(&DRAWS));
        first.add.extend(DRAWS.difference(&table.draws));
        let (cluster_ips, [added, deleted]) = table.cluster_ips.stage(&self.cluster_ips, complete);
        let changed = [&added[..], &deleted[..]];
        let lone_ips = table.stage_lone(&self.staged.node, &cluster_ips, changed, complete);
        first.delete.extend(deleted.into_iter().map(cluster_ip_element));
        first.add.extend(added.into_iter().map(cluster_ip_element));
        first.delete.extend(lone_ips[1].iter().copied().map(lone_ip_element));
        first.add.extend(lone_ips[0].iter().copied().map(lone_ip_element));
        let (hairpin, [added, deleted]) = table.hairpin.stage(&self.hairpin, complete);
        first.delete.extend(deleted.into_iter().map(hairpin_element));
        first.add.extend(added.into_iter().map(hairpin_element));
        let frontends = self
            .staged
            .frontends
            .iter()
            .map(|(at, after)| diff(*at, table.frontends.get(at), after.as_ref()));
        let change = table.affinity.change(&self.staged.affinity);
        let groups = change.before.into_iter().chain([first]).chain(frontends).chain(change.after);
        self.staged.groups = groups.filter(|ops| ops.len() > 0).collect();
        self.staged.stale = change.stale;
        self.staged.cluster_ips = cluster_ips;
        self.staged.lone_ips = lone_ips;
        self.staged.hairpin = hairpin;
        self.staged
    }
}

fn cluster_ip_element(ip: IpAddr) -> Element {
    Element {
        set: Set::ClusterIps,
        key: Key::Ip(ip),
        data: None,
    }
}

fn lone_ip_element(ip: IpAddr) -> Element {
    range_element(Set::ServiceCidrs, Cidr::single(ip))
}

fn hairpin_element(endpoint: Destination) -> Element {
    Element {
        set: Set::Hairpin,
        key: Key::Hairpin(endpoint),
        data: None,
    }
}

fn range_element(set: Set, range: Cidr) -> Element {
    Element {
        set,
        key: Key::Range(range),
        data: None,
    }
}

/// Returns the sets of a node's settings.
pub(super) fn node_sets(node: &NodePlan) -> BTreeMap<Set, &Vec<Cidr>> {
    BTreeMap::from([
        (Set::PodCidrs, &node.pod_sources),
        (Set::UnmasqueradedSources, &node.unmasqueraded_sources),
        (Set::NodeportIps, &node.nodeport_ips),
        (Set::ServiceCidrs, &node.service_cidrs),
    ])
}

fn diff_node(before: &NodePlan, after: &NodePlan) -> Ops {
    let after = node_sets(after);
    let mut ops = Ops::default();
    for (set, old) in node_sets(before) {
        let new = after[&set];
        let lacking = |a: &[Cidr], b: &[Cidr]| -> Vec<Element> {
            a.iter()
                .filter(|range| !b.contains(range))
                .map(|range| range_element(set, *range))
                .collect()
        };
        ops.delete.extend(lacking(old, new));
        ops.add.extend(lacking(new, old));
    }
    ops
}
