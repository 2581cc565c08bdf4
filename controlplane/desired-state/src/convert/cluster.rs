//! Nodes and ServiceCIDRs (A20, A21, B9, G3).

use std::net::IpAddr;

use kplane_model::{Cidr, Family, Issue, NodeFacts, Reason, parse_ip, refused_endpoint_ip};

use super::report::Report;
use crate::k8s::{self, Kind, TO_BE_DELETED_TAINT, ZONE_LABEL};

/// The shortest valid prefix of a ServiceCIDR in each family. Unallocated addresses inside a
/// ServiceCIDR are dropped (A20), so a range that contains the Internet would cut nodes off.
const SERVICE_CIDR_MIN_PREFIX: [(Family, u8); 2] = [(Family::V4, 8), (Family::V6, 32)];

/// Converts a Node. `service_cidrs` stays empty, because they belong to the cluster, not to the
/// node.
pub fn node(node: &k8s::Node, location: &str) -> (NodeFacts, Vec<Issue>) {
    let mut report = Report::new(Kind::Node, &node.metadata, location);
    let zone = node.metadata.label(ZONE_LABEL);
    let mut taints = node.spec.taints.iter().flatten();
    let facts = NodeFacts {
        name: node.metadata.name.clone(),
        zone: zone.filter(|zone| !zone.is_empty()).cloned(),
        addresses: addresses(node, &mut report),
        pod_cidrs: pod_cidrs(node, &mut report),
        service_cidrs: Vec::new(),
        // G3: no other taint makes a node ineligible.
        eligible: node.metadata.deletion_timestamp.is_none()
            && !taints.any(|taint| taint.key == TO_BE_DELETED_TAINT),
        known: true,
        other_nodes: false,
    };
    (facts, report.finish())
}

/// Returns the unique addresses, InternalIP before ExternalIP.
fn addresses(node: &k8s::Node, report: &mut Report<'_>) -> Vec<IpAddr> {
    let mut ips = Vec::new();
    for wanted in ["InternalIP", "ExternalIP"] {
        for address in node.status.addresses.iter().flatten() {
            if address.type_ != wanted {
                continue;
            }
            match parse_ip(&address.address) {
                Err(error) => {
                    report.error(
                        Reason::InvalidAddress,
                        format!("status.addresses: {wanted} {error}; correct it"),
                    );
                }
                Ok(ip) => match refused_endpoint_ip(ip) {
                    Some(why) => report.error(
                        Reason::InvalidAddress,
                        format!("status.addresses: {wanted} {ip} {why} and is refused; correct it"),
                    ),
                    None if ips.contains(&ip) => {}
                    None => ips.push(ip),
                },
            }
        }
    }
    ips
}

fn pod_cidrs(node: &k8s::Node, report: &mut Report<'_>) -> Vec<Cidr> {
    let all = node.spec.pod_cidrs.as_deref().unwrap_or_default();
    let first = node.spec.pod_cidr.as_ref().filter(|text| !text.is_empty());
    let mut cidrs = Vec::new();
    for text in first.into_iter().chain(all) {
        match text.parse::<Cidr>() {
            Ok(cidr) if cidrs.contains(&cidr) => {}
            Ok(cidr) => cidrs.push(cidr),
            Err(error) => report.error(
                Reason::InvalidAddress,
                format!("spec.podCIDRs: {error}; correct it"),
            ),
        }
    }
    cidrs
}

/// Returns the ranges of a ServiceCIDR.
pub fn service_cidr(cidr: &k8s::ServiceCidr, location: &str) -> (Vec<Cidr>, Vec<Issue>) {
    let mut report = Report::new(Kind::ServiceCidr, &cidr.metadata, location);
    let mut cidrs = Vec::new();
    for text in cidr.spec.cidrs.iter().flatten() {
        match believable(text) {
            Ok(cidr) if cidrs.contains(&cidr) => {}
            Ok(cidr) => cidrs.push(cidr),
            Err(reason) => report.error(Reason::InvalidAddress, format!("spec.cidrs: {reason}")),
        }
    }
    (cidrs, report.finish())
}

fn believable(text: &str) -> Result<Cidr, String> {
    let cidr: Cidr = text.parse().map_err(|error| format!("{error}; correct it"))?;
    let wide = |(family, min)| family == cidr.family() && cidr.prefix_len() < min;
    if SERVICE_CIDR_MIN_PREFIX.into_iter().any(wide) {
        return Err(format!(
            "{cidr} is too wide to be the range of cluster addresses and is refused, because \
             unused addresses inside are dropped; narrow it"
        ));
    }
    if let Some(why) = refused_endpoint_ip(cidr.first()) {
        return Err(format!("{cidr} {why} and is refused; use another range"));
    }
    Ok(cidr)
}
