//! Relays: control planes whose source is another control plane. Real servers, each on a loopback address of its own.

mod agents;
mod failures;
mod identity;
mod programs;

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kp_controlplane::app::{Bound, Config, Origin, Protection, build};
use kp_controlplane::hub::Hub;
use kp_controlplane::peers::{self, PeerFlags};
use kp_controlplane::publish::{Publication, Published};
use kp_controlplane::relay::{self, SourceFlags};
use kplane_model::select::merge;
use kplane_model::{
    Endpoint, EndpointAddr, NodeFacts, NodeName, Protocol, ServiceKey, ServicePort, TrafficPolicy,
};
use kplane_proto::v1 as pb;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_rig::loopback::until_free;
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};

use crate::support::DEADLINE;
use crate::support::loopback::addresses;

/// A control plane.
struct Plane {
    bound: Bound,
}

/// Returns the origin of a relay of these control planes.
fn relay_of(roots: &[SocketAddr]) -> Origin {
    Origin::ControlPlane(relay::Config {
        flags: SourceFlags {
            source_controlplane: roots
                .iter()
                .map(|at| at.to_string().parse().unwrap())
                .collect(),
            ..SourceFlags::default()
        },
        access: None,
        mark: 0,
    })
}

fn peers_at(all: &[SocketAddr]) -> peers::Config {
    let peers = all.iter().map(|at| at.to_string().parse().unwrap());
    let flags = PeerFlags {
        peers: peers.collect(),
        ..PeerFlags::default()
    };
    flags.config(0)
}

impl Plane {
    async fn start(at: SocketAddr, origin: Origin) -> Self {
        Self::with_peers(at, origin, &[]).await
    }

    async fn with_peers(at: SocketAddr, origin: Origin, all: &[SocketAddr]) -> Self {
        let config = Config {
            agent_listen: Some(SocketAddr::from((at.ip(), 0))),
            status_listen: Some(at),
            protection: Protection::PlainText { exposed: false },
            peers: peers_at(all),
            ..Config::new(origin)
        };
        until_free(at).await;
        let bound = build(config).await.unwrap();
        Self { bound }
    }

    /// Starts a control plane on a folder, and waits until it has read it.
    async fn root(at: SocketAddr, folder: &Path) -> Self {
        let root = Self::start(at, Origin::Manifests(folder.to_owned())).await;
        root.synced().await;
        root
    }

    async fn relay(at: SocketAddr, roots: &[SocketAddr]) -> Self {
        let relay = Self::start(at, relay_of(roots)).await;
        relay.synced().await;
        relay
    }

    fn hub(&self) -> &Arc<Hub> {
        self.bound.hub()
    }

    async fn synced(&self) {
        let mut head = self.hub().store.head();
        let synced = head.wait_for(|head| head.synced);
        timeout(DEADLINE, synced).await.unwrap().unwrap();
    }

    fn revision(&self) -> u64 {
        self.hub().store.head().borrow().revision
    }

    /// Ends the control plane and its connections.
    async fn stop(self) {
        self.bound.shutdown_token().cancel();
        timeout(DEADLINE, self.bound.wait()).await.unwrap().unwrap();
    }

    async fn status(&self) -> StatusServiceClient<tonic::transport::Channel> {
        let address = format!("http://{}", self.bound.status_addr.unwrap());
        StatusServiceClient::connect(address).await.unwrap()
    }

    async fn fleet(&self) -> pb::Fleet {
        let fleet = self
            .status()
            .await
            .get_fleet(pb::GetFleetRequest::default())
            .await;
        fleet.unwrap().into_inner()
    }

