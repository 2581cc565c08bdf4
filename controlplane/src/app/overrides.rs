//! Where the control plane keeps the standing orders of operators.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use kplane_agents::hub::Hub;
use kplane_agents::overrides::Backend;
use kplane_desired_state::kubernetes::Api;
use kplane_status_api::server::approval;
use tokio::task::JoinSet;

use super::{Config, Origin, TaskError, until};

/// Namespace of the control plane's own objects, unless the configuration names another.
const NAMESPACE: &str = "kplane";

/// The variable in which systemd names the folder of `StateDirectory=`: units may not write into other folders.
const SYSTEMD: &str = "STATE_DIRECTORY";

/// The place where the control plane keeps operators' overrides, such as frozen nodes.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// The file; `None` = beside the manifests, or a `ConfigMap` in a cluster.
    pub file: Option<PathBuf>,
    /// The namespace of the `ConfigMap`; `None` = `kplane`.
    pub namespace: Option<String>,
}

/// Flags about the orders.
#[derive(Args, Clone, Debug, Default)]
pub struct StateFlags {
    /// File in which the control plane keeps operators' orders, such as nodes that `kpctl freeze` froze. Replicas on
    /// the same file share them [default: .kplane-orders.json in the folder of --manifests, or of systemd's
    /// StateDirectory=; with a cluster the ConfigMap kplane-orders in the namespace of --certificates-in, of the pod, or
    /// kplane].
    #[arg(long, value_name = "FILE", help_heading = "The process")]
    pub state_file: Option<PathBuf>,
}

impl StateFlags {
    /// Returns the place of the orders of a control plane that keeps its own objects in a namespace, if that is known.
    pub fn state(&self, namespace: Option<String>) -> State {
        State {
            file: self.state_file.clone(),
            namespace: namespace.or_else(pod_namespace),
        }
    }
}

/// Returns the namespace of the pod in which this process runs.
pub fn pod_namespace() -> Option<String> {
    let file = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
    let namespace = std::fs::read_to_string(file).ok()?;
    Some(namespace.trim().to_owned()).filter(|namespace| !namespace.is_empty())
}

/// Begins to follow the standing orders of operators.
pub(super) fn keep(
    hub: &Arc<Hub>,
    config: &Config,
    api: Option<&Arc<Api>>,
    tasks: &mut JoinSet<Result<(), TaskError>>,
) {
    let Some(state) = config.state.clone() else {
        return;
    };
    let place = match (state.file, &config.source, api) {
        (Some(file), _, _) => Backend::SharedFile(file),
        (None, Origin::Manifests(path), _) if path.as_os_str() != "-" => {
            let folder = std::env::var_os(SYSTEMD);
            Backend::beside(folder.as_ref().map_or(path, Path::new))
        }
        (None, Origin::Kubernetes(_), Some(api)) => Backend::ConfigMap {
            api: Arc::clone(api),
            namespace: state.namespace.unwrap_or_else(|| NAMESPACE.to_owned()),
        },
        _ => return,
    };
    hub.overrides().keep_in(place);
    let (follower, teller) = (Arc::clone(hub), Arc::clone(hub));
    let follow = async move { follower.overrides().follow().await };
    tasks.spawn(until(follow, hub.shutdown().clone()));
    let tell = async move {
        let mut overrides = teller.overrides().changes();
        while overrides.changed().await.is_ok() {
            teller.agents().changed();
        }
    };
    tasks.spawn(until(tell, hub.shutdown().clone()));
    let (summary, head) = (hub.index().summary(), hub.store().head());
    let follow = approval::follow(
        hub.index().approvals(),
        hub.overrides().changes(),
        summary,
        head,
    );
    tasks.spawn(until(follow, hub.shutdown().clone()));
}
