//! NetworkPolicies, Namespaces and Pods as they are written in Kubernetes.

use kplane_desired_state::k8s;
use kplane_model::{PolicyPort, Protocol, TierAction};
use kplane_policy::{
    ClusterPolicy, Labels, NetworkPolicy, PeerSpec, Pod, Requirement, Rule, Selector, TierRule,
};

use crate::dice::Dice;
use crate::reference::random::{self, Event};
use crate::truth::{Id, Object, node_name};

/// The names of objects, whose places are their numbers.
pub(crate) const POLICIES: [&str; 6] = ["a/n0", "a/n1", "a/n2", "b/n0", "b/n1", "c/n0"];
pub(crate) const PODS: [&str; 6] = ["a/p0", "a/p1", "a/p2", "b/p0", "b/p1", "c/p0"];
pub(crate) const NAMESPACES: [&str; 3] = ["a", "b", "c"];
pub(crate) const TIERS: [&str; 3] = ["s", "t", "u"];

/// A field that no version of the API has.
const UNKNOWN: &str = "future";

/// A Pod, and whether it has an address of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Workload {
    pub(crate) pod: Pod,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Running,
    Finished,
    /// It runs on its node's network.
    OnHost,
}

impl Workload {
    /// Returns whether NetworkPolicies are about it (NP12, NP18).
    pub(crate) fn counts(&self) -> bool {
        self.phase == Phase::Running && !self.pod.node.is_empty()
    }
}

/// Returns a change of the objects that NetworkPolicies are about, which a seed chooses.
pub(crate) fn change(seed: u64, nodes: u8) -> (Id, Option<Object>) {
    let mut dice = random::Dice::new(seed);
    let place = |names: &[&str], name: &str| {
        let place = names.iter().position(|known| *known == name);
        u8::try_from(place.unwrap()).unwrap()
    };
    let text = |name: &kplane_model::ServiceName| format!("{}/{}", name.namespace, name.name);
    loop {
        return match dice.event() {
            Event::PutPolicy(policy) => {
                let id = Id::Policy(place(&POLICIES, &text(&policy.name)));
                (id, Some(Object::Policy(writable(policy))))
            }
            Event::DeletePolicy(name) => (Id::Policy(place(&POLICIES, &text(&name))), None),
            Event::PutNamespace(name, labels) => (
                Id::Namespace(place(&NAMESPACES, &name)),
                Some(Object::Namespace(labels)),
            ),
            Event::DeleteNamespace(name) => (Id::Namespace(place(&NAMESPACES, &name)), None),
            Event::PutPod(pod) => {
                let id = Id::Pod(place(&PODS, &text(&pod.name)));
                let workload = workload(pod, nodes, Dice::new(seed).below(24));
                (id, Some(Object::Pod(workload)))
            }
            Event::DeletePod(name) => (Id::Pod(place(&PODS, &text(&name))), None),
            Event::PutTiers(policy) => {
                let id = Id::Tiers(place(&TIERS, &policy.name));
                (id, Some(Object::Tiers(writable_tiers(policy))))
            }
            Event::DeleteTiers(name) => (Id::Tiers(place(&TIERS, &name)), None),
            Event::SetNode(..) | Event::Take => continue,
        };
    }
}

/// Puts a Pod on one of the first two nodes.
fn workload(mut pod: Pod, nodes: u8, phase: u64) -> Workload {
    pod.node = match &*pod.node {
        "" => "".into(),
        "n1" => node_name(0),
        _ => node_name(1.min(nodes.saturating_sub(1))),
    };
    let mut ports = std::mem::take(&mut pod.ports);
    for port in ports.drain(..) {
        // Of a name that is there twice, the first counts.
        let is_it = |known: &kplane_model::NamedPort| {
            known.name == port.name && known.protocol == port.protocol
        };
        if !pod.ports.iter().any(is_it) {
            pod.ports.push(port);
        }
    }
    let phase = match phase {
        0..2 => Phase::Finished,
        2 => Phase::OnHost,
        _ => Phase::Running,
    };
    Workload { pod, phase }
}

