//! What the benchmarks fill a kernel with, and how they print times.

use std::net::Ipv4Addr;
use std::time::Duration;

use kplane_desired_state::publish::Published;
use kplane_model::{Endpoint, EndpointAddr, ServiceKey, ServicePort, TrafficPolicy};

/// Returns the endpoint with a number, ready.
pub(crate) fn endpoint(n: u32) -> Endpoint {
    let ip = Ipv4Addr::from_bits(u32::from(Ipv4Addr::new(10, 128, 0, 0)) + n);
    Endpoint::ready(EndpointAddr::new(ip, 8080))
}

/// Returns the ClusterIP of a Service.
pub(crate) fn cluster_ip(n: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::from(Ipv4Addr::new(10, 96, 0, 1)) + n)
}

/// What the kernel is filled with.
#[derive(Clone, Copy)]
pub(crate) struct Workload {
    /// Number of Services.
    pub(crate) services: u32,
    /// Of each Service.
    pub(crate) endpoints: u32,
    /// 5 % of the Services have everything that a Service can have.
    pub(crate) companions: bool,
}

impl Workload {
    /// Endpoints of a Service, the last of which may be another one.
    fn endpoints(self, n: u32, last: Option<Endpoint>) -> Vec<Endpoint> {
        let mut endpoints: Vec<Endpoint> =
            (0..self.endpoints).map(|i| endpoint(self.endpoints * n + i)).collect();
        if let (Some(last), Some(place)) = (last, endpoints.last_mut()) {
            *place = last;
        }
        endpoints
    }

    /// Returns all Services.
    pub(crate) fn all(self) -> Vec<(ServiceKey, Option<Published>)> {
        (0..self.services).map(|n| self.service(n, None)).collect()
    }

    /// Returns a Service; `last` takes the place of its last endpoint.
    #[expect(clippy::unwrap_used, reason = "a benchmark may panic")]
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
            Published::new(published.port, &endpoints)
        });
        (key, published)
    }
}

fn service(n: u32, endpoints: &[Endpoint]) -> (ServiceKey, Option<Published>) {
    let key = ServiceKey::sample("default", &format!("service-{n:05}"));
    let port = ServicePort {
        cluster_ip: cluster_ip(n).into(),
        ..ServicePort::sample(key.clone())
    };
    (key, Some(Published::new(port, endpoints)))
}

/// Prints the 50th, 90th and 99th percentile and the maximum.
pub(crate) fn percentiles(sorted: &[Duration]) -> String {
    let at = |percent: usize| show(sorted[(sorted.len() - 1) * percent / 100]);
    format!("{:>8} {:>8} {:>8} {:>8}", at(50), at(90), at(99), at(100))
}

/// Prints a time in the unit that fits.
pub(crate) fn show(took: Duration) -> String {
    let us = took.as_secs_f64() * 1e6;
    match us {
        ..1_000.0 => format!("{us:.0} us"),
        ..100_000.0 => format!("{:.1} ms", us / 1e3),
        _ => format!("{:.0} ms", us / 1e3),
    }
}

/// Returns times side by side.
pub(crate) fn shown(times: &[Duration]) -> String {
    let times = times.iter().map(|time| format!("{:>8}", show(*time)));
    Vec::from_iter(times).join(" ")
}
