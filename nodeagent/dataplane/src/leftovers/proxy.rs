//! What the userspace proxy leaves behind when its process ends: addresses, routing, and tables if the kernel knows no owners
//! of tables.

use std::fmt;
use std::net::IpAddr;

use kplane_model::Family;
use kplane_netlink::{NetlinkError, Routes};

use super::{Problem, objects};
use crate::proxy_address::{
    CAPTURE_TABLE, DELIVERY, DEPARTED_TABLE, DIVERT_TABLES, PRESTOP_TABLE, proxy_address,
};

#[derive(Clone, Copy, Debug)]
pub(super) enum ProxyObject {
    /// An nftables table.
    Table(Family, &'static str),
    /// The policy rule and the route for answers to clients' addresses.
    Delivery(Family),
    /// The address of its sockets on `lo`.
    Address(IpAddr),
}

impl ProxyObject {
    /// Finds all parts that are there.
    pub(super) fn find() -> (Vec<Self>, Vec<Problem>) {
        let (mut found, mut problems) = (Vec::new(), Vec::new());
        for family in Family::ALL {
            let tables = [CAPTURE_TABLE, PRESTOP_TABLE, DEPARTED_TABLE]
                .into_iter()
                .chain(DIVERT_TABLES)
                .map(|table| Self::Table(family, table));
            let rest = [Self::Delivery(family), Self::Address(proxy_address(family))];
            for part in tables.chain(rest) {
                match part.is_there() {
                    Ok(true) => found.push(part),
                    Ok(false) => {}
                    Err(source) => problems.push(part.problem(source)),
                }
            }
        }
        (found, problems)
    }

    fn is_there(self) -> Result<bool, NetlinkError> {
        match self {
            Self::Table(family, table) => objects::has_table(family, table),
            Self::Delivery(family) => Routes::open()?.delivers(family, DELIVERY),
            Self::Address(ip) => objects::is_on_lo(ip),
        }
    }

    /// Removes the part.
    pub(super) fn remove(self) -> Result<(), Problem> {
        match self {
            Self::Table(family, name) => {
                objects::remove_table(family, name).map_err(|reason| Problem::Table {
                    table: objects::written(family, name),
                    reason,
                })
            }
            Self::Delivery(family) => Routes::open()
                .and_then(|mut routes| routes.end_delivery(family, DELIVERY))
                .map_err(|source| self.problem(source)),
            Self::Address(ip) => objects::remove_from_lo(ip).map_err(|source| self.problem(source)),
        }
    }

    fn problem(self, source: NetlinkError) -> Problem {
        match self {
            Self::Table(family, name) => Problem::Table {
                table: objects::written(family, name),
                reason: source.to_string(),
            },
            Self::Delivery(family) => Problem::Delivery {
                ip: word(family),
                table: DELIVERY.table,
                source,
            },
            Self::Address(ip) => Problem::ProxyAddress { ip, source },
        }
    }
}

/// Returns how `ip` is called for a family.
fn word(family: Family) -> &'static str {
    family.pick("ip", "ip -6")
}

impl fmt::Display for ProxyObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Table(family, name) => {
                write!(f, "nftables table {}", objects::written(*family, name))
            }
            Self::Delivery(family) => {
                write!(f, "{} rule to table {}", word(*family), DELIVERY.table)
            }
            Self::Address(ip) => write!(f, "address {ip} of lo"),
        }
    }
}
