//! Nodes whose links are cut: new connections go elsewhere within seconds, and come back with the links.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kp_controlplane::app::Config;
use kplane_agents::hub::Hub;
use kplane_agents::peers::PeerFlags;
use kplane_agents::suspects::{Connections, Mode};
use kplane_desired_state::admission::Enforce;
use kplane_model::Family;
use kplane_proto::v1 as pb;
use kplane_tests::client::{Outcome, Probe, Protocol, Session};
use kplane_tests::cluster::objects;
use kplane_tests::netns::NetNs;
use kplane_tests::support::cluster::node;
use kplane_tests::support::nft::nft;
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{TARGET, node_ip, node_name, pod_ips};
use kplane_tests::topology::Topology;
use kplane_tests::wait::{DEADLINE, eventually};
use serde_json::{Value, json};
use tokio::sync::oneshot::error::TryRecvError::Empty;

use crate::netns::whole::{CONTROL, CONTROL_PORT, ControlPlane, NodeAgent, connected, write};

/// Where the answer to a question comes.
type Receiver = tokio::sync::oneshot::Receiver<pb::Inspection>;

const STATUS_PORT: u16 = 7466;
const NODES: u8 = 4;
/// The node whose links are cut.
const VICTIM: u8 = 3;
/// Clients that connect one connection after the other, and the time that each waits.
const CLIENTS: usize = 6;
const PATIENCE: Duration = Duration::from_millis(250);

struct Cluster {
    // Agents end before the namespaces do.
    agents: Vec<NodeAgent>,
    planes: Vec<ControlPlane>,
    /// The state of the first replica.
    hub: Arc<Hub>,
    topology: Topology,
    _folder: tempfile::TempDir,
}

/// A Service with an endpoint on each node but the first, and the nodes.
fn manifests() -> Vec<Value> {
    let endpoints = (2..=NODES).map(|number| {
        let [pod, _] = pod_ips(number, 1);
        objects::endpoint(pod, &node_name(number))
    });
    let spec = json!({"clusterIP": "10.96.7.1", "clusterIPs": ["10.96.7.1"]});
    let mut all: Vec<Value> = (1..=NODES).map(node).collect();
    all.push(objects::service("shop", "web", spec));
    all.push(objects::slice("shop", "web-1", "web", endpoints));
    all
}

/// Starts a node's agent with a replica.
fn agent(topology: &Topology, number: u8, replica: &str) -> Result<NodeAgent> {
    let config = connected(number, Path::new(""), [format!("{replica}:{CONTROL_PORT}")])?;
    NodeAgent::start(topology.node(&node_name(number))?.ns(), &config)
}

impl Cluster {
    fn new(mode: Mode) -> Result<Self> {
        Self::with(mode, &[("control", CONTROL[0], None)], |_| 0)
    }

    /// A cluster with replicas on these machines, of which some are nodes. `replica_of` says which replica a node's agent has.
    fn with(
        mode: Mode,
        replicas: &[(&str, &str, Option<u8>)],
        replica_of: fn(u8) -> usize,
    ) -> Result<Self> {
        Self::made_of(&manifests(), replicas, replica_of, |config| {
            config.dead_node = mode;
        })
    }

