//! Changes by other programs to kplane's tables, as the kernel reports them.
//!
//! ```text
//! messages of a transaction ..., its end (generation N+1)  ->  Ledger
//!   in other tables: the known generation increases, nothing else happens
//!   in kplane's:     `Drift`: these elements, or anything
//!   a gap:           anything may have happened to all of kplane's tables
//! ```

use std::collections::BTreeMap;
use std::fmt;

use kplane_model::Family;

use super::decode::Decoder;
use super::element::{Element, Key};
use super::schema::Set;
use super::table_kind::TableKind;
use super::uapi::*;
use kplane_netlink::{Attribute, Generation, Message, generation_after};

/// Most elements that are followed one by one. When other programs change more, the table is read.
const MAX_ELEMENTS: usize = 1_000;

/// The table's name in every message: `NFTA_TABLE_NAME`, `NFTA_CHAIN_TABLE`, `NFTA_RULE_TABLE` and so on are
/// all the first attribute.
const TABLE_OF_ANY: u16 = NFTA_TABLE_NAME;

/// Changes by other programs to one of kplane's tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Drift {
    pub(super) changed: Changed,
    /// Thread and name of the program that made the last change.
    pub(super) by: Option<(u32, String)>,
}

/// The parts of a table that may differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Changed {
    /// These elements, with their present values, or `None` for deleted ones.
    Elements(BTreeMap<(Set, Key), Option<Element>>),
    /// Chains, rules, sets, or too many elements to follow.
    Anything,
}

impl Default for Changed {
    fn default() -> Self {
        Self::Elements(BTreeMap::new())
    }
}

impl Drift {
    /// Returns a change of unknown parts, by this program as far as the kernel reported it.
    pub(super) fn anything_by(by: Option<(u32, String)>) -> Self {
        Self {
            changed: Changed::Anything,
            by,
        }
    }

    /// Adds a later change.
    pub(super) fn append(&mut self, later: Self) {
        match (&mut self.changed, later.changed) {
            (Changed::Elements(elements), Changed::Elements(later)) => {
                elements.extend(later);
                self.limit();
            }
            (changed, _) => *changed = Changed::Anything,
        }
        self.by = later.by.or(self.by.take());
    }

    fn limit(&mut self) {
        if matches!(&self.changed, Changed::Elements(elements) if elements.len() > MAX_ELEMENTS) {
            self.changed = Changed::Anything;
        }
    }

    /// Adds the content of one message.
    fn take(&mut self, table: OneTable, message: Message<'_>) {
        let Changed::Elements(elements) = &mut self.changed else {
            return;
        };
        match changed_elements(table, message) {
            Some((true, new)) => {
                elements.extend(new.into_iter().map(|e| ((e.set, e.key), Some(e))));
            }
            Some((false, gone)) => {
                elements.extend(gone.into_iter().map(|e| ((e.set, e.key), None)));
            }
            None => self.changed = Changed::Anything,
        }
        self.limit();
    }
}

impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.by {
            // The other program chose its own name, so the name is escaped.
            Some((thread, name)) => write!(f, "by {} (process {thread})", name.escape_debug()),
            None => f.write_str("by an unknown process"),
        }
    }
}

/// Returns the elements that a message reports, and whether they exist now. `None` for other messages, and
/// for elements that can only be decoded with the rest of their set.
fn changed_elements(
    (kind, family): OneTable,
    message: Message<'_>,
) -> Option<(bool, Vec<Element>)> {
    let there = match message.kind {
        msg::NEWSETELEM => true,
        msg::DELSETELEM => false,
        _ => return None,
    };
    let attributes = message.attributes();
    let name = attributes.get(NFTA_SET_ELEM_LIST_SET)?.as_str()?;
    let mut sets = Set::all_of(kind).into_iter();
    let Some(set) = sets.find(|set| set.name() == name) else {
        // This is a set of session affinity, or a set of another program whose creation was reported as well.
        return Some((there, Vec::new()));
    };
    if set.is_interval() {
        return None;
    }
    let mut decoder = Decoder::new(family, set);
    let list = attributes.get(NFTA_SET_ELEM_LIST_ELEMENTS)?;
    decoder.take(list.children()).ok()?;
    Some((there, decoder.finish().ok()?))
}

