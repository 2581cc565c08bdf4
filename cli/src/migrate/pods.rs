//! The state of the pod of a DaemonSet on a node, and the reason why it does not run.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

/// Reasons of kubelet for which waiting does not help.
const HOPELESS: [&str; 4] = [
    "CreateContainerConfigError",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerError",
];

/// The state of a pod on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum PodState {
    /// There is none.
    #[default]
    Absent,
    /// The pod is being deleted, and may still run.
    Leaving,
    /// The pod is not ready, for this reason.
    Waiting {
        reason: String,
        /// Whether waiting does not help.
        hopeless: bool,
    },
    /// The pod is ready.
    Ready,
    /// All containers have ended without an error.
    Succeeded,
}

impl PodState {
    /// Returns the state of a pod.
    pub(crate) fn of(pod: &Pod) -> Self {
        if pod.metadata.deletion_timestamp.is_some() {
            return Self::Leaving;
        }
        let status = pod.status.clone().unwrap_or_default();
        let mut conditions = status.conditions.iter().flatten();
        if status.phase.as_deref() == Some("Succeeded") {
            return Self::Succeeded;
        }
        if conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True") {
            return Self::Ready;
        }
        let containers = status
            .init_container_statuses
            .iter()
            .chain(&status.container_statuses)
            .flatten();
        let mut reasons = containers.filter_map(reason);
        if let Some((reason, hopeless)) = reasons.next() {
            return Self::Waiting { reason, hopeless };
        }
        let mut conditions = status.conditions.iter().flatten();
        let unscheduled = conditions
            .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False");
        let phase = || status.phase.clone().unwrap_or_else(|| "Pending".to_owned());
        Self::Waiting {
            reason: unscheduled
                .and_then(|condition| condition.message.clone())
                .unwrap_or_else(phase),
            hopeless: false,
        }
    }

    /// Returns the state of two pods of one node: while one pod replaces another, the new one counts.
    pub(crate) fn or(self, other: Self) -> Self {
        match (&self, &other) {
            (Self::Absent | Self::Leaving, Self::Ready | Self::Waiting { .. }) => other,
            (Self::Waiting { .. }, Self::Ready) => other,
            (Self::Absent, _) => other,
            _ => self,
        }
    }

    /// Returns whether a process may run.
    pub(crate) fn is_there(&self) -> bool {
        !matches!(self, Self::Absent)
    }
}

/// Returns why a container does not run, and whether waiting does not help.
fn reason(container: &ContainerStatus) -> Option<(String, bool)> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.clone()?;
    // These are the ordinary reasons of a pod that starts.
    if matches!(reason.as_str(), "ContainerCreating" | "PodInitializing") {
        return None;
    }
    let hopeless = reason.ends_with("BackOff") || HOPELESS.contains(&reason.as_str());
    let last = container.last_state.as_ref();
    let ended = last.and_then(|state| state.terminated.as_ref());
    let detail = match (ended, &waiting.message) {
        (Some(ended), _) => {
            let said = ended
                .message
                .as_deref()
                .and_then(|text| text.lines().last())
                .map(|line| format!(": {line}"))
                .unwrap_or_default();
            format!(", last exit code {}{said}", ended.exit_code)
        }
        (None, Some(message)) => format!(": {message}"),
        (None, None) => String::new(),
    };
    Some((
        format!("container {}: {reason}{detail}", container.name),
        hopeless,
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn state(status: &Value) -> PodState {
        PodState::of(&serde_json::from_value(json!({ "status": status })).unwrap())
    }

    fn waiting(reason: &str, hopeless: bool) -> PodState {
        PodState::Waiting {
            reason: reason.to_owned(),
            hopeless,
        }
    }

    #[test]
    fn the_reason_is_that_of_the_kubelet() {
        let container = |waiting: &Value| {
            json!({ "phase": "Pending", "containerStatuses": [{
                "name": "agent", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": { "waiting": waiting },
            }] })
        };
        let pull = json!({ "reason": "ImagePullBackOff", "message": "no such image" });
        assert_eq!(
            state(&container(&pull)),
            waiting("container agent: ImagePullBackOff: no such image", true)
        );
        let back_off = json!({ "reason": "CrashLoopBackOff" });
        let mut refused = container(&back_off);
        refused["containerStatuses"][0]["lastState"] = json!({ "terminated": {
            "exitCode": 1, "message": "removed: a\nError: a kube-proxy runs\n",
        } });
        let text = "container agent: CrashLoopBackOff, last exit code 1: Error: a kube-proxy runs";
        assert_eq!(state(&refused), waiting(text, true));
        let starting = json!({ "reason": "ContainerCreating" });
        assert_eq!(state(&container(&starting)), waiting("Pending", false));
        let unscheduled = json!({ "phase": "Pending", "conditions": [{
            "type": "PodScheduled", "status": "False", "message": "0/3 nodes are available",
        }] });
        assert_eq!(
            state(&unscheduled),
            waiting("0/3 nodes are available", false)
        );
    }

    #[test]
    fn while_one_pod_replaces_another_the_new_one_counts() {
        assert_eq!(PodState::Leaving.or(PodState::Ready), PodState::Ready);
        assert_eq!(PodState::Ready.or(PodState::Leaving), PodState::Ready);
        assert_eq!(PodState::Absent.or(PodState::Leaving), PodState::Leaving);
    }
}
