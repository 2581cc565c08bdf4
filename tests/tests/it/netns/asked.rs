//! What a node's kernel says of one destination, as `kpctl why` asks it: what the backend wrote, and what is left of it
//! when another program has meddled.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use anyhow::{Result, ensure};
use kplane_dataplane::backend::{KernelState, Kind};
use kplane_model::{EndpointAddr, Family, Protocol};

use kplane_tests::support::nft::nft;
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{At, Setup, Svc, World, cidrs, ep, ipvs, svc};

const PLACES: [At; 3] = [At::ClusterIp, At::ExternalIp, At::NodePort];

/// Returns what the kernel of node-1 says.
fn ask(world: &World, service: &Svc, at: At, family: Family) -> Result<KernelState> {
    world.look_up(1, service.address(at, family, 1), Protocol::Tcp)
}

fn addresses(endpoints: &[EndpointAddr]) -> BTreeSet<SocketAddr> {
    endpoints.iter().map(|to| SocketAddr::new(to.ip, to.port)).collect()
}

pub(crate) fn a_kernel_says_what_it_does() -> Result<()> {
    let served = svc(1).everywhere().endpoints(["a", "b", "c"].map(ep));
    let unserved = svc(2).everywhere();
    let elsewhere = svc(3).everywhere().external_local().endpoints([ep("c")]);
    let guarded = svc(4)
        .reached(At::LoadBalancer)
        .ranges(cidrs(&["192.0.2.0/24", "fd99::/64"])?)
        .endpoints([ep("a")]);
    let all = [&served, &unserved, &elsewhere, &guarded].map(Svc::clone);
    let world = World::serving(Setup::PodRanges, &all)?;
    let ipvs = UnderTest::current()? == UnderTest::Ipvs;
    for family in Family::ALL {
        for at in PLACES {
            let state = ask(&world, &served, at, family)?;
            let same = addresses(&state.endpoints) == served.targets(family, None);
            ensure!(same && state.inside.is_none(), "{at:?}: {state:?}");
            ensure!(
                !state.refuses && !state.drops && !state.guarded,
                "{state:?}"
            );
            let state = ask(&world, &unserved, at, family)?;
            ensure!(
                state.endpoints.is_empty() && state.refuses,
                "{at:?}: {state:?}"
            );
        }
        let state = ask(&world, &elsewhere, At::ExternalIp, family)?;
        let theirs = elsewhere.targets(family, None);
        if ipvs {
            // A29: endpoints of other nodes serve.
            ensure!(addresses(&state.endpoints) == theirs, "{state:?}");
        } else {
            let inside = state.inside.as_deref().unwrap_or_default();
            ensure!(addresses(inside) == theirs, "{state:?}");
            ensure!(state.endpoints.is_empty() && state.drops, "{state:?}");
        }
        let state = ask(&world, &guarded, At::LoadBalancer, family)?;
        ensure!(state.guarded && !state.endpoints.is_empty(), "{state:?}");
        let state = ask(&world, &svc(9), At::ClusterIp, family)?;
        ensure!(state == KernelState::default(), "{state:?}");
    }
    Ok(())
}

/// The guard goes and the rest stays; then everything goes.
pub(crate) fn a_kernel_says_what_others_have_left() -> Result<()> {
    let guarded = svc(1)
        .reached(At::LoadBalancer)
        .ranges(cidrs(&["192.0.2.0/24"])?)
        .endpoints([ep("a")]);
    let world = World::serving(Setup::PodRanges, std::slice::from_ref(&guarded))?;
    let asked = || ask(&world, &guarded, At::LoadBalancer, Family::V4);
    let state = asked()?;
    ensure!(state.guarded && state.endpoints.len() == 1, "{state:?}");
    meddle(&world, true)?;
    let state = asked()?;
    ensure!(!state.guarded && state.endpoints.len() == 1, "{state:?}");
    meddle(&world, false)?;
    let state = asked()?;
    ensure!(state == KernelState::default(), "{state:?}");
    Ok(())
}

/// Removes what leaves senders out, or everything, from node-1 as another program would.
fn meddle(world: &World, guard: bool) -> Result<()> {
    let node = world.node(1)?;
    let tool = match UnderTest::current()? {
        UnderTest::IptablesLegacy => "iptables-legacy",
        _ => "iptables-nft",
    };
    match (UnderTest::current()?.kind(), guard) {
        (Kind::Nftables, true) => nft(node, "flush set ip kplane firewall-services"),
        (Kind::Nftables, false) => nft(node, "flush ruleset"),
        (Kind::Ipvs, true) => ipvs::run(node, "ipset flush KUBE-LOAD-BALANCER-FW"),
        (Kind::Ipvs, false) => {
            ipvs::run(node, "ipset flush")?;
            ipvs::run(node, "ipvsadm -C")
        }
        (_, true) => ipvs::run(node, &format!("{tool} -F KUBE-PROXY-FIREWALL")),
        (_, false) => {
            ipvs::run(node, &format!("{tool} -F"))?;
            ipvs::run(node, &format!("{tool} -t nat -F"))
        }
    }
    .map(drop)
}