/// One of kplane's tables.
pub(super) type OneTable = (TableKind, Family);

/// Returns the table's place in the records of a [`Ledger`].
fn index((kind, family): OneTable) -> usize {
    kind as usize * Family::ALL.len() + family as usize
}

/// Record of transactions, which shows whether kplane's knowledge of its tables is still valid.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// The newest generation up to which every transaction was reported; `None` after a gap.
    head: Option<u32>,
    /// Changes by other programs that are not handled yet, by table.
    drifted: [Option<Drift>; 4],
    /// Changes of the transaction whose end has not been reported yet, by table.
    open: [Option<Drift>; 4],
}

impl Ledger {
    /// Returns the generation up to which everything is known; `None` after a gap.
    pub(super) fn head(&self) -> Option<u32> {
        self.head
    }

    /// Continues from a generation that the kernel has just named. Earlier changes are not known.
    pub(super) fn restart(&mut self, generation: u32) {
        self.head = Some(generation);
    }

    /// Records that kplane committed a transaction on top of generation `head`.
    pub(super) fn committed(&mut self, head: u32) {
        self.head = Some(generation_after(head));
    }

    /// Records that a report was lost, so that anything may have happened.
    pub(super) fn lose(&mut self) {
        self.head = None;
        self.open = Default::default();
        self.drifted = [(); 4].map(|()| Some(Drift::anything_by(None)));
    }

    /// Adds one message; `own` is the port of kplane's socket.
    pub(super) fn take(&mut self, message: Message<'_>, own: u32) {
        if let Some(generation) = Generation::of(message) {
            self.end(&generation);
        } else if message.port != own
            && let Some(table) = table_of_ours(message)
        {
            let open = &mut self.open[index(table)];
            open.get_or_insert_default().take(table, message);
        }
    }

    /// Adds a whole transaction, as a kernel in memory reports it.
    pub(super) fn hear(&mut self, generation: &Generation, change: Option<(OneTable, Changed)>) {
        if let Some((table, changed)) = change {
            let drift = Drift { changed, by: None };
            self.open[index(table)].get_or_insert_default().append(drift);
        }
        self.end(generation);
    }

    fn end(&mut self, generation: &Generation) {
        let open = std::mem::take(&mut self.open);
        let Some(head) = self.head else {
            return;
        };
        if generation.number != generation_after(head) {
            // A transaction before the head is known already. One after the next generation leaves a gap.
            let is_old = head.wrapping_sub(generation.number) < u32::MAX / 2;
            if !is_old {
                self.lose();
            }
            return;
        }
        self.head = Some(generation.number);
        for (drifted, open) in self.drifted.iter_mut().zip(open) {
            if let Some(mut open) = open {
                open.by.clone_from(&generation.by);
                match drifted {
                    Some(before) => before.append(open),
                    None => *drifted = Some(open),
                }
            }
        }
    }

    /// Returns whether there are changes by other programs to a table that are not handled yet.
    pub(super) fn has_drifted(&self, table: OneTable) -> bool {
        self.drifted[index(table)].is_some()
    }

    /// Returns the changes by other programs to a table. The caller handles them.
    pub(super) fn take_drift(&mut self, table: OneTable) -> Option<Drift> {
        self.drifted[index(table)].take()
    }
}

/// Returns the table if a message is about one of kplane's.
fn table_of_ours(message: Message<'_>) -> Option<OneTable> {
    let table = message.attributes().get(TABLE_OF_ANY).and_then(Attribute::as_str);
    let family = Family::ALL.into_iter().find(|family| nfproto(*family) == message.family())?;
    let kind = TableKind::ALL.into_iter().find(|kind| table == Some(kind.name()))?;
    Some((kind, family))
}

#[cfg(test)]
mod tests;
