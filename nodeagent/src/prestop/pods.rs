//! Where this node's Pods are: in the ranges of the Node, and at the addresses of endpoints outside of them, as with networks
//! that do not ask the Node for addresses. These also have Pods anywhere in the ranges of the cluster.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use kplane_dataplane::backend::nftables::HookAddresses;
use kplane_model::{Cidr, EndpointAddr, Family, Protocol, Reason, ServiceKey, Severity};
use tokio::sync::watch;
use tokio::time::Instant;

use super::HookSettings;
use super::problems::Problems;
use crate::desired::{Desired, Dirty};
use crate::host_checks::Finding;

/// Time for which an address is remembered that is no endpoint any more: its Pod may be about to end.
const REMEMBERED: Duration = Duration::from_secs(600);
/// Most addresses that are remembered, of each family.
const ADDRESSES: usize = 1_024;

/// The address of an endpoint, and the namespace of a Service that has it.
type NamespacedPod = (Arc<str>, IpAddr);

/// What is known of this node's Pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Known {
    /// Ranges of its Pods, none in another.
    ranges: Vec<Cidr>,
    /// Endpoints on the node outside of the Node's ranges.
    endpoints: BTreeSet<NamespacedPod>,
    /// Endpoints on the node at the port of hooks.
    serving: BTreeSet<IpAddr>,
    /// Addresses of the node itself.
    pub(super) own: Vec<IpAddr>,
}

/// The engine's side.
#[derive(Debug)]
pub struct Follower {
    port: u16,
    ranges: Vec<Cidr>,
    /// Endpoints on the node, by ServicePort.
    endpoints: BTreeMap<ServiceKey, BTreeSet<EndpointAddr>>,
    known: watch::Sender<Known>,
    problems: Problems,
}

/// Creates both sides.
pub(super) fn channel(
    settings: &HookSettings,
    problems: Problems,
) -> (Follower, watch::Receiver<Known>) {
    let (known, receiver) = watch::channel(Known::default());
    let follower = Follower {
        port: settings.port,
        ranges: settings.ranges.clone(),
        endpoints: BTreeMap::new(),
        known,
        problems,
    };
    (follower, receiver)
}

impl Follower {
    /// Returns what keeps hooks from being answered.
    pub(crate) fn findings(&self) -> Vec<Finding> {
        let known = self.known.borrow();
        let mut findings = self.problems.findings();
        if let Some(pod) = known.serving.first() {
            findings.push(Finding {
                code: Reason::HooksFail,
                severity: Severity::Warning,
                text: format!(
                    "{} of this node's Pods serve at port {} of preStop hooks, such as {pod}; the agent leaves them alone, \
                     so hooks of these Pods fail, which ends the Pods at once",
                    known.serving.len(),
                    self.port
                ),
                fix: "give all agents and hooks another port (--pre-stop-port)".to_owned(),
            });
        }
        findings
    }

