//! Conversion of Services (A1-A14, A22, Z1, Z2).

use std::net::IpAddr;

use kplane_model::{
    Family, IpvsScheduler, KeyParts, MAX_SERVICE_ELEMENTS, MAX_SERVICE_PLACES, Reason, ServiceKey,
    ServiceName, ServicePort, ServiceSize, TrafficPolicy,
};

use super::addresses::{
    SourceRanges, address, external_ips, load_balancer_ips, of_family, source_ranges,
};
use super::ports::{Port, ports};
use super::proxied::proxied;
use super::report::Report;
use super::{
    ConvertedService, EndpointOrigin, ExternalIps, MAX_SERVICE_PORTS, SkipReason, port_number,
};
use crate::k8s::{
    self, IPVS_SCHEDULER_ANNOTATION, Kind, ObjectMeta, SERVICE_PROXY_NAME_LABEL, ServiceSpec,
};

/// Default idle timeout of session affinity, in seconds: three hours (A11).
const AFFINITY_TIMEOUT_DEFAULT_S: u32 = 10_800;
/// Longest text of a selector, or of an external name, in bytes.
const MAX_SELECTOR: usize = 256;
/// The longest idle timeout of session affinity, in seconds: a day (A11).
const AFFINITY_TIMEOUT_MAX_S: u32 = 86_400;

/// Converts a Service, in both families.
///
/// Choices for invalid input: an unknown traffic policy counts as `Cluster`, as in kube-proxy (A12,
/// A13); an unknown affinity counts as `None` (A11). A load-balancer address with an unknown
/// `ipMode` is not captured (A6). Invalid source ranges never widen access (A8).
pub fn service(svc: &k8s::Service, location: &str, allowed: &ExternalIps) -> ConvertedService {
    let mut report = Report::new(Kind::Service, &svc.metadata, location);
    let skipped = skip_reason(svc);
    let ports = match &skipped {
        None => service_ports(svc, allowed, &mut report),
        Some(SkipReason::NoClusterIp) => {
            report.warning(
                Reason::NoClusterIp,
                "spec.clusterIP is not set, so there is nothing to serve; the API server assigns \
                 one, in a manifest write it yourself, or `None` if the Service is headless",
            );
            Vec::new()
        }
        Some(_) => Vec::new(),
    };
    ConvertedService {
        ports,
        issues: report.finish(),
        skipped,
        origin: origin(svc),
    }
}

/// Returns the origin of a Service's endpoints.
fn origin(svc: &k8s::Service) -> EndpointOrigin {
    let spec = &svc.spec;
    // An entry may have a name only, or an address that others serve.
    let given = svc.status.load_balancer.ingress.iter().flatten().next();
    let labels: Vec<String> = spec
        .selector
        .iter()
        .flat_map(|labels| labels.iter())
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    let ports = spec.ports.iter().flatten().take(MAX_SERVICE_PORTS);
    let named = ports.filter_map(|port| {
        Some((
            port.name.clone().unwrap_or_default(),
            port.target_port.clone()?,
        ))
    });
    EndpointOrigin {
        selector: cut(&labels.join(",")),
        named_targets: named.collect(),
        waits_for_address: spec.type_.as_deref() == Some("LoadBalancer") && given.is_none(),
        publishes_unready: spec.publish_not_ready_addresses,
    }
}

/// Returns the beginning of a text of the input.
fn cut(text: &str) -> Box<str> {
    text[..text.floor_char_boundary(MAX_SELECTOR)].into()
}

/// Returns the reason not to serve a Service (A1, Z1).
fn skip_reason(svc: &k8s::Service) -> Option<SkipReason> {
    if svc.metadata.label(SERVICE_PROXY_NAME_LABEL).is_some() {
        return Some(SkipReason::OtherProxy);
    }
    if svc.spec.type_.as_deref() == Some("ExternalName") {
        let name = svc.spec.external_name.as_deref().unwrap_or_default();
        return Some(SkipReason::ExternalName(cut(name)));
    }
    match cluster_ips(&svc.spec).first() {
        None | Some(&"") => Some(SkipReason::NoClusterIp),
        Some(&"None") => Some(SkipReason::Headless),
        Some(_) => None,
    }
}

