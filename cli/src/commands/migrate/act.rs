//! Changing the cluster.

use k8s_openapi::api::apps::v1::DaemonSet;
use serde_json::{Value, json};

use super::gather::{Cluster, SAVED};
use crate::connection::Asked;
use crate::failure::Failure;
use crate::migrate::cleanup::{self, Program, Purpose};
use crate::migrate::record::{ANNOTATION, Record};
use crate::migrate::snapshot::{Mark, Objects as Gathered, Snapshot};
use crate::migrate::{KPLANE, LABEL, RETURNING, affinity};

/// The key of kube-proxy's DaemonSet in the ConfigMap.
const SAVED_KEY: &str = "daemonset.json";

pub(super) const DAEMON_SET: Asked = Asked("patch daemonsets");

impl Cluster<'_> {
    /// Keeps kube-proxy off nodes of kplane. Its pods on other nodes are not restarted, although its template changes:
    /// until the migration ends, new pods get the new template, and the pods that run stay.
    pub(super) async fn keep_off(
        &self,
        set: &DaemonSet,
        mut record: Record,
    ) -> Result<(), Failure> {
        let spec = &set.spec;
        let template = spec.template.spec.as_ref();
        let now = template.and_then(|template| template.affinity.as_ref());
        let selector = affinity::keep_off(affinity::required(now));
        let strategy = spec.update_strategy.as_ref();
        if record.strategy.is_null() {
            record.strategy = json!(strategy);
        }
        let fields = json!({
            "metadata": {
                "resourceVersion": set.metadata.resource_version,
                "annotations": { ANNOTATION: record.text() },
            },
            "spec": {
                "updateStrategy": { "type": "OnDelete", "rollingUpdate": null },
                "template": { "spec": { "affinity": affinity::patch(now, Some(&selector)) } },
            },
        });
        let path = self.kube_proxy_path();
        Ok(self.objects().patch(&path, &fields, DAEMON_SET).await?)
    }

    /// Removes what a migration has added to kube-proxy's DaemonSet, if that is still there.
    pub(crate) async fn forget_migration(&mut self) -> Result<(), Failure> {
        let objects = self.gather_objects().await?;
        let snapshot = Snapshot::from(&objects);
        let kept = snapshot
            .kube_proxy
            .as_ref()
            .is_some_and(|set| set.keeps_off || set.record.is_some());
        match (&objects.kube_proxy, kept) {
            (Some(set), true) => {
                let record = snapshot.record().cloned().unwrap_or_default();
                self.restore(set, &record).await
            }
            _ => Ok(()),
        }
    }

    /// Writes the annotation.
    pub(super) async fn write_record(&self, record: &Record) -> Result<(), Failure> {
        let fields = json!({ "metadata": { "annotations": { ANNOTATION: record.text() } } });
        let path = self.kube_proxy_path();
        Ok(self.objects().patch(&path, &fields, DAEMON_SET).await?)
    }

    /// Sets the label of a node, or removes it. An earlier cleanup pod goes first: it must not remove the rules of a
    /// node that moves again, and its success says nothing about a later cleanup.
    pub(crate) async fn mark(&self, node: &str, mark: &Mark) -> Result<(), Failure> {
        self.delete_cleanup(node).await?;
        let value = match mark {
            Mark::None | Mark::Other(_) => Value::Null,
            Mark::Kplane => json!(KPLANE),
            Mark::Returning => json!(RETURNING),
        };
        let fields = json!({ "metadata": { "labels": { LABEL: value } } });
        let path = format!("/api/v1/nodes/{node}");
        let asked = Asked("patch nodes");
        Ok(self.objects().patch(&path, &fields, asked).await?)
    }

    /// Creates the pod that removes kplane's rules from a node.
    pub(crate) async fn clean_up(
        &self,
        node: &str,
        program: &Program,
        purpose: Purpose,
    ) -> Result<(), Failure> {
        let namespace = self.namespace();
        let Some(pod) = cleanup::pod(program, purpose, namespace, node) else {
            return Err(Failure::Refused(
                "DaemonSet kplane-nodeagent has no container. Install the chart again".to_owned(),
            ));
        };
        let mut pod = serde_json::to_value(&pod).map_err(std::io::Error::from)?;
        pod["apiVersion"] = json!("v1");
        pod["kind"] = json!("Pod");
        let path = format!("/api/v1/namespaces/{namespace}/pods");
        match self.objects().create(&path, &pod, Asked("create pods")).await {
            // Another kpctl was faster.
            Err(error) if error.is_conflict() => Ok(()),
            created => Ok(created?),
        }
    }

    /// Deletes the cleanup pod of a node.
    pub(crate) async fn delete_cleanup(&self, node: &str) -> Result<bool, Failure> {
        let (namespace, name) = (self.namespace(), cleanup::name(node));
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
        Ok(self.objects().delete(&path, Asked("delete pods")).await?)
    }

    /// Saves kube-proxy's DaemonSet in a ConfigMap, and then deletes it.
    pub(super) async fn save_and_delete(&self) -> Result<(), Failure> {
        let path = self.kube_proxy_path();
        let set: Option<Value> = self.objects().get(&path, Asked("get daemonsets")).await?;
        let Some(mut set) = set else {
            return Ok(());
        };
        if let Some(object) = set.as_object_mut() {
            object.remove("status");
        }
        if let Some(metadata) = set["metadata"].as_object_mut() {
            metadata.retain(|field, _| {
                matches!(
                    field.as_str(),
                    "name" | "namespace" | "labels" | "annotations"
                )
            });
        }
        let namespace = self.namespace();
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": { "name": SAVED, "namespace": namespace },
            "data": { SAVED_KEY: set.to_string() },
        });
        let maps = format!("/api/v1/namespaces/{namespace}/configmaps");
        let asked = Asked("create configmaps");
        match self.objects().create(&maps, &map, asked).await {
            Err(error) if error.is_conflict() => {
                let data = json!({ "data": map["data"] });
                let asked = Asked("patch configmaps");
                self.objects().patch(&self.saved_path(), &data, asked).await?;
            }
            created => created?,
        }
        self.objects().delete(&path, Asked("delete daemonsets")).await?;
        Ok(())
    }

    /// Creates kube-proxy's DaemonSet as it was saved.
    pub(super) async fn recreate(&self) -> Result<(), Failure> {
        let damaged = || {
            Failure::Refused(format!(
                "ConfigMap {}/{SAVED} does not contain kube-proxy's DaemonSet. Install kube-proxy \
                 again, for example with: kubeadm init phase addon kube-proxy",
                self.namespace()
            ))
        };
        let asked = Asked("get configmaps");
        let map: Option<Value> = self.objects().get(&self.saved_path(), asked).await?;
        let map = map.unwrap_or_default();
        let text = map["data"][SAVED_KEY].as_str().ok_or_else(damaged)?;
        let set: Value = serde_json::from_str(text).map_err(|_| damaged())?;
        let namespace = &self.target().namespace;
        let path = format!("/apis/apps/v1/namespaces/{namespace}/daemonsets");
        match self.objects().create(&path, &set, Asked("create daemonsets")).await {
            Err(error) if error.is_conflict() => Ok(()),
            created => Ok(created?),
        }
    }

    /// Returns the program for cleanup pods, as the agents run it.
    pub(super) fn program(objects: &Gathered) -> Result<Program, Failure> {
        let set = objects.agents.clone().ok_or_else(|| {
            Failure::Refused(
                "DaemonSet kplane-nodeagent does not exist, and its image removes kplane's rules. \
                 Use: kpctl uninstall --image IMAGE"
                    .to_owned(),
            )
        })?;
        Ok(Program::OfAgents(Box::new(set)))
    }
}
