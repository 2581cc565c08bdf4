//! A world whose nodes are programmed by one of the two proxies.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use kplane_model::{Cidr, Family};
use kplane_tests::client::{Probe, Protocol, Session};
use kplane_tests::echo::Server;
use kplane_tests::process::Process;
use kplane_tests::process::last_words;
use kplane_tests::sysctl;
use kplane_tests::topology::LINK;
use kplane_tests::wait::eventually;

use crate::conformance::api::Api;
use crate::conformance::proxy::{self, Configuration, Mode};
use kplane_tests::support::fate::{End, Ends, Packet};
use kplane_tests::support::model::SECOND_TARGET;
use kplane_tests::support::play::Scene;
use kplane_tests::support::proxy::Proxy;
use kplane_tests::support::{
    At, Client, PATIENCE, Question, Seen, TARGET, World, ep, node_name, svc,
};

/// How soon a proxy must have programmed what the API server has, on a busy machine.
const SYNCED: Duration = Duration::from_secs(60);

/// Longer than that is worth a line.
const LONG: Duration = Duration::from_secs(10);

/// How soon a proxy must have ended.
const GRACE: Duration = Duration::from_secs(20);
/// Numbers of the nodes.
const NODES: [u8; 2] = [1, 2];

/// A socket, or a choice, that stays.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kept {
    /// A UDP socket or a TCP connection.
    Flow(Question),
    /// The endpoint that a new connection reached.
    Choice(Question),
}

/// What is kept in a world.
enum Held {
    Udp(UdpSocket),
    Tcp(Session),
    Endpoint(SocketAddr),
}

/// Datagrams sent to learn where a flow goes now, and the time between them: what is stale goes
/// within a second or so of a change.
const DATAGRAMS: usize = 4;
const BETWEEN: Duration = Duration::from_millis(500);

/// Nodes with a proxy each.
pub(crate) struct Stand {
    pub(crate) proxy: Proxy,
    pub(crate) mode: Mode,
    // Processes and servers first: they live in the world's namespaces.
    /// With what they say, by number of the node.
    proxies: Vec<(Process, PathBuf)>,
    _outside: Vec<Server>,
    held: BTreeMap<String, Held>,
    /// How often ports were changed.
    changes: u16,
    pub(crate) world: World,
}

