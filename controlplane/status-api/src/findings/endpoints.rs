//! Why a Service has no endpoints, or none that can be used.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use kplane_desired_state::index::{Facts, PortView, ServiceDetail, SliceFacts};
use kplane_desired_state::k8s::SERVICE_NAME_LABEL;
use kplane_model::{Endpoint, Family, NameParts, Reason, ServiceName, ServicePort, Severity};

use super::Finding;

/// Explains ports that no EndpointSlice lists.
pub(super) fn without_slices(
    service: &ServiceName,
    detail: &ServiceDetail,
    facts: &Facts,
) -> Vec<Finding> {
    if facts.slices.is_empty() {
        return no_slice(service, facts);
    }
    let mut findings = Vec::new();
    let mut unlisted = BTreeMap::<_, Vec<&ServicePort>>::new();
    for family in Family::ALL {
        let of_family = |view: &&PortView| view.port.key.family == family;
        let ports: Vec<_> = detail.ports.iter().filter(of_family).collect();
        let Some(first) = ports.first() else { continue };
        let slices = || facts.slices.iter().filter(|of| of.family == Some(family));
        let is_empty = slices().all(|slice| slice.addresses == 0);
        let are_all_empty = facts.slices.iter().all(|slice| slice.addresses == 0);
        if slices().next().is_none() || is_empty && !are_all_empty {
            findings.push(without_family(&first.port, facts));
            continue;
        }
        if is_empty {
            unlisted.entry(empty(service, facts)).or_default();
            continue;
        }
        for view in ports {
            if let Some(why) = not_listed(service, &view.port, facts, slices()) {
                unlisted.entry(why).or_default().push(&view.port);
            }
        }
    }
    let unlisted = unlisted.into_iter();
    findings.extend(unlisted.map(|(why, ports)| refused(why, &ports, detail)));
    findings
}

/// The code, the cause without the effect, and the fix of a finding about a port.
type Why = (Reason, String, String);

/// Returns the finding about ports to which connections are refused. If they are of one family of two, it names the
/// family, and is a warning where the other family serves.
fn refused((code, cause, fix): Why, ports: &[&ServicePort], detail: &ServiceDetail) -> Finding {
    let others: Vec<_> = detail
        .ports
        .iter()
        .map(|view| (&view.port.key, view))
        .filter(|(key, _)| ports.iter().all(|port| port.key.family != key.family))
        .collect();
    let of_one = if others.is_empty() { None } else { ports.first() };
    let serves = |port: &&ServicePort| {
        others.iter().any(|(key, view)| {
            (&key.port_name, key.protocol) == (&port.key.port_name, port.key.protocol)
                && !view.endpoints.is_empty()
        })
    };
    let severity = if of_one.is_some() && ports.iter().all(serves) {
        Severity::Warning
    } else {
        Severity::Error
    };
    let of = of_one.map_or_else(String::new, |port| format!("{} ", port.key.family));
    let to = of_one.map_or_else(String::new, |port| format!(" to {}", port.cluster_ip));
    let cause = match code {
        Reason::PortNameMismatch => format!("the {of}EndpointSlices have {cause}"),
        _ => cause,
    };
    let text = match names(ports).as_str() {
        "" => format!("{cause}: connections{to} are refused"),
        ports => format!("{ports}: {cause}: connections{to} are refused"),
    };
    Finding::new(code, severity, text, fix)
}

fn no_slice(service: &ServiceName, facts: &Facts) -> Vec<Finding> {
    let NameParts { namespace, name } = &**service;
    // One whose name begins as the Service's is the likely cause; another one may be anybody's.
    let is_akin = facts.strays.first().is_some_and(|stray| stray.starts_with(&**name));
    let stray = facts.strays.first().map(|stray| {
        let named = facts.strays.join(", ");
        Finding::new(
            Reason::SliceWithoutService,
            if is_akin { Severity::Error } else { Severity::Info },
            format!(
                "EndpointSlice {named} in namespace {namespace} has no label {SERVICE_NAME_LABEL}, so it belongs to \
                 no Service"
            ),
            format!(
                "if it is this Service's: kubectl label endpointslice -n {namespace} {stray} {SERVICE_NAME_LABEL}={name}"
            ),
        )
    });
    let fix = match &*facts.origin.selector {
        "" => format!(
            "the Service has no selector: create an EndpointSlice with the label {SERVICE_NAME_LABEL}={name}"
        ),
        selector => format!(
            "kubectl get endpointslices -n {namespace} -l {SERVICE_NAME_LABEL}={name}; kube-controller-manager makes \
             them from the selector {selector}: check that it runs"
        ),
    };
    let text = "no EndpointSlice belongs to the Service: connections are refused";
    let none = Finding::new(Reason::NoEndpointSlice, Severity::Error, text, fix);
    let mut found: Vec<_> = stray.into_iter().chain([none]).collect();
    if !is_akin {
        found.reverse();
    }
    found
}