/// Returns `clusterIPs`, of which `clusterIP` is the first: a manifest may have only one of the
/// two.
fn cluster_ips(spec: &ServiceSpec) -> Vec<&str> {
    match (spec.cluster_ips.as_deref(), spec.cluster_ip.as_deref()) {
        (Some(all), Some(first)) if !all.is_empty() => {
            std::iter::once(first).chain(all.iter().skip(1).map(String::as_str)).collect()
        }
        (Some(all), None) => all.iter().map(String::as_str).collect(),
        (_, Some(first)) => vec![first],
        (None, None) => Vec::new(),
    }
}

fn service_ports(
    svc: &k8s::Service,
    allowed: &ExternalIps,
    report: &mut Report<'_>,
) -> Vec<ServicePort> {
    let spec = &svc.spec;
    let cluster_ips = cluster_ip_by_family(spec, report);
    let families: Vec<Family> = cluster_ips.iter().map(|(family, _)| *family).collect();
    if families.is_empty() {
        return Vec::new();
    }
    let external_ips = external_ips(spec, &families, allowed, report);
    let load_balancer_ips = load_balancer_ips(svc, &families, report);
    let ranges = source_ranges(spec, report);
    let internal_policy = internal_policy(spec, report);
    let external_policy = external_policy(spec, !external_ips.is_empty(), report);
    let affinity_timeout_s = affinity_timeout_s(spec, report);
    let health_check_node_port = health_check_node_port(spec, external_policy, report);
    let ipvs_scheduler = ipvs_scheduler(&svc.metadata, report);
    let ports = ports(spec, report);
    let proxied = proxied(&svc.metadata, &ports, report);
    let (load_balancer_ips, external_ips) = within_bounds(
        &ports,
        &cluster_ips,
        load_balancer_ips,
        external_ips,
        &ranges,
        report,
    );

    let namespace = svc.metadata.namespace_of(Kind::Service);
    let name = ServiceName::of(namespace, svc.metadata.name.clone());
    let mut converted = Vec::with_capacity(ports.len() * cluster_ips.len());
    for (family, cluster_ip) in cluster_ips {
        let load_balancer_ips = of_family(&load_balancer_ips, family);
        let (load_balancer_ips, source_ranges) = ranges.restrict(load_balancer_ips, family, report);
        for port in &ports {
            converted.push(ServicePort {
                key: ServiceKey::from(KeyParts {
                    service: name.clone(),
                    port_name: port.name.clone(),
                    protocol: port.protocol,
                    family,
                }),
                port: port.port,
                cluster_ip,
                external_ips: of_family(&external_ips, family),
                load_balancer_ips: load_balancer_ips.clone(),
                node_port: port.node_port,
                internal_policy,
                external_policy,
                affinity_timeout_s,
                source_ranges: source_ranges.clone(),
                health_check_node_port,
                ipvs_scheduler,
                proxied,
            });
        }
    }
    converted
}

