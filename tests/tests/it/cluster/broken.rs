//! What is broken around a Service: addresses that two Services want, fields that cannot be used, the API server, agents,
//! nodes, the control plane. Each is broken for real, and `kpctl` names the reason and what to do.

use std::net::TcpListener;

use anyhow::{Result, ensure};
use kplane_model::Family;
use kplane_tests::cluster::objects;
use kplane_tests::support::nft::nft;
use kplane_tests::wait::eventually;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::cluster::support::kpctl::{kpctl, shows};
use crate::cluster::support::with_world;
use crate::cluster::support::world::{BINDING, DEADLINE, World, grant};

/// The third replica's status port.
const THIRD: u16 = 7486;

/// Waits until kpctl's output contains all of these texts.
fn says(world: &World, args: &[&str], parts: &[&str]) -> Result<()> {
    shows(world, 7466, args, parts)
}

/// Waits until the first replica has an issue with a code, or has it no more.
fn issue(world: &World, code: &str, there: bool) -> Result<()> {
    eventually(DEADLINE, &format!("the issue {code}: {there}"), || {
        let plane = world.planes[0].fleet()?.control_plane.unwrap_or_default();
        let found = plane.issues.iter().any(|issue| issue.code == code);
        ensure!(found == there, "{:?}", plane.issues);
        Ok(())
    })
}

fn make(world: &World, name: &str, mut spec: Value) -> Result<()> {
    spec["selector"] = json!({ "app": name });
    let service = objects::service("default", name, spec);
    world.api().apply(&service).map(drop)
}

/// Fields that the API server takes, and kplane cannot serve as they are.
pub(crate) fn describe_names_addresses_that_cannot_be_served() -> Result<()> {
    with_world(|world| {
        let external = |ip: &str| json!({ "externalIPs": [ip] });
        make(world, "b-first", external("192.0.2.50"))?;
        let first = ["describe", "service", "default/b-first"];
        says(world, &first, &["192.0.2.50"])?;
        make(world, "b-second", external("192.0.2.50"))?;
        make(world, "b-pods", external("10.244.1.99"))?;
        make(world, "b-family", external("2001:db8::5"))?;
        let ranges =
            json!({ "type": "LoadBalancer", "loadBalancerSourceRanges": ["198.51.100.0/24"] });
        make(world, "b-ranges", ranges)?;
        let status = json!({ "loadBalancer": { "ingress": [{ "ip": "192.0.2.60" }] } });
        world.api().patch_status("Service", "default/b-ranges", &status)?;
        let second = ["describe", "service", "default/b-second"];
        says(world, &second, &["AddressConflict", "b-first"])?;
        says(world, &first, &["AddressContested", "b-second"])?;
        let cases: [(&str, &[&str]); 3] = [
            ("default/b-pods", &["InsideClusterRange", "10.244.1.99"]),
            ("default/b-family", &["FamilyMismatch", "2001:db8::5"]),
            (
                "default/b-ranges",
                &["SourceRanges", "198.51.100.0/24", "dropped"],
            ),
        ];
        for (service, parts) in cases {
            says(world, &["describe", "service", service], parts)?;
        }
        let stranger = [
            "outside/203.0.113.9",
            "--via",
            "node-1",
            "--to",
            "192.0.2.60:80",
        ];
        let why = [&["why", "default/b-ranges", "--from"][..], &stranger].concat();
        says(
            world,
            &why,
            &[
                "does not admit its sender",
                "does the same: it admits some senders only",
            ],
        )?;
        // A conflict fails a check of the input.
        let (code, text, _) = kpctl(world, 7466, &["status", "--check"])?;
        ensure!(code == Some(3), "{text}");
        Ok(())
    })
}

