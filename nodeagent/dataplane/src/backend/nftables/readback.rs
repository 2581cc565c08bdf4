//! Reads kplane's table back from the kernel, and compares it with the table that kplane would write.

// Bytes and texts from outside must not end the program.
#![deny(clippy::indexing_slicing)]

use std::collections::BTreeMap;

use kplane_model::Family;

use super::affinity::Group;
use super::affinity_id::{AffinityId, GroupPart};
use super::decode::{Decoder, Foreign};
use super::element::{Element, added_to};
use super::schema::Set;
use super::structure::{GroupOp, push_groups, push_structure};
use super::table_kind::TableKind;
use super::tables::{OWNED, TableLayout};
use super::uapi::*;
use super::userdata;
use kplane_netlink::{
    Attribute, Attributes, Batch, Errno, Message, Messages, NetlinkError, NfSocket, PausedDump,
    Rejection, Request,
};

/// Most attempts to read chains, rules and sets while other programs' changes tear the lists.
const READ_ATTEMPTS: u32 = 50;

/// The result of comparing the chains, rules and sets of a family's table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StructureState {
    /// There is no table.
    Absent,
    /// The table is exactly that of [`push_structure`], with the objects of these groups of session affinity.
    Ours(Vec<Group>),
    /// The table differs. The text names a difference.
    Different(String),
}

/// The reason why the elements could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The exchange with the kernel failed.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The table holds something that kplane would never write there.
    #[error("{0}")]
    Different(String),
}

impl From<Foreign> for ReadError {
    fn from(foreign: Foreign) -> Self {
        Self::Different(foreign.to_string())
    }
}

/// Compares the kernel's chains, rules and sets with those that [`push_structure`] makes.
///
/// The function asks the kernel several questions, so the caller must make sure that no program changes
/// kplane's table meanwhile. Other programs may change their own tables. The kernel may tear lists then, and
/// only a result without a difference is trusted.
///
/// # Errors
/// [`NetlinkError`].
pub fn read_structure(
    socket: &mut NfSocket,
    family: Family,
    layout: impl Into<TableLayout>,
) -> Result<StructureState, NetlinkError> {
    let layout = layout.into();
    for _ in 0..READ_ATTEMPTS {
        let (state, torn) = read_structure_once(socket, family, layout)?;
        if !torn || matches!(state, StructureState::Ours(_)) {
            return Ok(state);
        }
    }
    Err(NetlinkError::KeepsChanging {
        what: "read chains",
        attempts: READ_ATTEMPTS,
    })
}

/// Returns the state, and whether any program changed rules during the read.
fn read_structure_once(
    socket: &mut NfSocket,
    family: Family,
    layout: TableLayout,
) -> Result<(StructureState, bool), NetlinkError> {
    let (number, name) = (nfproto(family), layout.table().name());
    let table = match socket.get(Request::new("read table", msg::GETTABLE, number, |w| {
        w.str(NFTA_TABLE_NAME, name);
    })) {
        Err(error) if error.errno() == Some(Errno::ENOENT) => {
            return Ok((StructureState::Absent, false));
        }
        table => table?,
    };
    let (sets, torn_sets) =
        socket.dump_through(Request::new("read sets", msg::GETSET, number, |w| {
            w.str(NFTA_SET_TABLE, name);
        }))?;
    // The kernel cannot filter chains by table.
    let (chains, torn_chains) =
        socket.dump_through(Request::new("read chains", msg::GETCHAIN, number, |_| {}))?;
    let (rules, torn_rules) =
        socket.dump_through(Request::new("read rules", msg::GETRULE, number, |w| {
            w.str(NFTA_RULE_TABLE, name);
        }))?;
    let actual = Structure::from_messages(name, [&table, &sets, &chains, &rules]);

    // The groups are read from their own comments. The comparison shows whether the comments are true.
    let groups = actual.groups();
    let mut batch = Batch::new();
    push_structure(&mut batch, family, layout);
    let make: Vec<GroupOp> = groups.iter().copied().map(GroupOp::Make).collect();
    push_groups(&mut batch, family, layout.settings(), &make);
    let expected = Structure::from_messages(name, [batch.as_bytes()]);
    let state = match expected.difference(&actual) {
        None => StructureState::Ours(groups),
        Some(reason) => StructureState::Different(reason),
    };
    Ok((state, torn_sets || torn_chains || torn_rules))
}

/// Reads all elements of all sets of Services, in no particular order. A set that no program changes is read
/// whole, whatever happens to other sets and tables meanwhile. The caller must make sure that no program
/// changed kplane's sets.
///
/// # Errors
/// [`ReadError::Different`] when a set is missing or holds elements that are not kplane's.
pub fn read_elements(socket: &mut NfSocket, family: Family) -> Result<Vec<Element>, ReadError> {
    read_elements_of(socket, family, TableKind::Services)
}

