//! Conversion of EndpointSlices (A27, A28, B2, Z1, Z2).

use std::net::IpAddr;
use std::sync::Arc;

use jiff::Timestamp;
use kplane_model::{
    Endpoint, EndpointAddr, Family, Protocol, Reason, ServiceName, parse_ip, refused_endpoint_ip,
};

use super::report::Report;
use super::{
    ConvertedSlice, MAX_HINTS, MAX_SLICE_ENDPOINTS, MAX_SLICE_TARGETS, SliceEndpoints,
    is_port_name, port_number, protocol,
};
use crate::k8s::{
    self, HEADLESS_LABEL, Hint, Kind, LAST_CHANGE_ANNOTATION, MANAGED_BY_LABEL, SERVICE_NAME_LABEL,
    SLICE_CONTROLLER, SliceEndpoint,
};

/// Converts an EndpointSlice. A refused endpoint or port leaves the rest of the slice served.
pub fn slice(slice: &k8s::EndpointSlice, location: &str) -> ConvertedSlice {
    let mut report = Report::new(Kind::EndpointSlice, &slice.metadata, location);
    let service = service_name(slice, &mut report);
    let family = service.as_ref().and_then(|_| family(slice, &mut report));
    let (addresses, ports) = match family {
        Some(family) => endpoints(slice, family, &mut report),
        None => (0, Vec::new()),
    };
    ConvertedSlice {
        trigger_ms: service.as_ref().map_or(0, |_| trigger_ms(slice)),
        follows_pods: service.is_some() && follows_pods(slice),
        service,
        addresses,
        ports,
        family,
        issues: report.finish(),
    }
}

/// Returns the time of the change that led to the slice (section (h)). Only controllers write it,
/// and only measurements use it, so an invalid value is not worth an issue.
fn trigger_ms(slice: &k8s::EndpointSlice) -> u64 {
    let annotations = slice.metadata.annotations.as_ref();
    let written = annotations.and_then(|all| all.get(LAST_CHANGE_ANNOTATION));
    let at = written.and_then(|text| text.parse::<Timestamp>().ok());
    at.map_or(0, |at| u64::try_from(at.as_millisecond()).unwrap_or(0))
}

/// Returns whether Kubernetes' own controller writes a slice. Others may have reasons of their own to call a Pod ready.
fn follows_pods(slice: &k8s::EndpointSlice) -> bool {
    slice
        .metadata
        .label(MANAGED_BY_LABEL)
        .is_some_and(|by| **by == *SLICE_CONTROLLER)
}

/// Returns the Service of a slice (A27, Z1).
fn service_name(slice: &k8s::EndpointSlice, report: &mut Report<'_>) -> Option<ServiceName> {
    if slice.metadata.label(HEADLESS_LABEL).is_some() {
        return None;
    }
    let name = slice.metadata.label(SERVICE_NAME_LABEL);
    let Some(name) = name.filter(|name| !name.is_empty()) else {
        report.warning(Reason::SliceWithoutService, format!(
            "has no label {SERVICE_NAME_LABEL} and belongs to no Service; add the label with the \
             Service's name"
        ));
        return None;
    };
    let namespace = slice.metadata.namespace_of(Kind::EndpointSlice);
    Some(ServiceName::of(namespace, name.clone()))
}

/// Returns the family of a slice (Z2).
fn family(slice: &k8s::EndpointSlice, report: &mut Report<'_>) -> Option<Family> {
    match slice.address_type.as_str() {
        "IPv4" => Some(Family::V4),
        "IPv6" => Some(Family::V6),
        "FQDN" => {
            report.warning(
                Reason::UnsupportedAddressType,
                "addressType FQDN is not served; use IPv4 or IPv6 addresses",
            );
            None
        }
        other => {
            report.error(Reason::InvalidField, format!(
                "addressType {other:?} is unknown and nothing of the slice is served; use IPv4 or \
                 IPv6"
            ));
            None
        }
    }
}

/// Returns the number of usable addresses, and the endpoints of each port.
fn endpoints(
    slice: &k8s::EndpointSlice,
    family: Family,
    report: &mut Report<'_>,
) -> (usize, Vec<SliceEndpoints>) {
    let targets = targets(slice, family, report);
    let ports = ports(slice, report);
    let fitting = MAX_SLICE_TARGETS / targets.len().max(1);
    if ports.len() > fitting {
        report.error(Reason::TooLarge, format!(
            "{} endpoints x {} ports are more than {MAX_SLICE_TARGETS}; only the first {fitting} \
             ports are served, split the Service",
            targets.len(),
            ports.len()
        ));
    }
    let with_port = |port| move |target: &Target<'_>| target.endpoint(port);
    let ports = ports
        .into_iter()
        .take(fitting)
        .map(|(port_name, protocol, port)| SliceEndpoints {
            port_name,
            protocol,
            family,
            endpoints: targets.iter().map(with_port(port)).collect(),
        });
    (targets.len(), ports.collect())
}

/// Returns the ports of a slice; ports without a number are skipped (A27). One without a name has the name `""`, as the API
/// server would write it.
fn ports(slice: &k8s::EndpointSlice, report: &mut Report<'_>) -> Vec<(Arc<str>, Protocol, u16)> {
    let mut ports: Vec<(Arc<str>, Protocol, u16)> = Vec::new();
    for (index, port) in slice.ports.iter().flatten().enumerate() {
        match convert_port(port) {
            Err(reason) => report.error(Reason::InvalidPort, format!("ports[{index}] {reason}")),
            Ok((name, protocol, _)) if ports.iter().any(|p| p.0 == name && p.1 == protocol) => {
                report.error(Reason::InvalidPort, format!(
                    "ports[{index}] has the name {name:?} and protocol {protocol} of an earlier \
                     port and is not served; rename it"
                ));
            }
            Ok(port) => ports.push(port),
        }
        if ports.len() > super::MAX_SERVICE_PORTS {
            break;
        }
    }
    ports
}