    /// Notes that the kernel holds the desired state of a family; `dirty` is what has changed, `None` = anything.
    pub(crate) fn programmed(&mut self, family: Family, desired: &Desired, dirty: Option<&Dirty>) {
        let named = desired.pod_ranges();
        let is_outside = |ip: &IpAddr| !named.iter().any(|range| range.contains(*ip));
        let all = dirty.is_none_or(|dirty| dirty.node_changed);
        let mut look = |key: &ServiceKey| {
            let local = desired.service(key).and_then(|(_, local)| local);
            let all: BTreeSet<_> = local
                .into_iter()
                .flat_map(|local| &local.endpoints)
                .map(|endpoint| endpoint.addr)
                .collect();
            if all.is_empty() {
                self.endpoints.remove(key);
            } else {
                self.endpoints.insert(key.clone(), all);
            }
        };
        if !all && let Some(dirty) = dirty {
            let ours = dirty.services.iter().filter(|key| key.family == family);
            ours.for_each(look);
        } else {
            let keys: Vec<_> = desired
                .services(family)
                .filter(|(_, local)| local.is_some())
                .map(|(program, _)| program.port.key.clone())
                .collect();
            keys.iter().for_each(&mut look);
            let gone = |key: &ServiceKey| key.family == family && keys.binary_search(key).is_err();
            self.endpoints.retain(|key, _| !gone(key));
        }
        let all = self.endpoints.iter();
        let all = all.flat_map(|(key, all)| all.iter().map(move |at| (key, at.ip)));
        let outside = all
            .filter(|(_, ip)| is_outside(ip))
            .map(|(key, ip)| (Arc::clone(&key.service.namespace), ip));
        let endpoints = outside.collect();
        let addresses = desired.node().map_or(&[][..], |node| &node.addresses);
        let own: Vec<IpAddr> = match addresses {
            [] => desired.last_known().into_iter().flatten().collect(),
            addresses => addresses.to_vec(),
        };
        let known = Known {
            ranges: ranges(named, &self.ranges, &endpoints),
            endpoints,
            serving: serving(&self.endpoints, self.port),
            own,
        };
        self.known.send_if_modified(|last| {
            let changed = *last != known;
            *last = known;
            changed
        });
    }
}

/// Returns the endpoints at a TCP port. The word of one namespace does not count about an address that another one has as
/// well: it could take the Pod's hooks away.
fn serving(
    endpoints: &BTreeMap<ServiceKey, BTreeSet<EndpointAddr>>,
    port: u16,
) -> BTreeSet<IpAddr> {
    // The namespaces that have each address, and whether it is at the port.
    let mut owners = BTreeMap::<IpAddr, (BTreeSet<&str>, bool)>::new();
    for (key, all) in endpoints {
        for at in all {
            let (namespaces, is_at_port) = owners.entry(at.ip).or_default();
            namespaces.insert(&key.service.namespace);
            *is_at_port |= at.port == port && key.protocol == Protocol::Tcp;
        }
    }
    owners.retain(|_, (namespaces, is_at_port)| *is_at_port && namespaces.len() == 1);
    owners.into_keys().collect()
}

/// Returns the ranges of the node's Pods. Where the Node's own ones have all of its endpoints, the rest of the cluster's
/// are Pods of other nodes, which the node's processes must reach at the port of hooks.
fn ranges(named: &[Cidr], cluster: &[Cidr], outside: &BTreeSet<NamespacedPod>) -> Vec<Cidr> {
    let is_used = |range: &&Cidr| {
        named.iter().find(|of| of.family() == range.family()).is_none()
            || outside.iter().any(|(_, ip)| range.contains(*ip))
    };
    distinct(named.iter().chain(cluster.iter().filter(is_used)).copied())
}

/// Returns these ranges without those that lie in another one.
fn distinct(ranges: impl Iterator<Item = Cidr>) -> Vec<Cidr> {
    let mut all: Vec<Cidr> = ranges.collect();
    all.sort_by_key(|range| range.prefix_len());
    let mut distinct = Vec::<Cidr>::new();
    for range in all {
        if !distinct.iter().any(|wider| wider.contains(range.first())) {
            distinct.push(range);
        }
    }
    distinct.sort();
    distinct
}

/// The addresses of a family in the kernel. Those that are no endpoints any more stay for a while.
#[derive(Debug, Default)]
pub(super) struct Pods {
    /// Addresses, and since when they are no endpoints any more.
    seen: HashMap<NamespacedPod, Option<Instant>>,
    /// The time after which one is forgotten.
    forgets_at: Option<Instant>,
}

