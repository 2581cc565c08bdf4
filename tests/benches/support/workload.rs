//! What the benchmarks fill a kernel with, and how they hand it to an agent's engine.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, SystemTime};

use kp_controlplane::publish::{Cursor, Publication, Published, Store};
use kp_nodeagent::backend::{Kind, Settings};
use kp_nodeagent::desired::Collector;
use kp_nodeagent::engine::Engine;
use kp_nodeagent::plan::NodeSettings;
use kplane_model::select::variants;
use kplane_model::{
    Endpoint, EndpointAddr, Family, Protocol, ServiceKey, ServiceName, ServicePort, TrafficPolicy,
};
use kplane_proto::v1::{self as pb, server_message};
use kplane_tests::netns::NetNs;
use prost::Message;

/// Nothing here takes longer.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

pub(crate) fn endpoint(n: u32) -> Endpoint {
    let ip = Ipv4Addr::from_bits(u32::from(Ipv4Addr::new(10, 128, 0, 0)) + n);
    Endpoint::ready(EndpointAddr {
        ip: IpAddr::V4(ip),
        port: 8080,
    })
}

pub(crate) fn cluster_ip(n: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::from(Ipv4Addr::new(10, 96, 0, 1)) + n)
}

/// What the kernel is filled with.
#[derive(Clone, Copy)]
pub(crate) struct Workload {
    pub(crate) services: u32,
    /// Of each Service.
    pub(crate) endpoints: u32,
    /// 5 % of the Services have everything that a Service can have.
    pub(crate) companions: bool,
}

impl Workload {
    /// Endpoints of a Service, the last of which may be another one.
    fn endpoints(self, n: u32, last: Option<Endpoint>) -> Vec<Endpoint> {
        let mut endpoints: Vec<Endpoint> = (0..self.endpoints)
            .map(|i| endpoint(self.endpoints * n + i))
            .collect();
        if let (Some(last), Some(place)) = (last, endpoints.last_mut()) {
            *place = last;
        }
        endpoints
    }

    pub(crate) fn service(self, n: u32, last: Option<Endpoint>) -> (ServiceKey, Option<Published>) {
        let endpoints = self.endpoints(n, last);
        let (key, published) = service(n, &endpoints);
        if !self.companions || !n.is_multiple_of(20) {
            return (key, published);
        }
        let published = published.map(|mut published| {
            let port = &mut published.port;
            let balancer = Ipv4Addr::from_bits(cluster_ip(n).to_bits() + (1 << 24));
            port.load_balancer_ips = vec![balancer.into()];
            port.node_port = u16::try_from(30_000 + n / 20).ok();
            port.external_policy = TrafficPolicy::Local;
            port.affinity_timeout_s = Some(10_800);
            let range = |text: &str| text.parse().unwrap();
            port.source_ranges = vec![range("192.0.2.0/24"), range("198.51.100.0/25")];
            published.variants = variants(port, &endpoints);
            published
        });
        (key, published)
    }
}

pub(crate) fn service(n: u32, endpoints: &[Endpoint]) -> (ServiceKey, Option<Published>) {
    let key = ServiceKey {
        service: ServiceName::new("default", &format!("service-{n:05}")),
        port_name: "http".into(),
        protocol: Protocol::Tcp,
        family: Family::V4,
    };
    let port = ServicePort {
        key: key.clone(),
        port: 80,
        cluster_ip: cluster_ip(n).into(),
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        node_port: None,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        affinity_timeout_s: None,
        source_ranges: Vec::new(),
        health_check_node_port: None,
    };
    let variants = variants(&port, endpoints);
    (
        key,
        Some(Published {
            port,
            variants,
            local: BTreeMap::new(),
        }),
    )
}

pub(crate) fn publish(store: &Store, services: Vec<(ServiceKey, Option<Published>)>) {
    store.publish(&Publication {
        services,
        nodes: Vec::new(),
        service_cidrs: None,
        observed_at: SystemTime::now(),
    });
}

/// What the control plane would send to a node next, and its length on the wire.
pub(crate) fn messages(
    store: &Store,
    cursor: &mut Cursor,
    snapshot: bool,
) -> (Vec<pb::Update>, usize) {
    let (mut updates, mut bytes) = (Vec::new(), 0);
    loop {
        let piece = store.collect("bench", cursor);
        let last = piece.end.is_some();
        let update = pb::Update {
            objects: piece.objects,
            deleted: piece.deleted.iter().map(Into::into).collect(),
            snapshot: snapshot && updates.is_empty(),
            end: piece.end.map(|end| pb::UpdateEnd {
                revision: end.revision,
                digest: end.digest.to_bytes().to_vec(),
                changed_at_ms: 1_800_000_000_000,
            }),
        };
        let message = pb::ServerMessage {
            kind: Some(server_message::Kind::Update(update.clone())),
        };
        // gRPC puts five bytes in front of each.
        bytes += message.encoded_len() + 5;
        updates.push(update);
        if last {
            return (updates, bytes);
        }
    }
}

/// Hands an update over and waits for the report that the kernel holds it.
pub(crate) async fn submit(engine: &Engine, pieces: Vec<pb::Update>) -> kp_nodeagent::report::Sync {
    let mut reports = engine.reports();
    let mut collector = Collector::new(1);
    let mut update = None;
    for piece in pieces {
        update = collector.push(piece).unwrap();
    }
    let update = update.expect("the last piece ends the update");
    let revision = update.position.revision;
    engine.submit(update).await.unwrap().unwrap();
    let applied = reports.wait_for(|r| r.applied.is_some_and(|p| p.revision >= revision));
    let report = tokio::time::timeout(DEADLINE, applied)
        .await
        .unwrap()
        .unwrap();
    report
        .last_sync
        .clone()
        .expect("an applied update has its times")
}

pub(crate) fn percentiles(sorted: &[Duration]) -> String {
    let at = |percent: usize| show(sorted[(sorted.len() - 1) * percent / 100]);
    format!("{:>8} {:>8} {:>8} {:>8}", at(50), at(90), at(99), at(100))
}

pub(crate) fn show(took: Duration) -> String {
    let us = took.as_secs_f64() * 1e6;
    match us {
        ..1_000.0 => format!("{us:.0} us"),
        ..100_000.0 => format!("{:.1} ms", us / 1e3),
        _ => format!("{:.0} ms", us / 1e3),
    }
}

/// An agent's engine in a namespace.
pub(crate) async fn engine(ns: NetNs) -> Engine {
    let open = move || {
        // The engine's thread lives in the namespace until it ends.
        std::mem::forget(ns.enter().unwrap());
        Kind::Nftables.open(&Settings::default())
    };
    Engine::spawn(open, NodeSettings::default()).await.unwrap()
}
