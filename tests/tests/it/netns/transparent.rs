//! Endpoints that see the client's address through the userspace proxy (U51, `--userspace-transparent`).

use std::net::IpAddr;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use kplane_dataplane::backend::Verification;
use kplane_model::{Family, Protocol, Proxied};

use kplane_tests::support::{At, Client, Seen, Setup, Svc, World, ask, ep, svc};

const PROTOCOLS: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];

fn asking(mut service: Svc) -> Svc {
    service.proxied = Some(Proxied::default());
    service
}

fn world(services: &[Svc]) -> Result<World> {
    let mut world = World::new(Setup::PodRanges)?;
    let first = world.first()?;
    first.backend_settings.userspace.transparent = true;
    first.restart()?;
    first.replace(services)?;
    Ok(world)
}

/// Asks, and returns the address that the endpoint saw.
fn seen(
    world: &World,
    client: Client,
    protocol: Protocol,
    service: &Svc,
    (at, family): (At, Family),
) -> Result<IpAddr> {
    let to = service.address(at, family, 1);
    match ask(&world.net, client, protocol, to)? {
        Seen::Hit { source, .. } => Ok(source),
        seen => bail!("{client:?} to {protocol} {to}: {seen}"),
    }
}

/// Pods and machines outside keep their address, whatever address of the Service they use; hairpins and processes of the
/// node reach their endpoint as well. An endpoint on another node sees this node, whose answers would not come here.
pub(crate) fn u16_u51_endpoints_on_this_node_see_the_clients_address() -> Result<()> {
    let here = asking(svc(1).everywhere().endpoints([ep("a")]));
    let there = asking(svc(2).everywhere().endpoints([ep("c")]));
    let mut world = world(&[here.clone(), there.clone()])?;
    for family in Family::ALL {
        for protocol in PROTOCOLS {
            for at in [At::ClusterIp, At::NodePort, At::LoadBalancer] {
                for client in [Client::PodHere, Client::Outside] {
                    let source = seen(&world, client, protocol, &here, (at, family))?;
                    ensure!(
                        source == client.source(family),
                        "{client:?} to {protocol} {at:?}: {source}"
                    );
                }
                for client in [Client::Endpoint, Client::Node] {
                    seen(&world, client, protocol, &here, (at, family))?;
                }
            }
            let place = (At::ClusterIp, family);
            let source = seen(&world, Client::PodHere, protocol, &there, place)?;
            ensure!(source != Client::PodHere.source(family), "{source}");
        }
    }
    let proxy = world.first()?.proxy().context("no proxy")?;
    ensure!(proxy.totals().0.opened > 0, "the kernel has served");
    Ok(())
}

/// What leads answers to the proxy comes back if another program removes it, and goes with `--cleanup`.
pub(crate) fn u51_the_delivery_of_answers_is_repaired() -> Result<()> {
    let service = asking(svc(1).everywhere().endpoints([ep("a")]));
    let mut world = world(std::slice::from_ref(&service))?;
    for (family, word) in [(Family::V4, "-4"), (Family::V6, "-6")] {
        let place = (At::ClusterIp, family);
        world.node(1)?.run(|| {
            let mut ip = Command::new("ip");
            let deleted = ip.args([word, "rule", "delete", "table", "27504"]).status()?;
            ensure!(deleted.success(), "there is no rule");
            Ok(())
        })?;
        let lost = seen(&world, Client::PodHere, Protocol::Tcp, &service, place);
        ensure!(lost.is_err(), "{family}: the rule does nothing");
        let verified = world.first()?.verify(family)?;
        let is_repaired =
            matches!(&verified, Verification::Repaired(what) if what.contains("27504"));
        ensure!(is_repaired, "{verified:?}");
        let source = seen(&world, Client::PodHere, Protocol::Tcp, &service, place)?;
        ensure!(source == Client::PodHere.source(family), "{source}");
        ensure!(world.first()?.verify(family)? == Verification::Equal);
    }
    Ok(())
}
