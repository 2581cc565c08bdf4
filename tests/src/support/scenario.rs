//! Scenarios: a Service, and for every client and every kind of address what must happen there.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::thread;

use anyhow::{Result, anyhow, ensure};
use kplane_model::{Family, Protocol, TrafficPolicy};
use kplane_rig::ask::Expect;
use kplane_rig::vm;

use super::ask::{PATIENCE, Question, SILENCE};
use super::fate::Source;
use super::service::{At, Svc, node_ip};
use super::under_test::UnderTest;
use super::world::{Client, Net, Setup, World, second_ip};

/// Connections made to find every endpoint of a few: with 3 endpoints one stays unseen once in
/// 10^26 times.
const MOST_TRIES: usize = 150;
/// Connections made although every endpoint has been seen, to find one that must not be reached.
const LEAST_TRIES: usize = 6;
/// The same where endpoints take turns and packets are slow.
const LEAST_TURNS: usize = 3;

/// What must happen to connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// They reach each of these endpoints and no other.
    Reach(Whom, Source),
    /// The client is told at once.
    Refused,
    /// They time out.
    Dropped,
}

/// Which endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whom {
    All,
    /// Those on the node that handles the packet.
    Local,
}

pub const ALL: Want = Want::Reach(Whom::All, Source::Client);
pub const ALL_MASQUERADED: Want = Want::Reach(Whom::All, Source::Node);
pub const HERE: Want = Want::Reach(Whom::Local, Source::Client);
pub const HERE_MASQUERADED: Want = Want::Reach(Whom::Local, Source::Node);
pub const REFUSED: Want = Want::Refused;
pub const DROPPED: Want = Want::Dropped;

/// What must happen at one kind of address: to a client outside, a pod on this node, a pod on
/// another node, the node itself.
pub type Row = (At, [Want; 4]);

/// A Service and what must happen to its clients, in every family and protocol.
pub struct Scenario {
    pub setup: Setup,
    pub service: Svc,
    pub rows: Vec<Row>,
}

/// One cell of a scenario in one family and protocol.
struct Cell<'a> {
    service: &'a Svc,
    want: Want,
    question: Question,
    /// Refusals come late.
    late: bool,
}

impl Scenario {
    /// Programs the Service in a new world, and asks.
    pub fn play(&self) -> Result<()> {
        let world = World::serving(self.setup, std::slice::from_ref(&self.service))?;
        self.observe(&world.net)
    }

