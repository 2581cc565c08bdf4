//! Alerts in real faults: what Prometheus says of the metrics that control planes and agents export before, during and after
//! each.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use kplane_tests::cluster::objects;
use kplane_tests::netns::NetNs;
use kplane_tests::process::Process;
use serde_json::json;

use crate::cluster::faults::{addresses, many_vanish, serve, slice};
use crate::cluster::freeze::orders;
use crate::cluster::replicas::{cut, heal, prepare};
use crate::cluster::support::alarms::Alarms;
use crate::cluster::support::with_world;
use crate::cluster::support::world::{ACCOUNT, BINDING, NAMESPACE, World, agent_port, grant};

/// A port for health checks that another program takes first. It is one of those that the API server gives no Service
/// that asks for none (KEP-3668): other Services have random ones.
const HEALTH_PORT: u16 = 30_012;
/// The mark of the second replica's connections to the API server.
const MARK: u32 = 0x58;

pub(crate) fn alerts_fire_in_real_faults_and_end_with_them() -> Result<()> {
    let Some(alarms) = Alarms::get()? else {
        return Ok(());
    };
    with_world(|world| {
        world.settle()?;
        // A moment at which a kernel is behind would last for hours.
        let healthy = alarms.until(world, &[], BTreeSet::is_empty)?;

        world.stop_agent("node-1");
        let lost = alarms.until(world, &[&healthy], |firing| {
            firing.contains("KplaneAgentLost") && firing.contains("KplaneNodeWithoutAgent")
        })?;
        world.restart_agent("node-1", 0)?;
        alarms.until(world, &[&healthy, &lost], BTreeSet::is_empty)?;

        world.api().delete("ClusterRoleBinding", BINDING)?;
        // Open watches go on without rights; new ones need them.
        world.cluster.kill_apiserver()?;
        world.cluster.start_apiserver()?;
        let refused = alarms.until(world, &[&healthy], |firing| {
            firing.contains("KplaneSourceRefused")
        })?;
        second_replica(world, &[])?;
        alarms.until(world, &[&healthy], |firing| {
            firing.contains("KplaneReplicaNotReady")
        })?;
        grant(&world.cluster)?;
        world.settle()?;
        alarms.until(world, &[&healthy, &refused], |firing| {
            !firing.contains("KplaneSourceRefused") && !firing.contains("KplaneReplicaNotReady")
        })?;

        drop(world.planes.pop());
        let alone = alarms.until(world, &[&healthy], |firing| {
            firing.contains("KplaneReplicaLost")
        })?;
        let kubeconfig = world.cluster.account_kubeconfig(ACCOUNT)?;
        world.planes.clear();
        let none = alarms.until(world, &[&healthy], |firing| {
            firing.contains("KplaneControlPlaneAbsent")
        })?;
        for replica in [0, 1] {
            let plane = world.plane(replica, &kubeconfig)?;
            world.planes.push(plane);
        }
        alarms.until(world, &[&healthy, &alone, &none], |firing| {
            !firing.contains("KplaneReplicaLost") && !firing.contains("KplaneControlPlaneAbsent")
        })?;
        world.settle()
    })
}

/// Starts the second replica anew, with further flags.
fn second_replica(world: &mut World, flags: &[String]) -> Result<()> {
    let kubeconfig = world.cluster.account_kubeconfig(ACCOUNT)?;
    drop(world.planes.pop());
    let plane = world.plane_with(1, &kubeconfig, flags)?;
    world.planes.push(plane);
    Ok(())
}

/// Alerts about agents: another program changes the rules again and again; another program has a health check port.
pub(crate) fn alerts_about_agents_fire_and_end_with_their_faults() -> Result<()> {
    let Some(alarms) = Alarms::get()? else {
        return Ok(());
    };
    with_world(|world| {
        world.settle()?;
        let healthy = alarms.until(world, &[], BTreeSet::is_empty)?;
        let node = world.ns("node-1")?.clone();
        let meddle = || {
            let mut nft = Command::new("nft");
            nft.args(["delete", "table", "ip", "kplane"]);
            // The agent may not have repaired the last one yet.
            let _ = node.output(nft);
        };
        let changed = alarms.until(world, &[&healthy], |firing| {
            meddle();
            firing.contains("KplaneRulesChangedByOthers")
        })?;
        world.settle()?;
        alarms.until(world, &[&healthy, &changed], |firing| {
            !firing.contains("KplaneRulesChangedByOthers")
        })?;

        let taken = node.run(|| Ok(TcpListener::bind(("0.0.0.0", HEALTH_PORT))?))?;
        world.api().apply(&objects::service(
            NAMESPACE,
            "checked",
            json!({
                "type": "LoadBalancer", "externalTrafficPolicy": "Local",
                "healthCheckNodePort": HEALTH_PORT,
            }),
        ))?;
        let closed = alarms.until(world, &[&healthy], |firing| {
            firing.contains("KplaneHealthPortsClosed")
        })?;
        drop(taken);
        alarms.until(world, &[&healthy, &closed], |firing| {
            !firing.contains("KplaneHealthPortsClosed")
        })?;
        Ok(())
    })
}

