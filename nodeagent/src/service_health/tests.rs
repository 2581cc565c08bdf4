//! Tests of counting (A25), and of real servers over loopback (A22-A25).

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

use kplane_model::{
    DesiredKey, DesiredObject, EndpointAddr, KeyParts, LocalEndpoint, LocalEndpoints, ServiceKey,
    TrafficPolicy,
};

use super::*;
use crate::connection::Connection;
use crate::desired::Desired;
use crate::desired::fixture::{Plane, key_of, svc, svc6};
use crate::report::{FamilyReport, Report, Subject};
use kplane_http::client::{Reply, ask, becomes, get, until};

/// Returns a port that is free in both families. It is below the ports that the kernel gives to
/// clients, so that no other program takes it by chance.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 20_000 + u16::try_from(std::process::id() % 10_000).unwrap();
    let mut ports = std::iter::repeat_with(|| first + NEXT.fetch_add(1, Ordering::Relaxed));
    let is_free = |port: &u16| TcpListener::bind(("::", *port)).is_ok();
    ports.find(is_free).unwrap()
}

/// A ServicePort with a health check node port.
fn checked(name: &str, port_name: &str, family: Family, port: u16) -> DesiredObject {
    let object = match family {
        Family::V4 => svc(name, &["10.0.0.1:80"]),
        Family::V6 => svc6(name, &["[fd00::a]:80"]),
    };
    let DesiredObject::Service(mut program) = object else {
        unreachable!("a Service");
    };
    program.port.key.port_name = port_name.into();
    program.port.external_policy = TrafficPolicy::Local;
    program.port.health_check_node_port = Some(port);
    DesiredObject::Service(program)
}

/// Endpoints on the node: an address and port, and whether it is ready.
fn here(key: ServiceKey, endpoints: &[(&str, bool)]) -> DesiredObject {
    let endpoints = endpoints.iter().map(|(text, ready)| {
        let addr: SocketAddr = text.parse().unwrap();
        LocalEndpoint {
            addr: EndpointAddr::from(addr),
            ready: *ready,
        }
    });
    DesiredObject::Local(LocalEndpoints {
        key,
        endpoints: endpoints.collect(),
    })
}

fn named(port_name: &str) -> ServiceKey {
    ServiceKey::from(KeyParts {
        port_name: port_name.into(),
        ..KeyParts::clone(&key_of("web", Family::V4))
    })
}

/// A control plane, an engine's desired state, and servers.
struct Rig {
    /// Where node ports are served.
    node: NodePlan,
    plane: Plane,
    desired: Desired,
    publisher: Publisher,
    reports: watch::Sender<Report>,
    _connection: watch::Sender<Connection>,
    counters: Arc<Counters>,
    _servers: tokio_util::task::AbortOnDropHandle<()>,
}

/// Returns a plan that serves node ports at these addresses. Those of the other family choose none.
fn serving_at(cidrs: &[&str]) -> NodePlan {
    NodePlan {
        nodeport_ips: cidrs.iter().map(|text| text.parse().unwrap()).collect(),
        ..NodePlan::default()
    }
}

const LOOPBACK: [&str; 2] = ["127.0.0.1/32", "::1/128"];

fn health(programmed: bool) -> Report {
    let family = FamilyReport {
        programmed,
        ever_programmed: programmed,
        ..FamilyReport::default()
    };
    Report {
        families: [family.clone(), family],
        ..Report::default()
    }
}

impl Rig {
    fn new(cidrs: &[&str]) -> Self {
        let (publisher, servers) = channel();
        let (reports, follow) = watch::channel(health(true));
        let (_connection, connection) = watch::channel(Connection {
            live: true,
            since_ms: 1,
            ..Connection::default()
        });
        let health = Health {
            reports: follow,
            connection,
            pulse: crate::pulse::Pulse::default(),
            proxy: Default::default(),
            answers: Arc::default(),
        };
        let counters = Arc::<Counters>::default();
        let servers = servers.connect(health, counters.clone());
        Self {
            node: serving_at(cidrs),
            plane: Plane::new([]),
            desired: Desired::default(),
            publisher,
            reports,
            _connection,
            counters,
            _servers: tokio_util::task::AbortOnDropHandle::new(tokio::spawn(servers.run())),
        }
    }

