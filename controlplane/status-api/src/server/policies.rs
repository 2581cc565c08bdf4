//! NetworkPolicies: the list, one of them in words, and the verdict on a connection.
//!
//! The index's task works out each answer; the words are made of what it returns.

mod doubts;
mod isolated;
mod nodes;
mod sender;
mod ways;
mod words;

use kplane_agents::hub::{Hub, IndexHandle};
use kplane_agents::peers::Peers;
use kplane_desired_state::k8s::Kind;
use kplane_model::{
    Direction, Family, Issue, NodeName, PodName, PolicyName, Protocol, Tier, TierAction, parse_ip,
};
use kplane_policy::{
    ClusterPolicyFacts, End, Lack, NetworkPolicy, PeerSpec, Policies, PolicySummary, Rule, Ruling,
    Verdict,
};
use kplane_proto::convert;
use kplane_proto::v1 as pb;
use tonic::Status;

pub(super) use self::isolated::isolated;
use self::nodes::{Nodes, no_pods_address};
pub(super) use self::sender::send_by_pod;
pub(super) use self::ways::Ways;
use super::drops;
use super::issues::Issues;
use super::policy_index::{ask, no_pod};
use super::request::bounded_names;

/// Size in bytes up to which policies are added to an answer.
const PAGE_BYTES: usize = 3 << 20;
/// Maximum number of rules of each direction in a description.
const RULES: usize = 200;
/// Maximum number of isolating policies in a verdict, and in its text.
const ISOLATING: usize = 100;
const NAMED: usize = 5;

/// Returns one page of the policies.
pub(super) async fn list(
    hub: &Hub,
    request: pb::ListPoliciesRequest,
) -> Result<pb::ListPoliciesResponse, Status> {
    let after = match request.page_token.as_str() {
        "" => None,
        token => Some(begun(token).ok_or_else(|| {
            Status::invalid_argument(
                "page_token is none of this control plane: begin again without one",
            )
        })?),
    };
    let most = match request.page_size {
        0 => usize::MAX,
        most => usize::try_from(most).unwrap_or(usize::MAX),
    };
    ask(hub.index(), move |policies, _| {
        let namespace = request.namespace;
        let wanted = |of: &pb::PolicySummary| {
            let name = PolicyName::new(&of.namespace, &of.name);
            let behind = after.as_ref().is_none_or(|after| name > *after);
            behind && (namespace.is_empty() || namespace == of.namespace)
        };
        let mut tiers: Vec<_> = policies.cluster_policies().map(|of| of_tier(&of)).collect();
        tiers.sort_by(|a, b| a.name.cmp(&b.name));
        let all = tiers.into_iter().chain(policies.list().map(|of| summary(&of)));
        page(all.filter(wanted), most)
    })
    .await
}

fn page(all: impl Iterator<Item = pb::PolicySummary>, most: usize) -> pb::ListPoliciesResponse {
    let (mut page, mut bytes) = (pb::ListPoliciesResponse::default(), 0);
    for policy in all {
        bytes += policy.namespace.len() + policy.name.len() + 48;
        if bytes > PAGE_BYTES || page.policies.len() == most {
            let last = page.policies.last();
            let token = last.map(|last| format!("{}/{}", last.namespace, last.name));
            page.next_page_token = token.unwrap_or_default();
            break;
        }
        page.policies.push(policy);
    }
    page
}

fn summary(policy: &PolicySummary) -> pb::PolicySummary {
    pb::PolicySummary {
        namespace: policy.name.namespace.to_string(),
        name: policy.name.name.to_string(),
        ingress: policy.ingress,
        egress: policy.egress,
        pods: policy.pods as u64,
        ..pb::PolicySummary::default()
    }
}

fn of_tier(facts: &ClusterPolicyFacts) -> pb::PolicySummary {
    let policy = &facts.policy;
    pb::PolicySummary {
        name: policy.name.to_string(),
        ingress: !policy.ingress.is_empty(),
        egress: !policy.egress.is_empty(),
        pods: facts.pods as u64,
        tier: words::tier(policy.tier).to_owned(),
        priority: policy.priority.into(),
        ..pb::PolicySummary::default()
    }
}

/// Returns the name in a token, which has no namespace if it is one of a ClusterNetworkPolicy.
fn begun(token: &str) -> Option<PolicyName> {
    let of_tier = token.strip_prefix('/').filter(|name| !name.is_empty());
    named(token).or_else(|| of_tier.map(|name| PolicyName::new("", name)))
}

