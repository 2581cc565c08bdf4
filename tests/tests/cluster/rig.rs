//! The rig itself: what a cluster promises to the other tests.

use anyhow::{Context as _, Result, ensure};
use kplane_tests::cluster::api::status_code;
use kplane_tests::cluster::{Cluster, Options};
use serde_json::json;

pub(crate) fn objects_are_made_changed_and_deleted() -> Result<()> {
    let cluster = Cluster::start(&Options::default())?;
    let api = cluster.api();
    let service = json!({
        "kind": "Service",
        "metadata": { "name": "web", "namespace": "default" },
        "spec": { "ports": [{ "port": 80 }], "ipFamilyPolicy": "RequireDualStack" },
    });
    let made = api.apply(&service)?;
    let ips = made["spec"]["clusterIPs"]
        .as_array()
        .context("no addresses")?;
    ensure!(ips.len() == 2, "{made}");
    let twice = api.create(&service).unwrap_err();
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
    let refused = poor.list("Service", None).unwrap_err();
    ensure!(status_code(&refused) == Some(403), "{refused:?}");
    Ok(())
}
