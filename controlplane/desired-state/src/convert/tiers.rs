//! ClusterNetworkPolicies (`policy.networking.k8s.io`).
//!
//! What cannot be understood must not open anything. As the API has it, an `Accept` rule with such a part matches
//! nothing, and a `Deny` or `Pass` rule denies everything. A policy of which the tier, the priority or the Pods are not
//! understood has no effect.

use kplane_model::{
    Block, Cidr, Direction, Issue, PolicyPort, Protocol, Reason, Tier, TierAction, shared,
};
use kplane_policy::{ClusterPolicy, Labels, PeerSpec, Rule, Selector, TierRule};

use super::policy::{selector, shared_labels};
use super::port_number;
use super::report::Report;
use crate::k8s::{
    self, ClusterPeer, ClusterPorts, ClusterProtocol, ClusterRule, Kind, LabelSelector, Others,
};

/// Largest priority.
const MAX_PRIORITY: i64 = 1_000;

/// Converts a ClusterNetworkPolicy; `None` = it has no effect.
pub fn cluster_policy(
    policy: &k8s::ClusterNetworkPolicy,
    location: &str,
) -> (Option<ClusterPolicy>, Vec<Issue>) {
    let mut report = Report::new(Kind::ClusterNetworkPolicy, &policy.metadata, location);
    let converted = whole(policy, &mut report).map_err(|problem| {
        let reason = format!("spec.{problem}; the policy has no effect");
        report.error(Reason::InvalidPolicy, reason);
    });
    (converted.ok(), report.finish())
}

/// Returns the issue that a ClusterNetworkPolicy is not enforced.
pub fn tiers_not_enforced(policy: &k8s::ClusterNetworkPolicy, location: &str) -> Vec<Issue> {
    super::policy::not_enforced_of(Kind::ClusterNetworkPolicy, &policy.metadata, location)
}

fn whole(
    policy: &k8s::ClusterNetworkPolicy,
    report: &mut Report<'_>,
) -> Result<ClusterPolicy, String> {
    let spec = &policy.spec;
    known(&spec.others)?;
    let tier = match spec.tier.as_deref() {
        Some("Admin") => Tier::Admin,
        Some("Baseline") => Tier::Baseline,
        other => {
            return Err(format!(
                "tier: {:?} is unknown; use Admin or Baseline",
                other.unwrap_or_default()
            ));
        }
    };
    let priority = spec.priority.filter(|priority| (0..=MAX_PRIORITY).contains(priority));
    let priority = priority.and_then(|priority| u16::try_from(priority).ok());
    let subject = peer(&spec.subject).map_err(|problem| format!("subject: {problem}"))?;
    let Some(PeerSpec::Pods { namespaces, pods }) = subject.into_iter().next() else {
        return Err("subject: Pods are needed; use namespaces or pods".to_owned());
    };
    let mut rules = |field: &str, direction, rules: &Option<Vec<ClusterRule>>| {
        rules
            .iter()
            .flatten()
            .enumerate()
            .map(|(at, written)| rule(&format!("spec.{field}[{at}]"), direction, written, report))
            .collect()
    };
    Ok(ClusterPolicy {
        name: policy.metadata.name.clone(),
        tier,
        priority: priority.ok_or("priority: a number from 0 to 1000 is needed")?,
        namespaces: namespaces.unwrap_or_default(),
        pods: pods.unwrap_or_default(),
        ingress: rules("ingress", Direction::Ingress, &spec.ingress),
        egress: rules("egress", Direction::Egress, &spec.egress),
    })
}

/// Converts a rule.
fn rule(
    place: &str,
    direction: Direction,
    written: &ClusterRule,
    report: &mut Report<'_>,
) -> TierRule {
    let action = match written.action.as_deref() {
        Some("Accept") => Ok(TierAction::Accept),
        Some("Deny") => Ok(TierAction::Deny),
        Some("Pass") => Ok(TierAction::Pass),
        other => Err(format!(
            "action: {:?} is unknown; use Accept, Deny or Pass",
            other.unwrap_or_default()
        )),
    };
    let problem = match (action.clone(), matches(written, direction)) {
        (Ok(action), Ok(rule)) => return TierRule { action, rule },
        (Err(problem), _) | (_, Err(problem)) => problem,
    };
    let nothing = Rule {
        peers: Some(Vec::new()),
        ports: Some(Vec::new()),
    };
    let everything = Rule {
        peers: None,
        ports: None,
    };
    let (action, rule, effect) = match action {
        Ok(TierAction::Accept) => (TierAction::Accept, nothing, "the rule accepts nothing"),
        _ => (TierAction::Deny, everything, "the rule denies everything"),
    };
    report.error(
        Reason::InvalidPolicy,
        format!("{place}.{problem}; {effect}"),
    );
    TierRule { action, rule }
}

