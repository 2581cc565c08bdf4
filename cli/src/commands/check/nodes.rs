//! `kpctl check --pre --nodes`: a Pod on each node checks it, and goes.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Node, Pod};
use kplane_model::NodeName;
use tokio::time::{Instant, sleep};

use super::super::migrate::Cluster;
use crate::args::check::CheckArgs;
use crate::args::uninstall::IMAGE;
use crate::check::Finding;
use crate::check::nodes::{SELECTOR, joined, pod};
use crate::connection::Asked;
use crate::failure::Failure;
use crate::migrate::cleanup::pod_name;
use crate::migrate::pods::PodState;

/// Time between two looks.
const LOOK: std::time::Duration = std::time::Duration::from_secs(1);

/// Most nodes that are checked at the same time.
const AT_A_TIME: usize = 50;

/// Checks all Linux nodes that are Ready. Pods of this or an earlier attempt are gone in the end.
pub(super) async fn run(cluster: &Cluster<'_>, args: &CheckArgs) -> Result<Vec<Finding>, Failure> {
    let mut work = NodeChecks {
        cluster,
        args,
        config_map: config_map(cluster).await?,
        found: BTreeMap::new(),
        failed: BTreeMap::new(),
    };
    work.remove_pods().await?;
    let nodes = work.nodes().await?;
    for some in nodes.chunks(AT_A_TIME) {
        let checked = work.check(some.to_vec()).await;
        work.remove_pods().await?;
        checked?;
    }
    Ok(joined(&work.found, &work.failed))
}

/// Returns the name of kube-proxy's ConfigMap, if there is one.
async fn config_map(cluster: &Cluster<'_>) -> Result<Option<&'static str>, Failure> {
    /// As kubeadm names it.
    const NAME: &str = "kube-proxy";
    Ok(cluster.configuration().await?.map(|_| NAME))
}

struct NodeChecks<'a, 'b> {
    cluster: &'a Cluster<'b>,
    args: &'a CheckArgs,
    config_map: Option<&'static str>,
    found: BTreeMap<NodeName, Vec<Finding>>,
    failed: BTreeMap<NodeName, String>,
}

impl NodeChecks<'_, '_> {
    fn pods(&self) -> String {
        format!(
            "/api/v1/namespaces/{}/pods",
            self.cluster.target().namespace
        )
    }

    /// Returns the nodes that can be checked; others count as failed.
    async fn nodes(&mut self) -> Result<Vec<NodeName>, Failure> {
        let objects = self.cluster.objects();
        let nodes: Vec<Node> = objects.list("/api/v1/nodes", "", Asked("list nodes")).await?;
        let mut ready = Vec::new();
        for node in nodes {
            let name: NodeName = node.metadata.name.unwrap_or_default().into();
            let status = node.status.unwrap_or_default();
            let info = status.node_info.as_ref();
            if info.is_some_and(|info| info.operating_system == "windows") {
                continue;
            }
            let mut conditions = status.conditions.iter().flatten();
            if conditions.any(|of| of.type_ == "Ready" && of.status == "True") {
                ready.push(name);
            } else {
                self.failed.insert(name, "the node is not Ready".to_owned());
            }
        }
        Ok(ready)
    }

    /// Returns the image of the Pods. Beside kube-proxy the chart gives agents the one with iptables, too.
    fn image(&self) -> String {
        let default = match self.config_map {
            Some(_) => format!("{IMAGE}-iptables"),
            None => IMAGE.to_owned(),
        };
        self.args.image.clone().unwrap_or(default)
    }

    async fn check(&mut self, nodes: Vec<NodeName>) -> Result<(), Failure> {
        let objects = self.cluster.objects();
        let mut waiting = BTreeMap::new();
        for node in nodes {
            let name = pod_name("kplane-check", &node);
            let pod = pod(&name, &node, &self.image(), self.config_map);
            objects.create(&self.pods(), &pod, Asked("create pods")).await?;
            waiting.insert(name, node);
        }
        let until = Instant::now() + self.args.node_timeout;
        while !waiting.is_empty() {
            let pods: Vec<Pod> = objects.list(&self.pods(), SELECTOR, Asked("list pods")).await?;
            for pod in pods {
                let name = pod.metadata.name.clone().unwrap_or_default();
                let Some(node) = waiting.get(&name).cloned() else {
                    continue;
                };
                let over = Instant::now() >= until;
                match self.outcome(&name, &pod, over).await {
                    None => continue,
                    Some(Ok(findings)) => drop(self.found.insert(node, findings)),
                    Some(Err(reason)) => drop(self.failed.insert(node, reason)),
                }
                waiting.remove(&name);
            }
            if !waiting.is_empty() {
                sleep(LOOK).await;
            }
        }
        Ok(())
    }

    /// Returns what a Pod found, or why it did not; `None` while it is at work.
    async fn outcome(
        &self,
        name: &str,
        pod: &Pod,
        over: bool,
    ) -> Option<Result<Vec<Finding>, String>> {
        match PodState::of(pod) {
            PodState::Succeeded => {
                let path = format!("{}/{name}/log", self.pods());
                let log = self.cluster.objects().get(&path, Asked("get pods/log")).await;
                Some(match log {
                    Ok(Some(findings)) => Ok(findings),
                    Ok(None) => Err("its log is gone".to_owned()),
                    Err(error) => Err(error.to_string()),
                })
            }
            PodState::Waiting { reason, hopeless } if hopeless || over => Some(Err(reason)),
            PodState::Absent | PodState::Leaving | PodState::Ready if over => {
                Some(Err("the check did not end in time".to_owned()))
            }
            _ => failure(pod).map(Err),
        }
    }

    /// Deletes all Pods of checks, and waits until they are gone.
    async fn remove_pods(&self) -> Result<(), Failure> {
        let objects = self.cluster.objects();
        let until = Instant::now() + self.args.node_timeout;
        let mut deleted = BTreeSet::new();
        loop {
            let pods: Vec<Pod> = objects.list(&self.pods(), SELECTOR, Asked("list pods")).await?;
            if pods.is_empty() || Instant::now() >= until {
                return Ok(());
            }
            for name in pods.into_iter().filter_map(|pod| pod.metadata.name) {
                if deleted.insert(name.clone()) {
                    let path = format!("{}/{name}", self.pods());
                    objects.delete(&path, Asked("delete pods")).await?;
                }
            }
            sleep(LOOK).await;
        }
    }
}

/// Returns why the container of a Pod has failed.
fn failure(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    if status.phase.as_deref() != Some("Failed") {
        return None;
    }
    let ended = status
        .container_statuses
        .iter()
        .flatten()
        .filter_map(|of| of.state.as_ref()?.terminated.as_ref());
    let said = ended
        .filter_map(|of| of.message.as_deref())
        .next_back()
        .and_then(|text| text.lines().last());
    Some(said.unwrap_or("the check failed without a word").to_owned())
}