impl Stand {
    pub(crate) fn open(proxy: Proxy, api: &Api, configuration: &Configuration) -> Result<Self> {
        let mut world = World::without_agents()?;
        let second = world.topology.pod_mut("c")?;
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            second.serve(protocol, SECOND_TARGET)?;
        }
        for number in NODES {
            let name = node_name(number);
            let host = world.topology.add_host_pod(&name, &format!("host-{number}"))?;
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                host.serve(protocol, TARGET)?;
            }
            api.connect(world.topology.node(&name)?.ns())?;
        }
        let mut stand = Self {
            _outside: serve_outside(&world)?,
            proxy,
            mode: configuration.mode,
            proxies: Vec::new(),
            held: BTreeMap::new(),
            changes: 0,
            world,
        };
        stand.start(proxy, api, configuration)?;
        Ok(stand)
    }

    /// Starts a proxy on each node.
    pub(crate) fn start(
        &mut self,
        proxy: Proxy,
        api: &Api,
        configuration: &Configuration,
    ) -> Result<()> {
        self.proxy = proxy;
        for number in NODES {
            let place = (self.world.node(number)?, &*node_name(number));
            let started = proxy::start(proxy, api, place, configuration)?;
            self.proxies.push(started);
        }
        Ok(())
    }

    /// Ends them; what they have programmed stays.
    pub(crate) fn stop(&mut self) -> Result<()> {
        for (process, _) in self.proxies.drain(..) {
            process.terminate(GRACE)?;
        }
        Ok(())
    }

    pub(crate) fn scene(&self) -> Scene<'_> {
        Scene {
            net: &self.world.net,
            fabric: self.world.topology.fabric(),
        }
    }

    /// Waits until all nodes serve a Service that was made after everything that counts.
    pub(crate) fn wait(&self, sentinel: u16) -> Result<()> {
        let families = Family::ALL.map(|family| svc(sentinel).address(At::ClusterIp, family, 1));
        for ((number, (_, log)), to) in
            (1..).zip(&self.proxies).flat_map(|proxy| families.map(|to| (proxy, to)))
        {
            let what = format!(
                "{} on node-{number} serves the last Service",
                self.proxy.name()
            );
            let ns = self.world.node(number)?;
            let probe = Probe::tcp(to).timeout(Duration::from_millis(200));
            let log = || format!("its last words: {}", last_words(log));
            let begin = Instant::now();
            eventually(SYNCED, &what, || probe.reply(ns)).with_context(log)?;
            if begin.elapsed() > LONG {
                println!("{what} after {:.1?}: {}", begin.elapsed(), log());
            }
        }
        Ok(())
    }

    /// Whether each node sends its own connections to the endpoint of its zone, of a Service that has one in
    /// either.
    pub(crate) fn knows_zones(&self, hinted: u16) -> Result<bool> {
        /// A node that does not know its zone takes the other endpoint half of the time.
        const CONNECTIONS: usize = 24;
        let to = svc(hinted).address(At::ClusterIp, Family::V4, 1);
        for (number, pod) in NODES.into_iter().zip(["a", "c"]) {
            let ns = self.world.node(number)?;
            for _ in 0..CONNECTIONS {
                let reply = Probe::tcp(to).timeout(PATIENCE).reply(ns)?;
                if reply.local != ep(pod).address(Family::V4) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// New sockets of all clients take ports that none had since the last few changes: a node goes on
    /// with a flow of UDP from the same port as before a change, as it should.
    pub(crate) fn change_ports(&mut self) -> Result<()> {
        const FIRST: u16 = 5_000;
        const NUMBER: u16 = 15_000;
        let first = FIRST + self.changes % 4 * NUMBER;
        self.changes += 1;
        let range = format!("{first} {}", first + (NUMBER - 1));
        for client in Client::ALL {
            let ns = self.world.net.ns(client)?;
            ns.run(|| sysctl::set_all(&[("net.ipv4.ip_local_port_range", &range)]))?;
        }
        Ok(())
    }

    /// What becomes of sockets that stay open. The first time they are opened.
    pub(crate) fn ask_kept(&mut self, all: &[Kept]) -> Result<Vec<Ends>> {
        let mut fates = vec![Ends::new(); all.len()];
        for datagram in 0..DATAGRAMS {
            for (kept, fate) in all.iter().zip(&mut fates) {
                let is_udp =
                    matches!(kept, Kept::Flow(q) if q.protocol == kplane_model::Protocol::Udp);
                if is_udp || datagram == 0 {
                    *fate = Ends::from([self.ask_one(kept)?]);
                }
            }
            thread::sleep(BETWEEN);
        }
        Ok(fates)
    }

    fn ask_one(&mut self, kept: &Kept) -> Result<End> {
        let (key, question) = (format!("{kept:?}"), kept.question());
        let ns = self.world.net.ns(question.client)?;
        let packet = Packet::new(question);
        if let Some(held) = self.held.get_mut(&key) {
            return Ok(match held {
                Held::Udp(socket) => packet.end(exchange(socket)),
                Held::Tcp(session) => match session.echo(PATIENCE) {
                    Ok(()) => End::Other("still connected".to_owned()),
                    Err(_) => End::Other("broken".to_owned()),
                },
                Held::Endpoint(first) => match question.ask(&self.world.net)? {
                    Seen::Hit { endpoint, .. } if endpoint == *first => {
                        End::Other("the same".to_owned())
                    }
                    other => packet.end(other),
                },
            });
        }
        let (held, end) = match (kept, question.protocol) {
            (Kept::Choice(_), _) => {
                let Seen::Hit { endpoint, .. } = question.ask(&self.world.net)? else {
                    return Ok(End::Other("no choice".to_owned()));
                };
                (Held::Endpoint(endpoint), End::Other("chosen".to_owned()))
            }
            (_, kplane_model::Protocol::Tcp) => {
                let probe = Probe::tcp(question.to).source(question.source);
                (
                    Held::Tcp(probe.open(ns)?),
                    End::Other("connected".to_owned()),
                )
            }
            _ => {
                let socket = ns.run(|| {
                    let socket = UdpSocket::bind(SocketAddr::new(question.source, 0))?;
                    socket.connect(question.to)?;
                    socket.set_read_timeout(Some(PATIENCE))?;
                    Ok(socket)
                })?;
                let end = packet.end(exchange(&socket));
                (Held::Udp(socket), end)
            }
        };
        self.held.insert(key, held);
        Ok(end)
    }

    /// Gives node-1 the load-balancer addresses from which packets come.
    pub(crate) fn add_sources(&self, packets: &[Packet]) -> Result<()> {
        let node = self.world.topology.node("node-1")?;
        let mut sources: Vec<_> = packets.iter().map(|p| p.question.source).collect();
        sources.sort_unstable();
        sources.dedup();
        for ip in sources {
            node.netlink().add_address(LINK, ip, Cidr::single(ip).prefix_len())?;
        }
        Ok(())
    }
}

impl Kept {
    pub(crate) fn question(&self) -> Question {
        match self {
            Self::Flow(question) | Self::Choice(question) => *question,
        }
    }
}

/// A datagram of a flow and its answer: `name peer_ip peer_port local_ip local_port`.
fn exchange(socket: &UdpSocket) -> Seen {
    let mut line = [0; 256];
    let answer = socket.send(b"?").and_then(|_| socket.recv(&mut line));
    let text = match &answer {
        Ok(len) => String::from_utf8_lossy(&line[..*len]).into_owned(),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => return Seen::Refused,
        Err(error) if error.kind() == ErrorKind::PermissionDenied => return Seen::Denied,
        Err(_) => return Seen::Silent,
    };
    let words: Vec<&str> = text.split_whitespace().collect();
    let hit = || {
        let [_, source, _, ip, port] = words[..] else {
            return None;
        };
        let endpoint = SocketAddr::new(ip.parse().ok()?, port.parse().ok()?);
        let source = source.parse().ok()?;
        Some(Seen::Hit { endpoint, source })
    };
    hit().unwrap_or(Seen::Other(text.clone()))
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