/// The node tries: an endpoint at which nobody listens, and one that listens.
pub(crate) fn why_says_what_came_back() -> Result<()> {
    with_world(|world| {
        let node = world.topology.node("node-1")?;
        let ip = node.ip(Family::V4)?;
        let open = node.ns().run(|| Ok(TcpListener::bind((ip, 0))?))?;
        let port = open.local_addr()?.port();
        make(world, "b-open", json!({}))?;
        let slice = |port: u16| {
            let endpoints = [objects::endpoint(ip.to_string(), "node-1")];
            let mut slice = objects::slice("default", "b-open-own", "b-open", endpoints);
            slice["ports"][0]["port"] = json!(port);
            slice
        };
        world.api().apply(&slice(port))?;
        let args = ["why", "default/b-open", "--from", "node/node-1", "--try"];
        says(
            world,
            &args,
            &["TRIED", "the Service 10.96.", "connected in"],
        )?;
        drop(open);
        says(
            world,
            &args,
            &["NobodyListens", "refused", "compare targetPort"],
        )?;
        world.api().delete("EndpointSlice", "default/b-open-own")
    })
}

/// The API server refuses, fails or is away: `kpctl status` says which, and since when.
pub(crate) fn status_names_why_the_api_server_cannot_be_used() -> Result<()> {
    with_world(|world| {
        world.cluster.kill_apiserver()?;
        issue(world, "ApiUnreachable", true)?;
        says(world, &["status"], &["ApiUnreachable"])?;
        world.cluster.start_apiserver()?;
        issue(world, "ApiUnreachable", false)?;
        world.api().delete("ClusterRoleBinding", BINDING)?;
        // Open watches go on without rights; new ones need them.
        world.cluster.kill_apiserver()?;
        world.cluster.start_apiserver()?;
        issue(world, "ApiForbidden", true)?;
        says(world, &["status"], &["ApiForbidden", "services"])?;
        grant(&world.cluster)?;
        issue(world, "ApiForbidden", false)?;
        let path = world.cluster.token_kubeconfig("expired", "expired")?;
        let third = world.plane(2, &path)?;
        shows(world, THIRD, &["status"], &["ApiUnauthorized"])?;
        drop(third);
        world.settle()
    })
}

/// An agent that hangs, is dead, or serves with wrong settings; rules that another program deletes.
pub(crate) fn describe_names_what_is_wrong_with_agents() -> Result<()> {
    with_world(|world| {
        make(world, "b-agent", json!({}))?;
        world.settle()?;
        let service = ["describe", "service", "default/b-agent"];
        let node = ["describe", "node", "node-1"];

        world.signal_agent("node-1", Signal::SIGSTOP)?;
        make(world, "b-late", json!({}))?;
        let late = ["describe", "service", "default/b-late"];
        says(world, &late, &["Behind", "node-1"])?;
        world.signal_agent("node-1", Signal::SIGCONT)?;
        world.settle()?;

        let ns = world.ns("node-1")?.clone();
        nft(&ns, "flush ruleset")?;
        says(world, &node, &["repair"])?;
        world.settle()?;

        for table in ["ip kube-proxy", "inet firewalld"] {
            nft(&ns, &format!("add table {table}; add chain {table} filter"))?;
        }
        says(world, &node, &["Firewalld"])?;
        nft(&ns, "delete table inet firewalld")?;
        // At its next read-back, the agent removes what a kube-proxy has left that does not run.
        eventually(DEADLINE, "kube-proxy's table goes", || {
            let tables = nft(&ns, "list tables")?;
            ensure!(!tables.contains("kube-proxy"), "{tables}");
            anyhow::Ok(())
        })?;

        ns.sysctl(&[("net.ipv4.conf.all.rp_filter", "1")])?;
        says(world, &node, &["ReversePathFilter"])?;
        ns.sysctl(&[("net.ipv4.conf.all.rp_filter", "0")])?;
        world.restart_agent_with("node-1", 0, &["--cluster-cidr=10.9.0.0/16"])?;
        says(world, &node, &["PodRangeNotCovered", "10.244.1.0/24"])?;

        world.stop_agent("node-1");
        says(world, &service, &["AgentDisconnected", "node-1"])?;
        world.restart_agent("node-1", 0)?;
        world.settle()
    })
}
