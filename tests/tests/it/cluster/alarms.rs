//! Alerts in real faults: what Prometheus says of the metrics that control planes and agents export before, during and after
//! each.

use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use kplane_tests::cluster::objects;
use kplane_tests::netns::NetNs;
use kplane_tests::process::Process;
use kplane_tests::support::nft::nft;
use serde_json::json;

use crate::cluster::faults::{addresses, many_vanish, serve, slice};
use crate::cluster::replicas::{cut, heal, prepare};
use crate::cluster::support::alarms::Alarms;
use crate::cluster::support::kpctl::orders;
use crate::cluster::support::with_world;
use crate::cluster::support::world::{BINDING, NAMESPACE, World, agent_port, grant};

/// A port for health checks that another program takes first. It is one of those that the API server gives no Service
/// that asks for none (KEP-3668): other Services have random ones.
const HEALTH_PORT: u16 = 30_012;
/// The mark of the second replica's connections to the API server.
const MARK: u32 = 0x58;
/// Longer than changes may take, and much shorter than an agent may be silent.
const HANGS: Duration = Duration::from_secs(7);

pub(crate) fn alerts_fire_in_real_faults_and_end_with_them() -> Result<()> {
    let alarms = Alarms::get()?;
    with_world(|world| {
        let healthy = &alarms.healthy(world)?;
        world.stop_agent("node-1");
        let lost = alarms.fire(
            world,
            &[healthy],
            &["KplaneAgentLost", "KplaneNodeWithoutAgent"],
        )?;
        world.restart_agent("node-1", 0)?;
        alarms.none(world, &[healthy, &lost])?;

        world.api().delete("ClusterRoleBinding", BINDING)?;
        // Open watches go on without rights; new ones need them.
        world.cluster.kill_apiserver()?;
        world.cluster.start_apiserver()?;
        let refused = alarms.fire(world, &[healthy], &["KplaneSourceRefused"])?;
        second_replica(world, &[])?;
        alarms.fire(world, &[healthy], &["KplaneReplicaNotReady"])?;
        grant(&world.cluster)?;
        world.settle()?;
        alarms.end(
            world,
            &[healthy, &refused],
            &["KplaneSourceRefused", "KplaneReplicaNotReady"],
        )?;

        drop(world.planes.pop());
        let alone = alarms.fire(world, &[healthy], &["KplaneReplicaLost"])?;
        world.planes.clear();
        let none = alarms.fire(world, &[healthy], &["KplaneControlPlaneAbsent"])?;
        for replica in [0, 1] {
            let plane = world.replica(replica, &[])?;
            world.planes.push(plane);
        }
        alarms.end(
            world,
            &[healthy, &alone, &none],
            &["KplaneReplicaLost", "KplaneControlPlaneAbsent"],
        )?;
        world.settle()
    })
}

/// Starts the second replica anew, with further flags.
fn second_replica(world: &mut World, flags: &[String]) -> Result<()> {
    drop(world.planes.pop());
    let plane = world.replica(1, flags)?;
    world.planes.push(plane);
    Ok(())
}

/// Alerts about agents: another program changes the rules again and again; another program has a health check port.
pub(crate) fn alerts_about_agents_fire_and_end_with_their_faults() -> Result<()> {
    let alarms = Alarms::get()?;
    with_world(|world| {
        let healthy = &alarms.healthy(world)?;
        let node = world.ns("node-1")?.clone();
        let meddle = || {
            // The agent may not have repaired the last one yet.
            let _ = nft(&node, "delete table ip kplane");
        };
        let changed = alarms.until(world, &[healthy], |firing| {
            meddle();
            firing.contains("KplaneRulesChangedByOthers")
        })?;
        world.settle()?;
        alarms.end(world, &[healthy, &changed], &["KplaneRulesChangedByOthers"])?;

        let taken = node.run(|| Ok(TcpListener::bind(("0.0.0.0", HEALTH_PORT))?))?;
        world.api().apply(&objects::service(
            NAMESPACE,
            "checked",
            json!({
                "type": "LoadBalancer", "externalTrafficPolicy": "Local",
                "healthCheckNodePort": HEALTH_PORT,
            }),
        ))?;
        let closed = alarms.fire(world, &[healthy], &["KplaneHealthPortsClosed"])?;
        drop(taken);
        alarms.end(world, &[healthy, &closed], &["KplaneHealthPortsClosed"]).map(drop)
    })
}

