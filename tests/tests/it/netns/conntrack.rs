//! UDP flows of clients that keep their source port: they follow their Service (F1 to F5).
//!
//! All endpoints go on serving whatever their Service says, so a flow that was not deleted is
//! answered by the wrong one.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use kplane_dataplane::backend::Settings;
use kplane_dataplane::conntrack::ConntrackTotals;
use kplane_dataplane::plan::NodeSettings;
use kplane_desired_state::publish::{Cursor, Store};
use kplane_model::{Family, Protocol};
use kplane_netlink::NfSocket;
use kplane_netlink::conntrack::{Flow, Selection};
use kplane_tests::client::{self, Probe, uninterrupted};
use kplane_tests::netns::NetNs;
use kplane_tests::privilege::need_tools;
use kplane_tests::wait::{DEADLINE, eventually};

use kplane_tests::plane::{EPOCH, collect, engine, publish, submit};
use kplane_tests::support::nft::nft;
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{
    At, Client, Setup, Svc, TARGET, World, cidrs, ep, node_ip, node_name, svc,
};

/// How long a client waits for a connection: beyond its fourth SYN.
const CONNECT: Duration = Duration::from_secs(10);
/// How long an answer is waited for.
const PATIENCE: Duration = Duration::from_millis(200);

/// A UDP client that keeps its source port.
pub(crate) struct Caller {
    socket: UdpSocket,
    what: String,
}

impl Caller {
    fn new(world: &World, client: Client, to: SocketAddr) -> Result<Self> {
        let source = SocketAddr::new(client.source(Family::of(to.ip())), 0);
        let socket = world.net.ns(client)?.run(|| {
            let socket = UdpSocket::bind(source)?;
            socket.connect(to)?;
            socket.set_read_timeout(Some(PATIENCE))?;
            Ok(socket)
        })?;
        let what = format!("{client:?} from {} to {to}", socket.local_addr()?);
        Ok(Self { socket, what })
    }

    /// One caller for each of these clients, places and both families.
    pub(crate) fn all(
        world: &World,
        service: &Svc,
        clients: &[Client],
        places: &[At],
    ) -> Result<Vec<Self>> {
        let mut callers = Vec::new();
        for client in clients {
            for at in places {
                for family in Family::ALL {
                    let to = service.address(*at, family, client.node());
                    callers.push(Self::new(world, *client, to)?);
                }
            }
        }
        Ok(callers)
    }

    /// The name of the pod that answers, or what else happens after a `!`.
    fn ask(&self) -> Result<String> {
        let mut line = [0; 256];
        match self
            .socket
            .send(b"?")
            .and_then(|_| uninterrupted(|| self.socket.recv(&mut line)))
        {
            Ok(len) => {
                let line = String::from_utf8_lossy(line.get(..len).unwrap_or_default());
                let name = line.split_whitespace().next();
                Ok(name.context("an empty answer")?.to_owned())
            }
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok("!silent".to_owned()),
                ErrorKind::ConnectionRefused | ErrorKind::PermissionDenied => {
                    Ok("!refused".to_owned())
                }
                _ => Err(error).with_context(|| self.what.clone()),
            },
        }
    }

    /// Wants this answer, sooner or later.
    pub(crate) fn reaches(&self, whom: &str) -> Result<()> {
        eventually(DEADLINE, &format!("{}: {whom}", self.what), || {
            match self.ask() {
                Ok(seen) if seen == whom => Ok(()),
                Ok(seen) => Err(seen),
                Err(error) => Err(format!("{error:#}")),
            }
        })
    }

    /// Wants no answer any more, sooner or later.
    fn reaches_nobody(&self) -> Result<()> {
        eventually(DEADLINE, &format!("{}: nobody", self.what), || {
            match self.ask() {
                Ok(seen) if seen.starts_with('!') => Ok(()),
                Ok(seen) => Err(seen),
                Err(error) => Err(format!("{error:#}")),
            }
        })
    }
}

fn all_reach(callers: &[Caller], whom: &str) -> Result<()> {
    callers.iter().try_for_each(|caller| caller.reaches(whom))
}

