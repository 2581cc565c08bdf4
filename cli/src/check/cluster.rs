//! Checks that compare the objects of the cluster with what the control plane knows.

use std::collections::BTreeSet;

use kplane_proto::v1::{self as pb, NodeState};

use super::{Finding, connected, names};
use crate::migrate::pods::PodState;
use crate::migrate::snapshot::{Mark, NodeSnapshot, Objects, Snapshot};
use crate::migrate::{KPLANE, LABEL};

/// The taint of nodes whose proxy does not work yet.
const NOT_READY: &str = "kplane.io/not-ready";

/// The names of the checks of this module.
const CHECKS: [&str; 4] = ["agents", "kube-proxy", "leftovers", "taints"];

/// Returns the findings without a cluster, or with one that cannot be read. Agents are compared with the nodes that the
/// control plane knows.
pub(crate) fn without(why: &str, skipped: bool, fleet: Option<&pb::Fleet>) -> Vec<Finding> {
    let finding = |check| match (fleet, skipped) {
        (Some(fleet), _) if check == CHECKS[0] => agents_of(fleet),
        (_, true) => Finding::skipped(check, why),
        (_, false) => Finding::unknown(check, why, "kubectl get nodes"),
    };
    CHECKS.map(finding).into()
}

/// Returns whether all nodes that the control plane knows have an agent that is connected.
fn agents_of(fleet: &pb::Fleet) -> Finding {
    let there: BTreeSet<&str> = connected(fleet).map(|node| node.name.as_str()).collect();
    let all = fleet.nodes.iter().map(|node| node.name.as_str());
    let gone: Vec<&str> = all.filter(|node| !there.contains(node)).collect();
    let text = format!(
        "{} of {} nodes have an agent that is connected",
        there.len(),
        fleet.nodes.len()
    );
    if gone.is_empty() {
        Finding::ok(CHECKS[0], text)
    } else {
        Finding::bad(CHECKS[0], text, "kpctl get nodes").with(vec![names(&gone)])
    }
}

pub(crate) fn findings(objects: &Objects) -> Vec<Finding> {
    let snapshot = Snapshot::from(objects);
    vec![
        agents(&snapshot),
        kube_proxy(&snapshot),
        leftovers(&snapshot, objects),
        taints(objects, &snapshot),
    ]
}

/// Returns whether kplane should serve a node.
fn is_ours(node: &NodeSnapshot, snapshot: &Snapshot) -> bool {
    let limited = snapshot.agents.as_ref().is_some_and(|agents| agents.limited);
    node.linux && (!limited || node.mark == Mark::Kplane)
}

/// Returns whether an agent serves a node at this moment.
fn is_connected(node: &NodeSnapshot) -> bool {
    let state = node.served.as_ref().map(|served| served.state);
    state.is_some_and(|state| {
        !matches!(
            state,
            NodeState::NoAgent
                | NodeState::Disconnected
                | NodeState::Unknown
                | NodeState::Unspecified
        )
    })
}

/// Returns the nodes of kplane without an agent that is connected.
pub(super) fn lacking(snapshot: &Snapshot) -> Vec<&NodeSnapshot> {
    snapshot
        .nodes
        .iter()
        .filter(|node| is_ours(node, snapshot) && !is_connected(node))
        .collect()
}

/// Returns the nodes that are left to kube-proxy although none runs there.
fn unserved(snapshot: &Snapshot) -> Vec<&NodeSnapshot> {
    snapshot
        .nodes
        .iter()
        .filter(|node| node.linux && !is_ours(node, snapshot) && !is_connected(node))
        .filter(|node| match node.kube_proxy {
            PodState::Ready | PodState::Leaving => false,
            // No pod is ready on a node that is not Ready.
            PodState::Waiting { .. } => node.ready,
            PodState::Absent | PodState::Succeeded => true,
        })
        .collect()
}