    /// Waits until the status is as wanted.
    async fn fleet_until(&self, wanted: impl Fn(&pb::Fleet) -> bool) -> pb::Fleet {
        let until = Instant::now() + DEADLINE;
        loop {
            let fleet = self.fleet().await;
            if wanted(&fleet) {
                return fleet;
            }
            assert!(Instant::now() < until, "{fleet:#?}");
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until this control plane publishes for these nodes what another one does.
    async fn equals(&self, other: &Self, nodes: &[&str]) {
        let until = Instant::now() + DEADLINE;
        let differs = |node: &&&str| {
            let [ours, theirs] = [self, other].map(|plane| plane.hub().store.digest(node));
            ours != theirs
        };
        while let Some(node) = nodes.iter().find(differs) {
            assert!(Instant::now() < until, "{node} differs");
            sleep(Duration::from_micros(200)).await;
        }
    }
}

/// Returns the reasons of all problems that a control plane names.
fn reasons(fleet: &pb::Fleet) -> Vec<String> {
    let plane = fleet.control_plane.as_ref().unwrap();
    plane
        .issues
        .iter()
        .map(|issue| issue.reason.clone())
        .collect()
}

/// Writes Services with these numbers, each with an endpoint on node a and one on node b, and these nodes.
fn write(folder: &Path, services: Range<usize>) {
    let mut text = String::new();
    for (node, zone) in [("a", "x"), ("b", "y")] {
        write!(
            text,
            "apiVersion: v1\nkind: Node\nmetadata: {{name: {node}, labels: {{topology.kubernetes.io/zone: {zone}}}}}\n---\n"
        )
        .unwrap();
    }
    for n in services {
        let ip = Ipv4Addr::from(0x0a60_0001 + u32::try_from(n).unwrap());
        write!(
            text,
            "apiVersion: v1\nkind: Service\nmetadata: {{name: s{n}, namespace: shop}}\n\
             spec: {{clusterIP: {ip}, clusterIPs: [{ip}], ports: [{{port: 80}}]}}\n---\n\
             apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n\
             metadata: {{name: s{n}-1, namespace: shop, labels: {{kubernetes.io/service-name: s{n}}}}}\n\
             ports: [{{name: \"\", port: 8080}}]\nendpoints:\n- {{addresses: [10.244.0.1], nodeName: a}}\n\
             - {{addresses: [10.244.1.1], nodeName: b}}\n---\n"
        )
        .unwrap();
    }
    let new = folder.join(".new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, folder.join("all.yaml")).unwrap();
}

fn folder(services: usize) -> TempDir {
    let folder = TempDir::new().unwrap();
    write(folder.path(), 0..services);
    folder
}

const ZONES: [&str; 2] = ["x", "y"];
const NODES: [&str; 3] = ["a", "b", "c"];

/// Numbers that look random, and are the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % end
    }

    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len())]
    }

    /// Returns a Service of any kind: zone and node hints, both protocols and policies, draining endpoints.
    fn service(&mut self) -> (ServiceKey, Option<Published>) {
        let mut key = ServiceKey::sample("shop", &format!("s{}", self.below(12)));
        if key.service.name.ends_with('1') {
            key.protocol = Protocol::Udp;
        }
        if self.below(6) == 0 {
            return (key, None);
        }
        let hints = self.below(3);
        let endpoints = (0..self.below(5)).map(|n| {
            let ip = IpAddr::from([10, 0, 0, u8::try_from(n).unwrap()]);
            let mut endpoint = Endpoint::ready(EndpointAddr { ip, port: 8080 });
            endpoint.node = Some(self.one(&NODES).into());
            endpoint.ready = self.below(5) > 0;
            endpoint.terminating = !endpoint.ready;
            match hints {
                1 => endpoint.zone_hints = vec![self.one(&ZONES).into()],
                2 => endpoint.node_hints = vec![self.one(&NODES).into()],
                _ => {}
            }
            endpoint
        });
        let endpoints = merge(endpoints.collect::<Vec<_>>());
        let mut port = ServicePort::sample(key.clone());
        if self.below(4) == 0 {
            port.internal_policy = TrafficPolicy::Local;
        }
        (key, Some(Published::new(port, &endpoints)))
    }

    fn node(&mut self) -> NodeFacts {
        let known = self.below(4) > 0;
        let zone = known.then(|| self.one(&ZONES).into());
        NodeFacts {
            name: self.one(&NODES).into(),
            zone,
            addresses: match known {
                true => vec![IpAddr::from([192, 0, 2, 1])],
                false => Vec::new(),
            },
            eligible: true,
            known,
            ..NodeFacts::default()
        }
    }

    fn publication(&mut self) -> Publication {
        let services: std::collections::BTreeMap<ServiceKey, _> =
            (0..self.below(4)).map(|_| self.service()).collect();
        let nodes = match self.below(5) {
            0 => vec![self.node()],
            _ => Vec::new(),
        };
        let cidrs = ["10.96.0.0/16", "10.97.0.0/16"];
        let service_cidrs = (self.below(20) == 0).then(|| vec![self.one(&cidrs).parse().unwrap()]);
        Publication {
            services: services.into_iter().collect(),
            nodes,
            service_cidrs,
            observed_at: SystemTime::now(),
            triggers: Vec::new(),
        }
    }
}

