//! Where a client outside of the cluster finds a Service.

use std::net::{IpAddr, SocketAddr};

use kplane_desired_state::index::{PortView, ServiceDetail};
use kplane_model::fate::Place;
use kplane_model::{Family, Issue, NodeFacts, Reason, ServicePort};
use tonic::Status;

use super::refusal;

/// A kind of place for clients outside: the place, its address and its port.
type Way = fn(&ServicePort, &NodeFacts) -> Option<(Place, IpAddr, u16)>;

/// Returns where a client outside finds a Service: its load balancer's address, an external one, or else its node port.
pub(super) fn outside<'a>(
    views: &[&'a PortView],
    node: &NodeFacts,
) -> Option<(&'a PortView, Place, SocketAddr)> {
    let ways: [Way; 3] = [
        |port, _| {
            let ip = *port.load_balancer_ips.first()?;
            Some((Place::LoadBalancer(ip), ip, port.port))
        },
        |port, _| {
            let ip = *port.external_ips.first()?;
            Some((Place::ExternalIp(ip), ip, port.port))
        },
        |port, node| {
            let of_family = |ip: &&IpAddr| Family::of(**ip) == port.key.family;
            let ip = *node.addresses.iter().find(of_family)?;
            Some((Place::NodePort, ip, port.node_port?))
        },
    ];
    ways.iter().find_map(|way| {
        views.iter().find_map(|view| {
            let (place, ip, number) = way(&view.port, node)?;
            Some((*view, place, SocketAddr::new(ip, number)))
        })
    })
}

/// Returns why the Service does not get a place for clients outside that it asks for.
pub(super) fn refused_outside(detail: &ServiceDetail) -> Option<&Issue> {
    let places = Reason::AddressConflict..=Reason::ExternalIpRefused;
    refusal(detail, |issue| places.contains(&issue.code))
}

/// Returns the error for a Service that clients outside do not find.
pub(super) fn not_outside(views: &[&PortView], detail: &ServiceDetail) -> Status {
    if let Some(issue) = refused_outside(detail) {
        let reason = &issue.reason;
        return Status::not_found(format!("clients outside do not find the Service: {reason}"));
    }
    let first = views.first().map(|view| &view.port);
    let cluster_ip = first.map_or_else(String::new, |port| {
        SocketAddr::new(port.cluster_ip, port.port).to_string()
    });
    Status::invalid_argument(format!(
        "the Service has no address of a load balancer, no external address and no node port for clients outside; if \
         the network leads them to its ClusterIP: --to {cluster_ip}"
    ))
}
