//! The next step of a migration, from a snapshot of the cluster. Pure: the same snapshot has the same step, however often
//! kpctl asks, and on which machine.

use super::order::Order;
use super::record::Direction;
use super::snapshot::{Agents, Mark, NodeSnapshot, Snapshot};
use super::stage::Stage;

/// The reason why a migration cannot go on, and what to type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Blocked {
    pub(crate) problem: String,
    /// A command, or a sentence.
    pub(crate) remedy: String,
}

/// A node that the next step waits for, or that is left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    pub(crate) node: String,
    pub(crate) reason: String,
    /// Whether waiting does not help.
    pub(crate) hopeless: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing can be done.
    Blocked(Blocked),
    /// An operator paused the migration.
    Paused,
    /// Create kube-proxy's DaemonSet as it was saved.
    Recreate,
    /// Keep kube-proxy's DaemonSet off nodes of kplane.
    KeepOff,
    /// Set the label of these nodes.
    Mark { nodes: Vec<String>, value: Mark },
    /// Remove kplane's rules from a node.
    CleanUp(String),
    /// Remove the label of a node, and its cleanup pod.
    Unmark(String),
    /// Wait for these nodes.
    Wait(Vec<Waiting>),
    /// Let kube-proxy's DaemonSet onto all nodes again.
    Restore,
    /// All chosen nodes are where they should be, except for these.
    Done(Vec<Waiting>),
}

/// Returns the next step.
pub(crate) fn next(snapshot: &Snapshot, order: &Order) -> Step {
    if let Some(blocked) = blocked(snapshot, order) {
        return Step::Blocked(blocked);
    }
    let Some(kube_proxy) = &snapshot.kube_proxy else {
        return Step::Recreate;
    };
    if kube_proxy.record.as_ref().is_some_and(|record| record.paused) {
        return Step::Paused;
    }
    if order.direction == Direction::ToKplane
        && !(kube_proxy.keeps_off && kube_proxy.record.is_some())
    {
        return Step::KeepOff;
    }
    let nodes: Vec<(&NodeSnapshot, Stage)> =
        snapshot.nodes.iter().map(|node| (node, Stage::of(node))).collect();
    match order.direction {
        Direction::ToKplane => forward(&nodes, order),
        Direction::Back => back(snapshot, &nodes, order),
    }
}

/// Returns what has to be changed before anything can be done.
pub(crate) fn blocked(snapshot: &Snapshot, order: &Order) -> Option<Blocked> {
    let because = |problem: &str, remedy: &str| {
        Some(Blocked {
            problem: problem.to_owned(),
            remedy: remedy.to_owned(),
        })
    };
    match order.direction {
        Direction::ToKplane => {
            if snapshot.kube_proxy.is_none() {
                return because(
                    "kube-proxy has no DaemonSet in this cluster",
                    "kpctl check; --kube-proxy NAMESPACE/NAME names another DaemonSet",
                );
            }
            let Some(agents) = &snapshot.agents else {
                return because(
                    "kplane's agents have no DaemonSet in this cluster",
                    "helm install kplane deploy/chart --namespace kplane --create-namespace \
                     --set migration.enabled=true",
                );
            };
            if let Some(blocked) = unlimited(agents) {
                return Some(blocked);
            }
            let error = snapshot.plane_error.as_ref()?;
            because(
                &format!("no node can be verified without the control plane: {error}"),
                "kpctl status",
            )
        }
        Direction::Back if snapshot.kube_proxy.is_none() && !snapshot.saved => because(
            "kube-proxy has no DaemonSet, and ConfigMap kplane-kube-proxy does not have it either",
            "kubeadm init phase addon kube-proxy, or as your distribution installs it",
        ),
        Direction::Back => {
            let agents = snapshot.agents.as_ref();
            agents.and_then(unlimited).or_else(|| other_names(snapshot, order))
        }
    }
}

/// The command that gives the label to all nodes with an agent.
const LABEL_SERVED: &str = "kubectl label node --overwrite $(kubectl get pods --namespace kplane --selector \
                            app.kubernetes.io/component=nodeagent --output jsonpath='{.items[*].spec.nodeName}') \
                            kplane.io/proxy=kplane";

/// Returns the problem of agents that run on all nodes: they would not leave a node, and serve it beside kube-proxy.
fn unlimited(agents: &Agents) -> Option<Blocked> {
    (!agents.limited).then(|| Blocked {
        problem: "kplane's agents run on all nodes, and not only on those that are migrated"
            .to_owned(),
        // An agent leaves a node without the label, and its rules stay there.
        remedy: format!(
            "{LABEL_SERVED} && {}",
            upgrade(Some(agents), "migration.enabled=true")
        ),
    })
}

/// Returns the command that sets a value of the chart.
pub(crate) fn upgrade(agents: Option<&Agents>, set: &str) -> String {
    let release = agents.and_then(|agents| agents.release.as_deref());
    format!(
        "helm upgrade {} deploy/chart --namespace kplane --reset-then-reuse-values --set {set}",
        release.unwrap_or("kplane")
    )
}