fn matches(written: &ClusterRule, direction: Direction) -> Result<Rule, String> {
    known(&written.others)?;
    let (list, peers, other) = match direction {
        Direction::Ingress => ("from", &written.from, &written.to),
        Direction::Egress => ("to", &written.to, &written.from),
    };
    let peers = if other.is_none() { peers.as_ref() } else { None };
    let peers =
        peers.ok_or_else(|| format!("{list}: peers are missing, or not there; name some"))?;
    let mut specs = Vec::new();
    for (at, written) in peers.iter().enumerate() {
        let converted = peer(written).map_err(|problem| format!("{list}[{at}].{problem}"))?;
        let are_pods = |peer: &PeerSpec| matches!(peer, PeerSpec::Pods { .. });
        if direction == Direction::Ingress && !converted.iter().all(are_pods) {
            return Err(format!("{list}[{at}]: ingress rules have Pods only"));
        }
        specs.extend(converted);
    }
    if specs.is_empty() {
        return Err(format!("{list}: it is empty; name peers"));
    }
    let ports = written.protocols.as_ref().map(|protocols| {
        let mut ports = Vec::new();
        for (at, written) in protocols.iter().enumerate() {
            let converted = self::ports(written);
            ports.extend(converted.map_err(|problem| format!("protocols[{at}].{problem}"))?);
        }
        if ports.is_empty() {
            Err("protocols: it is empty; leave it out for all".to_owned())
        } else {
            Ok(ports)
        }
    });
    Ok(Rule {
        peers: Some(specs),
        ports: ports.transpose()?,
    })
}

/// Converts a peer, or a subject.
fn peer(written: &ClusterPeer) -> Result<Vec<PeerSpec>, String> {
    known(&written.others)?;
    let select = |field: &str, written: Option<&LabelSelector>| {
        let selected = written.map_or(Ok(Selector::default()), selector);
        selected.map_err(|problem| format!("{field}: {problem}"))
    };
    match (
        &written.namespaces,
        &written.pods,
        &written.nodes,
        &written.networks,
    ) {
        (Some(namespaces), None, None, None) => Ok(vec![PeerSpec::Pods {
            namespaces: Some(select("namespaces", Some(namespaces))?),
            pods: Some(Selector::default()),
        }]),
        (None, Some(pods), None, None) => {
            known(&pods.others)?;
            Ok(vec![PeerSpec::Pods {
                namespaces: Some(select(
                    "pods.namespaceSelector",
                    pods.namespace_selector.as_ref(),
                )?),
                pods: Some(select("pods.podSelector", pods.pod_selector.as_ref())?),
            }])
        }
        (None, None, Some(nodes), None) => Ok(vec![PeerSpec::Nodes(select("nodes", Some(nodes))?)]),
        (None, None, None, Some(networks)) => networks
            .iter()
            .map(|text| {
                let range: Cidr =
                    text.parse().map_err(|error| format!("networks: {error}; correct it"))?;
                Ok(PeerSpec::Block(Block {
                    range,
                    except: Vec::new(),
                }))
            })
            .collect(),
        _ => Err("one of namespaces, pods, nodes and networks is needed".to_owned()),
    }
}

/// Converts a protocol with its ports.
fn ports(written: &ClusterProtocol) -> Result<Vec<PolicyPort>, String> {
    known(&written.others)?;
    let mut of = [
        (Protocol::Tcp, &written.tcp),
        (Protocol::Udp, &written.udp),
        (Protocol::Sctp, &written.sctp),
    ]
    .into_iter()
    .filter_map(|(protocol, ports)| Some((protocol, ports.as_ref()?)));
    match (of.next(), of.next(), &written.destination_named_port) {
        (Some((protocol, ports)), None, None) => Ok(vec![port(protocol, ports)?]),
        (None, None, Some(name)) if !name.is_empty() => {
            Ok(Protocol::ALL.map(|protocol| PolicyPort::Named(protocol, shared(name))).to_vec())
        }
        _ => Err("one of tcp, udp, sctp and destinationNamedPort is needed".to_owned()),
    }
}

fn port(protocol: Protocol, written: &ClusterPorts) -> Result<PolicyPort, String> {
    known(&written.others)?;
    let Some(port) = &written.destination_port else {
        return Ok(PolicyPort::All(protocol));
    };
    known(&port.others)?;
    let bounds = match (port.number, port.range) {
        (Some(number), None) => port_number(number).map(|port| (port, port)),
        (None, Some(range)) => port_number(range.start).zip(port_number(range.end)),
        _ => None,
    };
    let bounds = bounds.filter(|(first, last)| first <= last);
    let (first, last) =
        bounds.ok_or("destinationPort: a number or a range is needed, of 1 to 65535")?;
    Ok(PolicyPort::Range(protocol, first, last))
}

/// Refuses fields that are not known.
fn known(others: &Others) -> Result<(), String> {
    match others.0.first() {
        None => Ok(()),
        Some(name) => Err(format!("{name:?}: kplane does not know this field")),
    }
}

/// Returns the labels of a Node.
pub fn node_labels(node: &k8s::Node) -> Labels {
    shared_labels(&node.labels)
}
