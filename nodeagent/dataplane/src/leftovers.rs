//! Leftovers of kube-proxy, and of kplane, on a node: finds and removes them in the calling thread's network
//! namespace (I4). They cover all modes: nftables (E1), iptables of both kinds (C1, C2, C11), IPVS (D2-D4).
//!
//! **Invariants.** Finding changes nothing. Only objects with names of kube-proxy or kplane are removed;
//! kubelet's chains, and chains that rules of other programs need, stay. Nothing that a kube-proxy may still
//! need is removed: the caller checks [`running`] first. A step that fails is one named [`Problem`], and the
//! other steps are still done.
//!
//! Everything here blocks, so it must not run on the async runtime.

mod iptables;
mod objects;
mod proxy;
mod rival;
mod rules;

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use kplane_model::{Cidr, Family};

use self::iptables::Rules;
use self::proxy::Part;
pub use self::rival::{Ports, Rival, running};
use self::rules::Keeps;
pub use crate::backend::Serving;
use crate::backend::iptables::{Flavour, PacketCounts, remove_counters};
use crate::backend::ipvs::left;
use crate::backend::{Kind, Settings};
pub use crate::process::RunError;
use kplane_netlink::NetlinkError;
use kplane_netlink::ipvs::ServerKey;

/// Leftovers that were found, in the order of their removal: rules before the objects to which they refer.
#[derive(Debug, Default)]
pub struct Leftovers {
    items: Vec<Item>,
    problems: Vec<Problem>,
}

/// The outcome of a removal.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The removed objects, human-readable, one entry each.
    pub removed: Vec<String>,
    /// Objects that could not be checked or removed.
    pub problems: Vec<Problem>,
}

/// An object that is still there, or may be, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The nftables table.
    #[error("nftables table {table}: {reason}; run `nft delete table {table}`")]
    Table {
        /// Family and name, as `nft` writes them.
        table: String,
        /// The reason.
        reason: String,
    },
    /// The rules could not be listed.
    #[error("{tool}-save {source}; remove kube-proxy's chains with `kube-proxy --cleanup`")]
    Save {
        /// The kind of iptables.
        tool: String,
        /// The reason.
        source: RunError,
    },
    /// A table's chains could not be removed.
    #[error(
        "{tool}-restore for table {table} {source}; remove kube-proxy's chains with \
         `kube-proxy --cleanup`"
    )]
    Restore {
        /// The kind of iptables.
        tool: String,
        /// The table.
        table: &'static str,
        /// The reason.
        source: RunError,
    },
    /// Chains stay because other programs need them.
    #[error(
        "{tool} table {table}: {chains} kept, because rules of other programs jump to them; see \
         `{tool}-save -t {table}`"
    )]
    Kept {
        /// The kind of iptables.
        tool: String,
        /// The table.
        table: &'static str,
        /// Names of the chains.
        chains: String,
    },
    /// There are chains, but no program to remove them.
    #[error(
        "kube-proxy has chains in iptables, but there is no {program}: install iptables, or run \
         `kube-proxy --cleanup`"
    )]
    NoTool {
        /// The missing program.
        program: String,
    },
    /// There may be chains, but no program to list them.
    #[error(
        "legacy iptables has tables that may contain kube-proxy's chains, but there is no \
         {program} to list them: install iptables, or run `kube-proxy --cleanup`"
    )]
    Unseen {
        /// The missing program.
        program: String,
    },
    /// The virtual servers.
    #[error("IPVS: {0}; run `ipvsadm --clear`")]
    VirtualServers(NetlinkError),
    /// The link with the addresses of all Services.
    #[error("link kube-ipvs0: {0}; run `ip link delete kube-ipvs0`")]
    Link(NetlinkError),
    /// The address of the userspace proxy.
    #[error("address {ip} of lo: {source}; run `ip address delete {ip} dev lo`")]
    ProxyAddress {
        /// The address.
        ip: IpAddr,
        /// The reason.
        source: NetlinkError,
    },
    /// The delivery of answers to the userspace proxy.
    #[error(
        "{ip} rule to table {table}: {source}; run `{ip} rule delete table {table}` and `{ip} route flush table {table}`"
    )]
    Delivery {
        /// `ip`, with the option for the family.
        ip: &'static str,
        /// Number of the routing table.
        table: u32,
        /// The reason.
        source: NetlinkError,
    },
    /// The IP sets could not be listed.
    #[error("IP sets: {0}; see `ipset list -name`")]
    Sets(NetlinkError),
    /// One IP set.
    #[error("IP set {name}: {source}; is a rule still using it? Run `ipset destroy {name}`")]
    Set {
        /// Name of the set.
        name: String,
        /// The reason.
        source: NetlinkError,
    },
}

/// Returns the kind of iptables in which the serving backend has its chains.
fn used(serving: Serving, family: Family) -> Option<Flavour> {
    match serving {
        Serving::Nftables => None,
        Serving::Iptables(flavours) | Serving::Ipvs(flavours) => flavours[family as usize],
    }
}

