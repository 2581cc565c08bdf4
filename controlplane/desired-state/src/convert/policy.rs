//! NetworkPolicies, and the namespaces and Pods that they are about (NP1 to NP20).
//!
//! The API server refuses all of the problems here today. Old objects may have them, and manifests. A rule with one
//! allows nothing, and a policy whose own selector has one is for all Pods of its namespace: nothing opens by mistake.

use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{
    Block, Cidr, Issue, NamedPort, PolicyName, PolicyPort, Protocol, Reason, Severity, parse_ip,
    shared,
};
use kplane_policy::{Labels, NetworkPolicy, PeerSpec, Pod, Requirement, Rule, Selector};

use super::report::Report;
use super::{port_number, protocol};
use crate::k8s::{self, Kind, LabelSelector, NameOrNumber, ObjectMeta, PolicyPeer};

/// Label of a Namespace: its name (NP6).
const NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// Returns the name of a NetworkPolicy or a Pod.
fn name_of(kind: Kind, metadata: &ObjectMeta) -> PolicyName {
    PolicyName::of(metadata.namespace_of(kind), metadata.name.clone())
}

/// Converts a NetworkPolicy.
pub fn network_policy(policy: &k8s::NetworkPolicy, location: &str) -> (NetworkPolicy, Vec<Issue>) {
    let (metadata, spec) = (&policy.metadata, &policy.spec);
    let mut report = Report::new(Kind::NetworkPolicy, metadata, location);
    let pods = spec
        .pod_selector
        .as_ref()
        .map_or(Ok(Selector::default()), selector)
        .unwrap_or_else(|problem| {
            let reason = format!(
                "spec.podSelector: {problem}; the policy isolates all Pods of the namespace"
            );
            report.error(Reason::InvalidPolicy, reason);
            Selector::default()
        });
    let has_egress = spec.egress.as_ref().is_some_and(|rules| !rules.is_empty());
    let [is_ingress, is_egress] = types(spec.policy_types.as_deref(), has_egress, &mut report);
    let ingress = is_ingress.then(|| {
        spec.ingress
            .iter()
            .flatten()
            .enumerate()
            .map(|(at, rule)| {
                let peers = rule.from.as_deref();
                (
                    format!("spec.ingress[{at}]"),
                    "from",
                    peers,
                    rule.ports.as_deref(),
                )
            })
            .map(|rule| self::rule(rule, &mut report))
            .collect()
    });
    let egress = is_egress.then(|| {
        spec.egress
            .iter()
            .flatten()
            .enumerate()
            .map(|(at, rule)| {
                let peers = rule.to.as_deref();
                (
                    format!("spec.egress[{at}]"),
                    "to",
                    peers,
                    rule.ports.as_deref(),
                )
            })
            .map(|rule| self::rule(rule, &mut report))
            .collect()
    });
    let policy = NetworkPolicy {
        name: name_of(Kind::NetworkPolicy, metadata),
        pods,
        ingress,
        egress,
    };
    (policy, report.finish())
}

/// Returns the issue that a NetworkPolicy, of this size in bytes, fits into no message.
pub fn policy_too_large(policy: &k8s::NetworkPolicy, location: &str, size: usize) -> Issue {
    let report = Report::new(Kind::NetworkPolicy, &policy.metadata, location);
    let reason = format!(
        "needs {size} bytes, more than a message has; it isolates its Pods and allows nothing; split it"
    );
    report.issue(Severity::Error, Reason::TooLarge, reason)
}

/// Returns the issue that a NetworkPolicy is not enforced.
pub fn not_enforced(policy: &k8s::NetworkPolicy, location: &str) -> Vec<Issue> {
    not_enforced_of(Kind::NetworkPolicy, &policy.metadata, location)
}

/// Returns the issue that an object of a kind is not enforced.
pub(super) fn not_enforced_of(kind: Kind, metadata: &ObjectMeta, location: &str) -> Vec<Issue> {
    let mut report = Report::new(kind, metadata, location);
    report.warning(
        Reason::PolicyNotEnforced,
        "is not enforced by kplane; start the control plane with --network-policy",
    );
    report.finish()
}

/// Returns whether a policy is about ingress, and about egress (NP3).
fn types(written: Option<&[String]>, has_egress: bool, report: &mut Report<'_>) -> [bool; 2] {
    let Some(written) = written.filter(|types| !types.is_empty()) else {
        return [true, has_egress];
    };
    let unknown = |text: &&String| !matches!(text.as_str(), "Ingress" | "Egress");
    if let Some(unknown) = written.iter().find(unknown) {
        let reason = format!(
            "spec.policyTypes: {unknown:?} is unknown, so the policy isolates in both directions; use Ingress or Egress"
        );
        report.error(Reason::InvalidPolicy, reason);
        return [true, true];
    }
    ["Ingress", "Egress"].map(|kind| written.iter().any(|text| text == kind))
}