    fn made_of(
        objects: &[Value],
        replicas: &[(&str, &str, Option<u8>)],
        replica_of: fn(u8) -> usize,
        change: impl Fn(&mut Config),
    ) -> Result<Self> {
        let mut topology = Topology::standard(NODES)?;
        for number in 1..=NODES {
            let node = node_name(number);
            UnderTest::current()?.prepare(topology.node(&node)?.ns())?;
            let pod = topology.add_pod(&node, &format!("on-{number}"), &pod_ips(number, 1))?;
            pod.serve(Protocol::Tcp, TARGET)?;
        }
        let folder = tempfile::tempdir()?;
        write(folder.path(), "all", objects)?;
        let places = replicas
            .iter()
            .map(|(_, ip, _)| format!("{ip}:{STATUS_PORT}").parse().map_err(anyhow::Error::msg));
        let flags = PeerFlags {
            peers: if replicas.len() > 1 { places.collect::<Result<_>>()? } else { Vec::new() },
            ..PeerFlags::default()
        };
        let planes: Vec<_> = replicas
            .iter()
            .map(|(host, _, own_node)| {
                let host = topology.host(host).or_else(|_| topology.node(host))?;
                ControlPlane::start_with(host.ns(), folder.path(), |config| {
                    config.status_listen = Some(([0, 0, 0, 0], STATUS_PORT).into());
                    change(config);
                    config.peers = flags.clone().config(0);
                    config.own_node = own_node.map(|number| node_name(number).into());
                })
            })
            .collect::<Result<_>>()?;
        let agents =
            (1..=NODES).map(|number| agent(&topology, number, replicas[replica_of(number)].1));
        let cluster = Self {
            agents: agents.collect::<Result<_>>()?,
            hub: Arc::clone(&planes[0].hub),
            planes,
            topology,
            _folder: folder,
        };
        cluster.all_are_there()?;
        Ok(cluster)
    }

    /// Waits until all agents are connected and serve the Service.
    fn all_are_there(&self) -> Result<()> {
        eventually(DEADLINE, "all agents serve", || {
            let hubs = self.planes.iter().map(|plane| plane.hub.agents().records());
            let records = hubs.flatten();
            let connected = records.filter(|(_, record)| record.connected).count();
            let serve = self.agents.iter().all(|agent| {
                let report = agent.report();
                report.counts.services == 1 && report.applied == report.held
            });
            if serve && connected == usize::from(NODES) {
                Ok(())
            } else {
                Err(format!("{connected} are connected"))
            }
        })
    }

    /// Waits until exactly these nodes are suspected.
    fn suspects(&self, nodes: &[u8]) -> Result<()> {
        self.suspects_at(&self.hub, nodes)
    }

    fn suspects_at(&self, hub: &Hub, nodes: &[u8]) -> Result<()> {
        eventually(DEADLINE, "the suspected nodes", || {
            let now = hub.suspects().now();
            let wanted: Vec<_> = nodes.iter().map(|node| node_name(*node)).collect();
            if now.nodes.keys().map(ToString::to_string).eq(wanted) {
                Ok(())
            } else {
                Err(format!("{now:?}"))
            }
        })
    }

    /// Waits until the victim counts as dead.
    fn is_dead(&self) -> Result<()> {
        eventually(DEADLINE, "the dead node", || {
            let now = self.hub.suspects().now();
            ensure!(now.dead.contains(&*node_name(VICTIM)), "{now:?}");
            Ok(())
        })
    }

    /// Cuts the link of a machine at the switch, or joins it again. Hosts outside come first.
    fn set_link(&self, port: u8, up: bool) -> Result<()> {
        let (fabric, port) = (self.topology.fabric().netlink()?, format!("port{port}"));
        if up { fabric.up(&port) } else { fabric.down(&port) }
    }

    fn client(&self) -> Result<NetNs> {
        Ok(self.topology.pod("on-1")?.ns().clone())
    }
}

/// The port of a node's link at the switch: the control host and the client have the first two.
const fn port_of(node: u8) -> u8 {
    node + 2
}

/// Connections to the Service all the time.
struct Load {
    stop: Arc<AtomicBool>,
    failed: Arc<Mutex<Option<Instant>>>,
    threads: Vec<std::thread::JoinHandle<Result<()>>>,
}

impl Load {
    fn start(ns: &NetNs) -> Result<Self> {
        let (stop, failed) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None)));
        let threads = (0..CLIENTS)
            .map(|_| {
                let (ns, stop, failed) = (ns.clone(), Arc::clone(&stop), Arc::clone(&failed));
                let run = move || {
                    ns.run(|| {
                        let probe = Probe::tcp(web()).timeout(PATIENCE);
                        while !stop.load(Ordering::Relaxed) {
                            let began = Instant::now();
                            if !matches!(probe.here(), Outcome::Reply(_)) {
                                let mut last = failed
                                    .lock()
                                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                                *last = last.max(Some(began));
                            }
                            std::thread::sleep(Duration::from_millis(5));
                        }
                        Ok(())
                    })
                };
                std::thread::spawn(run)
            })
            .collect();
        Ok(Self {
            stop,
            failed,
            threads,
        })
    }

    fn last_failure(&self) -> Option<Instant> {
        *self.failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn end(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
        }
        Ok(())
    }
}

