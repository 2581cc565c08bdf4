//! How many flows lead to endpoints, counted in the kernel's tables for `kpctl drain-status`. Changes nothing.
//!
//! Entries are counted as they come, so a table of any size takes no memory. Where one endpoint is wanted, the kernel
//! selects its entries; for more, one list of all is cheaper than a walk through the table for each.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant, SystemTime};

use kplane_model::{Family, Protocol};
use kplane_netlink::NetlinkError;
use kplane_netlink::conntrack::{AddressPorts, Selected, Stage, Tracked};

use crate::backend::Kind;
use crate::chain;
use crate::conntrack::{Filter, open};
use crate::ipvs_table::{self, Connection};

/// An endpoint, or all ports of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowTarget {
    /// The address.
    pub ip: IpAddr,
    /// Protocol and port; `None` = all.
    pub port: Option<(Protocol, u16)>,
}

/// The flows that lead to one target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Flows that this node's rules lead there.
    pub flows: u64,
    /// Flows to the target's own address.
    pub direct: u64,
    /// Age of the newest and of the oldest of `flows`, if the kernel keeps times.
    pub ages: Option<(Duration, Duration)>,
}

/// The flows of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// One for each target, in the same order.
    pub counts: Vec<Count>,
    /// The table that has the flows through Services.
    pub table: &'static str,
    /// Number of entries that were read.
    pub read: u64,
}

/// The reason why flows cannot be counted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CountError {
    #[error(
        "cannot read conntrack entries: {0} (CAP_NET_ADMIN and the module nf_conntrack_netlink are needed)"
    )]
    Conntrack(#[from] NetlinkError),
    #[error("cannot read the connections of IPVS: {0}")]
    Ipvs(#[from] std::io::Error),
    #[error("the table has too many entries to count in {} s: conntrack -C shows their number", .0.as_secs())]
    Late(Duration),
}

/// Counts the flows that lead to targets, in the tables of the calling thread's network namespace.
///
/// # Errors
/// The reason why they cannot be counted, such as that it would take longer than `within`.
pub fn count(kind: Kind, targets: &[FlowTarget], within: Duration) -> Result<Counts, String> {
    if !kind.describe().programs_kernel {
        return Err("the agent programs no kernel".to_owned());
    }
    let mut counter = FlowCounter::new(targets);
    let by_ipvs = kind.describe().has_virtual_servers;
    let counted = counter.count(by_ipvs, within);
    counted.map_err(|error| chain(&error))?;
    Ok(Counts {
        counts: counter.counts,
        table: match by_ipvs {
            true => "ipvs",
            false => "conntrack",
        },
        read: counter.read,
    })
}

/// Returns the time by which the kernel dates entries, in nanoseconds since 1970.
pub(crate) fn now_ns() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}

/// Returns the age of an entry, if the kernel keeps times.
pub(crate) fn age(flow: &Tracked, now_ns: u64) -> Option<Duration> {
    let began = flow.began_ns?;
    Some(Duration::from_nanos(now_ns.saturating_sub(began)))
}

/// Returns the ages of the newest and the oldest of several flows, with one flow more.
pub(crate) fn widened(
    ages: Option<(Duration, Duration)>,
    age: Option<Duration>,
) -> Option<(Duration, Duration)> {
    match (ages, age) {
        (Some((newest, oldest)), Some(age)) => Some((newest.min(age), oldest.max(age))),
        (None, Some(age)) => Some((age, age)),
        (ages, None) => ages,
    }
}

struct FlowCounter<'a> {
    targets: &'a [FlowTarget],
    index: HashMap<FlowTarget, usize>,
    counts: Vec<Count>,
    now_ns: u64,
    read: u64,
}

impl<'a> FlowCounter<'a> {
    fn new(targets: &'a [FlowTarget]) -> Self {
        let index = targets.iter().enumerate();
        Self {
            targets,
            index: index.map(|(index, target)| (*target, index)).collect(),
            counts: vec![Count::default(); targets.len()],
            now_ns: now_ns(),
            read: 0,
        }
    }

    fn count(&mut self, by_ipvs: bool, within: Duration) -> Result<(), CountError> {
        let until = Instant::now() + within;
        if by_ipvs {
            let whole = ipvs_table::each(until, |connection| self.connection(&connection))?;
            self.read += whole.ok_or(CountError::Late(within))?;
        }
        for family in Family::ALL {
            let Some(question) = self.question(family) else {
                continue;
            };
            // A list that is broken off spoils its socket, so each has its own.
            let (mut socket, filter) = open()?;
            let selection = question.filter(|_| filter == Filter::Both);
            let listed = socket.tracked(family, selection, until, |flow| {
                self.tracked(&flow, by_ipvs);
            })?;
            self.read += listed.ok_or(CountError::Late(within))?;
        }
        Ok(())
    }