/// The UDP flows of a namespace.
fn flows(ns: &NetNs, family: Family) -> Result<Vec<Flow>> {
    flows_of(ns, Protocol::Udp, family)
}

fn flows_of(ns: &NetNs, protocol: Protocol, family: Family) -> Result<Vec<Flow>> {
    ns.run(|| {
        let mut flows = Vec::new();
        NfSocket::open()?.dump_each(Selection::all_of(protocol).request(family), |message| {
            flows.extend(Flow::parse(message).filter(|flow| flow.protocol == protocol));
        })?;
        Ok(flows)
    })
}

/// A world that deletes stale flows.
fn world(services: &[Svc]) -> Result<World> {
    let mut world = World::new(Setup::PodRanges)?;
    for agent in &mut world.agents {
        agent.clean_conntrack()?;
    }
    world.replace(services)?;
    Ok(world)
}

/// Waits until node-1 has looked at all changes twice. Meanwhile the second look at earlier changes of TCP may come, which
/// counts as well, but only once.
fn settled(world: &mut World) -> Result<()> {
    four_more_looks(world)?;
    four_more_looks(world)
}

fn four_more_looks(world: &mut World) -> Result<()> {
    let looks = |world: &mut World| -> Result<u64> {
        let counts = &world.first()?.conntrack_counts;
        Ok(counts.totals().iter().map(ConntrackTotals::looks).sum())
    };
    // A change that both families look at, now and a second later: another one each time, since
    // nobody looks after a change to what is there already.
    static NEXT: AtomicU16 = AtomicU16::new(1_000);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let other = svc(number).only(Protocol::Udp).reached(At::LoadBalancer);
    let before = looks(world)?;
    world.update(slice::from_ref(&other))?;
    eventually(DEADLINE, "four more looks", || match looks(world) {
        Ok(now) if now >= before + 4 => Ok(()),
        Ok(now) => Err(format!("{}", now - before)),
        Err(error) => Err(format!("{error:#}")),
    })
}

const EVERYBODY: [Client; 4] = [
    Client::Outside,
    Client::PodHere,
    Client::PodThere,
    Client::Node,
];

/// F1, F2: from everywhere, at every kind of address.
pub(crate) fn f1_f2_a_client_moves_when_its_endpoint_goes() -> Result<()> {
    let service = svc(1).everywhere();
    let with = |pods: &[&str]| service.clone().endpoints(pods.iter().map(|pod| ep(pod)));
    let mut world = world(&[with(&["a"])])?;
    let callers = Caller::all(&world, &service, &EVERYBODY, &At::ALL)?;
    all_reach(&callers, "a")?;
    world.update(&[with(&["b"])])?;
    all_reach(&callers, "b")?;
    // Two go, one comes, and another Service stays as it is.
    world.update(&[with(&["c"]), svc(2).endpoints([ep("a")])])?;
    all_reach(&callers, "c")
}

/// F2: what serves keeps its flows, also while it is shut down and others are ready; hairpin flows
/// are flows as any other.
pub(crate) fn f2_serving_endpoints_keep_their_flows() -> Result<()> {
    let service = svc(1).everywhere();
    let mut world = world(&[service.clone().endpoints([ep("a"), ep("c")])])?;
    // Node-2 knows of `a` only what the cluster shares.
    let clients = [Client::Outside, Client::Endpoint, Client::PodThere];
    let mut on_a = Vec::new();
    let mut on_c = Vec::new();
    eventually(DEADLINE, "callers on both endpoints", || -> Result<()> {
        for caller in Caller::all(&world, &service, &clients, &[At::ClusterIp, At::NodePort])? {
            match &*caller.ask()? {
                "a" => on_a.push(caller),
                "c" => on_c.push(caller),
                other => bail!("{}: {other}", caller.what),
            }
        }
        ensure!(on_a.len() > 8 && on_c.len() > 8);
        Ok(())
    })?;
    world.update(&[service.clone().endpoints([ep("a").draining(), ep("b")])])?;
    all_reach(&on_c, "b")?;
    settled(&mut world)?;
    for caller in &on_a {
        let seen = caller.ask()?;
        ensure!(seen == "a", "{}: {seen}", caller.what);
    }
    world.update(&[service.endpoints([ep("b")])])?;
    all_reach(&on_a, "b")
}