/// Returns the name in a text such as `shop/web`.
pub(super) fn named(text: &str) -> Option<PolicyName> {
    let (namespace, name) = text.split_once('/')?;
    let is_name = !namespace.is_empty() && !name.is_empty() && !name.contains('/');
    is_name.then(|| PolicyName::new(namespace, name))
}

/// Returns one policy.
pub(super) async fn describe(
    hub: &Hub,
    request: pb::DescribePolicyRequest,
) -> Result<pb::PolicyDescription, Status> {
    bounded_names(&[&request.namespace, &request.name])?;
    if request.namespace.is_empty() {
        let name = request.name.clone();
        if let Some(described) = describe_tier(hub.index(), name).await? {
            return Ok(described);
        }
    }
    let namespace = match request.namespace.as_str() {
        "" => "default",
        namespace => namespace,
    };
    let name = PolicyName::new(namespace, &request.name);
    let unknown = Status::not_found(format!(
        "no NetworkPolicy {name} is known: kpctl get policies lists them"
    ));
    let found = ask(hub.index(), move |policies, issues| {
        let facts = policies.policy(&name)?;
        let its = (Kind::NetworkPolicy, &*name.namespace, &*name.name);
        let mut issues = issues_of(its, issues());
        issues.extend(doubts::issues(&facts.policy, &policies.doubts(&name)));
        Some((facts, issues))
    });
    let (facts, mut issues) = found.await?.ok_or(unknown)?;
    issues.extend(doubts::masqueraded(hub.index(), &facts.policy).await?);
    let policy = &facts.policy;
    let [ingress, egress] = Direction::ALL.map(|direction| rules(policy, direction));
    let all = [ingress, egress].map(<[Rule]>::len);
    let written = |rules: &[Rule], direction| {
        rules.iter().take(RULES).map(|rule| words::rule(rule, direction)).collect()
    };
    Ok(pb::PolicyDescription {
        summary: Some(summary(&PolicySummary {
            name: policy.name.clone(),
            ingress: policy.ingress.is_some(),
            egress: policy.egress.is_some(),
            pods: facts.pods,
        })),
        selector: words::selector(&policy.pods),
        ingress: written(ingress, Direction::Ingress),
        egress: written(egress, Direction::Egress),
        more_rules: all.map(|n| n.saturating_sub(RULES) as u64).iter().sum(),
        pods: facts.names.iter().map(|pod| pod.name.to_string()).collect(),
        issues: Issues::bounded(&issues).listed,
    })
}

/// Returns the issues of an object.
fn issues_of((kind, namespace, name): (Kind, &str, &str), mut issues: Vec<Issue>) -> Vec<Issue> {
    issues.retain(|issue| {
        let of = &issue.object;
        (&*of.kind, &*of.namespace, &*of.name) == (kind.as_str(), namespace, name)
    });
    issues
}

/// Returns one ClusterNetworkPolicy, if there is one of this name.
async fn describe_tier(
    index: &IndexHandle,
    name: String,
) -> Result<Option<pb::PolicyDescription>, Status> {
    let found = ask(index, move |policies, issues| {
        let facts = policies.cluster_policy(&name)?;
        let its = (Kind::ClusterNetworkPolicy, "", &*name);
        Some((facts, issues_of(its, issues())))
    });
    let Some((facts, issues)) = found.await? else {
        return Ok(None);
    };
    let policy = &facts.policy;
    let subject = PeerSpec::Pods {
        namespaces: Some(policy.namespaces.clone()),
        pods: Some(policy.pods.clone()),
    };
    let written = |direction| {
        policy
            .rules(direction)
            .iter()
            .take(RULES)
            .map(|rule| words::tier_rule(rule, direction))
            .collect()
    };
    let more =
        Direction::ALL.map(|direction| policy.rules(direction).len().saturating_sub(RULES) as u64);
    Ok(Some(pb::PolicyDescription {
        summary: Some(of_tier(&facts)),
        selector: words::peer(&subject),
        ingress: written(Direction::Ingress),
        egress: written(Direction::Egress),
        more_rules: more.iter().sum(),
        pods: facts.names.iter().map(ToString::to_string).collect(),
        issues: Issues::bounded(&issues).listed,
    }))
}

/// Returns a policy's rules of a direction.
fn rules(policy: &NetworkPolicy, direction: Direction) -> &[Rule] {
    let rules = match direction {
        Direction::Ingress => &policy.ingress,
        Direction::Egress => &policy.egress,
    };
    rules.as_deref().unwrap_or_default()
}

