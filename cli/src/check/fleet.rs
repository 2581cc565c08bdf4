//! Checks of what the control plane knows.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use kplane_model::nodes_agree;
use kplane_proto::v1::{self as pb, NodeState};

use super::host_checks::host_checks;
use super::policies::policies;
use super::{Finding, connected, names};

/// Time since the last contact with the origin of its data after which a control plane's data counts as old, in
/// milliseconds. Watches of the API server receive something at least once a minute.
const STALE_MS: u64 = 90_000;

/// Returns the findings of a fleet.
pub(crate) fn findings(fleet: &pb::Fleet, kpctl: &str) -> Vec<Finding> {
    vec![
        reachable(fleet),
        source(fleet),
        input(fleet),
        replicas(fleet),
        in_sync(fleet),
        verified(fleet),
        failures(fleet),
        policies(fleet),
        host_checks(fleet),
        endpoints(fleet),
        conflicts(fleet),
        versions(fleet, kpctl),
        plain_text(fleet),
    ]
}

/// The names of the checks in [`findings`], for a fleet that is not known.
const CHECKS: [&str; 12] = [
    "source",
    "input",
    "replicas",
    "in-sync",
    "verified",
    "failures",
    "policies",
    "surroundings",
    "endpoints",
    "conflicts",
    "versions",
    "plain-text",
];

/// Returns the findings if the control plane does not answer.
pub(crate) fn unreachable(error: &str) -> Vec<Finding> {
    let remedy = "kubectl -n kplane get pods -o wide";
    let mut findings = vec![Finding::bad("control-plane", error, remedy)];
    let blind =
        |check| Finding::unknown(check, "the control plane does not answer", "kpctl status");
    findings.extend(CHECKS.map(blind));
    findings
}

fn plane(fleet: &pb::Fleet) -> pb::ControlPlaneStatus {
    fleet.control_plane.clone().unwrap_or_default()
}

fn reachable(fleet: &pb::Fleet) -> Finding {
    let plane = plane(fleet);
    let text = format!(
        "version {}, {} Services, {} endpoints",
        plane.version, plane.services, plane.endpoints
    );
    Finding::ok("control-plane", text)
}

fn source(fleet: &pb::Fleet) -> Finding {
    const CHECK: &str = "source";
    let plane = plane(fleet);
    if !plane.synced {
        let text = format!("the source {} was not read completely yet", plane.source);
        return Finding::bad(CHECK, text, "kpctl status");
    }
    if let Some(held) = &plane.held {
        let text = format!("vanished objects are held back: {}", held.reason);
        return Finding::bad(CHECK, text, "kpctl approve");
    }
    if plane.confidence() == pb::Confidence::Partial {
        let text = format!("something may be missing: {}", plane.doubt);
        return Finding::bad(CHECK, text, "kpctl status");
    }
    if plane.upstream_age_ms > STALE_MS {
        let seconds = plane.upstream_age_ms / 1000;
        let text = format!("no contact with the source for {seconds} s");
        return Finding::bad(
            CHECK,
            text,
            "kubectl -n kplane logs deployment/kplane-controlplane",
        );
    }
    Finding::ok(CHECK, format!("{} was read completely", plane.source))
}

fn input(fleet: &pb::Fleet) -> Finding {
    let plane = plane(fleet);
    let text = format!("{} errors, {} warnings", plane.errors, plane.warnings);
    if plane.errors == 0 {
        return Finding::ok("input", text);
    }
    let errors = plane.issues.iter().filter(|issue| issue.severity() != pb::Severity::Warning);
    let details = errors.take(super::NAMED).map(|issue| {
        let place = format!("{} {}/{}", issue.kind, issue.namespace, issue.name);
        format!("{place}: {}", issue.reason)
    });
    Finding::bad("input", text, "kpctl status").with(details.collect())
}

fn replicas(fleet: &pb::Fleet) -> Finding {
    let missing = &fleet.missing_replicas;
    if missing.is_empty() {
        let text = match fleet.replicas {
            0 => "the replica that was asked knows of no further ones".to_owned(),
            all => format!("{all} answered"),
        };
        return Finding::ok("replicas", text);
    }
    let details = missing.iter().map(|replica| format!("{}: {}", replica.address, replica.reason));
    let text = format!("{} did not answer", missing.len());
    Finding::bad("replicas", text, "kubectl -n kplane get pods -o wide").with(details.collect())
}

