//! Kubernetes events, as the API server keeps them and kubectl shows them.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use jiff::{SignedDuration, Timestamp};
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use crate::cluster::faults::{addresses, serve};
use crate::cluster::support::world::{BINDING, DEADLINE, NAMESPACE};
use crate::cluster::support::{World, with_world};

/// The address that two Services want.
const WANTED: &str = "172.30.9.9";
/// Replica 0 and the node whose agent it has.
const NODE: &str = "node-1";
/// An account that may do everything but write events.
const MUTE: &str = "mute";
/// The right that it lacks, as kubectl writes it.
const MISSING: &str = "create events.events.k8s.io";

pub(crate) fn j1_an_agent_that_starts_is_an_event_of_its_node() -> Result<()> {
    with_world(|world| {
        let starts = |world: &World, count: usize| {
            eventually(DEADLINE, &format!("{count} starts of {NODE}"), || {
                let found = starts(world)?;
                ensure!(found.len() == count, "{found:?}");
                Ok::<_, anyhow::Error>(found)
            })
        };
        // Other tests may have started it again; the world has, once.
        let before = eventually(DEADLINE, "it has started", || {
            let found = self::starts(world)?.len();
            ensure!(found > 0);
            Ok::<_, anyhow::Error>(found)
        })?;
        world.restart_agent(NODE, 0)?;
        for event in starts(world, before + 1)? {
            // `kubectl describe node` looks for the name as the uid.
            ensure!(event["regarding"]["uid"] == NODE, "{event}");
            ensure!(event["type"] == "Normal", "{event}");
            let note = event["note"].as_str().unwrap_or_default();
            ensure!(note.contains("nftables"), "{event}");
        }
        let described = describe(world, "node", NODE)?;
        ensure!(described.contains("Starting"), "{described}");
        Ok(())
    })
}

pub(crate) fn two_replicas_tell_of_a_conflict_once() -> Result<()> {
    with_world(|world| {
        let young = conflict(world, "old", "young")?;
        wait_written(world, "young", "AddressConflict")?;
        let event = one(world, &young, "AddressConflict")?;
        ensure!(event["type"] == "Warning", "{event}");
        ensure!(event["reportingController"] == "kplane", "{event}");
        ensure!(event["regarding"]["name"] == "young", "{event}");
        let note = event["note"].as_str().unwrap_or_default();
        ensure!(
            note.contains("default/old") && note.contains(WANTED),
            "{note}"
        );

        let described = describe(world, "service", "young")?;
        ensure!(described.contains("AddressConflict"), "{described}");
        let described = describe(world, "service", "old")?;
        ensure!(!described.contains("AddressConflict"), "{described}");
        // What the event says is so.
        world.leads(NODE, (WANTED.parse()?, 80), &addresses(90, 2))
    })
}

pub(crate) fn a_conflict_that_ends_is_told_and_one_that_returns_is_counted() -> Result<()> {
    with_world(|world| {
        let later = conflict(world, "first", "second")?;
        wait_written(world, "second", "AddressConflict")?;
        let first = one(world, &later, "AddressConflict")?;
        ensure!(first["series"].is_null(), "{first}");
        want(world, "second", false)?;
        let what = "nothing is wrong any more";
        let accepted = eventually(DEADLINE, what, || one(world, &later, "ServiceAccepted"))?;
        ensure!(accepted["type"] == "Normal", "{accepted}");
        want(world, "second", true)?;
        eventually(DEADLINE, "it is counted", || {
            let again = one(world, &later, "AddressConflict")?;
            ensure!(again["series"]["count"] == 2, "{again}");
            ensure!(again["metadata"]["name"] == first["metadata"]["name"]);
            Ok(())
        })
    })
}

pub(crate) fn without_the_right_to_write_events_everything_else_goes_on() -> Result<()> {
    with_world(|world| {
        let kubeconfig = mute(world)?;
        // Two problems from the first look on, so that a second complaint would follow at once.
        conflict(world, "before", "after")?;
        serve(world.api(), "after-that", 93, 1)?;
        want(world, "after-that", true)?;
        let mut plane = world.plane(2, &kubeconfig)?;
        eventually(DEADLINE, "it says what it may not do", || {
            ensure!(complaints(world)? > 0, "{}", world.logged("plane-2")?);
            Ok::<_, anyhow::Error>(())
        })?;

        // An agent of its own begins, which would be another event, and follows every change.
        world.restart_agent(NODE, 2)?;
        let to = serve(world.api(), "later", 92, 3)?;
        world.leads(NODE, to, &addresses(92, 3))?;
        world.settle()?;
        ensure!(plane.ended().is_err(), "it has ended");
        let issues = plane.issues()?;
        let reported = |name: &str| issues.iter().any(|issue| issue.contains(name));
        ensure!(
            reported("default/after") && !reported("events"),
            "{issues:?}"
        );
        ensure!(complaints(world)? == 1, "{}", world.logged("plane-2")?);

        world.restart_agent(NODE, 0)?;
        for kind in ["ClusterRoleBinding", "ClusterRole"] {
            world.api().delete(kind, MUTE)?;
        }
        let account = format!("{NAMESPACE}/{MUTE}");
        world.api().delete("ServiceAccount", &account)
    })
}

