//! What NetworkPolicies make of a packet to a Service: its ways to the chosen endpoints, judged with the addresses that
//! the nodes of its ends see.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use kplane_agents::hub::IndexHandle;
use kplane_model::fate::{Sender, Source};
use kplane_model::{
    Direction, Endpoint, EndpointAddr, Family, NodeFacts, Protocol, Reason, Severity,
};
use kplane_policy::{End, Policies, Verdict};
use kplane_proto::v1 as pb;
use tonic::Status;

use super::super::policy_index::ask_if_enforced;
use super::Connection;
use crate::findings::Finding;

/// Maximum number of endpoints to which the way is judged.
const JUDGED: usize = 100;

/// Whom policies take for the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    /// Nobody whom they judge: no Pod, or the endpoint's own node (NP11).
    Unjudged,
    /// The sender's address counts, and is not known.
    Unknown,
    /// This address.
    Address(IpAddr),
}

/// The way to an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
struct WayTo {
    to: EndpointAddr,
    /// For policies of the sender.
    leaving: Seen,
    /// For policies of the endpoint.
    arriving: Seen,
    /// The same for a connection of the node that handles the packet: what `--try` opens.
    tried: Seen,
}

/// The ways to the endpoints of which one gets the packet.
#[derive(Debug)]
pub(in super::super) struct Ways {
    protocol: Protocol,
    is_node: bool,
    ways: Vec<WayTo>,
    /// Number of all ways; those after the first [`JUDGED`] are not judged.
    all: usize,
}

/// What policies say about all ways.
#[derive(Debug, Default)]
struct JudgedWays {
    /// The endpoints to which the way is denied.
    denied: Vec<String>,
    /// The reason for the first of them, and its policies.
    reason: String,
    policies: Vec<String>,
    /// Endpoints that are isolated, while the sender's address is not known.
    open: usize,
    /// The sender is a Pod that is not named, and there are policies.
    unnamed: bool,
    /// Policies judge the node otherwise than the sender.
    node_differs: bool,
}

impl Ways {
    /// Returns the ways of a packet that `node` handles to these endpoints.
    pub(in super::super) fn new<'e>(
        (sender, source): (Sender, Source),
        protocol: Protocol,
        node: &NodeFacts,
        nodes: &[Arc<NodeFacts>],
        endpoints: impl Iterator<Item = &'e Endpoint> + Clone,
    ) -> Self {
        let ways = endpoints.clone().take(JUDGED);
        Self {
            protocol,
            is_node: matches!(sender, Sender::Node(_)),
            ways: ways
                .map(|endpoint| WayTo::new((sender, source), node, nodes, endpoint))
                .collect(),
            all: endpoints.count(),
        }
    }

    /// Adds what policies say to the fate of the packet. Returns why the node's own connections would tell nothing about
    /// it, if they would not.
    pub(in super::super) async fn judge(
        self,
        index: &IndexHandle,
        may_judge: impl Future<Output = bool>,
        explanation: &mut pb::Explanation,
    ) -> Result<Option<&'static str>, Status> {
        if self.ways.is_empty() {
            return Ok(None);
        }
        let (all, is_node) = (self.all, self.is_node);
        let judged = ask_if_enforced(index, move |policies, _| self.judged(policies));
        let Some(judged) = judged.await? else {
            return Ok(None);
        };
        // Asked only where there is something to judge.
        if may_judge.await {
            judged.tell(all, explanation);
        } else {
            let text =
                "NetworkPolicies are not judged: that needs the right to get /kplane/policies";
            explanation.steps.push(text.to_owned());
            explanation.summary.push_str(", if NetworkPolicies allow it");
        }
        Ok((judged.node_differs && !is_node).then_some(
            "the agent would connect as its node, and NetworkPolicies judge the node otherwise than this sender; \
             connect from the Pod itself: kubectl exec",
        ))
    }

    fn judged(&self, policies: &Policies) -> JudgedWays {
        let counts = policies.counts();
        let mut judged = JudgedWays::default();
        for way in &self.ways {
            let leaving = way.judge(policies, Direction::Egress, way.leaving, self.protocol);
            let arriving = way.judge(policies, Direction::Ingress, way.arriving, self.protocol);
            judged.unnamed |= leaving.is_none() && counts.policies + counts.cluster_policies > 0;
            let arriving_open = arriving.is_none();
            judged.open += usize::from(arriving_open);
            let denied = [leaving, arriving].into_iter().flatten().flatten().next();
            let tried = way.judge(policies, Direction::Ingress, way.tried, self.protocol);
            judged.node_differs |= arriving_open || tried.flatten().is_some() != denied.is_some();
            let Some(denied) = denied else {
                continue;
            };
            if judged.denied.is_empty() {
                judged.reason = denied.reason(policies);
                judged.policies = denied.policies();
            }
            judged.denied.push(way.to.to_string());
        }
        judged
    }
}

/// A direction that policies deny.
struct Denial {
    asked: Connection,
    direction: Direction,
    verdict: Verdict,
}

impl Denial {
    fn reason(&self, policies: &Policies) -> String {
        let reported = self.asked.verdict(policies, &self.verdict, self.direction);
        reported.reason
    }

    /// Returns the policies, as `kpctl describe policy` takes them.
    fn policies(&self) -> Vec<String> {
        match &self.verdict {
            Verdict::Denied(isolating) => isolating.iter().map(ToString::to_string).collect(),
            Verdict::Ruled(ruling) => vec![ruling.policy.to_string()],
            Verdict::Itself | Verdict::NotIsolated | Verdict::Allowed { .. } => Vec::new(),
        }
    }
}