fn without_family(port: &ServicePort, facts: &Facts) -> Finding {
    let (family, ip) = (port.key.family, port.cluster_ip);
    let cause = match &*facts.origin.selector {
        "" => format!("no EndpointSlice of the Service has {family} addresses"),
        _ => format!("no Pod of the Service has an {family} address"),
    };
    Finding::new(
        Reason::FamilyWithoutEndpoints,
        Severity::Warning,
        format!("{cause}: connections to {ip} are refused"),
        format!("give the Pods {family} addresses, or take {family} out of spec.ipFamilies"),
    )
}

/// Explains slices without a usable address.
fn empty(service: &ServiceName, facts: &Facts) -> Why {
    let NameParts { namespace, name } = &**service;
    match &*facts.origin.selector {
        "" => (
            Reason::NoEndpoints,
            "the Service's EndpointSlices have no usable address".to_owned(),
            format!(
                "kubectl get endpointslices -n {namespace} -l {SERVICE_NAME_LABEL}={name} -o yaml"
            ),
        ),
        selector => (
            Reason::SelectorMatchesNoPod,
            format!("no Pod with the labels {selector} has an address"),
            format!(
                "kubectl get pods -n {namespace} -l {selector} -o wide; compare spec.selector with the Pods' labels"
            ),
        ),
    }
}

/// Explains a port that no slice has, although there are addresses.
fn not_listed<'s>(
    service: &ServiceName,
    port: &ServicePort,
    facts: &Facts,
    slices: impl Iterator<Item = &'s SliceFacts>,
) -> Option<Why> {
    let namespace = &service.namespace;
    let key = &port.key;
    let mut found = Vec::new();
    for (name, protocol) in slices.flat_map(|slice| &slice.ports) {
        if (name, protocol) == (&key.port_name, &key.protocol) {
            return None;
        }
        let text = format!("{name:?}/{protocol}");
        if !found.contains(&text) {
            found.push(text);
        }
    }
    let target = facts.origin.named_targets.iter().find(|(name, _)| *name == key.port_name);
    Some(match target {
        Some((_, target)) => (
            Reason::TargetPortNotFound,
            format!("no Pod has a container port named {target:?}"),
            format!(
                "name the container port {target:?}, or make targetPort a number: kubectl get pods -n {namespace} -l \
                 {} -o jsonpath='{{.items[*].spec.containers[*].ports}}'",
                facts.origin.selector
            ),
        ),
        None => {
            let found = match found.as_slice() {
                [] => "no port".to_owned(),
                found => format!("{} only", found.join(", ")),
            };
            (
                Reason::PortNameMismatch,
                found,
                format!(
                    "give the port of the EndpointSlice the name {:?} and the protocol {}, as in the Service",
                    key.port_name, key.protocol
                ),
            )
        }
    })
}

/// Names endpoints that are Services themselves.
pub(super) fn chained(service: &ServiceName, facts: &Facts) -> Option<Finding> {
    let named: Vec<_> = facts.chained.iter().map(ToString::to_string).collect();
    (!named.is_empty()).then(|| {
        let text = format!(
            "endpoints {} are addresses of Services: kube-proxy and kplane send a connection through one Service only, \
             so connections to these endpoints fail",
            named.join(", ")
        );
        let fix = format!(
            "name the Pods in the EndpointSlices, or let DNS lead from {service} to the other Service (type ExternalName)"
        );
        Finding::new(Reason::EndpointIsService, Severity::Error, text, fix)
    })
}

/// Explains ports whose endpoints are not ready.
pub(super) fn not_usable(service: &ServiceName, detail: &ServiceDetail) -> Vec<Finding> {
    let mut found = BTreeMap::<(Reason, String), (Severity, Vec<&ServicePort>)>::new();
    let listed = detail.ports.iter().filter(|view| !view.endpoints.is_empty());
    for view in listed {
        for (code, severity, text) in conditions(view) {
            let ports = &mut found.entry((code, text)).or_insert((severity, Vec::new())).1;
            ports.push(&view.port);
        }
    }
    let selector = &*detail.facts.origin.selector;
    let all = detail.ports.len();
    found
        .into_iter()
        .map(|((code, text), (severity, ports))| {
            let text = if ports.len() == all { text } else { format!("{}: {text}", names(&ports)) };
            let fix = match (code, selector) {
                (Reason::PublishedNotReady, _) => format!(
                    "if clients should not get them: kubectl patch service -n {} {} -p \
                 '{{\"spec\":{{\"publishNotReadyAddresses\":false}}}}'",
                    service.namespace, service.name
                ),
                (_, "") => format!(
                    "the Service has no selector: the author of its EndpointSlices says so; \
                     kubectl get endpointslices -n {} -l {SERVICE_NAME_LABEL}={} -o yaml",
                    service.namespace, service.name
                ),
                (_, selector) => format!(
                    "kubectl get pods -n {} -l {selector} -o wide; \
                     read the events of a Pod that is not ready",
                    service.namespace
                ),
            };
            Finding::new(code, severity, text, fix)
        })
        .collect()
}

