//! A whole agent whose configuration file changes (I3). Only the kernel is missing.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use kp_nodeagent::app;
use kp_nodeagent::config::Config;
use kplane_dataplane::backend::noop::{self, Noop};
use kplane_dataplane::backend::{Applied, ApplyError, Change, Side, Verification};
use kplane_dataplane::plan::NodePlan;
use kplane_model::Family;
use tempfile::TempDir;
use tokio::sync::mpsc;

use crate::support::config_of;

/// Longest that anything may take on a busy machine.
const DEADLINE: Duration = Duration::from_secs(30);

/// Tells what it is asked to program of the node itself.
struct Reported(mpsc::UnboundedSender<NodePlan>, Noop);

impl Side for Reported {
    fn apply(&mut self, change: Change<'_>) -> Result<Applied, ApplyError> {
        if change.family == Family::V4 {
            // A test that is over does not listen.
            let _ = self.0.send(change.node.clone());
        }
        self.1.apply(change)
    }

    fn verify(&mut self) -> Result<Verification, ApplyError> {
        self.1.verify()
    }
}

/// The volume of a ConfigMap: a file behind two links, of which one is swapped.
struct ConfigMap(TempDir);

impl ConfigMap {
    fn new(fields: &str) -> Self {
        let map = Self(TempDir::new().unwrap());
        map.publish("..1", fields);
        symlink("..data/config.conf", map.0.path().join("config.conf")).unwrap();
        map
    }

    fn publish(&self, version: &str, fields: &str) {
        let folder = self.0.path();
        let text = format!(
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n\
             mode: nftables\nhealthzBindAddress: 127.0.0.1:0\n{fields}"
        );
        fs::create_dir(folder.join(version)).unwrap();
        fs::write(folder.join(version).join("config.conf"), text).unwrap();
        symlink(version, folder.join("..data_tmp")).unwrap();
        fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
    }
}

fn config(map: &ConfigMap, manifests: &Path) -> Config {
    let config = map.0.path().join("config.conf");
    let line = [
        "kp-nodeagent",
        "--standalone",
        "--status-bind-address=",
        "--cache-dir=",
        "--node-name=n1",
        "--manifests",
        manifests.to_str().unwrap(),
        "--config",
        config.to_str().unwrap(),
    ];
    Config {
        inside: Some(kp_controlplane::app::inside),
        ..config_of(line)
    }
}

/// Waits until the kernel is asked for such pod sources.
async fn pods(reported: &mut mpsc::UnboundedReceiver<NodePlan>, range: &str) -> NodePlan {
    let wanted = vec![range.parse().unwrap()];
    let plan = async {
        loop {
            let plan = reported.recv().await.unwrap();
            if plan.pod_sources == wanted {
                return plan;
            }
        }
    };
    tokio::time::timeout(DEADLINE, plan).await.unwrap()
}

#[tokio::test]
async fn i3_a_config_map_that_changes_is_taken_over_without_a_restart() {
    let map = ConfigMap::new("clusterCIDR: 10.0.0.0/8\n");
    let manifests = TempDir::new().unwrap();
    let (tell, mut reported) = mpsc::unbounded_channel();
    let side = move |_| Box::new(Reported(tell.clone(), Noop::default())) as Box<dyn Side>;
    let open = || Ok(noop::open_with(side));
    let agent = app::build_with(config(&map, manifests.path()), open).await.unwrap();
    let mut configuration = agent.configuration();
    assert!(!pods(&mut reported, "10.0.0.0/8").await.unmasqueraded_sources.is_empty());

    // A file that makes no sense is passed over: the next one counts.
    map.publish("..2", "clusterCIDR: nonsense\n");
    map.publish(
        "..3",
        "clusterCIDR: 11.0.0.0/8\nnftables: {masqueradeAll: true, masqueradeBit: 3}\n",
    );
    let plan = pods(&mut reported, "11.0.0.0/8").await;
    assert_eq!(plan.unmasqueraded_sources, [], "A17: masqueradeAll");
    let changed = configuration.wait_for(|now| now.nftables.masquerade_all);
    let now = tokio::time::timeout(DEADLINE, changed).await.unwrap().unwrap().clone();
    assert_eq!(now.nftables.masquerade_bit, 14, "needs a restart");
    assert_eq!(now.cluster_cidr, "11.0.0.0/8");

    agent.shutdown_token().cancel();
    tokio::time::timeout(DEADLINE, agent.wait()).await.unwrap().unwrap();
}