impl WayTo {
    fn new(
        (sender, source): (Sender, Source),
        node: &NodeFacts,
        nodes: &[Arc<NodeFacts>],
        endpoint: &Endpoint,
    ) -> Self {
        let to = endpoint.addr;
        let of_endpoint = |of: &NodeFacts| endpoint.node.as_deref() == Some(&*of.name);
        let here = of_endpoint(node);
        let own = node.addresses.iter().copied().find(|ip| Family::of(*ip) == Family::of(to.ip));
        let (leaving, ip) = match sender {
            // A Pod always reaches its own node (NP11).
            Sender::Pod(ip) if node.addresses.contains(&to.ip) => (Seen::Unjudged, ip),
            Sender::Pod(ip) => (ip.map_or(Seen::Unknown, Seen::Address), ip),
            Sender::Node(ip) => (Seen::Unjudged, ip.or(own)),
            Sender::Outside(ip) => (Seen::Unjudged, ip),
        };
        // Policies count after the address of the destination is replaced, and before that of the sender is: on the
        // endpoint's node, that of another node has been replaced (NP14).
        let ip = match source {
            Source::Node if !here => own,
            _ => ip,
        };
        let is_own = |ip: IpAddr| {
            nodes.iter().filter(|of| of_endpoint(of)).any(|of| of.addresses.contains(&ip))
        };
        let seen = |ip: Option<IpAddr>| match ip {
            None => Seen::Unknown,
            Some(ip) if is_own(ip) => Seen::Unjudged,
            Some(ip) => Seen::Address(ip),
        };
        let arriving = match sender {
            Sender::Node(_) if here => Seen::Unjudged,
            _ => seen(ip),
        };
        let tried = if here { Seen::Unjudged } else { seen(own) };
        Self {
            to,
            leaving,
            arriving,
            tried,
        }
    }

    /// Returns whether policies deny a direction; `None` if that depends on an address that is not known.
    fn judge(
        &self,
        policies: &Policies,
        direction: Direction,
        seen: Seen,
        protocol: Protocol,
    ) -> Option<Option<Denial>> {
        let from = match seen {
            Seen::Unjudged => return Some(None),
            // A Pod's addresses of all families.
            Seen::Address(ip) => match policies.pod_at(ip) {
                Some(pod) => End::Pod(pod.clone()),
                None => End::Address(ip),
            },
            Seen::Unknown => End::Address(match Family::of(self.to.ip) {
                Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
                Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
            }),
        };
        let (to, port) = (End::Address(self.to.ip), self.to.port);
        let judged = policies.judge(&from, &to, protocol, port);
        let verdict = match direction {
            Direction::Egress => judged.egress,
            Direction::Ingress => judged.ingress,
        };
        if seen == Seen::Unknown {
            let is_free = direction == Direction::Ingress && verdict == Verdict::NotIsolated;
            return is_free.then_some(None);
        }
        let asked = Connection {
            from,
            to,
            protocol,
            port,
        };
        Some((!verdict.is_allowed()).then_some(Denial {
            asked,
            direction,
            verdict,
        }))
    }
}

impl JudgedWays {
    fn tell(&self, all: usize, explanation: &mut pb::Explanation) {
        if self.open > 0 {
            explanation.steps.push(format!(
                "NetworkPolicies isolate {} of {}, and the sender's address is not given, so this is not decided here: \
                 --from pod/NAMESPACE/NAME, or outside/ADDRESS",
                self.open,
                endpoints(all)
            ));
            explanation.summary.push_str(", if NetworkPolicies allow its sender");
        }
        if self.unnamed {
            let text = "NetworkPolicies of the sending Pod are not judged, since it is not named: --from \
                 pod/NAMESPACE/NAME";
            explanation.steps.push(text.to_owned());
        }
        if self.denied.is_empty() {
            return;
        }
        let denied = self.denied.len();
        let is_each = denied == all.min(JUDGED);
        let which = match all {
            1 => "the endpoint".to_owned(),
            _ if all > JUDGED => format!("{denied} of the first {JUDGED} of {all} endpoints"),
            _ if is_each => format!("each of {all} endpoints"),
            _ => format!("{denied} of {all} endpoints"),
        };
        let what = format!("NetworkPolicies deny the way to {which}");
        let severity = if is_each {
            explanation.outcome = pb::PacketOutcome::Denied.into();
            explanation.summary = format!("the packet is dropped: {what}");
            Severity::Error
        } else {
            explanation.summary.push_str(&format!("; {what}"));
            Severity::Warning
        };
        for candidate in &mut explanation.candidates {
            if candidate.chosen && self.denied.contains(&candidate.address) {
                candidate.reason.push_str("; NetworkPolicies deny the way");
            }
        }
        let names = self.policies.first().map_or("", String::as_str);
        let finding = Finding::new(
            Reason::PolicyDenies,
            severity,
            format!("{what}: {}", self.reason),
            format!(
                "allow it by a rule, if it is wanted; kpctl describe policy {names} shows the rules"
            ),
        );
        explanation.steps.push(what);
        explanation.findings.insert(0, finding.to_wire());
    }
}

fn endpoints(all: usize) -> String {
    match all {
        1 => "1 endpoint".to_owned(),
        all => format!("{all} endpoints"),
    }
}