/// Returns the test for the chains that belong to the serving backend.
fn keeps(serving: Serving) -> Keeps {
    match serving {
        Serving::Nftables => rules::KEEP_NONE,
        Serving::Iptables(_) => rules::of_iptables,
        Serving::Ipvs(_) => rules::of_ipvs,
    }
}

/// One object, or several, removed in one step.
#[derive(Debug)]
enum Item {
    OurTable(Family),
    Table(Family),
    Rules(Rules),
    VirtualServers(Vec<ServerKey>),
    Link,
    Set(String),
    Counters,
    /// A part of the userspace proxy.
    Proxy(Part),
}

/// Finds the leftovers of kube-proxy, and those of kplane's backends that do not serve any more. Without
/// leftovers, this costs a few questions to the kernel and, where iptables is installed, one listing of each
/// of its kinds.
#[must_use]
pub fn find(serving: Serving) -> Leftovers {
    let mut found = find_but_ipvs(serving, keeps(serving), rules::KEEP_NONE);
    if !matches!(serving, Serving::Ipvs(_)) {
        found.find_ipvs();
    }
    found
}

/// Finds the same leftovers, without those that connections through IPVS may need: virtual servers,
/// addresses, sets, and the chain that closes all other ports of these addresses.
#[must_use]
pub fn find_sparing(serving: Serving) -> Leftovers {
    let keeps = match serving {
        Serving::Iptables(_) => rules::of_iptables_and_closed_ports,
        Serving::Nftables | Serving::Ipvs(_) => rules::of_closed_ports,
    };
    find_but_ipvs(serving, keeps, rules::of_closed_ports)
}

/// Finds all leftovers but those of IPVS. Chains stay that `keeps` names, in the kind of iptables of the
/// serving backend, or that `elsewhere` names, in the other kind.
fn find_but_ipvs(serving: Serving, keeps: Keeps, elsewhere: Keeps) -> Leftovers {
    let mut found = Leftovers::default();
    if !matches!(serving, Serving::Nftables) {
        found.find_our_tables();
    }
    found.find_tables();
    found.find_rules(|family| used(serving, family), keeps, elsewhere);
    found
}

/// Finds kplane's objects of a mode. In modes iptables and ipvs, these have kube-proxy's names, so all
/// objects with these names count as kplane's.
#[must_use]
pub fn ours(kind: Kind, settings: &Settings) -> Leftovers {
    let mut found = Leftovers::default();
    if kind == Kind::Noop {
        return found;
    }
    found.find_our_tables();
    if kind.describe().shares_names {
        found.find_rules(|_| None, rules::KEEP_NONE, rules::KEEP_NONE);
    }
    if kind == Kind::Ipvs {
        found.find_ipvs();
        found.spare(&settings.ipvs.exclude_cidrs);
    }
    if kind.describe().shares_names && PacketCounts::read() != PacketCounts::default() {
        found.items.push(Item::Counters);
    }
    let (parts, problems) = Part::find();
    found.items.extend(parts.into_iter().map(Item::Proxy));
    found.problems.extend(problems);
    found
}

/// Finds all objects of kube-proxy, without those that count as [`ours`] in that mode.
#[must_use]
pub fn kube_proxys(kind: Kind) -> Leftovers {
    let mut found = Leftovers::default();
    found.find_tables();
    if !kind.describe().shares_names {
        found.find_rules(|_| None, rules::KEEP_NONE, rules::KEEP_NONE);
    }
    if kind != Kind::Ipvs {
        found.find_ipvs();
    }
    found
}

/// Returns all nftables tables of this network namespace, including those of other programs, as `nft` writes them.
///
/// # Errors
/// [`NetlinkError`].
pub fn all_tables() -> Result<Vec<String>, NetlinkError> {
    let mut all = Vec::new();
    for (family, word) in [(Family::V4, "ip"), (Family::V6, "ip6")] {
        let names = objects::table_names(family)?.into_iter();
        all.extend(names.map(|name| format!("{word} {name}")));
    }
    Ok(all)
}

/// Returns the node ports that rules of kube-proxy's mode iptables serve, if there is a program to list them.
#[must_use]
pub fn node_ports() -> BTreeSet<u16> {
    iptables::listings()
        .iter()
        .flat_map(|text| rules::node_ports(text))
        .collect()
}

/// Removes the leftovers of IPVS mode that no established TCP connection needs, and keeps new connections
/// from the rest. Returns the connections and addresses that remain, if there are any. The caller then calls
/// this again later; until it returns `None`, only the leftovers of [`find_sparing`] may be removed. `spare`
/// says for each family whether addresses of Services may stay on the node for connections. If not,
/// connections to them are cut.
///
/// # Errors
/// [`Problem`]: it is not known what connections need, so all of it stays.
pub fn spare_connections(serving: Serving, spare: [bool; 2]) -> Result<Option<String>, Problem> {
    if matches!(serving, Serving::Ipvs(_)) || !objects::has_link() {
        return Ok(None);
    }
    let left = left::servers().and_then(|servers| left::drain(&servers, spare));
    let left::InUse {
        connections,
        addresses,
    } = left.map_err(Problem::VirtualServers)?;
    let waits = connections > 0 || addresses > 0;
    Ok(waits.then(|| format!("{connections} connections through IPVS, {addresses} addresses")))
}

