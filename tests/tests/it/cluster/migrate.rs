//! `kpctl migrate` with a real API server and its controller of DaemonSets, and real agents. kube-proxy's pods and the
//! agents' pods are objects only: the agents run beside them all the time.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::cluster::Api;
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use crate::cluster::support::kpctl::command;
use crate::cluster::support::scheduler::Scheduler;
use crate::cluster::support::world::{DEADLINE, NODES, PAIR};
use crate::cluster::support::{World, with_pair};

const KUBE_PROXY: &str = "kube-system/kube-proxy";
const AGENTS: &str = "kplane/kplane-nodeagent";
const LABEL: &str = "kplane.io/proxy";

/// Nodes move and go back; the walk stops at a node without an agent, and goes on when that is back. It is one test: as
/// four, one of them once waited a minute for a pod of the agents' DaemonSet, and the reason is not known.
pub(crate) fn nodes_move_one_after_the_other_and_back() -> Result<()> {
    with_pair(|world| {
        let text = fails(world, &["plan"], 1)?;
        ensure!(text.contains("kube-proxy has no DaemonSet"), "{text}");
        let scheduler = Scheduler::start(world.api());
        let before = install(world)?;
        moves(world)?;
        checks(world)?;
        pauses(world)?;
        returns_without_a_restart(world)?;
        finishes(world)?;
        goes_back(world, &before)?;
        nothing_is_left(world)?;
        gives_kube_proxy_back(world, &before)?;
        drop(scheduler);
        world.api().delete("DaemonSet", KUBE_PROXY)
    })
}

fn moves(world: &mut World) -> Result<()> {
    let before = pods(world.api())?;
    let text = runs(world, &["start", "--node", "node-1"])?;
    ensure!(text.contains("node-1: moves to kplane"), "{text}");
    let now = labels(world)?;
    ensure!(now == [Some("kplane".to_owned()), None], "{now:?}");
    let there = pods(world.api())?;
    ensure!(!there.contains_key("kube-proxy node-1"), "{there:?}");
    ensure!(there.contains_key("kplane-nodeagent node-1"), "{there:?}");
    ensure!(
        there["kube-proxy node-2"] == before["kube-proxy node-2"],
        "kube-proxy was restarted on a node that did not move"
    );
    stops_at_a_node_without_an_agent(world)?;
    let text = runs(world, &["start", "--all"])?;
    ensure!(text.contains("kpctl migrate finish"), "{text}");
    Ok(())
}

fn stops_at_a_node_without_an_agent(world: &mut World) -> Result<()> {
    world.stop_agent("node-2");
    let text = fails(world, &["start", "--all", "--node-timeout", "3s"], 1)?;
    ensure!(text.contains("node-2 is not verified within 3s"), "{text}");
    ensure!(text.contains("kpctl migrate back --node node-2"), "{text}");
    let status: Value = serde_json::from_str(&runs(world, &["status", "-o", "json"])?)?;
    ensure!(status["stage"] == "Stopped", "{status}");
    ensure!(status["nodes"][0]["stage"] == "Kplane", "{status}");
    ensure!(status["nodes"][1]["stage"] == "Moving", "{status}");
    world.restart_agent("node-2", PAIR[1].0)
}

