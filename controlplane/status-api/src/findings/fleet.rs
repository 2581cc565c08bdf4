//! Which nodes do not hold a Service, and why not.

use std::collections::BTreeMap;

use kplane_model::{NodeName, Reason, Severity};
use kplane_proto::v1::{LagState, NodeState};

use super::Finding;

/// A Service on one node.
pub(crate) struct Place<'a> {
    pub(crate) node: &'a NodeName,
    /// The state and the reason if the kernel does not hold the newest state.
    pub(crate) lag: Option<(LagState, &'a str)>,
    /// The respect in which the Service is not served as desired; empty otherwise.
    pub(crate) degraded: &'a str,
}

/// Returns a finding for each state that some nodes are in.
pub(crate) fn of_fleet<'a>(places: impl Iterator<Item = Place<'a>>) -> Vec<Finding> {
    let mut all = 0;
    let mut found = BTreeMap::<Reason, (&str, Vec<NodeName>)>::new();
    for place in places {
        all += 1;
        let (code, reason) = match place.lag {
            Some((state, reason)) => (code_of(state), reason),
            None if place.degraded.is_empty() => continue,
            None => (Reason::Degraded, place.degraded),
        };
        let nodes = &mut found.entry(code).or_insert((reason, Vec::new())).1;
        nodes.push(place.node.clone());
    }
    found
        .into_iter()
        .map(|(code, (reason, nodes))| {
            let count = nodes.len();
            let text = match count {
                1 => reason.to_owned(),
                _ => format!("{count} of {all} nodes: {reason}"),
            };
            let first = nodes.first().map_or("", |node| &**node);
            Finding::new(code, severity(code), text, fix(code, first)).on(nodes)
        })
        .collect()
}

/// Returns the finding about nodes that are in a state for the same reason; `None` if nothing is wrong with them.
pub(crate) fn of_state(state: NodeState, error: &str, nodes: Vec<NodeName>) -> Option<Finding> {
    let code = match state {
        NodeState::InSync | NodeState::Unspecified => return None,
        NodeState::NoAgent => Reason::NoAgent,
        NodeState::Disconnected => Reason::AgentDisconnected,
        NodeState::Failing => Reason::NotProgrammed,
        NodeState::Syncing => Reason::Behind,
        NodeState::Unverified => Reason::Unverified,
        NodeState::Holding => Reason::AgentHolding,
        NodeState::Conflict => Reason::AgentConflict,
        NodeState::Unknown => Reason::NodeUnknown,
        NodeState::Frozen => Reason::NodeFrozen,
    };
    let text = match error {
        "" => "the kernel does not hold the newest state yet",
        error => error,
    };
    let first = nodes.first().map_or("", |node| &**node);
    let (severity, fix) = match code {
        // The node has not compared its kernel for far longer than it should.
        Reason::Unverified => (Severity::Warning, fix(Reason::NotProgrammed, first)),
        code => (severity(code), fix(code, first)),
    };
    Some(Finding::new(code, severity, text, fix).on(nodes))
}

fn code_of(state: LagState) -> Reason {
    match state {
        LagState::NoAgent => Reason::NoAgent,
        LagState::Disconnected => Reason::AgentDisconnected,
        LagState::Failing => Reason::NotProgrammed,
        LagState::Behind | LagState::Unspecified => Reason::Behind,
        LagState::Holding => Reason::AgentHolding,
        LagState::Unverified => Reason::Unverified,
        LagState::Unknown => Reason::NodeUnknown,
    }
}

fn severity(code: Reason) -> Severity {
    match code {
        Reason::NotProgrammed | Reason::NoAgent | Reason::AgentConflict => Severity::Error,
        Reason::Unverified => Severity::Info,
        _ => Severity::Warning,
    }
}

/// Returns what to do about a node.
fn fix(code: Reason, node: &str) -> String {
    let agent = format!(
        "kubectl -n kplane get pods -l app.kubernetes.io/component=nodeagent -o wide --field-selector spec.nodeName={node}"
    );
    match code {
        Reason::NoAgent => format!("start kp-nodeagent there: {agent}"),
        Reason::AgentDisconnected => format!(
            "the node's kernel keeps what it had; check that the agent runs and reaches the control plane: {agent}"
        ),
        Reason::AgentHolding => {
            "kpctl approve, if the Services that it keeps are really gone".to_owned()
        }
        Reason::NodeUnknown => "kpctl status names the replicas that do not answer".to_owned(),
        Reason::NotProgrammed | Reason::Degraded => {
            format!("kpctl status, then the agent's log: {agent}")
        }
        Reason::NodeFrozen => {
            format!("kpctl thaw --node {node}, if the order is not needed any more")
        }
        // The text says it.
        Reason::AgentConflict => String::new(),
        _ => "wait: kpctl wait service/NAMESPACE/NAME --for=verified".to_owned(),
    }
}
