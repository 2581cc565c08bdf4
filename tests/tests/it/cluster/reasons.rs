//! Services that are broken in the usual ways, at a real API server whose own controllers write the EndpointSlices:
//! `kpctl describe service` names the cause and the fix.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::cluster::{Api, objects};
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use crate::cluster::replicas::kpctl;
use crate::cluster::support::with_world;
use crate::cluster::support::world::{DEADLINE, World};

/// Code of a finding, and a part of its fix.
type Expected = (&'static str, &'static str);

/// A Service that is broken, and the findings that describe it.
#[derive(Clone)]
struct Broken {
    name: &'static str,
    /// Fields of its `spec`, besides `selector`.
    spec: Value,
    /// Breaks it, once it exists.
    how: fn(&Api, &str) -> Result<()>,
    expected: &'static [Expected],
}

pub(crate) fn describe_names_the_cause_and_the_fix() -> Result<()> {
    with_world(|world| {
        let broken = [without_endpoints(), by_hand(), with_addresses(), others()].concat();
        ensure!(broken.len() >= 20, "only {} causes", broken.len());
        for service in &broken {
            let mut spec = service.spec.clone();
            if spec["selector"].is_null() && spec["type"] != "ExternalName" {
                spec["selector"] = json!({ "app": service.name });
            }
            if spec["selector"] == json!({}) {
                spec["selector"] = Value::Null;
            }
            let api = world.api();
            api.apply(&objects::service("default", service.name, spec))?;
            (service.how)(api, service.name).with_context(|| service.name.to_owned())?;
        }
        for service in &broken {
            describes(world, service)?;
        }
        fates(world)?;
        for service in &broken {
            world.api().delete("Service", &format!("default/{}", service.name))?;
        }
        world.settle()
    })
}

/// What commands say of node-1 while it drops packets: the exit code, and a part of the text.
const OBSTRUCTED: &[(&[&str], i32, &str)] = &[
    (&["status"], 0, "1 obstructed"),
    (
        &["status", "--check=nodes"],
        3,
        "in the way of packets: ForwardingOff",
    ),
    (&["check"], 1, "ForwardPolicyDrop on 1 node (node-1)"),
    (
        &["describe", "service", "default/r-node"],
        0,
        "ForwardingOff",
    ),
    (
        &["why", "default/r-node", "--from", "pod", "--via", "node-1"],
        0,
        "ForwardPolicyDrop",
    ),
];

/// A node that drops packets for other reasons than Services: `kpctl describe node` names each, all other commands say that
/// something is wrong, and nothing does once it is over.
pub(crate) fn describe_names_what_stands_in_the_way_on_a_node() -> Result<()> {
    with_world(|world| {
        let api = world.api();
        api.apply(&objects::service("default", "r-node", json!({})))?;
        let ns = world.ns("node-1")?;
        let run = |program: &str, args: &[&str]| {
            let done = ns.run(|| Ok(Command::new(program).args(args).status()?))?;
            ensure!(done.success(), "{program} {args:?}: {done}");
            Ok(())
        };
        run("sysctl", &["-qw", "net.ipv4.ip_forward=0"])?;
        let chain = "{ type filter hook forward priority 0; policy drop; }";
        run("nft", &["add", "table", "inet", "strict"])?;
        run("nft", &["add", "chain", "inet", "strict", "forward", chain])?;
        let expected = [
            "ForwardingOff",
            "sysctl -w net.ipv4.ip_forward=1",
            "ForwardPolicyDrop",
            "inet strict forward",
        ];
        let describe = || kpctl(world, 7466, &["describe", "node", "node-1"]);
        eventually(DEADLINE, "what stands in the way", || {
            let (_, text, _) = describe()?;
            for part in expected {
                ensure!(text.contains(part), "no {part:?}:\n{text}");
            }
            Ok(())
        })?;
        for (args, code, part) in OBSTRUCTED {
            let (ended, text, _) = kpctl(world, 7466, args)?;
            ensure!(
                ended == Some(*code) && text.contains(part),
                "{args:?}: {ended:?}: {text}"
            );
        }
        run("sysctl", &["-qw", "net.ipv4.ip_forward=1"])?;
        run("nft", &["delete", "table", "inet", "strict"])?;
        eventually(DEADLINE, "nothing stands in the way", || {
            let (code, text, _) = describe()?;
            ensure!(code == Some(0) && !text.contains("Forward"), "{text}");
            Ok(())
        })?;
        let (code, text, _) = kpctl(world, 7466, &["describe", "node", "node-9"])?;
        ensure!(
            code == Some(1) && text.contains("no node node-9 is known"),
            "{text}"
        );
        api.delete("Service", "default/r-node")?;
        world.settle()
    })
}