/// F2, A15: a server in the node's own namespace answers from the address that node ports have.
pub(crate) fn f2_flows_to_a_server_on_the_node_itself() -> Result<()> {
    let service = svc(1).everywhere();
    let mut on_node = ep("a");
    on_node.ips = Family::ALL.map(|family| node_ip(1, family));
    let mut world = world(&[service.clone().endpoints([on_node.clone()])])?;
    let server = world.topology.add_host_pod("node-1", "host")?;
    server.serve(client::Protocol::Udp, TARGET)?;
    let callers = Caller::all(&world, &service, &EVERYBODY, &At::ALL)?;
    // Of none of our business: straight to the server.
    let straight = Family::ALL.map(|family| SocketAddr::new(node_ip(1, family), TARGET));
    let strangers: Vec<_> = straight
        .map(|to| Caller::new(&world, Client::Outside, to))
        .into_iter()
        .collect::<Result<_>>()?;
    all_reach(&callers, "host")?;
    all_reach(&strangers, "host")?;
    let kept = flows_to(&world, &everywhere(&service))?;
    let both = service.clone().endpoints([on_node, ep("b")]);
    world.update(&[both, svc(2).endpoints([ep("c")])])?;
    world.update(&[svc(2)])?;
    settled(&mut world)?;
    let now = flows_to(&world, &everywhere(&service))?;
    ensure!(now == kept, "flows were deleted that are right");
    // What node-2 sends there is straight to node-1, too.
    let from_outside = |world: &World| -> Result<BTreeSet<Identity>> {
        let mut flows = flows_to(world, &straight)?;
        flows.retain(|(from, ..)| from.ip() == Client::Outside.source(Family::of(from.ip())));
        Ok(flows)
    };
    let kept = from_outside(&world)?;
    world.update(&[service.clone().endpoints([ep("b")])])?;
    all_reach(&callers, "b")?;
    settled(&mut world)?;
    let now = from_outside(&world)?;
    ensure!(kept.len() == 2 && now == kept, "{kept:?} became {now:?}");
    all_reach(&strangers, "host")
}

/// F2: Local policies are for new flows.
pub(crate) fn f2_local_policies_do_not_cut_flows() -> Result<()> {
    let service = svc(1).everywhere();
    let far = service.clone().endpoints([ep("c")]);
    let mut world = world(&[far])?;
    let callers = Caller::all(&world, &service, &[Client::Outside], &At::ALL)?;
    all_reach(&callers, "c")?;
    let local = service.external_local().internal_local();
    world.update(&[local.clone().endpoints([ep("a"), ep("c")])])?;
    settled(&mut world)?;
    for caller in &callers {
        let seen = caller.ask()?;
        ensure!(seen == "c", "{}: {seen}", caller.what);
    }
    world.update(&[local.endpoints([ep("a")])])?;
    all_reach(&callers, "a")
}

/// F3, and the case of F4 in which nothing about endpoints changes: a flow that began when its
/// address meant nothing is not translated, until it is deleted.
pub(crate) fn f3_f4_addresses_served_after_the_first_packet() -> Result<()> {
    let mut world = World::new(Setup::PodRanges)?;
    let service = svc(1).endpoints([ep("a")]);
    let callers = |world: &World, at: At| {
        Caller::all(world, &service, &[Client::Outside, Client::PodHere], &[at])
    };
    let all_silent = |callers: &[Caller]| {
        callers.iter().try_for_each(|caller| {
            let seen = caller.ask()?;
            ensure!(seen.starts_with('!'), "{}: {seen}", caller.what);
            Ok(())
        })
    };
    for agent in &mut world.agents {
        agent.clean_conntrack()?;
        // Otherwise what is no Service is dropped in their ranges (A20), and leaves no entry.
        agent.facts.service_cidrs.clear();
    }
    world.replace(&[svc(2).endpoints([ep("b")])])?;
    settled(&mut world)?;
    let cluster_ip = callers(&world, At::ClusterIp)?;
    all_silent(&cluster_ip)?;
    let untranslated = flows(world.node(1)?, Family::V4)?;
    ensure!(
        untranslated.iter().any(|flow| !flow.is_translated()),
        "no flow began before its Service: {untranslated:?}"
    );
    world.update(slice::from_ref(&service))?;
    all_reach(&cluster_ip, "a")?;
    for at in [At::LoadBalancer, At::ExternalIp] {
        let late = callers(&world, at)?;
        all_silent(&late)?;
        world.update(&[service.clone().reached(at)])?;
        all_reach(&late, "a")?;
        // And taken back.
        world.update(slice::from_ref(&service))?;
        late.iter().try_for_each(Caller::reaches_nobody)?;
    }
    all_reach(&cluster_ip, "a")
}