/// A connection that a request asks about.
struct Connection {
    from: End,
    to: End,
    protocol: Protocol,
    port: u16,
}

/// Returns what the policies say about a connection.
pub(super) async fn judge(
    hub: &Hub,
    peers: Option<&Peers>,
    request: &pb::JudgeConnectionRequest,
) -> Result<pb::ConnectionJudgement, Status> {
    let asked = Connection::new(request)?;
    let nodes = hub.store().nodes();
    let judged = ask(hub.index(), move |policies, _| {
        let judged = asked.judge(policies, &nodes)?;
        Ok::<_, Status>((judged, asked.pods(policies)))
    });
    let (mut judged, [from, to]) = judged.await??;
    let is_denied = |side: &Option<pb::DirectionJudgement>| {
        use pb::PolicyVerdict::{Denied, TierDenied};
        let verdict = side.as_ref().map(pb::DirectionJudgement::verdict);
        matches!(verdict, Some(Denied | TierDenied))
    };
    for (direction, is_denied, pod) in [
        (Direction::Egress, is_denied(&judged.egress), from),
        (Direction::Ingress, is_denied(&judged.ingress), to),
    ] {
        if is_denied && let Some(pod) = pod {
            let note = drops::note(hub, peers, pod, direction).await;
            judged.notes.extend(note);
        }
    }
    Ok(judged)
}

impl Connection {
    fn new(request: &pb::JudgeConnectionRequest) -> Result<Self, Status> {
        let protocol = match request.protocol() {
            pb::Protocol::Unspecified => Protocol::Tcp,
            protocol => convert::protocol(protocol.into())
                .map_err(|error| Status::invalid_argument(error.to_string()))?,
        };
        let port = u16::try_from(request.port).ok().filter(|port| *port > 0);
        let (from, to) = (end(&request.from)?, end(&request.to)?);
        if let (End::Address(from), End::Address(to)) = (&from, &to)
            && Family::of(*from) != Family::of(*to)
        {
            let text = format!("{from} and {to} are of different families");
            return Err(Status::invalid_argument(text));
        }
        Ok(Self {
            from,
            to,
            protocol,
            port: port
                .ok_or_else(|| Status::invalid_argument("port is no number from 1 to 65535"))?,
        })
    }

    fn judge(&self, policies: &Policies, nodes: &Nodes) -> Result<pb::ConnectionJudgement, Status> {
        for end in [&self.from, &self.to] {
            if let End::Pod(pod) = end
                && policies.policies_of(pod).is_none()
            {
                return Err(no_pod(pod));
            }
            no_pods_address(end, policies, nodes)?;
        }
        if let Some(allowed) = self.own_node(policies, nodes) {
            return Ok(allowed);
        }
        let judged = policies.judge(&self.from, &self.to, self.protocol, self.port);
        let verdict = |verdict, direction| self.verdict(policies, verdict, direction);
        Ok(pb::ConnectionJudgement {
            allowed: judged.is_allowed(),
            egress: Some(verdict(&judged.egress, Direction::Egress)),
            ingress: Some(verdict(&judged.ingress, Direction::Ingress)),
            notes: self.notes(nodes),
        })
    }

    /// Returns the Pods at both ends, with their nodes.
    fn pods(&self, policies: &Policies) -> [Option<(PodName, NodeName)>; 2] {
        [&self.from, &self.to].map(|end| {
            let pod = match end {
                End::Pod(pod) => Some(pod),
                End::Address(address) => policies.pod_at(*address),
            };
            pod.and_then(|pod| Some((pod.clone(), policies.node_of(pod)?.clone())))
        })
    }

