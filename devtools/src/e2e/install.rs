//! kplane on a cluster, by its chart.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use kplane_rig::real::{Mode, RealCluster};
use serde_json::json;

const NAMESPACE: &str = "kplane";
const CONTROL_PLANE: &str = "kplane-controlplane";
/// The archives that `cargo xtask images` writes.
const ARCHIVES: [&str; 3] = [
    "kp-controlplane-amd64.tar",
    "kp-nodeagent-amd64.tar",
    "kp-nodeagent-iptables-amd64.tar",
];

/// The chart, and what installs it.
pub(crate) struct Chart<'a> {
    /// The root of the checkout.
    pub(crate) root: &'a Path,
    /// The folder of images.
    pub(crate) images: &'a Path,
    pub(crate) helm: &'a Path,
    /// Whether nodes enforce NetworkPolicies.
    pub(crate) policies: bool,
    /// Further values of the chart, such as `name=value`.
    pub(crate) settings: &'a [&'a str],
}

impl Chart<'_> {
    /// Returns the archives of kplane's images.
    pub(crate) fn archives(&self) -> impl Iterator<Item = PathBuf> {
        ARCHIVES.iter().map(|archive| self.images.join(archive))
    }

    /// Installs the chart, and waits until both programs run everywhere and Services work.
    ///
    /// # Errors
    /// Helm's error, or minutes have passed.
    pub(crate) fn install(
        &self,
        cluster: &RealCluster,
        mode: Mode,
        dual_stack: bool,
    ) -> Result<()> {
        let server = cluster.server();
        let host = server.trim_start_matches("https://");
        let (host, port) = host.rsplit_once(':').context("no port")?;
        // In Helm's syntax a comma ends a value.
        let pods = if dual_stack { r"10.244.0.0/16\,fd44::/48" } else { "10.244.0.0/16" };
        let mut settings = vec![
            format!("kubernetesServiceHost={host}"),
            format!("kubernetesServicePort={port}"),
            format!("agent.clusterCIDR={pods}"),
            format!("agent.backend={mode}"),
            "controlPlane.replicas=2".to_owned(),
            format!("networkPolicies.enforce={}", self.policies),
        ];
        settings.extend(self.settings.iter().map(ToString::to_string));
        if mode == Mode::Nftables {
            let localhost = r"agent.extraArgs[0]=--nodeport-addresses=primary\,localhost";
            settings.push(localhost.to_owned());
        }
        let chart = self.root.join("deploy/chart").display().to_string();
        let mut args = vec!["install", "kplane", &chart, "--create-namespace"];
        args.extend(["--namespace", NAMESPACE]);
        args.extend(settings.iter().flat_map(|setting| ["--set", setting]));
        cluster.run(&self.helm.display().to_string(), &args)?;
        for of in [
            "deployment/kplane-controlplane",
            "daemonset/kplane-nodeagent",
        ] {
            let words = [
                "rollout",
                "status",
                "--timeout=3m",
                "--namespace",
                NAMESPACE,
            ];
            cluster.kubectl(&[&words[..], &[of]].concat())?;
        }
        let dns = cluster.wait_for_pods("kube-system", "k8s-app=kube-dns", 1);
        dns.map(drop)
    }
}

/// Kills one replica of the control plane at once, and returns its name.
pub(super) fn kill_replica(cluster: &RealCluster) -> Result<String> {
    let label = ("app.kubernetes.io/component", "controlplane");
    let pods = cluster.api().list("Pod", Some(NAMESPACE))?;
    let pod = pods.iter().find(|pod| pod["metadata"]["labels"][label.0] == label.1);
    let name = pod
        .and_then(|pod| pod["metadata"]["name"].as_str())
        .with_context(|| format!("no Pod of {CONTROL_PLANE}"))?;
    let now = json!({ "gracePeriodSeconds": 0 });
    cluster.api().delete_with("Pod", &format!("{NAMESPACE}/{name}"), &now)?;
    Ok(name.to_owned())
}
