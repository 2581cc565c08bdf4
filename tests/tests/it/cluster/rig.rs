//! The rig itself: what a cluster promises to the other tests.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::cluster::api::status_code;
use kplane_tests::cluster::{Cluster, Options, objects};
use kplane_tests::topology::NodeSpec;
use kplane_tests::wait::eventually;
use serde_json::json;

/// Controllers retry after seconds, and the machine may be busy.
const DEADLINE: Duration = Duration::from_secs(30);

pub(crate) fn objects_are_made_changed_and_deleted() -> Result<()> {
    let cluster = Cluster::start(&Options::default())?;
    let api = cluster.api();
    let dual = json!({ "ipFamilyPolicy": "RequireDualStack" });
    let service = objects::service("default", "web", dual);
    let made = api.apply(&service)?;
    let ips = made["spec"]["clusterIPs"].as_array().context("no addresses")?;
    ensure!(ips.len() == 2, "{made}");
    let twice = api.create(&service).err().context("made twice")?;
    ensure!(status_code(&twice) == Some(409), "{twice:?}");
    api.patch(
        "Service",
        "default/web",
        &json!({ "spec": { "type": "NodePort" } }),
    )?;

    let revision = cluster.compact()?;
    ensure!(revision > 0);
    cluster.kill_apiserver()?;
    ensure!(api.get("Service", "default/web").is_err());
    cluster.start_apiserver()?;

    let found = api.get("Service", "default/web")?.context("it is gone")?;
    ensure!(
        found["spec"]["ports"][0]["nodePort"].as_u64() > Some(29_999),
        "{found}"
    );
    let names: Vec<_> = api
        .list("Service", None)?
        .iter()
        .map(|s| s["metadata"]["name"].clone())
        .collect();
    ensure!(names == ["kubernetes", "web"], "{names:?}");
    api.delete("Service", "default/web")?;
    ensure!(api.get("Service", "default/web")?.is_none());

    api.apply(&json!({
        "kind": "ServiceAccount", "metadata": { "name": "poor", "namespace": "default" },
    }))?;
    let poor = cluster.api_as(&cluster.account_kubeconfig("default/poor")?)?;
    let refused = poor.list("Service", None).err().context("not refused")?;
    ensure!(status_code(&refused) == Some(403), "{refused:?}");
    Ok(())
}

pub(crate) fn deployments_have_endpoints_that_come_terminate_and_go() -> Result<()> {
    let cluster = Cluster::start(&Options {
        controllers: true,
        kubelet: Some(Duration::from_secs(1)),
        ..Options::default()
    })?;
    let api = cluster.api();
    cluster.add_node(&NodeSpec::standard(1)?, "a")?;
    let selector = json!({ "selector": { "app": "web" } });
    api.apply(&objects::service("default", "web", selector))?;
    api.apply(&objects::deployment("default", "web", 3, "node-1"))?;
    let endpoints = |condition: &str| -> Result<usize> {
        let slices = api.list("EndpointSlice", Some("default"))?;
        Ok(slices
            .iter()
            .filter(|slice| slice["metadata"]["labels"]["kubernetes.io/service-name"] == "web")
            .filter_map(|slice| slice["endpoints"].as_array())
            .flatten()
            .filter(|ep| ep["conditions"][condition] == true)
            .count())
    };
    let reach = |what: (&str, usize)| {
        eventually(DEADLINE, &format!("{what:?}"), || {
            let found = endpoints(what.0)?;
            ensure!(found == what.1, "{found}");
            Ok::<_, anyhow::Error>(())
        })
    };
    reach(("ready", 3))?;
    let pods = api.list("Pod", Some("default"))?;
    let name = pods[0]["metadata"]["name"].as_str().context("no name")?;
    cluster.set_pod_ready(&format!("default/{name}"), false)?;
    reach(("ready", 2))?;
    cluster.set_pod_ready(&format!("default/{name}"), true)?;
    reach(("ready", 3))?;
    api.patch(
        "Deployment",
        "default/web",
        &json!({ "spec": { "replicas": 1 } }),
    )?;
    reach(("terminating", 2))?;
    reach(("terminating", 0))?;
    reach(("ready", 1))?;

    let saved = cluster.folder().join("saved");
    cluster.save(&saved)?;
    api.delete("Service", "default/web")?;
    cluster.restore(&saved)?;
    ensure!(api.get("Service", "default/web")?.is_some());
    Ok(())
}
