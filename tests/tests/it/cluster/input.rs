//! Bad input: wrong kubeconfigs are one clear line, absurd objects do not harm their neighbours.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::cluster::objects;
use kplane_tests::wait::eventually;
use serde_json::json;

use crate::cluster::faults::{addresses, serve, slice};
use crate::cluster::support::world::DEADLINE;
use crate::cluster::support::{World, with_world};

pub(crate) fn credentials_that_do_not_work_are_said_to() -> Result<()> {
    with_world(|world| {
        let cluster = &world.cluster;
        let api = world.api();
        api.apply(&json!({
            "kind": "ServiceAccount", "metadata": { "name": "poor", "namespace": "default" },
        }))?;
        let wrong = cluster.token_kubeconfig("wrong", "no-such-token")?;
        let poor = cluster.account_kubeconfig("default/poor")?;
        let text = fs::read_to_string(cluster.kubeconfig())?;
        let closed = cluster.folder().join("kubeconfig-closed");
        fs::write(&closed, text.replace(":6443", ":6444"))?;
        says(world, &wrong, &["401"])?;
        says(world, &poor, &["403", "services"])?;
        says(world, &closed, &["cannot be reached"])?;
        api.delete("ServiceAccount", "default/poor")
    })
}

/// The account of deploy/kubernetes/rbac.yaml may read what identifies the cluster.
pub(crate) fn control_planes_know_their_cluster() -> Result<()> {
    with_world(|world| {
        let namespace = world
            .api()
            .get("Namespace", "kube-system")?
            .context("a cluster without kube-system")?;
        let uid = namespace["metadata"]["uid"].as_str().unwrap_or_default();
        eventually(DEADLINE, "the control plane has read it", || {
            let log = world.logged("plane-0")?;
            let reported = log.contains("identified the cluster") && log.contains(uid);
            ensure!(reported && !uid.is_empty(), "{uid:?}: {log}");
            Ok(())
        })
    })
}

pub(crate) fn a_kubeconfig_that_is_none_is_one_line() -> Result<()> {
    with_world(|world| {
        let broken = world.cluster.folder().join("kubeconfig-broken");
        fs::write(&broken, "users: [")?;
        let absent = world.cluster.folder().join("kubeconfig-absent");
        for file in [broken, absent] {
            let mut plane = world.plane(2, &file)?;
            let status = eventually(DEADLINE, "it ends", || plane.ended())?;
            let log = world.logged("plane-2")?;
            ensure!(status.code() == Some(1), "{status}: {log}");
            let path = file.display().to_string();
            ensure!(log.lines().count() == 1 && log.contains(&path), "{log}");
        }
        Ok(())
    })
}

pub(crate) fn absurd_objects_do_not_harm_their_neighbours() -> Result<()> {
    with_world(|world| {
        let api = world.api();
        let good = serve(api, "good", 80, 2)?;
        let of_nobody = slice("no-such-service", &addresses(81, 3));
        api.apply(&of_nobody)?;
        // Endpoints that are the Service itself, or twice there.
        serve(api, "mirror", 82, 1)?;
        let mut itself = slice("mirror", &addresses(82, 2));
        itself["endpoints"][0]["addresses"] = json!(["10.96.77.82"]);
        itself["endpoints"][1] = itself["endpoints"][0].clone();
        api.apply(&itself)?;
        // Names of hosts, and ports without a number.
        serve(api, "names", 83, 1)?;
        let mut names = slice("names", &addresses(83, 1));
        names["metadata"]["name"] = json!("names-fqdn");
        names["addressType"] = json!("FQDN");
        names["endpoints"] = json!([{ "addresses": ["evil.example.com"] }]);
        api.apply(&names)?;
        let mut portless = slice("names", &addresses(84, 2));
        portless["metadata"]["name"] = json!("names-portless");
        portless["ports"] = json!([{ "name": "http", "protocol": "TCP" }]);
        api.apply(&portless)?;
        // Addresses of others.
        let spec = json!({
            "type": "LoadBalancer", "externalIPs": ["10.96.77.80", "172.30.1.1"],
        });
        let mut thief = objects::service("default", "thief", spec);
        let note = "x; flush ruleset #\u{1b}[2J\n".repeat(8_000);
        thief["metadata"]["annotations"] = json!({ "note": note });
        api.apply(&thief)?;
        let ingress = json!({ "ingress": [{ "ip": "10.96.77.80" }, { "ip": "172.30.0.2" }] });
        api.patch_status(
            "Service",
            "default/thief",
            &json!({ "loadBalancer": ingress }),
        )?;
        api.apply(&slice("thief", &addresses(85, 2)))?;
        world.settle()?;
        world.leads("node-1", good, &addresses(80, 2))?;
        world.wait_issue(&["thief"], true)
    })
}

/// Wants a replica with this kubeconfig to live on and to say what is wrong.
fn says(world: &World, kubeconfig: &Path, words: &[&str]) -> Result<()> {
    let mut plane = world.plane(2, kubeconfig)?;
    eventually(DEADLINE, &format!("it says {words:?}"), || {
        ensure!(plane.ended().is_err(), "{}", world.logged("plane-2")?);
        let issues = plane.issues()?;
        let found = issues.iter().any(|issue| words.iter().all(|word| issue.contains(word)));
        ensure!(found, "{issues:?}");
        Ok::<_, anyhow::Error>(())
    })
}
