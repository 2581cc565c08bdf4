//! The fate of a packet, step by step: what `kpctl why` shows.
//!
//! The question names a Service, a sender and a node. [`kplane_model::fate`] decides; this module finds what the
//! question means, and puts the answer into words.

mod outside;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use kplane_desired_state::index::{PortView, ServiceDetail};
use kplane_model::fate::{
    Fate, LocalRule, Masquerade, Outcome, Place, Sender, Setup, Source, fate,
};
use kplane_model::select::TopologyMode;
use kplane_model::{
    Endpoint, Family, Issue, NodeFacts, NodeName, Reason, ServiceName, ServicePort, Severity,
    TrafficPolicy, parse_ip,
};
use kplane_proto::v1 as pb;
use tonic::Status;

use self::outside::{not_outside, outside, refused_outside};
use super::kernel::Expected;
use super::on_node::OnNode;
use super::policies::Ways;
use crate::findings::{self, Finding};

/// A question with everything that it means.
struct Packet<'a> {
    view: &'a PortView,
    place: Place,
    to: SocketAddr,
    sender: Sender,
    node: &'a NodeFacts,
}

/// Returns the fate of a packet that a node handles, what that means for the node's kernel, and the packet's ways.
pub(super) fn explain(
    name: &ServiceName,
    request: &pb::ExplainRequest,
    detail: &ServiceDetail,
    on: &OnNode,
) -> Result<(pb::Explanation, Option<(Expected, Ways)>), Status> {
    let node = &*on.facts;
    let nodes: Vec<_> = on.all.iter().map(|node| node.name.clone()).collect();
    let found = findings::of_service(name, detail, &nodes);
    if detail.ports.is_empty() {
        return Ok((not_proxied(node, detail, found), None));
    }
    let packet = Packet::new(request, detail, node)?;
    let port = &packet.view.port;
    let setup = setup(on, port.key.family);
    let fate = fate(
        port,
        &packet.view.endpoints,
        node,
        setup.unwrap_or(USUAL),
        (packet.place, packet.sender),
    );
    let bad = found.iter().filter(|finding| finding.severity != Severity::Info);
    // The answer is about another place than the one that the Service does not get.
    let lost = if is_outside(request) { refused_outside(detail) } else { None };
    let lost = lost.map(refused);
    let service_on_node = &on.service_on_node;
    let lag = service_on_node.lag.as_ref();
    let expected = Expected::new(
        node.name.clone(),
        port,
        packet.place,
        packet.to,
        &fate,
        lag.is_some(),
    );
    let explanation = pb::Explanation {
        key: Some((&packet.view.port.key).into()),
        to: packet.to.to_string(),
        node: node.name.to_string(),
        outcome: outcome(fate.outcome).into(),
        summary: summary(&fate),
        steps: steps(&packet, &fate, setup.is_some()),
        candidates: candidates(&packet, &fate),
        programmed: lag.is_none(),
        verified: lag.is_none() && service_on_node.verified >= service_on_node.wanted,
        lag: lag.map_or_else(String::new, |lag| lag.reason.clone()),
        findings: lost.iter().chain(bad).map(Finding::to_wire).collect(),
        kernel: None,
    };
    Ok((explanation, Some((expected, ways(&packet, &fate, &on.all)))))
}

/// Returns the ways to the chosen endpoints; none if no endpoint gets the packet.
fn ways(packet: &Packet<'_>, fate: &Fate, nodes: &[Arc<NodeFacts>]) -> Ways {
    let reaches = fate.outcome == Outcome::Reaches;
    let chosen = packet
        .view
        .endpoints
        .iter()
        .filter(|endpoint| reaches && fate.chosen.contains(&endpoint.addr));
    let (sender, protocol) = (packet.sender, packet.view.port.key.protocol);
    Ways::new((sender, fate.source), protocol, packet.node, nodes, chosen)
}

/// Returns the family of the destination that a question means.
pub(super) fn family(request: &pb::ExplainRequest, detail: &ServiceDetail) -> Family {
    let ip = destination(&request.to).ok().map(|to| to.ip());
    let first = || Some(detail.ports.first()?.port.cluster_ip);
    ip.or_else(first).map_or(Family::V4, Family::of)
}

/// Returns the nodes that handle a packet, or may receive it.
pub(super) fn nodes_of(explanation: &pb::Explanation) -> BTreeSet<NodeName> {
    explanation
        .candidates
        .iter()
        .filter(|of| of.chosen)
        .map(|candidate| candidate.node.as_str())
        .chain([explanation.node.as_str()])
        .map(NodeName::from)
        .collect()
}

