//! Random operations on the API: after each quiet period the kernels hold what a fresh start makes
//! of the objects.

use std::env;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use http::Method;
use kplane_tests::cluster::{Api, objects};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

use crate::cluster::support::{World, with_world};

/// Set to repeat a run; controllers' own timing is not repeated.
const SEED_VAR: &str = "KPLANE_API_SEED";
const OPERATIONS: u32 = 1_000;
/// Operations between two quiet periods.
const STRIDE: u32 = 100;
/// Names of Services and nodes: few, so that they come back.
const SERVICES: u32 = 14;
const NODES: u32 = 5;
const MOST_PODS: u32 = 5;

pub(crate) fn after_random_operations_kernels_hold_what_a_fresh_start_would() -> Result<()> {
    let seed = match env::var(SEED_VAR) {
        Ok(text) => text.parse().context(SEED_VAR)?,
        Err(_) => rand::random(),
    };
    println!("random operations: {SEED_VAR}={seed}");
    with_world(|world| play(world, seed))
}

fn play(world: &World, seed: u64) -> Result<()> {
    let api = world.api();
    let mut rng = StdRng::seed_from_u64(seed);
    api.apply(&objects::deployment("default", "web", 3, "node-1"))?;
    let web = json!({
        "selector": { "app": "web" }, "ipFamilyPolicy": "PreferDualStack",
        "ports": [{ "port": 80, "targetPort": 8080 }],
    });
    api.apply(&objects::service("default", "web", web))?;
    let (mut refused, mut last) = (0, String::new());
    let began = Instant::now();
    for number in 1..=OPERATIONS {
        // A refusal may be deserved, and a busy server may fail: what it holds then is what counts.
        if let Err(error) = operation(world, &mut rng) {
            refused += 1;
            last = format!("operation {number}: {error:#}");
        }
        if number % STRIDE == 0 {
            world.settle().with_context(|| format!("after {number} operations"))?;
        }
    }
    let took = began.elapsed().as_secs_f64();
    println!("{OPERATIONS} operations, {refused} refused, in {took:.1} s");
    // An operation that the server never takes tests nothing.
    ensure!(refused < OPERATIONS / 2, "{refused} were refused; {last}");
    Ok(())
}

/// One of them; an error of the server may be deserved.
fn operation(world: &World, rng: &mut StdRng) -> Result<()> {
    let api = world.api();
    let service = format!("svc-{}", rng.random_range(0..SERVICES));
    let key = format!("default/{service}");
    match rng.random_range(0..100) {
        0..30 => put_service(api, &service, rng),
        30..40 => api.delete("Service", &key),
        40..68 => {
            let slice = slice(&service, rng);
            api.apply(&slice).map(drop)
        }
        68..74 => {
            let letter = if rng.random_bool(0.5) { "a" } else { "b" };
            api.delete("EndpointSlice", &format!("{key}-{letter}"))
        }
        74..82 => {
            let ingress: Vec<Value> = (0..rng.random_range(0..3_u32))
                .map(|_| json!({ "ip": external(rng) }))
                .collect();
            let status = json!({ "loadBalancer": { "ingress": ingress } });
            api.patch_status("Service", &key, &status).map(drop)
        }
        82..85 => node(api, rng),
        85..88 => {
            // Not ours for a while.
            let by = rng.random_bool(0.3).then_some("somebody-else");
            let labels = json!({ "service.kubernetes.io/service-proxy-name": by });
            let fields = json!({ "metadata": { "labels": labels } });
            api.patch("Service", &key, &fields).map(drop)
        }
        88..91 => {
            let replicas = rng.random_range(0..=MOST_PODS);
            let fields = json!({ "spec": { "replicas": replicas } });
            api.patch("Deployment", "default/web", &fields).map(drop)
        }
        91..97 => {
            let pods = api.list("Pod", Some("default"))?;
            let Some(pod) = pods.choose(rng) else {
                return Ok(());
            };
            let key = kplane_tests::cluster::api::key_of(pod)?;
            world.cluster.set_pod_ready(&key, rng.random_bool(0.5))
        }
        _ => {
            // Everything of a kind in one request.
            let path = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
            let half = format!("{path}?labelSelector=half%3D{}", rng.random_range(0..4));
            api.request(Method::DELETE, &half, None).map(drop)
        }
    }
}

/// Creates a Service or makes it another one.
fn put_service(api: &Api, name: &str, rng: &mut StdRng) -> Result<()> {
    let mut service = service(name, rng);
    let Some(old) = api.get("Service", &format!("default/{name}"))? else {
        return api.create(&service).map(drop);
    };
    service["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"].clone();
    let stays = old["spec"]["type"] != "ExternalName" && service["spec"]["type"] != "ExternalName";
    if stays {
        for field in ["clusterIP", "clusterIPs"] {
            service["spec"][field] = old["spec"][field].clone();
        }
    }
    api.replace(&service).map(drop)
}