/// Makes the account that may not write events: all other rights of the manifest are left.
fn mute(world: &World) -> Result<PathBuf> {
    let api = world.api();
    let mut role = api.get("ClusterRole", BINDING)?.context("the suite has granted it")?;
    let rules = role["rules"].as_array_mut().context("no rules")?;
    let before = rules.len();
    rules.retain(|rule| rule["resources"] != json!(["events"]));
    ensure!(rules.len() + 1 == before, "{rules:?}");
    let metadata = json!({ "name": MUTE });
    api.apply(&json!({
        "kind": "ServiceAccount", "metadata": { "name": MUTE, "namespace": NAMESPACE },
    }))?;
    api.apply(&json!({ "kind": "ClusterRole", "metadata": metadata, "rules": rules }))?;
    api.apply(&json!({
        "kind": "ClusterRoleBinding", "metadata": metadata,
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": MUTE,
        },
        "subjects": [{ "kind": "ServiceAccount", "name": MUTE, "namespace": NAMESPACE }],
    }))?;
    let account = format!("{NAMESPACE}/{MUTE}");
    world.cluster.account_kubeconfig(&account)
}

/// Two Services that want the same address, the second one younger by their timestamps; returns the
/// uid of that one. Names that no other test has: logs and events outlive tests.
fn conflict(world: &World, old: &str, young: &str) -> Result<String> {
    let api = world.api();
    serve(api, old, 90, 2)?;
    want(world, old, true)?;
    let created = created(&service(world, old)?)?;
    // Timestamps are whole seconds.
    let later = created + SignedDuration::from_secs(2);
    eventually(DEADLINE, "the clock goes on", || {
        let now = Timestamp::now();
        ensure!(now >= later, "{now}");
        Ok::<_, anyhow::Error>(())
    })?;
    serve(api, young, 91, 2)?;
    want(world, young, true)?;
    let young = service(world, young)?;
    ensure!(self::created(&young)? >= later, "{young}");
    let uid = young["metadata"]["uid"].as_str();
    Ok(uid.context("no uid")?.to_owned())
}

fn service(world: &World, name: &str) -> Result<Value> {
    world
        .api()
        .get("Service", &format!("{NAMESPACE}/{name}"))?
        .with_context(|| format!("no Service {name}"))
}

fn created(object: &Value) -> Result<Timestamp> {
    let text = object["metadata"]["creationTimestamp"].as_str();
    Ok(text.context("no timestamp")?.parse()?)
}

/// Lets a Service want the address, or no longer.
fn want(world: &World, service: &str, wanted: bool) -> Result<()> {
    let ips: &[&str] = if wanted { &[WANTED] } else { &[] };
    let key = format!("{NAMESPACE}/{service}");
    let fields = json!({ "spec": { "externalIPs": ips } });
    world.api().patch("Service", &key, &fields).map(drop)
}

/// The only event of an object with this reason.
fn one(world: &World, uid: &str, reason: &str) -> Result<Value> {
    let mut events = world.api().list("Event", Some(NAMESPACE))?;
    events.retain(|event| event["regarding"]["uid"] == uid && event["reason"] == reason);
    ensure!(events.len() == 1, "{reason}: {events:?}");
    events.pop().context("just counted")
}

/// All starts of the node's agent.
fn starts(world: &World) -> Result<Vec<Value>> {
    let mut events = world.api().list("Event", Some(NAMESPACE))?;
    events.retain(|event| {
        let regarding = &event["regarding"];
        regarding["kind"] == "Node" && regarding["name"] == NODE && event["reason"] == "Starting"
    });
    Ok(events)
}

/// Waits until every replica has written an event of a Service, or found it written.
fn wait_written(world: &World, service: &str, reason: &str) -> Result<()> {
    for replica in 0..world.planes.len() {
        let log = format!("plane-{replica}");
        eventually(DEADLINE, &format!("{log} writes {reason}"), || {
            let words = ["event written", &format!("{service:?}"), reason];
            ensure!(says(world, &log, &words)? > 0, "it has not");
            Ok::<_, anyhow::Error>(())
        })?;
    }
    Ok(())
}

/// How often the third replica has said that it may not write events.
fn complaints(world: &World) -> Result<usize> {
    says(world, "plane-2", &["WARN", MISSING])
}

/// Lines of a log with all these words.
fn says(world: &World, log: &str, words: &[&str]) -> Result<usize> {
    let log = world.logged(log)?;
    let has_all = |line: &&str| words.iter().all(|word| line.contains(word));
    Ok(log.lines().filter(has_all).count())
}

/// What `kubectl describe` shows.
fn describe(world: &World, kind: &str, name: &str) -> Result<String> {
    let cluster = &world.cluster;
    let mut kubectl = cluster.programs().command("kubectl");
    kubectl
        .arg("--kubeconfig")
        .arg(cluster.kubeconfig())
        .args(["describe", kind, name]);
    cluster.ns().output(kubectl)
}