fn agents(snapshot: &Snapshot) -> Finding {
    const CHECK: &str = "agents";
    if let Some(error) = &snapshot.plane_error {
        return Finding::unknown(CHECK, error, "kpctl status");
    }
    let ours = snapshot.nodes.iter().filter(|node| is_ours(node, snapshot)).count();
    let (lacking, unserved) = (lacking(snapshot), unserved(snapshot));
    let others = snapshot.nodes.len() - ours;
    let mut text = format!(
        "{} of {ours} nodes have an agent that is connected",
        ours - lacking.len(),
    );
    if !unserved.is_empty() {
        text = format!(
            "{text}; {} more have neither an agent nor a running kube-proxy",
            unserved.len()
        );
    } else if others > 0 {
        text = format!("{text}; {others} more are not kplane's");
    }
    if lacking.is_empty() && unserved.is_empty() {
        return Finding::ok(CHECK, text);
    }
    let of_unserved = unserved.iter().take(super::NAMED).map(|node| {
        let why = match &node.kube_proxy {
            PodState::Waiting { reason, .. } => format!("kube-proxy does not run: {reason}"),
            _ => "no program updates the rules of Services there".to_owned(),
        };
        format!("{}: {why}", node.name)
    });
    let of_lacking = lacking.iter().take(super::NAMED).map(|node| {
        let why = match (&node.agent, node.ready) {
            (_, false) => "the node is not Ready".to_owned(),
            (PodState::Absent, _) => "no pod of kplane-nodeagent runs there".to_owned(),
            (PodState::Waiting { reason, .. }, _) => reason.clone(),
            _ => "the agent does not reach the control plane".to_owned(),
        };
        format!("{}: {why}", node.name)
    });
    let mut details: Vec<String> = of_unserved.chain(of_lacking).collect();
    let remedy = if unserved.is_empty() {
        "kubectl -n kplane describe pods -l app.kubernetes.io/component=nodeagent".to_owned()
    } else {
        serve(snapshot, &unserved)
    };
    // k3s and others have kube-proxy inside another program, which may serve these nodes.
    if lacking.is_empty() && snapshot.kube_proxy.is_none() && !snapshot.saved {
        details.push("unless another program there has kube-proxy inside, as k3s has".to_owned());
        return Finding::warning(CHECK, text, &remedy).with(details);
    }
    Finding::bad(CHECK, text, &remedy).with(details)
}

/// Returns the command that lets kplane serve these nodes.
fn serve(snapshot: &Snapshot, nodes: &[&NodeSnapshot]) -> String {
    let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
    match snapshot.kube_proxy {
        Some(_) => format!("kpctl migrate start --node {}", names.join(" --node ")),
        None => format!(
            "kubectl label node --overwrite {} {LABEL}={KPLANE}",
            names.join(" ")
        ),
    }
}

fn kube_proxy(snapshot: &Snapshot) -> Finding {
    const CHECK: &str = "kube-proxy";
    let both: Vec<&str> = snapshot
        .nodes
        .iter()
        .filter(|node| {
            node.kube_proxy.is_there() && (is_connected(node) || node.mark == Mark::Kplane)
        })
        .map(|node| node.name.as_str())
        .collect();
    if !both.is_empty() {
        let text = format!("runs beside an agent on {} nodes", both.len());
        let remedy = if snapshot.record().is_some() {
            "kpctl migrate start --all"
        } else {
            "kpctl migrate plan"
        };
        return Finding::bad(CHECK, text, remedy).with(vec![names(&both)]);
    }
    match &snapshot.kube_proxy {
        None => Finding::ok(CHECK, "has no DaemonSet"),
        Some(_) => Finding::ok(CHECK, "runs on no node that has an agent"),
    }
}

