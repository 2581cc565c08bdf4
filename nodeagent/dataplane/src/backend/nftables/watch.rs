//! What others did to our tables, as the kernel tells of it.
//!
//! ```text
//! messages of a transaction ..., its end (generation N+1)  ->  Ledger
//!   of other tables: the generation that we know moves on, nothing else happens
//!   of ours:         `Meddling`: these elements, or anything
//!   a gap:           anything may have happened to both tables
//! ```

use std::collections::BTreeMap;
use std::fmt;

use kplane_model::Family;

use super::decode::Decoder;
use super::element::{Element, Key};
use super::schema::{Set, TABLE};
#[allow(
    clippy::wildcard_imports,
    reason = "constants named as in the kernel's headers"
)]
use super::uapi::*;
use kplane_netlink::{Attribute, Generation, Message, generation_after};

/// Elements that are followed one by one; when others change more of them, the table is read.
const MAX_ELEMENTS: usize = 1_000;

/// `NFTA_TABLE_NAME`, `NFTA_CHAIN_TABLE`, `NFTA_RULE_TABLE` and so on: the table is the first attribute of
/// every object.
const TABLE_OF_ANY: u16 = NFTA_TABLE_NAME;

/// What others did to one of our tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Meddling {
    pub(super) changed: Changed,
    /// Who did it last: program and thread.
    pub(super) by: Option<(u32, String)>,
}

/// How much of a table may be different.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Changed {
    /// These elements, each as it is now, or `None` for one that is gone.
    Elements(BTreeMap<(Set, Key), Option<Element>>),
    /// Chains, rules, sets, or more elements than are followed.
    Anything,
}

impl Default for Changed {
    fn default() -> Self {
        Self::Elements(BTreeMap::new())
    }
}

impl Meddling {
    /// It is not known what; as far as the kernel told it was this program.
    pub(super) fn anything_by(by: Option<(u32, String)>) -> Self {
        Self {
            changed: Changed::Anything,
            by,
        }
    }

    /// Adds what came after it.
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

    /// Adds what one message tells.
    fn take(&mut self, family: Family, message: Message<'_>) {
        let Changed::Elements(elements) = &mut self.changed else {
            return;
        };
        match changed_elements(family, message) {
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

impl fmt::Display for Meddling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.by {
            // Names are the other program's own words.
            Some((thread, name)) => write!(f, "by {} (process {thread})", name.escape_debug()),
            None => f.write_str("by an unknown process"),
        }
    }
}

/// Elements that a message tells of, and whether they are there now; `None` for anything else, and for
/// elements that can only be understood with the rest of their set.
fn changed_elements(family: Family, message: Message<'_>) -> Option<(bool, Vec<Element>)> {
    let there = match message.kind {
        msg::NEWSETELEM => true,
        msg::DELSETELEM => false,
        _ => return None,
    };
    let attributes = message.attributes();
    let name = attributes.get(NFTA_SET_ELEM_LIST_SET)?.as_str()?;
    let Some(set) = Set::all().find(|set| set.name() == name) else {
        // Of a set of session affinity, or of one that is not ours and was told of by itself.
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

/// Keeps account of transactions: is what we know of our tables still true?
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// The newest generation up to which every transaction was heard of; `None` after a gap.
    head: Option<u32>,
    /// By family: what others did that is not dealt with yet.
    meddled: [Option<Meddling>; 2],
    /// The same, of the transaction whose end has not come yet.
    open: [Option<Meddling>; 2],
}

impl Ledger {
    /// The generation up to which everything is known; `None` after a gap.
    pub(super) fn head(&self) -> Option<u32> {
        self.head
    }

    /// Goes on from a generation that the kernel has just named. Whatever happened before it is not known.
    pub(super) fn restart(&mut self, generation: u32) {
        self.head = Some(generation);
    }

    /// A transaction of ours was committed on top of generation `head`.
    pub(super) fn committed(&mut self, head: u32) {
        self.head = Some(generation_after(head));
    }

    /// Something was not heard: anything may have happened.
    pub(super) fn lose(&mut self) {
        self.head = None;
        self.open = [None, None];
        self.meddled = Family::ALL.map(|_| Some(Meddling::anything_by(None)));
    }

    /// Takes one message; `own` is the port of our socket.
    pub(super) fn take(&mut self, message: Message<'_>, own: u32) {
        if let Some(generation) = Generation::of(message) {
            self.end(&generation);
        } else if message.port != own
            && let Some(family) = family_of_ours(message)
        {
            let open = &mut self.open[family as usize];
            open.get_or_insert_default().take(family, message);
        }
    }

    fn end(&mut self, generation: &Generation) {
        let open = std::mem::take(&mut self.open);
        let Some(head) = self.head else {
            return;
        };
        if generation.number != generation_after(head) {
            // What came before the head was known with it; what comes after the next has a gap before it.
            let is_old = head.wrapping_sub(generation.number) < u32::MAX / 2;
            if !is_old {
                self.lose();
            }
            return;
        }
        self.head = Some(generation.number);
        for (meddled, open) in self.meddled.iter_mut().zip(open) {
            if let Some(mut open) = open {
                open.by.clone_from(&generation.by);
                match meddled {
                    Some(before) => before.append(open),
                    None => *meddled = Some(open),
                }
            }
        }
    }

    /// Whether others did anything to a family's table that is not dealt with.
    pub(super) fn is_meddled(&self, family: Family) -> bool {
        self.meddled[family as usize].is_some()
    }

    /// What others did to a family's table, to be dealt with by the caller.
    pub(super) fn take_meddling(&mut self, family: Family) -> Option<Meddling> {
        self.meddled[family as usize].take()
    }
}

/// The family of our table that a message is about.
fn family_of_ours(message: Message<'_>) -> Option<Family> {
    let table = message
        .attributes()
        .get(TABLE_OF_ANY)
        .and_then(Attribute::as_str);
    let mut families = Family::ALL.into_iter();
    let family = families.find(|family| nfproto(*family) == message.family())?;
    (table == Some(TABLE)).then_some(family)
}

#[cfg(test)]
mod tests;
