//! kube-proxy's chains in legacy iptables, read and removed with the programs `iptables-legacy-save` and
//! `iptables-legacy-restore`.
//!
//! The kernel may have both kinds of iptables at once, and kube-proxy uses the one that kubelet used first. The chains of
//! the other kind are in nf_tables: `chains.rs`.

use std::fmt;

use kplane_model::Family;

use super::Problem;
use super::rules::{self, Keeps, LeftoverTable};
use crate::backend::iptables::{Flavour, Tool};
use crate::process::RunError;

/// Most attempts at a table that other programs change meanwhile.
const ATTEMPTS: u32 = 3;
/// The table without which kube-proxy's rules lead no packet.
const NAT: &str = "nat";

/// The rules that one tool found.
#[derive(Debug)]
pub(super) struct Rules {
    tool: Tool,
    keeps: Keeps,
    /// One of the tables.
    pub(super) table: LeftoverTable,
}

/// Finds kube-proxy's chains of a family, but those that `keeps` names. Creates nothing: when asked for all tables, the
/// programs print only those that exist.
///
/// # Errors
/// [`Problem`]: there may be chains, and the programs are missing, or fail.
pub(super) fn find(family: Family, keeps: Keeps) -> Result<Vec<Rules>, Problem> {
    if !Flavour::Legacy.may_have_rules(family) {
        return Ok(Vec::new());
    }
    let Some(tool) = Tool::find(Flavour::Legacy, family) else {
        let name = Flavour::Legacy.name(family);
        return if Flavour::Legacy.may_have_table(family, NAT) {
            Err(Problem::Unseen { name })
        } else {
            Ok(Vec::new())
        };
    };
    let tables = look(&tool, keeps).map_err(|source| Problem::Save {
        tool: tool.name().to_owned(),
        source,
    })?;
    Ok(tables
        .into_iter()
        .map(|table| Rules {
            tool: tool.clone(),
            keeps,
            table,
        })
        .collect())
}

/// Returns the listings of all programs that exist.
pub(super) fn listings() -> Vec<String> {
    let kinds = [Flavour::Legacy, Flavour::Nft];
    kinds
        .map(|flavour| Family::ALL.map(|family| (flavour, family)))
        .as_flattened()
        .iter()
        .filter(|(flavour, family)| flavour.may_have_rules(*family))
        .filter_map(|(flavour, family)| Tool::find(*flavour, *family)?.list().ok())
        .collect()
}

fn look(tool: &Tool, keeps: Keeps) -> Result<Vec<LeftoverTable>, RunError> {
    Ok(rules::parse(&tool.list()?, keeps))
}

impl Rules {
    /// Removes the chains in one transaction. Reads them again if other programs changed them meanwhile.
    pub(super) fn remove(self) -> Result<(), Problem> {
        let (tool, keeps, mut table) = (self.tool, self.keeps, self.table);
        for attempt in 1.. {
            if table.is_empty() {
                break;
            }
            match tool.restore(&table.removal()) {
                Ok(()) => break,
                Err(RunError::Failed { .. }) if attempt < ATTEMPTS => {}
                Err(source) => {
                    return Err(Problem::Restore {
                        tool: tool.name().to_owned(),
                        table: table.name,
                        source,
                    });
                }
            }
            let name = table.name;
            let tables = look(&tool, keeps).map_err(|source| Problem::Save {
                tool: tool.name().to_owned(),
                source,
            })?;
            match tables.into_iter().find(|t| t.name == name) {
                Some(now) => table = now,
                None => break,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.tool.name(), self.table)
    }
}