impl Pods {
    /// Takes what is known now; returns the addresses for the kernel.
    pub(super) fn note(&mut self, known: &Known, family: Family, now: Instant) -> HookAddresses {
        let ours = known.endpoints.iter().filter(|(_, ip)| Family::of(*ip) == family);
        self.seen.extend(ours.cloned().map(|pod| (pod, None)));
        let in_range = |ip: &IpAddr| known.ranges.iter().any(|range| range.contains(*ip));
        self.seen.retain(|pod, left| {
            if !known.endpoints.contains(pod) {
                left.get_or_insert(now);
            }
            let is_recent = |at| now.saturating_duration_since(at) < REMEMBERED;
            left.is_none_or(is_recent) && !in_range(&pod.1)
        });
        let pods = self.shares();
        self.seen.retain(|(_, ip), _| pods.contains(ip));
        let passing = self.seen.values().flatten();
        self.forgets_at = passing.map(|at| *at + REMEMBERED).min();
        let ranges = known.ranges.iter().copied();
        HookAddresses {
            ranges: ranges.filter(|range| range.family() == family).collect(),
            pods: pods.into_iter().collect(),
            served: known.serving.iter().copied().collect(),
        }
    }

    /// Returns the addresses that there is room for. Each namespace has an equal share, so that the endpoints of one do not
    /// take the places of others; endpoints come before those that were some.
    fn shares(&self) -> BTreeSet<IpAddr> {
        let mut by_namespace = BTreeMap::<&str, Vec<_>>::new();
        for ((namespace, ip), left) in &self.seen {
            let all = by_namespace.entry(namespace).or_default();
            all.push((left.is_some(), Reverse(*left), *ip));
        }
        let mut turns: Vec<_> = by_namespace.into_values().collect();
        for all in &mut turns {
            all.sort_unstable();
        }
        let longest = turns.iter().map(Vec::len).max().unwrap_or_default();
        let mut pods = BTreeSet::new();
        for (_, _, ip) in
            (0..longest).flat_map(|turn| turns.iter().filter_map(move |all| all.get(turn)))
        {
            if pods.len() < ADDRESSES {
                pods.insert(*ip);
            }
        }
        pods
    }

    /// Returns the time at which an address is forgotten, if one is.
    pub(super) fn forgets_at(&self) -> Option<Instant> {
        self.forgets_at
    }
}

#[cfg(test)]
mod tests {
    use kplane_model::{KeyParts, ServiceName};

    use super::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn pod(namespace: &str, text: &str) -> NamespacedPod {
        (namespace.into(), ip(text))
    }

    #[test]
    fn ranges_in_others_are_left_out() {
        let all = [
            "10.244.1.0/24",
            "10.244.0.0/16",
            "fd00::/64",
            "10.244.0.0/16",
        ];
        let distinct = distinct(all.into_iter().map(cidr));
        assert_eq!(distinct, [cidr("10.244.0.0/16"), cidr("fd00::/64")]);
    }

    /// A Pod of another node may serve at the port of hooks, and the node's processes reach it.
    #[test]
    fn ranges_of_the_cluster_count_where_those_of_the_node_do_not_say_all() {
        let of = |named: &[&str], outside: &[&str]| {
            let named: Vec<Cidr> = named.iter().map(|text| cidr(text)).collect();
            let cluster = [cidr("10.0.0.0/8"), cidr("fd00::/32")];
            let outside = outside.iter().map(|text| pod("a", text)).collect();
            ranges(&named, &cluster, &outside)
        };
        let both = ["10.1.0.0/24", "fd00:0:1::/64"];
        assert_eq!(of(&both, &[]), both.map(cidr));
        assert_eq!(of(&[], &[]), [cidr("10.0.0.0/8"), cidr("fd00::/32")]);
        assert_eq!(
            of(&both[..1], &[]),
            [cidr("10.1.0.0/24"), cidr("fd00::/32")]
        );
        // A Pod in the node's own network says nothing of the CNI plugin, and one of another range does.
        assert_eq!(of(&both, &["192.0.2.1"]), both.map(cidr));
        let own_ipam = [cidr("10.0.0.0/8"), cidr("fd00:0:1::/64")];
        assert_eq!(of(&both, &["10.2.0.1"]), own_ipam);
    }

