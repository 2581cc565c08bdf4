//! What agents say about their kernel's memory: clients of session affinity, in every mode.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::slice;
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use kplane_dataplane::backend::{AffinityClient, AffinityPort, Kind};
use kplane_model::{EndpointAddr, Family, Protocol};

use kplane_tests::support::Agent;
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{At, Client, Setup, Svc, World, ep, hit, svc};

const TIMEOUT_S: u32 = 10_800;

/// The ServicePort of TCP, as the control plane describes it in a question.
fn port(service: &Svc, family: Family) -> Result<AffinityPort> {
    let mut keys = service
        .published()
        .into_iter()
        .map(|(key, _)| key)
        .filter(|key| key.family == family && key.protocol == Protocol::Tcp);
    let key = keys.next().ok_or_else(|| anyhow!("no port"))?;
    let at = service.address(At::ClusterIp, family, 1);
    let endpoints = service.targets(family, None).into_iter();
    Ok(AffinityPort {
        key,
        addresses: vec![at.ip()],
        port: at.port(),
        node_port: None,
        endpoints: endpoints.map(EndpointAddr::from).collect(),
    })
}

fn known(
    world: &World,
    port: &AffinityPort,
    client: Option<Client>,
) -> Result<Vec<AffinityClient>> {
    let kind = UnderTest::current()?.kind();
    let client = client.map(|client| client.source(port.key.family));
    let proxy = world.agents.first().and_then(Agent::proxy);
    let ask = || {
        let ports = slice::from_ref(port);
        let known = kind.remembered(proxy.as_deref(), ports, client);
        known.map_err(|error| anyhow!("{error}"))
    };
    Ok(world.node(1)?.run(ask)?.clients)
}

/// Two clients are remembered with their endpoints.
pub(crate) fn a_client_is_listed_with_its_endpoint() -> Result<()> {
    let service = svc(1).sticky(TIMEOUT_S).endpoints(["a", "b", "c"].map(ep));
    let world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let kind = UnderTest::current()?.kind();
    for family in Family::ALL {
        let (to, port) = (
            service.address(At::ClusterIp, family, 1),
            port(&service, family)?,
        );
        ensure!(known(&world, &port, None)?.is_empty());
        let mut homes = BTreeSet::new();
        for client in [Client::PodHere, Client::Outside] {
            let (home, _) = hit(&world.net, client, Protocol::Tcp, to)?;
            homes.insert((client.source(family), home));
            let said: Vec<_> = known(&world, &port, Some(client))?
                .iter()
                .map(|one| (one.client, one.endpoint))
                .collect();
            let home = EndpointAddr::from(home);
            ensure!(said == [(client.source(family), Some(home))], "{said:?}");
        }
        let all = known(&world, &port, None)?;
        let said = all.iter().filter_map(|one| {
            let at = one.endpoint?;
            Some((one.client, SocketAddr::new(at.ip, at.port)))
        });
        ensure!(said.collect::<BTreeSet<_>>() == homes, "{all:?}");
        let most = Duration::from_secs(TIMEOUT_S.into());
        let timed = |one: &AffinityClient| one.expires.is_some_and(|left| left <= most);
        ensure!(kind == Kind::Iptables || all.iter().all(timed), "{all:?}");
        ensure!(known(&world, &port, Some(Client::PodThere))?.is_empty());
    }
    Ok(())
}
