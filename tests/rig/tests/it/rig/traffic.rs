//! Servers, load, captures and address translation.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use kplane_model::{Cidr, Family};
use kplane_rig::capture::{Capture, Packet};
use kplane_rig::client::{Outcome, Probe, Protocol};
use kplane_rig::load::{Load, Pace};
use kplane_rig::netns::NetNs;
use kplane_rig::privilege::need_tools;
use kplane_rig::sctp::{self, init_probe};
use kplane_rig::topology::Pod;
use kplane_rig::wait::eventually;

use crate::rig::{DEADLINE, FAMILIES, PROTOCOLS, SHORT, nobody, two_nodes};

pub(crate) fn servers_stop_gracefully() -> Result<()> {
    let mut topology = two_nodes()?;
    let client = topology.pod("a")?.ns().clone();
    let probe = Probe::tcp(topology.pod("b")?.address(Family::V4, 80)?);
    let refused = || match probe.once(&client) {
        Ok(Outcome::Refused) => Ok(()),
        other => Err(format!("{other:?}")),
    };

    let mut session = probe.open(&client)?;
    session.echo(DEADLINE)?;
    thread::scope(|scope| {
        let stopping = scope.spawn(|| {
            let pod = topology.pod_mut("b")?;
            pod.stop(Protocol::Tcp, 80, DEADLINE)
        });
        eventually(DEADLINE, "no new connections", refused)?;
        session.echo(DEADLINE)?;
        drop(session);
        stopping.join().unwrap_or_else(|_| Ok(()))
    })?;

    topology.pod_mut("b")?.serve(Protocol::Tcp, 80)?;
    let mut session = probe.open(&client)?;
    topology.pod_mut("b")?.stop(Protocol::Tcp, 80, Duration::ZERO)?;
    ensure!(matches!(probe.once(&client)?, Outcome::Refused));
    ensure!(session.echo(DEADLINE).is_err(), "closed at once");
    Ok(())
}

/// A process that is being started holds a copy of every socket until its exec.
pub(crate) fn servers_start_and_stop_while_programs_start() -> Result<()> {
    let mut topology = two_nodes()?;
    let client = topology.pod("a")?.ns().clone();
    let probe = Probe::tcp(topology.pod("b")?.address(Family::V4, 80)?);
    let enough = AtomicBool::new(false);
    let start_programs = || -> Result<()> {
        while !enough.load(Ordering::Relaxed) {
            Command::new("true").status()?;
        }
        Ok(())
    };
    let mut start_and_stop = || -> Result<()> {
        for _ in 0..200 {
            for protocol in PROTOCOLS {
                topology.pod_mut("b")?.stop(protocol, 80, Duration::ZERO)?;
            }
            ensure!(matches!(probe.once(&client)?, Outcome::Refused));
            for protocol in PROTOCOLS {
                topology.pod_mut("b")?.serve(protocol, 80)?;
            }
        }
        Ok(())
    };
    thread::scope(|scope| {
        let programs = [(); 3].map(|()| scope.spawn(start_programs));
        let done = start_and_stop();
        enough.store(true, Ordering::Relaxed);
        for program in programs {
            program.join().unwrap_or_else(|_| bail!("panicked"))?;
        }
        done
    })
}

pub(crate) fn load_counts_what_fails() -> Result<()> {
    let mut topology = two_nodes()?;
    let client = topology.pod("a")?.ns().clone();
    for protocol in PROTOCOLS {
        let probe = Probe::new(protocol, topology.pod("b")?.address(Family::V6, 80)?);
        let load = Load::start(&client, probe, Pace::default())?;
        let answered = |n: u64| {
            eventually(DEADLINE, "answers", || match load.report() {
                report if report.ok() >= n => Ok(report),
                report => Err(report.to_string()),
            })
        };
        let report = answered(200)?;
        ensure!(report.lost() == 0, "{report}");

        let pod = topology.pod_mut("b")?;
        pod.stop(protocol, 80, Duration::ZERO)?;
        eventually(DEADLINE, "refusals", || {
            load.report()
                .failed
                .get("refused")
                .copied()
                .filter(|n| *n > 0)
                .ok_or(load.report().to_string())
        })?;
        pod.serve(protocol, 80)?;
        answered(load.report().ok() + 200)?;
        let report = load.stop();
        println!("{protocol}: {report}");
        ensure!(report.latency.count() == report.ok(), "{report}");
        ensure!(report.answered.keys().eq(["b"]), "{report}");
    }
    Ok(())
}