/// F4: before, the packets went to the node itself.
pub(crate) fn f4_node_ports_served_after_the_first_packet() -> Result<()> {
    let service = svc(1).endpoints([ep("a")]);
    let mut world = world(slice::from_ref(&service))?;
    let clients = [Client::Outside, Client::PodHere, Client::PodThere];
    let callers = Caller::all(&world, &service, &clients, &[At::NodePort])?;
    for caller in &callers {
        let seen = caller.ask()?;
        ensure!(seen == "!refused", "{}: {seen}", caller.what);
    }
    settled(&mut world)?;
    world.update(&[service.clone().reached(At::NodePort)])?;
    all_reach(&callers, "a")?;
    world.update(&[service])?;
    callers.iter().try_for_each(|caller| caller.reaches("!refused"))
}

/// F4: nothing is left to which a flow could be moved, and it ends all the same.
pub(crate) fn f4_a_service_without_endpoints_has_no_flows() -> Result<()> {
    let service = svc(1).everywhere();
    let full = service.clone().endpoints([ep("a")]);
    let mut world = world(slice::from_ref(&full))?;
    let callers = Caller::all(&world, &service, &EVERYBODY, &At::ALL)?;
    all_reach(&callers, "a")?;
    world.update(slice::from_ref(&service))?;
    callers.iter().try_for_each(|caller| caller.reaches("!refused"))?;
    world.update(&[full])?;
    all_reach(&callers, "a")
}

/// F4: with the Service its flows go.
pub(crate) fn f4_a_deleted_service_has_no_flows() -> Result<()> {
    let service = svc(1).everywhere().endpoints([ep("a")]);
    let other = svc(2).everywhere().endpoints([ep("a")]);
    let mut world = world(&[service.clone(), other.clone()])?;
    let callers = Caller::all(&world, &service, &EVERYBODY, &At::ALL)?;
    let others = Caller::all(&world, &other, &EVERYBODY, &At::ALL)?;
    all_reach(&callers, "a")?;
    all_reach(&others, "a")?;
    let kept = flows_to(&world, &everywhere(&other))?;
    ensure!(!kept.is_empty(), "no flows of the other Service");
    world.remove(slice::from_ref(&service))?;
    callers.iter().try_for_each(Caller::reaches_nobody)?;
    settled(&mut world)?;
    let now = flows_to(&world, &everywhere(&other))?;
    ensure!(now == kept, "flows of another Service are gone");
    Ok(())
}

/// What tells a flow from all others; nobody sends packets between two looks at these.
type Identity = (SocketAddr, SocketAddr, Option<u32>);

fn identity(flow: &Flow) -> Identity {
    (flow.original.source, flow.original.destination, flow.id)
}

/// The flows on node-1 to any of these addresses.
fn flows_to(world: &World, places: &[SocketAddr]) -> Result<BTreeSet<Identity>> {
    let mut found = BTreeSet::new();
    for family in Family::ALL {
        let flows = flows(world.node(1)?, family)?;
        let ours = flows.iter().filter(|flow| places.contains(&flow.original.destination));
        found.extend(ours.map(identity));
    }
    Ok(found)
}

fn everywhere(service: &Svc) -> Vec<SocketAddr> {
    At::ALL
        .into_iter()
        .flat_map(|at| Family::ALL.map(|family| service.address(at, family, 1)))
        .collect()
}

