//! Samples for tests and benchmarks: objects with neutral values. A test names only the fields that it is about:
//!
//! ```
//! use kplane_model::{ServiceKey, ServicePort};
//!
//! let port = ServicePort {
//!     node_port: Some(30_080),
//!     ..ServicePort::sample(ServiceKey::sample("shop", "web"))
//! };
//! assert_eq!((port.port, port.external_ips.len()), (80, 0));
//! ```
//!
//! So a new field of these types gets its neutral value here, and all other tests stay as they are. No
//! feature hides this module: the programs do not link it, and a feature that only tests enable would compile
//! every crate of the product twice.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::key::{KeyParts, ServiceKey, ServiceName};
use crate::net::{EndpointAddr, Family, Protocol};
use crate::node::NodeFacts;
use crate::program::{LocalEndpoint, LocalEndpoints, ServiceProgram};
use crate::service::{ServicePort, TrafficPolicy};

impl ServiceKey {
    /// Returns the key of a Service's port `http`, TCP over IPv4.
    pub fn sample(namespace: &str, name: &str) -> Self {
        Self::from(KeyParts {
            service: ServiceName::new(namespace, name),
            port_name: "http".into(),
            protocol: Protocol::Tcp,
            family: Family::V4,
        })
    }
}

impl NodeFacts {
    /// Returns a Node of which only the name is known.
    pub fn sample(name: &str) -> Self {
        Self {
            name: name.into(),
            known: true,
            ..Self::default()
        }
    }
}

impl ServicePort {
    /// Returns port 80 of a ClusterIP, 10.96.0.1 or fd96::1, that has nothing else.
    pub fn sample(key: ServiceKey) -> Self {
        let cluster_ip = match key.family {
            Family::V4 => IpAddr::V4(Ipv4Addr::new(10, 96, 0, 1)),
            Family::V6 => IpAddr::V6(Ipv6Addr::new(0xfd96, 0, 0, 0, 0, 0, 0, 1)),
        };
        Self {
            key,
            port: 80,
            cluster_ip,
            external_ips: Vec::new(),
            load_balancer_ips: Vec::new(),
            node_port: None,
            internal_policy: TrafficPolicy::Cluster,
            external_policy: TrafficPolicy::Cluster,
            affinity_timeout_s: None,
            source_ranges: Vec::new(),
            health_check_node_port: None,
            ipvs_scheduler: None,
            proxied: None,
        }
    }
}

impl ServiceProgram {
    /// Returns a ServicePort with these endpoints, and no others that serve.
    pub fn sample(port: ServicePort, endpoints: Vec<EndpointAddr>) -> Self {
        Self {
            port,
            has_any: !endpoints.is_empty(),
            endpoints,
            serving_others: Vec::new(),
            dead: Vec::new(),
        }
    }
}

impl LocalEndpoints {
    /// Returns ready endpoints of a ServicePort on a node.
    pub fn sample(key: ServiceKey, endpoints: impl IntoIterator<Item = EndpointAddr>) -> Self {
        let ready = |addr| LocalEndpoint { addr, ready: true };
        Self {
            key,
            endpoints: endpoints.into_iter().map(ready).collect(),
        }
    }
}