pub(crate) fn sctp_arrives_unchanged() -> Result<()> {
    let topology = two_nodes()?;
    let pods: Vec<_> = topology.pods().map(Pod::ns).collect();
    for family in FAMILIES {
        let (from, to) = (topology.pod("a")?, topology.pod("b")?);
        let dst = to.address(family, 9999)?;
        let outcome = init_probe(from.ns(), &pods, dst, DEADLINE)?;
        let sctp::Outcome::Arrived(arrival) = &outcome else {
            bail!("{outcome:?}");
        };
        ensure!(arrival.pod == "b", "{arrival:?}");
        ensure!(arrival.dst == dst, "{arrival:?}");
        ensure!(arrival.src.ip() == from.address(family, 0)?.ip());
        ensure!(arrival.checksum_valid, "{arrival:?}");
    }
    Ok(())
}

pub(crate) fn sctp_errors_are_told_apart() -> Result<()> {
    let topology = two_nodes()?;
    let (client, node) = (topology.host("client")?, topology.node("node-1")?);
    for family in FAMILIES {
        let dst = nobody(family)?;
        let probe = || init_probe(client.ns(), &[], dst, SHORT);
        ensure!(probe()? == sctp::Outcome::Unreachable);
        client.route(Cidr::single(dst.ip()), node)?;
        ensure!(probe()? == sctp::Outcome::TimedOut);
    }
    need_tools(&["nft"])?;
    nft(
        node.ns(),
        "table inet filter {
           chain c { type filter hook forward priority 0; meta l4proto sctp reject; }
         }",
    )?;
    for family in FAMILIES {
        let outcome = init_probe(client.ns(), &[], nobody(family)?, DEADLINE)?;
        ensure!(outcome == sctp::Outcome::Refused, "{outcome:?}");
    }
    Ok(())
}

/// A little service proxy by hand: what kplane's own suites will do with agents.
pub(crate) fn nat_on_a_node_works() -> Result<()> {
    need_tools(&["nft"])?;
    let topology = two_nodes()?;
    let (client, node) = (topology.host("client")?, topology.node("node-1")?);
    nft(
        node.ns(),
        "table inet nat {
           chain services {
             dnat ip to ip daddr map { 10.96.0.1 : 10.244.2.1, 10.96.0.2 : 10.244.1.1 }
             dnat ip6 to ip6 daddr map { fd96::1 : fd44:0:0:2::1, fd96::2 : fd44:0:0:1::1 }
           }
           chain pre { type nat hook prerouting priority -100; jump services; }
           chain out { type nat hook output priority -100; jump services; }
           chain post { type nat hook postrouting priority 100; ct status dnat masquerade; }
         }",
    )?;
    let pods: Vec<_> = topology.pods().map(Pod::ns).collect();
    let inside = topology.pod("a")?.ns();
    // From `a` to `a` is a hairpin: out to the node and back by the same link.
    let services = [
        (Family::V4, "10.96.0.1", "b"),
        (Family::V4, "10.96.0.2", "a"),
        (Family::V6, "fd96::1", "b"),
        (Family::V6, "fd96::2", "a"),
    ];
    for (family, vip, pod) in services {
        let dst = SocketAddr::new(vip.parse()?, 80);
        client.route(Cidr::single(dst.ip()), node)?;
        for from in [client.ns(), node.ns(), inside] {
            for protocol in PROTOCOLS {
                let reply = Probe::new(protocol, dst).reply(from)?;
                ensure!(reply.name == pod, "{reply:?}");
                ensure!(reply.peer.ip() == node.ip(family)?, "{reply:?}");
            }
            let sctp::Outcome::Arrived(arrival) = init_probe(from, &pods, dst, DEADLINE)? else {
                bail!("no SCTP to {dst} from {from:?}");
            };
            ensure!(arrival.pod == pod && arrival.checksum_valid, "{arrival:?}");
            ensure!(arrival.src.ip() == node.ip(family)?, "{arrival:?}");
        }
    }
    Ok(())
}

pub(crate) fn captures_see_both_directions() -> Result<()> {
    let topology = two_nodes()?;
    let pod = topology.pod("b")?;
    let capture = Capture::open(pod.ns())?;
    let reply = Probe::udp(pod.address(Family::V6, 80)?).reply(topology.pod("a")?.ns())?;
    let packets = capture.drain()?;
    let has = |src, dst, outgoing| {
        let matches =
            |p: &&Packet| (p.src, p.dst, p.protocol, p.outgoing) == (src, dst, 17, outgoing);
        packets.iter().filter(matches).count() == 1
    };
    ensure!(has(reply.peer, reply.local, false), "{packets:?}");
    ensure!(has(reply.local, reply.peer, true), "{packets:?}");
    ensure!(capture.drain()?.is_empty());
    Ok(())
}

fn nft(ns: &NetNs, rules: &str) -> Result<()> {
    let mut command = Command::new("nft");
    command.arg(rules);
    ns.output(command).map(drop)
}
