//! The table's structure as operations of a batch: table, sets, counters, chains and rules, without elements.

use kplane_model::{Direction, Family, Protocol};

use super::affinity::{Group, MAX_CLIENTS};
use super::affinity_id::GroupPart;
use super::chain::{Chain, NftRule, counter_name};
use super::policy_schema::denied;
use super::rule::Expressions;
use super::schema::{Carries, Field, Set, TableSettings, key_len};
use super::table_kind::TableKind;
use super::tables::{OWNED, TableLayout};
use super::uapi::*;
use super::userdata;
use kplane_netlink::{AttributeWriter, Batch, Label, Operation};

/// nft's type numbers (`enum datatypes`), which the kernel stores for nft: 6 bits per part of a key.
const TYPE_BITS: u32 = 6;
const TYPE_INTEGER: u32 = 4;
const TYPE_IPADDR: u32 = 7;
const TYPE_IP6ADDR: u32 = 8;
const TYPE_INET_PROTOCOL: u32 = 12;
const TYPE_INET_SERVICE: u32 = 13;
const TYPE_CLASSID: u32 = 23;

/// Adds a table of a family: sets, chains and rules, no elements. The table must not exist, or must be
/// deleted earlier in the batch. Rules are added while the sets are empty, because the kernel would check
/// every element of a full set for every rule.
pub fn push_structure(batch: &mut Batch, family: Family, layout: impl Into<TableLayout>) {
    let layout = layout.into();
    push_structure_as(batch, family, layout, layout.table().name());
}

/// Adds the same table under another name.
pub(super) fn push_structure_as(
    batch: &mut Batch,
    family: Family,
    layout: TableLayout,
    name: &'static str,
) {
    let (kind, settings) = (layout.table(), layout.settings());
    let mut table = TableWriter {
        batch,
        family,
        name,
    };
    table.add(NLM_F_CREATE | NLM_F_EXCL, layout);
    for (id, set) in (1..).zip(Set::all_of(kind)) {
        table.add_set(set, id);
    }
    if kind == TableKind::Services && settings.refuse_loopback {
        for protocol in Protocol::ALL {
            table.add_counter(counter_name(protocol));
        }
    }
    if kind == TableKind::Policies {
        for direction in Direction::ALL {
            table.add_counter(denied(direction));
        }
    }
    let chains = layout.chains(family);
    for chain in &chains {
        table.add_chain(chain);
    }
    for chain in &chains {
        table.add_rules(chain, settings);
    }
}

/// An operation on the objects of a group of session affinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupOp {
    /// Creates the objects.
    Make(Group),
    /// Replaces the rules and keeps the clients.
    Rewrite(Group),
    /// Deletes the objects with their clients.
    Drop(Group),
}

impl GroupOp {
    fn made(&self) -> Option<&Group> {
        match self {
            Self::Make(group) => Some(group),
            Self::Rewrite(_) | Self::Drop(_) => None,
        }
    }

    fn rewritten(&self) -> Option<&Group> {
        match self {
            Self::Rewrite(group) => Some(group),
            Self::Make(_) | Self::Drop(_) => None,
        }
    }

    fn dropped(&self) -> Option<&Group> {
        match self {
            Self::Drop(group) => Some(group),
            Self::Make(_) | Self::Rewrite(_) => None,
        }
    }
}

/// Adds operations on groups. They belong before the elements that lead to new groups, and behind the
/// deletion of elements that lead to old groups. Groups of a ServicePort lead to each other. So all objects
/// are created before the rules, and deleted after them.
pub(super) fn push_groups(
    batch: &mut Batch,
    family: Family,
    settings: TableSettings,
    ops: &[GroupOp],
) {
    let mut table = TableWriter {
        batch,
        family,
        name: TableKind::Services.name(),
    };
    let made = || ops.iter().filter_map(GroupOp::made);
    let rewritten = || ops.iter().filter_map(GroupOp::rewritten);
    let dropped = || ops.iter().filter_map(GroupOp::dropped);
    for group in made() {
        for map in Group::maps(family) {
            table.add_clients(group, *map);
        }
        for chain in group.chains() {
            table.add_chain(&chain);
        }
    }
    for chain in made().flat_map(Group::chains) {
        table.add_rules(&chain, settings);
    }
    for chain in rewritten().flat_map(Group::chains) {
        table.flush_chain(&chain.name);
        table.add_rules(&chain, settings);
    }
    for chain in dropped().flat_map(Group::chains) {
        table.flush_chain(&chain.name);
    }
    for group in dropped() {
        for chain in group.chains() {
            table.delete_chain(&chain.name);
        }
        for map in Group::maps(family) {
            table.delete_set(&group.id.name(*map));
        }
    }
}

