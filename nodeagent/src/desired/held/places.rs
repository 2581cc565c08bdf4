//! The places of ServicePorts. At most one ServicePort that the control plane names has a place.

use std::net::IpAddr;

use kplane_model::{Family, Protocol, ServicePort};

/// A place at which packets or health checks arrive. The control plane resolves conflicts between the
/// ServicePorts that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Place {
    Address(IpAddr, Protocol, u16),
    NodePort(Family, Protocol, u16),
    HealthCheck(u16),
}

/// Returns all places of a ServicePort.
pub(super) fn places(port: &ServicePort) -> impl Iterator<Item = Place> + '_ {
    let (protocol, family) = (port.key.protocol, port.key.family);
    let addresses = std::iter::once(&port.cluster_ip)
        .chain(&port.external_ips)
        .chain(&port.load_balancer_ips);
    addresses
        .map(move |ip| Place::Address(*ip, protocol, port.port))
        .chain(
            port.node_port
                .map(|number| Place::NodePort(family, protocol, number)),
        )
        .chain(port.health_check_node_port.map(Place::HealthCheck))
}
