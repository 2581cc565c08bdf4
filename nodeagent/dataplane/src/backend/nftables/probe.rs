//! Checks once at start whether this kernel accepts kplane's table, without leaving a trace.

use std::collections::BTreeSet;

use kplane_model::Family;

use super::schema::TableSettings;
use super::structure::{push_certain_failure, push_structure_as};
use super::tables::TableLayout;
use super::uapi::{NFTA_EXPR_NAME, NFTA_LIST_ELEM};
use kplane_netlink::{Attributes, Batch, CommitError, Errno, NetlinkError, NfSocket, Rejection};

/// Name of the table, which is never really created.
const PROBE_TABLE: &str = "kplane-probe";

/// The reason why this machine cannot run kplane's table, in one line.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The agent may not change rules.
    #[error(
        "not permitted to change nf_tables: CAP_NET_ADMIN is missing in the user namespace that \
         owns this network namespace"
    )]
    NoPrivilege,
    /// The kernel has no nf_tables at all.
    #[error("this kernel has no nf_tables (CONFIG_NF_TABLES, module nf_tables): {0}")]
    NoNfTables(Errno),
    /// The kernel refuses parts of the table.
    #[error("this kernel's nf_tables refuses parts of the {family} table: {missing}")]
    Missing {
        /// The family whose table is refused.
        family: Family,
        /// The refused parts, with the module that provides each if it is known.
        missing: String,
    },
    /// The exchange with the kernel failed.
    #[error("cannot try out nf_tables: {0}")]
    Commit(#[from] CommitError),
}

/// Checks the whole table, for these families, in this thread's network namespace. The transaction creates
/// the table under another name and then fails on purpose, so that the kernel checks everything and applies
/// nothing.
///
/// # Errors
/// [`ProbeError`] names the missing part.
pub fn probe(families: &[Family]) -> Result<(), ProbeError> {
    let mut socket = NfSocket::open().map_err(|error| match error {
        NetlinkError::Open(errno) => ProbeError::NoNfTables(errno),
        error => CommitError::OutcomeUnknown(error.errno().unwrap_or(Errno::EIO)).into(),
    })?;
    for family in families {
        probe_family(&mut socket, *family)?;
    }
    Ok(())
}

/// Returns whether the kernel can log denied packets for a program. One that cannot refuses the rule that would.
pub fn can_log() -> bool {
    let layout = TableLayout::Policies {
        output: false,
        log: true,
        owned: false,
    };
    // Whatever else is wrong, the table itself will say so.
    try_out(layout).is_none_or(|rejections| {
        rejections
            .iter()
            .filter_map(refused_expression)
            .all(|expression| expression != "log")
    })
}

/// Returns whether tables can have an owner that they outlive.
pub(super) fn can_own() -> bool {
    let layout = TableLayout::Policies {
        output: false,
        log: false,
        owned: true,
    };
    // The table is the first operation.
    try_out(layout).is_some_and(|rejections| rejections.iter().all(|refused| refused.index > 0))
}

/// Tries out a table, as [`probe`] does, and returns what the kernel refused; `None` if the attempt failed.
fn try_out(layout: TableLayout) -> Option<Vec<Rejection>> {
    let mut batch = Batch::new();
    push_structure_as(&mut batch, Family::V4, layout, PROBE_TABLE);
    push_certain_failure(&mut batch, Family::V4);
    match NfSocket::open().ok()?.commit(batch.seal(None)) {
        Err(CommitError::Rejected { rejections, .. }) => Some(rejections),
        _ => None,
    }
}