    /// Returns what to ask for a family: for one endpoint, or for all entries; `None` = nothing.
    fn question(&self, family: Family) -> Option<Option<Selected>> {
        let mut targets = self.targets.iter().filter(|at| Family::of(at.ip) == family);
        let only = targets.next()?;
        let only = AddressPorts {
            ip: only.ip,
            port: only.port,
        };
        let is_only = targets.next().is_none();
        Some(is_only.then_some(Selected::RepliesFrom(only)))
    }

    /// Returns the indexes of the targets that a flow leads to: its endpoint, and all ports of that address.
    fn find(&self, protocol: Protocol, at: SocketAddr) -> [Option<usize>; 2] {
        let ports = [Some((protocol, at.port())), None];
        ports.map(|port| self.index.get(&FlowTarget { ip: at.ip(), port }).copied())
    }

    fn tracked(&mut self, flow: &Tracked, only_direct: bool) {
        let translated = flow.is_translated();
        if flow.stage == Stage::Closed || (translated && only_direct) {
            return;
        }
        let age = age(flow, self.now_ns).filter(|_| translated);
        for index in self
            .find(flow.protocol, flow.endpoint)
            .into_iter()
            .flatten()
        {
            let count = &mut self.counts[index];
            count.ages = widened(count.ages, age);
            match translated {
                true => count.flows += 1,
                false => count.direct += 1,
            }
        }
    }

    fn connection(&mut self, connection: &Connection) {
        if connection.is_template() || connection.stage == Stage::Closed {
            return;
        }
        let Some(protocol) = connection.protocol else {
            return;
        };
        let found = self.find(protocol, connection.endpoint);
        for index in found.into_iter().flatten() {
            self.counts[index].flows += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn flow(to: &str, endpoint: &str, closed: bool, began_ns: Option<u64>) -> Tracked {
        Tracked {
            protocol: Protocol::Tcp,
            client: at("10.0.0.9:40000"),
            to: at(to),
            endpoint: at(endpoint),
            stage: match closed {
                true => Stage::Closed,
                false => Stage::Established,
            },
            traffic: None,
            began_ns,
        }
    }

    #[test]
    fn flows_through_services_and_straight_ones_are_kept_apart() {
        let ip = at("10.0.0.5:80").ip();
        let targets = [
            FlowTarget {
                ip,
                port: Some((Protocol::Tcp, 80)),
            },
            FlowTarget { ip, port: None },
        ];
        let mut counter = FlowCounter::new(&targets);
        counter.now_ns = 10_000_000_000;
        let vip = "10.96.0.1:80";
        for flow in [
            flow(vip, "10.0.0.5:80", false, Some(1_000_000_000)),
            flow(vip, "10.0.0.5:80", false, Some(8_000_000_000)),
            flow(vip, "10.0.0.5:80", true, None),
            flow(vip, "10.0.0.5:81", false, None),
            flow("10.0.0.5:80", "10.0.0.5:80", false, None),
            flow(vip, "10.0.0.6:80", false, None),
        ] {
            counter.tracked(&flow, false);
        }
        let ages = Some((Duration::from_secs(2), Duration::from_secs(9)));
        let port = Count {
            flows: 2,
            direct: 1,
            ages,
        };
        assert_eq!(counter.counts, [port, Count { flows: 3, ..port }]);
        // IPVS has counted those that are translated.
        counter.tracked(&flow(vip, "10.0.0.5:80", false, None), true);
        assert_eq!(counter.counts[0], port);
    }

    #[test]
    fn one_endpoint_is_selected_and_more_are_not() {
        let target = |text: &str| FlowTarget {
            ip: at(text).ip(),
            port: Some((Protocol::Udp, at(text).port())),
        };
        let [a, b, six] = ["10.0.0.1:53", "10.0.0.2:53", "[fd00::1]:53"].map(target);
        let one = [a, six];
        let one = FlowCounter::new(&one);
        assert!(matches!(one.question(Family::V4), Some(Some(_))));
        assert!(matches!(one.question(Family::V6), Some(Some(_))));
        let two = [a, b];
        let two = FlowCounter::new(&two);
        assert_eq!(two.question(Family::V4), Some(None));
        assert_eq!(two.question(Family::V6), None);
    }
}