/// Returns the policy that can be written: an empty list restricts nothing (NP4).
fn writable(mut policy: NetworkPolicy) -> NetworkPolicy {
    for rule in policy.ingress.iter_mut().chain(&mut policy.egress).flatten() {
        rule.peers.take_if(|peers| peers.is_empty());
        rule.ports.take_if(|ports| ports.is_empty());
    }
    for Rule { peers, ports } in policy.egress.iter_mut().flatten() {
        // Agents report that ports of a range of addresses have no names, and let nothing pass.
        let is_block = |peer: &PeerSpec| matches!(peer, PeerSpec::Block(_));
        if peers.iter().flatten().any(is_block) {
            for port in ports.iter_mut().flatten() {
                if let PolicyPort::Named(protocol, _) = port {
                    *port = PolicyPort::Range(*protocol, 80, 80);
                }
            }
        }
    }
    policy
}

/// Returns the policy that can be written. A rule without peers stands for one with an unknown field: it accepts nothing, or
/// denies everything.
fn writable_tiers(mut policy: ClusterPolicy) -> ClusterPolicy {
    let (ingress, egress) = (&mut policy.ingress, &mut policy.egress);
    for rule in ingress.iter_mut() {
        if let Some(peers) = &mut rule.rule.peers {
            peers.retain(|peer| matches!(peer, PeerSpec::Pods { .. }));
        }
    }
    for TierRule { action, rule } in ingress.iter_mut().chain(egress) {
        let Some(peers) = &mut rule.peers else {
            let nothing = || (*action == TierAction::Accept).then(Vec::new);
            (rule.peers, rule.ports) = (nothing(), nothing().map(|_| Vec::new()));
            if *action == TierAction::Pass {
                *action = TierAction::Deny;
            }
            continue;
        };
        if peers.is_empty() {
            peers.push(PeerSpec::Pods {
                namespaces: Some(Selector::default()),
                pods: Some(Selector::default()),
            });
        }
        rule.ports.take_if(|ports| ports.is_empty());
        // Names are those of all protocols.
        if let Some(ports) = &mut rule.ports {
            *ports = ports
                .iter()
                .flat_map(|port| match port {
                    PolicyPort::Named(_, name) => Protocol::ALL
                        .map(|protocol| PolicyPort::Named(protocol, name.clone()))
                        .to_vec(),
                    other => vec![other.clone()],
                })
                .collect();
        }
    }
    policy
}

pub(crate) fn namespace(metadata: k8s::ObjectMeta, labels: &Labels) -> k8s::Namespace {
    k8s::Namespace {
        metadata,
        labels: labels.clone(),
    }
}

pub(crate) fn pod(metadata: k8s::ObjectMeta, workload: &Workload) -> k8s::Pod {
    let Workload { pod, phase } = workload;
    let mut metadata = metadata;
    metadata.creation_timestamp.clone_from(&pod.created);
    metadata.deletion_timestamp = pod.terminating.then(|| "2026-01-03T00:00:00Z".into());
    let ports = pod.ports.iter().map(|port| k8s::ContainerPort {
        name: Some(port.name.clone()),
        protocol: Some(port.protocol.to_string()),
        container_port: port.port.into(),
    });
    let ips = pod.addresses.iter().map(|ip| k8s::PodIp { ip: ip.to_string() });
    k8s::Pod {
        metadata,
        labels: pod.labels.clone(),
        spec: k8s::PodSpec {
            node_name: Some(pod.node.clone()),
            host_network: *phase == Phase::OnHost,
            containers: Some(vec![k8s::Container {
                ports: Some(ports.collect()),
                restart_policy: None,
            }]),
            init_containers: None,
        },
        status: k8s::PodStatus {
            phase: Some(if *phase == Phase::Finished { "Succeeded" } else { "Running" }.to_owned()),
            pod_ip: pod.addresses.first().map(ToString::to_string),
            pod_ips: Some(ips.collect()),
        },
    }
}

