//! Pods by name, labels, ports and addresses.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{Cidr, NamedPort, NodeName, PeerId, PodName};

use crate::lookup::Labelled;
use crate::ranges::Ranges;
use crate::texts::{LabelSet, Texts};
use crate::{Pod, Selector};

/// Maximum number of addresses, and of ports with names, that a Pod has here: so its object fits into a message.
/// Kubernetes gives a Pod two addresses.
const MAX_ADDRESSES: usize = 64;
const MAX_PORTS: usize = 1_024;

/// A Pod, and the class that it was put into.
#[derive(Debug)]
pub(crate) struct PodEntry {
    pub(crate) node: NodeName,
    /// Sorted and unique.
    pub(crate) addresses: Box<[IpAddr]>,
    pub(crate) labels: LabelSet,
    /// Sorted and unique.
    pub(crate) ports: Arc<[NamedPort]>,
    terminating: bool,
    pub(crate) created: Option<Arc<str>>,
    pub(crate) class: Option<PeerId>,
}

impl PodEntry {
    fn new(texts: &mut Texts, pod: Pod) -> Self {
        let mut addresses = pod.addresses;
        addresses.sort_unstable();
        addresses.dedup();
        addresses.truncate(MAX_ADDRESSES);
        let mut ports = pod.ports;
        ports.sort_unstable();
        ports.dedup();
        ports.truncate(MAX_PORTS);
        for port in &mut ports {
            port.name = texts.share(&port.name);
        }
        Self {
            node: texts.share(&pod.node),
            addresses: addresses.into(),
            labels: texts.share_labels(&pod.labels),
            ports: ports.into(),
            terminating: pod.terminating,
            created: pod.created,
            class: None,
        }
    }

    fn is_like(&self, other: &Self) -> bool {
        self.node == other.node
            && self.labels == other.labels
            && self.ports == other.ports
            && self.claims_like(other)
    }

    fn claims_like(&self, other: &Self) -> bool {
        self.addresses == other.addresses
            && self.node == other.node
            && self.terminating == other.terminating
            && self.created == other.created
    }
}

/// All Pods, and what changed since the last call of `take`.
#[derive(Debug, Default)]
pub(crate) struct Pods {
    texts: Texts,
    entries: HashMap<PodName, PodEntry>,
    labelled: Labelled<Arc<str>, PodName>,
    /// Pods that say that they have an address. One of them counts on each node, and one of these as a peer (NP18).
    claims: HashMap<IpAddr, Vec<PodName>>,
    ranges: Ranges,
    pub(crate) changed: BTreeSet<PodName>,
    /// All Pods are in `changed`, so that none needs to be marked.
    pub(crate) all_changed: bool,
    /// Addresses whose Pod, or whose Pod's class, may have changed.
    pub(crate) readdressed: BTreeSet<IpAddr>,
    /// Classes that deleted Pods were in, once for each Pod.
    pub(crate) left: Vec<PeerId>,
}

impl Pods {
    pub(crate) fn put(&mut self, pod: Pod) {
        let name = pod.name.clone();
        let mut entry = PodEntry::new(&mut self.texts, pod);
        if let Some(old) = self.entries.get(&name) {
            if old.is_like(&entry) {
                return;
            }
            entry.class = old.class;
        }
        let claims = self.entries.get(&name).map(|old| old.claims_like(&entry));
        if claims != Some(true) {
            self.readdressed.extend(&entry.addresses);
        }
        self.unlink(&name, claims == Some(true));
        self.labelled.insert(&name.namespace, &entry.labels, &name);
        for address in &entry.addresses {
            self.claims.entry(*address).or_default().push(name.clone());
        }
        self.changed.insert(name.clone());
        self.entries.insert(name, entry);
    }

    pub(crate) fn delete(&mut self, name: &PodName) {
        if let Some(old) = self.unlink(name, false) {
            self.left.extend(old.class);
            self.changed.insert(name.clone());
        }
    }