/// Returns what the conditions of a port's endpoints mean.
fn conditions(view: &PortView) -> Vec<(Reason, Severity, String)> {
    let count = |is: fn(&Endpoint) -> bool| view.endpoints.iter().filter(|e| is(e)).count();
    let all = view.endpoints.len();
    let ready = count(|e| e.ready);
    let draining = count(Endpoint::is_draining);
    let waiting = count(|e| !e.ready && !e.terminating);
    let published = count(is_published);
    let all_end = count(|e| e.terminating) == all;
    let ending = match all {
        1 => "the only endpoint is about to end".to_owned(),
        all => format!("all {all} endpoints are about to end"),
    };
    let mut found = Vec::new();
    match (ready, draining) {
        (0, 0) if all_end => found.push((
            Reason::NoReadyEndpoint,
            Severity::Error,
            format!("{ending}, and no Pod serves: connections are refused"),
        )),
        (0, draining) if all_end => found.push((
            Reason::OnlyTerminating,
            Severity::Warning,
            format!(
                "{ending}; those that still serve ({draining}) get the connections until a Pod is ready"
            ),
        )),
        (0, 0) => found.push((
            Reason::NoReadyEndpoint,
            Severity::Error,
            format!("none of {all} endpoints is ready: connections are refused"),
        )),
        (0, draining) => found.push((
            Reason::OnlyTerminating,
            Severity::Warning,
            format!(
                "no endpoint is ready; {draining} that are about to end still serve and get the connections until \
                 a Pod is ready"
            ),
        )),
        (_, _) if waiting > 0 => found.push((
            Reason::SomeNotReady,
            Severity::Info,
            format!("{waiting} of {all} endpoints are not ready and get no connections"),
        )),
        _ => {}
    }
    if published > 0 {
        found.push((
            Reason::PublishedNotReady,
            Severity::Info,
            format!(
                "{published} of {all} endpoints get connections although their Pods are not ready or are about to end, \
                 because the Service has publishNotReadyAddresses"
            ),
        ));
    }
    found
}

/// Returns whether an endpoint counts as ready although its Pod is not, or is about to end: the Service has
/// publishNotReadyAddresses.
pub(crate) fn is_published(endpoint: &Endpoint) -> bool {
    endpoint.ready && (!endpoint.serving || endpoint.terminating)
}

/// Returns the names of ports, each once: `port web/TCP`.
fn names(ports: &[&ServicePort]) -> String {
    let mut names = Vec::new();
    for port in ports {
        let name = match &*port.key.port_name {
            "" => format!("{}/{}", port.port, port.key.protocol),
            name => format!("{name}/{}", port.key.protocol),
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    match names.len() {
        0 => String::new(),
        1 => format!("port {}", names[0]),
        _ => format!("ports {}", names.join(", ")),
    }
}
/// Longest time by which a slice may be behind its Pods without a warning: beyond any write of a healthy controller.
const BEHIND: Duration = Duration::from_secs(10);
/// Maximum number of Pods that a text names.
const PODS_NAMED: usize = 5;

/// Names Pods that are being deleted and that EndpointSlices call ready.
pub(super) fn slices_behind_pods(facts: &Facts, now: SystemTime) -> Option<Finding> {
    let oldest = facts.terminating.iter().map(|(_, since)| *since).min()?;
    let age = now.duration_since(oldest).unwrap_or_default();
    let severity = if age < BEHIND { Severity::Info } else { Severity::Warning };
    let pods = facts.terminating.iter().map(|(pod, _)| &**pod);
    let named: Vec<&str> = pods.take(PODS_NAMED).collect();
    let more = match facts.terminating.len().saturating_sub(PODS_NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let text = format!(
        "{}{more}: being deleted for up to {} s, and EndpointSlices still call them ready; they get new connections only where \
         no other endpoint is ready",
        named.join(", "),
        age.as_secs()
    );
    let fix = "if this lasts, Kubernetes' EndpointSlice controller does not keep up or does not run: kubectl get lease -n \
               kube-system kube-controller-manager";
    Some(Finding::new(Reason::SliceBehindPod, severity, text, fix))
}