/// The kernel takes nothing while kplane's table belongs to another process. What it takes afterwards is late.
pub(crate) fn alerts_about_a_kernel_that_refuses_fire_and_end_with_it() -> Result<()> {
    const FIRING: [&str; 3] = [
        "KplaneNodesFailing",
        "KplaneFamilyFailing",
        "KplaneKernelsLag",
    ];
    let Some(alarms) = Alarms::get()? else {
        return Ok(());
    };
    with_world(|world| {
        serve(world.api(), "late", 97, 1)?;
        world.settle()?;
        let healthy = alarms.until(world, &[], BTreeSet::is_empty)?;
        let mut owner = Some(Owner::of_table(world.ns("node-1")?)?);
        world.api().apply(&slice("late", &addresses(97, 2)))?;
        let refused = alarms.until(world, &[&healthy], |firing| {
            FIRING.iter().all(|alert| firing.contains(*alert))
        })?;
        let late = alarms.until(world, &[&healthy, &refused], |firing| {
            // The pictures before show no late change yet, and one after it does.
            owner = None;
            firing.contains("KplaneProgrammingSlow")
        })?;
        world.settle()?;
        alarms.until(world, &[&healthy, &refused, &late], BTreeSet::is_empty)?;
        Ok(())
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
    let Some(alarms) = Alarms::get()? else {
        return Ok(());
    };
    with_world(|world| {
        world.settle()?;
        let healthy = alarms.until(world, &[], BTreeSet::is_empty)?;
        world.restart_agent_with("node-2", 0, &["--node-name=node-1"])?;
        let taken = alarms.until(world, &[&healthy], |firing| {
            firing.contains("KplaneNodeNameConflict")
        })?;
        world.restart_agent("node-2", 1)?;
        // The control plane remembers the other agent for a minute. Other alerts come and end meanwhile.
        let days = alarms.over_days();
        let why = ["--reason", "drill"];
        orders(
            world,
            7444,
            &[&["freeze", "--node", "node-1"][..], &why].concat(),
        )?;
        let frozen = days.until(world, &[&healthy], |firing| {
            firing.contains("KplaneNodesFrozen")
        })?;
        orders(world, 7444, &["thaw", "--node", "node-1"])?;
        days.until(world, &[&healthy, &frozen], |firing| {
            !firing.contains("KplaneNodesFrozen")
        })?;
        alarms.until(world, &[&healthy, &taken], BTreeSet::is_empty)?;
        days.until(world, &[&healthy, &frozen], BTreeSet::is_empty)?;
        world.settle()
    })
}

/// A replica has no room for more agents; it does not see the changes that the other one sees.
pub(crate) fn alerts_about_replicas_fire_and_end_with_their_faults() -> Result<()> {
    let Some(alarms) = Alarms::get()? else {
        return Ok(());
    };
    with_world(|world| {
        world.settle()?;
        let healthy = alarms.until(world, &[], BTreeSet::is_empty)?;
        prepare(world, &[MARK])?;
        let flags = [
            "--max-connections=1".to_owned(),
            format!("--own-mark={MARK}"),
        ];
        second_replica(world, &flags)?;
        world.settle()?;
        let control = world.topology.host("control")?.ns().clone();
        let full = alarms.until(world, &[&healthy], |firing| {
            // The agent of node-2 has the only place.
            let place = (Ipv4Addr::LOCALHOST, agent_port(1));
            drop(control.run(|| Ok(TcpStream::connect(place)?)));
            firing.contains("KplaneConnectionsRefused")
        })?;
        alarms.until(world, &[&healthy, &full], BTreeSet::is_empty)?;

        cut(world, MARK)?;
        serve(world.api(), "unseen", 98, 2)?;
        let apart = alarms.until(world, &[&healthy], |firing| {
            firing.contains("KplaneReplicasDisagree")
        })?;
        heal(world)?;
        alarms.until(world, &[&healthy, &apart], BTreeSet::is_empty)?;
        second_replica(world, &[])?;
        world.settle()
    })
}

/// Many Services disappear at once, and a second look shows that they are really gone.
pub(crate) fn an_alert_says_that_deletions_are_held() -> Result<()> {
    let Some(alarms) = Alarms::get()? else {
        return Ok(());
    };
    with_world(|world| {
        world.settle()?;
        let healthy = alarms.until(world, &[], BTreeSet::is_empty)?;
        many_vanish(world)?;
        let held = alarms.until(world, &[&healthy], |firing| {
            firing.contains("KplaneDeletionsHeld")
        })?;
        world.settle()?;
        alarms.until(world, &[&healthy, &held], |firing| {
            !firing.contains("KplaneDeletionsHeld")
        })?;
        Ok(())
    })
}
