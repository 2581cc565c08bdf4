//! The flight recorder: which object changed a Service, and when each node had it, asked of any replica.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, TcpStream};
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context as _, Result, ensure};
use jiff::Timestamp;
use kplane_tests::cluster::objects;
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use crate::cluster::faults::{addresses, serve, slice};
use crate::cluster::support::kpctl::document;
use crate::cluster::support::world::{DEADLINE, PAIR};
use crate::cluster::support::{World, with_pair};

const SERVICE: &str = "default/recorded";

/// Runs a test with the Service, which both nodes have.
fn with_recorded(test: impl FnOnce(&mut World, (IpAddr, u16)) -> Result<()>) -> Result<()> {
    with_pair(|world| {
        let to = serve(world.api(), "recorded", 97, 2)?;
        for (_, _, node) in PAIR {
            world.leads(node, to, &addresses(97, 2))?;
        }
        test(world, to)
    })
}

/// A slice changes: the history names it with its version, what changed in it, and the time of the nodes of both replicas.
pub(crate) fn history_names_the_object_its_version_and_the_time_of_each_node() -> Result<()> {
    with_recorded(|world, to| slice_changes(world, to))
}

/// A policy changes: the history names the field.
pub(crate) fn history_names_the_field_that_changed() -> Result<()> {
    with_recorded(|world, _| policy_changes(world))
}

/// An agent is away: the history says that its node lacks the change, and the events say since when. The bundle has all of it.
pub(crate) fn history_names_the_nodes_that_lack_a_change() -> Result<()> {
    with_recorded(|world, _| {
        policy_changes(world)?;
        node_is_away(world)?;
        bundle(world)?;
        transactions(world)
    })
}

/// The Service is gone: its history is still there.
pub(crate) fn history_outlives_its_service() -> Result<()> {
    with_recorded(|world, _| {
        world.api().delete("Service", SERVICE)?;
        let slice = format!("{SERVICE}-own");
        world.api().delete("EndpointSlice", &slice)?;
        removed(world)
    })
}

fn slice_changes(world: &World, to: (IpAddr, u16)) -> Result<()> {
    let before = SystemTime::now();
    let written = world.api().apply(&slice("recorded", &addresses(97, 3)))?;
    let version = &written["metadata"]["resourceVersion"];
    for (_, _, node) in PAIR {
        world.leads(node, to, &addresses(97, 3))?;
    }
    for (_, port, node) in PAIR {
        eventually(DEADLINE, "both nodes have the slice's change", || {
            let change = newest(world, port, &[])?;
            let cause = &change["causes"][0];
            ensure!(cause["kind"] == "EndpointSlice", "{change:#}");
            ensure!(cause["name"] == "recorded-own", "{change:#}");
            ensure!(
                cause["resourceVersion"] == *version,
                "{version}: {change:#}"
            );
            let endpoints = cause["endpoints"].as_array().context("no endpoints")?;
            let came = &endpoints[0];
            let is = (&came["address"], &came["before"], &came["after"]);
            let expected = (
                &json!("10.244.97.3:8080"),
                &json!("Absent"),
                &json!("Ready"),
            );
            ensure!(endpoints.len() == 1 && is == expected, "{change:#}");
            ensure!(change["nodes"] == 2 && change["reached"] == 2, "{change:#}");
            for reached in change["slowest"].as_array().context("no nodes")? {
                let at: Timestamp = reached["at"].as_str().context("no time")?.parse()?;
                let at = SystemTime::from(at);
                ensure!(reached["orBefore"] == false, "{change:#}");
                ensure!(before < at && at < SystemTime::now(), "{change:#}");
            }
            Ok(())
        })?;
        // The other replica serves that node.
        for (_, _, of) in PAIR {
            let why = ["why", SERVICE, "--from", "pod", "--via", of, "--try"];
            let why = document(world, port, &why)?;
            ensure!(why["kernel"]["agrees"] == true, "{why:#}");
            let tried = why["attempts"].as_array().context("nothing was tried")?;
            ensure!(tried.len() == 4, "{why:#}");
            let change = newest(world, port, &["--node", of])?;
            let only = change["slowest"].as_array().context("no nodes")?;
            ensure!(
                only.len() == 1 && only[0]["node"] == of,
                "{node}: {change:#}"
            );
        }
    }
    Ok(())
}

fn policy_changes(world: &World) -> Result<()> {
    let policy = json!({ "clusterIP": "10.96.77.97", "internalTrafficPolicy": "Local" });
    let service = objects::service("default", "recorded", policy);
    world.api().apply(&service)?;
    let port = PAIR[0].1;
    eventually(DEADLINE, "the policy is in the history", || {
        let change = newest(world, port, &[])?;
        let field = &change["causes"][0]["fields"][0];
        let name = field["field"].as_str().unwrap_or_default();
        ensure!(name.contains("internalTrafficPolicy"), "{change:#}");
        let is = (&field["before"], &field["after"]);
        ensure!(is == (&json!("Cluster"), &json!("Local")), "{change:#}");
        ensure!(change["reached"] == 2, "{change:#}");
        Ok(())
    })?;
    Ok(())
}