/// Settings of most agents, for an agent that has not reported its own.
const USUAL: Setup = Setup {
    masquerade: Masquerade {
        pods_known: true,
        all: false,
    },
    local: LocalRule::BySender,
};

/// Returns the agent's settings, if it has reported them.
fn setup(on: &OnNode, family: Family) -> Option<Setup> {
    let family = pb::Family::from(family);
    let status = on.families.iter().find(|status| status.family() == family)?;
    let masquerade = status.masquerade?;
    Some(Setup {
        masquerade: Masquerade {
            pods_known: masquerade.pods_known,
            all: masquerade.all,
        },
        local: status.local_rule().into(),
    })
}

fn not_proxied(
    node: &NodeFacts,
    detail: &ServiceDetail,
    mut findings: Vec<Finding>,
) -> pb::Explanation {
    let summary = match (refusal(detail, |_| true), findings.first()) {
        (Some(issue), _) => {
            findings.insert(0, refused(issue));
            let who = match issue.code {
                Reason::AddressConflict => "another Service gets the packet",
                _ => "the packet goes on as it is",
            };
            format!("{who}: {}", issue.reason)
        }
        (None, Some(cause)) => format!("the packet goes on as it is: the Service {}", cause.text),
        (None, None) => "the packet goes on as it is: nothing of the Service is served".to_owned(),
    };
    pb::Explanation {
        node: node.name.to_string(),
        outcome: pb::PacketOutcome::NotProxied.into(),
        summary,
        findings: findings.iter().map(Finding::to_wire).collect(),
        ..pb::Explanation::default()
    }
}

/// Returns the first reason why the Service does not get what it asks for, of those that are meant.
fn refusal(detail: &ServiceDetail, is_meant: impl Fn(&Issue) -> bool) -> Option<&Issue> {
    detail.issues.iter().find(|issue| {
        let is_its = issue.object.kind == "Service" && issue.severity == Severity::Error;
        is_its && is_meant(issue)
    })
}

/// Returns the finding about what the Service does not get.
fn refused(issue: &Issue) -> Finding {
    let fix = "kpctl status lists all errors of the input";
    Finding::new(issue.code, Severity::Error, &*issue.reason, fix)
}

/// Returns whether a client outside asks, for any place that the Service has there.
fn is_outside(request: &pb::ExplainRequest) -> bool {
    request.to.is_empty() && comes_from_outside(request)
}

/// Returns whether the sender is a client outside of the cluster.
pub(super) fn comes_from_outside(request: &pb::ExplainRequest) -> bool {
    request.sender() == pb::PacketSender::Outside
}

impl<'a> Packet<'a> {
    fn new(
        request: &pb::ExplainRequest,
        detail: &'a ServiceDetail,
        node: &'a NodeFacts,
    ) -> Result<Self, Status> {
        let sender = sender(request)?;
        let named = |view: &&PortView| {
            let port = &view.port;
            request.port.is_empty()
                || *request.port == *port.key.port_name
                || request.port == port.port.to_string()
        };
        let mut views = detail.ports.iter().filter(named).peekable();
        if views.peek().is_none() {
            let ports: Vec<String> = detail.ports.iter().map(|view| name(&view.port)).collect();
            return Err(Status::not_found(format!(
                "the Service has no port {:?}; it has {}",
                request.port,
                ports.join(", ")
            )));
        }
        let (view, place, to) = match request.to.as_str() {
            _ if is_outside(request) => {
                let views: Vec<_> = views.collect();
                outside(&views, node).ok_or_else(|| not_outside(&views, detail))?
            }
            "" => {
                let view = views
                    .next()
                    .ok_or_else(|| Status::not_found("the Service has no such port"))?;
                let to = SocketAddr::new(view.port.cluster_ip, view.port.port);
                (view, Place::ClusterIp, to)
            }
            text => {
                let to = destination(text)?;
                let own = node.addresses.contains(&to.ip());
                views
                    .find_map(|view| {
                        let place = Place::find(&view.port, to.ip(), to.port(), own)?;
                        Some((view, place, to))
                    })
                    .ok_or_else(|| no_place(detail, to, own, node))?
            }
        };
        Ok(Self {
            view,
            place,
            to,
            sender,
            node,
        })
    }
}