/// Reads all elements of a table, as [`read_elements`] does.
///
/// # Errors
/// As [`read_elements`].
pub fn read_elements_of(
    socket: &mut NfSocket,
    family: Family,
    table: TableKind,
) -> Result<Vec<Element>, ReadError> {
    let mut elements = Vec::new();
    for set in Set::all_of(table) {
        let (dump, _) = match socket.dump_through(list_request(family, set)) {
            Err(error) => return Err(unlisted(set, error)),
            Ok(dump) => dump,
        };
        elements.append(&mut decode_elements(&dump, family, set)?);
    }
    Ok(elements)
}

fn list_request(family: Family, set: Set) -> Request {
    Request::new("read elements", msg::GETSETELEM, nfproto(family), |w| {
        w.str(NFTA_SET_ELEM_LIST_TABLE, set.table().name());
        w.str(NFTA_SET_ELEM_LIST_SET, set.name());
    })
}

fn unlisted(set: Set, error: NetlinkError) -> ReadError {
    match error.errno() {
        Some(Errno::ENOENT) => ReadError::Different(format!("set {} is missing", set.name())),
        _ => error.into(),
    }
}

/// A list of a set's elements that is read piece by piece.
#[derive(Debug)]
pub(super) enum ListedSet {
    /// From the kernel.
    Kernel(KernelList),
    /// In one piece.
    Whole(Vec<Element>),
}

impl ListedSet {
    /// Returns the next elements, and whether these are the last ones.
    pub(super) fn next(&mut self) -> Result<(Vec<Element>, bool), ReadError> {
        match self {
            Self::Kernel(list) => list.next(),
            Self::Whole(elements) => Ok((std::mem::take(elements), true)),
        }
    }
}

/// A dump of one set, and what is decoded of it.
#[derive(Debug)]
pub(super) struct KernelList {
    set: Set,
    dump: PausedDump,
    decoder: Decoder,
}

impl KernelList {
    /// Begins to list a set.
    pub(super) fn begin(family: Family, set: Set) -> Result<Self, ReadError> {
        Ok(Self {
            set,
            dump: PausedDump::begin(list_request(family, set))?,
            decoder: Decoder::new(family, set),
        })
    }

    fn next(&mut self) -> Result<(Vec<Element>, bool), ReadError> {
        let decoder = &mut self.decoder;
        let mut foreign = None;
        let listed = self.dump.next(|message| {
            if let Err(found) = decode_message(decoder, message) {
                foreign.get_or_insert(found);
            }
        });
        let is_last = listed.map_err(|error| unlisted(self.set, error))?;
        if let Some(foreign) = foreign {
            return Err(foreign.into());
        }
        let elements = if is_last { decoder.finish()? } else { decoder.drain() };
        Ok((elements, is_last))
    }
}

/// Returns the element that the kernel refused to add to one of these sets, if it named one.
pub(super) fn refused_element(
    refused: &Rejection,
    family: Family,
    sets: impl IntoIterator<Item = Set>,
) -> Option<Element> {
    let set = sets.into_iter().find(|set| refused.what == added_to(*set))?;
    let mut decoder = Decoder::new(family, set);
    decoder.take(Attributes(refused.attribute.as_deref()?)).ok()?;
    decoder.finish().ok()?.pop()
}

/// Returns the elements in the kernel's answer to a dump of one set.
///
/// # Errors
/// [`ReadError::Different`] when there are elements that are not kplane's.
pub fn decode_elements(dump: &[u8], family: Family, set: Set) -> Result<Vec<Element>, ReadError> {
    let mut decoder = Decoder::new(family, set);
    for message in Messages(dump) {
        decode_message(&mut decoder, message)?;
    }
    Ok(decoder.finish()?)
}

fn decode_message(decoder: &mut Decoder, message: Message<'_>) -> Result<(), Foreign> {
    let list = match message.kind {
        msg::NEWSETELEM => message.attributes().get(NFTA_SET_ELEM_LIST_ELEMENTS),
        _ => None,
    };
    list.map_or(Ok(()), |list| decoder.take(list.children()))
}

/// Attributes that define an object. The kernel adds others: handles, counters.
const TABLE_ATTRIBUTES: &[u16] = &[NFTA_TABLE_USERDATA];
const SET_ATTRIBUTES: &[u16] = &[
    NFTA_SET_FLAGS,
    NFTA_SET_KEY_TYPE,
    NFTA_SET_KEY_LEN,
    NFTA_SET_DATA_TYPE,
    NFTA_SET_DATA_LEN,
    NFTA_SET_DESC,
    NFTA_SET_TIMEOUT,
    NFTA_SET_USERDATA,
    NFTA_SET_OBJ_TYPE,
    NFTA_SET_EXPR,
    NFTA_SET_EXPRESSIONS,
];
const CHAIN_ATTRIBUTES: &[u16] = &[
    NFTA_CHAIN_HOOK,
    NFTA_CHAIN_POLICY,
    NFTA_CHAIN_TYPE,
    NFTA_CHAIN_USERDATA,
];
const RULE_ATTRIBUTES: &[u16] = &[NFTA_RULE_EXPRESSIONS, NFTA_RULE_USERDATA];

