//! Waiting for nodes and Pods.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::addons::NAMESPACE;
use super::{Proxy, RealCluster};
use crate::wait::eventually;

/// Longest wait for a node or a Pod, on a busy machine.
const READY: Duration = Duration::from_secs(180);

impl RealCluster {
    /// Waits until exactly `count` Pods of a namespace have a label (`key=value`), and all are ready and none
    /// terminates. Returns them.
    ///
    /// # Errors
    /// Minutes have passed; the message names what is missing, with the events of the namespace.
    pub fn wait_for_pods(&self, namespace: &str, label: &str, count: usize) -> Result<Vec<Value>> {
        let (key, value) = label.split_once('=').context("key=value of a label")?;
        let what = format!("{count} Pods {label} of {namespace} are ready");
        eventually(READY, &what, || {
            let mut pods = self.api().list("Pod", Some(namespace))?;
            pods.retain(|pod| pod["metadata"]["labels"][key] == value);
            ensure!(pods.len() == count, "there are {}", pods.len());
            for pod in &pods {
                let name = &pod["metadata"]["name"];
                ensure!(is_ready(pod), "{name}: {}", trouble(pod));
                let leaving = !pod["metadata"]["deletionTimestamp"].is_null();
                ensure!(!leaving, "{name} is terminating");
            }
            Ok(pods)
        })
        .with_context(|| {
            let events = self.kubectl(&["get", "events", "--namespace", namespace]);
            format!("events of {namespace}:\n{}", events.unwrap_or_default())
        })
    }

    /// Waits until a node is ready.
    ///
    /// # Errors
    /// Minutes have passed; the message has the end of the kubelet's log.
    pub fn wait_for_node(&self, name: &str) -> Result<()> {
        let ready = eventually(READY, &format!("{name} is ready"), || {
            let node = self.api().get("Node", name)?.with_context(|| format!("no Node {name}"))?;
            ensure!(is_ready(&node), "{}", trouble(&node));
            Ok(())
        });
        ready.with_context(|| {
            let log = self.folder().join(name).join("logs/kubelet.log");
            let log = super::process::last_words(&log);
            format!("the log of {name}'s kubelet ends with\n{log}")
        })
    }

    /// Waits for the nodes, and for what runs on them from the start.
    pub(super) fn wait_until_up(&self) -> Result<()> {
        let nodes = self.nodes();
        for node in &nodes {
            self.wait_for_node(node.name())?;
        }
        if self.options.proxy != Proxy::None && !nodes.is_empty() {
            self.wait_for_pods(NAMESPACE, "k8s-app=kube-proxy", nodes.len())?;
            self.wait_for_pods(NAMESPACE, "k8s-app=kube-dns", 1)?;
        }
        Ok(())
    }

    /// Sets a node's state to unknown, as the controller of nodes does after a time.
    pub(super) fn forget_ready(&self, name: &str) -> Result<()> {
        let status = json!({ "conditions": [{ "type": "Ready", "status": "Unknown" }] });
        self.api().patch_status("Node", name, &status).map(drop)
    }
}

fn is_ready(object: &Value) -> bool {
    object["status"]["conditions"]
        .as_array()
        .into_iter()
        .flatten()
        .any(|it| it["type"] == "Ready" && it["status"] == "True")
}

/// Returns the reasons that a Pod or a Node gives for not being ready.
fn trouble(object: &Value) -> String {
    let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    let messages = conditions
        .filter(|it| it["status"] != "True")
        .filter_map(|it| it["message"].as_str());
    let containers = object["status"]["containerStatuses"].as_array().into_iter().flatten();
    let states = containers
        .map(|it| &it["state"])
        .filter(|state| state["running"].is_null())
        .map(Value::to_string);
    let all: Vec<_> = messages.map(str::to_owned).chain(states).collect();
    all.join("; ")
}
