//! Reading the cluster.

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kplane_proto::v1 as pb;
use serde::Deserialize;

use crate::args::Options;
use crate::args::migrate::Target;
use crate::client::{self, Client};
use crate::connection::{Asked, ObjectClient, Route};
use crate::failure::Failure;
use crate::migrate::snapshot::Objects as Gathered;
use crate::migrate::{AGENTS, cleanup};

/// kube-proxy's configuration in its ConfigMap, as kubeadm names it.
const CONFIGURATION: &str = "config.conf";

/// The ConfigMap in which kube-proxy's DaemonSet is saved.
pub(in crate::commands) const SAVED: &str = "kplane-kube-proxy";

/// The mode of a kube-proxy that does not name one.
const DEFAULT_MODE: &str = "iptables";

/// The cluster and its control plane.
pub(crate) struct Cluster<'a> {
    objects: ObjectClient,
    options: &'a Options,
    target: Target,
    client: Option<Client>,
}

/// The part of kube-proxy's configuration that matters here.
#[derive(Debug, Default, Deserialize)]
struct Configuration {
    #[serde(default)]
    mode: String,
}

impl<'a> Cluster<'a> {
    /// Takes the way to the objects; the control plane is asked later.
    pub(crate) fn new(objects: ObjectClient, options: &'a Options, target: Target) -> Self {
        Self {
            objects,
            options,
            target,
            client: None,
        }
    }

    /// Returns the way to the objects.
    pub(crate) fn objects(&self) -> &ObjectClient {
        &self.objects
    }

    /// Returns kube-proxy's DaemonSet.
    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    /// Returns the namespace of kplane.
    pub(crate) fn namespace(&self) -> &str {
        &self.options.place.kplane_namespace
    }

    /// Returns the path of kube-proxy's DaemonSet.
    pub(super) fn kube_proxy_path(&self) -> String {
        daemon_set(&self.target.namespace, &self.target.name)
    }

    /// Returns the path of the agents' DaemonSet.
    pub(crate) fn agents_path(&self) -> String {
        daemon_set(self.namespace(), AGENTS)
    }

    /// Returns the path of the ConfigMap in which kube-proxy's DaemonSet is saved.
    pub(crate) fn saved_path(&self) -> String {
        format!(
            "/api/v1/namespaces/{}/configmaps/{}",
            self.namespace(),
            SAVED
        )
    }

    /// Reads everything.
    pub(crate) async fn gather(&mut self) -> Result<Gathered, Failure> {
        let fleet = self.fleet().await;
        let objects = self.gather_objects().await?;
        Ok(Gathered {
            fleet: Some(fleet.map_err(|error| error.to_string())),
            ..objects
        })
    }

    /// Reads everything but what the control plane knows.
    pub(crate) async fn gather_objects(&mut self) -> Result<Gathered, Failure> {
        let paths = [
            self.kube_proxy_path(),
            self.agents_path(),
            self.saved_path(),
        ];
        let (kube_proxy, agents, saved, nodes) = tokio::try_join!(
            self.daemon_set(&paths[0]),
            self.daemon_set(&paths[1]),
            self.config_map(&paths[2]),
            async {
                let nodes = self.objects.list("/api/v1/nodes", "", Asked("list nodes")).await;
                nodes.map_err(Failure::from)
            },
        )?;
        let selectors = [&kube_proxy, &agents].map(|set| selector(set.as_ref()));
        let (kube_proxy_pods, agent_pods, cleanup_pods, mode) = tokio::try_join!(
            self.pods(&self.target.namespace, &selectors[0]),
            self.pods(self.namespace(), &selectors[1]),
            self.pods(self.namespace(), cleanup::SELECTOR),
            self.mode(kube_proxy.as_ref()),
        )?;
        Ok(Gathered {
            kube_proxy,
            mode,
            saved: saved.is_some(),
            agents,
            nodes,
            kube_proxy_pods,
            agent_pods,
            cleanup_pods,
            fleet: None,
        })
    }

    /// Asks the control plane, over a new connection if the last one was lost.
    pub(crate) async fn fleet(&mut self) -> Result<pb::Fleet, client::Error> {
        if let Some(client) = &self.client {
            if let Ok(fleet) = client.fleet().await {
                return Ok(fleet);
            }
            self.client = None;
        }
        let mut route = Route::choose(self.options)?;
        let client = Client::connect(&mut route).await?;
        let fleet = client.fleet().await?;
        self.client = Some(client);
        Ok(fleet)
    }

    async fn daemon_set(&self, path: &str) -> Result<Option<DaemonSet>, Failure> {
        Ok(self.objects.get(path, Asked("get daemonsets")).await?)
    }

    async fn config_map(&self, path: &str) -> Result<Option<ConfigMap>, Failure> {
        Ok(self.objects.get(path, Asked("get configmaps")).await?)
    }

    /// Returns the pods of a DaemonSet; none without a selector.
    async fn pods(&self, namespace: &str, labels: &str) -> Result<Vec<Pod>, Failure> {
        if labels.is_empty() {
            return Ok(Vec::new());
        }
        let path = format!("/api/v1/namespaces/{namespace}/pods");
        let asked = Asked("list pods");
        Ok(self.objects.list(&path, labels, asked).await?)
    }

    /// Returns kube-proxy's configuration file, if the ConfigMap has the DaemonSet's name, as everywhere.
    pub(crate) async fn configuration(&self) -> Result<Option<String>, Failure> {
        let Target { namespace, name } = &self.target;
        let path = format!("/api/v1/namespaces/{namespace}/configmaps/{name}");
        let map = self.config_map(&path).await?.unwrap_or_default();
        Ok(map.data.and_then(|mut data| data.remove(CONFIGURATION)))
    }

    /// Returns kube-proxy's mode: of its flags, or else of its configuration.
    async fn mode(&self, set: Option<&DaemonSet>) -> Result<Option<String>, Failure> {
        if let Some(mode) = set.and_then(mode_of_flags) {
            return Ok(Some(mode));
        }
        let Some(text) = self.configuration().await? else {
            return Ok(set.map(|_| DEFAULT_MODE.to_owned()));
        };
        let read: Configuration = serde_saphyr::from_str(&text).unwrap_or_default();
        let mode = Some(read.mode).filter(|mode| !mode.is_empty());
        Ok(Some(mode.unwrap_or_else(|| DEFAULT_MODE.to_owned())))
    }
}

fn daemon_set(namespace: &str, name: &str) -> String {
    format!("/apis/apps/v1/namespaces/{namespace}/daemonsets/{name}")
}

/// Returns the labels of a DaemonSet's pods.
fn selector(set: Option<&DaemonSet>) -> String {
    let labels = set.and_then(|set| set.spec.selector.match_labels.as_ref());
    let pairs: Vec<String> = labels
        .into_iter()
        .flatten()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    pairs.join(",")
}

/// Returns the value of `--proxy-mode`.
fn mode_of_flags(set: &DaemonSet) -> Option<String> {
    let containers = &set.spec.template.spec.as_ref()?.containers;
    containers
        .iter()
        .flat_map(|container| container.command.iter().chain(&container.args).flatten())
        .filter_map(|word| word.strip_prefix("--proxy-mode="))
        .next()
        .map(str::to_owned)
}
