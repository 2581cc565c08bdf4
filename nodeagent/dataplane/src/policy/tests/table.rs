//! The kernel's table: it refuses what the real one refuses, and packets go through its chains.

use std::collections::{BTreeMap, BTreeSet};

use kplane_model::Family;

use super::super::content::Content;
use super::super::judge::Packet;
use crate::backend::nftables::memory::{HeldTable, MemoryKernel, PacketFate, TestPacket};
use crate::backend::nftables::{Contents as _, Element, Key, Ops, PolicySet, TableLayout};

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Model(HeldTable);

impl Default for Model {
    fn default() -> Self {
        let layout = TableLayout::Policies {
            output: false,
            log: true,
            owned: true,
        };
        Self(HeldTable::new(Family::V4, layout))
    }
}

impl Model {
    pub(super) fn of(content: &Content) -> Self {
        let mut model = Self::default();
        model.add(&content.elements());
        model
    }

    /// Each phase is a transaction.
    pub(super) fn change(&mut self, phases: &[Vec<Ops>]) {
        for phase in phases {
            self.step(phase);
        }
    }

    /// A transaction.
    pub(super) fn step(&mut self, phase: &[Ops]) {
        self.0.apply(phase).unwrap_or_else(|| panic!("refused: {phase:?}"));
    }

    pub(super) fn elements(&self) -> Vec<Element> {
        self.0.elements().collect()
    }

    pub(super) fn delete<'a>(&mut self, elements: impl IntoIterator<Item = &'a Element>) {
        let mut ops = Ops::default();
        ops.delete.extend(elements);
        self.step(&[ops]);
    }

    pub(super) fn add<'a>(&mut self, elements: impl IntoIterator<Item = &'a Element>) {
        let mut ops = Ops::default();
        ops.add.extend(elements);
        self.step(&[ops]);
    }

    pub(super) fn allows(&self, packet: &Packet) -> bool {
        let packet = TestPacket::new(packet.source, packet.destination, packet.port);
        let fates = MemoryKernel::fates_in(&self.0, &packet);
        fates.iter().all(|fate| matches!(fate, PacketFate::Passes { .. }))
    }
}

/// Returns the elements with what their numbers stand for, since each process gives its own numbers.
pub(super) fn described(content: &Content) -> BTreeSet<String> {
    let mut names = BTreeMap::from([(0, "anybody".to_owned())]);
    names.extend(content.numbers.all().map(|(id, number)| (number, format!("{id:?}"))));
    let blocks = content.blocks.all();
    names.extend(blocks.map(|(blocks, number)| (number, format!("{blocks:?}"))));
    let rows = content.tiers.rows();
    names.extend(rows.map(|(actions, number)| (number, format!("{actions:?}"))));
    content
        .held
        .all()
        .map(|((set, key), value)| {
            let key = match key {
                Key::Number(number) => names[&number].clone(),
                Key::Grant(pod, number) => format!("{pod} {}", names[&number]),
                Key::GrantPort(pod, number, protocol, port) => {
                    format!("{pod} {} {protocol} {port}", names[&number])
                }
                Key::GrantPorts(pod, number, protocol, first, last) => {
                    format!("{pod} {} {protocol} {first} {last}", names[&number])
                }
                Key::Row(number, protocol, first, last) => {
                    format!("{} {protocol} {first} {last}", names[&number])
                }
                key => format!("{key:?}"),
            };
            let value = value.map(|number| match set {
                PolicySet::RowAll | PolicySet::RowPorts => number.to_string(),
                _ => names[&number].clone(),
            });
            format!("{set:?} {key} {value:?}")
        })
        .collect()
}