    /// Puts what the policies of one end say about the other into words.
    fn verdict(
        &self,
        policies: &Policies,
        verdict: &Verdict,
        direction: Direction,
    ) -> pb::DirectionJudgement {
        let (subject, of_subject, preposition, other) = match direction {
            Direction::Ingress => (&self.to, "to", "from", &self.from),
            Direction::Egress => (&self.from, "from", "to", &self.to),
        };
        let (subject, other) = (shown(subject, policies), shown(other, policies));
        let mut reported = pb::DirectionJudgement::default();
        match verdict {
            Verdict::Itself => {
                reported.set_verdict(pb::PolicyVerdict::Itself);
                reported.reason = "a Pod always reaches itself".to_owned();
            }
            Verdict::NotIsolated => {
                reported.set_verdict(pb::PolicyVerdict::NotIsolated);
                reported.reason =
                    format!("no policy isolates {subject} for connections {of_subject} it");
            }
            Verdict::Allowed { policy, rule, peer } => {
                reported.set_verdict(pb::PolicyVerdict::Allowed);
                reported.policy = policy.to_string();
                let facts = policies.policy(policy);
                let rules = facts.as_ref().map(|facts| rules(&facts.policy, direction));
                let field = words::field(direction);
                reported.reason = format!("{policy} allows it by spec.{field}[{rule}]");
                if let Some(rule) = rules.and_then(|rules| rules.get(*rule)) {
                    reported.rule = words::rule(rule, direction);
                    let peers = rule.peers.as_deref().unwrap_or_default();
                    let peer = peer.and_then(|at| peers.get(at));
                    reported.peer = peer.map_or("everybody".to_owned(), words::peer);
                }
            }
            Verdict::Ruled(ruling) => rule_of_tier(policies, ruling, direction, &mut reported),
            Verdict::Denied(isolating) => {
                reported.set_verdict(pb::PolicyVerdict::Denied);
                let (protocol, port) = (self.protocol, self.port);
                reported.reason = format!(
                    "no rule of {} allows connections {preposition} {other}, {protocol} {port}; {subject} is isolated \
                     for connections {of_subject} it",
                    words::some(isolating, NAMED)
                );
                if let Some(nearest) = self.nearest(policies, direction, &other) {
                    reported.reason.push_str(&nearest);
                }
                let names = isolating.iter().take(ISOLATING);
                reported.isolating = names.map(ToString::to_string).collect();
            }
        }
        reported
    }

    /// Names the rule that comes nearest to allowing the connection, and what it lacks.
    fn nearest(&self, policies: &Policies, direction: Direction, other: &str) -> Option<String> {
        let (ends, protocol, port) = ((&self.from, &self.to), self.protocol, self.port);
        let nearest = policies.nearest(direction, ends, protocol, port)?;
        let facts = policies.policy(&nearest.policy)?;
        let rule = rules(&facts.policy, direction).get(nearest.rule)?;
        let lacks = match nearest.lacks {
            Lack::Port => format!("{protocol} {port} is none of its ports"),
            Lack::Peer => format!("{other} is none of its peers"),
        };
        let (field, policy) = (words::field(direction), &nearest.policy);
        Some(format!(
            "; spec.{field}[{}] of {policy} comes nearest: it allows connections {}, and {lacks}",
            nearest.rule,
            words::rule(rule, direction)
        ))
    }
}

/// Puts what a ClusterNetworkPolicy says into words.
fn rule_of_tier(
    policies: &Policies,
    ruling: &Ruling,
    direction: Direction,
    reported: &mut pb::DirectionJudgement,
) {
    let (verdict, accepts) = match ruling.action {
        TierAction::Accept | TierAction::Pass => (pb::PolicyVerdict::TierAccepted, "accepts"),
        TierAction::Deny => (pb::PolicyVerdict::TierDenied, "denies"),
    };
    reported.set_verdict(verdict);
    reported.policy = ruling.policy.to_string();
    let before = match ruling.tier {
        Tier::Admin => "",
        Tier::Baseline => "; no NetworkPolicy isolates the Pod",
    };
    reported.reason = format!(
        "ClusterNetworkPolicy {}, spec.{}[{}] ({}, priority {}) {accepts} it{before}",
        ruling.policy,
        words::field(direction),
        ruling.rule,
        words::tier(ruling.tier),
        ruling.priority
    );
    let facts = policies.cluster_policy(&ruling.policy);
    let rule = facts.as_ref().and_then(|facts| facts.policy.rules(direction).get(ruling.rule));
    reported.rule = rule.map_or_else(String::new, |rule| words::tier_rule(rule, direction));
}

fn end(text: &str) -> Result<End, Status> {
    if let Some(name) = named(text) {
        bounded_names(&[&name.namespace, &name.name])?;
        return Ok(End::Pod(name));
    }
    let address = parse_ip(text).map_err(|_| {
        Status::invalid_argument(format!(
            "{:?} is neither a Pod, such as shop/web-1, nor an address",
            text.chars().take(NAMED * 20).collect::<String>()
        ))
    })?;
    // IPv4 in IPv6 is IPv4: so Pods have it.
    Ok(End::Address(address.to_canonical()))
}

fn shown(end: &End, policies: &Policies) -> String {
    match end {
        End::Pod(pod) => format!("Pod {pod}"),
        End::Address(address) => match policies.pod_at(*address) {
            Some(pod) => format!("Pod {pod} ({address})"),
            None => address.to_string(),
        },
    }
}