fn leftovers(snapshot: &Snapshot, objects: &Objects) -> Finding {
    let mut details = Vec::new();
    let returning: Vec<&str> = snapshot
        .nodes
        .iter()
        .filter(|node| node.mark == Mark::Returning)
        .map(|node| node.name.as_str())
        .collect();
    if !returning.is_empty() {
        details.push(format!(
            "on the way back to kube-proxy: {}",
            names(&returning)
        ));
    }
    let cleanups = objects.cleanup_pods.len();
    if cleanups > 0 {
        details.push(format!("{cleanups} cleanup pods"));
    }
    let none = snapshot.nodes.iter().all(|node| node.mark == Mark::None);
    let kept = snapshot.kube_proxy.as_ref().is_some_and(|set| set.keeps_off);
    if none && kept {
        details.push("kube-proxy's DaemonSet keeps off nodes that do not exist".to_owned());
    }
    let alone = snapshot.nodes.iter().filter(|node| node.mark == Mark::Kplane).count();
    if snapshot.agents.is_none() && alone > 0 {
        details.push(format!(
            "{alone} nodes have the label kplane.io/proxy, and no agents exist"
        ));
    }
    if details.is_empty() {
        Finding::ok("leftovers", "none of a migration")
    } else {
        let text = "a migration was not ended";
        Finding::bad("leftovers", text, "kpctl migrate status").with(details)
    }
}

