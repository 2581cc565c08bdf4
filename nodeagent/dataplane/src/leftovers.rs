//! Leftovers of kube-proxy, and of kplane, on a node: finds and removes them in the calling thread's network
//! namespace (I4). They cover all modes: nftables (E1), iptables of both kinds (C1, C2, C11), IPVS (D2-D4).
//!
//! **Invariants.** Finding changes nothing. Only objects with names of kube-proxy or kplane are removed;
//! kubelet's chains, and chains that rules of other programs need, stay. Nothing that a kube-proxy may still
//! need is removed: the caller checks [`running`] first. A step that fails is one named [`Problem`], and the
//! other steps are still done.
//!
//! Everything here blocks, so it must not run on the async runtime.

mod chains;
mod competing_proxy;
mod iptables;
mod objects;
mod problem;
mod proxy;
mod rules;

use std::collections::BTreeSet;
use std::fmt;

use kplane_model::{Cidr, Family};

use self::chains::Chains;
pub use self::competing_proxy::{CompetingProxy, Ports, running, shares_our_network};
use self::iptables::Rules;
pub use self::problem::Problem;
use self::proxy::ProxyObject;
use self::rules::Keeps;
pub use crate::backend::Serving;
use crate::backend::iptables::{Flavour, PacketCounts, remove_counters};
use crate::backend::ipvs::left;
use crate::backend::{Description, Kind, Settings};
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
pub struct Removal {
    /// The removed objects, human-readable, one entry each.
    pub removed: Vec<String>,
    /// Objects that could not be checked or removed.
    pub problems: Vec<Problem>,
}

/// Returns the test for the chains that belong to the serving backend.
fn keeps(serving: &Description) -> Keeps {
    match (serving.shares_names, serving.has_virtual_servers) {
        (false, _) => rules::KEEP_NONE,
        (true, false) => rules::of_iptables,
        (true, true) => rules::of_ipvs,
    }
}