/// Returns the problem of a node on which kplane uses names of kube-proxy that kube-proxy itself, in its mode, would
/// not take over.
fn other_names(snapshot: &Snapshot, order: &Order) -> Option<Blocked> {
    let mode = snapshot.mode.as_deref()?;
    let mut served = snapshot
        .nodes
        .iter()
        .filter(|node| node.mark == Mark::Kplane && order.chosen.has(&node.name))
        .filter_map(|node| Some((&node.name, node.served.as_ref()?)));
    let (node, served) =
        served.find(|(_, served)| served.shares_names() && served.backend != mode)?;
    Some(Blocked {
        problem: format!(
            "kplane uses {} on {node}, and kube-proxy would use {mode}: these share names in the \
             kernel, so that Services would be cut off on the way back",
            served.backend
        ),
        remedy: upgrade(snapshot.agents.as_ref(), &format!("agent.backend={mode}")),
    })
}

fn forward(nodes: &[(&NodeSnapshot, Stage)], order: &Order) -> Step {
    let waits = waits(nodes);
    let chosen = |node: &NodeSnapshot| order.chosen.has(&node.name);
    // A node that was on its way back turns round.
    let again: Vec<String> = nodes
        .iter()
        .filter(|(node, stage)| {
            chosen(node) && stage.is_on_its_way() && node.mark == Mark::Returning
        })
        .map(|(node, _)| node.name.clone())
        .collect();
    if !again.is_empty() {
        return Step::Mark {
            nodes: again,
            value: Mark::Kplane,
        };
    }
    let room = order.at_a_time.saturating_sub(waits.len());
    let (ready, left): (Vec<_>, Vec<_>) = nodes
        .iter()
        .filter(|(node, stage)| chosen(node) && *stage == Stage::KubeProxy)
        .partition(|(node, _)| node.ready);
    let next: Vec<String> = ready.iter().take(room).map(|(node, _)| node.name.clone()).collect();
    if !next.is_empty() && !waits.iter().any(|wait| wait.hopeless) {
        return Step::Mark {
            nodes: next,
            value: Mark::Kplane,
        };
    }
    if !waits.is_empty() {
        return Step::Wait(waits);
    }
    let left = left.into_iter().map(|(node, _)| Waiting {
        node: node.name.clone(),
        reason: "the node is not Ready".to_owned(),
        hopeless: false,
    });
    Step::Done(left.collect())
}

fn back(snapshot: &Snapshot, nodes: &[(&NodeSnapshot, Stage)], order: &Order) -> Step {
    for (node, stage) in nodes {
        match stage {
            Stage::ToCleanUp => return Step::CleanUp(node.name.clone()),
            Stage::ToUnmark => return Step::Unmark(node.name.clone()),
            _ => {}
        }
    }
    let returning: Vec<Waiting> = waits(nodes)
        .into_iter()
        .filter(|wait| snapshot.node(&wait.node).is_some_and(|node| node.mark == Mark::Returning))
        .collect();
    let room = order.at_a_time.saturating_sub(returning.len());
    let next: Vec<String> = snapshot
        .nodes
        .iter()
        .filter(|node| node.mark == Mark::Kplane && order.chosen.has(&node.name))
        .take(room)
        .map(|node| node.name.clone())
        .collect();
    if !next.is_empty() && !returning.iter().any(|wait| wait.hopeless) {
        return Step::Mark {
            nodes: next,
            value: Mark::Returning,
        };
    }
    if !returning.is_empty() {
        return Step::Wait(returning);
    }
    let marked = snapshot
        .nodes
        .iter()
        .any(|node| matches!(node.mark, Mark::Kplane | Mark::Returning));
    let kube_proxy = snapshot.kube_proxy.as_ref();
    if !marked && kube_proxy.is_some_and(|set| set.keeps_off || set.record.is_some()) {
        return Step::Restore;
    }
    Step::Done(Vec::new())
}

/// Returns the nodes that are still migrating, and what each of them waits for.
fn waits(nodes: &[(&NodeSnapshot, Stage)]) -> Vec<Waiting> {
    nodes
        .iter()
        .filter(|(_, stage)| stage.is_on_its_way())
        .map(|(node, stage)| Waiting {
            node: node.name.clone(),
            reason: stage.reason().to_owned(),
            hopeless: match stage {
                Stage::Moving(trouble) | Stage::Returning(trouble) => trouble.hopeless,
                _ => false,
            },
        })
        .collect()
}

/// Returns why kube-proxy's DaemonSet must not be deleted yet.
pub(crate) fn unfinished(snapshot: &Snapshot) -> Option<Blocked> {
    let mut nodes = snapshot.nodes.iter().map(|node| (node, Stage::of(node)));
    if let Some(error) = &snapshot.plane_error {
        return Some(Blocked {
            problem: format!("no node can be verified without the control plane: {error}"),
            remedy: "kpctl status".to_owned(),
        });
    }
    // kube-proxy serves a Linux node with any other value of the label.
    let (node, stage) = nodes.find(|(node, stage)| match stage {
        Stage::Kplane => false,
        Stage::Outside(_) => node.linux,
        _ => true,
    })?;
    let reason = match stage.reason() {
        "" => "kube-proxy serves it",
        reason => reason,
    };
    let remedy = match stage {
        Stage::Outside(_) => format!(
            "kubectl label node {} kplane.io/proxy- ; kpctl migrate start --all",
            node.name
        ),
        _ => "kpctl migrate start --all".to_owned(),
    };
    Some(Blocked {
        problem: format!("{} is not served by kplane: {reason}", node.name),
        remedy,
    })
}

#[cfg(test)]
mod tests;