/// Waits until the first replica tells the cause.
fn describes(world: &World, service: &Broken) -> Result<()> {
    let key = format!("default/{}", service.name);
    let what = format!("the reason why {key} is broken");
    eventually(DEADLINE, &what, || {
        let (code, text, _) = kpctl(world, 7466, &["describe", "service", &key])?;
        ensure!(code == Some(0), "{text}");
        for (reason, fix) in service.expected {
            ensure!(text.contains(reason), "no {reason}:\n{text}");
            ensure!(text.contains(fix), "no {fix:?}:\n{text}");
        }
        Ok(())
    })
}

/// The fates of packets for some of these Services, and the rules that decided.
fn fates(world: &World) -> Result<()> {
    let pod = |service, node| vec!["why", service, "--from", "pod", "--via", node];
    let cases: [(Vec<&str>, &[&str]); 5] = [
        (
            pod("default/r-local:http", "node-1"),
            &[
                "gets the packet",
                "asked just now: does the same: it chooses one of 1 endpoint (services, ",
                "only endpoints on node-1",
                "sees the sender's address",
            ],
        ),
        (
            pod("default/r-local", "node-2"),
            &[
                "is dropped",
                "on another node, and the policy is Local",
                "InternalPolicyLocal",
            ],
        ),
        (
            pod("default/r-ready", "node-1"),
            &[
                "gets an error at once",
                "asked just now: does the same: it refuses the packet (",
                "not ready",
                "NoReadyEndpoint",
            ],
        ),
        (
            pod("default/r-headless", "node-1"),
            &["goes on as it is", "headless"],
        ),
        (
            pod("default/r-local:80", "node-9"),
            &["no node \"node-9\" is known"],
        ),
    ];
    for (args, expected) in cases {
        eventually(DEADLINE, "the fate of a packet", || {
            let (_, text, _) = kpctl(world, 7466, &args)?;
            for part in expected {
                ensure!(text.contains(part), "{args:?}: no {part:?}:\n{text}");
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn one(
    name: &'static str,
    spec: Value,
    how: fn(&Api, &str) -> Result<()>,
    expected: &'static [Expected],
) -> Broken {
    Broken {
        name,
        spec,
        how,
        expected,
    }
}

/// EndpointSlices that the API server's controllers do not write, or that people write wrongly.
fn without_endpoints() -> Vec<Broken> {
    vec![
        one(
            "r-none",
            json!({}),
            nothing,
            &[(
                "SelectorMatchesNoPod",
                "kubectl get pods -n default -l app=r-none",
            )],
        ),
        one(
            "r-hand",
            json!({ "selector": {} }),
            nothing,
            &[(
                "NoEndpointSlice",
                "create an EndpointSlice with the label kubernetes.io/service-name=r-hand",
            )],
        ),
        one(
            "r-label",
            json!({ "selector": {} }),
            slice_without_label,
            &[(
                "SliceWithoutService",
                "kubectl label endpointslice -n default r-label-own",
            )],
        ),
        one(
            "r-port",
            json!({ "selector": {} }),
            slice_of_another_port,
            &[(
                "PortNameMismatch",
                "give the port of the EndpointSlice the name \"http\"",
            )],
        ),
        one(
            "r-target",
            json!({ "ports": [{ "name": "http", "port": 80, "targetPort": "htpp" }] }),
            ready_pod,
            &[("TargetPortNotFound", "name the container port \"htpp\"")],
        ),
    ]
}

/// EndpointSlices that another controller writes.
fn by_hand() -> Vec<Broken> {
    let none = || json!({ "selector": {} });
    vec![
        one(
            "r-empty",
            none(),
            |api, name| apply_slice(api, name, |slice| slice["endpoints"] = json!([])),
            &[("NoEndpoints", "kubernetes.io/service-name=r-empty -o yaml")],
        ),
        one(
            "r-ending",
            none(),
            |api, name| {
                apply_slice(api, name, |slice| {
                    let ending = json!({ "ready": false, "serving": true, "terminating": true });
                    slice["endpoints"][0]["conditions"] = ending;
                })
            },
            &[("OnlyTerminating", "author of its EndpointSlices")],
        ),
        one(
            "r-names",
            none(),
            |api, name| {
                apply_slice(api, name, |slice| {
                    slice["addressType"] = json!("FQDN");
                    slice["endpoints"][0]["addresses"] = json!(["db.example.com"]);
                })
            },
            &[("UnsupportedAddressType", "FQDN")],
        ),
        one(
            "r-chain",
            none(),
            |api, name| {
                let other = api.get("Service", "default/kubernetes")?;
                let ip = other.context("no Service kubernetes")?["spec"]["clusterIP"].clone();
                apply_slice(api, name, |slice| {
                    slice["endpoints"][0]["addresses"][0] = ip;
                })
            },
            &[("EndpointIsService", "name the Pods in the EndpointSlices")],
        ),
    ]
}

/// Addresses and ports that a Service does not get, or takes from others.
fn with_addresses() -> Vec<Broken> {
    vec![
        one(
            "r-balancer",
            json!({ "type": "LoadBalancer" }),
            ready_pod,
            &[(
                "NoLoadBalancerAddress",
                "kubectl describe service -n default r-balancer",
            )],
        ),
        one(
            "r-first",
            json!({ "externalIPs": ["192.0.2.70"] }),
            ready_pod,
            &[("AddressContested", "change one of the two Services")],
        ),
        one(
            "r-second",
            json!({ "externalIPs": ["192.0.2.70"] }),
            ready_pod,
            &[("AddressConflict", "change one of the two Services")],
        ),
        one(
            "r-inside",
            json!({ "externalIPs": ["10.244.1.200"] }),
            ready_pod,
            &[(
                "InsideClusterRange",
                "use an address outside of the cluster's own ranges",
            )],
        ),
    ]
}

/// Pods, policies, and Services that are not for kplane.
fn others() -> Vec<Broken> {
    vec![
        one(
            "r-some",
            json!({}),
            |api, app| {
                ready_pod(api, app)?;
                let mut other = pod_with_gate(app);
                other["metadata"]["name"] = json!("r-some-other");
                api.apply(&other).map(drop)
            },
            &[("SomeNotReady", "-l app=r-some -o wide")],
        ),
        one(
            "r-ready",
            json!({}),
            pod_that_is_not_ready,
            &[("NoReadyEndpoint", "-l app=r-ready -o wide")],
        ),
        one(
            "r-published",
            json!({ "publishNotReadyAddresses": true }),
            pod_that_is_not_ready,
            &[("PublishedNotReady", "publishNotReadyAddresses")],
        ),
        one(
            "r-local",
            json!({ "type": "NodePort", "externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local" }),
            ready_pod,
            &[
                ("ExternalPolicyLocal", "on node-2"),
                ("InternalPolicyLocal", "dropped"),
            ],
        ),
        one(
            "r-affinity",
            json!({ "sessionAffinity": "ClientIP" }),
            ready_pod,
            &[("SessionAffinity", "10800 s")],
        ),
        one(
            "r-headless",
            json!({ "clusterIP": "None" }),
            nothing,
            &[("Headless", "not proxied")],
        ),
        one(
            "r-alias",
            json!({ "type": "ExternalName", "externalName": "example.com" }),
            nothing,
            &[("ExternalName", "not proxied")],
        ),
        one(
            "r-other",
            json!({}),
            other_proxy,
            &[("OtherProxy", "kubectl label service -n default r-other")],
        ),
    ]
}

fn nothing(_: &Api, _: &str) -> Result<()> {
    Ok(())
}

fn slice_without_label(api: &Api, name: &str) -> Result<()> {
    apply_slice(api, name, |slice| slice["metadata"]["labels"] = json!({}))
}

fn slice_of_another_port(api: &Api, name: &str) -> Result<()> {
    apply_slice(api, name, |slice| slice["ports"][0]["name"] = json!("web"))
}

/// Writes an EndpointSlice of the Service, with a fault.
fn apply_slice(api: &Api, name: &str, fault: impl FnOnce(&mut Value)) -> Result<()> {
    let mut slice = own_slice(name);
    fault(&mut slice);
    api.apply(&slice).map(drop)
}

fn own_slice(service: &str) -> Value {
    let endpoints = [objects::endpoint("10.244.1.77", "node-1")];
    objects::slice("default", &format!("{service}-own"), service, endpoints)
}

fn ready_pod(api: &Api, app: &str) -> Result<()> {
    api.apply(&objects::pod("default", app, app, "node-1")).map(drop)
}

fn pod_that_is_not_ready(api: &Api, app: &str) -> Result<()> {
    api.apply(&pod_with_gate(app)).map(drop)
}

/// A Pod with a condition that nobody fulfils.
fn pod_with_gate(app: &str) -> Value {
    let mut pod = objects::pod("default", app, app, "node-1");
    pod["spec"]["readinessGates"] = json!([{ "conditionType": "example.com/never" }]);
    pod
}

fn other_proxy(api: &Api, name: &str) -> Result<()> {
    let labels = json!({ "service.kubernetes.io/service-proxy-name": "other" });
    let change = json!({ "metadata": { "labels": labels } });
    api.patch("Service", &format!("default/{name}"), &change).map(drop)
}