/// People who ask each agent one slow question after the other, with some more that wait: what `kpctl probe` in several
/// shells does.
struct Curious {
    stop: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Curious {
    fn start(hub: &Arc<Hub>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let ask = |number| {
            let (hub, stop) = (Arc::clone(hub), Arc::clone(&stop));
            // Nobody has the address.
            let question = Arc::new(pb::Inspect {
                attempts: vec!["10.244.1.250:9".to_owned()],
                ..pb::Inspect::default()
            });
            let node = node_name(number).into();
            std::thread::spawn(move || {
                let ask = || hub.agents().ask(&node, Arc::clone(&question));
                let mut asked: VecDeque<_> = (0..4).map(|_| ask()).collect();
                while !stop.load(Ordering::Relaxed) {
                    let is_open = |first: &mut Receiver| matches!(first.try_recv(), Err(Empty));
                    if asked.front_mut().is_some_and(is_open) {
                        std::thread::sleep(Duration::from_millis(2));
                    } else {
                        asked.pop_front();
                        asked.push_back(ask());
                    }
                }
            })
        };
        let threads = (1..=NODES).map(ask).collect();
        Self { stop, threads }
    }

    fn end(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.threads.into_iter().try_for_each(std::thread::JoinHandle::join);
        ended.map_err(|_| anyhow::anyhow!("somebody who asks panicked"))
    }
}

fn web() -> SocketAddr {
    SocketAddr::from(([10, 96, 7, 1], 80))
}

/// Waits until the Service's connections reach a pod.
fn reaches(client: &NetNs, pod: &str) -> Result<()> {
    let probe = Probe::tcp(web()).timeout(PATIENCE);
    eventually(DEADLINE, "connections reach the pod", || {
        let seen = probe.spread(client, 10)?;
        ensure!(seen.contains_key(pod), "{seen:?}");
        Ok(())
    })
}

pub(crate) fn a_node_whose_links_are_cut_is_out_in_seconds_and_back_with_them() -> Result<()> {
    let cluster = Cluster::new(Mode::Act)?;
    let (client, victim) = (cluster.client()?, format!("on-{VICTIM}"));
    reaches(&client, &victim)?;
    let (load, curious) = (Load::start(&client)?, Curious::start(&cluster.hub));
    let cut_at = Instant::now();
    cluster.set_link(port_of(VICTIM), false)?;
    cluster.suspects(&[VICTIM])?;
    // As many good connections in a row as clients would not have by luck.
    let calm = || {
        let last = load.last_failure().context("no connection failed")?;
        ensure!(
            last.elapsed() > Duration::from_secs(2),
            "connections still fail"
        );
        Ok::<_, anyhow::Error>(last)
    };
    let last = eventually(DEADLINE, "no connection leads to the node", calm)?;
    let seconds = last.saturating_duration_since(cut_at).as_secs_f64();
    println!("the last connection to the dead node began {seconds:.2} s after the cut");
    load.end()?;
    curious.end()?;
    cluster.set_link(port_of(VICTIM), true)?;
    cluster.suspects(&[])?;
    reaches(&client, &victim)?;
    cluster.all_are_there()
}

/// Connects begin all the time while a node dies. Those that wait for it reach another with a later SYN.
pub(crate) fn connects_that_wait_for_a_dead_node_reach_another() -> Result<()> {
    // Beyond what a verdict takes on a busy machine, and long before the kernel forgets an entry without an answer.
    const LIMIT: Duration = Duration::from_secs(30);
    const EACH: Duration = Duration::from_millis(5);
    let cluster = Cluster::new(Mode::Act)?;
    let client = cluster.client()?;
    reaches(&client, &format!("on-{VICTIM}"))?;
    let stop = Arc::new(AtomicBool::new(false));
    let (ns, until) = (client, Arc::clone(&stop));
    let load = std::thread::spawn(move || -> Result<Vec<Outcome>> {
        let mut connects = Vec::new();
        while !until.load(Ordering::Relaxed) {
            let (ns, probe) = (ns.clone(), Probe::tcp(web()).timeout(LIMIT).repeating());
            connects.push(std::thread::spawn(move || probe.once(&ns)));
            std::thread::sleep(EACH);
        }
        connects
            .into_iter()
            .map(|connect| connect.join().map_err(|_| anyhow::anyhow!("a client panicked"))?)
            .collect()
    });
    cluster.set_link(port_of(VICTIM), false)?;
    cluster.suspects(&[VICTIM])?;
    stop.store(true, Ordering::Relaxed);
    let outcomes = load.join().map_err(|_| anyhow::anyhow!("the load panicked"))??;
    let took = |outcome: &Outcome| match outcome {
        Outcome::Reply(reply) => Some(reply.took),
        _ => None,
    };
    let failed = outcomes.iter().filter(|outcome| took(outcome).is_none()).count();
    let late = |outcome: &&Outcome| took(outcome) > Some(Duration::from_millis(900));
    let moved = outcomes.iter().filter(late).count();
    println!(
        "of {} connects {moved} moved and {failed} failed",
        outcomes.len()
    );
    ensure!(failed == 0, "{failed} of {} failed", outcomes.len());
    ensure!(moved > 0, "no connect waited for the dead node");
    cluster.set_link(port_of(VICTIM), true)?;
    cluster.suspects(&[])?;
    cluster.all_are_there()
}

/// Connections that were established before the victim died, and what their clients see when they write.
struct Established {
    dead: Vec<Session>,
    living: Vec<Session>,
}

impl Established {
    /// Connects from a Pod and from its node.
    fn open(cluster: &Cluster) -> Result<Self> {
        let (mut dead, mut living) = (Vec::new(), Vec::new());
        let node = cluster.topology.node("node-1")?.ns().clone();
        for ns in [cluster.client()?, node] {
            for _ in 0..24 {
                let session = Probe::tcp(web()).open(&ns)?;
                let is_victim = session.reply().name == format!("on-{VICTIM}");
                if is_victim { dead.push(session) } else { living.push(session) }
            }
        }
        ensure!(dead.len() >= 4, "{} connections to the victim", dead.len());
        Ok(Self { dead, living })
    }