/// Drops addresses whose product with the ports and source ranges would be too large for nodes,
/// before that product is built.
fn within_bounds(
    ports: &[Port],
    cluster_ips: &[(Family, IpAddr)],
    mut load_balancer_ips: Vec<IpAddr>,
    mut external_ips: Vec<IpAddr>,
    ranges: &SourceRanges,
    report: &mut Report<'_>,
) -> (Vec<IpAddr>, Vec<IpAddr>) {
    let node_ports = ports.iter().filter(|port| port.node_port.is_some());
    let most = |ips: &[IpAddr]| {
        let of = |(family, _): &(Family, IpAddr)| count_of(ips, *family);
        cluster_ips.iter().map(of).max().unwrap_or(0)
    };
    let size = ServiceSize {
        ports: ports.len() * cluster_ips.len(),
        node_ports: node_ports.count() * cluster_ips.len(),
        load_balancer_ips: most(&load_balancer_ips),
        external_ips: most(&external_ips),
        source_ranges: ranges.len(),
        endpoints: 0,
    };
    let allowed = size.allowance();
    let mut keep = |field: &str, ips: &mut Vec<IpAddr>, wanted: usize, allowed: usize| {
        if wanted <= allowed {
            return;
        }
        report.error(Reason::TooLarge, format!(
            "{field} has {wanted} addresses, which with {} ports and {} source ranges exceeds the \
             limits of one Service ({MAX_SERVICE_PLACES} addresses with ports, \
             {MAX_SERVICE_ELEMENTS} elements): only the first {allowed} are served, split the \
             Service",
            ports.len(),
            ranges.len(),
        ));
        let mut kept = [0; 2];
        ips.retain(|ip| {
            let kept = &mut kept[Family::of(*ip) as usize];
            *kept += 1;
            *kept <= allowed
        });
    };
    let (wanted, fits) = (size.load_balancer_ips, allowed.load_balancer_ips);
    keep(
        "status.loadBalancer.ingress",
        &mut load_balancer_ips,
        wanted,
        fits,
    );
    let (wanted, fits) = (size.external_ips, allowed.external_ips);
    keep("spec.externalIPs", &mut external_ips, wanted, fits);
    (load_balancer_ips, external_ips)
}

fn count_of(ips: &[IpAddr], family: Family) -> usize {
    let of_family = |ip: &&IpAddr| Family::of(**ip) == family;
    ips.iter().filter(of_family).count()
}

/// Returns the cluster address of each family (A2). The index of a family in `ipFamilies` is its
/// index in `clusterIPs`; without `ipFamilies` the family of `clusterIP` decides.
fn cluster_ip_by_family(spec: &ServiceSpec, report: &mut Report<'_>) -> Vec<(Family, IpAddr)> {
    let texts = cluster_ips(spec);
    let declared = spec.ip_families.as_deref().unwrap_or_default();
    let mut found: Vec<(Family, IpAddr)> = Vec::new();
    for (index, text) in texts.iter().enumerate() {
        let field = if index == 0 { "spec.clusterIP" } else { "spec.clusterIPs" };
        let Some(ip) = address(field, text, report) else {
            continue;
        };
        let family = Family::of(ip);
        match declared.get(index) {
            Some(name) if *name != family.to_string() => report.error(
                Reason::FamilyMismatch,
                format!(
                    "{field} {ip} is an {family} address but spec.ipFamilies[{index}] is {name:?}; \
                 make the two agree"
                ),
            ),
            None if index > 0 => report.warning(
                Reason::FamilyMismatch,
                format!(
                    "{field} {ip} is not served because spec.ipFamilies does not name its family; \
                 add {family} to spec.ipFamilies"
                ),
            ),
            _ if found.iter().any(|(other, _)| *other == family) => report.error(
                Reason::FamilyMismatch,
                format!(
                    "{field} {ip} is not served because the Service has another {family} address; \
                 a Service has one address a family"
                ),
            ),
            _ => found.push((family, ip)),
        }
    }
    for name in declared.iter().skip(texts.len()) {
        report.warning(
            Reason::FamilyMismatch,
            format!(
                "spec.ipFamilies names {name:?} but spec.clusterIPs has no address for it; add one"
            ),
        );
    }
    found
}

/// Returns the internal traffic policy (A12).
fn internal_policy(spec: &ServiceSpec, report: &mut Report<'_>) -> TrafficPolicy {
    policy("internal", spec.internal_traffic_policy.as_deref(), report)
}