/// Returns the error for a destination that is not the Service's, with the owner if another one has it.
fn no_place(detail: &ServiceDetail, to: SocketAddr, own: bool, node: &NodeFacts) -> Status {
    let place = if own { format!("node port {}/", to.port()) } else { format!("address {to}/") };
    Status::not_found(
        match refusal(detail, |issue| issue.reason.contains(&place)) {
            Some(issue) => format!("the Service does not have {to}: {}", issue.reason),
            None => format!(
                "the Service has no place at {to} on node {}: kpctl describe shows its addresses and ports",
                node.name
            ),
        },
    )
}

fn destination(text: &str) -> Result<SocketAddr, Status> {
    let wrong = || {
        Status::invalid_argument(format!(
            "{text:?} is no address with a port, such as 10.96.0.10:80"
        ))
    };
    let (ip, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let ip = ip.trim_start_matches('[').trim_end_matches(']');
    let ip = parse_ip(ip).map_err(|_| wrong())?;
    Ok(SocketAddr::new(ip, port.parse().map_err(|_| wrong())?))
}

fn sender(request: &pb::ExplainRequest) -> Result<Sender, Status> {
    let ip = match request.sender_address.as_str() {
        "" => None,
        text => Some(parse_ip(text).map_err(|error| Status::invalid_argument(error.to_string()))?),
    };
    match request.sender() {
        pb::PacketSender::Pod => Ok(Sender::Pod(ip)),
        pb::PacketSender::Node => Ok(Sender::Node(ip)),
        pb::PacketSender::Outside => Ok(Sender::Outside(ip)),
        pb::PacketSender::Unspecified => {
            Err(Status::invalid_argument("who sends the packet is not said"))
        }
    }
}

fn outcome(outcome: Outcome) -> pb::PacketOutcome {
    match outcome {
        Outcome::Reaches => pb::PacketOutcome::Reaches,
        Outcome::Refused => pb::PacketOutcome::Refused,
        Outcome::Dropped => pb::PacketOutcome::Dropped,
        Outcome::NotAdmitted => pb::PacketOutcome::NotAdmitted,
    }
}

fn summary(fate: &Fate) -> String {
    match fate.outcome {
        Outcome::Reaches => {
            let only_if = match fate.admitted {
                None => ", if the Service admits the sender's address",
                Some(_) => "",
            };
            match fate.chosen.as_slice() {
                [one] => format!("{one} gets the packet{only_if}"),
                all => format!("one of {} endpoints gets the packet{only_if}", all.len()),
            }
        }
        Outcome::Refused if fate.selection.has_any => {
            "the sender gets an error at once: this node has no endpoint, and the policy is Local".to_owned()
        }
        Outcome::Refused => "the sender gets an error at once: no endpoint is usable on any node".to_owned(),
        Outcome::Dropped => {
            "the packet is dropped: other nodes have endpoints, this one has none, and the policy is Local".to_owned()
        }
        Outcome::NotAdmitted => "the packet is dropped: the Service does not admit its sender".to_owned(),
    }
}

/// Returns the rules that decided.
fn steps(packet: &Packet<'_>, fate: &Fate, is_reported: bool) -> Vec<String> {
    let port = &packet.view.port;
    let mut steps = vec![matched(packet)];
    steps.extend(ranges(packet, fate));
    steps.push(policy(packet, fate));
    if fate.outcome != Outcome::NotAdmitted {
        steps.push(selection(packet, fate));
    }
    if let Some(seconds) = port.affinity_timeout_s
        && fate.chosen.len() > 1
    {
        steps.push(format!(
            "session affinity: a client that opened a connection within {seconds} s gets the endpoint that it had"
        ));
    }
    if fate.outcome == Outcome::Reaches {
        let assumed = if is_reported {
            ""
        } else {
            " (if the agent, which has not reported its settings, knows the Pods' ranges)"
        };
        steps.push(source(packet, fate.source) + assumed);
    }
    steps
}

fn matched(packet: &Packet<'_>) -> String {
    let what = match packet.place {
        Place::ClusterIp => "the ClusterIP",
        Place::LoadBalancer(_) => "an address of the load balancer",
        Place::ExternalIp(_) => "an external address",
        Place::NodePort => "the node port",
    };
    let port = &packet.view.port;
    format!(
        "{}/{} is {what} of {}",
        packet.to, port.key.protocol, port.key.service
    ) + &format!(", port {}", name(port))
}

fn ranges(packet: &Packet<'_>, fate: &Fate) -> Option<String> {
    let ranges = &packet.view.port.source_ranges;
    if !matches!(packet.place, Place::LoadBalancer(_)) || ranges.is_empty() {
        return None;
    }
    let ranges: Vec<String> = ranges.iter().map(ToString::to_string).collect();
    let end = match fate.admitted {
        None => "the sender's address is not given, so this is not decided here",
        Some(true) => "the sender is in one of them",
        Some(false) => "the sender is in none of them",
    };
    Some(format!(
        "only senders in {} are admitted: {end}",
        ranges.join(", ")
    ))
}

fn policy(packet: &Packet<'_>, fate: &Fate) -> String {
    let which = match packet.place {
        Place::ClusterIp => "internalTrafficPolicy",
        _ => "externalTrafficPolicy",
    };
    match (fate.policy, fate.short_cut) {
        (TrafficPolicy::Cluster, false) => {
            format!("{which} is Cluster: endpoints of all nodes may be chosen")
        }
        (TrafficPolicy::Cluster, true) => format!(
            "{which} is Local, which does not count for senders inside of the cluster: endpoints of all nodes may be \
             chosen"
        ),
        (TrafficPolicy::Local, _) if fate.fell_back => format!(
            "{which} is Local, and {} has no endpoint: in mode ipvs, endpoints of all nodes may be chosen then",
            packet.node.name
        ),
        (TrafficPolicy::Local, _) => {
            format!(
                "{which} is Local: only endpoints on {} may be chosen",
                packet.node.name
            )
        }
    }
}

fn selection(packet: &Packet<'_>, fate: &Fate) -> String {
    let all = packet.view.endpoints.len();
    let chosen = fate.chosen.len();
    if all == 0 {
        return "the port has no endpoints".to_owned();
    }
    let ready = packet.view.endpoints.iter().any(|endpoint| endpoint.ready);
    let how = match (fate.policy, fate.selection.mode) {
        (TrafficPolicy::Cluster, TopologyMode::SameZone) => format!(
            "those with a hint for zone {}",
            packet.node.zone.as_deref().unwrap_or_default()
        ),
        (TrafficPolicy::Cluster, TopologyMode::SameNode) => {
            format!("those with a hint for node {}", packet.node.name)
        }
        _ if !ready => "none is ready, so those that are about to end and still serve".to_owned(),
        _ => "those that are ready".to_owned(),
    };
    format!("{chosen} of {all} endpoints are chosen: {how}")
}

fn source(packet: &Packet<'_>, source: Source) -> String {
    let node = &packet.node.name;
    match source {
        Source::Sender => "the endpoint sees the sender's address".to_owned(),
        Source::Node => format!("the endpoint sees {node}'s address: the packet is masqueraded"),
    }
}

/// Returns all endpoints, chosen ones first.
fn candidates(packet: &Packet<'_>, fate: &Fate) -> Vec<pb::Candidate> {
    let mut candidates: Vec<_> = packet
        .view
        .endpoints
        .iter()
        .map(|endpoint| {
            let chosen = fate.chosen.contains(&endpoint.addr);
            pb::Candidate {
                address: endpoint.addr.to_string(),
                node: endpoint.node.as_deref().unwrap_or_default().to_owned(),
                chosen,
                reason: reason(endpoint, chosen, packet.node, fate).to_owned(),
            }
        })
        .collect();
    candidates.sort_by_key(|candidate| !candidate.chosen);
    candidates
}

/// Returns why an endpoint is chosen, or not.
fn reason(endpoint: &Endpoint, chosen: bool, node: &NodeFacts, fate: &Fate) -> &'static str {
    let here = endpoint.node.as_deref() == Some(&*node.name);
    match (chosen, endpoint.ready) {
        (true, true) if findings::is_published(endpoint) => {
            "not ready or about to end, and the Service has publishNotReadyAddresses"
        }
        (true, true) => "ready",
        (true, false) => "about to end, still serves, and no other is ready",
        (false, _) if fate.policy == TrafficPolicy::Local && !here => {
            "on another node, and the policy is Local"
        }
        (false, true) if fate.selection.mode == TopologyMode::SameZone => {
            "ready, and hinted for other zones"
        }
        (false, true) if fate.selection.mode == TopologyMode::SameNode => {
            "ready, and hinted for other nodes"
        }
        (false, true) => "ready",
        (false, false) if endpoint.is_draining() => "about to end, and another one is ready",
        (false, false) if endpoint.terminating => "about to end, and does not serve",
        (false, false) => "not ready",
    }
}

/// Returns the name of a port, or its number.
fn name(port: &ServicePort) -> String {
    match &*port.key.port_name {
        "" => port.port.to_string(),
        name => name.to_owned(),
    }
}