    /// Wants all connections to go on that lead to a living node.
    fn go_on(&mut self) -> Result<()> {
        self.living.iter_mut().try_for_each(|session| session.echo(PATIENCE))
    }
}

/// Writes on connections to the victim at once; returns how many were reset in a time, and after how long the last one was.
fn write_on(sessions: &mut [Session], within: Duration) -> Result<(usize, Duration)> {
    let began = Instant::now();
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let write =
            |session| scope.spawn(move || (Session::echo(session, within), began.elapsed()));
        let writing: Vec<_> = sessions.iter_mut().map(write).collect();
        writing.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
    });
    let (mut reset, mut last) = (0, Duration::ZERO);
    for outcome in outcomes {
        let (written, took) = outcome.map_err(|_| anyhow::anyhow!("a client panicked"))?;
        let error = written.err().context("the victim answered")?;
        let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        if kind == Some(std::io::ErrorKind::ConnectionReset) {
            (reset, last) = (reset + 1, last.max(took));
        }
    }
    Ok((reset, last))
}

/// Time from the verdict in which clients that write know.
const KNOWN: Duration = Duration::from_secs(5);

/// Clients with connections to a node that dies are silent until the node counts as dead, and write then. All others go on.
fn written_after_the_verdict(objects: &[Value], change: impl Fn(&mut Config)) -> Result<()> {
    let cluster = Cluster::made_of(
        objects,
        &[("control", CONTROL[0], None)],
        |_| 0,
        |config| {
            config.dead_node = Mode::Act;
            change(config);
        },
    )?;
    let policies = objects.iter().filter(|object| object["kind"] == "NetworkPolicy").count() as u64;
    for agent in &cluster.agents {
        agent.reports(|report| report.policies[0].policies == policies)?;
    }
    let mut established = Established::open(&cluster)?;
    let cut_at = Instant::now();
    cluster.set_link(port_of(VICTIM), false)?;
    // Some write while nobody knows yet, and repeat that at intervals that double.
    let mut turn = [false, true].into_iter().cycle();
    let mut early: Vec<_> =
        established.dead.extract_if(.., |_| turn.next() == Some(true)).collect();
    let early = std::thread::spawn(move || {
        Ok::<_, anyhow::Error>((write_on(&mut early, DEADLINE)?, early.len()))
    });
    cluster.suspects(&[VICTIM])?;
    cluster.is_dead()?;
    let verdict = cut_at.elapsed().as_secs_f64();
    let (reset, last) = write_on(&mut established.dead, KNOWN)?;
    println!(
        "the node counted as dead {verdict:.2} s after the cut; {reset} of {} connections were reset, the last {:.3} s later",
        established.dead.len(),
        last.as_secs_f64()
    );
    ensure!(reset == established.dead.len(), "{reset} were reset");
    established.go_on()?;
    let issues = cluster.hub.issues();
    ensure!(
        issues.iter().any(|issue| issue.reason.contains("established ones end")),
        "{issues:?}"
    );
    let early = early.join().map_err(|_| anyhow::anyhow!("the clients panicked"))?;
    let ((reset, last), all) = early?;
    println!(
        "of {all} that wrote at the cut {reset} were reset, the last {:.2} s after it",
        last.as_secs_f64()
    );
    ensure!(reset == all, "{reset} of {all} were reset");
    cluster.set_link(port_of(VICTIM), true)?;
    cluster.suspects(&[])?;
    established.go_on()?;
    cluster.all_are_there()?;
    eventually(DEADLINE, "the ended connections in reports", || {
        let reports = cluster.agents.iter().map(NodeAgent::report);
        let ended = reports.flat_map(|report| report.ended).map(|(_, of)| of.dead).sum::<u64>();
        ensure!(
            ended >= (established.dead.len() + all) as u64,
            "{ended} are reported"
        );
        Ok(())
    })
}