fn taints(objects: &Objects, snapshot: &Snapshot) -> Finding {
    let tainted: Vec<&str> = objects
        .nodes
        .iter()
        .filter(|node| {
            node.spec
                .iter()
                .flat_map(|spec| &spec.taints)
                .flatten()
                .into_iter()
                .any(|taint| taint.key == NOT_READY)
        })
        .filter_map(|node| node.metadata.name.as_deref())
        .collect();
    if tainted.is_empty() {
        return Finding::ok("taints", format!("no node has {NOT_READY}"));
    }
    let serving = tainted.iter().filter(|name| snapshot.node(name).is_some_and(is_connected));
    let text = format!("{} nodes have {NOT_READY}", tainted.len());
    let finding = match serving.count() {
        // The taint is there to keep pods off these nodes.
        0 => Finding::warning("taints", text, "kpctl status"),
        _ => Finding::bad(
            "taints",
            format!("{text}, though an agent serves some of them"),
            "kubectl -n kplane logs deployment/kplane-controlplane",
        ),
    };
    finding.with(vec![names(&tainted)])
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::apps::v1::DaemonSet;
    use k8s_openapi::api::core::v1::Node;
    use kplane_proto::v1 as pb;
    use serde_json::{Value, json};

    use super::*;
    use crate::check::Outcome;

    fn objects(node: Value, state: NodeState) -> Objects {
        let node: Node = serde_json::from_value(node).unwrap();
        let name = node.metadata.name.clone().unwrap();
        Objects {
            nodes: vec![node],
            agents: Some(serde_json::from_value(json!({})).unwrap()),
            fleet: Some(Ok(pb::Fleet {
                nodes: vec![pb::NodeStatus {
                    name,
                    state: state.into(),
                    ..pb::NodeStatus::default()
                }],
                ..pb::Fleet::default()
            })),
            ..Objects::default()
        }
    }

    fn bad(objects: &Objects) -> Vec<String> {
        let all = findings(objects);
        let checks: Vec<&str> = all.iter().map(|finding| finding.check.as_str()).collect();
        assert_eq!(checks, CHECKS);
        all.iter()
            .filter(|finding| finding.outcome == Outcome::Bad)
            .map(|finding| finding.check.clone())
            .collect()
    }

    fn node(labels: &Value) -> Value {
        json!({ "metadata": { "name": "a", "labels": labels } })
    }

    /// Without the objects of a cluster, agents are compared with the nodes that the control plane knows.
    #[test]
    fn an_agent_that_is_gone_is_bad_without_a_cluster_too() {
        let mut fleet = pb::Fleet::default();
        let agents = |fleet: &pb::Fleet| without("no kubeconfig", true, Some(fleet)).remove(0);
        for (name, state) in [("a", NodeState::InSync), ("b", NodeState::Disconnected)] {
            assert_eq!(agents(&fleet).outcome, Outcome::Ok);
            fleet.nodes.push(pb::NodeStatus {
                name: name.to_owned(),
                state: state.into(),
                ..pb::NodeStatus::default()
            });
        }
        let gone = agents(&fleet);
        assert_eq!((gone.outcome, &*gone.check), (Outcome::Bad, "agents"));
        assert_eq!(gone.details, ["b"]);
        let unknown = without("no kubeconfig", true, None).remove(0);
        assert_eq!(unknown.outcome, Outcome::Skipped);
    }

    #[test]
    fn each_trouble_has_its_check() {
        let fine = objects(node(&json!({})), NodeState::InSync);
        assert_eq!(bad(&fine), [""; 0]);
        let away = objects(node(&json!({})), NodeState::NoAgent);
        assert_eq!(bad(&away), ["agents"]);
        let windows = json!({ "kubernetes.io/os": "windows" });
        let windows = objects(node(&windows), NodeState::NoAgent);
        assert_eq!(bad(&windows), [""; 0]);
        let mut beside = fine.clone();
        beside.kube_proxy_pods = vec![
            serde_json::from_value(json!({ "spec": { "nodeName": "a", "containers": [] } }))
                .unwrap(),
        ];
        assert_eq!(bad(&beside), ["kube-proxy"]);
        let returning = json!({ "kplane.io/proxy": "returning" });
        assert_eq!(
            bad(&objects(node(&returning), NodeState::InSync)),
            ["leftovers"]
        );
        let mut tainted = node(&json!({}));
        tainted["spec"] = json!({ "taints": [{ "key": NOT_READY, "effect": "NoSchedule" }] });
        assert_eq!(bad(&objects(tainted, NodeState::InSync)), ["taints"]);
    }

    /// A cluster in which agents run on labelled nodes only, and in which `finish` has deleted kube-proxy: node a has
    /// the label, node b does not.
    fn limited() -> Objects {
        let mut all = objects(
            node(&json!({ "kplane.io/proxy": "kplane" })),
            NodeState::InSync,
        );
        let other = json!({ "metadata": { "name": "b" }, "status": { "conditions": [
            { "type": "Ready", "status": "True" },
        ] } });
        all.nodes.push(serde_json::from_value(other).unwrap());
        let limit = json!({ "spec": { "selector": {}, "template": { "spec": {
            "containers": [], "affinity": { "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [{
                    "matchExpressions": [
                        { "key": "kplane.io/proxy", "operator": "In", "values": ["kplane"] },
                    ],
                }] },
            } },
        } } } });
        all.agents = Some(serde_json::from_value(limit).unwrap());
        all.saved = true;
        all
    }

    #[test]
    fn a_node_without_an_agent_and_without_a_running_kube_proxy_is_bad() {
        let agents = |objects: &Objects| findings(objects).remove(0);
        let mut all = limited();
        let nobody = agents(&all);
        assert_eq!(nobody.outcome, Outcome::Bad, "{nobody:?}");
        assert_eq!(
            nobody.details,
            ["b: no program updates the rules of Services there"]
        );
        let label = "kubectl label node --overwrite b kplane.io/proxy=kplane";
        assert_eq!(nobody.remedy, label);

        all.saved = false;
        assert_eq!(agents(&all).outcome, Outcome::Warning, "k3s may serve it");

        all.kube_proxy = Some(DaemonSet::default());
        assert_eq!(agents(&all).outcome, Outcome::Bad);
        assert_eq!(agents(&all).remedy, "kpctl migrate start --node b");
        let pod = |status: &str| {
            let ready = json!([{ "type": "Ready", "status": status }]);
            json!({ "spec": { "nodeName": "b", "containers": [] },
                "status": { "phase": "Running", "conditions": ready } })
        };
        all.kube_proxy_pods = vec![serde_json::from_value(pod("False")).unwrap()];
        let details = agents(&all).details;
        assert_eq!(details, ["b: kube-proxy does not run: Running"]);
        all.kube_proxy_pods = vec![serde_json::from_value(pod("True")).unwrap()];
        assert_eq!(agents(&all).outcome, Outcome::Ok);

        for other in [
            json!({ "kubernetes.io/os": "windows" }),
            json!({ "kubernetes.io/os": "linux", "type": "virtual-kubelet" }),
        ] {
            let mut all = limited();
            all.nodes[1].metadata.labels = serde_json::from_value(other).unwrap();
            assert_eq!(agents(&all).outcome, Outcome::Ok);
        }
    }
}
