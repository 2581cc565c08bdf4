//! What the benchmarks fill a kernel with, and how they print times.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use kp_controlplane::publish::Published;
use kplane_model::select::variants;
use kplane_model::{
    Endpoint, EndpointAddr, Family, Protocol, ServiceKey, ServiceName, TrafficPolicy,
};

use crate::service::cluster_ip_service;

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

fn service(n: u32, endpoints: &[Endpoint]) -> (ServiceKey, Option<Published>) {
    let key = ServiceKey {
        service: ServiceName::new("default", &format!("service-{n:05}")),
        port_name: "http".into(),
        protocol: Protocol::Tcp,
        family: Family::V4,
    };
    let published = cluster_ip_service(key.clone(), 80, cluster_ip(n).into(), endpoints);
    (key, Some(published))
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
