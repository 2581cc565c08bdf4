//! kube-proxy's chains of the iptables that is a layer above nf_tables, read and removed over netlink. So no program is
//! needed, and one transaction removes all chains of a table, or none.

use std::fmt;
use std::ops::ControlFlow;

use kplane_model::Family;
use kplane_netlink::{
    Attribute, Batch, CommitError, Errno, Label, Message, Messages, NetlinkError, NfSocket,
    Operation, Request, nfproto,
};

use super::rules::{Keeps, LeftoverTable, TABLES, TableReader};
use crate::backend::iptables::Flavour;
use crate::backend::nftables::uapi::{
    NFT_GOTO, NFT_JUMP, NFTA_CHAIN_NAME, NFTA_CHAIN_TABLE, NFTA_DATA_VERDICT, NFTA_EXPR_DATA,
    NFTA_EXPR_NAME, NFTA_IMMEDIATE_DATA, NFTA_RULE_CHAIN, NFTA_RULE_EXPRESSIONS, NFTA_RULE_HANDLE,
    NFTA_RULE_TABLE, NFTA_VERDICT_CHAIN, NFTA_VERDICT_CODE, msg,
};

/// Most attempts at a table while other programs change rules.
const ATTEMPTS: u32 = 10;

/// A rule of a built-in chain: the chain, and the number that the kernel gave the rule.
type RuleHandle = (String, [u8; 8]);

/// The chains of one table.
#[derive(Debug)]
pub(super) struct Chains {
    family: Family,
    keeps: Keeps,
    pub(super) table: LeftoverTable<RuleHandle>,
}

/// Finds kube-proxy's chains of a family, but those that `keeps` names.
///
/// # Errors
/// [`NetlinkError`]. A kernel without nf_tables has no chains.
pub(super) fn find(family: Family, keeps: Keeps) -> Result<Vec<Chains>, NetlinkError> {
    Ok(read(family, keeps)?
        .into_iter()
        .map(|table| Chains {
            family,
            keeps,
            table,
        })
        .collect())
}

/// Reads the tables that have such chains. Rules are read only where there are such chains.
fn read(family: Family, keeps: Keeps) -> Result<Vec<LeftoverTable<RuleHandle>>, NetlinkError> {
    let mut listings = TABLES.map(|table| TableReader::new(table, keeps));
    let request = Request::new("list chains", msg::GETCHAIN, nfproto(family), |_| {});
    let chains = match NfSocket::open()?.dump(request) {
        // This kernel has no nf_tables.
        Err(error) if error.errno() == Some(Errno::EINVAL) => return Ok(Vec::new()),
        chains => chains?,
    };
    for message in Messages(&chains) {
        let text = |kind| message.attributes().get(kind).and_then(Attribute::as_str);
        if let (Some(table), Some(chain)) = (text(NFTA_CHAIN_TABLE), text(NFTA_CHAIN_NAME))
            && let Some(listing) = listings.iter_mut().find(|listing| listing.name() == table)
        {
            listing.chain(chain);
        }
    }
    for listing in listings.iter_mut().filter(|listing| !listing.is_empty()) {
        let name = listing.name();
        let request = Request::new("list rules", msg::GETRULE, nfproto(family), |w| {
            w.str(NFTA_RULE_TABLE, name);
        });
        // The transaction is refused if anything has changed meanwhile.
        NfSocket::open()?.dump_until(request, |message| {
            add_rule(listing, message);
            ControlFlow::Continue(())
        })?;
    }
    Ok(listings.into_iter().filter_map(TableReader::finish).collect())
}

fn add_rule(listing: &mut TableReader<RuleHandle>, rule: Message<'_>) {
    let attributes = rule.attributes();
    let from = attributes.get(NFTA_RULE_CHAIN).and_then(Attribute::as_str);
    let Some(from) = from else {
        return;
    };
    let handle = attributes.get(NFTA_RULE_HANDLE);
    let handle = handle.and_then(|handle| <[u8; 8]>::try_from(handle.payload).ok());
    let steps = attributes.get(NFTA_RULE_EXPRESSIONS).into_iter();
    for (verb, to) in steps.flat_map(Attribute::children).filter_map(leads_to) {
        let jump = if verb == NFT_JUMP { handle } else { None };
        listing.rule(from, to, jump.map(|handle| (from.to_owned(), handle)));
    }
}

/// Returns the verb and the chain of a step that leads to another chain.
fn leads_to(step: Attribute<'_>) -> Option<(i32, &str)> {
    step.children()
        .get(NFTA_EXPR_NAME)?
        .as_str()
        .filter(|name| *name == "immediate")?;
    let data = step.children().get(NFTA_EXPR_DATA)?.children().get(NFTA_IMMEDIATE_DATA)?;
    let verdict = data.children().get(NFTA_DATA_VERDICT)?.children();
    let verb = verdict.get(NFTA_VERDICT_CODE)?.as_u32()?.cast_signed();
    let chain = verdict.get(NFTA_VERDICT_CHAIN)?.as_str()?;
    [NFT_JUMP, NFT_GOTO].contains(&verb).then_some((verb, chain))
}

impl Chains {
    /// Removes the chains in one transaction. Reads them again if other programs change rules meanwhile.
    ///
    /// # Errors
    /// The reason why the chains are still there.
    pub(super) fn remove(&self) -> Result<(), String> {
        let text = |error: NetlinkError| error.to_string();
        let name = self.table.name;
        for _ in 0..ATTEMPTS {
            let mut socket = NfSocket::open().map_err(text)?;
            let generation = socket.generation().map_err(text)?;
            let tables = read(self.family, self.keeps).map_err(text)?;
            let Some(table) = tables.iter().find(|table| table.name == name && !table.is_empty())
            else {
                return Ok(());
            };
            match socket.commit(removal(self.family, table).seal(Some(generation))) {
                Err(CommitError::GenerationMoved) => {}
                committed => return committed.map_err(|error| error.to_string()),
            }
        }
        Err("other programs change rules all the time".to_owned())
    }
}

/// Returns the operations that remove jumps and chains. All chains are emptied first, so that none refers to another.
fn removal(family: Family, table: &LeftoverTable<RuleHandle>) -> Batch {
    let mut batch = Batch::new();
    let operation = |action, object, kind| Operation {
        label: Label { action, object },
        kind,
        flags: 0,
        family: nfproto(family),
    };
    for (chain, handle) in &table.jumps {
        batch.push(operation("delete jump", table.name, msg::DELRULE), |w| {
            w.str(NFTA_RULE_TABLE, table.name);
            w.str(NFTA_RULE_CHAIN, chain);
            w.bytes(NFTA_RULE_HANDLE, handle);
        });
    }
    for chain in &table.chains {
        batch.push(operation("empty chain", table.name, msg::DELRULE), |w| {
            w.str(NFTA_RULE_TABLE, table.name);
            w.str(NFTA_RULE_CHAIN, chain);
        });
    }
    for chain in &table.chains {
        batch.push(operation("delete chain", table.name, msg::DELCHAIN), |w| {
            w.str(NFTA_CHAIN_TABLE, table.name);
            w.str(NFTA_CHAIN_NAME, chain);
        });
    }
    batch
}

impl fmt::Display for Chains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", Flavour::Nft.name(self.family), self.table)
    }
}