pub(crate) fn network_policy(
    metadata: k8s::ObjectMeta,
    policy: &NetworkPolicy,
) -> k8s::NetworkPolicy {
    let NetworkPolicy {
        pods,
        ingress,
        egress,
        ..
    } = policy;
    // NP3
    let defaults = ingress.is_some() && egress.as_ref().is_none_or(|rules| !rules.is_empty());
    let types = [("Ingress", ingress), ("Egress", egress)]
        .into_iter()
        .filter(|(_, rules)| rules.is_some())
        .map(|(name, _)| name.to_owned())
        .collect();
    k8s::NetworkPolicy {
        metadata,
        spec: k8s::NetworkPolicySpec {
            pod_selector: Some(selector(pods)),
            policy_types: (!defaults).then_some(types),
            ingress: ingress.as_ref().map(|rules| {
                let rule = |rule: &Rule| k8s::IngressRule {
                    from: rule.peers.as_ref().map(|peers| peers.iter().map(peer).collect()),
                    ports: rule.ports.as_ref().map(|ports| ports.iter().map(port).collect()),
                };
                rules.iter().map(rule).collect()
            }),
            egress: egress.as_ref().map(|rules| {
                let rule = |rule: &Rule| k8s::EgressRule {
                    to: rule.peers.as_ref().map(|peers| peers.iter().map(peer).collect()),
                    ports: rule.ports.as_ref().map(|ports| ports.iter().map(port).collect()),
                };
                rules.iter().map(rule).collect()
            }),
        },
    }
}

fn peer(peer: &PeerSpec) -> k8s::PolicyPeer {
    match peer {
        PeerSpec::Pods { namespaces, pods } => k8s::PolicyPeer {
            // A peer has one of both.
            pod_selector: match (namespaces, pods) {
                (None, None) => Some(k8s::LabelSelector::default()),
                _ => pods.as_ref().map(selector),
            },
            namespace_selector: namespaces.as_ref().map(selector),
            ip_block: None,
        },
        PeerSpec::Block(block) => {
            let except = block.except.iter().map(ToString::to_string).collect::<Vec<_>>();
            k8s::PolicyPeer {
                ip_block: Some(k8s::IpBlock {
                    cidr: block.range.to_string(),
                    except: (!except.is_empty()).then_some(except),
                }),
                ..k8s::PolicyPeer::default()
            }
        }
        PeerSpec::Nodes(_) => unreachable!("only ClusterNetworkPolicies name nodes"),
    }
}

fn port(port: &PolicyPort) -> k8s::PolicyPort {
    let number = |number: u16| Some(k8s::NameOrNumber::Number(number.into()));
    let (protocol, port, end_port) = match port {
        PolicyPort::All(protocol) => (protocol, None, None),
        PolicyPort::Range(protocol, first, last) => {
            let end = (first < last).then(|| (*last).into());
            (protocol, number(*first), end)
        }
        PolicyPort::Named(protocol, name) => {
            (protocol, Some(k8s::NameOrNumber::Name(name.clone())), None)
        }
    };
    k8s::PolicyPort {
        protocol: (*protocol != Protocol::Tcp).then(|| protocol.to_string()),
        port,
        end_port,
    }
}

/// Writes a selector: its first requirement of one value as a label, the others as expressions.
fn selector(selector: &Selector) -> k8s::LabelSelector {
    let mut written = k8s::LabelSelector::default();
    for requirement in &selector.0 {
        let (key, operator, values) = match requirement {
            Requirement::In(key, values) => (key, "In", Some(values.clone())),
            Requirement::NotIn(key, values) => (key, "NotIn", Some(values.clone())),
            Requirement::Exists(key) => (key, "Exists", None),
            Requirement::DoesNotExist(key) => (key, "DoesNotExist", None),
        };
        let expression = k8s::MatchExpression {
            key: key.clone(),
            operator: operator.to_owned(),
            values,
        };
        match requirement {
            Requirement::In(key, values) if values.len() == 1 && written.match_labels.is_none() => {
                let label = (key.clone(), values[0].clone());
                written.match_labels = Some([label].into_iter().collect());
            }
            _ => written.match_expressions.get_or_insert_default().push(expression),
        }
    }
    written
}

