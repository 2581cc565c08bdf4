//! The parts of a cluster that the rig lacks for DaemonSets: a scheduler, and the end of pods that end by themselves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result};
use http::Method;
use kplane_tests::cluster::Api;
use kplane_tests::cluster::api::key_of;
use serde_json::{Value, json};

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(100);

/// A thread that binds pods of DaemonSets to their nodes, and lets cleanup pods succeed. Dropping it ends the thread.
pub(crate) struct Scheduler {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Scheduler {
    /// Starts the thread.
    pub(crate) fn start(api: &Api) -> Self {
        let (api, stop) = (api.clone(), Arc::<AtomicBool>::default());
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                // A pod that has gone in between is no concern.
                let _ = look(&api);
                thread::sleep(LOOK);
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn look(api: &Api) -> Result<()> {
    for pod in api.list("Pod", None)? {
        if !pod["metadata"]["deletionTimestamp"].is_null() {
            continue;
        }
        if pod["spec"]["nodeName"].is_null() {
            bind(api, &pod)?;
        }
        let labels = &pod["metadata"]["labels"];
        let cleans = labels["app.kubernetes.io/component"] == "cleanup";
        if cleans && pod["status"]["phase"] == "Running" {
            let status = json!({ "phase": "Succeeded", "conditions": [] });
            api.patch_status("Pod", &key_of(&pod)?, &status)?;
        }
    }
    Ok(())
}

/// Binds a pod to the node that its DaemonSet's controller names.
fn bind(api: &Api, pod: &Value) -> Result<()> {
    let terms = &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        ["nodeSelectorTerms"];
    let fields = terms[0]["matchFields"][0]["values"][0].as_str();
    let Some(node) = fields else {
        return Ok(());
    };
    let metadata = &pod["metadata"];
    let name = metadata["name"].as_str().context("no name")?;
    let namespace = metadata["namespace"].as_str().context("no namespace")?;
    let binding = json!({
        "apiVersion": "v1", "kind": "Binding",
        "metadata": { "name": name, "namespace": namespace },
        "target": { "kind": "Node", "name": node },
    });
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/binding");
    api.request(Method::POST, &path, Some(&binding)).map(drop)
}
