//! The frontends of ServicePorts. At most one ServicePort that the control plane names has a frontend.

use std::net::IpAddr;

use kplane_model::{Family, Protocol, ServicePort};

/// A frontend at which packets or health checks arrive. The control plane resolves conflicts between the
/// ServicePorts that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Frontend {
    Address(IpAddr, Protocol, u16),
    NodePort(Family, Protocol, u16),
    HealthCheck(u16),
}

/// Returns all frontends of a ServicePort.
pub(super) fn frontends(port: &ServicePort) -> impl Iterator<Item = Frontend> + '_ {
    let (protocol, family) = (port.key.protocol, port.key.family);
    std::iter::once(&port.cluster_ip)
        .chain(&port.external_ips)
        .chain(&port.load_balancer_ips)
        .map(move |ip| Frontend::Address(*ip, protocol, port.port))
        .chain(port.node_port.map(|number| Frontend::NodePort(family, protocol, number)))
        .chain(port.health_check_node_port.map(Frontend::HealthCheck))
}