/// F5: TCP goes on with an endpoint that is gone from its Service, and UDP beside it does not.
pub(crate) fn f5_tcp_connections_outlive_their_endpoint() -> Result<()> {
    let service = svc(1).everywhere();
    let mut world = world(&[service.clone().endpoints([ep("a")])])?;
    let callers = Caller::all(&world, &service, &EVERYBODY, &At::ALL)?;
    all_reach(&callers, "a")?;
    let mut sessions = Vec::new();
    for client in EVERYBODY {
        for at in At::ALL {
            for family in Family::ALL {
                let to = service.address(at, family, client.node());
                let probe = Probe::tcp(to).source(client.source(family));
                sessions.push(probe.open(world.net.ns(client)?)?);
            }
        }
    }
    world.update(&[service.clone().endpoints([ep("b")])])?;
    all_reach(&callers, "b")?;
    // With IPVS, ours and kube-proxy's, they end with the Service.
    if UnderTest::current()? != UnderTest::Ipvs {
        world.remove(&[service])?;
        callers.iter().try_for_each(Caller::reaches_nobody)?;
    }
    settled(&mut world)?;
    sessions.iter_mut().try_for_each(|session| session.echo(DEADLINE))
}

/// Connects that all wait for an answer.
struct Connects {
    threads: Vec<thread::JoinHandle<Result<(String, Duration)>>>,
}

impl Connects {
    /// Begins one connect for each of these places, from each client. The kernel repeats a SYN after 1, 3 and 7 s.
    fn begin(world: &World, clients: &[Client], places: &[SocketAddr]) -> Result<Self> {
        let mut threads = Vec::new();
        for client in clients {
            for to in places.iter().copied() {
                let (ns, source) = (
                    world.net.ns(*client)?.clone(),
                    client.source(Family::of(to.ip())),
                );
                let connect = move || -> Result<(String, Duration)> {
                    let began = Instant::now();
                    let probe = Probe::tcp(to).source(source).timeout(CONNECT).repeating();
                    Ok((probe.reply(&ns)?.name, began.elapsed()))
                };
                threads.push(thread::spawn(connect));
            }
        }
        Ok(Self { threads })
    }

    /// Waits until the nodes have as many entries without an answer.
    fn wait(&self, world: &World) -> Result<()> {
        eventually(DEADLINE, "all connects wait", || {
            let mut waiting = 0;
            for node in [1, 2] {
                for family in Family::ALL {
                    let flows = flows_of(world.node(node)?, Protocol::Tcp, family)?;
                    let is_half_open = |flow: &&Flow| flow.is_translated() && !flow.is_replied();
                    waiting += flows.iter().filter(is_half_open).count();
                }
            }
            ensure!(waiting >= self.threads.len(), "{waiting}");
            Ok(())
        })
    }

    /// Wants all connects to reach this pod.
    fn reach(self, whom: &str) -> Result<Duration> {
        let mut longest = Duration::ZERO;
        for thread in self.threads {
            let joined = thread.join().map_err(|_| anyhow::anyhow!("a client panicked"))?;
            let (seen, took) = joined?;
            ensure!(seen == whom, "{seen} after {took:?}");
            longest = longest.max(took);
        }
        println!("the longest connect took {longest:?}");
        Ok(longest)
    }
}

/// A pod that is there and answers nothing, as one whose node is dead.
fn silence(world: &World, pod: &str) -> Result<()> {
    let silent = "table inet silent {\nchain in {\ntype filter hook input priority 0;\n\
        meta l4proto tcp drop\n}\n}";
    nft(world.topology.pod(pod)?.ns(), silent).map(drop)
}

/// A connect that waits for a dead endpoint succeeds: its entry goes with the endpoint, and the next SYN reaches another.
pub(crate) fn a_connect_moves_when_its_endpoint_goes() -> Result<()> {
    need_tools(&["nft"])?;
    let service = svc(1).everywhere().only(Protocol::Tcp);
    let with = |pods: &[&str]| service.clone().endpoints(pods.iter().map(|pod| ep(pod)));
    let mut world = world(&[with(&["a"])])?;
    silence(&world, "a")?;
    let connects = Connects::begin(&world, &EVERYBODY, &everywhere(&service))?;
    connects.wait(&world)?;
    world.update(&[with(&["b"])])?;
    connects.reach("b").map(drop)
}