/// A table's sets, chains and rules, from the operations of a batch or from the kernel's answers.
#[derive(Debug, Default)]
struct Structure<'a> {
    table: Option<Attributes<'a>>,
    sets: BTreeMap<&'a str, Attributes<'a>>,
    chains: BTreeMap<&'a str, Attributes<'a>>,
    /// The rules, by chain.
    rules: BTreeMap<&'a str, Vec<Attributes<'a>>>,
    /// Number of counters.
    counters: usize,
}

impl<'a> Structure<'a> {
    fn from_messages<const N: usize>(name: &str, parts: [&'a [u8]; N]) -> Self {
        let mut structure = Self::default();
        for message in parts.into_iter().flat_map(Messages) {
            structure.take(name, message.kind, message.attributes());
        }
        structure
    }

    /// Adds an object of the table of this name; other objects are skipped.
    fn take(&mut self, name: &str, kind: u16, object: Attributes<'a>) {
        let text = |kind| object.get(kind).and_then(Attribute::as_str);
        let ours = |kind| text(kind) == Some(name);
        match kind {
            msg::NEWTABLE if ours(NFTA_TABLE_NAME) => self.table = Some(object),
            msg::NEWSET if ours(NFTA_SET_TABLE) => {
                self.sets.extend(text(NFTA_SET_NAME).map(|name| (name, object)));
            }
            msg::NEWCHAIN if ours(NFTA_CHAIN_TABLE) => {
                self.chains.extend(text(NFTA_CHAIN_NAME).map(|name| (name, object)));
            }
            msg::NEWRULE if ours(NFTA_RULE_TABLE) => {
                if let Some(chain) = text(NFTA_RULE_CHAIN) {
                    self.rules.entry(chain).or_default().push(object);
                }
            }
            msg::NEWOBJ if ours(NFTA_OBJ_TABLE) => self.counters += 1,
            _ => {}
        }
    }

    /// Returns the groups of session affinity, as the comments of their rules describe them.
    fn groups(&self) -> Vec<Group> {
        self.chains
            .keys()
            .filter_map(|chain| {
                let id = AffinityId::from_name(chain, GroupPart::Keep)?;
                let rule = self.rules.get(chain)?.first()?;
                let comment = userdata::comment_of(rule.get(NFTA_RULE_USERDATA)?.payload)?;
                Group::from_comment(id, comment)
            })
            .collect()
    }

    /// Returns the first difference of `actual` from this structure.
    fn difference(&self, actual: &Self) -> Option<String> {
        let (Some(expected), Some(table)) = (self.table, actual.table) else {
            return Some("the table is missing".to_owned());
        };
        // The table of an earlier process has no owner.
        let flags = |table: Attributes<'_>| {
            let flags = table.get(NFTA_TABLE_FLAGS).and_then(Attribute::as_u32);
            flags.unwrap_or_default() & !OWNED
        };
        if !same_in(TABLE_ATTRIBUTES, expected, table) || flags(expected) != flags(table) {
            return Some("the table's flags or comment differ".to_owned());
        }
        let members = self.sets.len() + self.chains.len() + self.counters;
        difference("set", SET_ATTRIBUTES, &self.sets, &actual.sets)
            .or_else(|| difference("chain", CHAIN_ATTRIBUTES, &self.chains, &actual.chains))
            .or_else(|| self.rule_difference(actual))
            .or_else(|| {
                // The count includes objects and flow tables. kplane has its counters, which rules need, so they
                // are there.
                let used = table.get(NFTA_TABLE_USE).and_then(Attribute::as_u32);
                let more = used.is_some_and(|used| used as usize != members);
                more.then(|| "the table holds more than chains, sets and counters".to_owned())
            })
    }

    fn rule_difference(&self, actual: &Self) -> Option<String> {
        let none = Vec::new();
        self.chains.keys().find_map(|chain| {
            let expected = self.rules.get(chain).unwrap_or(&none);
            let found = actual.rules.get(chain).unwrap_or(&none);
            let mut pairs = expected.iter().zip(found);
            if let Some(index) = pairs.position(|(e, f)| !same_in(RULE_ATTRIBUTES, *e, *f)) {
                return Some(format!("rule {} of chain {chain} differs", index + 1));
            }
            let (expected, found) = (expected.len(), found.len());
            (expected != found).then(|| format!("chain {chain} has {found} rules, not {expected}"))
        })
    }
}