pub(crate) fn cluster_policy(
    metadata: k8s::ObjectMeta,
    policy: &ClusterPolicy,
) -> k8s::ClusterNetworkPolicy {
    let rules = |rules: &[TierRule], ingress| {
        let rules = rules.iter().map(|rule| tier_rule(rule, ingress)).collect::<Vec<_>>();
        (!rules.is_empty()).then_some(rules)
    };
    k8s::ClusterNetworkPolicy {
        metadata,
        spec: k8s::ClusterPolicySpec {
            tier: Some(format!("{:?}", policy.tier)),
            priority: Some(policy.priority.into()),
            subject: pods(&policy.namespaces, &policy.pods),
            ingress: rules(&policy.ingress, true),
            egress: rules(&policy.egress, false),
            others: k8s::Others::default(),
        },
    }
}

fn tier_rule(TierRule { action, rule }: &TierRule, ingress: bool) -> k8s::ClusterRule {
    let peers = rule.peers.as_ref().filter(|peers| !peers.is_empty());
    let unknown = peers.is_none().then(|| UNKNOWN.to_owned());
    let peers: Option<Vec<_>> = peers.map(|peers| peers.iter().map(cluster_peer).collect());
    let protocols = match &rule.ports {
        Some(ports) if unknown.is_none() => Some(ports.iter().filter_map(protocol).collect()),
        _ => None,
    };
    let (from, to) = if ingress { (peers, None) } else { (None, peers) };
    k8s::ClusterRule {
        name: None,
        action: Some(format!("{action:?}")),
        from,
        to,
        protocols,
        others: k8s::Others(unknown.into_iter().collect()),
    }
}

fn pods(namespaces: &Selector, pods: &Selector) -> k8s::ClusterPeer {
    if pods.0.is_empty() {
        return k8s::ClusterPeer {
            namespaces: Some(selector(namespaces)),
            ..k8s::ClusterPeer::default()
        };
    }
    k8s::ClusterPeer {
        pods: Some(k8s::NamespacedPods {
            namespace_selector: Some(selector(namespaces)),
            pod_selector: Some(selector(pods)),
            others: k8s::Others::default(),
        }),
        ..k8s::ClusterPeer::default()
    }
}

fn cluster_peer(peer: &PeerSpec) -> k8s::ClusterPeer {
    match peer {
        PeerSpec::Pods {
            namespaces,
            pods: of,
        } => pods(
            namespaces.as_ref().unwrap_or(&Selector::default()),
            of.as_ref().unwrap_or(&Selector::default()),
        ),
        PeerSpec::Block(block) => k8s::ClusterPeer {
            networks: Some(vec![block.range.to_string()]),
            ..k8s::ClusterPeer::default()
        },
        PeerSpec::Nodes(nodes) => k8s::ClusterPeer {
            nodes: Some(selector(nodes)),
            ..k8s::ClusterPeer::default()
        },
    }
}

/// Writes a port. A name is written once for all protocols.
fn protocol(port: &PolicyPort) -> Option<k8s::ClusterProtocol> {
    let numbered = |first: u16, last: u16| k8s::ClusterPort {
        number: (first == last).then(|| first.into()),
        range: (first != last).then(|| k8s::ClusterRange {
            start: first.into(),
            end: last.into(),
        }),
        others: k8s::Others::default(),
    };
    let (of, destination_port) = match port {
        PolicyPort::Named(Protocol::Tcp, name) => {
            return Some(k8s::ClusterProtocol {
                destination_named_port: Some(name.to_string()),
                ..k8s::ClusterProtocol::default()
            });
        }
        PolicyPort::Named(..) => return None,
        PolicyPort::All(of) => (of, None),
        PolicyPort::Range(of, first, last) => (of, Some(numbered(*first, *last))),
    };
    let ports = k8s::ClusterPorts {
        destination_port,
        others: k8s::Others::default(),
    };
    let mut written = k8s::ClusterProtocol::default();
    match of {
        Protocol::Tcp => written.tcp = Some(ports),
        Protocol::Udp => written.udp = Some(ports),
        Protocol::Sctp => written.sctp = Some(ports),
    }
    Some(written)
}