fn convert_port(port: &k8s::SlicePort) -> Result<(Arc<str>, Protocol, u16), String> {
    let name = port.name.clone().unwrap_or_default();
    if !is_port_name(&name) {
        return Err(format!(
            "has the name {name:?} and is not served; use up to 63 lower-case letters, digits and -"
        ));
    }
    let protocol =
        protocol(port.protocol.as_deref()).map_err(|error| format!("is not served: {error}"))?;
    let number = port.port.unwrap_or(0);
    let number = port_number(number)
        .ok_or_else(|| format!("has the port {number} and is not served; use 1..=65535"))?;
    Ok((name, protocol, number))
}

/// An endpoint before it has a port.
struct Target<'a> {
    ip: IpAddr,
    from: &'a SliceEndpoint,
    pod: Option<Arc<str>>,
    zone_hints: Vec<Arc<str>>,
    node_hints: Vec<Arc<str>>,
}

impl Target<'_> {
    /// Completes the endpoint with a port. `ready` and `serving` are true where unset, each on its
    /// own; `terminating` is false (A27).
    fn endpoint(&self, port: u16) -> Endpoint {
        let conditions = self.from.conditions.as_ref();
        Endpoint {
            addr: EndpointAddr { ip: self.ip, port },
            ready: conditions.and_then(|c| c.ready).unwrap_or(true),
            serving: conditions.and_then(|c| c.serving).unwrap_or(true),
            terminating: conditions.and_then(|c| c.terminating).unwrap_or(false),
            pod: self.pod.clone(),
            node: self.from.node_name.clone().filter(|node| !node.is_empty()),
            zone_hints: self.zone_hints.clone(),
            node_hints: self.node_hints.clone(),
        }
    }
}

fn targets<'s>(
    slice: &'s k8s::EndpointSlice,
    family: Family,
    report: &mut Report<'_>,
) -> Vec<Target<'s>> {
    let written = slice.endpoints.as_deref().unwrap_or_default();
    if written.len() > MAX_SLICE_ENDPOINTS {
        report.error(Reason::TooLarge, format!(
            "has {} endpoints; only the first {MAX_SLICE_ENDPOINTS} are served, split the slice",
            written.len()
        ));
    }
    let namespace = slice.metadata.namespace_of(Kind::EndpointSlice);
    let mut targets = Vec::new();
    for (index, from) in written.iter().take(MAX_SLICE_ENDPOINTS).enumerate() {
        // A27: further addresses of an endpoint belong to the same pod.
        let text = from.addresses.first().map_or("", |text| &**text);
        match address(text, family) {
            Err(reason) => report.error(
                Reason::InvalidAddress,
                format!("endpoints[{index}]: {reason}"),
            ),
            Ok(ip) => targets.push(Target {
                ip,
                from,
                pod: pod(from, &namespace),
                zone_hints: hints(
                    index,
                    from.hints.as_ref().and_then(|h| h.for_zones.as_deref()),
                    report,
                ),
                node_hints: hints(
                    index,
                    from.hints.as_ref().and_then(|h| h.for_nodes.as_deref()),
                    report,
                ),
            }),
        }
    }
    targets
}

/// Returns the name of the Pod that an endpoint names, if it is one of the slice's namespace.
fn pod(endpoint: &SliceEndpoint, namespace: &str) -> Option<Arc<str>> {
    let target = endpoint.target_ref.as_ref()?;
    let of_slice = |name: &Arc<str>| name.is_empty() || **name == *namespace;
    let is_pod = &*target.kind == "Pod" && target.namespace.as_ref().is_none_or(of_slice);
    is_pod.then(|| target.name.clone().unwrap_or_default())
}

/// Parses an endpoint's address; refuses addresses of the node itself, in any notation
/// (CVE-2021-25737).
fn address(text: &str, family: Family) -> Result<IpAddr, String> {
    if text.is_empty() {
        return Err("has no address and is not served; give it one".to_owned());
    }
    let ip = parse_ip(text).map_err(|error| format!("{error} and is not served; correct it"))?;
    if text.contains(':') && ip.is_ipv4() {
        return Err(format!(
            "the address {text} is an IPv4-mapped address and is refused; write {ip} in a slice \
             with addressType IPv4"
        ));
    }
    if let Some(why) = refused_endpoint_ip(ip) {
        return Err(format!(
            "the address {ip} {why} and is refused; traffic must never be sent there"
        ));
    }
    if Family::of(ip) != family {
        return Err(format!(
            "the address {ip} is not {family} as addressType says and is not served; move it to a \
             slice of its family"
        ));
    }
    Ok(ip)
}

/// Returns the names of hints (B2). An endpoint with too many hints counts as one without hints,
/// which turns topology off for its Service.
fn hints(index: usize, hints: Option<&[Hint]>, report: &mut Report<'_>) -> Vec<Arc<str>> {
    let hints = hints.unwrap_or_default();
    if hints.len() > MAX_HINTS {
        report.warning(Reason::TooLarge, format!(
            "endpoints[{index}] has {} topology hints, more than {MAX_HINTS}; they are not used",
            hints.len()
        ));
        return Vec::new();
    }
    hints.iter().map(|hint| hint.name.clone()).collect()
}
