//! The end of the way back: kube-proxy's DaemonSet as it was before the migration, without a restart of its pods.
//!
//! Pods that were made on the way have a template with kplane's condition for nodes. The controller of DaemonSets
//! replaces that condition by the node's name in each pod, so these pods are the same as those of the template from
//! before; only their label `controller-revision-hash` differs, and that alone makes the controller restart them. kpctl
//! corrects the label, because a kube-proxy that restarts may refuse connections for a second or two.

use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::json;
use tokio::time::{Duration, Instant, sleep};

use super::act::DAEMON_SET;
use super::gather::Cluster;
use crate::connection::Asked;
use crate::failure::Failure;
use crate::migrate::affinity;
use crate::migrate::record::{ANNOTATION, Record};

/// Label of a pod: hash of the template from which it was made (apps/v1).
const HASH: &str = "controller-revision-hash";

/// Longest time to wait for the controller of DaemonSets.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time between two looks.
const LOOK: Duration = Duration::from_millis(500);

impl Cluster<'_> {
    /// Lets kube-proxy onto all nodes, and removes what a migration has added to its DaemonSet. The annotation goes
    /// last, so that an attempt that was interrupted can be repeated.
    pub(super) async fn restore(&self, set: &DaemonSet, record: &Record) -> Result<(), Failure> {
        let on_the_way = self.newest_hash(set).await?;
        self.restore_template(set).await?;
        match self.settled().await? {
            Some(set) => self.relabel(&set, on_the_way).await?,
            None => anstream::eprintln!(
                "the controller of DaemonSets does not answer: pods of kube-proxy that were made on the way will be \
                 restarted once"
            ),
        }
        let mut fields = json!({ "metadata": { "annotations": { ANNOTATION: null } } });
        if !record.strategy.is_null() {
            fields["spec"] = json!({ "updateStrategy": record.strategy });
        }
        let path = self.kube_proxy_path();
        Ok(self.objects().patch(&path, &fields, DAEMON_SET).await?)
    }

    async fn restore_template(&self, set: &DaemonSet) -> Result<(), Failure> {
        let template = set.spec.template.spec.as_ref();
        let now = template.and_then(|template| template.affinity.as_ref());
        let selector = affinity::required(now).and_then(affinity::allow);
        let fields = json!({
            "metadata": { "resourceVersion": set.metadata.resource_version },
            "spec": { "template": { "spec": { "affinity": affinity::patch(now, selector.as_ref()) } } },
        });
        let path = self.kube_proxy_path();
        Ok(self.objects().patch(&path, &fields, DAEMON_SET).await?)
    }

    /// Waits until the controller has seen the DaemonSet as it is now; `None` if it does not in time.
    async fn settled(&self) -> Result<Option<DaemonSet>, Failure> {
        let path = self.kube_proxy_path();
        let until = Instant::now() + PATIENCE;
        loop {
            let asked = Asked("get daemonsets");
            let set: Option<DaemonSet> = self.objects().get(&path, asked).await?;
            let Some(set) = set else {
                return Ok(None);
            };
            let seen = set.status.as_ref().and_then(|status| status.observed_generation);
            if seen >= set.metadata.generation {
                return Ok(Some(set));
            }
            if Instant::now() >= until {
                return Ok(None);
            }
            sleep(LOOK).await;
        }
    }

    /// Returns the hash of the DaemonSet's newest template.
    async fn newest_hash(&self, set: &DaemonSet) -> Result<Option<String>, Failure> {
        let path = self.of_kube_proxy("/apis/apps/v1", "controllerrevisions");
        let asked = Asked("list controllerrevisions");
        let all: Vec<ControllerRevision> = self.objects().list(&path, "", asked).await?;
        let ours = all.into_iter().filter(|revision| is_of(set, &revision.metadata));
        let newest = ours.max_by_key(|revision| revision.revision);
        Ok(newest.and_then(|revision| revision.metadata.labels?.remove(HASH)))
    }

    /// Gives the pods of the template on the way the hash of the template from before.
    async fn relabel(&self, set: &DaemonSet, on_the_way: Option<String>) -> Result<(), Failure> {
        let (Some(from), Some(to)) = (on_the_way, self.newest_hash(set).await?) else {
            return Ok(());
        };
        if from == to {
            return Ok(());
        }
        let pods = self.of_kube_proxy("/api/v1", "pods");
        let selector = format!("{HASH}={from}");
        let found: Vec<Pod> = self.objects().list(&pods, &selector, Asked("list pods")).await?;
        for pod in found {
            let ours = is_of(set, &pod.metadata);
            if !ours {
                continue;
            }
            let Some(name) = pod.metadata.name else {
                continue;
            };
            let fields = json!({ "metadata": { "labels": { HASH: to } } });
            let path = format!("{pods}/{name}");
            match self.objects().patch(&path, &fields, Asked("patch pods")).await {
                Err(error) if error.is_missing() => {}
                patched => patched?,
            }
        }
        Ok(())
    }

    fn of_kube_proxy(&self, group: &str, resource: &str) -> String {
        format!("{group}/namespaces/{}/{resource}", self.target().namespace)
    }
}

/// Returns whether a DaemonSet owns an object.
fn is_of(set: &DaemonSet, object: &ObjectMeta) -> bool {
    object
        .owner_references
        .iter()
        .flatten()
        .any(|owner| Some(&owner.uid) == set.metadata.uid.as_ref())
}