    /// Removes a Pod from all indexes.
    fn unlink(&mut self, name: &PodName, keeps_addresses: bool) -> Option<PodEntry> {
        let old = self.entries.remove(name)?;
        self.labelled.remove(&name.namespace, &old.labels, name);
        if !keeps_addresses {
            self.readdressed.extend(&old.addresses);
        }
        for address in &old.addresses {
            if let Some(pods) = self.claims.get_mut(address) {
                pods.retain(|pod| pod != name);
                if pods.is_empty() {
                    self.claims.remove(address);
                }
            }
        }
        Some(old)
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn get(&self, name: &PodName) -> Option<&PodEntry> {
        self.entries.get(name)
    }

    pub(crate) fn get_mut(&mut self, name: &PodName) -> Option<&mut PodEntry> {
        self.entries.get_mut(name)
    }

    /// Returns the Pods of a namespace that a selector selects.
    pub(crate) fn selected<'a>(
        &'a self,
        namespace: &'a Arc<str>,
        selector: &'a Selector,
    ) -> impl Iterator<Item = &'a PodName> {
        let candidates = self.labelled.candidates(Some(namespace), selector);
        candidates.filter(|pod| self.get(pod).is_some_and(|e| e.labels.meet(selector)))
    }

    /// Returns how many Pods of a namespace, or of all, a selector selects at most. Work: the values that it names.
    pub(crate) fn most_selected(&self, namespace: Option<&Arc<str>>, selector: &Selector) -> usize {
        match (namespace, selector.pivot()) {
            (None, None) => self.len(),
            _ => self.labelled.count(namespace, selector),
        }
    }

    /// Returns the classes of the Pods of a namespace that a selector selects, once for each Pod.
    pub(crate) fn classes<'a>(
        &'a self,
        namespace: &'a Arc<str>,
        selector: &'a Selector,
    ) -> impl Iterator<Item = PeerId> + 'a {
        let pods = self.selected(namespace, selector);
        pods.filter_map(|pod| self.get(pod)?.class)
    }

    /// Returns the Pods that say that they have an address.
    fn claims(&self, address: IpAddr) -> impl Iterator<Item = (&PodName, &PodEntry)> + Clone {
        self.claims
            .get(&address)
            .into_iter()
            .flatten()
            .filter_map(|pod| Some((pod, self.get(pod)?)))
    }

    /// Returns the Pod that an address means as a peer: the one that counts on the node with the best claim.
    ///
    /// A kubelet may write any address into the status of its Pods, and only the API server writes when a Pod was created.
    /// So the best claim is one that the ranges of its own node support, then one of a Pod that is not being deleted, then
    /// the oldest: neither a new Pod of another node nor an old one that begins to claim it takes an address out of the
    /// ranges of its node. Ranges only decide between claims of several nodes. An address that a single node claims counts
    /// wherever it lies, because Pods of an IPAM that does not follow the ranges have addresses from those of any node.
    pub(crate) fn of_address(&self, address: IpAddr) -> Option<&PodName> {
        if let [only] = &self.claims.get(&address)?[..] {
            return Some(only);
        }
        let best = self.claims(address).min_by_key(|(pod, e)| {
            let support = self.ranges.support(&e.node, address);
            let age = (e.created.is_none(), &e.created);
            (support, e.terminating, age, *pod)
        });
        self.of_address_on(&best?.1.node, address)
    }

    /// Returns the Pod that counts for an address on a node: one that is not being deleted, then the youngest, then the
    /// first by name (NP18).
    ///
    /// What Pods of other nodes claim does not matter here, so no claim takes a Pod's isolation away.
    fn of_address_on(&self, node: &NodeName, address: IpAddr) -> Option<&PodName> {
        let there = self.claims(address).filter(|(_, e)| e.node == *node);
        let best = there.min_by_key(|(pod, e)| (e.terminating, Reverse(&e.created), *pod));
        best.map(|(pod, _)| pod)
    }

    /// Returns the addresses for which a Pod counts on its node, sorted.
    pub(crate) fn addresses<'a>(&'a self, pod: &'a PodName) -> impl Iterator<Item = IpAddr> + 'a {
        self.get(pod)
            .into_iter()
            .flat_map(|e| e.addresses.iter().map(|a| (&e.node, *a)))
            .filter_map(move |(node, address)| {
                let counts = self.of_address_on(node, address) == Some(pod);
                counts.then_some(address)
            })
    }

    /// Returns the first address that a Pod claims and that means a Pod of another node, and that Pod. A Pod that is being
    /// deleted may have given its address back (NP18).
    pub(crate) fn lost(&self, pod: &PodName) -> Option<(IpAddr, &PodName)> {
        let entry = self.get(pod).filter(|entry| !entry.terminating)?;
        entry.addresses.iter().find_map(|address| {
            let winner = self.of_address(*address)?;
            let is_elsewhere = self.get(winner)?.node != entry.node;
            is_elsewhere.then_some((*address, winner))
        })
    }

    /// Takes over the ranges of a node; none = the last known ones stay.
    pub(crate) fn set_ranges(&mut self, node: &NodeName, ranges: Vec<Cidr>) {
        self.ranges.set(node, ranges);
    }

    /// Marks the addresses that several Pods claim, if ranges of nodes changed.
    pub(crate) fn take_ranges(&mut self) {
        let nodes = self.entries.values().map(|entry| entry.node.clone());
        if self.ranges.take(nodes) {
            let claimed = self.claims.iter().filter(|(_, pods)| pods.len() > 1);
            self.readdressed.extend(claimed.map(|(address, _)| address));
        }
    }

    /// Returns all Pods that a selector selects.
    pub(crate) fn selected_anywhere<'a>(
        &'a self,
        selector: &'a Selector,
    ) -> impl Iterator<Item = (&'a PodName, &'a PodEntry)> {
        let candidates = self.labelled.candidates(None, selector);
        candidates
            .filter_map(|pod| Some((pod, self.get(pod)?)))
            .filter(|(_, entry)| entry.labels.meet(selector))
    }

    /// Marks addresses of Pods.
    pub(crate) fn readdress(&mut self, which: impl Fn(IpAddr) -> bool) {
        let addresses = self.claims.keys().copied();
        self.readdressed.extend(addresses.filter(|address| which(*address)));
    }

    /// Marks all Pods and addresses as changed.
    pub(crate) fn touch_all(&mut self) {
        self.all_changed = true;
        self.changed.extend(self.entries.keys().cloned());
        self.readdressed.extend(self.claims.keys());
    }

    /// Marks the Pods of a namespace that a selector selects.
    pub(crate) fn touch_selected(&mut self, namespace: &Arc<str>, selector: &Selector) {
        if !self.all_changed {
            let pods: Vec<_> = self.selected(namespace, selector).cloned().collect();
            self.changed.extend(pods);
        }
    }

    /// Marks the Pods that say that they have an address.
    pub(crate) fn touch_claims(&mut self, address: IpAddr) {
        if !self.all_changed {
            let pods = self.claims.get(&address).into_iter().flatten();
            self.changed.extend(pods.cloned());
        }
    }
}