/// Returns the nodes in these states.
fn nodes_in<'a>(fleet: &'a pb::Fleet, states: &[NodeState]) -> Vec<&'a pb::NodeStatus> {
    fleet.nodes.iter().filter(|node| states.contains(&node.state())).collect()
}

fn of_nodes(nodes: &[&pb::NodeStatus]) -> Vec<String> {
    let line = |node: &&pb::NodeStatus| format!("{}: {}", node.name, node.last_error);
    nodes.iter().take(super::NAMED).map(line).collect()
}

fn in_sync(fleet: &pb::Fleet) -> Finding {
    const CHECK: &str = "in-sync";
    let all = fleet.nodes.len();
    // Nodes without an agent are the matter of another check.
    let bad = nodes_in(
        fleet,
        &[NodeState::Failing, NodeState::Holding, NodeState::Unknown],
    );
    let syncing = nodes_in(fleet, &[NodeState::Syncing]).len();
    let good = nodes_in(
        fleet,
        &[NodeState::InSync, NodeState::Frozen, NodeState::Unverified],
    )
    .len();
    let away = all - connected(fleet).count();
    let text = match away {
        0 => format!("{good} of {all} nodes hold what they should hold"),
        away => {
            format!(
                "{good} of {all} nodes hold what they should hold, and {away} have no agent now"
            )
        }
    };
    match (bad.is_empty(), syncing) {
        (false, _) => Finding::bad(CHECK, text, "kpctl status").with(of_nodes(&bad)),
        (true, 0) => Finding::ok(CHECK, text),
        (true, _) => Finding::warning(
            CHECK,
            format!("{text}, {syncing} are about to"),
            "kpctl status -w",
        ),
    }
}

fn verified(fleet: &pb::Fleet) -> Finding {
    let connected = fleet.nodes.iter().filter(|node| !node.peer.is_empty());
    let (mut good, mut never, mut overdue) = (0, Vec::new(), Vec::new());
    for node in connected {
        let families: Vec<&pb::FamilyStatus> =
            node.report.iter().flat_map(|report| &report.families).collect();
        let late = families.iter().any(|family| family.verification_overdue);
        if late || node.state() == NodeState::Unverified {
            overdue.push(node.name.as_str());
        } else if families.is_empty() || families.iter().any(|family| family.verified_at_ms == 0) {
            never.push(node.name.as_str());
        } else {
            good += 1;
        }
    }
    let text = format!("{good} nodes have read their kernel back and found it as it should be");
    match (overdue.is_empty(), never.is_empty()) {
        (false, _) => Finding::bad("verified", text, "kpctl status -o wide")
            .with(vec![format!("too long ago: {}", names(&overdue))]),
        (true, false) => Finding::warning("verified", text, "kpctl check, a minute later")
            .with(vec![format!("not yet: {}", names(&never))]),
        (true, true) => Finding::ok("verified", text),
    }
}

fn failures(fleet: &pb::Fleet) -> Finding {
    let (mut count, mut details, mut service) = (0, Vec::new(), None);
    for node in &fleet.nodes {
        let report = node.report.iter();
        let failures = report.flat_map(|report| &report.failures);
        // Those of NetworkPolicies are the matter of another check.
        for failure in failures.filter(|failure| !failure.policies) {
            count += 1;
            if let (None, Some(key)) = (&service, &failure.key) {
                service = Some(format!("{}/{}", key.namespace, key.name));
            }
            if details.len() < super::NAMED {
                details.push(format!("{}: {}", node.name, failure.reason));
            }
        }
    }
    if count == 0 {
        return Finding::ok("failures", "no agent reports any");
    }
    let remedy = service.map_or_else(
        || "kpctl status -o wide".to_owned(),
        |service| format!("kpctl describe service {service}"),
    );
    Finding::bad("failures", format!("{count} reported by agents"), &remedy).with(details)
}