impl Leftovers {
    fn find_our_tables(&mut self) {
        self.find_table(objects::OUR_TABLE, Item::OurTable);
    }

    fn find_tables(&mut self) {
        self.find_table(objects::TABLE, Item::Table);
    }

    fn find_table(&mut self, table: &str, item: fn(Family) -> Item) {
        for family in Family::ALL {
            match objects::has_table(family, table) {
                Ok(true) => self.items.push(item(family)),
                Ok(false) => {}
                Err(error) => self.problems.push(Problem::Table {
                    table: objects::written(family, table),
                    reason: error.to_string(),
                }),
            }
        }
    }

    fn find_rules(
        &mut self,
        used: impl Fn(Family) -> Option<Flavour>,
        keeps: Keeps,
        elsewhere: Keeps,
    ) {
        for family in Family::ALL {
            let (rules, problems) = iptables::find(family, used(family), keeps, elsewhere);
            self.items.extend(rules.into_iter().map(Item::Rules));
            self.problems.extend(problems);
        }
    }

    /// Excludes virtual servers on these addresses from the removal (D8).
    fn spare(&mut self, ranges: &[Cidr]) {
        self.items.retain_mut(|item| match item {
            Item::VirtualServers(servers) => {
                servers.retain(|key| !ranges.iter().any(|range| range.contains(key.ip)));
                !servers.is_empty()
            }
            _ => true,
        });
    }

    fn find_ipvs(&mut self) {
        // The link marks IPVS mode: without it, all virtual servers belong to other programs.
        if objects::has_link() {
            match left::servers() {
                Ok(servers) if servers.is_empty() => {}
                Ok(servers) => self.items.push(Item::VirtualServers(servers)),
                // Without link and sets, nothing would show which virtual servers are kube-proxy's.
                Err(error) => return self.problems.push(Problem::VirtualServers(error)),
            }
            self.items.push(Item::Link);
        }
        match objects::sets() {
            Ok(sets) => self.items.extend(sets.into_iter().map(Item::Set)),
            Err(error) => self.problems.push(Problem::Sets(error)),
        }
    }

    /// Returns the names of all leftovers, human-readable, one entry each.
    pub fn names(&self) -> impl Iterator<Item = String> {
        self.items.iter().map(ToString::to_string)
    }

    /// Returns the objects that could not be checked.
    #[must_use]
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Returns whether nothing to remove was found.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Removes everything, each step independent of the others. Safe to repeat.
    #[must_use]
    pub fn remove(self) -> Outcome {
        let mut outcome = Outcome {
            removed: Vec::new(),
            problems: self.problems,
        };
        for item in self.items {
            let name = item.to_string();
            match item.remove() {
                Ok(()) => outcome.removed.push(name),
                Err(problem) => outcome.problems.push(problem),
            }
        }
        outcome
    }
}

/// Formats all leftovers on one line.
impl fmt::Display for Leftovers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, item) in self.items.iter().enumerate() {
            write!(f, "{}{item}", if index > 0 { "; " } else { "" })?;
        }
        Ok(())
    }
}

impl Item {
    fn remove(self) -> Result<(), Problem> {
        let table = |family, name| {
            objects::remove_table(family, name).map_err(|reason| Problem::Table {
                table: objects::written(family, name),
                reason,
            })
        };
        match self {
            Self::OurTable(family) => table(family, objects::OUR_TABLE),
            Self::Table(family) => table(family, objects::TABLE),
            Self::Rules(rules) => rules.remove(),
            Self::VirtualServers(servers) => {
                left::remove(&servers).map_err(Problem::VirtualServers)
            }
            Self::Link => objects::remove_link().map_err(Problem::Link),
            Self::Set(name) => {
                objects::remove_set(&name).map_err(|source| Problem::Set { name, source })
            }
            Self::Proxy(part) => part.remove(),
            Self::Counters => {
                // Nothing depends on counters: one that another program still uses stays.
                remove_counters();
                Ok(())
            }
        }
    }
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OurTable(family) => write!(
                f,
                "nftables table {}",
                objects::written(*family, objects::OUR_TABLE)
            ),
            Self::Table(family) => write!(
                f,
                "nftables table {}",
                objects::written(*family, objects::TABLE)
            ),
            Self::Rules(rules) => rules.fmt(f),
            Self::VirtualServers(servers) => {
                write!(f, "{} IPVS virtual servers", servers.len())
            }
            Self::Link => write!(f, "link {}", objects::LINK),
            Self::Set(name) => write!(f, "IP set {name}"),
            Self::Counters => f.write_str("packet counters (nfacct)"),
            Self::Proxy(part) => part.fmt(f),
        }
    }
}
