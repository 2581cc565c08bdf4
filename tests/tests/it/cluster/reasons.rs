//! Services that are broken in the usual ways, at a real API server whose own controllers write the EndpointSlices:
//! `kpctl describe service` names the cause and the fix.

use anyhow::{Context as _, Result, ensure};
use kplane_tests::cluster::{Api, objects};
use kplane_tests::support::nft::nft;
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use crate::cluster::support::kpctl::kpctl;
use crate::cluster::support::with_world;
use crate::cluster::support::world::{DEADLINE, World};

/// A Service that is broken, and the findings that describe it.
struct Broken<'a> {
    name: &'a str,
    spec: Value,
    /// What breaks it, once it exists.
    how: Vec<&'a str>,
    /// Each with a part of the fix.
    findings: Vec<(&'a str, &'a str)>,
}

impl<'a> Broken<'a> {
    /// Reads a block of `reasons.txt`.
    fn read(block: &'a str) -> Result<Self> {
        let mut lines = block.lines().filter(|line| !line.is_empty());
        let head = lines.next().unwrap_or_default();
        let (name, spec) = head.split_once(' ').unwrap_or((head, "{}"));
        let mut spec: Value = serde_saphyr::from_str(spec).context(head.to_owned())?;
        if spec["selector"].is_null() && spec["type"] != "ExternalName" {
            spec["selector"] = json!({ "app": name });
        }
        if spec["selector"] == json!({}) {
            spec["selector"] = Value::Null;
        }
        let (findings, how) =
            lines.partition::<Vec<_>, _>(|line| line.starts_with(char::is_uppercase));
        let finding = |line: &&'a str| line.split_once(": ").context((*line).to_owned());
        Ok(Self {
            name,
            spec,
            how,
            findings: findings.iter().map(finding).collect::<Result<_>>()?,
        })
    }

    /// Makes it, and breaks it.
    fn apply(&self, api: &Api) -> Result<()> {
        let name = self.name;
        api.apply(&objects::service("default", name, self.spec.clone()))?;
        for line in &self.how {
            let (word, rest) = line.split_once(' ').context((*line).to_owned())?;
            match word {
                "slice" => {
                    api.apply(&own_slice(api, name, rest)?)?;
                }
                "pod" => {
                    let (pod, state) = rest.split_once(' ').unwrap_or((rest, ""));
                    let mut pod = objects::pod("default", pod, name, "node-1");
                    if state == "unready" {
                        // A condition that nobody fulfils.
                        let gate = json!([{ "conditionType": "example.com/never" }]);
                        pod["spec"]["readinessGates"] = gate;
                    }
                    api.apply(&pod)?;
                }
                _ => {
                    let (label, value) = rest.split_once(": ").context((*line).to_owned())?;
                    let change = json!({ "metadata": { "labels": { label: value } } });
                    api.patch("Service", &format!("default/{name}"), &change)?;
                }
            }
        }
        Ok(())
    }
}

/// Returns an EndpointSlice of a Service, with other fields.
fn own_slice(api: &Api, service: &str, fields: &str) -> Result<Value> {
    let endpoints = [objects::endpoint("10.244.1.77", "node-1")];
    let mut slice = objects::slice("default", &format!("{service}-own"), service, endpoints);
    let kubernetes = api.get("Service", "default/kubernetes")?.context("no Service kubernetes")?;
    let ip = kubernetes["spec"]["clusterIP"].as_str().unwrap_or_default();
    let fields: Value = serde_saphyr::from_str(&fields.replace("$KUBERNETES", ip))?;
    for (field, value) in fields.as_object().into_iter().flatten() {
        slice[field] = value.clone();
    }
    Ok(slice)
}

pub(crate) fn describe_names_the_cause_and_the_fix() -> Result<()> {
    with_world(|world| {
        let blocks = include_str!("reasons.txt").split("\n== ").skip(1);
        let broken = blocks.map(Broken::read).collect::<Result<Vec<_>>>()?;
        ensure!(broken.len() >= 20, "only {} causes", broken.len());
        for service in &broken {
            let applied = service.apply(world.api());
            applied.with_context(|| service.name.to_owned())?;
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
        ns.sysctl(&[("net.ipv4.ip_forward", "0")])?;
        let chain = "{ type filter hook forward priority 0; policy drop; }";
        let rules = "add table inet strict; add chain inet strict forward";
        nft(ns, &format!("{rules} {chain}"))?;
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
        ns.sysctl(&[("net.ipv4.ip_forward", "1")])?;
        nft(ns, "delete table inet strict")?;
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
fn describes(world: &World, service: &Broken<'_>) -> Result<()> {
    let key = format!("default/{}", service.name);
    let what = format!("the reason why {key} is broken");
    eventually(DEADLINE, &what, || {
        let (code, text, _) = kpctl(world, 7466, &["describe", "service", &key])?;
        ensure!(code == Some(0), "{text}");
        for (reason, fix) in &service.findings {
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
                "asked just now: does the same: it chooses one of 1 endpoint (places)",
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