/// The address of a pod that is gone is another tenant's at once: clients that go on trying reach no other Service.
pub(crate) fn an_address_that_comes_back_in_another_service_gets_no_old_connects() -> Result<()> {
    need_tools(&["nft"])?;
    let one = svc(1).everywhere().named("one").only(Protocol::Tcp);
    let two = svc(2).everywhere().named("two").only(Protocol::Tcp);
    let with =
        |service: &Svc, pods: &[&str]| service.clone().endpoints(pods.iter().map(|pod| ep(pod)));
    let mut world = world(&[with(&one, &["a"]), with(&two, &["b"])])?;
    silence(&world, "a")?;
    let connects = Connects::begin(&world, &EVERYBODY, &everywhere(&one))?;
    connects.wait(&world)?;
    world.update(&[with(&one, &["c"])])?;
    world.update(&[with(&two, &["a", "b"])])?;
    let waits = |world: &World| -> Result<bool> {
        let (a, mut any) = (ep("a"), false);
        for node in [1, 2] {
            for family in Family::ALL {
                let flows = flows_of(world.node(node)?, Protocol::Tcp, family)?;
                let is_old =
                    |flow: &&Flow| flow.is_translated() && flow.reply.source == a.address(family);
                any |= flows.iter().any(|flow| is_old(&flow));
            }
        }
        Ok(any)
    };
    // Before the second look.
    let began = Instant::now();
    eventually(DEADLINE, "no connect leads to the address", || {
        ensure!(!waits(&world)?, "still");
        Ok(())
    })?;
    println!("the old entries were gone after {:?}", began.elapsed());
    nft(world.topology.pod("a")?.ns(), "delete table inet silent")?;
    connects.reach("c").map(drop)
}

/// Straight to a pod, or elsewhere to a port number that is a node port: the same flows before and
/// after, and the same answers.
pub(crate) fn flows_that_are_no_services_are_not_touched() -> Result<()> {
    let service = svc(1).everywhere().only(Protocol::Udp);
    let with = |pods: &[&str]| service.clone().endpoints(pods.iter().map(|pod| ep(pod)));
    let mut world = world(&[])?;
    for agent in &mut world.agents {
        // Node ports on all addresses of the node, whichever these are.
        agent.settings.nodeport_addresses = cidrs(&["0.0.0.0/0", "::/0"])?;
    }
    world.replace(&[with(&["a"])])?;
    let (client, node) = (
        world.topology.host("client")?,
        world.topology.node("node-1")?,
    );
    let mut strangers = Vec::new();
    let mut places = Vec::new();
    for family in Family::ALL {
        client.route(World::pod_range(family)?, node)?;
        let ips = ["a", "b"].map(|pod| ep(pod).ips[family as usize]);
        let unused = svc(77).address(At::ExternalIp, family, 1).ip();
        let node_port = service.node_port();
        for to in [
            SocketAddr::new(ips[0], TARGET),
            SocketAddr::new(ips[1], TARGET),
            SocketAddr::new(unused, node_port),
            SocketAddr::new(unused, TARGET),
        ] {
            let stranger = Caller::new(&world, Client::Outside, to)?;
            stranger.ask()?;
            strangers.push(stranger);
            places.push(to);
        }
    }
    let callers = Caller::all(&world, &service, &[Client::Outside], &At::ALL)?;
    all_reach(&callers, "a")?;
    let before = flows_to(&world, &places)?;
    ensure!(before.len() == places.len(), "{before:?}");
    world.update(&[with(&["b"])])?;
    all_reach(&callers, "b")?;
    world.remove(slice::from_ref(&service))?;
    callers.iter().try_for_each(Caller::reaches_nobody)?;
    world.update(&[with(&["a"])])?;
    all_reach(&callers, "a")?;
    // Everything is looked at once more.
    world.replace(&[with(&["b"])])?;
    all_reach(&callers, "b")?;
    settled(&mut world)?;
    ensure!(
        flows_to(&world, &places)? == before,
        "flows of others were deleted"
    );
    for (stranger, want) in strangers.iter().zip(["a", "b"]) {
        let seen = stranger.ask()?;
        ensure!(seen == want, "{}: {seen}", stranger.what);
    }
    Ok(())
}

