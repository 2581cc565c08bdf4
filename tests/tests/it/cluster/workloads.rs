//! Deployments through the real controllers: what they do to Pods, the kernels follow.

use std::collections::BTreeSet;
use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use kplane_model::Family;
use kplane_tests::cluster::api::{Api, key_of};
use kplane_tests::cluster::objects;
use kplane_tests::topology::NodeSpec;
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use crate::cluster::support::kpctl::says;
use crate::cluster::support::world::{DEADLINE, agent_port, reaches};
use crate::cluster::support::{World, with_world};

pub(crate) fn a_deployment_is_scaled_and_rolled() -> Result<()> {
    with_world(|world| {
        let api = world.api();
        let to = web(world, json!({}))?;
        api.apply(&objects::deployment("default", "web", 3, "node-1"))?;
        serves(world, to, 3)?;
        for replicas in [6, 2] {
            let fields = json!({ "spec": { "replicas": replicas } });
            api.patch("Deployment", "default/web", &fields)?;
            serves(world, to, replicas)?;
        }
        let before = ready_pods(world, Family::V4)?;
        // Another template: every Pod is replaced, here by ones on the other node.
        api.apply(&objects::deployment("default", "web", 2, "node-2"))?;
        eventually(DEADLINE, "no old Pod serves", || {
            let now = reaches(world.ns("node-1")?, to)?;
            ensure!(now.len() == 2 && now.is_disjoint(&before), "{now:?}");
            Ok::<_, anyhow::Error>(())
        })?;
        world.settle()
    })
}

pub(crate) fn b3_terminating_endpoints_serve_when_nothing_else_does() -> Result<()> {
    with_world(|world| {
        let api = world.api();
        let to = web(world, json!({}))?;
        api.apply(&objects::pod("default", "web-1", "web", "node-1"))?;
        let mut last = objects::pod("default", "web-2", "web", "node-1");
        // It is terminating until the test ends that, however busy the machine is.
        last["metadata"]["finalizers"] = json!(["kplane.test/grace"]);
        api.apply(&last)?;
        serves(world, to, 2)?;
        api.delete("Pod", "default/web-1")?;
        let left = eventually(DEADLINE, "the terminating one is out", || {
            let now = reaches(world.ns("node-1")?, to)?;
            ensure!(now.len() == 1, "{now:?}");
            Ok::<_, anyhow::Error>(now)
        })?;
        api.delete("Pod", "default/web-2")?;
        // For its grace it is all there is, and then nothing.
        eventually(DEADLINE, "the last one is terminating", || {
            let slices = api.list("EndpointSlice", Some("default"))?;
            let mut endpoints = slices.iter().flat_map(endpoints);
            let found = endpoints.any(|ep| ep["conditions"]["terminating"] == true);
            found.then_some(()).context("it is not")
        })?;
        world.leads("node-1", to, &left)?;
        let released = json!({ "metadata": { "finalizers": null } });
        api.patch("Pod", "default/web-2", &released)?;
        world.leads("node-1", to, &BTreeSet::new())?;
        world.settle()
    })
}

/// A replica that watches Pods is ahead of slices, and says so while they are behind; the other one follows slices.
pub(crate) fn a_pod_that_is_being_deleted_is_out_before_its_slice_says_so() -> Result<()> {
    with_world(|world| {
        let flags = ["--watch-pods".to_owned()];
        drop(world.planes.pop());
        let watching = world.plane_with(1, &world.cluster.kubeconfig(), &flags)?;
        world.planes.push(watching);
        // Without a selector no controller touches the slice.
        let to = web(world, json!({ "selector": null }))?;
        let api = world.api();
        let (slice, ips) = slice_of_two(api)?;
        api.apply(&slice)?;
        world.leads("node-2", to, &ips)?;
        api.delete("Pod", "default/goes")?;
        let stays = slice["endpoints"][0]["addresses"][0].as_str().context("no address")?;
        world.leads("node-2", to, &BTreeSet::from([stays.parse()?]))?;
        world.leads("node-1", to, &ips)?;
        let port = agent_port(1) + 1;
        let describe = ["describe", "service", "default/web"];
        says(
            world,
            port,
            &describe,
            0,
            &[
                "SliceBehindPod",
                "goes: ",
                "EndpointSlices still call them ready",
            ],
        )?;
        // Ten seconds later it is a problem.
        eventually(DEADLINE, "a warning", || {
            says(
                world,
                port,
                &["get", "services", "--bad"],
                0,
                &["SliceBehindPod"],
            )
        })?;
        let released = json!({ "metadata": { "finalizers": null } });
        for name in ["goes", "stays"] {
            api.patch("Pod", &format!("default/{name}"), &released)?;
        }
        // The Pod is gone, and its slice is as it was.
        eventually(DEADLINE, "the Pod is gone", || {
            let pod = api.get("Pod", "default/goes")?;
            pod.is_none().then_some(()).context("it is there")
        })?;
        world.leads("node-2", to, &BTreeSet::from([stays.parse()?]))?;
        drop(world.planes.pop());
        let usual = world.replica(1, &[])?;
        world.planes.push(usual);
        world.leads("node-2", to, &ips)?;
        world.api().delete("EndpointSlice", "default/web-1")?;
        world.settle()
    })
}

