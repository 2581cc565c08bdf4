//! Namespaces, threads and processes, and what is left of them.

use std::fs;
use std::net::{Ipv6Addr, UdpSocket};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use kplane_model::Family;
use kplane_rig::client::Probe;
use kplane_rig::load::{Load, Pace};
use kplane_rig::netns::NetNs;
use kplane_rig::sysctl;
use kplane_rig::wait::eventually;

use crate::rig::{DEADLINE, two_nodes};

pub(crate) fn threads_and_commands_run_inside() -> Result<()> {
    let ns = NetNs::new("inside")?;
    let id = || Ok(fs::read_link("/proc/thread-self/ns/net")?);
    let (outside, inside) = (id()?, ns.run(id)?);
    ensure!(inside != outside);
    let guard = ns.enter()?;
    ensure!(id()? == inside);
    drop(guard);
    ensure!(id()? == outside);
    let spawned = ns.spawn(id)?.join();
    ensure!(spawned.is_ok_and(|id| id.is_ok_and(|id| id == inside)));

    let mut readlink = Command::new("readlink");
    readlink.arg("/proc/self/ns/net");
    ensure!(ns.output(readlink)?.trim_end() == inside.to_string_lossy());
    let error = ns.output(Command::new("false"));
    ensure!(error.is_err());
    let mut sleep = Command::new("sleep");
    sleep.arg("60");
    let mut child = ns.command(sleep)?;
    ensure!(child.try_wait()?.is_none());
    let status = child.terminate(DEADLINE)?;
    ensure!(!status.success());

    ns.sysctl(&[("net.ipv4.ip_forward", "1"), ("net.no.such", "1")])?;
    ensure!(ns.run(|| sysctl::get("net.ipv4.ip_forward"))? == "1");
    Ok(())
}

pub(crate) fn dropping_leaves_nothing() -> Result<()> {
    let before = counts()?;
    {
        let topology = two_nodes()?;
        let probe = Probe::tcp(topology.pod("b")?.address(Family::V4, 80)?);
        let load = Load::start(topology.pod("a")?.ns(), probe, Pace::default())?;
        ensure!(counts()? > before);
        drop(topology);
        drop(load);
    }
    // A joined thread stays listed for a moment.
    eventually(DEADLINE, "same threads and files", || match counts() {
        Ok(now) if now == before => Ok(()),
        other => Err(format!("{other:?}, before {before:?}")),
    })?;

    let (near, far) = (NetNs::new("near")?, NetNs::new("far")?);
    let netlink = near.netlink()?;
    netlink.veth("link", &far, "peer")?;
    drop(far);
    eventually(DEADLINE, "the namespace takes its link along", || {
        netlink.index("link").map_or(Ok(()), |_| Err("it is there"))
    })
}

/// The kernel creates the route of an IPv6 address late only at times, so there are many addresses.
pub(crate) fn packets_to_a_new_address_stay_at_home() -> Result<()> {
    let (near, far) = (NetNs::new("near")?, NetNs::new("far")?);
    let netlink = near.netlink()?;
    netlink.veth("link", &far, "peer")?;
    far.netlink()?.up("peer")?;
    near.run(|| {
        for number in 1..=500 {
            let ip = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, number);
            netlink.add_address("link", ip.into(), 128)?;
            let socket = UdpSocket::bind((ip, 0))?;
            socket.set_read_timeout(Some(DEADLINE))?;
            socket.send_to(b"myself", socket.local_addr()?)?;
            let heard = socket.recv(&mut [0; 8]);
            heard.with_context(|| format!("a packet to {ip}, address {number}"))?;
        }
        Ok(())
    })
}

pub(crate) fn a_bridge_keeps_its_address_while_ports_come() -> Result<()> {
    let ns = NetNs::new("bridged")?;
    let netlink = ns.netlink()?;
    netlink.bridge("bridge")?;
    let shown = || {
        let mut show = Command::new("ip");
        show.args(["-brief", "link", "show", "dev", "bridge"]);
        let text = ns.output(show)?;
        let address = text.split_whitespace().nth(2);
        address.map(str::to_owned).context("no address")
    };
    let before = shown()?;
    // One of so many has a lower address than the bridge, but for one run in 2^32.
    for number in 0..32 {
        let port = format!("port{number}");
        netlink.veth(&port, &ns, &format!("peer{number}"))?;
        netlink.attach(&port, "bridge")?;
    }
    ensure!(shown()? == before, "{before} became {}", shown()?);
    Ok(())
}

/// Numbers of threads and open files of this process.
fn counts() -> Result<[usize; 2]> {
    let count = |folder| fs::read_dir(folder).map(Iterator::count);
    Ok([count("/proc/self/task")?, count("/proc/self/fd")?])
}