/// All checks agree that all is well, and notice a kube-proxy that is back beside an agent.
fn checks(world: &World) -> Result<()> {
    let check = |args: &[&str]| kpctl_with(world, &[&["check"], args].concat());
    let (code, text) = check(&["-o", "json"])?;
    ensure!(code == Some(0), "{code:?}: {text}");
    let found: Value = serde_json::from_str(&text)?;
    let checks = found["checks"].as_array().context("no checks")?;
    ensure!(checks.len() >= 20, "{text}");
    let affinity = json!({ "spec": { "template": { "spec": { "affinity": null } } } });
    let api = world.api();
    let before = api.get("DaemonSet", KUBE_PROXY)?.context("no DaemonSet")?;
    api.patch("DaemonSet", KUBE_PROXY, &affinity)?;
    eventually(DEADLINE, "kube-proxy beside an agent is noticed", || {
        let (code, text) = check(&[])?;
        let beside = text.contains("runs beside an agent on 2 nodes");
        ensure!(code == Some(1) && beside, "{code:?}: {text}");
        ensure!(text.contains("next: kpctl migrate start --all"), "{text}");
        Ok::<_, anyhow::Error>(())
    })?;
    // That command repairs it.
    runs(world, &["start", "--all"])?;
    let after = api.get("DaemonSet", KUBE_PROXY)?.context("no DaemonSet")?;
    let (ours, theirs) = (&after["spec"]["template"], &before["spec"]["template"]);
    let key = "\"kplane.io/proxy\"";
    ensure!(ours.to_string().contains(key) && theirs.to_string().contains(key));
    let hostname = json!([{ "key": "kubernetes.io/hostname", "operator": "Exists" }]);
    let terms = json!({ "spec": { "template": { "spec": { "affinity": { "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [{
            "matchExpressions": [hostname[0], theirs["spec"]["affinity"]["nodeAffinity"]
                ["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0]
                ["matchExpressions"][1]],
        }] },
    } } } } } });
    api.patch("DaemonSet", KUBE_PROXY, &terms).map(drop)
}

fn pauses(world: &World) -> Result<()> {
    let text = runs(world, &["pause"])?;
    ensure!(text.contains("Migration: Paused"), "{text}");
    // Nothing is left to do, and that ends the pause.
    runs(world, &["start", "--all"])?;
    let text = runs(world, &["status"])?;
    ensure!(text.contains("Migration: Complete"), "{text}");
    Ok(())
}

/// The way back creates each pod of kube-proxy once: its end restarts none, although their template changes.
fn returns_without_a_restart(world: &World) -> Result<()> {
    let api = world.api();
    let set = || api.get("DaemonSet", KUBE_PROXY)?.context("no DaemonSet");
    let uid = &set()?["metadata"]["uid"];
    let before = created(api, uid)?;
    runs(world, &["back", "--all"])?;
    eventually(DEADLINE, "kube-proxy's pods have the template", || {
        let set = set()?;
        let status = &set["status"];
        ensure!(
            status["observedGeneration"] == set["metadata"]["generation"],
            "{status}"
        );
        ensure!(status["updatedNumberScheduled"] == NODES.len(), "{status}");
        ensure!(status["numberReady"] == NODES.len(), "{status}");
        Ok::<_, anyhow::Error>(())
    })?;
    let created = created(api, uid)? - before;
    ensure!(created == NODES.len(), "{created} pods were created");
    runs(world, &["start", "--all"]).map(drop)
}

fn finishes(world: &World) -> Result<()> {
    let text = fails(world, &["finish"], 2)?;
    ensure!(text.contains("--yes"), "{text}");
    let text = runs(world, &["finish", "--yes"])?;
    ensure!(text.contains("migration.enabled=false"), "{text}");
    ensure!(world.api().get("DaemonSet", KUBE_PROXY)?.is_none());
    runs(world, &["finish", "--yes"]).map(drop)
}

/// kube-proxy's DaemonSet comes back as it was before the migration.
fn goes_back(world: &World, before: &Value) -> Result<()> {
    let text = runs(world, &["back", "--all"])?;
    ensure!(text.contains("node-2: kube-proxy serves"), "{text}");
    ensure!(labels(world)? == [None, None]);
    let after = world
        .api()
        .get("DaemonSet", KUBE_PROXY)?
        .context("kube-proxy's DaemonSet is away")?;
    ensure!(after["spec"] == before["spec"], "{after}");
    let annotations = &after["metadata"]["annotations"];
    ensure!(annotations["kplane.io/migration"].is_null(), "{after}");
    eventually(
        DEADLINE,
        "kube-proxy runs everywhere again, and nothing else",
        || {
            let set = world.api().get("DaemonSet", KUBE_PROXY)?.context("no DaemonSet")?;
            let status = &set["status"];
            ensure!(
                status["observedGeneration"] == set["metadata"]["generation"],
                "{status}"
            );
            ensure!(status["updatedNumberScheduled"] == NODES.len(), "{status}");
            let there = pods(world.api())?;
            let expected = NODES.map(|(node, _)| format!("kube-proxy {node}"));
            ensure!(there.keys().eq(&expected), "{there:?}");
            Ok::<_, anyhow::Error>(())
        },
    )?;
    Ok(())
}