/// Deletes the table of a family's Services with everything in it. The table need not exist.
pub fn push_delete_table(batch: &mut Batch, family: Family) {
    push_delete(batch, family, TableSettings::default().into());
}

/// Deletes a table of a family with everything in it. The table need not exist.
pub(super) fn push_delete(batch: &mut Batch, family: Family, layout: TableLayout) {
    let mut table = TableWriter::new(batch, family, layout);
    if layout.flags() == OWNED {
        // A kernel with such tables can say this in one operation.
        return table.delete(msg::DESTROYTABLE);
    }
    // Adding an existing table is no error; deleting a missing one is.
    table.add(NLM_F_CREATE, layout);
    table.delete(msg::DELTABLE);
}

/// Makes the table that an earlier process left this socket's own. The kernel refuses that if the table never had an owner
/// (`EOPNOTSUPP`), or has one (`EPERM`).
pub(super) fn push_own(batch: &mut Batch, family: Family, layout: TableLayout) {
    TableWriter::new(batch, family, layout).add(0, layout);
}

/// Appends an operation that always fails, so that the kernel applies nothing of the batch.
pub(super) fn push_certain_failure(batch: &mut Batch, family: Family) {
    let name = "kplane-there-is-no-such-table";
    let mut table = TableWriter {
        batch,
        family,
        name,
    };
    table.delete(msg::DELTABLE);
}

/// Appends operations on one table to a batch.
struct TableWriter<'a> {
    batch: &'a mut Batch,
    family: Family,
    name: &'static str,
}

impl<'a> TableWriter<'a> {
    fn new(batch: &'a mut Batch, family: Family, layout: TableLayout) -> Self {
        let name = layout.table().name();
        Self {
            batch,
            family,
            name,
        }
    }