/// Returns the external traffic policy, which applies to LoadBalancer, NodePort, and ClusterIP with
/// external addresses (A13).
fn external_policy(
    spec: &ServiceSpec,
    has_external_ips: bool,
    report: &mut Report<'_>,
) -> TrafficPolicy {
    let policy = policy("external", spec.external_traffic_policy.as_deref(), report);
    let accessible = match spec.type_.as_deref() {
        Some("LoadBalancer" | "NodePort") => true,
        None | Some("ClusterIP") => has_external_ips,
        Some(other) => {
            report.error(Reason::InvalidField, format!(
                "spec.type {other:?} is unknown and counts as ClusterIP; use ClusterIP, NodePort, \
                 LoadBalancer or ExternalName"
            ));
            false
        }
    };
    if accessible { policy } else { TrafficPolicy::Cluster }
}

fn policy(which: &str, text: Option<&str>, report: &mut Report<'_>) -> TrafficPolicy {
    match text {
        Some("Local") => TrafficPolicy::Local,
        None | Some("" | "Cluster") => TrafficPolicy::Cluster,
        Some(other) => {
            report.error(
                Reason::InvalidField,
                format!(
                    "spec.{which}TrafficPolicy {other:?} is unknown and counts as Cluster; use \
                 Cluster or Local"
                ),
            );
            TrafficPolicy::Cluster
        }
    }
}

/// Returns the idle timeout of session affinity (A11).
fn affinity_timeout_s(spec: &ServiceSpec, report: &mut Report<'_>) -> Option<u32> {
    match spec.session_affinity.as_deref() {
        None | Some("" | "None") => return None,
        Some("ClientIP") => {}
        Some(other) => {
            report.error(Reason::InvalidField, format!(
                "spec.sessionAffinity {other:?} is unknown and counts as None; use ClientIP or None"
            ));
            return None;
        }
    }
    let config = spec.session_affinity_config.as_ref();
    let written = config.and_then(|c| c.client_ip.as_ref()?.timeout_seconds);
    let Some(seconds) = written else {
        return Some(AFFINITY_TIMEOUT_DEFAULT_S);
    };
    let valid = u32::try_from(seconds).ok().filter(|s| (1..=AFFINITY_TIMEOUT_MAX_S).contains(s));
    if valid.is_none() {
        report.warning(
            Reason::InvalidField,
            format!(
                "spec.sessionAffinityConfig.clientIP.timeoutSeconds {seconds} is not in \
             1..={AFFINITY_TIMEOUT_MAX_S}; {AFFINITY_TIMEOUT_DEFAULT_S} is used"
            ),
        );
    }
    valid.or(Some(AFFINITY_TIMEOUT_DEFAULT_S))
}

/// Returns the scheduler that the Service requests for nodes with backend ipvs (an extension of
/// D7).
fn ipvs_scheduler(metadata: &ObjectMeta, report: &mut Report<'_>) -> Option<IpvsScheduler> {
    let annotations = metadata.annotations.as_ref()?;
    let name: &str = annotations.get(IPVS_SCHEDULER_ANNOTATION)?;
    let known = IpvsScheduler::parse(name);
    if known.is_none() {
        let names = IpvsScheduler::names();
        report.warning(
            Reason::InvalidField,
            format!(
                "annotation {IPVS_SCHEDULER_ANNOTATION} {name:?} is unknown and each node's own \
             scheduler is used; use one of {names}"
            ),
        );
    }
    known
}

/// Returns the health check node port, which applies to type LoadBalancer with external policy
/// Local only (A22).
fn health_check_node_port(
    spec: &ServiceSpec,
    external_policy: TrafficPolicy,
    report: &mut Report<'_>,
) -> Option<u16> {
    let load_balancer = spec.type_.as_deref() == Some("LoadBalancer");
    if !load_balancer || external_policy != TrafficPolicy::Local {
        return None;
    }
    let written = spec.health_check_node_port.unwrap_or(0);
    let port = port_number(written);
    if port.is_none() {
        report.warning(Reason::InvalidField, format!(
            "spec.healthCheckNodePort is {written}, so load balancers cannot ask which nodes have \
             endpoints; set it to 1..=65535"
        ));
    }
    port
}
