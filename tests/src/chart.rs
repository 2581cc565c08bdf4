//! The Helm chart, rendered by Helm itself.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use kplane_rig::cluster::helm;
use kplane_rig::process::output;
use serde_json::Value;

/// The release and its namespace in all tests.
pub const RELEASE: &str = "kplane";

/// A file of kube-proxy as kubeadm writes it, in mode ipvs.
const KUBE_PROXY_FILE: &str = "agent.kubeProxyConfig.inline=apiVersion: kubeproxy.config.k8s.io/v1alpha1\n\
    kind: KubeProxyConfiguration\nclusterCIDR: 10.244.0.0/16\nmode: ipvs\n";

/// Settings of the chart's main values; a combination has one of each line. An empty text leaves the default.
const MAIN_VALUES: [&[&str]; 5] = [
    &["", "controlPlane.hostNetwork=false"],
    &[
        "",
        "kubernetesServiceHost=192.0.2.1",
        "kubernetesServiceHost=hostIP",
    ],
    &["", "agent.backend=iptables", KUBE_PROXY_FILE],
    &["", "migration.enabled=true"],
    &[
        "",
        "controlPlane.addresses={192.0.2.10,kplane.example:17443}",
    ],
];

/// Settings that stand for themselves.
const OTHERS: [&[&str]; 16] = [
    &["networkPolicies.enforce=true"],
    &["controlPlane.watchPods=true"],
    &["monitoring.dashboards.enabled=true"],
    &["agent.metricsBindAddress=0.0.0.0:10249"],
    &["startupTaint.enabled=true"],
    &["preStop.enabled=true", "preStop.port=17447"],
    &["preStop.enabled=true", "preStop.policy=false"],
    &["deadNode.mode=act", "deadNode.connections=keep"],
    &["agent.kubeProxyConfig.existingConfigMap=own"],
    &[
        "agent.clusterCIDR=10.244.0.0/16\\,fd44::/48",
        "agent.healthzPort=10999",
    ],
    &[
        "image.tag=1.2.3",
        "image.pullSecrets={one}",
        "agent.variant=iptables",
    ],
    &[
        "networkPolicy.enabled=true",
        "controlPlane.hostNetwork=false",
    ],
    &[
        "controlPlane.externalIPCIDRs={192.0.2.0/24}",
        "controlPlane.reservedPorts={22,192.0.2.1:80}",
    ],
    &[
        "controlPlane.cliffGuard.deletions=all",
        "controlPlane.logFormat=json",
    ],
    &[
        "controlPlane.podDisruptionBudget.enabled=false",
        "rbac.userRoles=false",
        "controlPlane.replicas=1",
    ],
    &[
        "controlPlane.extraArgs={--max-connections=10}",
        "agent.extraArgs={--conntrack-max-per-core=0}",
        "agent.flows=true",
    ],
];

/// Settings whose objects are of the Prometheus operator's kinds.
pub const MONITORING: [&[&str]; 3] = [
    &["monitoring.serviceMonitor.enabled=true"],
    &[
        "monitoring.podMonitor.enabled=true",
        "agent.metricsBindAddress=0.0.0.0:10249",
    ],
    &["monitoring.prometheusRule.enabled=true"],
];

/// The chart, and Helm.
#[derive(Debug)]
pub struct Chart {
    helm: PathBuf,
}

impl Chart {
    /// Finds Helm, and builds it first if it is missing.
    ///
    /// # Errors
    /// Helm cannot be built.
    pub fn open() -> Result<Self> {
        Ok(Self { helm: helm()? })
    }

    /// Runs `helm` and returns what it prints.
    ///
    /// # Errors
    /// Helm fails; the message has what it says.
    pub fn helm(&self, args: &[&str]) -> Result<String> {
        let mut command = Command::new(&self.helm);
        // Neither a cluster of this user nor plugins.
        command.env("KUBECONFIG", "/nonexistent").args(args);
        output(command)
    }

    /// Renders the chart with these settings, and more options of Helm.
    ///
    /// # Errors
    /// Helm refuses the values.
    pub fn text(&self, settings: &[&str], options: &[&str]) -> Result<String> {
        let path = folder();
        let folder = path.to_string_lossy();
        let mut args = vec!["template", RELEASE, &folder, "--namespace", RELEASE];
        args.extend(options);
        for setting in settings {
            args.extend(["--set", setting]);
        }
        self.helm(&args)
    }

    /// Renders the chart with these settings, and returns its objects.
    ///
    /// # Errors
    /// Helm refuses the values, or renders something else than objects.
    pub fn objects(&self, settings: &[&str]) -> Result<Vec<Value>> {
        let text = self.text(settings, &[])?;
        objects(&text).with_context(|| format!("{settings:?}"))
    }
}

/// Returns the folder of the chart.
pub fn folder() -> PathBuf {
    root().join("deploy/chart")
}

/// Returns the root of the checkout.
pub fn root() -> &'static Path {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests)
}

/// Returns all combinations of the main values, and the other settings.
pub fn combinations() -> BTreeSet<Vec<&'static str>> {
    let mut all = vec![Vec::new()];
    for choices in MAIN_VALUES {
        let longer = |before: &Vec<&'static str>| {
            let before = before.clone();
            choices.iter().map(move |choice| {
                let mut after = before.clone();
                after.extend((!choice.is_empty()).then_some(*choice));
                after
            })
        };
        all = all.iter().flat_map(longer).collect();
    }
    all.extend(OTHERS.map(<[&str]>::to_vec));
    all.into_iter().collect()
}

/// Parses objects that `---` separates.
///
/// # Errors
/// A part is no YAML.
pub fn objects(text: &str) -> Result<Vec<Value>> {
    let parts = text.split("\n---");
    let parsed = parts.map(|part| {
        let part = part.trim_start_matches("---");
        let value: Value = serde_saphyr::from_str(part).with_context(|| part.to_owned())?;
        Ok(value)
    });
    let objects: Result<Vec<Value>> = parsed.collect();
    Ok(objects?.into_iter().filter(Value::is_object).collect())
}

/// Returns the object of a kind, by its name.
///
/// # Errors
/// There is none.
pub fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> Result<&'a Value> {
    objects
        .iter()
        .find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
        .with_context(|| format!("the chart has no {kind} {name}"))
}
