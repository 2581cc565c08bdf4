//! Who talked to whom, as agents count it from their kernel's reports: beginnings, failures, bytes.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kp_nodeagent::service_connections::{EdgeCounts, ServiceConnections};
use kplane_dataplane::backend::Kind;
use kplane_dataplane::beginnings::Beginnings;
use kplane_model::{Family, Protocol, ServiceKey, proxy_address};
use kplane_netlink::NfSocket;
use kplane_netlink::conntrack::Selection;
use kplane_tests::wait::{DEADLINE, eventually};

use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{At, Client, Ep, Seen, Setup, Svc, World, ask, ep, svc};

const HOUR: Duration = Duration::from_secs(3_600);
/// Connections to each Service.
const EACH: u32 = 3;
/// The kernel counts bytes, and gives up soon on a connection that nothing answers.
const SETTINGS: [(&str, &str); 3] = [
    ("nf_conntrack_acct", "1"),
    ("nf_conntrack_tcp_timeout_syn_sent", "1"),
    ("nf_conntrack_tcp_timeout_close", "1"),
];

/// The counts of one family, as client, Service, endpoint.
type Found = Vec<(Option<IpAddr>, String, SocketAddr, EdgeCounts)>;

struct Counter {
    reports: Beginnings,
    counts: ServiceConnections,
}

impl Counter {
    /// Opens the reports of node 1, before there are connections.
    fn open(world: &World, services: &[Svc]) -> Result<Self> {
        let reports = world.node(1)?.run(|| Ok(Beginnings::open(true)?))?;
        let counts = ServiceConnections::with_edges();
        for (key, of) in services.iter().flat_map(Svc::published) {
            counts.learn(&key, of.as_ref().map(|of| &of.port));
        }
        Ok(Self { reports, counts })
    }

    /// Returns the counts of TCP by now.
    fn found(&mut self, family: Family) -> Result<Found> {
        while self.counts.read_some(&mut self.reports).1 {}
        let of_family = |key: &ServiceKey| key.family == family && key.protocol == Protocol::Tcp;
        let sums = self.counts.edges(HOUR, of_family).context("no edges")?;
        ensure!((sums.more, sums.lost) == (0, 0), "{sums:?}");
        Ok(sums
            .edges
            .into_iter()
            .map(|(key, counts, _)| {
                let service = key.port.service.name.to_string();
                (key.client, service, key.endpoint, counts)
            })
            .collect())
    }
}

/// A list of all entries makes the kernel delete those that are over. Otherwise that takes it a minute.
fn sweep(world: &World) -> Result<()> {
    world.node(1)?.run(|| {
        for family in Family::ALL {
            NfSocket::open()?.dump_each(Selection::Any.request(family), |_| {})?;
        }
        Ok(())
    })
}

/// Services: one that answers, one whose endpoint refuses, and one whose endpoint does not exist.
fn services() -> [Svc; 3] {
    let service = |number, at: Ep| svc(number).everywhere().endpoints([at]);
    [
        service(1, ep("c")),
        service(2, ep("c").port(9)),
        service(3, ep("nobody")),
    ]
}

pub(crate) fn who_talked_to_whom_is_counted_with_failures_and_bytes() -> Result<()> {
    let services = services();
    let world = World::serving(Setup::PodRanges, &services)?;
    world.node(1)?.run(|| {
        for (name, value) in SETTINGS {
            let file = format!("/proc/sys/net/netfilter/{name}");
            fs::write(&file, value).with_context(|| file)?;
        }
        Ok(())
    })?;
    let mut counter = Counter::open(&world, &services)?;
    for family in Family::ALL {
        one_family(&world, &services, &mut counter, family).with_context(|| family.to_string())?;
    }
    Ok(())
}

fn one_family(
    world: &World,
    services: &[Svc; 3],
    counter: &mut Counter,
    family: Family,
) -> Result<()> {
    let (pod, outside) = (Client::PodHere, Client::Outside);
    let [good, refusing, silent] = services;
    let connect = |client, to| ask(&world.net, client, Protocol::Tcp, to);
    for (client, at) in [(pod, At::ClusterIp), (outside, At::NodePort)] {
        for _ in 0..EACH {
            let seen = connect(client, good.address(at, family, 1))?;
            ensure!(matches!(seen, Seen::Hit { .. }), "{seen}");
        }
    }
    // What goes to the endpoint itself is no Service's.
    connect(pod, ep("c").address(family))?;
    if UnderTest::current()?.kind() == Kind::Userspace {
        return through_the_proxy(counter, family);
    }
    for _ in 0..EACH {
        let seen = connect(pod, refusing.address(At::ClusterIp, family, 1))?;
        ensure!(seen == Seen::Refused, "{seen}");
    }
    let seen = connect(pod, silent.address(At::ClusterIp, family, 1))?;
    ensure!(!matches!(seen, Seen::Hit { .. }), "{seen}");

    let edge = |client: Client, service: &Svc, endpoint: Ep, failed| {
        let name = service.name.clone();
        let client = Some(client.source(family));
        (client, name, endpoint.address(family), failed)
    };
    let mut expected = [
        edge(pod, good, ep("c"), 0),
        edge(outside, good, ep("c"), 0),
        edge(pod, refusing, ep("c").port(9), EACH),
    ];
    expected.sort();
    eventually(
        DEADLINE,
        "all connections are counted to their ends",
        || {
            sweep(world)?;
            let mut found = counter.found(family)?;
            let unanswered = found.iter().position(|(_, service, ..)| *service == silent.name);
            let (client, _, endpoint, counts) = found.remove(unanswered.context("no answer")?);
            ensure!(client == Some(pod.source(family)) && endpoint == ep("nobody").address(family));
            // The client sends again when its entry may be over already.
            ensure!(
                counts.failed > 0 && counts.failed == counts.begun,
                "{counts:?}"
            );
            ensure!(counts.bytes[0] > 0 && counts.bytes[1] == 0, "{counts:?}");
            let mut of: Vec<_> = found
                .iter()
                .map(|(client, service, endpoint, counts)| {
                    (*client, service.clone(), *endpoint, counts.failed)
                })
                .collect();
            of.sort();
            ensure!(of == expected, "{found:?}, expected {expected:?}");
            for (_, service, _, counts) in &found {
                ensure!(counts.begun == EACH, "{found:?}");
                ensure!(counts.bytes.iter().all(|bytes| *bytes > 0), "{found:?}");
                // These clients end their connections by RST.
                let reset = if *service == good.name { EACH } else { 0 };
                ensure!(counts.reset == reset, "{found:?}");
            }
            Ok(())
        },
    )
}

/// The proxy itself is the other end of what the kernel sees.
fn through_the_proxy(counter: &mut Counter, family: Family) -> Result<()> {
    eventually(DEADLINE, "connections to the proxy are counted", || {
        let found = counter.found(family)?;
        let by_proxy = |of: &IpAddr| *of == proxy_address(family);
        let begun: Vec<u32> = found.iter().map(|(.., counts)| counts.begun).collect();
        ensure!(begun == [EACH, EACH], "{found:?}");
        let all = found.iter().all(|(.., endpoint, _)| by_proxy(&endpoint.ip()));
        ensure!(all, "{found:?}");
        Ok(())
    })
}