    #[test]
    fn an_address_stays_for_a_while() {
        let mut pods = Pods::default();
        let start = Instant::now();
        let known = |endpoints: &[&str]| Known {
            ranges: vec![cidr("10.1.0.0/16"), cidr("fd00::/64")],
            endpoints: endpoints.iter().map(|text| pod("a", text)).collect(),
            ..Known::default()
        };
        let both = known(&["10.9.0.1", "fd09::1"]);
        let noted = pods.note(&both, Family::V4, start);
        assert_eq!(
            (noted.ranges, noted.pods),
            (vec![cidr("10.1.0.0/16")], vec![ip("10.9.0.1")])
        );
        assert_eq!(pods.forgets_at(), None);
        // Nothing changes for longer than an address is remembered.
        let start = start + 2 * REMEMBERED;
        assert_eq!(
            pods.note(&known(&[]), Family::V4, start).pods,
            [ip("10.9.0.1")]
        );
        let forgets = pods.forgets_at().unwrap();
        assert_eq!(forgets, start + REMEMBERED);
        assert_eq!(
            pods.note(&known(&[]), Family::V4, forgets).pods,
            [] as [IpAddr; 0]
        );
    }

    /// A namespace with very many endpoints, now or before, takes no places of others.
    #[test]
    fn each_namespace_has_a_share_of_the_addresses() {
        let many = |net: u8| {
            (0..2_000_u16)
                .map(u16::to_be_bytes)
                .map(move |[high, low]| IpAddr::from([10, net, high, low]))
                .map(|ip| (Arc::from("greedy"), ip))
        };
        let few = ["192.0.2.1", "192.0.2.2"].map(|text| pod("shop", text));
        let known = |endpoints| Known {
            ranges: Vec::new(),
            endpoints,
            ..Known::default()
        };
        let start = Instant::now();
        let mut pods = Pods::default();
        pods.note(&known(many(1).collect()), Family::V4, start);
        let first = pods.note(&known(many(2).collect()), Family::V4, start).pods;
        assert_eq!(first.len(), ADDRESSES);
        assert!(first.iter().all(|ip| ip.to_string().starts_with("10.2.")));
        let both = known(many(3).chain(few.clone()).collect());
        let second = pods.note(&both, Family::V4, start).pods;
        assert_eq!(second.len(), ADDRESSES);
        assert!(few.iter().all(|(_, ip)| second.contains(ip)));
        // The Pods of the other namespace are about to end.
        let third = pods.note(&known(many(4).collect()), Family::V4, start).pods;
        assert!(few.iter().all(|(_, ip)| third.contains(ip)));
    }

    #[test]
    fn a_pod_that_serves_at_the_port_is_left_alone_unless_another_namespace_has_it() {
        let key = |namespace: &str, protocol| {
            let parts = KeyParts {
                service: ServiceName::new(namespace, "web"),
                port_name: "".into(),
                protocol,
                family: Family::V4,
            };
            ServiceKey::from(parts)
        };
        let at = |text: &str| text.parse::<std::net::SocketAddr>().unwrap();
        let at = |text: &str| EndpointAddr {
            ip: at(text).ip(),
            port: at(text).port(),
        };
        let endpoints = |all: &[&str]| all.iter().map(|text| at(text)).collect::<BTreeSet<_>>();
        let own = [
            "10.0.0.1:7468",
            "10.0.0.1:80",
            "10.0.0.2:80",
            "10.0.0.3:7468",
        ];
        let all = BTreeMap::from([
            (key("shop", Protocol::Tcp), endpoints(&own)),
            (key("shop", Protocol::Udp), endpoints(&["10.0.0.4:7468"])),
            (
                key("thief", Protocol::Tcp),
                endpoints(&["10.0.0.2:7468", "10.0.0.3:80"]),
            ),
        ]);
        assert_eq!(serving(&all, 7468), [ip("10.0.0.1")].into());
    }
}
