//! The list of replicas that control planes keep for agents, which kubelet mounts into their pods.

use anyhow::{Context as _, Result, ensure};
use kplane_tests::cluster::Api;
use kplane_tests::cluster::objects::{endpoint, service, slice};
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use crate::cluster::identity::tidy;
use crate::cluster::support::secure::SecurePlane;
use crate::cluster::support::with_world;
use crate::cluster::support::world::DEADLINE;

/// The namespace of control planes, and the name of their Service.
const KPLANE: &str = "kplane";
const SERVICE: &str = "kplane-controlplane";

fn listed(api: &Api, expected: &str) -> Result<()> {
    eventually(DEADLINE, "the list of replicas is as the Service", || {
        let map = api.get("ConfigMap", "kplane/kplane-replicas")?.context("no list")?;
        ensure!(map["data"]["addresses"] == expected, "{map}");
        anyhow::Ok(())
    })
}

pub(crate) fn replicas_announce_the_addresses_of_their_service() -> Result<()> {
    with_world(|world| {
        let api = world.api();
        let ports = json!([{ "name": "agents", "port": 7465 }]);
        let spec = json!({ "clusterIP": "None", "ports": ports });
        api.apply(&service(KPLANE, SERVICE, spec))?;
        let endpoints = |ips: &[&str]| -> Value {
            let endpoints = ips.iter().map(|ip| endpoint(ip, "node-1"));
            let mut slice = slice(KPLANE, SERVICE, SERVICE, endpoints);
            slice["ports"] = ports.clone();
            slice
        };
        api.apply(&endpoints(&["192.0.2.21", "192.0.2.22"]))?;
        let certs = world.cluster.folder().join("announce-certs");
        std::fs::create_dir_all(&certs)?;
        let start = |replica| SecurePlane::start_own(world, replica, &certs);
        let planes = [start(0)?, start(1)?];
        listed(api, "192.0.2.21:7465\n192.0.2.22:7465\n")?;
        api.apply(&endpoints(&["192.0.2.22", "192.0.2.23"]))?;
        listed(api, "192.0.2.22:7465\n192.0.2.23:7465\n")?;
        // Neither a change by others nor a deletion stays: agents' pods start only with the list.
        let foreign = json!({ "data": { "addresses": "203.0.113.1:1\n" } });
        api.patch("ConfigMap", "kplane/kplane-replicas", &foreign)?;
        listed(api, "192.0.2.22:7465\n192.0.2.23:7465\n")?;
        api.delete("ConfigMap", "kplane/kplane-replicas")?;
        listed(api, "192.0.2.22:7465\n192.0.2.23:7465\n")?;
        drop(planes);
        api.delete("Service", &format!("{KPLANE}/{SERVICE}"))?;
        api.delete("EndpointSlice", &format!("{KPLANE}/{SERVICE}"))?;
        api.delete("ConfigMap", "kplane/kplane-replicas")?;
        tidy(api)
    })
}
