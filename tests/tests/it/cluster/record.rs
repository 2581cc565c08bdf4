//! The flight recorder: which object changed a Service, and when each node had it, asked of any replica.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::SystemTime;

use anyhow::{Context as _, Result, ensure};
use jiff::Timestamp;
use kplane_tests::cluster::objects;
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use crate::cluster::faults::{addresses, serve, slice};
use crate::cluster::support::world::{DEADLINE, Plane, product};
use crate::cluster::support::{World, with_world};

/// The replicas, the ports of their status APIs, and the node whose agent each has.
const PLACES: [(u16, u16, &str); 2] = [(13, 7596, "node-1"), (14, 7606, "node-2")];
const SERVICE: &str = "default/recorded";

/// A slice changes: the history names it with its version, what changed in it, and the time of the nodes of both replicas.
pub(crate) fn history_names_the_object_its_version_and_the_time_of_each_node() -> Result<()> {
    with_world(|world| {
        let _planes = start(world)?;
        let to = serve(world.api(), "recorded", 97, 2)?;
        for (_, _, node) in PLACES {
            world.leads(node, to, &addresses(97, 2))?;
        }
        slice_changes(world, to)?;
        policy_changes(world)?;
        node_is_away(world)?;
        bundle(world)?;
        transactions(world)?;
        world.api().delete("Service", SERVICE)?;
        world.api().delete("EndpointSlice", &format!("{SERVICE}-own"))?;
        removed(world)?;
        world.give_back()
    })
}

/// Starts two replicas that know each other, each with an agent.
fn start(world: &mut World) -> Result<Vec<Plane>> {
    let account = "kplane/kplane-controlplane";
    let kubeconfig = world.cluster.account_kubeconfig(account)?;
    let places = PLACES.map(|(_, port, _)| format!("127.0.0.1:{port}"));
    let peers = format!("--peers={}", places.join(","));
    let mut planes = Vec::new();
    for (replica, _, _) in PLACES {
        planes.push(world.plane_with(replica, &kubeconfig, std::slice::from_ref(&peers))?);
    }
    for (replica, _, node) in PLACES {
        world.restart_agent(node, replica)?;
    }
    Ok(planes)
}

fn slice_changes(world: &World, to: (IpAddr, u16)) -> Result<()> {
    let before = SystemTime::now();
    let written = world.api().apply(&slice("recorded", &addresses(97, 3)))?;
    let version = &written["metadata"]["resourceVersion"];
    for (_, _, node) in PLACES {
        world.leads(node, to, &addresses(97, 3))?;
    }
    for (_, port, node) in PLACES {
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
        for (_, _, of) in PLACES {
            let why = ["why", SERVICE, "--from", "pod", "--via", of, "--try"];
            let why = ask(world, port, &why)?;
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

/// A policy changes: the history names the field.
fn policy_changes(world: &World) -> Result<()> {
    let policy = json!({ "clusterIP": "10.96.77.97", "internalTrafficPolicy": "Local" });
    let service = objects::service("default", "recorded", policy);
    world.api().apply(&service)?;
    let port = PLACES[0].1;
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

/// An agent is away: the history says that its node lacks the change, and the events say since when.
fn node_is_away(world: &mut World) -> Result<()> {
    let (replica, port, node) = PLACES[1];
    world.stop_agent(node);
    world.api().apply(&slice("recorded", &addresses(97, 1)))?;
    eventually(DEADLINE, "the node lacks the change", || {
        let change = newest(world, port, &[])?;
        let endpoints = change["causes"][0]["endpoints"].as_array();
        ensure!(endpoints.is_some_and(|all| all.len() == 2), "{change:#}");
        ensure!(change["waiting"][0]["node"] == node, "{change:#}");
        // Endpoints of one node changed, and the policy is Local: the other node does not count.
        ensure!(change["singleNodes"] == true, "{change:#}");
        ensure!(change["nodes"] == 1 && change["reached"] == 0, "{change:#}");
        Ok(())
    })?;
    let diff = ask(world, port, &["diff", "node/node-2"])?;
    ensure!(diff["services"][0]["name"] == "recorded", "{diff:#}");
    world.restart_agent(node, replica)?;
    eventually(DEADLINE, "the node has the change", || {
        let change = newest(world, port, &[])?;
        ensure!(change["reached"] == 1, "{change:#}");
        let events = ask(world, port, &["events"])?;
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
    let bundle = ask(world, PLACES[1].1, &command)?;
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
    let page = world.ns(PLACES[1].2)?.run(|| {
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

/// The Service is gone: its history is still there.
fn removed(world: &World) -> Result<()> {
    eventually(DEADLINE, "the removal is in the history", || {
        let history = ask(world, PLACES[0].1, &["history", "service", SERVICE])?;
        let changes = history["changes"].as_array().context("no changes")?;
        let mut causes = changes.iter().flat_map(|c| c["causes"].as_array()).flatten();
        let gone = causes.any(|cause| cause["kind"] == "Service" && cause["verb"] == "Removed");
        ensure!(gone, "{history:#}");
        Ok(())
    })
}

/// Returns the newest change of the Service.
fn newest(world: &World, port: u16, more: &[&str]) -> Result<Value> {
    let command = ["history", "service", SERVICE];
    let history = ask(world, port, &[&command[..], more].concat())?;
    Ok(history["changes"][0].clone())
}

/// Runs kpctl; returns its document.
fn ask(world: &World, port: u16, args: &[&str]) -> Result<Value> {
    let mut kpctl = Command::new(&product()?.kpctl);
    kpctl.args(args).args(["-o", "json"]).stdin(Stdio::null());
    kpctl.env("KPLANE_SERVER", format!("127.0.0.1:{port}"));
    let output = world.topology.host("control")?.ns().run(|| Ok(kpctl.output()?))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let answer = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{args:?}: {errors}{answer}");
    Ok(serde_json::from_slice(&output.stdout)?)
}
