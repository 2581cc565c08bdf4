//! Two nodes with kube-proxy: Pods, Services and names, nodes that restart, come and go.

use std::time::Duration;

use anyhow::{Result, ensure};
use kplane_rig::client::Probe;
use kplane_rig::load::{Load, Pace};
use kplane_rig::real::{self, Options, RealCluster};
use kplane_rig::wait::eventually;

use crate::real::left::Traces;

/// Proxies take moments to follow, and the machine may be busy.
const DEADLINE: Duration = Duration::from_secs(30);
/// After a reboot, CoreDNS may ask for the API's ClusterIP before kube-proxy serves it. That connection's entry of
/// connection tracking has no translation, so all its SYNs are lost, and client-go gives it up after 30 s.
const AFTER_REBOOT: Duration = Duration::from_secs(120);

pub(crate) fn pods_of_two_nodes_reach_each_other_by_service_and_by_name() -> Result<()> {
    let cluster = RealCluster::start(&Options::default())?;
    let api = cluster.api();
    api.apply(&real::pod("default", "client", "node-1"))?;
    api.apply(&real::pod("default", "web", "node-2"))?;
    api.apply(&real::service("default", "web"))?;
    cluster.wait_for_pods("default", "app=client", 1)?;
    cluster.wait_for_pods("default", "app=web", 1)?;

    let service = api.get("Service", "default/web")?.unwrap_or_default();
    let ip = real::ips(&service)[0];
    let answered = eventually(DEADLINE, "the ClusterIP answers", || {
        cluster.exec("default/client", &["/pod", "connect", &format!("{ip}:80")])
    })?;
    ensure!(answered.starts_with("web "), "{answered}");
    let named = cluster.exec("default/client", &["/pod", "get", "http://web:81/"])?;
    ensure!(named.starts_with("web "), "{named}");
    let full = ["/pod", "resolve", "web.default.svc.cluster.local"];
    let resolved = cluster.exec("default/client", &full)?;
    ensure!(resolved.trim() == ip.to_string(), "{resolved}");

    // The rig's own clients work inside real Pods.
    let probe = Probe::tcp((ip, 80).into());
    let load = Load::start(&cluster.pod_ns("default/client")?, probe, Pace::default())?;
    eventually(DEADLINE, "answers from inside a Pod", || {
        let report = load.report();
        ensure!(report.ok() > 100, "{report}");
        Ok(())
    })?;
    let report = load.stop();
    ensure!(report.lost() == 0, "{report}");

    zones_and_files(&cluster)?;
    restarted(&cluster)?;
    come_and_gone(&cluster)?;
    let traces = Traces::of(cluster.folder(), std::process::id())?;
    drop(cluster);
    traces.vanish()
}

/// A node's files are its own, and its labels name a zone.
fn zones_and_files(cluster: &RealCluster) -> Result<()> {
    let zones = [
        "get",
        "nodes",
        "-L",
        "topology.kubernetes.io/zone",
        "--no-headers",
    ];
    let listed = cluster.kubectl(&zones)?;
    let zones: Vec<_> =
        listed.lines().filter_map(|line| line.split_whitespace().next_back()).collect();
    ensure!(zones == ["a", "b"], "{listed}");
    let (one, two) = (cluster.node("node-1")?, cluster.node("node-2")?);
    one.exec("sh", &["-c", "hostname > /etc/kplane-rig-test"])?;
    let written = one.exec("cat", &["/etc/kplane-rig-test"])?;
    ensure!(written.trim() == "node-1", "{written}");
    ensure!(two.exec("cat", &["/etc/kplane-rig-test"]).is_err());
    ensure!(!std::path::Path::new("/etc/kplane-rig-test").exists());
    Ok(())
}

/// A node that restarts has its Pods again, and new kernel tables.
fn restarted(cluster: &RealCluster) -> Result<()> {
    let node = cluster.node("node-2")?;
    node.exec("nft", &["add", "table", "ip", "before"])?;
    cluster.reboot("node-2")?;
    let tables = node.exec("nft", &["list", "tables"])?;
    ensure!(!tables.contains("before"), "{tables}");
    cluster.wait_for_pods("default", "app=web", 1)?;
    eventually(AFTER_REBOOT, "the Service answers again", || {
        cluster.exec("default/client", &["/pod", "get", "http://web:81/"])
    })?;
    Ok(())
}

/// A node can be added, and taken away for good.
fn come_and_gone(cluster: &RealCluster) -> Result<()> {
    let node = cluster.add_node(3)?;
    ensure!(node.zone() == "c");
    cluster.api().apply(&real::pod("default", "third", "node-3"))?;
    cluster.wait_for_pods("default", "app=third", 1)?;
    drop(node);
    cluster.remove_node("node-3")?;
    ensure!(cluster.node("node-3").is_err());
    Ok(())
}
