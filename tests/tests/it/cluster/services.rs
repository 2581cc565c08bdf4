//! Services that become other Services, and new ranges for them.

use anyhow::{Context as _, Result, ensure};
use kplane_model::Family;
use kplane_tests::cluster::objects;
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use crate::cluster::faults::{addresses, serve};
use crate::cluster::support::oracle::Tables;
use crate::cluster::support::with_world;
use crate::cluster::support::world::DEADLINE;

pub(crate) fn a_service_goes_through_all_types() -> Result<()> {
    with_world(|world| {
        let api = world.api();
        let key = "default/walker";
        let to = serve(api, "walker", 70, 2)?;
        let endpoints = addresses(70, 2);
        world.leads("node-1", to, &endpoints)?;
        let change = |spec: Value| api.patch("Service", key, &json!({ "spec": spec }));
        change(json!({ "type": "NodePort" }))?;
        world.settle()?;
        change(json!({ "type": "LoadBalancer" }))?;
        let ingress = json!({ "loadBalancer": { "ingress": [{ "ip": "198.51.100.70" }] } });
        api.patch_status("Service", key, &ingress)?;
        let balancer = ("198.51.100.70".parse()?, 80);
        world.leads("node-1", balancer, &endpoints)?;
        world.settle()?;
        change(json!({
            "type": "ExternalName", "externalName": "example.com",
            "clusterIP": null, "clusterIPs": null,
        }))?;
        world.leads("node-1", balancer, &addresses(70, 0))?;
        world.leads("node-1", to, &addresses(70, 0))?;
        world.settle()?;
        change(json!({ "type": "ClusterIP", "externalName": null, "clusterIP": "10.96.77.70" }))?;
        world.leads("node-1", to, &endpoints)?;
        world.settle()
    })
}

pub(crate) fn a20_a_new_range_of_cluster_ips_is_guarded() -> Result<()> {
    with_world(|world| {
        let api = world.api();
        let before = Tables::read(world.ns("node-1")?)?;
        api.apply(&json!({
            "kind": "ServiceCIDR", "metadata": { "name": "more" },
            "spec": { "cidrs": ["10.97.0.0/24"] },
        }))?;
        eventually(DEADLINE, "the table changes", || {
            let now = Tables::read(world.ns("node-1")?)?;
            let same = now.of(Family::V4) == before.of(Family::V4);
            ensure!(!same, "nothing has changed");
            Ok::<_, anyhow::Error>(())
        })?;
        world.settle()?;
        // Ready a moment after it is made; then Services may have its addresses.
        let service = objects::service("default", "far", json!({ "clusterIP": "10.97.0.9" }));
        eventually(DEADLINE, "an address of the range", || api.apply(&service))?;
        world.settle()?;
        api.delete("Service", "default/far")?;
        api.delete("ServiceCIDR", "more")?;
        eventually(DEADLINE, "the range is gone", || {
            api.get("ServiceCIDR", "more")?.is_none().then_some(()).context("it is there")
        })?;
        world.settle()
    })
}