/// Makes two Pods that stay until the test ends them, and a slice of them as Kubernetes' controller would write it.
fn slice_of_two(api: &Api) -> Result<(Value, BTreeSet<IpAddr>)> {
    let mut slice = objects::slice("default", "web-1", "web", []);
    slice["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"] =
        json!("endpointslice-controller.k8s.io");
    slice["ports"][0] = json!({ "name": "", "port": 8080, "protocol": "TCP" });
    let mut ips = BTreeSet::new();
    for name in ["goes", "stays"] {
        let mut pod = objects::pod("default", name, "other", "node-1");
        pod["metadata"]["finalizers"] = json!(["kplane.test/grace"]);
        api.apply(&pod)?;
        let ip = eventually(DEADLINE, "an address", || {
            let pod = api.get("Pod", &format!("default/{name}"))?.context("no Pod")?;
            pod["status"]["podIP"]
                .as_str()
                .context("none")?
                .parse::<IpAddr>()
                .context("wrong")
        })?;
        ips.insert(ip);
        let mut endpoint = objects::endpoint(ip, "node-1");
        endpoint["targetRef"] = json!({ "kind": "Pod", "namespace": "default", "name": name });
        let endpoints = slice["endpoints"].as_array_mut().context("no list")?;
        endpoints.insert(0, endpoint);
    }
    Ok((slice, ips))
}

pub(crate) fn b2_traffic_distribution_keeps_zones_and_nodes_apart() -> Result<()> {
    with_world(|world| {
        let api = world.api();
        for (way, same) in [("PreferSameZone", "zone"), ("PreferSameNode", "node")] {
            let to = web(world, json!({ "trafficDistribution": way }))?;
            for node in ["node-1", "node-2"] {
                api.apply(&objects::pod("default", &format!("on-{node}"), "web", node))?;
            }
            for node in ["node-1", "node-2"] {
                let pod = api.get("Pod", &format!("default/on-{node}"))?;
                ensure!(pod.is_some(), "no Pod on {node}");
                let own = || {
                    let pod = api.get("Pod", &format!("default/on-{node}"))?;
                    let ip = pod.context("no Pod")?["status"]["podIP"].clone();
                    Ok::<_, anyhow::Error>(ip.as_str().context("no address")?.parse()?)
                };
                let ip: IpAddr = eventually(DEADLINE, "an address", own)?;
                world
                    .leads(node, to, &BTreeSet::from([ip]))
                    .with_context(|| format!("same {same}"))?;
            }
            world.settle()?;
        }
        // Without a preference everybody reaches everybody.
        let to = web(world, json!({ "trafficDistribution": null }))?;
        serves(world, to, 2)?;
        world.settle()
    })
}

