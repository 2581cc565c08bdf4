//! A world whose nodes are programmed by one of the two proxies.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use kplane_model::{Cidr, Family};
use kplane_tests::client::{Probe, Protocol};
use kplane_tests::echo::Server;
use kplane_tests::process::Process;
use kplane_tests::topology::LINK;
use kplane_tests::wait::eventually;

use crate::api::Api;
use crate::fate::Packet;
use crate::look::Scene;
use crate::proxy::{Configuration, Programs, Proxy};
use crate::support::model::SECOND_TARGET;
use crate::support::{At, Client, TARGET, World, node_name, svc};

/// How soon a proxy must have programmed what the API server has, on a busy machine.
const SYNCED: Duration = Duration::from_secs(60);

/// Nodes with a proxy each.
pub(crate) struct Stand {
    pub(crate) proxy: Proxy,
    // Processes and servers first: they live in the world's namespaces.
    /// With what they say, by number of the node.
    proxies: Vec<(Process, PathBuf)>,
    _outside: Vec<Server>,
    pub(crate) world: World,
}

impl Stand {
    pub(crate) fn open(
        proxy: Proxy,
        api: &Api,
        programs: &Programs,
        configuration: &Configuration,
    ) -> Result<Self> {
        let mut world = World::without_agents()?;
        let second = world.topology.pod_mut("c")?;
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            second.serve(protocol, SECOND_TARGET)?;
        }
        let mut proxies = Vec::new();
        for number in [1, 2] {
            let name = node_name(number);
            let host = world
                .topology
                .add_host_pod(&name, &format!("host-{number}"))?;
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                host.serve(protocol, TARGET)?;
            }
            let ns = world.topology.node(&name)?.ns();
            api.connect(ns)?;
            proxies.push(programs.start(proxy, api, (ns, &name), configuration)?);
        }
        Ok(Self {
            _outside: serve_outside(&world)?,
            proxy,
            proxies,
            world,
        })
    }

    pub(crate) fn scene(&self) -> Scene<'_> {
        Scene {
            net: &self.world.net,
            fabric: self.world.topology.fabric(),
        }
    }

    /// Waits until all nodes serve a Service that was made after everything that counts.
    pub(crate) fn wait(&self, sentinel: u16) -> Result<()> {
        let to = svc(sentinel).address(At::ClusterIp, Family::V4, 1);
        for (number, (_, log)) in (1..).zip(&self.proxies) {
            let what = format!(
                "{} on node-{number} serves the last Service",
                self.proxy.name()
            );
            let ns = self.world.node(number)?;
            let probe = Probe::tcp(to).timeout(Duration::from_millis(200));
            let log = || format!("its last words: {}", last_words(log));
            eventually(SYNCED, &what, || probe.reply(ns)).with_context(log)?;
        }
        Ok(())
    }

    /// Gives node-1 the load-balancer addresses from which packets come.
    pub(crate) fn add_sources(&self, packets: &[Packet]) -> Result<()> {
        let node = self.world.topology.node("node-1")?;
        let mut sources: Vec<_> = packets.iter().map(|p| p.question.source).collect();
        sources.sort_unstable();
        sources.dedup();
        for ip in sources {
            node.netlink()
                .add_address(LINK, ip, Cidr::single(ip).prefix_len())?;
        }
        Ok(())
    }
}

/// Servers that are no pods, for endpoints outside of the cluster.
fn serve_outside(world: &World) -> Result<Vec<Server>> {
    let client = world.topology.host("client")?.ns();
    let mut servers = Vec::new();
    for family in Family::ALL {
        let address = SocketAddr::new(Client::Outside.source(family), TARGET);
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            let echo = world.topology.echo();
            servers.push(echo.serve(client, "outside", protocol, address)?);
        }
    }
    Ok(servers)
}

/// The end of a log.
fn last_words(log: &Path) -> String {
    /// Lines that say enough.
    const LINES: usize = 8;
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}