pub(crate) fn connections_to_a_dead_node_end_with_the_next_packet() -> Result<()> {
    written_after_the_verdict(&manifests(), |_| {})
}

/// Policies allow everything, and isolate both ends: such a Pod gets no packet from the midst of a connection.
pub(crate) fn connections_to_a_dead_node_end_where_policies_isolate_both_ends() -> Result<()> {
    let mut objects = manifests();
    for number in 1..=NODES {
        let name = node_name(number);
        let mut pod = objects::pod("shop", &format!("on-{number}"), "web", &name);
        let [ip, _] = pod_ips(number, 1);
        pod["status"] = json!({"podIP": ip.to_string()});
        objects.push(pod);
    }
    objects.push(json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "all", "namespace": "shop"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "ingress": [{}], "egress": [{}]},
    }));
    written_after_the_verdict(&objects, |config| {
        config.admission.network_policies = Some(Enforce::On);
    })
}

/// Clients hang that nobody tells.
pub(crate) fn connections_to_a_dead_node_stay_if_they_are_to_be_kept() -> Result<()> {
    let cluster = Cluster::made_of(
        &manifests(),
        &[("control", CONTROL[0], None)],
        |_| 0,
        |config| {
            config.dead_node = Mode::Act;
            config.dead_connections = Connections::Keep;
        },
    )?;
    let mut established = Established::open(&cluster)?;
    cluster.set_link(port_of(VICTIM), false)?;
    cluster.suspects(&[VICTIM])?;
    // Longer than it takes to end them, together with the time to see it.
    let (reset, _) = write_on(&mut established.dead, 3 * KNOWN)?;
    ensure!(reset == 0, "{reset} were reset");
    ensure!(cluster.hub.suspects().now().dead.is_empty(), "a verdict");
    established.go_on()?;
    cluster.set_link(port_of(VICTIM), true)?;
    cluster.suspects(&[])
}

