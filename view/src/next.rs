//! The next steps for nodes and input with problems.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use kplane_model::nodes_agree;

use super::nodes::{FailureView, NO_AGENT, NodeStateView, NodeView};
use super::{IssueView, KeyView};

/// Returns the steps, those that concern the most nodes first. `program` is the name by which the user calls this
/// program.
pub(crate) fn steps(nodes: &[NodeView], issues: &[IssueView], program: &str) -> Vec<String> {
    if nodes.is_empty() {
        return fixes(issues).chain([NO_AGENT.to_owned()]).collect();
    }
    let mut steps: Vec<(usize, String)> = Vec::new();
    steps.extend(
        failing(nodes)
            .map(|(count, service)| (count, format!("{program} describe service {service}"))),
    );
    // A mistake in the input concerns its own Service.
    steps.extend(fixes(issues).map(|step| (1, step)));
    let errors = nodes.iter().filter(|node| node.is_obstructed());
    let warnings = nodes.iter().filter(|node| node.obstacles().next().is_some());
    // The others may have the same.
    let found = first(errors).or_else(|| first(warnings));
    steps.extend(found.map(|(count, node)| (count, format!("{program} describe node {node}"))));
    steps.extend(ill(nodes).map(|name| (1, format!("{program} describe service {name}"))));
    let of = |state| nodes.iter().filter(move |node| node.state == state);
    let silent = |node: &&NodeView| node.failures.is_empty();
    let logs = |nodes: &str| format!("read the log of kp-nodeagent on {nodes}");
    steps.extend(about(of(NodeStateView::Failing).filter(silent), logs));
    let runs = |nodes: &str| {
        format!("check that kp-nodeagent runs on {nodes} and reaches the control plane")
    };
    steps.extend(about(of(NodeStateView::Disconnected), runs));
    let approve =
        |nodes: &str| format!("{program} approve, if the objects held by {nodes} are really gone");
    steps.extend(about(of(NodeStateView::Holding), approve));
    let start = |nodes: &str| format!("start kp-nodeagent on {nodes}");
    steps.extend(about(of(NodeStateView::NoAgent), start));
    steps.sort_by_key(|(count, _)| Reverse(*count));
    let thaw = |nodes: &str| format!("{program} thaw, when {nodes} may change again");
    // An operator wants them so.
    steps.extend(about(of(NodeStateView::Frozen), thaw));
    steps.into_iter().map(|(_, step)| step).collect()
}

/// Returns the Service that fails on the most nodes, with their number; one that is only degraded, if none fails.
fn failing(nodes: &[NodeView]) -> Option<(usize, String)> {
    failing_as(nodes, |failure| !failure.degraded).or_else(|| failing_as(nodes, |_| true))
}

fn failing_as(nodes: &[NodeView], is: fn(&FailureView) -> bool) -> Option<(usize, String)> {
    let objects = || {
        nodes.iter().flat_map(move |node| {
            node.failures
                .iter()
                .filter(move |failure| is(failure))
                .filter_map(move |failure| Some((node, failure.object.as_ref()?)))
        })
    };
    let mut found = BTreeMap::<(&str, &str), BTreeSet<&str>>::new();
    for (node, key) in objects() {
        let on = found.entry((key.namespace.as_str(), key.service.as_str()));
        on.or_default().insert(&node.name);
    }
    let count = |key: &KeyView| {
        let on = found.get(&(key.namespace.as_str(), key.service.as_str()));
        on.map_or(0, BTreeSet::len)
    };
    // The first one of several.
    let (_, worst) = objects().min_by_key(|(_, key)| Reverse(count(key)))?;
    Some((
        count(worst),
        format!("{}/{}", worst.namespace, worst.service),
    ))
}

/// Returns the step for the first error of the input.
fn fixes(issues: &[IssueView]) -> impl Iterator<Item = String> {
    issues.iter().find(|issue| issue.is_error()).map(fix).into_iter()
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

/// Returns the number of some nodes, and the name of the first.
fn first<'a>(mut nodes: impl Iterator<Item = &'a NodeView>) -> Option<(usize, &'a str)> {
    let first = &nodes.next()?.name;
    Some((nodes.count() + 1, first))
}

/// Returns a step for the first of some nodes and the number of the others, with their number.
fn about<'a>(
    nodes: impl Iterator<Item = &'a NodeView>,
    step: impl Fn(&str) -> String,
) -> Option<(usize, String)> {
    let (count, name) = first(nodes)?;
    let step = match count {
        1 => step(name),
        all => step(&format!("{name} and {} more", all - 1)),
    };
    Some((count, step))
}