fn service(name: &str, rng: &mut StdRng) -> Value {
    let policy = |rng: &mut StdRng| {
        if rng.random_bool(0.7) { "Cluster" } else { "Local" }
    };
    let kind = *[
        "ClusterIP",
        "ClusterIP",
        "NodePort",
        "LoadBalancer",
        "LoadBalancer",
        "ExternalName",
    ]
    .choose(rng)
    .unwrap_or(&"ClusterIP");
    if kind == "ExternalName" {
        let spec = json!({ "type": kind, "externalName": "example.com", "ports": [] });
        return objects::service("default", name, spec);
    }
    let ports = ["http", "dns", "more"];
    let ports: Vec<Value> = ports[..rng.random_range(1..=3)]
        .iter()
        .map(|name| {
            let protocol = if *name == "dns" { "UDP" } else { "TCP" };
            let port = rng.random_range(80..90);
            // Twice the same is refused, by the server.
            json!({ "name": name, "protocol": protocol, "port": port })
        })
        .collect();
    let mut spec = json!({
        "type": kind, "ports": ports,
        "ipFamilyPolicy": (if rng.random_bool(0.5) { "SingleStack" } else { "PreferDualStack" }),
        "internalTrafficPolicy": policy(rng),
    });
    if kind != "ClusterIP" {
        spec["externalTrafficPolicy"] = json!(policy(rng));
    }
    if kind == "LoadBalancer" && rng.random_bool(0.4) {
        spec["loadBalancerSourceRanges"] = json!(["192.0.2.0/24", "10.0.0.0/8"]);
    }
    if rng.random_bool(0.3) {
        spec["externalIPs"] = json!([external(rng)]);
    }
    if rng.random_bool(0.2) {
        spec["sessionAffinity"] = json!("ClientIP");
    }
    if kind == "ClusterIP" && rng.random_bool(0.1) {
        spec["clusterIP"] = json!("None");
    }
    objects::service("default", name, spec)
}

/// Few addresses, so that Services quarrel about them.
fn external(rng: &mut StdRng) -> String {
    format!("198.51.100.{}", rng.random_range(1..=6))
}

fn slice(service: &str, rng: &mut StdRng) -> Value {
    let six = rng.random_bool(0.2);
    let letter = if six { "b" } else { "a" };
    let endpoints: Vec<Value> =
        (0..rng.random_range(0..9_u32)).map(|_| endpoint(six, rng)).collect();
    let ports = ["http", "dns", "more"].map(|name| {
        let protocol = if name == "dns" { "UDP" } else { "TCP" };
        let port = rng.random_range(8080..8083);
        json!({ "name": name, "protocol": protocol, "port": port })
    });
    let name = format!("{service}-{letter}");
    let mut slice = objects::slice("default", &name, service, endpoints);
    slice["metadata"]["labels"]["half"] = json!(rng.random_range(0..4_u32).to_string());
    slice["addressType"] = json!(if six { "IPv6" } else { "IPv4" });
    slice["ports"] = json!(ports);
    slice
}

fn endpoint(six: bool, rng: &mut StdRng) -> Value {
    let (node, pod) = (rng.random_range(1..=3_u32), rng.random_range(100..120_u32));
    let address = if six {
        format!("fd44:0:0:{node}::{pod}")
    } else {
        format!("10.244.{node}.{pod}")
    };
    let terminating = rng.random_bool(0.2);
    let mut endpoint = json!({
        "addresses": [address], "nodeName": format!("node-{node}"),
        "conditions": {
            "ready": !terminating && rng.random_bool(0.8),
            "serving": rng.random_bool(0.8), "terminating": terminating,
        },
    });
    if rng.random_bool(0.4) {
        let zones = [json!({ "name": "a" }), json!({ "name": "b" })];
        endpoint["zone"] = json!("a");
        endpoint["hints"] = json!({ "forZones": [zones.choose(rng)] });
    }
    endpoint
}

/// A node comes, goes, or moves to another zone. Those that have an agent stay.
fn node(api: &Api, rng: &mut StdRng) -> Result<()> {
    let number = rng.random_range(1..=NODES);
    let name = format!("node-{number}");
    if number > 2 && rng.random_bool(0.4) {
        return api.delete("Node", &name);
    }
    let zone = *["a", "b", "c"].choose(rng).unwrap_or(&"a");
    if number <= 2 {
        let labels = json!({ "topology.kubernetes.io/zone": zone });
        let fields = json!({ "metadata": { "labels": labels } });
        return api.patch("Node", &name, &fields).map(drop);
    }
    api.apply(&objects::node(&name, &[], zone)).map(drop)
}
