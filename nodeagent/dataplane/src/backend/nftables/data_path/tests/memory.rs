//! A kernel in memory. It holds elements and chains as the real one does, and checks the operations that it
//! gets.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use crate::backend::nftables::access::{Cost, FoundTable, Guard, TableAccess};
use crate::backend::nftables::affinity::Group;
use crate::backend::nftables::affinity_id::AffinityId;
use crate::backend::nftables::clients::Client;
use crate::backend::nftables::element::{Data, Element};
use crate::backend::nftables::frontend::Ops;
use crate::backend::nftables::readback::{ListedSet, ReadError};
use crate::backend::nftables::schema::Set;
use crate::backend::nftables::structure::GroupOp;
use crate::backend::nftables::watch::Drift;
use kplane_netlink::{CommitError, Errno, NetlinkError};

/// A kernel that holds elements, and checks the operations that it gets.
#[derive(Debug, Default)]
pub(super) struct Memory {
    pub(super) elements: Option<BTreeSet<Element>>,
    pub(super) groups: BTreeMap<AffinityId, Group>,
    pub(super) clients: BTreeMap<AffinityId, Vec<Client>>,
    pub(super) capacity: usize,
    pub(super) commits: usize,
    /// The kernel refuses to add this set's elements with this address.
    pub(super) poison: Option<IpAddr>,
    /// Number of commits before which another program changes its own rules.
    pub(super) others: usize,
    /// Changes by that program to kplane's table, reported with the next of these commits.
    pub(super) drift: Option<Drift>,
    /// Function that checks the elements after each commit.
    pub(super) between: Option<fn(&BTreeSet<Element>)>,
}

impl Memory {
    pub(super) fn new() -> Self {
        Self {
            capacity: usize::MAX,
            ..Self::default()
        }
    }

    fn refused() -> CommitError {
        CommitError::Refused(Errno::EINVAL)
    }

    /// The groups after these operations; `elements` are those that are there at that moment.
    fn groups_after(
        &self,
        ops: impl Iterator<Item = GroupOp>,
        elements: &BTreeSet<Element>,
    ) -> Result<BTreeMap<AffinityId, Group>, CommitError> {
        let mut groups = self.groups.clone();
        for op in ops {
            let fine = match op {
                GroupOp::Make(group) => groups.insert(group.id, group).is_none(),
                GroupOp::Rewrite(group) => groups.insert(group.id, group).is_some(),
                GroupOp::Drop(group) => {
                    let used = elements.iter().any(|element| leads_to(element) == Some(group.id));
                    !used && groups.remove(&group.id) == Some(group)
                }
            };
            if !fine {
                return Err(Self::refused());
            }
        }
        let leads_nowhere = |group: &Group| {
            let leads = group.inside_apart || group.shared;
            leads && !groups.contains_key(&group.id.other())
        };
        if groups.values().any(leads_nowhere) {
            return Err(Self::refused());
        }
        Ok(groups)
    }
}

fn leads_to(element: &Element) -> Option<AffinityId> {
    match element.data? {
        Data::Endpoint(_) | Data::Number(_) => None,
        Data::Pick(id) | Data::Keep(id) | Data::Split(id) => Some(id),
    }
}

impl TableAccess for &mut Memory {
    fn read(&mut self) -> Result<FoundTable, NetlinkError> {
        Ok(match &self.elements {
            Some(elements) => FoundTable::Ours(
                self.groups.values().copied().collect(),
                elements.iter().copied().collect(),
            ),
            None => FoundTable::Other("there is no table".to_owned()),
        })
    }

    fn structure(&mut self) -> Result<Option<Vec<Group>>, NetlinkError> {
        let groups = self.groups.values().copied().collect();
        Ok(self.elements.as_ref().map(|_| groups))
    }

    fn sets(&self) -> Vec<Set> {
        Set::all().collect()
    }

    fn list(&mut self, set: Set) -> Result<ListedSet, ReadError> {
        let elements = self.elements.iter().flatten().copied();
        let elements = elements.filter(|element| element.set == set).collect();
        Ok(ListedSet::Whole(elements))
    }

    fn drift(&mut self) -> Result<Option<Drift>, NetlinkError> {
        Ok(self.drift.take())
    }

    fn commit(&mut self, rebuild: bool, guard: Guard, groups: &[Ops]) -> Result<Cost, CommitError> {
        if guard == Guard::Head && self.others > 0 {
            self.others -= 1;
            return Err(CommitError::GenerationMoved);
        }
        let mut elements = if rebuild {
            BTreeSet::new()
        } else {
            self.elements.clone().ok_or_else(Memory::refused)?
        };
        for element in groups.iter().flat_map(|ops| &ops.delete) {
            if !elements.remove(element) {
                return Err(Memory::refused());
            }
        }
        if rebuild {
            self.groups.clear();
        }
        let ops = groups.iter().flat_map(|ops| &ops.groups).copied();
        let affinity = self.groups_after(ops, &elements)?;
        for element in groups.iter().flat_map(|ops| &ops.add) {
            if leads_to(element).is_some_and(|id| !affinity.contains_key(&id)) {
                return Err(Memory::refused());
            }
            let same_key = |e: &Element| e.set == element.set && e.key == element.key;
            let poisoned = element
                .data
                .and_then(Data::endpoint)
                .is_some_and(|endpoint| Some(endpoint.ip) == self.poison);
            if poisoned
                || (element.set.is_map() && elements.iter().any(same_key))
                || !elements.insert(*element)
            {
                return Err(Memory::refused());
            }
        }
        assert!(
            groups.iter().map(Ops::weight).sum::<usize>()
                <= self.capacity.max(groups.first().map_or(0, Ops::weight))
        );
        if let Some(between) = self.between {
            between(&elements);
        }
        self.elements = Some(elements);
        self.clients.retain(|id, _| affinity.contains_key(id));
        self.groups = affinity;
        self.commits += 1;
        Ok(Cost {
            bytes: 1,
            encode: Duration::ZERO,
            kernel: Duration::ZERO,
        })
    }

    fn clients(&mut self, group: AffinityId) -> Result<Vec<Client>, NetlinkError> {
        assert!(self.groups.contains_key(&group));
        Ok(self.clients.get(&group).cloned().unwrap_or_default())
    }

    fn forget(&mut self, group: AffinityId, gone: &[Client]) -> Result<(), CommitError> {
        let clients = self.clients.entry(group).or_default();
        if !gone.iter().all(|client| clients.contains(client)) {
            return Err(Memory::refused());
        }
        clients.retain(|client| !gone.contains(client));
        Ok(())
    }

    fn capacity(&self, _: bool) -> usize {
        self.capacity
    }
}