/// The place of a rule, the name of its list of peers, and the lists of peers and ports.
type Written<'a> = (
    String,
    &'static str,
    Option<&'a [PolicyPeer]>,
    Option<&'a [k8s::PolicyPort]>,
);

/// Converts a rule. A rule with a problem allows nothing.
fn rule((place, list, peers, ports): Written<'_>, report: &mut Report<'_>) -> Rule {
    let restricts = |len: usize| len > 0;
    let mut problems = Vec::new();
    let peers = peers.filter(|peers| restricts(peers.len())).map(|peers| {
        peers
            .iter()
            .enumerate()
            .filter_map(|(at, peer)| {
                let place = format!("{place}.{list}[{at}]");
                let converted = self::peer(peer, &place, report);
                converted.map_err(|problem| problems.push(format!("{place}: {problem}"))).ok()
            })
            .collect()
    });
    let ports = ports.filter(|ports| restricts(ports.len())).map(|ports| {
        ports
            .iter()
            .enumerate()
            .filter_map(|(at, port)| {
                let place = format!("{place}.ports[{at}]");
                let converted = self::port(port);
                converted.map_err(|problem| problems.push(format!("{place}: {problem}"))).ok()
            })
            .collect()
    });
    if problems.is_empty() {
        return Rule { peers, ports };
    }
    for problem in problems {
        report.error(
            Reason::InvalidPolicy,
            format!("{problem}; the rule allows nothing"),
        );
    }
    Rule {
        peers: Some(Vec::new()),
        ports: Some(Vec::new()),
    }
}

/// Converts a peer (NP6, NP7).
fn peer(peer: &PolicyPeer, place: &str, report: &mut Report<'_>) -> Result<PeerSpec, String> {
    let select = |field: &str, written: &Option<LabelSelector>| {
        let converted = written.as_ref().map(selector).transpose();
        converted.map_err(|problem| format!("{field}: {problem}"))
    };
    let pods = select("podSelector", &peer.pod_selector)?;
    let namespaces = select("namespaceSelector", &peer.namespace_selector)?;
    match &peer.ip_block {
        None if pods.is_none() && namespaces.is_none() => {
            Err("has none of podSelector, namespaceSelector and ipBlock; set one".to_owned())
        }
        None => Ok(PeerSpec::Pods { namespaces, pods }),
        Some(_) if pods.is_some() || namespaces.is_some() => {
            Err("has ipBlock and a selector; write two peers".to_owned())
        }
        Some(block) => Ok(PeerSpec::Block(self::block(block, place, report)?)),
    }
}

fn block(block: &k8s::IpBlock, place: &str, report: &mut Report<'_>) -> Result<Block, String> {
    let mut read = |field: &str, text: &str| {
        let range: Cidr =
            text.parse().map_err(|error| format!("ipBlock.{field}: {error}; correct it"))?;
        if range.to_string() != text {
            let reason =
                format!("{place}.ipBlock.{field}: {text:?} counts as {range}; write it like that");
            report.warning(Reason::InvalidPolicy, reason);
        }
        Ok::<_, String>(range)
    };
    let range = read("cidr", &block.cidr)?;
    let mut except = Vec::new();
    for text in block.except.iter().flatten() {
        let hole = read("except", text)?;
        if !range.covers(hole) || range == hole {
            return Err(format!(
                "ipBlock.except: {hole} is not a part of {range}; correct it"
            ));
        }
        except.push(hole);
    }
    except.sort_unstable();
    except.dedup();
    Ok(Block { range, except })
}

/// Converts a port of a rule (NP8 to NP10).
fn port(port: &k8s::PolicyPort) -> Result<PolicyPort, String> {
    let protocol =
        protocol(port.protocol.as_deref()).map_err(|error| format!("protocol: {error}"))?;
    let number = |field: &str, number: i64| {
        port_number(number)
            .ok_or_else(|| format!("{field}: {number} is not a port; use 1 to 65535"))
    };
    match (&port.port, port.end_port) {
        (None, None) => Ok(PolicyPort::All(protocol)),
        (None, Some(_)) => Err("endPort: port is missing; set it".to_owned()),
        (Some(NameOrNumber::Name(_)), Some(_)) => Err("endPort: port must be a number".to_owned()),
        (Some(NameOrNumber::Name(name)), None) if name.is_empty() => Err("port: empty".to_owned()),
        (Some(NameOrNumber::Name(name)), None) => Ok(PolicyPort::Named(protocol, shared(name))),
        (Some(NameOrNumber::Number(first)), None) => {
            let first = number("port", *first)?;
            Ok(PolicyPort::Range(protocol, first, first))
        }
        (Some(NameOrNumber::Number(first)), Some(last)) => {
            let (first, last) = (number("port", *first)?, number("endPort", last)?);
            if first <= last {
                Ok(PolicyPort::Range(protocol, first, last))
            } else {
                Err(format!("endPort: {last} is below port {first}; correct it"))
            }
        }
    }
}

