//! The next steps for nodes and input with problems.

use std::collections::{BTreeMap, BTreeSet};

use kplane_model::nodes_agree;

use super::IssueView;
use super::findings::FindingView;
use super::nodes::{NodeStateView, NodeView};

/// Returns the steps, the most useful first. `program` is the name by which the user calls this
/// program.
pub(crate) fn steps(nodes: &[NodeView], issues: &[IssueView], program: &str) -> Vec<String> {
    let mut steps = Vec::new();
    let failing = nodes.iter().flat_map(|node| &node.failures);
    if let Some(key) = failing.filter_map(|failure| failure.object.as_ref()).next() {
        let (namespace, name) = (&key.namespace, &key.service);
        steps.push(format!("{program} describe service {namespace}/{name}"));
    }
    if let Some(issue) = issues.iter().find(|issue| issue.is_error()) {
        steps.push(fix(issue));
    }
    let stopped = |node: &&NodeView| node.findings.iter().any(FindingView::is_error);
    if let Some(node) = nodes.iter().find(stopped) {
        steps.push(format!("{program} describe node {}", node.name));
    }
    steps.extend(ill(nodes).map(|name| format!("{program} describe service {name}")));
    let of = |state| nodes.iter().filter(move |node| node.state == state);
    let silent = |node: &&NodeView| node.failures.is_empty();
    steps.extend(about(of(NodeStateView::Failing).filter(silent), |nodes| {
        format!("read the log of kp-nodeagent on {nodes}")
    }));
    steps.extend(about(of(NodeStateView::Disconnected), |nodes| {
        format!("check that kp-nodeagent runs on {nodes} and reaches the control plane")
    }));
    steps.extend(about(of(NodeStateView::Holding), |nodes| {
        format!("{program} approve, if the objects held by {nodes} are really gone")
    }));
    steps.extend(about(of(NodeStateView::Frozen), |nodes| {
        format!("{program} thaw, when {nodes} may change again")
    }));
    steps.extend(about(of(NodeStateView::NoAgent), |nodes| {
        format!("start kp-nodeagent on {nodes}")
    }));
    if nodes.is_empty() {
        steps.push("no agent has connected yet: start kp-nodeagent on every node".to_owned());
    }
    steps
}

/// Returns the first Service of which several nodes avoid the same endpoint.
fn ill(nodes: &[NodeView]) -> Option<String> {
    let mut avoided = BTreeMap::<(&str, &str, &str), BTreeSet<&str>>::new();
    for node in nodes.iter().filter(|node| !node.peer.is_empty()) {
        for one in &node.avoided {
            let endpoint = (&*one.port.namespace, &*one.port.service, &*one.address);
            avoided.entry(endpoint).or_default().insert(&node.name);
        }
    }
    let mut ill = avoided.iter().filter(|(_, nodes)| nodes_agree(nodes.len()));
    let ((namespace, service, _), _) = ill.next()?;
    Some(format!("{namespace}/{service}"))
}

/// Returns the step for an input error.
pub(crate) fn fix(issue: &IssueView) -> String {
    match issue.location.as_str() {
        "" => format!("fix {}", issue.object()),
        location => format!("fix {} in {location}", issue.object()),
    }
}

/// Returns a step for the first of some nodes, with the number of the others.
fn about<'a>(
    mut nodes: impl Iterator<Item = &'a NodeView>,
    step: impl Fn(&str) -> String,
) -> Option<String> {
    let first = &nodes.next()?.name;
    Some(match nodes.count() {
        0 => step(first),
        others => step(&format!("{first} and {others} more")),
    })
}
