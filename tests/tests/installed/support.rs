//! The programs and images, and an installation on a cluster.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::client::Probe;
use kplane_tests::cluster::helm;
use kplane_tests::load::{Load, Pace, Report};
use kplane_tests::product::{Product, cargo};
use kplane_tests::real::{self, NodePrograms, Options, Proxy, RealCluster};
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

/// Kubelets and controllers take seconds, and the machine may be busy.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);
/// The namespace of the installation.
pub(crate) const NAMESPACE: &str = "kplane";
/// The archives that `cargo xtask images` writes.
const ARCHIVES: [&str; 3] = [
    "kp-controlplane-amd64.tar",
    "kp-nodeagent-amd64.tar",
    "kp-nodeagent-iptables-amd64.tar",
];

static BUILT: OnceLock<Built> = OnceLock::new();

/// What the tests install.
struct Built {
    root: PathBuf,
    images: PathBuf,
    kpctl: PathBuf,
    helm: PathBuf,
}

/// Builds programs, images and Helm.
pub(crate) fn build() -> Result<()> {
    NodePrograms::ensure()?;
    let helm = helm()?;
    let product = Product::build()?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let root = root.context("tests lies in a checkout")?.to_owned();
    let images = root.join("target/images-of-tests");
    let made = cargo()
        .args(["xtask", "images", "--quick", "--out"])
        .arg(&images)
        .current_dir(&root)
        .status();
    let made = made.context("start cargo xtask images")?;
    ensure!(made.success(), "cargo xtask images: {made}");
    let kpctl = product.kpctl;
    BUILT.get_or_init(|| Built {
        root,
        images,
        kpctl,
        helm,
    });
    Ok(())
}

fn built() -> Result<&'static Built> {
    BUILT.get().context("nothing is built")
}

/// A cluster of two nodes, with kplane's images.
pub(crate) fn cluster(proxy: Proxy) -> Result<RealCluster> {
    let images = &built()?.images;
    RealCluster::start(&Options {
        proxy,
        images: ARCHIVES.map(|archive| images.join(archive)).into(),
        ..Options::default()
    })
}

/// Runs Helm: `install` or `upgrade`, with these settings.
pub(crate) fn chart(cluster: &RealCluster, verb: &str, settings: &[&str]) -> Result<()> {
    let built = built()?;
    let chart = built.root.join("deploy/chart").display().to_string();
    let server = cluster.server();
    let host = server.trim_start_matches("https://");
    let (host, port) = host.rsplit_once(':').context("no port")?;
    let own = [
        format!("kubernetesServiceHost={host}"),
        format!("kubernetesServicePort={port}"),
    ];
    let mut args = vec![verb, "kplane", &chart, "--namespace", NAMESPACE];
    if verb == "install" {
        args.push("--create-namespace");
    }
    let settings = own
        .iter()
        .map(String::as_str)
        .chain(settings.iter().copied());
    for setting in settings {
        args.extend(["--set", setting]);
    }
    helm_of(cluster, &args).map(drop)
}

/// Runs Helm.
pub(crate) fn helm_of(cluster: &RealCluster, args: &[&str]) -> Result<String> {
    let helm = built()?.helm.display().to_string();
    cluster.run(&helm, args)
}

/// Runs kpctl.
pub(crate) fn kpctl(cluster: &RealCluster, args: &[&str]) -> Result<String> {
    let kpctl = built()?.kpctl.display().to_string();
    cluster.run(&kpctl, args)
}

/// Returns the nodes as `kpctl status` shows them.
pub(crate) fn nodes(cluster: &RealCluster) -> Result<Vec<Value>> {
    let text = kpctl(cluster, &["status", "-o", "json"])?;
    let status: Value = serde_json::from_str(&text).context("the JSON of kpctl")?;
    let nodes = status["nodes"].as_array();
    nodes.cloned().context("no nodes")
}