fn probe_family(socket: &mut NfSocket, family: Family) -> Result<(), ProbeError> {
    let mut batch = Batch::new();
    let layout = TableSettings::default().into();
    push_structure_as(&mut batch, family, layout, PROBE_TABLE);
    push_certain_failure(&mut batch, family);
    let failure = batch.len() - 1;
    match socket.commit(batch.seal(None)) {
        Err(CommitError::Rejected { rejections, .. }) => {
            let wanted = |rejection: &&Rejection| rejection.index != failure;
            let missing: Vec<&Rejection> = rejections.iter().filter(wanted).collect();
            match missing[..] {
                [] => Ok(()),
                _ => Err(ProbeError::Missing {
                    family,
                    missing: describe(&missing),
                }),
            }
        }
        Err(CommitError::Refused(Errno::EPERM)) => Err(ProbeError::NoPrivilege),
        Err(CommitError::Refused(Errno::EOPNOTSUPP)) => {
            Err(ProbeError::NoNfTables(Errno::EOPNOTSUPP))
        }
        Err(error) => Err(error.into()),
        // This would mean that the table of the certain failure existed and was deleted. That is impossible,
        // and harmless.
        Ok(()) => Ok(()),
    }
}

/// Describes the refused expressions, or else the refused sets and chains, each once.
fn describe(rejections: &[&Rejection]) -> String {
    let named = rejections.iter().filter_map(|rejection| {
        let expression = refused_expression(rejection)?;
        Some(format!("expression {expression}{}", module(expression)))
    });
    let expressions: BTreeSet<String> = named.collect();
    // If a chain is refused, each of its rules fails too, without an expression as the cause.
    let others = rejections
        .iter()
        .filter(|rejection| {
            refused_expression(rejection).is_none()
                && !rejection.what.action.starts_with("add rule")
        })
        .map(|rejection| format!("{} ({})", rejection.what, rejection.errno));
    let mut missing: Vec<String> = expressions.into_iter().chain(others).collect();
    if missing.is_empty() {
        let first = rejections.iter().take(1);
        missing.extend(first.map(|r| format!("{} ({})", r.what, r.errno)));
    }
    missing.join(", ")
}

/// Returns the name of the expression that the kernel marked as the cause, if it marked one.
fn refused_expression(rejection: &Rejection) -> Option<&str> {
    let attribute = Attributes(rejection.attribute.as_deref()?).next()?;
    let expression = Some(attribute).filter(|a| a.kind == NFTA_LIST_ELEM)?;
    expression.children().get(NFTA_EXPR_NAME)?.as_str()
}

/// Returns the kernel module of an expression.
fn module(expression: &str) -> &'static str {
    match expression {
        "numgen" => " (module nft_numgen)",
        "fib" => " (modules nft_fib_ipv4, nft_fib_ipv6)",
        "nat" => " (modules nft_nat, nft_chain_nat)",
        "masq" => " (module nft_masq)",
        "reject" => " (modules nft_reject_ipv4, nft_reject_ipv6)",
        "ct" => " (module nft_ct)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kplane_netlink::{AttributeWriter, Label};

    fn rejection(action: &'static str, expression: Option<&str>) -> Rejection {
        let attribute = expression.map(|name| {
            let mut bytes = Vec::new();
            AttributeWriter::new(&mut bytes).nest(NFTA_LIST_ELEM, |w| w.str(NFTA_EXPR_NAME, name));
            bytes
        });
        Rejection {
            index: 1,
            what: Label {
                action,
                object: "x",
            },
            errno: Errno::ENOENT,
            reason: None,
            attribute,
        }
    }

    #[test]
    fn each_missing_part_is_named_once() {
        let (numgen, fib) = (Some("numgen"), Some("fib"));
        let rejections = [
            rejection("add set", None),
            rejection("add rule to", numgen),
            rejection("add rule to", fib),
            rejection("add rule to", numgen),
            rejection("add rule to", None),
        ];
        let text = describe(&rejections.iter().collect::<Vec<_>>());
        assert_eq!(
            text,
            "expression fib (modules nft_fib_ipv4, nft_fib_ipv6), \
             expression numgen (module nft_numgen), \
             add set x (ENOENT: No such file or directory)"
        );
        let only = rejection("add rule to", None);
        assert_eq!(
            describe(&[&only]),
            "add rule to x (ENOENT: No such file or directory)"
        );
    }
}