    /// Adds objects, which the kernel accepts.
    fn put(&mut self, objects: impl IntoIterator<Item = DesiredObject>) {
        for object in objects {
            self.plane.put(&object);
        }
        self.sync(&[]);
    }

    fn delete(&mut self, key: &DesiredKey) {
        self.plane.delete(key);
        self.sync(&[]);
    }

    /// Programs everything but these Services, which the kernel refuses.
    fn sync(&mut self, refused: &[&str]) {
        let first = self.desired.position().is_none();
        let update = if first { self.plane.snapshot_update() } else { self.plane.delta_update() };
        let dirty = self.desired.apply(update).unwrap();
        let dirty = (!first).then_some(&dirty);
        for family in Family::ALL {
            let refused = |name: &ServiceName| refused.contains(&&*name.name);
            self.publisher.programmed(family, &self.node, &self.desired, dirty, refused);
        }
    }

    async fn failures(&mut self, wanted: usize) -> Vec<Failure> {
        let changed = async {
            while self.publisher.failures().len() != wanted {
                self.publisher.failures_changed().await;
            }
        };
        let deadline = kplane_http::client::DEADLINE;
        tokio::time::timeout(deadline, changed).await.unwrap();
        self.publisher.failures()
    }
}

fn v4(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

fn v6(port: u16) -> SocketAddr {
    SocketAddr::new("::1".parse::<IpAddr>().unwrap(), port)
}

fn count(reply: &Reply) -> &str {
    reply.header("x-load-balancing-endpoint-weight").unwrap()
}

/// Only ready endpoints count, each address once over all ports.
#[test]
fn a25_distinct_ready_addresses_over_all_ports_are_counted() {
    let mut plane = Plane::new([
        checked("web", "http", Family::V4, 31_000),
        checked("web", "https", Family::V4, 31_000),
        checked("web", "http", Family::V6, 31_000),
        svc("plain", &["10.0.0.1:80"]),
        here(
            named("http"),
            &[
                ("10.0.0.1:80", true),
                ("10.0.0.1:81", true),
                ("10.0.0.3:80", false),
            ],
        ),
        here(
            named("https"),
            &[("10.0.0.1:443", true), ("10.0.0.2:443", true)],
        ),
    ]);
    let mut desired = Desired::default();
    desired.apply(plane.snapshot_update()).unwrap();
    let web = ServiceName::new("shop", "web");
    let v4 = Target {
        port: 31_000,
        local_endpoints: 2,
        key: named("http"),
    };
    assert_eq!(target(&desired, &web, Family::V4), Some(v4.clone()));
    let v6 = target(&desired, &web, Family::V6).unwrap();
    assert_eq!(v6.local_endpoints, 0, "families are counted apart");
    let plain = ServiceName::new("shop", "plain");
    assert_eq!(target(&desired, &plain, Family::V4), None);
    // Both ways lead to the same result.
    let all = all_targets(&desired, Family::V4);
    assert_eq!(all, BTreeMap::from([(web, v4)]));
}

/// Nothing is published, and no task is woken, when no Service has such a port.
#[tokio::test]
async fn idle_services_cost_nothing() {
    let mut rig = Rig::new(&LOOPBACK);
    rig.put([svc("a", &["10.0.0.1:80"])]);
    rig.put([svc("a", &[]), svc("b", &[])]);
    assert!(rig.publisher.mailbox.is_empty());
    let woken = rig.publisher.mailbox.wake.notified();
    assert!(futures_util::FutureExt::now_or_never(woken).is_none());
}

#[tokio::test]
async fn a23_a24_each_family_has_its_server_for_any_path() {
    let port = free_port();
    let mut rig = Rig::new(&["0.0.0.0/0", "::/0"]);
    rig.put([
        checked("web", "", Family::V4, port),
        checked("web", "", Family::V6, port),
        here(key_of("web", Family::V4), &[("10.0.0.1:80", true)]),
    ]);
    let reply = becomes(v4(port), "/any/path?at=all", 200).await;
    assert_eq!(
        reply.body,
        "{\n\t\"service\": {\n\t\t\"namespace\": \"shop\",\n\t\t\"name\": \"web\"\n\t},\n\
         \t\"localEndpoints\": 1,\n\t\"serviceProxyHealthy\": true\n}"
    );
    assert_eq!(count(&reply), "1");
    // The same port over IPv6 is another server, with the endpoints of its own family.
    let reply = becomes(v6(port), "/", 503).await;
    assert_eq!(count(&reply), "0");
    let head = ask(v4(port), "HEAD / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    assert_eq!((head.status, head.body.as_str()), (200, ""));
}

#[tokio::test]
async fn a25_draining_to_zero_is_503() {
    let port = free_port();
    let mut rig = Rig::new(&LOOPBACK);
    let endpoints = |list: &[(&str, bool)]| here(key_of("web", Family::V4), list);
    rig.put([
        checked("web", "", Family::V4, port),
        endpoints(&[("10.0.0.1:80", true), ("10.0.0.2:80", true)]),
    ]);
    assert_eq!(count(&becomes(v4(port), "/", 200).await), "2");
    rig.put([endpoints(&[("10.0.0.1:80", false), ("10.0.0.2:80", true)])]);
    until(v4(port), "/", |r| r.is_some_and(|r| count(r) == "1")).await;
    rig.put([endpoints(&[("10.0.0.1:80", false), ("10.0.0.2:80", false)])]);
    assert_eq!(count(&becomes(v4(port), "/", 503).await), "0");
    rig.delete(&DesiredKey::Local(key_of("web", Family::V4)));
    assert_eq!(get(v4(port), "/").await.unwrap().status, 503);
}

#[tokio::test]
async fn a23_an_unhealthy_proxy_is_503_with_its_endpoints() {
    let port = free_port();
    let mut rig = Rig::new(&LOOPBACK);
    rig.put([
        checked("web", "", Family::V4, port),
        here(key_of("web", Family::V4), &[("10.0.0.1:80", true)]),
    ]);
    becomes(v4(port), "/", 200).await;
    rig.reports.send_replace(health(false));
    let reply = becomes(v4(port), "/", 503).await;
    assert_eq!(count(&reply), "1");
    assert!(reply.body.contains("\"serviceProxyHealthy\": false"));
    // A leaving node changes nothing (A23: eligibility is not considered).
    let mut leaving = health(true);
    leaving.node = Some(crate::report::NodeState {
        known: true,
        eligible: false,
    });
    rig.reports.send_replace(leaving);
    becomes(v4(port), "/", 200).await;
}

#[tokio::test]
async fn a25_another_port_closes_and_opens() {
    let (first, second) = (free_port(), free_port());
    let mut rig = Rig::new(&LOOPBACK);
    rig.put([checked("web", "", Family::V4, first)]);
    becomes(v4(first), "/", 503).await;
    rig.put([checked("web", "", Family::V4, second)]);
    becomes(v4(second), "/", 503).await;
    assert!(get(v4(first), "/").await.is_none(), "closed before");
    rig.delete(&DesiredKey::Service(key_of("web", Family::V4)));
    until(v4(second), "/", |reply| reply.is_none()).await;
}

/// A port may pass from one Service to another within one update.
#[tokio::test]
async fn a25_a_port_changes_hands() {
    let port = free_port();
    let mut rig = Rig::new(&LOOPBACK);
    rig.put([checked("b", "", Family::V4, port)]);
    becomes(v4(port), "/", 503).await;
    rig.plane.delete(&DesiredKey::Service(key_of("b", Family::V4)));
    rig.put([checked("a", "", Family::V4, port)]);
    let is_a = |reply: Option<&Reply>| reply.is_some_and(|r| r.body.contains("\"name\": \"a\""));
    until(v4(port), "/", is_a).await;
    assert_eq!(rig.counters.service_health_failures.get(), 0);
}

#[tokio::test]
async fn a25_a_taken_port_is_reported_and_tried_again() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    let mut rig = Rig::new(&LOOPBACK);
    rig.put([checked("web", "", Family::V4, port)]);
    let failures = rig.failures(1).await;
    let expected = format!("health check node port {port}: cannot listen on 127.0.0.1: Address");
    assert!(failures[0].reason.starts_with(&expected), "{failures:?}");
    assert!(failures[0].degraded, "the Service itself is served");
    let web = DesiredKey::Service(key_of("web", Family::V4));
    assert_eq!(failures[0].about, Subject::Object(web));
    assert!(rig.counters.service_health_failures.get() >= 1);
    drop(other);
    // The timer alone causes this.
    rig.failures(0).await;
    assert_eq!(get(v4(port), "/").await.unwrap().status, 503);
    assert_eq!(rig.counters.service_health_open.get(), 1);
}

/// A failure goes with its Service.
#[tokio::test]
async fn a25_a_failure_ends_with_its_service() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    let mut rig = Rig::new(&LOOPBACK);
    rig.put([checked("web", "", Family::V4, port)]);
    rig.failures(1).await;
    rig.delete(&DesiredKey::Service(key_of("web", Family::V4)));
    rig.failures(0).await;
    assert_eq!(rig.counters.service_health_open.get(), 0);
}

