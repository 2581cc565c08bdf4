//! Several replicas of the control plane for one agent, with a real API server.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kplane_tests::support::nft;
use kplane_tests::wait::eventually;
use nix::sys::signal::Signal;

use crate::cluster::faults::{addresses, serve};
use crate::cluster::support::kpctl::kpctl;
use crate::cluster::support::world::{Plane, reaches};
use crate::cluster::support::{World, with_world};

/// The replicas of this test, and the marks of their connections to the API server.
const REPLICAS: [(u16, u32); 2] = [(6, 0x56), (7, 0x57)];
const NODE: &str = "node-1";
/// The time within which an answer names a replica that is silent: a second, and some for two programs.
const NAMED_WITHIN: Duration = Duration::from_millis(2_500);
/// The time within which agents leave a replica that is cut off from the API server.
const LEFT_WITHIN: Duration = Duration::from_secs(20);

/// A replica loses its API server: its agent goes to the other one. That one is killed: the agent does
/// not go back to the older state of the first, until the first has caught up.
pub(crate) fn an_agent_leaves_a_replica_that_is_cut_off_and_never_goes_back() -> Result<()> {
    with_world(|world| {
        let mut planes = Vec::new();
        prepare(world, &REPLICAS.map(|(_, mark)| mark))?;
        for (replica, mark) in REPLICAS {
            let mark = format!("--own-mark={mark}");
            planes.push(world.replica(replica, &[mark])?);
        }
        world.restart_agent_among(NODE, &REPLICAS.map(|(replica, _)| replica))?;
        let to = serve(world.api(), "moving", 90, 2)?;
        world.leads(NODE, to, &addresses(90, 2))?;

        let first = serving(&planes)?;
        let cut_at = Instant::now();
        cut(world, REPLICAS[first].1)?;
        serve(world.api(), "moving", 90, 4)?;
        world.leads(NODE, to, &addresses(90, 4))?;
        let took = cut_at.elapsed();
        ensure!(took <= LEFT_WITHIN, "left after {took:?}");
        ensure!(serving(&planes)? != first);

        drop(planes.remove(1 - first));
        eventually(
            LEFT_WITHIN,
            "the agent asks the replica that is cut off",
            || {
                let log = world.logged(NODE)?;
                ensure!(log.contains("shows an older state of the cluster"), "{log}");
                Ok::<_, anyhow::Error>(())
            },
        )?;
        // Far more attempts than an agent makes where it believes that the API server went back.
        let until = Instant::now() + LEFT_WITHIN / 2;
        while Instant::now() < until {
            let now = reaches(world.ns(NODE)?, to)?;
            ensure!(now == addresses(90, 4), "it went back to {now:?}");
            thread::sleep(Duration::from_millis(50));
        }

        heal(world)?;
        serve(world.api(), "moving", 90, 3)?;
        world.leads(NODE, to, &addresses(90, 3))?;
        world.restart_agent(NODE, 0)?;
        world.settle()
    })
}

/// The replicas that ask each other: the ports of their status APIs, and the node whose agent each has, if any.
const PEERS: [(u16, u16, Option<&str>); 3] = [
    (8, 7546, Some("node-1")),
    (9, 7556, Some("node-2")),
    (10, 7566, None),
];

/// kpctl sees all nodes from any replica. One of them stops its clock: it is named soon, and nothing of its agent counts
/// as programmed until it answers again.
pub(crate) fn any_replica_answers_for_all_and_kpctl_waits_for_all() -> Result<()> {
    with_world(|world| {
        let places = PEERS.map(|(_, port, _)| format!("127.0.0.1:{port}"));
        let peers = format!("--peers={}", places.join(","));
        let mut planes = Vec::new();
        for (replica, _, _) in PEERS {
            planes.push(world.replica(replica, std::slice::from_ref(&peers))?);
        }
        for (replica, _, node) in PEERS {
            if let Some(node) = node {
                world.restart_agent(node, replica)?;
            }
        }
        serve(world.api(), "everywhere", 95, 2)?;
        let waits = |port, time: &str| {
            let wait = ["wait", "service/default/everywhere", "--timeout", time];
            kpctl(world, port, &wait)
        };
        for (_, port, _) in PEERS {
            let (code, text, _) = waits(port, "60s")?;
            ensure!(code == Some(0) && text.contains("2 of 2 nodes"), "{text}");
            let (_, text, _) = kpctl(world, port, &["status"])?;
            ensure!(
                text.contains("2/2 in sync") && text.contains("3 answered"),
                "{text}"
            );
        }

        planes[1].signal(Signal::SIGSTOP)?;
        serve(world.api(), "everywhere", 95, 3)?;
        for port in [7546, 7566] {
            let (_, text, took) = kpctl(world, port, &["status"])?;
            ensure!(text.contains("Replica 127.0.0.1:7556 is missing"), "{text}");
            ensure!(text.contains("1/2 in sync, 1 unknown"), "{text}");
            ensure!(took <= NAMED_WITHIN, "{took:?}");
        }
        let (code, text, _) = waits(7566, "2s")?;
        ensure!(code == Some(1) && text.contains("1 of 2 nodes"), "{text}");
        ensure!(text.contains("Replica 127.0.0.1:7556 is missing"), "{text}");
        planes[1].signal(Signal::SIGCONT)?;
        let (code, text, _) = waits(7566, "60s")?;
        ensure!(code == Some(0) && text.contains("2 of 2 nodes"), "{text}");

        world.give_back()
    })
}

/// Returns which replica has the agent.
fn serving(planes: &[Plane]) -> Result<usize> {
    let mut at = None;
    for (index, plane) in planes.iter().enumerate() {
        let fleet = plane.fleet()?;
        let node = fleet.nodes.iter().find(|node| node.name == NODE);
        if node.is_some_and(|node| !node.peer.is_empty()) {
            at = Some(index);
        }
    }
    at.context("no replica has the agent")
}

/// Gives both directions of replicas' connections to the API server their marks. The control planes and
/// the API server share a namespace, so all packets pass one chain.
pub(crate) fn prepare(world: &World, marks: &[u32]) -> Result<()> {
    nft(world, "add table inet cut")?;
    let hook = "{ type filter hook output priority 0; }";
    nft(world, &format!("add chain inet cut out {hook}"))?;
    for mark in marks {
        let rule = format!("add rule inet cut out meta mark {mark} ct mark set {mark}");
        nft(world, &rule)?;
    }
    Ok(())
}

/// Drops all packets between a replica and the API server.
pub(crate) fn cut(world: &World, mark: u32) -> Result<()> {
    nft(world, &format!("add rule inet cut out ct mark {mark} drop"))
}

pub(crate) fn heal(world: &World) -> Result<()> {
    nft(world, "delete table inet cut")
}

fn nft(world: &World, line: &str) -> Result<()> {
    nft::nft(world.topology.host("control")?.ns(), line).map(drop)
}
