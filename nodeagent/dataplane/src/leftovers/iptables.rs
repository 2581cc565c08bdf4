//! kube-proxy's chains in iptables, read and removed with the programs `iptables-save` and
//! `iptables-restore`.
//!
//! The kernel may have both kinds of iptables at once, and kube-proxy uses the one that kubelet used first.
//! So every kind is checked for which there is a program.

use std::fmt;

use kplane_model::Family;

use super::Problem;
use super::objects;
use super::rules::{self, Keeps, Table};
use crate::backend::iptables::{Flavour, Tool};
use crate::process::RunError;

/// Most attempts at a table that other programs change meanwhile.
const ATTEMPTS: u32 = 3;

/// The rules that one tool found.
#[derive(Debug)]
pub(super) struct Rules {
    tool: Tool,
    keeps: Keeps,
    /// One of the tables.
    table: Table,
}

/// Finds kube-proxy's chains of a family. Creates nothing: when asked for all tables, the programs print only
/// those that exist.
///
/// Chains stay that `keeps` names, in the kind of iptables in which a kplane backend serves (`used`), or that
/// `elsewhere` names, in the other kind.
pub(super) fn find(
    family: Family,
    used: Option<Flavour>,
    keeps: Keeps,
    elsewhere: Keeps,
) -> (Vec<Rules>, Vec<Problem>) {
    let (mut rules, mut problems) = (Vec::new(), Vec::new());
    for flavour in [Flavour::Legacy, Flavour::Nft] {
        if !flavour.may_have_rules(family) {
            continue;
        }
        let Some(tool) = Tool::find(flavour, family) else {
            problems.extend(unseen(flavour, family));
            continue;
        };
        let keeps = match used == Some(tool.flavour()) {
            true => keeps,
            false => elsewhere,
        };
        match look(&tool, keeps) {
            Ok(tables) => {
                for table in tables {
                    problems.extend(kept(&tool, &table));
                    if !table.is_empty() {
                        let tool = tool.clone();
                        rules.push(Rules { tool, keeps, table });
                    }
                }
            }
            Err(source) => problems.push(Problem::Save {
                tool: tool.name().to_owned(),
                source,
            }),
        }
    }
    (rules, problems)
}

/// Returns the listings of all programs that exist.
pub(super) fn listings() -> Vec<String> {
    let kinds = [Flavour::Legacy, Flavour::Nft];
    let all = kinds.map(|flavour| Family::ALL.map(|family| (flavour, family)));
    let used = all
        .as_flattened()
        .iter()
        .filter(|(flavour, family)| flavour.may_have_rules(*family));
    used.filter_map(|(flavour, family)| Tool::find(*flavour, *family)?.list().ok())
        .collect()
}

/// Returns the problem if there is no program to list the chains.
fn unseen(flavour: Flavour, family: Family) -> Option<Problem> {
    let program = format!("{}-save", flavour.name(family));
    match flavour {
        Flavour::Legacy => Some(Problem::Unseen { program }),
        // These chains are in nf_tables, which the agent can read itself.
        Flavour::Nft => match objects::has_iptables_chains(family) {
            Ok(false) => None,
            Ok(true) | Err(_) => Some(Problem::NoTool { program }),
        },
    }
}

fn look(tool: &Tool, keeps: Keeps) -> Result<Vec<Table>, RunError> {
    Ok(rules::parse(&tool.list()?, keeps))
}

fn kept(tool: &Tool, table: &Table) -> Option<Problem> {
    let chains: Vec<&str> = table.kept.iter().map(String::as_str).collect();
    (!chains.is_empty()).then(|| Problem::Kept {
        tool: tool.name().to_owned(),
        table: table.name,
        chains: chains.join(", "),
    })
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