/// Waits until the nodes that kpctl shows verified are exactly these.
pub(crate) fn verified(cluster: &RealCluster, names: &[&str]) -> Result<()> {
    eventually(DEADLINE, &format!("{names:?} are verified"), || {
        let nodes = nodes(cluster)?;
        let good = nodes.iter().filter(|node| {
            node["state"] == "InSync" && node["verifiedRevision"] == node["appliedRevision"]
        });
        let good: Vec<_> = good.filter_map(|node| node["name"].as_str()).collect();
        ensure!(good == names, "{nodes:?}");
        Ok(())
    })
}

/// Waits until all pods of the installation are replaced by those that it shall have.
pub(crate) fn rolled(cluster: &RealCluster) -> Result<()> {
    for of in [
        "deployment/kplane-controlplane",
        "daemonset/kplane-nodeagent",
    ] {
        let wait = ["rollout", "status", "--timeout=2m"];
        cluster.kubectl(&[&wait[..], &["--namespace", NAMESPACE, of]].concat())?;
    }
    Ok(())
}

/// A Service with two endpoints, which a Pod asks without a pause.
pub(crate) fn traffic(cluster: &RealCluster) -> Result<Load> {
    let api = cluster.api();
    api.apply(&real::pod("default", "client", "node-1"))?;
    api.apply(&real::deployment("default", "web", 2))?;
    // As an administrator wants it: a drained node keeps its last endpoint until there is another one.
    api.apply(&json!({
        "kind": "PodDisruptionBudget",
        "metadata": { "name": "web", "namespace": "default" },
        "spec": { "minAvailable": 1, "selector": { "matchLabels": { "app": "web" } } },
    }))?;
    api.apply(&real::service("default", "web"))?;
    cluster.wait_for_pods("default", "app=client", 1)?;
    cluster.wait_for_pods("default", "app=web", 2)?;
    load(cluster, "web")
}

/// Lets the client connect to a Service without a pause, beginning once the Service answers.
pub(crate) fn load(cluster: &RealCluster, service: &str) -> Result<Load> {
    let address = reached(cluster, "default/client", service)?;
    let probe = Probe::tcp(address);
    Load::start(&cluster.pod_ns("default/client")?, probe, Pace::default())
}

/// Waits until a Pod reaches a Service, and returns the address and port.
pub(crate) fn reached(cluster: &RealCluster, pod: &str, service: &str) -> Result<SocketAddr> {
    let object = cluster
        .api()
        .get("Service", &format!("default/{service}"))?;
    let ips = real::ips(&object.context("no Service")?);
    let address = SocketAddr::new(*ips.first().context("no ClusterIP")?, 80);
    eventually(DEADLINE, &format!("{service} answers {pod}"), || {
        cluster.exec(pod, &["/pod", "connect", &address.to_string()])
    })?;
    Ok(address)
}

/// Wants all connections of the load to have been answered, and some more since the last look.
pub(crate) fn unharmed(load: &Load) -> Result<()> {
    let report = further(load)?;
    ensure!(report.lost() == 0, "{report}");
    Ok(())
}

/// Wants further connections to have been answered, none to have been refused, and at most one in a thousand to have
/// timed out after a second: that happens while two cores start a whole node, and in mode iptables now and then with
/// kube-proxy alone and at rest.
pub(crate) fn hardly_harmed(load: &Load) -> Result<()> {
    let report = further(load)?;
    let timed_out = report.failed.get("timed out").copied().unwrap_or(0);
    ensure!(
        report.lost() == timed_out && timed_out * 1_000 <= report.ok(),
        "{report}"
    );
    Ok(())
}

/// Waits for more answers than there were, and returns the results so far.
fn further(load: &Load) -> Result<Report> {
    let before = load.report().ok();
    eventually(DEADLINE, "further connections", || {
        let report = load.report();
        ensure!(report.ok() > before + 50, "{report}");
        Ok(())
    })?;
    Ok(load.report())
}