/// The kernel takes nothing while kplane's table belongs to another process.
pub(crate) fn alerts_about_a_kernel_that_refuses_fire_and_end_with_it() -> Result<()> {
    const FIRING: [&str; 3] = [
        "KplaneNodesFailing",
        "KplaneFamilyFailing",
        "KplaneKernelsLag",
    ];
    let alarms = Alarms::get()?;
    with_world(|world| {
        serve(world.api(), "late", 97, 1)?;
        let healthy = &alarms.healthy(world)?;
        let owner = Owner::of_table(world.ns("node-1")?)?;
        world.api().apply(&slice("late", &addresses(97, 2)))?;
        let refused = alarms.fire(world, &[healthy], &FIRING)?;
        drop(owner);
        world.settle()?;
        alarms.none(world, &[healthy, &refused]).map(drop)
    })
}

/// An agent hangs for seconds, for less time than after which it counts as gone. The changes of that time are late.
pub(crate) fn an_alert_says_that_changes_take_long() -> Result<()> {
    let alarms = Alarms::get()?;
    with_world(|world| {
        serve(world.api(), "slow", 97, 1)?;
        let healthy = &alarms.healthy(world)?;
        let hangs = world.hang_agent("node-1", HANGS)?;
        world.api().apply(&slice("slow", &addresses(97, 2)))?;
        let late = alarms.fire(world, &[healthy], &["KplaneProgrammingSlow"])?;
        hangs.join().map_err(|_| anyhow!("no thread"))??;
        alarms.none(world, &[healthy, &late]).map(drop)
    })
}

/// A process that owns kplane's table of IPv4: the kernel refuses changes by all others until it ends.
struct Owner {
    _process: Process,
}

impl Owner {
    fn of_table(node: &NetNs) -> Result<Self> {
        let mut nft = Command::new("nft");
        nft.arg("-i").stdin(Stdio::piped()).stdout(Stdio::null());
        let mut process = node.command(nft)?;
        let input = process.stdin.as_mut().context("the input of nft")?;
        // One transaction: the agent has no time to make its own table anew.
        writeln!(
            input,
            "delete table ip kplane; add table ip kplane {{ flags owner; }}"
        )?;
        input.flush()?;
        Ok(Self { _process: process })
    }
}

/// Two agents have the name of one node; a node is frozen for more than a day.
pub(crate) fn alerts_about_names_and_orders_fire_and_end_with_their_causes() -> Result<()> {
    let alarms = Alarms::get()?;
    with_world(|world| {
        let healthy = &alarms.healthy(world)?;
        world.restart_agent_with("node-2", 0, &["--node-name=node-1"])?;
        let taken = alarms.fire(world, &[healthy], &["KplaneNodeNameConflict"])?;
        world.restart_agent("node-2", 1)?;
        // The control plane remembers the other agent for a minute. Other alerts come and end meanwhile.
        let days = alarms.over_days();
        let why = ["--reason", "drill"];
        orders(
            world,
            7466,
            &[&["freeze", "--node", "node-1"][..], &why].concat(),
        )?;
        let frozen = days.fire(world, &[healthy], &["KplaneNodesFrozen"])?;
        orders(world, 7466, &["thaw", "--node", "node-1"])?;
        days.end(world, &[healthy, &frozen], &["KplaneNodesFrozen"])?;
        alarms.none(world, &[healthy, &taken])?;
        days.none(world, &[healthy, &frozen])?;
        world.settle()
    })
}

/// A replica has no room for more agents; it does not see the changes that the other one sees.
pub(crate) fn alerts_about_replicas_fire_and_end_with_their_faults() -> Result<()> {
    let alarms = Alarms::get()?;
    with_world(|world| {
        let healthy = &alarms.healthy(world)?;
        prepare(world, &[MARK])?;
        let flags = [
            "--max-connections=1".to_owned(),
            format!("--own-mark={MARK}"),
        ];
        second_replica(world, &flags)?;
        world.settle()?;
        let control = world.topology.host("control")?.ns().clone();
        let full = alarms.until(world, &[healthy], |firing| {
            // The agent of node-2 has the only place.
            let place = (Ipv4Addr::LOCALHOST, agent_port(1));
            drop(control.run(|| Ok(TcpStream::connect(place)?)));
            firing.contains("KplaneConnectionsRefused")
        })?;
        alarms.none(world, &[healthy, &full])?;

        cut(world, MARK)?;
        serve(world.api(), "unseen", 98, 2)?;
        let apart = alarms.fire(world, &[healthy], &["KplaneReplicasDisagree"])?;
        heal(world)?;
        alarms.none(world, &[healthy, &apart])?;
        second_replica(world, &[])?;
        world.settle()
    })
}

/// Many Services disappear at once, and a second look shows that they are really gone.
pub(crate) fn an_alert_says_that_deletions_are_held() -> Result<()> {
    let alarms = Alarms::get()?;
    with_world(|world| {
        let healthy = &alarms.healthy(world)?;
        many_vanish(world)?;
        let held = alarms.fire(world, &[healthy], &["KplaneDeletionsHeld"])?;
        world.settle()?;
        alarms.end(world, &[healthy, &held], &["KplaneDeletionsHeld"]).map(drop)
    })
}
