//! The pods of the control plane, and which of them to try. Pure.

use serde::Deserialize;

/// Labels of the control plane's pods, written for a URL.
pub(super) const SELECTOR: &str =
    "app.kubernetes.io%2Fname%3Dkplane%2Capp.kubernetes.io%2Fcomponent%3Dcontrolplane";

/// A list of pods, as far as it matters here.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Pods {
    #[serde(default)]
    items: Vec<Pod>,
}

#[derive(Debug, Deserialize)]
struct Pod {
    metadata: PodMetadata,
    #[serde(default)]
    status: Status,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodMetadata {
    name: String,
    deletion_timestamp: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
struct Status {
    #[serde(default)]
    phase: String,
    #[serde(default)]
    conditions: Vec<Condition>,
}

#[derive(Debug, Deserialize)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

/// The reason why there is no pod to try.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoPod {
    /// No pod has the label.
    Unknown,
    /// Pods have the label, and none runs: their names and phases.
    Stopped(String),
}

impl Pods {
    /// Returns the names of the pods that run: first those that are ready, then the rest, which may have a reason to
    /// show for it.
    pub(super) fn candidates(&self) -> Result<Vec<String>, NoPod> {
        if self.items.is_empty() {
            return Err(NoPod::Unknown);
        }
        let mut running: Vec<&Pod> = self.items.iter().filter(|pod| pod.runs()).collect();
        if running.is_empty() {
            let states = self.items.iter().map(Pod::describe);
            return Err(NoPod::Stopped(states.collect::<Vec<_>>().join(", ")));
        }
        running.sort_by_key(|pod| !pod.is_ready());
        Ok(running.iter().map(|pod| pod.metadata.name.clone()).collect())
    }
}

impl Pod {
    fn runs(&self) -> bool {
        let name = &self.metadata.name;
        // The name becomes a part of a URL.
        let is_name = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '-' | '.');
        let is_valid = !name.is_empty() && !name.starts_with('.') && name.chars().all(is_name);
        is_valid && self.status.phase == "Running" && self.metadata.deletion_timestamp.is_none()
    }

    fn is_ready(&self) -> bool {
        self.status
            .conditions
            .iter()
            .any(|condition| condition.kind == "Ready" && condition.status == "True")
    }

    fn describe(&self) -> String {
        let state = match &self.metadata.deletion_timestamp {
            Some(_) => "Terminating",
            None => &self.status.phase,
        };
        format!("{} ({state})", self.metadata.name)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, phase: &str, ready: &str, deleted: bool) -> serde_json::Value {
        let mut pod = json!({
            "metadata": { "name": name, "labels": { "x": "y" } },
            "spec": { "nodeName": "n" },
            "status": { "phase": phase, "conditions": [
                { "type": "Initialized", "status": "True" },
                { "type": "Ready", "status": ready, "lastProbeTime": null },
            ] },
        });
        if deleted {
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        pod
    }

    fn candidates(pods: &[serde_json::Value]) -> Result<Vec<String>, NoPod> {
        let list = json!({ "kind": "PodList", "metadata": {}, "items": pods });
        let list: Pods = serde_json::from_value(list).unwrap();
        list.candidates()
    }

    #[test]
    fn ready_pods_come_first() {
        let found = candidates(&[
            pod("slow", "Running", "False", false),
            pod("gone", "Running", "True", true),
            pod("b", "Running", "True", false),
            pod("new", "Pending", "False", false),
            pod("a", "Running", "True", false),
        ]);
        assert_eq!(found.unwrap(), ["b", "a", "slow"]);
    }

    #[test]
    fn pods_that_do_not_run_are_named() {
        assert_eq!(candidates(&[]), Err(NoPod::Unknown));
        let found = candidates(&[
            pod("a", "Pending", "False", false),
            pod("b", "Failed", "False", false),
            pod("c", "Running", "True", true),
            pod("../../secrets", "Running", "True", false),
        ]);
        let states = "a (Pending), b (Failed), c (Terminating), ../../secrets (Running)";
        assert_eq!(found, Err(NoPod::Stopped(states.to_owned())));
    }
}