/// Returns whether nodes agree that an endpoint is ill, because their userspace proxies avoid it.
fn endpoints(fleet: &pb::Fleet) -> Finding {
    const CHECK: &str = "endpoints";
    let mut avoided = BTreeMap::<(String, &str), BTreeSet<&str>>::new();
    for node in connected(fleet) {
        for one in node.report.iter().flat_map(|report| &report.avoided) {
            if let Some(key) = &one.key {
                let service = format!("{}/{}", key.namespace, key.name);
                let nodes = avoided.entry((service, &one.address)).or_default();
                nodes.insert(&node.name);
            }
        }
    }
    let all = avoided.len();
    let mut ill: Vec<_> =
        avoided.into_iter().filter(|(_, nodes)| nodes_agree(nodes.len())).collect();
    ill.sort_by_key(|(_, nodes)| Reverse(nodes.len()));
    let Some(((first, _), _)) = ill.first() else {
        let text = match all {
            0 => "no userspace proxy avoids any".to_owned(),
            all => format!(
                "{all} avoided by the userspace proxy of a single node: kpctl get nodes -o json lists them"
            ),
        };
        return Finding::ok(CHECK, text);
    };
    let details = ill.iter().take(super::NAMED).map(|((service, address), nodes)| {
        let names: Vec<&str> = nodes.iter().copied().collect();
        format!(
            "{service}: {address} on {} nodes: {}",
            nodes.len(),
            super::names(&names)
        )
    });
    let text = format!(
        "{} avoided by the userspace proxies of several nodes",
        ill.len()
    );
    let remedy = format!("kpctl describe service {first}");
    Finding::warning(CHECK, text, &remedy).with(details.collect())
}

fn conflicts(fleet: &pb::Fleet) -> Finding {
    let bad = nodes_in(fleet, &[NodeState::Conflict]);
    match bad.len() {
        0 => Finding::ok("conflicts", "no two agents claim the same node or kernel"),
        count => Finding::bad(
            "conflicts",
            format!("two agents claim the same node or kernel, on {count} nodes"),
            "kubectl get pods -A -o wide -l app.kubernetes.io/component=nodeagent",
        )
        .with(of_nodes(&bad)),
    }
}

fn versions(fleet: &pb::Fleet, kpctl: &str) -> Finding {
    let plane = plane(fleet).version;
    let mut agents: BTreeMap<&str, usize> = BTreeMap::new();
    for node in fleet.nodes.iter().filter(|node| !node.peer.is_empty()) {
        *agents.entry(&node.agent_version).or_default() += 1;
    }
    let all: BTreeSet<&str> = agents.keys().copied().chain([plane.as_str(), kpctl]).collect();
    if all.len() <= 1 {
        return Finding::ok("versions", format!("{kpctl} everywhere"));
    }
    let mut details = vec![format!("kpctl {kpctl}, control plane {plane}")];
    details.extend(agents.iter().map(|(version, count)| format!("{count} agents {version}")));
    let text = "they differ, as during an upgrade";
    Finding::warning("versions", text, "kpctl get nodes").with(details)
}

