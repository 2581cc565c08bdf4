//! Who is connected to a Service, as agents list it from the kernel's tables and their proxy, in every mode.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::slice;

use anyhow::{Context as _, Result, anyhow, ensure};
use kplane_dataplane::backend::{AffinityPort, Kind};
use kplane_dataplane::connected::{
    ConnectedQuestion, ConnectionTable, GroupKey, GroupSums, connected,
};
use kplane_model::{Family, Protocol};
use kplane_tests::client::Probe;
use kplane_tests::wait::{DEADLINE, eventually};

use kplane_tests::support::Agent;
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{At, Client, Setup, Svc, World, ep, hit, svc};

/// Settings with which the kernel counts bytes and keeps times.
const SETTINGS: [&str; 2] = ["nf_conntrack_acct", "nf_conntrack_timestamp"];

type Groups = Vec<(GroupKey, GroupSums)>;

/// The ServicePorts of a family, as the control plane describes them in a question.
fn ports(service: &Svc, family: Family) -> Vec<AffinityPort> {
    service
        .published()
        .into_iter()
        .filter_map(|(_, of)| of)
        .filter(|of| of.port.key.family == family)
        .map(|of| AffinityPort {
            addresses: vec![of.port.cluster_ip],
            port: of.port.port,
            node_port: of.port.node_port,
            endpoints: Vec::new(),
            key: of.port.key.clone(),
        })
        .collect()
}

fn listed(world: &World, node: u8, question: &ConnectedQuestion) -> Result<Groups> {
    let kind = UnderTest::current()?.kind();
    let agent = world.agents.get(usize::from(node) - 1);
    let proxy = agent.and_then(Agent::proxy);
    let list = || {
        connected(kind, proxy.as_deref(), question, DEADLINE).map_err(|error| anyhow!("{error}"))
    };
    Ok(world.node(node)?.run(list)?.groups)
}

/// Returns the groups of a protocol, as client, endpoint, and number of connections.
fn of(
    groups: &Groups,
    question: &ConnectedQuestion,
    protocol: Protocol,
) -> Vec<(IpAddr, SocketAddr, u64)> {
    let is_of = |key: &GroupKey| question.ports[key.port].key.protocol == protocol;
    groups
        .iter()
        .filter(|(key, _)| is_of(key))
        .map(|(key, sums)| (key.client, key.endpoint, sums.connections()))
        .collect()
}

pub(crate) fn who_is_connected_is_listed_in_every_mode() -> Result<()> {
    let service = svc(1).everywhere().endpoints([ep("c")]);
    let world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    world.node(1)?.run(|| {
        for name in SETTINGS {
            let file = format!("/proc/sys/net/netfilter/{name}");
            fs::write(&file, "1").with_context(|| file)?;
        }
        Ok(())
    })?;
    for family in Family::ALL {
        one_family(&world, &service, family).with_context(|| family.to_string())?;
    }
    Ok(())
}

fn one_family(world: &World, service: &Svc, family: Family) -> Result<()> {
    let question = ConnectedQuestion {
        ports: ports(service, family),
        most: 100,
        ..ConnectedQuestion::default()
    };
    ensure!(listed(world, 1, &question)?.is_empty());
    let open = |client: Client, to| {
        let probe = Probe::tcp(to).source(client.source(family));
        probe.open(world.net.ns(client)?)
    };
    let (pod, outside) = (Client::PodHere, Client::Outside);
    let mut sessions = Vec::new();
    for _ in 0..3 {
        sessions.push(open(pod, service.address(At::ClusterIp, family, 1))?);
    }
    sessions.push(open(outside, service.address(At::NodePort, family, 1))?);
    // What goes to the endpoint itself is not the Service's.
    let endpoint = ep("c").address(family);
    sessions.push(open(pod, endpoint)?);
    hit(
        &world.net,
        pod,
        Protocol::Udp,
        service.address(At::ClusterIp, family, 1),
    )?;

    let all = listed(world, 1, &question)?;
    let pod = pod.source(family);
    let tcp = [(pod, endpoint, 3), (outside.source(family), endpoint, 1)];
    ensure!(of(&all, &question, Protocol::Tcp) == tcp, "{all:?}");
    let udp = [(pod, endpoint, 1)];
    ensure!(of(&all, &question, Protocol::Udp) == udp, "{all:?}");
    facts(&all)?;
    // The endpoint's node leads nothing itself.
    ensure!(listed(world, 2, &question)?.is_empty());

    let only = |clients: &[IpAddr], endpoints: &[IpAddr]| {
        let question = ConnectedQuestion {
            clients: clients.iter().copied().collect(),
            endpoints: endpoints.iter().copied().collect(),
            ..question.clone()
        };
        let groups = listed(world, 1, &question)?;
        anyhow::Ok(of(&groups, &question, Protocol::Tcp))
    };
    ensure!(only(&[pod], &[])? == tcp[..1]);
    ensure!(only(&[], &[endpoint.ip()])? == tcp);
    ensure!(only(&[], &[pod])?.is_empty());

    drop(sessions);
    eventually(DEADLINE, "nobody is connected by TCP", || {
        let groups = listed(world, 1, &question)?;
        ensure!(
            of(&groups, &question, Protocol::Tcp).is_empty(),
            "{groups:?}"
        );
        Ok(())
    })
}

/// Checks what tables say of the connections beside their number.
fn facts(groups: &Groups) -> Result<()> {
    let expected = match UnderTest::current()?.kind() {
        Kind::Ipvs => ConnectionTable::Ipvs,
        Kind::Userspace => ConnectionTable::Proxy,
        _ => ConnectionTable::Conntrack,
    };
    for (key, sums) in groups {
        ensure!(key.table == expected, "{key:?}");
        ensure!(sums.established == sums.connections(), "{sums:?}");
        let has_bytes = sums.bytes.is_some_and(|[to, _]| to > 0);
        match key.table {
            ConnectionTable::Conntrack => {
                ensure!(has_bytes && sums.packets.is_some(), "{sums:?}");
                ensure!(sums.ages.is_some(), "{sums:?}");
            }
            ConnectionTable::Proxy => ensure!(sums.ages.is_some(), "{sums:?}"),
            ConnectionTable::Ipvs => ensure!(sums.ages.is_none(), "{sums:?}"),
        }
    }
    Ok(())
}