/// One object, or several, removed in one step.
#[derive(Debug)]
enum Item {
    /// A table of nf_tables, of kube-proxy or of kplane.
    Table(Family, &'static str),
    Rules(Rules),
    Chains(Chains),
    VirtualServers(Vec<ServerKey>),
    Link,
    Set(String),
    Counters,
    /// A part of the userspace proxy.
    Proxy(ProxyObject),
}

/// Finds the leftovers of kube-proxy, and those of kplane's backends that do not serve any more. Without
/// leftovers, this costs a few questions to the kernel and, where iptables is installed, one listing of each
/// of its kinds.
pub fn find(serving: Serving) -> Leftovers {
    let mut found = find_but_ipvs(serving, keeps(serving.description), rules::KEEP_NONE);
    if !serving.description.has_virtual_servers {
        found.find_ipvs();
    }
    found
}

/// Finds the same leftovers, without those that connections through IPVS may need: virtual servers,
/// addresses, sets, and the chain that closes all other ports of these addresses.
pub fn find_sparing(serving: Serving) -> Leftovers {
    let backend = serving.description;
    let keeps = if backend.shares_names && !backend.has_virtual_servers {
        rules::of_iptables_and_closed_ports
    } else {
        rules::of_closed_ports
    };
    find_but_ipvs(serving, keeps, rules::of_closed_ports)
}

/// Finds all leftovers but those of IPVS. Chains stay that `keeps` names, in the kind of iptables of the
/// serving backend, or that `elsewhere` names, in the other kind.
fn find_but_ipvs(serving: Serving, keeps: Keeps, elsewhere: Keeps) -> Leftovers {
    let mut found = Leftovers::default();
    if serving.description.shares_names {
        found.find_our_tables();
    }
    found.find_tables();
    found.find_rules(serving.flavours, keeps, elsewhere);
    found
}

/// Finds kplane's objects of a mode. In modes iptables and ipvs, these have kube-proxy's names, so all
/// objects with these names count as kplane's.
pub fn ours(kind: Kind, settings: &Settings) -> Leftovers {
    let mut found = Leftovers::default();
    let backend = kind.describe();
    if !backend.programs_kernel && !backend.is_proxy {
        return found;
    }
    found.find_own_names();
    if backend.shares_names {
        found.find_rules([None; 2], rules::KEEP_NONE, rules::KEEP_NONE);
    }
    if backend.has_virtual_servers {
        found.find_ipvs();
        found.spare(&settings.ipvs.exclude_cidrs);
    }
    if backend.shares_names && PacketCounts::read() != PacketCounts::default() {
        found.items.push(Item::Counters);
    }
    found
}

/// Finds kplane's objects that have names of its own, in any mode.
pub fn own_names() -> Leftovers {
    let mut found = Leftovers::default();
    found.find_own_names();
    found
}

/// Finds all objects of kube-proxy, without those that count as [`ours`] in that mode.
pub fn kube_proxys(kind: Kind) -> Leftovers {
    let mut found = Leftovers::default();
    found.find_tables();
    if !kind.describe().shares_names {
        found.find_rules([None; 2], rules::KEEP_NONE, rules::KEEP_NONE);
    }
    if !kind.describe().has_virtual_servers {
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
pub fn node_ports() -> BTreeSet<u16> {
    iptables::listings().iter().flat_map(|text| rules::node_ports(text)).collect()
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
    if serving.description.has_virtual_servers || !objects::has_link() {
        return Ok(None);
    }
    let left::InUse {
        connections,
        addresses,
    } = left::servers()
        .and_then(|servers| left::drain(&servers, spare))
        .map_err(Problem::VirtualServers)?;
    let waits = connections > 0 || addresses > 0;
    Ok(waits.then(|| format!("{connections} connections through IPVS, {addresses} addresses")))
}

impl Leftovers {
    fn find_our_tables(&mut self) {
        self.find_table(objects::OUR_TABLE);
    }

    fn find_own_names(&mut self) {
        self.find_our_tables();
        self.find_table(objects::POLICY_TABLE);
        let (parts, problems) = ProxyObject::find();
        self.items.extend(parts.into_iter().map(Item::Proxy));
        self.problems.extend(problems);
    }

    fn find_tables(&mut self) {
        self.find_table(objects::TABLE);
    }

    fn find_table(&mut self, table: &'static str) {
        for family in Family::ALL {
            match objects::has_table(family, table) {
                Ok(true) => self.items.push(Item::Table(family, table)),
                Ok(false) => {}
                Err(error) => self.problems.push(Problem::Table {
                    table: objects::written(family, table),
                    reason: error.to_string(),
                }),
            }
        }
    }

    fn find_rules(&mut self, used: [Option<Flavour>; 2], keeps: Keeps, elsewhere: Keeps) {
        for family in Family::ALL {
            let keeps = |flavour| {
                if used[family as usize] == Some(flavour) { keeps } else { elsewhere }
            };
            match iptables::find(family, keeps(Flavour::Legacy)) {
                Ok(found) => found.into_iter().for_each(|rules| {
                    self.keep(Flavour::Legacy.name(family), &rules.table);
                    let is_empty = rules.table.is_empty();
                    self.items.extend((!is_empty).then_some(Item::Rules(rules)));
                }),
                Err(problem) => self.problems.push(problem),
            }
            match chains::find(family, keeps(Flavour::Nft)) {
                Ok(found) => found.into_iter().for_each(|chains| {
                    self.keep(Flavour::Nft.name(family), &chains.table);
                    let is_empty = chains.table.is_empty();
                    self.items.extend((!is_empty).then_some(Item::Chains(chains)));
                }),
                Err(source) => self.problems.push(Problem::Unread {
                    tool: Flavour::Nft.name(family),
                    source,
                }),
            }
        }
    }

    /// Names the chains of a table that stay because other programs need them.
    fn keep<Jump>(&mut self, tool: String, table: &rules::LeftoverTable<Jump>) {
        let chains: Vec<&str> = table.kept.iter().map(String::as_str).collect();
        self.problems.extend((!chains.is_empty()).then(|| Problem::Kept {
            tool,
            table: table.name,
            chains: chains.join(", "),
            only_masquerade: rules::only_masquerade(&table.kept),
        }));
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
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Returns whether a kube-proxy has written rules for Services. Its canary and empty chains are there long before,
    /// if it has to wait for the API server; mode nftables makes its table with all rules in it. Rules that this
    /// image has no program to list count as written.
    pub fn serve(&self) -> bool {
        let unseen = |problem: &Problem| matches!(problem, Problem::Unseen { .. });
        let serves = |item: &Item| match item {
            Item::Table(..) => true,
            Item::Rules(rules) => rules.table.serves,
            Item::Chains(chains) => chains.table.serves,
            _ => false,
        };
        self.problems.iter().any(unseen) || self.items.iter().any(serves)
    }

    /// Returns whether nothing to remove was found.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Removes everything, each step independent of the others. Safe to repeat.
    pub fn remove(self) -> Removal {
        let mut outcome = Removal {
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
            Self::Table(family, name) => table(family, name),
            Self::Rules(rules) => rules.remove(),
            Self::Chains(chains) => chains.remove().map_err(|reason| Problem::Chains {
                chains: chains.to_string(),
                reason,
            }),
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
            Self::Table(family, table) => {
                write!(f, "nftables table {}", objects::written(*family, table))
            }
            Self::Rules(rules) => rules.fmt(f),
            Self::Chains(chains) => chains.fmt(f),
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