/// Changes of all kinds, through two levels: each node finds the same objects everywhere, also nodes that nobody knows.
#[tokio::test]
async fn relays_publish_what_their_root_publishes() {
    let [top, middle, bottom] = addresses();
    let folder = TempDir::new().unwrap();
    let root = Plane::root(top, folder.path()).await;
    let first = Plane::relay(middle, &[top]).await;
    let second = Plane::relay(bottom, &[middle]).await;
    let agent: NodeName = "c".into();
    for plane in [&root, &first, &second] {
        // An agent that comes before its Node does.
        plane.hub().store.attend(&agent);
    }
    let nodes = ["a", "b", "c", "stranger"];
    let mut dice = Dice(1);
    for step in 0..400 {
        root.hub().store.publish(dice.publication());
        if step % 10 == 0 {
            first.equals(&root, &nodes).await;
            second.equals(&root, &nodes).await;
        }
    }
    first.equals(&root, &nodes).await;
    second.equals(&root, &nodes).await;
    let totals = |plane: &Plane| plane.hub().store.nodes();
    assert_eq!(totals(&root), totals(&second));
    // A relay that begins now reads all of it at once.
    let [late] = addresses();
    let third = Plane::relay(late, &[bottom]).await;
    third.equals(&root, &nodes).await;
    assert_eq!(third.hub().path().len(), 4);
    // What people see is what the objects tell.
    for plane in [&root, &first, &second, &third] {
        plane.synced().await;
    }
    let services = |plane: Plane| async move {
        let mut status = plane.status().await;
        let list = status.list_services(pb::ListServicesRequest::default());
        let list = list.await.unwrap().into_inner().services;
        let names = list
            .into_iter()
            .map(|service| (service.key, service.cluster_ip));
        names.collect::<Vec<_>>()
    };
    let [one, other] = [services(second).await, services(third).await];
    assert!(!one.is_empty());
    assert_eq!(one, other);
}

/// The time that each level adds to a change. Nothing is gated: the goal is 20 ms.
#[tokio::test]
async fn each_level_adds_little_to_the_time_of_a_change() {
    let [top, middle, bottom] = addresses();
    let folder = TempDir::new().unwrap();
    let root = Plane::root(top, folder.path()).await;
    let first = Plane::relay(middle, &[top]).await;
    let second = Plane::relay(bottom, &[middle]).await;
    let mut dice = Dice(7);
    let (mut firsts, mut seconds) = (Vec::new(), Vec::new());
    for _ in 0..40 {
        sleep(Duration::from_millis(55)).await;
        let began = Instant::now();
        root.hub().store.publish(Publication {
            services: vec![dice.service(), dice.service()],
            ..dice.publication()
        });
        first.equals(&root, &NODES).await;
        firsts.push(began.elapsed());
        second.equals(&root, &NODES).await;
        seconds.push(began.elapsed());
    }
    for (level, times) in [(1, &mut firsts), (2, &mut seconds)] {
        times.sort_unstable();
        let [half, most, all] = [20, 38, 39].map(|n| times[n]);
        println!("level {level}: 50 % {half:?}, 95 % {most:?}, all {all:?}");
    }
}

/// The state of the source is that of the root: what it knows of nodes, of itself, and of the way.
#[tokio::test]
async fn a_relay_says_what_its_source_is() {
    let [top, middle, bottom] = addresses();
    let folder = folder(3);
    let root = Plane::root(top, folder.path()).await;
    root.hub().upstream.set_cluster_id("blue".to_owned());
    let relay = Plane::relay(middle, &[top]).await;
    let second = Plane::relay(bottom, &[middle]).await;
    // A control plane of another cluster is none of theirs.
    let [other] = addresses();
    let stranger = Plane::root(other, folder.path()).await;
    stranger.hub().upstream.set_cluster_id("green".to_owned());
    let [edge] = addresses();
    let third = Plane::relay(edge, &[top, other]).await;
    for (plane, source) in [
        (&relay, format!("relay of {top} (level 1)")),
        (&second, format!("relay of {middle} (level 2)")),
    ] {
        assert_eq!(plane.hub().upstream.cluster_id(), "blue");
        let fleet = plane.fleet().await;
        assert_eq!(reasons(&fleet), [""; 0]);
        let status = fleet.control_plane.unwrap();
        assert_eq!(
            (status.source, status.services, status.endpoints),
            (source, 3, 6)
        );
        assert!(status.upstream_age_ms < 10_000);
        assert!(!plane.hub().names_are_nodes());
    }
    let mut status = second.status().await;
    let described = status.describe_service(pb::DescribeServiceRequest {
        namespace: "shop".to_owned(),
        name: "s1".to_owned(),
    });
    let described = described.await.unwrap().into_inner();
    let endpoints = &described.ports[0].endpoints;
    let places = endpoints
        .iter()
        .map(|e| (e.address.as_str(), e.node.as_str()));
    assert_eq!(
        places.collect::<Vec<_>>(),
        [("10.244.0.1:8080", "a"), ("10.244.1.1:8080", "b")]
    );
    root.stop().await;
    let refused = |fleet: &pb::Fleet| {
        let reasons = reasons(fleet);
        let named = |reason: &String| reason.contains("\"green\"") && reason.contains("\"blue\"");
        reasons.iter().any(named)
    };
    let fleet = third.fleet_until(refused).await;
    let source = fleet.control_plane.unwrap().source;
    assert_eq!(source, format!("relay of {top} (level 1)"));
}