pub(crate) fn nodes_come_move_and_go() -> Result<()> {
    with_world(|world| {
        let api = world.api();
        let to = web(world, json!({}))?;
        world.cluster.add_node(&NodeSpec::standard(3)?, "c")?;
        api.apply(&objects::pod("default", "on-3", "web", "node-3"))?;
        api.apply(&objects::pod("default", "on-1", "web", "node-1"))?;
        serves(world, to, 2)?;
        let labels = json!({ "topology.kubernetes.io/zone": "d" });
        api.patch(
            "Node",
            "node-1",
            &json!({ "metadata": { "labels": labels } }),
        )?;
        eventually(DEADLINE, "replicas know the zone", || {
            for plane in &world.planes {
                let fleet = plane.fleet()?;
                let node = fleet.nodes.iter().find(|node| node.name == "node-1");
                ensure!(node.is_some_and(|node| node.zone == "d"), "{node:?}");
            }
            Ok::<_, anyhow::Error>(())
        })?;
        api.delete_with("Pod", "default/on-3", &json!({ "gracePeriodSeconds": 0 }))?;
        api.delete("Node", "node-3")?;
        serves(world, to, 1)?;
        eventually(DEADLINE, "replicas forget the node", || {
            for plane in &world.planes {
                let fleet = plane.fleet()?;
                ensure!(fleet.nodes.iter().all(|node| node.name != "node-3"));
            }
            Ok::<_, anyhow::Error>(())
        })?;
        world.settle()
    })
}

pub(crate) fn a_service_of_both_families_is_in_both_tables() -> Result<()> {
    with_world(|world| {
        let api = world.api();
        web(world, json!({ "ipFamilyPolicy": "RequireDualStack" }))?;
        api.apply(&objects::deployment("default", "web", 2, "node-1"))?;
        let service = api.get("Service", "default/web")?.context("no Service")?;
        let ips = service["spec"]["clusterIPs"].as_array().context("no addresses")?;
        ensure!(ips.len() == 2, "{ips:?}");
        for ip in ips {
            let ip: IpAddr = ip.as_str().context("no text")?.parse()?;
            serves(world, (ip, 80), 2)?;
        }
        let fields = json!({ "spec": {
            "ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv4"], "clusterIPs": [ips[0]],
        } });
        api.patch("Service", "default/web", &fields)?;
        let six: IpAddr = ips[1].as_str().context("no text")?.parse()?;
        world.leads("node-1", (six, 80), &BTreeSet::new())?;
        world.settle()
    })
}

/// The Service `web`, and where it is.
fn web(world: &World, more: Value) -> Result<(IpAddr, u16)> {
    let mut spec = json!({
        "selector": { "app": "web" }, "ports": [{ "port": 80, "targetPort": 8080 }],
    });
    if let Value::Object(more) = more {
        for (field, value) in more {
            spec[field] = value;
        }
    }
    let service = objects::service("default", "web", spec);
    let made = world.api().apply(&service)?;
    let ip = made["spec"]["clusterIP"].as_str().context("no address")?;
    Ok((ip.parse()?, 80))
}

/// Waits until both kernels lead to so many Pods, which are those that are ready.
fn serves(world: &World, to: (IpAddr, u16), pods: usize) -> Result<()> {
    let family = Family::of(to.0);
    let ready = eventually(DEADLINE, &format!("{pods} Pods are ready"), || {
        let ready = ready_pods(world, family)?;
        ensure!(ready.len() == pods, "{ready:?}");
        Ok::<_, anyhow::Error>(ready)
    })?;
    world.leads("node-1", to, &ready)?;
    world.leads("node-2", to, &ready)
}

/// Addresses of Pods that are ready and stay.
fn ready_pods(world: &World, family: Family) -> Result<BTreeSet<IpAddr>> {
    let pods = world.api().list("Pod", Some("default"))?;
    let mut all = BTreeSet::new();
    for pod in pods {
        let ready = pod["status"]["conditions"]
            .as_array()
            .into_iter()
            .flatten()
            .into_iter()
            .any(|c| c["type"] == "Ready" && c["status"] == "True");
        if !ready || !pod["metadata"]["deletionTimestamp"].is_null() {
            continue;
        }
        for ip in pod["status"]["podIPs"].as_array().into_iter().flatten() {
            let ip = ip["ip"].as_str().with_context(|| key_of(&pod).unwrap_or_default());
            all.insert(ip?.parse()?);
        }
    }
    all.retain(|ip| Family::of(*ip) == family);
    Ok(all)
}

fn endpoints(slice: &Value) -> Vec<Value> {
    slice["endpoints"].as_array().cloned().unwrap_or_default()
}