/// Returns how many pods the controller has created for a DaemonSet, by its events.
fn created(api: &Api, uid: &Value) -> Result<usize> {
    let events = api.list("Event", Some("kube-system"))?;
    Ok(events
        .iter()
        .filter(|event| event["reason"] == "SuccessfulCreate" && event["regarding"]["uid"] == *uid)
        .count())
}

fn nothing_is_left(world: &World) -> Result<()> {
    let taints = json!([
        { "key": "kplane.io/not-ready", "effect": "NoSchedule" },
        { "key": "dedicated", "effect": "NoSchedule" },
    ]);
    let api = world.api();
    api.patch("Node", "node-2", &json!({ "spec": { "taints": taints } }))?;
    let (code, text) = kpctl_with(world, &["uninstall"])?;
    ensure!(
        code == Some(2) && text.contains("--yes"),
        "{code:?}: {text}"
    );
    let (code, text) = kpctl_with(world, &["uninstall", "--yes"])?;
    ensure!(code == Some(0), "{code:?}: {text}");
    for removed in [
        "rules and cache of node-1",
        "taints of node-2",
        "kplane-kube-proxy",
    ] {
        ensure!(text.contains(removed), "{text}");
    }
    let node = api.get("Node", "node-2")?.context("no node")?;
    ensure!(node["spec"]["taints"][0]["key"] == "dedicated", "{node}");
    ensure!(node["spec"]["taints"][1].is_null(), "{node}");
    api.patch("Node", "node-2", &json!({ "spec": { "taints": null } }))?;
    ensure!(api.get("DaemonSet", AGENTS)?.is_none());
    ensure!(api.get("ConfigMap", "kplane/kplane-kube-proxy")?.is_none());
    ensure!(api.get("DaemonSet", KUBE_PROXY)?.is_some());
    let (code, text) = kpctl_with(world, &["uninstall", "--yes"])?;
    ensure!(code == Some(0), "again: {code:?}: {text}");
    Ok(())
}

/// A forced removal keeps the only copy of kube-proxy's DaemonSet, and says how to create it again.
fn gives_kube_proxy_back(world: &World, before: &Value) -> Result<()> {
    let api = world.api();
    create_agents(api)?;
    runs(world, &["start", "--all"])?;
    runs(world, &["finish", "--yes"])?;
    let (code, text) = kpctl_with(world, &["uninstall", "--yes"])?;
    let refused = code == Some(1) && text.contains("--force");
    ensure!(refused, "{code:?}: {text}");
    let (code, text) = kpctl_with(world, &["uninstall", "--yes", "--force"])?;
    ensure!(code == Some(0), "{code:?}: {text}");
    ensure!(api.get("DaemonSet", KUBE_PROXY)?.is_none());
    ensure!(text.contains("kpctl migrate back --all"), "{text}");
    runs(world, &["back", "--all"])?;
    let after = api.get("DaemonSet", KUBE_PROXY)?.context("kube-proxy's DaemonSet is away")?;
    ensure!(after["spec"] == before["spec"], "{after}");
    Ok(())
}

/// Creates both DaemonSets, and returns kube-proxy's when its pods run.
fn install(world: &World) -> Result<Value> {
    let api = world.api();
    let hostname = json!({ "key": "kubernetes.io/hostname", "operator": "Exists" });
    api.create(&daemon_set(KUBE_PROXY, "k8s-app", &hostname))?;
    let text = fails(world, &["start", "--all"], 1)?;
    ensure!(text.contains("helm install"), "{text}");
    create_agents(api)?;
    eventually(DEADLINE, "kube-proxy runs on all nodes", || {
        let there = pods(api)?;
        ensure!(there.len() == NODES.len(), "{there:?}");
        Ok::<_, anyhow::Error>(())
    })?;
    let set = api.get("DaemonSet", KUBE_PROXY)?;
    set.context("just created")
}