    fn push(
        &mut self,
        (action, object): (&'static str, &'static str),
        kind: u16,
        flags: u16,
        fill: impl FnOnce(&mut AttributeWriter<'_>),
    ) {
        let operation = Operation {
            label: Label { action, object },
            kind,
            flags,
            family: nfproto(self.family),
        };
        self.batch.push(operation, fill);
    }

    fn add(&mut self, flags: u16, layout: TableLayout) {
        let (name, comment) = (self.name, layout.table().comment());
        self.push(("add table", name), msg::NEWTABLE, flags, |w| {
            w.str(NFTA_TABLE_NAME, name);
            w.u32(NFTA_TABLE_FLAGS, layout.flags());
            w.bytes(NFTA_TABLE_USERDATA, &userdata::comment(comment));
        });
    }

    fn delete(&mut self, kind: u16) {
        let name = self.name;
        self.push(("delete table", name), kind, 0, |w| {
            w.str(NFTA_TABLE_NAME, name);
        });
    }

    fn add_set(&mut self, set: Set, id: u32) {
        let (table, family, fields) = (self.name, self.family, set.fields());
        let flags = NLM_F_CREATE | NLM_F_EXCL;
        self.push(("add set", set.name()), msg::NEWSET, flags, |w| {
            w.str(NFTA_SET_TABLE, table);
            w.str(NFTA_SET_NAME, set.name());
            w.u32(NFTA_SET_FLAGS, set_flags(set));
            w.u32(NFTA_SET_KEY_TYPE, key_type(fields, family));
            w.u32(NFTA_SET_KEY_LEN, length(key_len(fields, family)));
            match set.carries() {
                Carries::Nothing => {}
                Carries::Endpoint => put_data(w, &[Field::Destination, Field::Port], family),
                Carries::Number => put_data(w, &[Field::Number], family),
                Carries::Chain => {
                    w.u32(NFTA_SET_DATA_TYPE, NFT_DATA_VERDICT);
                    w.u32(NFTA_SET_DATA_LEN, VERDICT_LEN);
                }
            }
            if set_flags(set) & NFT_SET_CONCAT != 0 {
                w.nest(NFTA_SET_DESC, |w| put_field_lengths(w, fields, family));
            }
            if let Some(room) = set.room() {
                w.nest(NFTA_SET_DESC, |w| w.u32(NFTA_SET_DESC_SIZE, room));
            }
            // The kernel requires this id. It serves for references within the batch, which kplane makes by
            // name.
            w.u32(NFTA_SET_ID, id);
            w.bytes(NFTA_SET_USERDATA, &userdata::set(set, family));
            if let Set::Policy(of) = set
                && of.counts()
            {
                w.nest(NFTA_SET_EXPR, put_counter);
            }
        });
    }

    fn add_counter(&mut self, name: &'static str) {
        let table = self.name;
        let flags = NLM_F_CREATE | NLM_F_EXCL;
        self.push(("add counter", name), msg::NEWOBJ, flags, |w| {
            w.str(NFTA_OBJ_TABLE, table);
            w.str(NFTA_OBJ_NAME, name);
            w.u32(NFTA_OBJ_TYPE, NFT_OBJECT_COUNTER);
            w.nest(NFTA_OBJ_DATA, put_zero);
        });
    }

    /// Adds a map that packets write to.
    fn add_clients(&mut self, group: &Group, map: GroupPart) {
        let (table, family, name) = (self.name, self.family, group.id.name(map));
        let data: &[Field] = match (map, family) {
            (GroupPart::Ports, _) => &[Field::Port],
            (_, Family::V4) => &[Field::Destination, Field::Port],
            (_, Family::V6) => &[Field::Destination],
        };
        let flags = NLM_F_CREATE | NLM_F_EXCL;
        let object = ("add map", "of session affinity");
        self.push(object, msg::NEWSET, flags, |w| {
            w.str(NFTA_SET_TABLE, table);
            w.str(NFTA_SET_NAME, &name);
            w.u32(NFTA_SET_FLAGS, NFT_SET_MAP | NFT_SET_TIMEOUT | NFT_SET_EVAL);
            w.u32(NFTA_SET_KEY_TYPE, key_type(&[Field::Source], family));
            w.u32(NFTA_SET_KEY_LEN, length(key_len(&[Field::Source], family)));
            put_data(w, data, family);
            w.nest(NFTA_SET_DESC, |w| w.u32(NFTA_SET_DESC_SIZE, MAX_CLIENTS));
            w.u32(NFTA_SET_ID, 0);
            w.bytes(NFTA_SET_USERDATA, &userdata::clients(data, family));
        });
    }

    fn delete_set(&mut self, name: &str) {
        let table = self.name;
        let object = ("delete map", "of session affinity");
        self.push(object, msg::DELSET, 0, |w| {
            w.str(NFTA_SET_TABLE, table);
            w.str(NFTA_SET_NAME, name);
        });
    }

    fn delete_chain(&mut self, name: &str) {
        let table = self.name;
        let object = ("delete chain", "of session affinity");
        self.push(object, msg::DELCHAIN, 0, |w| {
            w.str(NFTA_CHAIN_TABLE, table);
            w.str(NFTA_CHAIN_NAME, name);
        });
    }

    fn flush_chain(&mut self, name: &str) {
        let table = self.name;
        let object = ("delete rules of", "session affinity");
        self.push(object, msg::DELRULE, 0, |w| {
            w.str(NFTA_RULE_TABLE, table);
            w.str(NFTA_RULE_CHAIN, name);
        });
    }

    fn add_chain(&mut self, chain: &Chain) {
        let table = self.name;
        let flags = NLM_F_CREATE | NLM_F_EXCL;
        let object = ("add chain", chain.label());
        self.push(object, msg::NEWCHAIN, flags, |w| {
            w.str(NFTA_CHAIN_TABLE, table);
            w.str(NFTA_CHAIN_NAME, &chain.name);
            if let Some(hook) = chain.hook {
                w.str(NFTA_CHAIN_TYPE, hook.chain_type);
                w.u32(NFTA_CHAIN_POLICY, NF_ACCEPT);
                w.nest(NFTA_CHAIN_HOOK, |w| {
                    w.u32(NFTA_HOOK_HOOKNUM, hook.point as u32);
                    w.bytes(NFTA_HOOK_PRIORITY, &hook.priority.to_be_bytes());
                });
            }
            if let Some(text) = chain.comment {
                w.bytes(NFTA_CHAIN_USERDATA, &userdata::comment(text));
            }
        });
    }

    fn add_rules(&mut self, chain: &Chain, settings: TableSettings) {
        for rule in chain.rules.iter().filter(|rule| rule.is_in(settings)) {
            self.add_rule(chain, rule, settings);
        }
    }

    fn add_rule(&mut self, chain: &Chain, rule: &NftRule, settings: TableSettings) {
        let (table, family) = (self.name, self.family);
        let flags = NLM_F_CREATE | NLM_F_APPEND;
        let object = ("add rule to", chain.label());
        self.push(object, msg::NEWRULE, flags, |w| {
            w.str(NFTA_RULE_TABLE, table);
            w.str(NFTA_RULE_CHAIN, &chain.name);
            w.nest(NFTA_RULE_EXPRESSIONS, |list| {
                let mut expressions = Expressions {
                    list,
                    family,
                    settings,
                };
                for step in &rule.steps {
                    expressions.step(*step);
                }
            });
            if let Some(text) = &rule.comment {
                w.bytes(NFTA_RULE_USERDATA, &userdata::comment(text));
            }
        });
    }
}

/// Writes the expression of which each element gets one of its own.
fn put_counter(w: &mut AttributeWriter<'_>) {
    w.str(NFTA_EXPR_NAME, "counter");
    w.nest(NFTA_EXPR_DATA, put_zero);
}

fn put_zero(w: &mut AttributeWriter<'_>) {
    w.bytes(NFTA_COUNTER_BYTES, &[0; 8]);
    w.bytes(NFTA_COUNTER_PACKETS, &[0; 8]);
}

/// Writes the type of the data of a map's elements.
fn put_data(w: &mut AttributeWriter<'_>, fields: &[Field], family: Family) {
    w.u32(NFTA_SET_DATA_TYPE, key_type(fields, family));
    w.u32(NFTA_SET_DATA_LEN, length(data_len(fields, family)));
}

/// Writes the lengths of the fields of a concatenation of ranges.
fn put_field_lengths(w: &mut AttributeWriter<'_>, fields: &[Field], family: Family) {
    w.nest(NFTA_SET_DESC_CONCAT, |w| {
        for field in fields {
            w.nest(NFTA_LIST_ELEM, |w| {
                w.u32(NFTA_SET_FIELD_LEN, length(field.len(family)));
            });
        }
    });
}

/// Returns the flags of a set. Concatenations have the flag for concatenations only if they hold intervals
/// (kernel.md 1.11).
fn set_flags(set: Set) -> u32 {
    let map = if set.is_map() { NFT_SET_MAP } else { 0 };
    let interval = match (set.is_interval(), set.fields().len()) {
        (false, _) => 0,
        (true, 1) => NFT_SET_INTERVAL,
        (true, _) => NFT_SET_INTERVAL | NFT_SET_CONCAT,
    };
    map | interval
}

fn key_type(fields: &[Field], family: Family) -> u32 {
    fields.iter().fold(0, |types, field| {
        let field_type = match (field, family) {
            (Field::Source | Field::Destination, Family::V4) => TYPE_IPADDR,
            (Field::Source | Field::Destination, Family::V6) => TYPE_IP6ADDR,
            (Field::Protocol, _) => TYPE_INET_PROTOCOL,
            (Field::Port, _) => TYPE_INET_SERVICE,
            (Field::Index, _) => TYPE_INTEGER,
            (Field::Number | Field::NetworkNumber, _) => TYPE_CLASSID,
        };
        types << TYPE_BITS | field_type
    })
}

/// Returns the length of an element's data. A single value is not padded; each of several values is.
fn data_len(fields: &[Field], family: Family) -> usize {
    match fields {
        [field] => field.len(family),
        _ => key_len(fields, family),
    }
}

/// Converts a length for the kernel. All of kplane's lengths are below 64.
fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}
