//! How far a node is on its way.

use kplane_proto::v1::NodeState;

use super::pods::PodState;
use super::snapshot::{Mark, NodeSnapshot, Served};

/// The reason why a node is not where it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Trouble {
    pub(crate) reason: String,
    /// Whether waiting does not help.
    pub(crate) hopeless: bool,
}

/// The stage of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// kube-proxy serves the node.
    KubeProxy,
    /// The node belongs to kplane, and is not verified.
    Moving(Trouble),
    /// kplane serves the node, and has read the kernel back.
    Kplane,
    /// The node goes back to kube-proxy, and something is missing.
    Returning(Trouble),
    /// kube-proxy serves the node again, and kplane's rules are still there.
    ToCleanUp,
    /// The node is back, except for its label.
    ToUnmark,
    /// The node takes no part in migrations, for this reason.
    Outside(String),
}

impl Stage {
    /// Returns the stage of a node.
    pub(crate) fn of(node: &NodeSnapshot) -> Self {
        if !node.linux {
            return Self::Outside("not a Linux node".to_owned());
        }
        match &node.mark {
            Mark::None => Self::KubeProxy,
            Mark::Other(value) => Self::Outside(format!(
                "label kplane.io/proxy={value} is not one of kplane's"
            )),
            Mark::Kplane => moving(node).map_or(Self::Kplane, Self::Moving),
            Mark::Returning => returning(node),
        }
    }

    /// Returns the stage in one word.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Self::KubeProxy => "KubeProxy",
            Self::Moving(_) => "Moving",
            Self::Kplane => "Kplane",
            Self::Returning(_) | Self::ToCleanUp | Self::ToUnmark => "Returning",
            Self::Outside(_) => "Outside",
        }
    }

    /// Returns what is missing; empty if nothing is.
    pub(crate) fn reason(&self) -> &str {
        match self {
            Self::KubeProxy | Self::Kplane => "",
            Self::Moving(trouble) | Self::Returning(trouble) => &trouble.reason,
            Self::ToCleanUp => "kplane's rules are still in the kernel",
            Self::ToUnmark => "the label kplane.io/proxy is still there",
            Self::Outside(reason) => reason,
        }
    }

    /// Returns whether the node is between kube-proxy and kplane.
    pub(crate) fn is_on_its_way(&self) -> bool {
        match self {
            Self::Moving(_) | Self::Returning(_) | Self::ToCleanUp | Self::ToUnmark => true,
            Self::KubeProxy | Self::Kplane | Self::Outside(_) => false,
        }
    }
}

fn trouble(reason: impl Into<String>) -> Trouble {
    Trouble {
        reason: reason.into(),
        hopeless: false,
    }
}

/// Returns why a node of kplane is not verified; `None` if it is.
fn moving(node: &NodeSnapshot) -> Option<Trouble> {
    if node.kube_proxy.is_there() {
        return Some(trouble("kube-proxy's pod has not ended"));
    }
    if !node.ready {
        return Some(trouble("the node is not Ready"));
    }
    if let Some(trouble) = pod(&node.agent, "the agent") {
        return Some(trouble);
    }
    match &node.served {
        None => Some(trouble("no agent has connected to the control plane")),
        Some(served) => serving(served).map(trouble),
    }
}

/// Returns why the kernel of a node is not verified.
fn serving(served: &Served) -> Option<String> {
    let with_error = |text: &str| match served.error.as_str() {
        "" => text.to_owned(),
        error => format!("{text}: {error}"),
    };
    match served.state {
        NodeState::InSync | NodeState::Syncing | NodeState::Frozen if served.verified => None,
        NodeState::InSync | NodeState::Frozen => {
            Some("the agent has not read the kernel back yet".to_owned())
        }
        NodeState::Syncing => Some(with_error("the agent has not programmed everything yet")),
        NodeState::NoAgent => Some("no agent has connected to the control plane".to_owned()),
        NodeState::Disconnected => Some(with_error("the agent is not connected")),
        NodeState::Failing => Some(with_error("the agent reports a failure")),
        NodeState::Unverified => Some(with_error("the agent does not read the kernel back")),
        NodeState::Holding => Some(with_error("the agent keeps Services that vanished")),
        NodeState::Conflict => Some(with_error("two agents claim the node")),
        NodeState::Unknown | NodeState::Unspecified => Some(with_error(
            "a replica that did not answer may serve the node",
        )),
    }
}

/// Returns why a pod is not ready.
fn pod(state: &PodState, whose: &str) -> Option<Trouble> {
    match state {
        PodState::Ready => None,
        PodState::Absent => Some(trouble(format!("{whose} has no pod on the node yet"))),
        PodState::Leaving => Some(trouble(format!("the pod of {whose} is being deleted"))),
        PodState::Succeeded => Some(trouble(format!("the pod of {whose} has ended"))),
        PodState::Waiting { reason, hopeless } => Some(Trouble {
            reason: format!("the pod of {whose} is not ready: {reason}"),
            hopeless: *hopeless,
        }),
    }
}

fn returning(node: &NodeSnapshot) -> Stage {
    if node.agent.is_there() {
        return Stage::Returning(trouble("the agent's pod has not ended"));
    }
    if let Some(trouble) = pod(&node.kube_proxy, "kube-proxy") {
        return Stage::Returning(trouble);
    }
    match &node.cleanup {
        PodState::Absent => Stage::ToCleanUp,
        PodState::Succeeded => Stage::ToUnmark,
        PodState::Leaving => Stage::Returning(trouble("an earlier cleanup pod is being deleted")),
        PodState::Ready => Stage::Returning(trouble("kplane's rules are being removed")),
        PodState::Waiting { reason, hopeless } => Stage::Returning(Trouble {
            reason: format!("the cleanup pod is not ready: {reason}"),
            hopeless: *hopeless,
        }),
    }
}

#[cfg(test)]
mod tests;