    /// Asks in a world that has the Service.
    pub fn observe(&self, net: &Net) -> Result<()> {
        let (waiting, others): (Vec<_>, Vec<_>) =
            self.cells(UnderTest::current()?).into_iter().partition(Cell::waits);
        let mut wrong = Vec::new();
        for cell in others {
            wrong.extend(cell.check(net).err());
        }
        // Those that wait for a while, or for nothing, wait together.
        let more = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for cell in &waiting {
                scope.spawn(|| {
                    if let (Err(error), Ok(mut more)) = (cell.check(net), more.lock()) {
                        more.push(error);
                    }
                });
            }
        });
        wrong.extend(more.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner));
        let texts: Vec<String> = wrong.iter().map(|error| format!("{error:#}")).collect();
        ensure!(texts.is_empty(), "{}", texts.join("\n"));
        Ok(())
    }

    fn cells(&self, backend: UnderTest) -> Vec<Cell<'_>> {
        let iptables = backend.is_iptables();
        let mut cells = Vec::new();
        for (at, [outside, here, there, node]) in &self.rows {
            // A pod that serves is treated as any other.
            let wants = [outside, here, there, node, here];
            for (client, want) in Client::ALL.into_iter().zip(wants) {
                // C1: iptables has no KUBE-EXTERNAL-SERVICES in OUTPUT.
                let outside = matches!(at, At::ExternalIp | At::LoadBalancer);
                if iptables && outside && client == Client::Node && *want == Want::Refused {
                    continue;
                }
                let Some(want) = self.want(backend, *at, client, *want) else {
                    continue;
                };
                for (family, protocol) in self.service.variants() {
                    let to = self.service.address(*at, family, client.node());
                    cells.push(Cell {
                        service: &self.service,
                        want,
                        question: Question::new(client, protocol, to),
                        late: backend.refuses_late(),
                    });
                }
            }
        }
        cells
    }

    /// What must happen on a backend; `None` where nothing can be said.
    ///
    /// IPVS (A16, A29): a virtual server has one list of real servers for all clients. Of a Local
    /// policy these are the endpoints on the node, and for want of any those of the cluster.
    ///
    /// A8: source ranges keep the node itself from a load balancer by the source that its packets have
    /// there of themselves, the load balancer's address; these have another. As with kube-proxy, see
    /// `taking_over` of the tests `vm`.
    fn want(&self, backend: UnderTest, at: At, client: Client, want: Want) -> Option<Want> {
        let source = client.source(Family::V4);
        let ranges = &self.service.ranges;
        let is_let_in = ranges.is_empty() || ranges.iter().any(|range| range.contains(source));
        if backend == UnderTest::Ipvs && at == At::LoadBalancer && !is_let_in {
            return (client != Client::Node).then_some(DROPPED);
        }
        let is_inside = at == At::ClusterIp;
        let policy = self.service.policy(is_inside);
        let nobody = self.service.targets(Family::V4, None).is_empty();
        if backend != UnderTest::Ipvs || policy == TrafficPolicy::Cluster || nobody {
            return Some(want);
        }
        let here = !self.service.targets(Family::V4, Some(client.node())).is_empty();
        let is_pod = !matches!(client, Client::Outside | Client::Node);
        Some(match (here, is_inside) {
            (true, true) => want,
            (true, false) => HERE,
            (false, true) if is_pod => ALL,
            (false, true) => ALL_MASQUERADED,
            // Answers of another node do not come back by this one.
            (false, false) if client == Client::Outside => return None,
            (false, false) => ALL,
        })
    }
}

impl Cell<'_> {
    /// Whether it takes its time.
    fn waits(&self) -> bool {
        self.want == Want::Dropped || self.want == Want::Refused && self.late
    }

    fn check(&self, net: &Net) -> Result<()> {
        let (ask, once) = (self.question, (1, 1));
        let (expect, question, (least, most)) = match self.want {
            Want::Reach(whom, source) => (self.reach(whom, source)?, ask, (least(), MOST_TRIES)),
            // C1: what REJECT and IPVS answer is slower, see there.
            Want::Refused if self.late => (Expect::Refused, ask, once),
            Want::Refused => (Expect::Refused, ask.timeout(PATIENCE), once),
            Want::Dropped => (Expect::Dropped, ask.timeout(SILENCE), once),
        };
        let found = question.in_net(net)?.explore(&expect, least, most)?;
        match found.complaint(&expect) {
            Some(wrong) => Err(anyhow!("{ask}: {wrong}")),
            None => Ok(()),
        }
    }

    /// The endpoints to reach, and the sources that they may see.
    fn reach(&self, whom: Whom, source: Source) -> Result<Expect> {
        let family = Family::of(self.question.to.ip());
        let client = self.question.client;
        let node = (whom == Whom::Local).then_some(client.node());
        let endpoints = self.service.targets(family, node);
        ensure!(!endpoints.is_empty(), "{}: nobody to reach", self.question);
        let own = client.source(family);
        let of_node = [node_ip(client.node(), family), second_ip(family)];
        // The proxy's connection is the node's own.
        let proxied = UnderTest::current()? == UnderTest::Userspace
            && self.question.protocol != Protocol::Sctp;
        let sees = |endpoint: SocketAddr| {
            // A15: hairpin.
            let masqueraded = source == Source::Node || endpoint.ip() == own;
            let sources = if proxied {
                Vec::new()
            } else if masqueraded {
                of_node.to_vec()
            } else {
                vec![own]
            };
            let sources = sources.into_iter().filter(|ip| !masqueraded || *ip != own);
            (endpoint, sources.collect())
        };
        Ok(Expect::Reach(endpoints.into_iter().map(sees).collect()))
    }
}

/// See [`LEAST_TRIES`].
fn least() -> usize {
    if vm::is_inside() { LEAST_TURNS } else { LEAST_TRIES }
}