/// Load balancers do not get counts that the kernel refused.
#[tokio::test]
async fn a25_a_refused_service_keeps_its_count() {
    let port = free_port();
    let mut rig = Rig::new(&LOOPBACK);
    rig.put([checked("web", "", Family::V4, port)]);
    becomes(v4(port), "/", 503).await;
    let ready = here(key_of("web", Family::V4), &[("10.0.0.1:80", true)]);
    rig.plane.put(&ready);
    rig.sync(&["web"]);
    assert!(rig.publisher.mailbox.is_empty());
    rig.plane.put(&checked("web", "", Family::V4, port));
    rig.plane.put(&ready);
    rig.sync(&[]);
    assert_eq!(get(v4(port), "/").await.unwrap().status, 503, "unchanged");
    rig.put([here(
        key_of("web", Family::V4),
        &[("10.0.0.1:80", true), ("10.0.0.2:80", true)],
    )]);
    assert_eq!(count(&becomes(v4(port), "/", 200).await), "2");
}

/// A snapshot after a loss names everything: what it does not name is closed.
#[tokio::test]
async fn a_complete_sync_closes_what_is_gone() {
    let (kept, gone) = (free_port(), free_port());
    let mut rig = Rig::new(&LOOPBACK);
    rig.put([
        checked("kept", "", Family::V4, kept),
        checked("web", "", Family::V4, gone),
    ]);
    becomes(v4(gone), "/", 503).await;
    rig.plane.delete(&DesiredKey::Service(key_of("web", Family::V4)));
    rig.desired.apply(rig.plane.snapshot_update()).unwrap();
    let all: BTreeSet<_> = all_targets(&rig.desired, Family::V4).into_keys().collect();
    assert_eq!(all, BTreeSet::from([ServiceName::new("shop", "kept")]));
    rig.publisher.programmed(Family::V4, &rig.node, &rig.desired, None, |_| false);
    until(v4(gone), "/", |reply| reply.is_none()).await;
    assert_eq!(get(v4(kept), "/").await.unwrap().status, 503);
}

/// Clients that say nothing shut no load balancer out.
#[tokio::test]
async fn hostile_clients_shut_nobody_out() {
    let port = free_port();
    let mut rig = Rig::new(&LOOPBACK);
    rig.put([
        checked("web", "", Family::V4, port),
        here(key_of("web", Family::V4), &[("10.0.0.1:80", true)]),
    ]);
    becomes(v4(port), "/", 200).await;
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(tokio::net::TcpStream::connect(v4(port)).await.unwrap());
    }
    for _ in 0..20 {
        assert_eq!(get(v4(port), "/").await.unwrap().status, 200);
    }
    let huge = format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "a".repeat(100_000));
    assert!(ask(v4(port), &huge).await.is_none_or(|r| r.status == 431));
    assert_eq!(get(v4(port), "/").await.unwrap().status, 200);
}
