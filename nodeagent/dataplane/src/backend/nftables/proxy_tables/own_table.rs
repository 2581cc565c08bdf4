//! What the agent's own small tables have in common: they replace what an earlier process left, and end with their socket.

use kplane_model::Family;
use kplane_netlink::{AttributeWriter, Batch, CommitError, Errno, Label, NfSocket, Operation};

use super::super::element::Key;
use super::super::uapi::*;
use super::super::userdata;
use super::expressions::encode_key;

/// nft's type numbers (`enum datatypes`).
const TYPE_IPADDR: u32 = 7;
const TYPE_IP6ADDR: u32 = 8;

/// A chain with a hook, but for its rules.
pub(super) struct BaseChain {
    pub(super) name: &'static str,
    pub(super) kind: &'static str,
    /// The hook's number in `enum nf_inet_hooks`.
    pub(super) hook: u32,
    pub(super) priority: i32,
}

impl BaseChain {
    pub(super) const fn new(
        name: &'static str,
        kind: &'static str,
        hook: u32,
        priority: i32,
    ) -> Self {
        Self {
            name,
            kind,
            hook,
            priority,
        }
    }
}

/// A table of one family.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnTable {
    pub(super) family: Family,
    pub(super) name: &'static str,
}

impl OwnTable {
    /// Returns an operation on the table or a part of it.
    pub(super) fn operation(self, action: &'static str, kind: u16, flags: u16) -> Operation {
        Operation {
            label: Label {
                action,
                object: self.name,
            },
            kind,
            flags,
            family: nfproto(self.family),
        }
    }

    /// Adds the operations that create the table, in place of one that an earlier process left.
    pub(super) fn push_new(self, batch: &mut Batch, flags: u32, comment: &str) {
        self.push_absent(batch);
        let add = self.operation("add table", msg::NEWTABLE, NLM_F_CREATE);
        batch.push(add, |w| {
            w.str(NFTA_TABLE_NAME, self.name);
            w.u32(NFTA_TABLE_FLAGS, flags);
            w.bytes(NFTA_TABLE_USERDATA, &userdata::comment(comment));
        });
    }

    /// Adds the operations that delete the table, if it is there.
    pub(super) fn push_absent(self, batch: &mut Batch) {
        let name = |w: &mut AttributeWriter<'_>| w.str(NFTA_TABLE_NAME, self.name);
        let add = self.operation("add table", msg::NEWTABLE, NLM_F_CREATE);
        // Adding an existing table is no error; deleting a missing one is.
        batch.push(add, name);
        batch.push(self.operation("delete table", msg::DELTABLE, 0), name);
    }

    /// Adds the operation that creates a set: its name, flags, and the type and length of its keys. `id` is unique in the
    /// batch, and `more` adds other attributes.
    pub(super) fn push_set(
        self,
        batch: &mut Batch,
        id: u32,
        (set, flags, (key_type, key_len)): (&str, u32, (u32, u32)),
        more: impl FnOnce(&mut AttributeWriter<'_>),
    ) {
        let add = self.operation("add set", msg::NEWSET, NLM_F_CREATE);
        batch.push(add, |w| {
            w.str(NFTA_SET_TABLE, self.name);
            w.str(NFTA_SET_NAME, set);
            w.u32(NFTA_SET_FLAGS, flags);
            w.u32(NFTA_SET_KEY_TYPE, key_type);
            w.u32(NFTA_SET_KEY_LEN, key_len);
            w.u32(NFTA_SET_ID, id);
            more(w);
        });
    }

    /// Adds the operation that creates a chain.
    pub(super) fn push_chain(self, batch: &mut Batch, chain: &BaseChain) {
        let add = self.operation("add chain", msg::NEWCHAIN, NLM_F_CREATE);
        batch.push(add, |w| {
            w.str(NFTA_CHAIN_TABLE, self.name);
            w.str(NFTA_CHAIN_NAME, chain.name);
            w.str(NFTA_CHAIN_TYPE, chain.kind);
            w.u32(NFTA_CHAIN_POLICY, NF_ACCEPT);
            w.nest(NFTA_CHAIN_HOOK, |w| {
                w.u32(NFTA_HOOK_HOOKNUM, chain.hook);
                w.bytes(NFTA_HOOK_PRIORITY, &chain.priority.to_be_bytes());
            });
        });
    }

    /// Adds the operation that appends a rule to a chain.
    pub(super) fn push_rule(
        self,
        batch: &mut Batch,
        chain: &str,
        expressions: impl FnOnce(&mut AttributeWriter<'_>),
    ) {
        let flags = NLM_F_CREATE | NLM_F_APPEND;
        batch.push(self.operation("add rule", msg::NEWRULE, flags), |w| {
            w.str(NFTA_RULE_TABLE, self.name);
            w.str(NFTA_RULE_CHAIN, chain);
            w.nest(NFTA_RULE_EXPRESSIONS, expressions);
        });
    }

    /// Adds an operation on elements of a set, if there are any.
    pub(super) fn push_elements(
        self,
        batch: &mut Batch,
        operation: Operation,
        set: &str,
        keys: impl Iterator<Item = Key>,
    ) {
        let mut keys = keys.peekable();
        if keys.peek().is_none() {
            return;
        }
        batch.push(operation, |w| {
            w.str(NFTA_SET_ELEM_LIST_TABLE, self.name);
            w.str(NFTA_SET_ELEM_LIST_SET, set);
            w.nest(NFTA_SET_ELEM_LIST_ELEMENTS, |list| {
                keys.for_each(|key| encode_key(list, key));
            });
        });
    }

    /// Adds an operation that deletes all elements of a set.
    pub(super) fn push_flush(self, batch: &mut Batch, set: &str) {
        let flush = self.operation("delete elements", msg::DELSETELEM, 0);
        // Without elements, the message means all of them.
        batch.push(flush, |w| {
            w.str(NFTA_SET_ELEM_LIST_TABLE, self.name);
            w.str(NFTA_SET_ELEM_LIST_SET, set);
        });
    }
}

/// Creates a table that ends with the socket, from the operations for its flags. A kernel that does not know owners gets a
/// table without one. Returns whether the table has an owner.
///
/// # Errors
/// The kernel's refusal.
pub(super) fn commit(
    socket: &mut NfSocket,
    structure: impl Fn(u32) -> Batch,
) -> Result<bool, CommitError> {
    match socket.commit(structure(NFT_TABLE_F_OWNER).seal(None)) {
        Err(error) if matches!(error.errno(), Some(Errno::EOPNOTSUPP | Errno::EINVAL)) => {
            socket.commit(structure(0).seal(None)).map(|()| false)
        }
        result => result.map(|()| true),
    }
}

/// Returns the type and the length of keys that are addresses.
pub(super) fn address_key(family: Family) -> (u32, u32) {
    family.pick((TYPE_IPADDR, 4), (TYPE_IP6ADDR, 16))
}
