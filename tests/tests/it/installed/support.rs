//! The programs and images, and an installation on a cluster.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kplane_tests::client::Probe;
use kplane_tests::cluster::helm;
use kplane_tests::load::{Load, Pace, Report};
use kplane_tests::product::Product;
use kplane_tests::real::{self, NodePrograms, Options, Proxy, RealCluster};
use kplane_tests::scratch;
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use crate::installed::typed::{typed, typed_with};

/// Kubelets and controllers take seconds, and the machine may be busy.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);
/// The archives that `cargo xtask images` writes.
const ARCHIVES: [&str; 3] = [
    "kp-controlplane-amd64.tar",
    "kp-nodeagent-amd64.tar",
    "kp-nodeagent-iptables-amd64.tar",
];

static BUILT: OnceLock<Built> = OnceLock::new();

/// What the tests install.
pub(crate) struct Built {
    /// The checkout.
    pub(crate) root: PathBuf,
    images: PathBuf,
    pub(crate) kpctl: PathBuf,
    pub(crate) helm: PathBuf,
}

/// Builds programs, images and Helm.
pub(crate) fn build() -> Result<()> {
    NodePrograms::ensure()?;
    let helm = helm()?;
    let product = Product::build()?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .context("tests lies in a checkout")?
        .to_owned();
    let images = scratch::folder(Path::new(env!("CARGO_TARGET_TMPDIR")), "images")?;
    let mut made = Command::new(&product.dev);
    made.args(["images", "--quick", "--bin-dir"])
        .arg(&product.folder)
        .arg("--out")
        .arg(&images)
        .current_dir(&root);
    let made = made.status().context("start kplane-dev images")?;
    ensure!(made.success(), "kplane-dev images: {made}");
    let kpctl = product.kpctl;
    BUILT.get_or_init(|| Built {
        root,
        images,
        kpctl,
        helm,
    });
    Ok(())
}

/// Removes the images.
pub(crate) fn end() {
    if let Some(built) = BUILT.get() {
        // The next run removes what is left.
        let _ = fs::remove_dir_all(&built.images);
    }
}

/// Returns what [`build`] has built.
pub(crate) fn built() -> Result<&'static Built> {
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

/// Returns the nodes as `kpctl status` shows them.
pub(crate) fn nodes(cluster: &RealCluster) -> Result<Vec<Value>> {
    let text = typed(cluster, "kpctl status -o json")?;
    let status: Value = serde_json::from_str(&text).context("the JSON of kpctl")?;
    let nodes = status["nodes"].as_array();
    nodes.cloned().context("no nodes")
}

/// Waits until the nodes that kpctl shows verified are exactly these.
pub(crate) fn verified(cluster: &RealCluster, names: &[&str]) -> Result<()> {
    eventually(DEADLINE, &format!("{names:?} are verified"), || {
        let nodes = nodes(cluster)?;
        let good: Vec<_> = nodes
            .iter()
            .filter(|node| {
                node["state"] == "InSync" && node["verifiedRevision"] == node["appliedRevision"]
            })
            .filter_map(|node| node["name"].as_str())
            .collect();
        ensure!(good == names, "{nodes:?}");
        Ok(())
    })
}

/// Waits until all pods of the installation are replaced by those that it shall have.
pub(crate) fn rolled(cluster: &RealCluster) -> Result<()> {
    let plane = "kubectl rollout status --namespace kplane deployment/kplane-controlplane";
    let agents = "kubectl rollout status --namespace kplane daemonset/kplane-nodeagent";
    let wait = |of| typed_with(cluster, of, &["--timeout=2m"]).map(drop);
    [plane, agents].into_iter().try_for_each(wait)
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

/// Lets the client connect to a Service without a pause, beginning once the client's node serves the Service.
pub(crate) fn load(cluster: &RealCluster, service: &str) -> Result<Load> {
    let probe = Probe::tcp(address(cluster, service)?);
    // The node asks, and not the client. The kernel remembers a connection that no rule translates for two minutes, and
    // does the same with each further one from the same port.
    let node = cluster.node("node-1")?.ns()?;
    eventually(DEADLINE, &format!("node-1 serves {service}"), || {
        probe.reply(&node)
    })?;
    Load::start(&cluster.pod_ns("default/client")?, probe, Pace::default())
}

/// Waits until a Pod reaches a Service, and returns the address and port.
pub(crate) fn reached(cluster: &RealCluster, pod: &str, service: &str) -> Result<SocketAddr> {
    let address = address(cluster, service)?;
    eventually(DEADLINE, &format!("{service} answers {pod}"), || {
        cluster.exec(pod, &["/pod", "connect", &address.to_string()])
    })?;
    Ok(address)
}

/// Returns the first ClusterIP of a Service, with port 80.
fn address(cluster: &RealCluster, service: &str) -> Result<SocketAddr> {
    let key = format!("default/{service}");
    let object = cluster.api().get("Service", &key)?;
    let ips = real::ips(&object.context("no Service")?);
    Ok(SocketAddr::new(*ips.first().context("no ClusterIP")?, 80))
}

/// Wants all connections of the load to have been answered, and some more since the last look.
pub(crate) fn unharmed(load: &Load) -> Result<()> {
    let report = further(load)?;
    ensure!(report.lost() == 0, "{report}");
    Ok(())
}

/// Runs a step of a test, and prints how long it took.
pub(crate) fn step<T>(name: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    let done = run().with_context(|| name.to_owned())?;
    println!("{:>6.1} s  {name}", start.elapsed().as_secs_f64());
    Ok(done)
}

/// Ends a load of which no connection has failed, and prints its numbers.
pub(crate) fn ended(load: Load) -> Result<()> {
    let report = load.stop();
    println!("load: {report}");
    ensure!(report.lost() == 0, "{report}");
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