fn plain_text(fleet: &pb::Fleet) -> Finding {
    let ports = plane(fleet).plain_text_ports;
    if ports.is_empty() {
        Finding::ok(
            "plain-text",
            "no port is open to other machines without TLS",
        )
    } else {
        Finding::warning(
            "plain-text",
            "other machines reach ports without TLS",
            "remove --insecure from the control plane",
        )
        .with(ports)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Outcome;

    fn fleet(nodes: Vec<pb::NodeStatus>) -> pb::Fleet {
        pb::Fleet {
            control_plane: Some(pb::ControlPlaneStatus {
                version: "1".to_owned(),
                synced: true,
                ..pb::ControlPlaneStatus::default()
            }),
            nodes,
            ..pb::Fleet::default()
        }
    }

    fn node(state: NodeState) -> pb::NodeStatus {
        pb::NodeStatus {
            name: "a".to_owned(),
            state: state.into(),
            agent_version: "1".to_owned(),
            peer: "192.0.2.1:1".to_owned(),
            report: Some(pb::Report {
                families: vec![pb::FamilyStatus {
                    verified_at_ms: 1,
                    ..pb::FamilyStatus::default()
                }],
                ..pb::Report::default()
            }),
            ..pb::NodeStatus::default()
        }
    }

    fn is_fine(finding: &Finding) -> bool {
        matches!(finding.outcome, Outcome::Ok | Outcome::Skipped)
    }

    fn bad(fleet: &pb::Fleet) -> Vec<String> {
        let all = findings(fleet, "1");
        assert_eq!(all.len(), CHECKS.len() + 1);
        for (finding, check) in all.iter().skip(1).zip(CHECKS) {
            assert_eq!(finding.check, check);
        }
        for finding in &all {
            let fine = is_fine(finding);
            assert_eq!(finding.remedy.is_empty(), fine, "{finding:?}");
        }
        all.into_iter()
            .filter(|finding| !is_fine(finding))
            .map(|finding| finding.check)
            .collect()
    }

    #[test]
    fn each_trouble_has_its_check_and_a_command() {
        assert_eq!(bad(&fleet(vec![node(NodeState::InSync)])), [""; 0]);
        assert_eq!(bad(&fleet(vec![node(NodeState::Conflict)])), ["conflicts"]);
        assert_eq!(bad(&fleet(vec![node(NodeState::Failing)])), ["in-sync"]);
        assert_eq!(bad(&fleet(vec![node(NodeState::Unverified)])), ["verified"]);
        let mut other = node(NodeState::InSync);
        other.agent_version = "2".to_owned();
        assert_eq!(bad(&fleet(vec![other])), ["versions"]);
        let mut failing = node(NodeState::InSync);
        failing.report.iter_mut().for_each(|report| {
            report.failures.push(pb::ObjectFailure::default());
        });
        assert_eq!(bad(&fleet(vec![failing])), ["failures"]);
        let mut open = node(NodeState::InSync);
        open.report.iter_mut().for_each(|report| {
            report.failures.push(pb::ObjectFailure {
                policies: true,
                ..pb::ObjectFailure::default()
            });
        });
        assert_eq!(bad(&fleet(vec![open])), ["policies"]);
        let mut missing = fleet(vec![node(NodeState::InSync)]);
        missing.missing_replicas.push(pb::MissingReplica::default());
        assert_eq!(bad(&missing), ["replicas"]);
        let mut unread = fleet(vec![node(NodeState::InSync)]);
        unread.control_plane = None;
        assert_eq!(bad(&unread), ["source", "versions"]);
    }

    #[test]
    fn without_a_control_plane_all_checks_are_named() {
        let all = unreachable("refused");
        assert_eq!(all.len(), CHECKS.len() + 1);
        assert_eq!(crate::check::outcome(&all), Outcome::Bad);
    }

    /// A node whose proxy avoids an endpoint.
    fn avoiding(name: &str) -> pb::NodeStatus {
        let mut node = node(NodeState::InSync);
        node.name = name.to_owned();
        node.report.as_mut().unwrap().avoided = vec![pb::AvoidedEndpoint {
            key: Some(pb::ServiceKey {
                namespace: "shop".to_owned(),
                name: "web".to_owned(),
                ..pb::ServiceKey::default()
            }),
            address: "10.1.0.1:8080".to_owned(),
        }];
        node
    }

    #[test]
    fn u53_nodes_that_avoid_the_same_endpoint_are_a_warning() {
        let one = endpoints(&fleet(vec![avoiding("a")]));
        assert_eq!(one.outcome, Outcome::Ok);
        assert!(one.summary.starts_with("1 avoided"), "{}", one.summary);
        let both = endpoints(&fleet(vec![avoiding("a"), avoiding("b")]));
        assert_eq!(both.outcome, Outcome::Warning);
        assert_eq!(both.details, ["shop/web: 10.1.0.1:8080 on 2 nodes: a, b"]);
        assert_eq!(both.remedy, "kpctl describe service shop/web");
        let gone = pb::NodeStatus {
            state: NodeState::Disconnected.into(),
            ..avoiding("b")
        };
        let gone = endpoints(&fleet(vec![avoiding("a"), gone]));
        assert_eq!(gone.outcome, Outcome::Ok, "its agent is not connected");
    }
}
