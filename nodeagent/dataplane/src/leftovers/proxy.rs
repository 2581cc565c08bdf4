//! What the userspace proxy leaves behind when its process ends: addresses, routing, chains of iptables with their IP sets,
//! and tables if the kernel knows no owners of tables.

use std::fmt;
use std::net::IpAddr;

use kplane_model::Family;
use kplane_netlink::{NetlinkError, Routes};

use super::{Problem, objects};
use crate::backend::iptables::Tool;
use crate::backend::nftables::{CAPTURE_TABLE, DIVERT_TABLES};
use crate::backend::userspace::{is_set_name, left_chains, remove_chain, remove_set};
use crate::proxy_address::{DELIVERY, proxy_address};

/// An object of the proxy.
#[derive(Clone, Debug)]
pub(super) enum Part {
    /// An nftables table.
    Table(Family, &'static str),
    /// The chain of iptables.
    Chain(Tool),
    /// An IP set of the chain.
    Set(String),
    /// The policy rule and the route for answers to clients' addresses.
    Delivery(Family),
    /// The address of its sockets on `lo`.
    Address(IpAddr),
}

impl Part {
    /// Finds all parts that are there.
    pub(super) fn find() -> (Vec<Self>, Vec<Problem>) {
        let (mut found, mut problems) = (Vec::new(), Vec::new());
        for family in Family::ALL {
            let tables = [CAPTURE_TABLE].into_iter().chain(DIVERT_TABLES);
            let tables = tables.map(|table| Self::Table(family, table));
            let rest = [Self::Delivery(family), Self::Address(proxy_address(family))];
            for part in tables.chain(rest) {
                match part.is_there() {
                    Ok(true) => found.push(part),
                    Ok(false) => {}
                    Err(source) => problems.push(part.problem(source)),
                }
            }
        }
        found.extend(
            Family::ALL
                .into_iter()
                .flat_map(left_chains)
                .map(Self::Chain),
        );
        match objects::set_names() {
            Ok(names) => {
                let own = names.into_iter().filter(|name| is_set_name(name));
                found.extend(own.map(Self::Set));
            }
            Err(source) => problems.push(Problem::Sets(source)),
        }
        (found, problems)
    }

    fn is_there(&self) -> Result<bool, NetlinkError> {
        match self {
            Self::Table(family, table) => objects::has_table(*family, table),
            Self::Chain(_) | Self::Set(_) => Ok(true),
            Self::Delivery(family) => Routes::open()?.delivers(*family, DELIVERY),
            Self::Address(ip) => objects::is_on_lo(*ip),
        }
    }

    /// Removes the part.
    pub(super) fn remove(self) -> Result<(), Problem> {
        match &self {
            Self::Chain(tool) => remove_chain(tool).map_err(|source| Problem::Restore {
                tool: tool.name().to_owned(),
                table: "nat",
                source,
            }),
            Self::Set(name) => remove_set(name).map_err(|source| self.problem(source)),
            Self::Table(family, name) => {
                let (family, name) = (*family, *name);
                objects::remove_table(family, name).map_err(|reason| Problem::Table {
                    table: objects::written(family, name),
                    reason,
                })
            }
            Self::Delivery(family) => Routes::open()
                .and_then(|mut routes| routes.end_delivery(*family, DELIVERY))
                .map_err(|source| self.problem(source)),
            Self::Address(ip) => {
                objects::remove_from_lo(*ip).map_err(|source| self.problem(source))
            }
        }
    }

    fn problem(&self, source: NetlinkError) -> Problem {
        match self {
            Self::Table(family, name) => Problem::Table {
                table: objects::written(*family, name),
                reason: source.to_string(),
            },
            Self::Chain(_) => Problem::Sets(source),
            Self::Set(name) => Problem::Set {
                name: name.clone(),
                source,
            },
            Self::Delivery(family) => Problem::Delivery {
                ip: word(*family),
                table: DELIVERY.table,
                source,
            },
            Self::Address(ip) => Problem::ProxyAddress { ip: *ip, source },
        }
    }
}

/// Returns how `ip` is called for a family.
fn word(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip",
        Family::V6 => "ip -6",
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Table(family, name) => {
                write!(f, "nftables table {}", objects::written(*family, name))
            }
            Self::Chain(tool) => write!(f, "{} chain KPLANE-CAPTURE in table nat", tool.name()),
            Self::Set(name) => write!(f, "IP set {name}"),
            Self::Delivery(family) => {
                write!(f, "{} rule to table {}", word(*family), DELIVERY.table)
            }
            Self::Address(ip) => write!(f, "address {ip} of lo"),
        }
    }
}
