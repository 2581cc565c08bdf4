//! Decides a connection by the text of the API alone, with loops over all objects. The simulation of control planes and
//! agents includes this file as well.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{Direction, PolicyPort, Protocol, Tier, TierAction};

use super::{
    Cluster, ClusterPolicy, Judgement, Labels, NetworkPolicy, PeerSpec, Pod, Requirement, Rule,
    Selector,
};

/// Returns whether a connection to an address and port comes about, whichever of the nodes that have the ends it is.
pub(super) fn allows(
    cluster: &Cluster,
    from: IpAddr,
    to: IpAddr,
    protocol: Protocol,
    port: u16,
) -> bool {
    let ends = |address| match &holders(cluster, address)[..] {
        [] => vec![None],
        pods => pods.iter().copied().map(Some).collect(),
    };
    ends(from).into_iter().all(|source| {
        ends(to)
            .into_iter()
            .all(|to_pod| is_open(cluster, (source, from), (to_pod, to), protocol, port))
    })
}

/// Compares a judgement, which is about the Pods that addresses mean as peers, with whether a connection comes about.
pub(super) fn compare(
    cluster: &Cluster,
    (from, to): (IpAddr, IpAddr),
    expected: bool,
    judged: &Judgement,
) {
    let is_claimed_twice = |address| holders(cluster, address).len() > 1;
    if !is_claimed_twice(from) && !is_claimed_twice(to) {
        assert_eq!(
            judged.is_allowed(),
            expected,
            "judge: {from} -> {to}: {judged:?}"
        );
    }
    assert!(
        judged.is_allowed() || !expected,
        "judge: {from} -> {to}: {judged:?}"
    );
}

/// Returns whether a connection between Pods that count on their nodes comes about.
pub(super) fn is_open(
    cluster: &Cluster,
    (source, from): (Option<&Pod>, IpAddr),
    (destination, to): (Option<&Pod>, IpAddr),
    protocol: Protocol,
    port: u16,
) -> bool {
    if let (Some(source), Some(destination)) = (source, destination)
        && source.name == destination.name
    {
        return true;
    }
    let peers = (who(cluster, from), who(cluster, to));
    let allowed = |rules: fn(&NetworkPolicy) -> &Option<Vec<Rule>>,
                   direction,
                   subject: Option<&Pod>,
                   other| {
        let destination = match direction {
            Direction::Ingress => subject,
            Direction::Egress => peers.1,
        };
        let to_it = (destination, protocol, port);
        let Some(subject) = subject else {
            return true;
        };
        match tier(cluster, (Tier::Admin, direction), subject, other, to_it) {
            TierAction::Accept => return true,
            TierAction::Deny => return false,
            TierAction::Pass => {}
        }
        let mut isolated = false;
        for policy in cluster.policies.values() {
            let is_for = is_for(policy, subject);
            if is_for && let Some(rules) = rules(policy).as_ref() {
                isolated = true;
                for rule in rules {
                    let is_it = |peer: Option<&PeerSpec>| {
                        // Ranges of addresses have no containers, whose ports have names.
                        let nameless = direction == Direction::Egress
                            && matches!(peer, Some(PeerSpec::Block(_)));
                        is_to(
                            rule,
                            if nameless { None } else { destination },
                            protocol,
                            port,
                        ) && peer.is_none_or(|peer| is_with(cluster, policy, peer, other))
                    };
                    let peers = rule.peers.as_ref();
                    if peers.map_or(is_it(None), |all| all.iter().any(|peer| is_it(Some(peer)))) {
                        return true;
                    }
                }
            }
        }
        let baseline = tier(cluster, (Tier::Baseline, direction), subject, other, to_it);
        !isolated && baseline != TierAction::Deny
    };
    let (egress, ingress) = (Direction::Egress, Direction::Ingress);
    allowed(|policy| &policy.egress, egress, source, (peers.1, to))
        && allowed(
            |policy| &policy.ingress,
            ingress,
            destination,
            (peers.0, from),
        )
}

/// The first rule of a tier that matches: by priority, then by name.
fn tier(
    cluster: &Cluster,
    (tier, direction): (Tier, Direction),
    subject: &Pod,
    (pod, address): (Option<&Pod>, IpAddr),
    (destination, protocol, port): (Option<&Pod>, Protocol, u16),
) -> TierAction {
    let mut policies: Vec<_> = cluster.tiers.values().filter(|p| p.tier == tier).collect();
    policies.sort_by_key(|policy| policy.priority);
    for policy in policies {
        if !is_subject(cluster, policy, subject) {
            continue;
        }
        let rules = match direction {
            Direction::Ingress => &policy.ingress,
            Direction::Egress => &policy.egress,
        };
        for rule in rules {
            let with = |named: bool, peer: &PeerSpec| match peer {
                PeerSpec::Pods { namespaces, pods } => pod.is_some_and(|pod| {
                    is_namespace(cluster, &pod.name.namespace, namespaces.as_ref().unwrap())
                        && matches(pods.as_ref().unwrap(), &pod.labels)
                }),
                _ if named => false,
                PeerSpec::Block(block) => block.range.contains(address),
                PeerSpec::Nodes(nodes) => cluster
                    .nodes
                    .values()
                    .any(|node| matches(nodes, &node.labels) && node.addresses.contains(&address)),
            };
            let is = |named: bool| match &rule.rule.peers {
                None => !named,
                Some(peers) => peers.iter().any(|peer| with(named, peer)),
            };
            let ports = rule.rule.ports.as_ref();
            let is_it = ports.map_or(is(false), |ports| {
                ports.iter().any(|wanted| {
                    let named = matches!(wanted, PolicyPort::Named(..));
                    is_port(wanted, destination, protocol, port)
                        && is(named && direction == Direction::Egress)
                })
            });
            if is_it {
                return rule.action;
            }
        }
    }
    TierAction::Pass
}