fn node_is_away(world: &mut World) -> Result<()> {
    let (replica, port, node) = PAIR[1];
    world.stop_agent(node);
    world.api().apply(&slice("recorded", &addresses(97, 1)))?;
    eventually(DEADLINE, "the node lacks the change", || {
        let change = newest(world, port, &[])?;
        let endpoints = change["causes"][0]["endpoints"].as_array();
        ensure!(endpoints.is_some_and(|all| all.len() == 1), "{change:#}");
        ensure!(change["waiting"][0]["node"] == node, "{change:#}");
        // Endpoints of one node changed, and the policy is Local: the other node does not count.
        ensure!(change["singleNodes"] == true, "{change:#}");
        ensure!(change["nodes"] == 1 && change["reached"] == 0, "{change:#}");
        Ok(())
    })?;
    let diff = document(world, port, &["diff", "node/node-2"])?;
    ensure!(diff["services"][0]["name"] == "recorded", "{diff:#}");
    world.restart_agent(node, replica)?;
    eventually(DEADLINE, "the node has the change", || {
        let change = newest(world, port, &[])?;
        ensure!(change["reached"] == 1, "{change:#}");
        let events = document(world, port, &["events"])?;
        let of_node = |event: &&Value| event["object"] == "Node/node-2";
        let events = events["events"].as_array().context("no events")?.clone();
        let mut kinds = events.iter().filter(of_node).map(|event| &event["event"]);
        ensure!(kinds.any(|kind| kind == "NodeLost"), "{events:?}");
        ensure!(kinds.any(|kind| kind == "NodeConnected"), "{events:?}");
        Ok(())
    })?;
    Ok(())
}

/// The bundle has all parts, and no address if it must not.
fn bundle(world: &World) -> Result<()> {
    let path = world.cluster.folder().join("bundle.tar.gz");
    let file = path.to_str().context("no path")?;
    let command = [
        "bundle",
        "--hash-addresses",
        "--service",
        SERVICE,
        "--file",
        file,
    ];
    // The record of this replica has its node's events.
    let bundle = document(world, PAIR[1].1, &command)?;
    let parts = bundle["parts"].as_array().context("no parts")?;
    let lacks = parts.iter().filter(|part| !part["problem"].is_null());
    ensure!(lacks.count() == 0 && parts.len() >= 10, "{bundle:#}");
    let unpacked = Command::new("tar").args(["-xzOf", file]).output()?;
    ensure!(unpacked.status.success(), "{unpacked:?}");
    let text = String::from_utf8(unpacked.stdout)?;
    for part in [
        "kplane_controlplane_revision",
        "recorded-own",
        "NodeLost",
        "ip4-",
    ] {
        ensure!(text.contains(part), "no {part}");
    }
    ensure!(!text.contains("10.244.97.1"), "an address is not hidden");
    Ok(())
}

/// The agent shows its own transactions.
fn transactions(world: &World) -> Result<()> {
    let page = world.ns(PAIR[1].2)?.run(|| {
        let mut stream = TcpStream::connect("127.0.0.1:10249")?;
        let request = "GET /transactions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        stream.write_all(request.as_bytes())?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    })?;
    let (_, body) = page.split_once("\r\n\r\n").context("no answer")?;
    let page: Value = serde_json::from_str(body)?;
    let all = page["transactions"].as_array().context("no transactions")?;
    let newest = all.first().context("none")?;
    ensure!(newest["result"] == "Applied", "{page:#}");
    let revision = newest["revision"].as_u64();
    ensure!(revision.is_some_and(|revision| revision > 1), "{page:#}");
    Ok(())
}

fn removed(world: &World) -> Result<()> {
    eventually(DEADLINE, "the removal is in the history", || {
        let history = document(world, PAIR[0].1, &["history", "service", SERVICE])?;
        let changes = history["changes"].as_array().context("no changes")?;
        // Of the Service and of its slice; older ones are of other tests.
        let newest = changes.iter().take(2);
        let mut causes = newest.flat_map(|c| c["causes"].as_array()).flatten();
        let gone = causes.any(|cause| cause["kind"] == "Service" && cause["verb"] == "Removed");
        ensure!(gone, "{history:#}");
        Ok(())
    })
}

/// Returns the newest change of the Service.
fn newest(world: &World, port: u16, more: &[&str]) -> Result<Value> {
    let command = ["history", "service", SERVICE];
    let history = document(world, port, &[&command[..], more].concat())?;
    Ok(history["changes"][0].clone())
}