fn create_agents(api: &Api) -> Result<()> {
    let ours = json!({ "key": LABEL, "operator": "In", "values": ["kplane"] });
    api.create(&daemon_set(AGENTS, "app", &ours)).map(drop)
}

fn daemon_set(key: &str, label: &str, condition: &Value) -> Value {
    let (namespace, name) = key.split_once('/').unwrap_or_default();
    let terms = json!([{ "matchExpressions": [condition] }]);
    json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": { "name": name, "namespace": namespace },
        "spec": {
            "selector": { "matchLabels": { label: name } },
            "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": { "maxUnavailable": 1 } },
            "template": {
                "metadata": { "labels": { label: name } },
                "spec": {
                    "hostNetwork": true,
                    "tolerations": [{ "operator": "Exists" }],
                    "affinity": { "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": terms },
                    } },
                    "containers": [{ "name": name, "image": name }],
                },
            },
        },
    })
}

/// Returns the ids of pods that are ready, by owner and node.
fn pods(api: &Api) -> Result<BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    for pod in ["kube-system", "kplane"].map(|namespace| api.list("Pod", Some(namespace))) {
        for pod in pod? {
            let owner = &pod["metadata"]["ownerReferences"][0]["name"];
            let owner = owner.as_str().or(pod["metadata"]["name"].as_str());
            let node = pod["spec"]["nodeName"].as_str().unwrap_or_default();
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            if pod["status"]["phase"] == "Running" && pod["metadata"]["deletionTimestamp"].is_null()
            {
                let key = format!("{} {node}", owner.unwrap_or_default());
                all.insert(key, text(&pod["metadata"]["uid"]));
            }
        }
    }
    Ok(all)
}

fn labels(world: &World) -> Result<[Option<String>; 2]> {
    let mut labels = [None, None];
    for (label, (node, _)) in labels.iter_mut().zip(NODES) {
        let node = world.api().get("Node", node)?.context("no node")?;
        *label = node["metadata"]["labels"][LABEL].as_str().map(str::to_owned);
    }
    Ok(labels)
}

/// Runs `kpctl migrate`, and returns its exit code and all that it says.
fn kpctl(world: &World, args: &[&str]) -> Result<(Option<i32>, String)> {
    let mut all = [&["migrate"], args].concat();
    // Where something is wrong, the test says so sooner.
    if matches!(args, ["start" | "back", _, _] | ["start" | "back", _]) {
        all.extend(["--node-timeout", "60s"]);
    }
    kpctl_with(world, &all)
}

/// Runs kpctl, and returns its exit code and all that it says.
fn kpctl_with(world: &World, args: &[&str]) -> Result<(Option<i32>, String)> {
    let mut kpctl = command(PAIR[0].1, args)?;
    kpctl.arg("--no-color");
    kpctl.env("KUBECONFIG", world.cluster.kubeconfig());
    let control = world.topology.host("control")?.ns();
    let output = control.run(|| Ok(kpctl.output()?))?;
    let json = args.contains(&"json");
    let text = if json { output.stdout } else { [output.stderr, output.stdout].concat() };
    Ok((output.status.code(), String::from_utf8(text)?))
}

fn runs(world: &World, args: &[&str]) -> Result<String> {
    let (code, text) = kpctl(world, args)?;
    ensure!(code == Some(0), "{args:?}: {code:?}: {text}");
    Ok(text)
}

fn fails(world: &World, args: &[&str], with: i32) -> Result<String> {
    let (code, text) = kpctl(world, args)?;
    ensure!(code == Some(with), "{args:?}: {code:?}: {text}");
    Ok(text)
}