/// Returns whether a ClusterNetworkPolicy is for a Pod.
pub(super) fn is_subject(cluster: &Cluster, policy: &ClusterPolicy, pod: &Pod) -> bool {
    is_namespace(cluster, &pod.name.namespace, &policy.namespaces)
        && matches(&policy.pods, &pod.labels)
}

/// Returns whether a policy is for a Pod.
pub(super) fn is_for(policy: &NetworkPolicy, pod: &Pod) -> bool {
    policy.name.namespace == pod.name.namespace && matches(&policy.pods, &pod.labels)
}

/// The Pods that have an address: one on each node.
pub(super) fn holders(cluster: &Cluster, address: IpAddr) -> Vec<&Pod> {
    let mut found: BTreeMap<&str, &Pod> = BTreeMap::new();
    for pod in claims(cluster, address) {
        let is_better = found.get(&*pod.node).is_none_or(|other| {
            if pod.terminating != other.terminating {
                return other.terminating;
            }
            match (&pod.created, &other.created) {
                (Some(this), Some(other)) => this > other,
                (this, other) => this.is_some() && other.is_none(),
            }
        });
        if is_better {
            found.insert(&pod.node, pod);
        }
    }
    found.into_values().collect()
}

fn claims(cluster: &Cluster, address: IpAddr) -> impl Iterator<Item = &Pod> {
    cluster.pods.values().filter(move |pod| pod.addresses.contains(&address))
}

/// The Pod that an address means as a peer: on the node that has the address in its ranges, or has the oldest Pod.
fn who(cluster: &Cluster, address: IpAddr) -> Option<&Pod> {
    let is_outside = |pod: &&Pod| {
        let node = cluster.nodes.get(&pod.node);
        node.is_none_or(|node| !node.ranges.iter().any(|range| range.contains(address)))
    };
    let mut claims: Vec<_> = claims(cluster, address).collect();
    claims.sort_by_key(|pod| pod.created.clone());
    claims.sort_by_key(|pod| pod.created.is_none());
    claims.sort_by_key(|pod| pod.terminating);
    claims.sort_by_key(is_outside);
    let node = &claims.first()?.node;
    holders(cluster, address).into_iter().find(|pod| pod.node == *node)
}

fn is_to(rule: &Rule, destination: Option<&Pod>, protocol: Protocol, port: u16) -> bool {
    let Some(ports) = &rule.ports else {
        return true;
    };
    ports.iter().any(|allowed| is_port(allowed, destination, protocol, port))
}

fn is_port(allowed: &PolicyPort, destination: Option<&Pod>, protocol: Protocol, port: u16) -> bool {
    match allowed {
        PolicyPort::All(p) => *p == protocol,
        PolicyPort::Range(p, first, last) => *p == protocol && port >= *first && port <= *last,
        PolicyPort::Named(p, name) => destination.is_some_and(|pod| {
            pod.ports.iter().any(|own| {
                own.name == *name && own.protocol == *p && *p == protocol && own.port == port
            })
        }),
    }
}

fn is_with(
    cluster: &Cluster,
    policy: &NetworkPolicy,
    peer: &PeerSpec,
    (pod, address): (Option<&Pod>, IpAddr),
) -> bool {
    match peer {
        PeerSpec::Block(block) => {
            block.range.contains(address) && !block.except.iter().any(|e| e.contains(address))
        }
        PeerSpec::Pods { namespaces, pods } => pod.is_some_and(|pod| {
            let is_there = match namespaces {
                None => pod.name.namespace == policy.name.namespace,
                Some(selector) => is_namespace(cluster, &pod.name.namespace, selector),
            };
            is_there && pods.as_ref().is_none_or(|pods| matches(pods, &pod.labels))
        }),
        PeerSpec::Nodes(_) => false,
    }
}

/// Only the empty selector matches a namespace that is not known.
fn is_namespace(cluster: &Cluster, name: &Arc<str>, selector: &Selector) -> bool {
    let Some(labels) = cluster.namespaces.get(name) else {
        return selector.0.is_empty();
    };
    let mut labels = labels.clone();
    labels.insert("kubernetes.io/metadata.name".into(), name.clone());
    matches(selector, &labels)
}

fn matches(selector: &Selector, labels: &Labels) -> bool {
    for requirement in &selector.0 {
        let holds = match requirement {
            Requirement::In(key, values) => match labels.get(key) {
                Some(value) => values.iter().any(|v| v == value),
                None => false,
            },
            Requirement::NotIn(key, values) => match labels.get(key) {
                Some(value) => values.iter().all(|v| v != value),
                None => true,
            },
            Requirement::Exists(key) => labels.get(key).is_some(),
            Requirement::DoesNotExist(key) => labels.get(key).is_none(),
        };
        if !holds {
            return false;
        }
    }
    true
}