/// Converts a label selector (NP5).
pub(super) fn selector(written: &LabelSelector) -> Result<Selector, String> {
    let labels = written
        .match_labels
        .iter()
        .flatten()
        .map(|(key, value)| Ok(Requirement::In(shared(key), vec![shared(value)])));
    let expressions = written.match_expressions.iter().flatten().map(|expression| {
        let key = shared(&expression.key);
        let mut values: Vec<Arc<str>> =
            expression.values.iter().flatten().map(|text| shared(text)).collect();
        values.sort_unstable();
        values.dedup();
        match (expression.operator.as_str(), values.is_empty()) {
            ("In", false) => Ok(Requirement::In(key, values)),
            ("NotIn", false) => Ok(Requirement::NotIn(key, values)),
            ("Exists", true) => Ok(Requirement::Exists(key)),
            ("DoesNotExist", true) => Ok(Requirement::DoesNotExist(key)),
            ("In" | "NotIn", true) => Err(format!("{key:?}: {} needs values", expression.operator)),
            ("Exists" | "DoesNotExist", false) => {
                Err(format!("{key:?}: {} takes no values", expression.operator))
            }
            (other, _) => Err(format!(
                "{key:?}: the operator {other:?} is unknown; use In, NotIn, Exists or DoesNotExist"
            )),
        }
    });
    let mut requirements = labels.chain(expressions).collect::<Result<Vec<_>, String>>()?;
    requirements.sort_unstable();
    requirements.dedup();
    Ok(Selector(requirements))
}

/// Returns the labels of a Namespace. Each has one with its name (NP6).
pub fn namespace(namespace: &k8s::Namespace) -> Labels {
    let mut labels = shared_labels(&namespace.labels);
    labels.insert(shared(NAME_LABEL), namespace.metadata.name.clone());
    labels
}

pub(super) fn shared_labels(labels: &k8s::Texts) -> Labels {
    labels.iter().map(|(key, value)| (shared(key), shared(value))).collect()
}

/// Converts a Pod. `None` for a Pod that no policy can be about: it has ended (NP18), has no node yet, or uses its node's
/// network (NP12).
pub fn pod(pod: &k8s::Pod) -> Option<Pod> {
    let has_ended = matches!(pod.status.phase.as_deref(), Some("Succeeded" | "Failed"));
    let node = pod.spec.node_name.as_ref().filter(|name| !name.is_empty())?;
    if has_ended || pod.spec.host_network {
        return None;
    }
    Some(Pod {
        name: name_of(Kind::Pod, &pod.metadata),
        node: node.clone(),
        addresses: addresses(&pod.status),
        labels: shared_labels(&pod.labels),
        ports: named_ports(&pod.spec),
        terminating: pod.metadata.deletion_timestamp.is_some(),
        created: pod.metadata.creation_timestamp.clone(),
    })
}

/// Returns the Pod's addresses. kubelet writes them, so that one in another form is left out without a word: the Pod is
/// cut off then.
pub fn addresses(status: &k8s::PodStatus) -> Vec<IpAddr> {
    let all = status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str());
    let first = status.pod_ip.as_deref().into_iter();
    let mut ips: Vec<IpAddr> = first.chain(all).filter_map(|text| parse_ip(text).ok()).collect();
    ips.sort_unstable();
    ips.dedup();
    ips
}

/// Returns the container ports with names, as Kubernetes finds them: of containers, then of sidecars; of a name that is
/// there twice, the first counts.
fn named_ports(spec: &k8s::PodSpec) -> Vec<NamedPort> {
    let is_sidecar =
        |container: &&k8s::Container| container.restart_policy.as_deref() == Some("Always");
    let sidecars = spec.init_containers.iter().flatten().filter(is_sidecar);
    let containers = spec.containers.iter().flatten().chain(sidecars);
    let mut ports: Vec<NamedPort> = Vec::new();
    for written in containers.flat_map(|container| container.ports.iter().flatten()) {
        let name = written.name.as_ref().filter(|name| !name.is_empty());
        let protocol: Option<Protocol> = protocol(written.protocol.as_deref()).ok();
        let number = port_number(written.container_port);
        let (Some(name), Some(protocol), Some(port)) = (name, protocol, number) else {
            continue;
        };
        let is_it = |known: &NamedPort| known.name == *name && known.protocol == protocol;
        if !ports.iter().any(is_it) {
            ports.push(NamedPort {
                name: name.clone(),
                protocol,
                port,
            });
        }
    }
    ports.sort_unstable();
    ports
}