/// Returns the first named object that is missing, unknown or different.
fn difference(
    what: &str,
    attributes: &[u16],
    expected: &BTreeMap<&str, Attributes<'_>>,
    actual: &BTreeMap<&str, Attributes<'_>>,
) -> Option<String> {
    let wanted = expected.iter().find_map(|(name, object)| {
        let Some(found) = actual.get(name) else {
            return Some(format!("{what} {name} is missing"));
        };
        (!same_in(attributes, *object, *found)).then(|| format!("{what} {name} differs"))
    });
    let mut names = actual.keys();
    wanted.or_else(|| {
        let unknown = names.find(|name| !expected.contains_key(*name))?;
        Some(format!("{what} {unknown} is not kplane's"))
    })
}

/// Returns whether two objects agree in the attributes of these types.
fn same_in(kinds: &[u16], expected: Attributes<'_>, actual: Attributes<'_>) -> bool {
    kinds.iter().all(|kind| same_kind(*kind, expected, actual))
}

/// Returns whether two lists of attributes mean the same.
fn same(expected: Attributes<'_>, actual: Attributes<'_>) -> bool {
    let mut previous = None;
    let mut kinds = expected.chain(actual).map(|attribute| attribute.kind);
    // In a list, all entries have the same type, so they are compared once.
    kinds.all(|kind| previous.replace(kind) == Some(kind) || same_kind(kind, expected, actual))
}

/// Returns whether the attributes of one type are the same, in order. A missing attribute means the same as
/// one of zeros, because kernels differ in the attributes that they leave out. `expected` knows which
/// attributes are nested.
fn same_kind(kind: u16, expected: Attributes<'_>, actual: Attributes<'_>) -> bool {
    let is_zero = |payload: &[u8]| payload.iter().all(|byte| *byte == 0);
    let mut expected = expected.filter(|attribute| attribute.kind == kind);
    let mut actual = actual.filter(|attribute| attribute.kind == kind);
    loop {
        let equal = match (expected.next(), actual.next()) {
            (None, None) => return true,
            (Some(e), Some(a)) if e.nested => same(e.children(), a.children()),
            (Some(e), Some(a)) => e.payload == a.payload,
            (Some(only), None) | (None, Some(only)) => is_zero(only.payload),
        };
        if !equal {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kplane_netlink::AttributeWriter;

    /// Name of an expression, and type and value of its attributes.
    type Expression<'a> = (&'a str, &'a [(u16, u32)]);

    fn list(expressions: &[Expression<'_>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        AttributeWriter::new(&mut bytes).nest(NFTA_RULE_EXPRESSIONS, |w| {
            for (name, attributes) in expressions {
                w.nest(NFTA_LIST_ELEM, |w| {
                    w.str(NFTA_EXPR_NAME, name);
                    w.nest(NFTA_EXPR_DATA, |w| {
                        for (kind, value) in *attributes {
                            w.u32(*kind, *value);
                        }
                    });
                });
            }
        });
        bytes
    }

    #[test]
    fn attributes_are_compared_by_meaning() {
        let ours = list(&[("a", &[(1, 7), (2, 0)]), ("b", &[(1, 8)])]);
        let same_as = |other: &[u8]| {
            let same = same(Attributes(&ours), Attributes(other));
            assert_eq!(same, super::same(Attributes(other), Attributes(&ours)));
            same
        };
        let equal: [&[Expression<'_>]; 4] = [
            &[("a", &[(1, 7), (2, 0)]), ("b", &[(1, 8)])],
            &[("a", &[(2, 0), (1, 7)]), ("b", &[(1, 8)])],
            &[("a", &[(1, 7)]), ("b", &[(1, 8)])],
            &[("a", &[(1, 7)]), ("b", &[(1, 8), (5, 0)])],
        ];
        for expressions in equal {
            assert!(same_as(&list(expressions)), "{expressions:?}");
        }
        let other: [&[Expression<'_>]; 7] = [
            &[],
            &[("a", &[(1, 7)])],
            &[("b", &[(1, 8)]), ("a", &[(1, 7)])],
            &[("a", &[(1, 7)]), ("b", &[(1, 8)]), ("c", &[])],
            &[("a", &[(1, 7), (2, 1)]), ("b", &[(1, 8)])],
            &[("a", &[(1, 7)]), ("b", &[(1, 8), (5, 1)])],
            &[("a", &[(1, 7)]), ("b", &[(1, 9)])],
        ];
        for expressions in other {
            assert!(!same_as(&list(expressions)), "{expressions:?}");
        }
    }
}