/// A node that is away for less than it takes to count as dead, again and again.
pub(crate) fn connections_outlive_a_node_that_flaps() -> Result<()> {
    let cluster = Cluster::new(Mode::Act)?;
    let mut established = Established::open(&cluster)?;
    for _ in 0..3 {
        cluster.set_link(port_of(VICTIM), false)?;
        cluster.suspects(&[VICTIM])?;
        std::thread::sleep(Duration::from_secs(5));
        ensure!(cluster.hub.suspects().now().dead.is_empty(), "a verdict");
        cluster.set_link(port_of(VICTIM), true)?;
        cluster.suspects(&[])?;
    }
    established.go_on()?;
    established.dead.iter_mut().try_for_each(|session| session.echo(KNOWN))
}

pub(crate) fn to_observe_a_dead_node_changes_nothing() -> Result<()> {
    let cluster = Cluster::new(Mode::Observe)?;
    let revision = || cluster.hub.store().head().borrow().revision;
    let before = revision();
    cluster.set_link(port_of(VICTIM), false)?;
    cluster.suspects(&[VICTIM])?;
    let issues = cluster.hub.issues();
    ensure!(
        issues.iter().any(|issue| issue.reason.contains("--dead-node act")),
        "{issues:?}"
    );
    cluster.set_link(port_of(VICTIM), true)?;
    cluster.suspects(&[])?;
    ensure!(revision() == before, "something was published");
    Ok(())
}

/// A control plane that reaches half of the nodes, or none, suspects nobody.
pub(crate) fn a_control_plane_that_is_cut_off_suspects_nobody() -> Result<()> {
    let cluster = Cluster::new(Mode::Act)?;
    let control = cluster.topology.host("control")?.ns().clone();
    let holds = |wanted: bool| {
        eventually(DEADLINE, "many streams are silent, or none", || {
            let issues = cluster.hub.issues();
            let holds = issues.iter().any(|issue| issue.reason.contains("none is suspected"));
            ensure!(holds == wanted, "{issues:?}");
            Ok(())
        })
    };
    let nodes = [1, 2].map(|node| node_ip(node, Family::V4).to_string()).join(", ");
    let cut = format!(
        "table inet cut {{\nchain in {{\ntype filter hook input priority 0;\nip saddr {{ {nodes} }} drop\n}}\n}}"
    );
    nft(&control, &cut)?;
    holds(true)?;
    nft(&control, "delete table inet cut")?;
    holds(false)?;
    cluster.all_are_there()?;
    cluster.set_link(1, false)?;
    holds(true)?;
    cluster.set_link(1, true)?;
    holds(false)?;
    cluster.all_are_there()?;
    ensure!(
        cluster.hub.suspects().begun() == 0,
        "somebody was suspected"
    );
    Ok(())
}

/// An agent that ends is no dead node: the node's ports answer.
pub(crate) fn a_node_without_its_agent_is_not_dead() -> Result<()> {
    let mut cluster = Cluster::new(Mode::Act)?;
    drop(cluster.agents.remove(usize::from(VICTIM) - 1));
    // Another node dies meanwhile, so that verdicts are known to be reached.
    cluster.set_link(port_of(NODES), false)?;
    eventually(DEADLINE, "two of four are too many at once", || {
        let issues = cluster.hub.issues();
        ensure!(
            issues.iter().any(|issue| issue.reason.contains("none is suspected")),
            "{issues:?}"
        );
        Ok(())
    })?;
    // Later the first one counts no more as lost at the same time.
    cluster.suspects(&[NODES])?;
    ensure!(
        cluster.hub.suspects().begun() == 1,
        "another node was suspected"
    );
    Ok(())
}