/// What went stale while no agent was there.
pub(crate) fn a_restart_looks_at_all_flows_once() -> Result<()> {
    let service = svc(1).everywhere();
    let with = |pods: &[&str]| service.clone().endpoints(pods.iter().map(|pod| ep(pod)));
    let mut world = world(&[with(&["a"]), svc(2).endpoints([ep("a")])])?;
    let callers = Caller::all(&world, &service, &EVERYBODY, &At::ALL)?;
    all_reach(&callers, "a")?;
    let others = Caller::all(&world, &svc(2), &[Client::Outside], &[At::ClusterIp])?;
    all_reach(&others, "a")?;
    let place = everywhere(&svc(2));
    let kept = flows_to(&world, &place)?;
    for agent in &mut world.agents {
        agent.restart()?;
    }
    world.replace(&[with(&["b"]), svc(2).endpoints([ep("a")])])?;
    all_reach(&callers, "b")?;
    settled(&mut world)?;
    ensure!(
        flows_to(&world, &place)? == kept,
        "a flow that is right was deleted"
    );
    Ok(())
}

/// A flow that is gone is no error; packets begin another.
pub(crate) fn a_flow_is_deleted_once() -> Result<()> {
    // Not cleaned: nobody else deletes.
    let service = svc(1).everywhere().endpoints([ep("a")]);
    let world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let caller = |at| Caller::all(&world, &service, &[Client::Outside], &[at]);
    let mut callers = Vec::new();
    // More than the kernel is sent at once.
    for _ in 0..40 {
        callers.extend(caller(At::ClusterIp)?);
        callers.extend(caller(At::NodePort)?);
    }
    all_reach(&callers, "a")?;
    let place = everywhere(&service);
    for family in Family::ALL {
        let mut ours = flows(world.node(1)?, family)?;
        ours.retain(|flow| place.contains(&flow.original.destination));
        ensure!(ours.len() == 80, "{} flows", ours.len());
        let requests: Vec<_> = ours.iter().map(Flow::delete).collect();
        let delete = || {
            let node = world.node(1)?;
            node.run(|| Ok(NfSocket::open()?.request_all(&requests)?))
        };
        ensure!(delete()? == 0, "some were not there");
        ensure!(delete()? == 80, "some are still there");
        all_reach(&callers, "a")?;
    }
    let now = flows_to(&world, &place)?;
    ensure!(now.len() == 160, "{} flows", now.len());
    Ok(())
}

/// F3: somebody flushed our rules; flows that began before they were back are not translated.
pub(crate) fn f3_flows_that_began_while_the_rules_were_away() -> Result<()> {
    need_tools(&["nft"])?;
    let service = svc(1).everywhere().endpoints([ep("a")]);
    let mut world = world(slice::from_ref(&service))?;
    // Past the second look at the first change, which would do it too.
    settled(&mut world)?;
    let places = [At::LoadBalancer, At::ExternalIp, At::NodePort];
    for agent in &mut world.agents {
        // Without any rule the kernel tracks nothing.
        let keep = "add table inet keep\n\
            add chain inet keep seen { type filter hook prerouting priority 0; }\n\
            add rule inet keep seen ct state new accept";
        nft(&agent.ns, keep)?;
        agent.cleanup()?;
    }
    let callers = Caller::all(&world, &service, &[Client::Outside], &places)?;
    // More than once where the first packet only made the node ask for its neighbour.
    eventually(DEADLINE, "all flows have begun", || {
        for caller in &callers {
            let seen = caller.ask()?;
            ensure!(seen.starts_with('!'), "{}: {seen}", caller.what);
        }
        let began = flows_to(&world, &everywhere(&service))?;
        ensure!(began.len() == callers.len(), "{began:?}");
        Ok(())
    })?;
    world.replace(&[service])?;
    all_reach(&callers, "a")
}

/// All addresses of one Service are another's after one change.
pub(crate) fn an_address_passes_to_another_service() -> Result<()> {
    let one = svc(1).everywhere().named("one").endpoints([ep("a")]);
    let two = svc(1).everywhere().named("two").endpoints([ep("b")]);
    let mut world = world(slice::from_ref(&one))?;
    let callers = Caller::all(&world, &one, &EVERYBODY, &At::ALL)?;
    all_reach(&callers, "a")?;
    for agent in &mut world.agents {
        agent.exchange(slice::from_ref(&one), slice::from_ref(&two))?;
    }
    all_reach(&callers, "b")
}

/// Packets are under way during every commit, and some make their entry by the rules before it.
pub(crate) fn nobody_is_left_behind_by_many_changes() -> Result<()> {
    let service = svc(1).everywhere().only(Protocol::Udp);
    let with = |pod: &str| service.clone().endpoints([ep(pod)]);
    let mut world = world(&[with("a")])?;
    let callers = Caller::all(&world, &service, &EVERYBODY, &At::ALL)?;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| -> Result<()> {
        let (quarter, stop) = (callers.len() / 4, &stop);
        for callers in callers.chunks(quarter.max(1)) {
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    for caller in callers {
                        // Whatever it is: only the end counts.
                        let _ = caller.socket.send(b"?");
                    }
                }
            });
        }
        let changes = ["b", "c", "a"]
            .iter()
            .cycle()
            .take(61)
            .map(|pod| world.update(&[with(pod)]))
            .collect::<Result<Vec<()>>>();
        stop.store(true, Ordering::Relaxed);
        changes.map(drop)
    })?;
    // Nobody speaks while the last second looks are awaited, so no entry is made by new rules that
    // was not there before.
    settled(&mut world)?;
    for family in Family::ALL {
        for flow in flows(world.node(1)?, family)? {
            let to_service = everywhere(&service).contains(&flow.original.destination);
            let right = flow.reply.source == ep("b").address(family);
            ensure!(right || !to_service, "left behind: {flow:?}");
        }
    }
    Ok(())
}

/// The whole way through the agent: a change that takes nothing away looks at nothing, a UDP change is reported
/// first and cleaned after, and the report has the counts without anybody being woken for them.
pub(crate) fn the_engine_cleans_up_and_reports_it() -> Result<()> {
    let world = World::without_agents()?;
    let node = world.node(1)?.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let kind = UnderTest::current()?.kind();
    let engine = engine(kind, node, NodeSettings::default(), Settings::default());
    let engine = runtime.block_on(engine)?;
    let plane = Store::new(EPOCH);
    let mut cursor = Cursor::at(0);
    let mut apply = |services: &[Svc]| -> Result<()> {
        publish(&plane, services.iter().flat_map(Svc::published).collect());
        let (update, _) = collect(&plane, &node_name(1), &mut cursor)?;
        runtime.block_on(submit(&engine, update)).map(drop)
    };
    let looks = || -> u64 { engine.conntrack().totals().iter().map(ConntrackTotals::looks).sum() };
    let service = svc(1).only(Protocol::Udp).reached(At::LoadBalancer);
    let with = |pod: &str| service.clone().endpoints([ep(pod)]);
    let tcp = |pods: &[&str]| svc(2).only(Protocol::Tcp).endpoints(pods.iter().map(|pod| ep(pod)));
    apply(&[with("a"), tcp(&["a"])])?;
    let callers = Caller::all(&world, &service, &[Client::Outside], &[At::LoadBalancer])?;
    all_reach(&callers, "a")?;
    eventually(DEADLINE, "two looks of each family", || match looks() {
        4 => Ok(()),
        other => Err(other),
    })?;
    apply(&[tcp(&["a", "b"])])?;
    apply(&[tcp(&["a", "b", "c"])])?;
    apply(&[with("b")])?;
    all_reach(&callers, "b")?;
    eventually(DEADLINE, "two more looks of each family", || {
        match looks() {
            8 => Ok(()),
            other => Err(other),
        }
    })?;
    for totals in engine.conntrack().totals() {
        ensure!((totals.deleted, totals.failures) == (1, 0), "{totals:?}");
    }
    Ok(())
}