/// The replica with the node's stream asks agents of the other one, too, and both suspect the node. Connections of a node
/// whose agent is at the other replica go elsewhere.
pub(crate) fn replicas_suspect_the_same_nodes() -> Result<()> {
    let replicas = [
        ("control", CONTROL[0], None),
        ("client", "172.30.0.3", None),
    ];
    let cluster = Cluster::with(Mode::Act, &replicas, |node| usize::from(node >= VICTIM))?;
    let (client, other) = (cluster.client()?, Arc::clone(&cluster.planes[1].hub));
    reaches(&client, &format!("on-{VICTIM}"))?;
    cluster.set_link(port_of(VICTIM), false)?;
    cluster.suspects_at(&other, &[VICTIM])?;
    cluster.suspects(&[VICTIM])?;
    eventually(DEADLINE, "connections go elsewhere", || {
        let seen = Probe::tcp(web()).timeout(PATIENCE).spread(&client, 30)?;
        ensure!(seen.keys().all(|name| !name.starts_with('!')), "{seen:?}");
        Ok(())
    })?;
    cluster.set_link(port_of(VICTIM), true)?;
    cluster.suspects(&[])?;
    cluster.suspects_at(&other, &[])?;
    reaches(&client, &format!("on-{VICTIM}"))
}

/// Agents that have moved to another replica are neither lost nor many: a node that dies meanwhile is found, and nobody else
/// is suspected.
pub(crate) fn agents_that_move_to_another_replica_are_not_lost() -> Result<()> {
    let replicas = [
        ("control", CONTROL[0], None),
        ("client", "172.30.0.3", None),
    ];
    let mut cluster = Cluster::with(Mode::Act, &replicas, |_| 0)?;
    for node in [VICTIM, NODES] {
        let at = usize::from(node) - 1;
        drop(cluster.agents.remove(at));
        let moved = agent(&cluster.topology, node, replicas[1].1)?;
        cluster.agents.insert(at, moved);
    }
    cluster.all_are_there()?;
    cluster.set_link(port_of(2), false)?;
    let mut held = None;
    eventually(DEADLINE, "the dead node", || {
        let issues = cluster.hub.issues();
        let is_held = |reason: &str| reason.contains("none is suspected");
        held = held.take().or(issues.iter().find(|issue| is_held(&issue.reason)).cloned());
        match cluster.hub.suspects().now().nodes.len() {
            1 => Ok(()),
            number => Err(number.to_string()),
        }
    })?;
    ensure!(held.is_none(), "{held:?}");
    cluster.suspects(&[2])?;
    cluster.set_link(port_of(2), true)?;
    cluster.suspects(&[])?;
    let begun = cluster.planes.iter().map(|plane| plane.hub.suspects().begun());
    ensure!(begun.max() == Some(1), "others were suspected");
    Ok(())
}

/// A node that dies together with the replica that has its stream.
pub(crate) fn a_node_that_dies_with_its_replica_is_found() -> Result<()> {
    let at = node_ip(VICTIM, Family::V4).to_string();
    let name = node_name(VICTIM);
    let replicas = [("control", CONTROL[0], None), (&*name, &*at, Some(VICTIM))];
    let cluster = Cluster::with(Mode::Act, &replicas, |node| usize::from(node == VICTIM))?;
    let hub = Arc::clone(&cluster.hub);
    eventually(DEADLINE, "the other replica is known", || {
        hub.suspects()
            .replicas()
            .contains(&name.as_str().into())
            .then_some(())
            .ok_or("not yet")
    })?;
    let cut_at = Instant::now();
    cluster.set_link(port_of(VICTIM), false)?;
    cluster.suspects(&[VICTIM])?;
    let seconds = cut_at.elapsed().as_secs_f64();
    println!("the node was suspected {seconds:.2} s after the cut");
    cluster.set_link(port_of(VICTIM), true)?;
    cluster.suspects(&[])
}
