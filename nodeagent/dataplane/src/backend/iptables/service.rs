//! A ServicePort's own chains, and its entries in the lists that all ServicePorts share (C2-C4, A8-A19).

use kplane_model::{Cidr, EndpointAddr, ServiceKey, TrafficPolicy};

use super::dispatch::{DispatchRule, List};
use super::layout::Pods;
use super::name::{ChainName, ServiceChain};
use super::rule::{Comment, Match, Rule, Sense, Target};
use super::text::{Address, Label};
use crate::plan::{Frontend, FrontendAddr, Origin, ServicePlan, Unserved};

/// A writer of the rules of one ServicePort.
pub(super) struct Writer<'a> {
    plan: &'a ServicePlan,
    pods: &'a Pods,
    label: Option<Label>,
    /// Whether rules for endpoints have comments that name them (C12: not in large clusters).
    endpoint_comments: bool,
    /// Endpoints of the cluster, if any packets may use them.
    cluster: Vec<EndpointAddr>,
    /// Endpoints of the node, if any packets may use only these.
    local: Vec<EndpointAddr>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(plan: &'a ServicePlan, pods: &'a Pods, endpoint_comments: bool) -> Self {
        let cluster = plan.frontends.iter().find_map(|frontend| match frontend.policy {
            TrafficPolicy::Cluster => Some(&frontend.endpoints),
            TrafficPolicy::Local => frontend.inside.as_ref(),
        });
        let local = plan.frontends.iter().find(|frontend| frontend.policy == TrafficPolicy::Local);
        Self {
            plan,
            pods,
            label: Label::new(&plan.key),
            endpoint_comments,
            cluster: sorted(cluster),
            local: sorted(local.map(|frontend| &frontend.endpoints)),
        }
    }

    /// Returns the ServicePort's chains, all in table nat. Each jumps only to chains before it.
    pub(super) fn chains(&self) -> Vec<(ChainName, Vec<Rule>)> {
        let mut chains = self.endpoints();
        let kinds = [
            (ServiceChain::Cluster, &self.cluster),
            (ServiceChain::Local, &self.local),
        ];
        for (kind, endpoints) in kinds {
            if !endpoints.is_empty() {
                chains.push((self.name(kind), self.spread(kind, endpoints)));
            }
        }
        if let Some(external) = self.external() {
            chains.push((self.name(ServiceChain::External), external));
        }
        if let Some(firewall) = self.firewall() {
            chains.push((self.name(ServiceChain::Firewall), firewall));
        }
        chains
    }

    /// Returns the entries in the shared lists for one place where packets arrive.
    pub(super) fn entries(&self, frontend: &Frontend) -> Vec<(List, DispatchRule)> {
        let mut entries = Vec::new();
        let external = frontend.origin != Origin::ClusterIp;
        if let Some((chain, text)) = self.way(frontend) {
            let list = match frontend.at {
                FrontendAddr::Address { .. } => List::Services,
                FrontendAddr::NodePort { .. } => List::NodePorts,
            };
            let comment = match text {
                Some(text) => self.of(text),
                None => self.label.clone().map(Comment::Name),
            };
            entries.push((list, DispatchRule::new(Target::Jump(chain), comment)));
        }
        if let Some(unserved) = frontend.unserved {
            let list = match frontend.at {
                FrontendAddr::NodePort { .. } => List::UnservedNodePorts,
                FrontendAddr::Address { .. } if external => List::UnservedExternal,
                FrontendAddr::Address { .. } => List::UnservedInternal,
            };
            let (target, text) = match unserved {
                Unserved::Reject => (Target::Reject(self.plan.key.family), "has no endpoints"),
                Unserved::Drop => (Target::Drop, "has no local endpoints"),
            };
            entries.push((list, DispatchRule::new(target, self.of(text))));
        }
        if self.is_restricted(frontend) {
            let chain = self.name(ServiceChain::Firewall);
            let label = self.label.clone();
            let comment = label.map(|label| Comment::NotAccepted(label, chain));
            entries.push((List::Firewall, DispatchRule::new(Target::Drop, comment)));
        }
        entries
    }

    /// Returns the chain to which packets for a frontend go, and the name of the kind of place.
    fn way(&self, frontend: &Frontend) -> Option<(ChainName, Option<&'static str>)> {
        if frontend.origin == Origin::ClusterIp {
            let kind = match frontend.policy {
                TrafficPolicy::Cluster => ServiceChain::Cluster,
                TrafficPolicy::Local => ServiceChain::Local,
            };
            let served = !frontend.endpoints.is_empty();
            return served.then(|| (self.name(kind), Some("cluster IP")));
        }
        let text = match frontend.origin {
            Origin::ClusterIp | Origin::NodePort => None,
            Origin::LoadBalancer => Some("loadbalancer IP"),
            Origin::ExternalIp => Some("external IP"),
        };
        let kind = if self.is_restricted(frontend) {
            ServiceChain::Firewall
        } else {
            ServiceChain::External
        };
        has_endpoints(frontend).then(|| (self.name(kind), text))
    }

    /// Returns whether only some sources may use the place. Without endpoints, all senders get an error
    /// instead (A10).
    fn is_restricted(&self, frontend: &Frontend) -> bool {
        !frontend.source_ranges.is_empty() && has_endpoints(frontend)
    }

    /// Returns a chain for each endpoint.
    fn endpoints(&self) -> Vec<(ChainName, Vec<Rule>)> {
        let mut all: Vec<EndpointAddr> = self.cluster.iter().chain(&self.local).copied().collect();
        all.sort_unstable();
        all.dedup();
        let rules = |to: EndpointAddr| {
            let chain = ChainName::endpoint(&self.plan.key, to);
            let name = || self.endpoint_comments.then(|| self.label.clone().map(Comment::Name));
            // An endpoint that reaches itself must see the node as its client (A15).
            let hairpin = Rule::jump(ChainName::MARK_MASQ)
                .source(Sense::Is, Cidr::single(to.ip))
                .comment(name().flatten());
            let mut dnat = Rule::new(Target::Dnat(to))
                .protocol(self.plan.key.protocol)
                .comment(name().flatten());
            if self.plan.affinity_timeout_s.is_some() {
                let family = self.plan.key.family;
                dnat = dnat.when(Match::Remember {
                    list: chain,
                    family,
                });
            }
            (chain, vec![hairpin, dnat])
        };
        all.into_iter().map(rules).collect()
    }

    /// Returns the chain of a policy: first the packets that must be masqueraded, then clients with a
    /// remembered endpoint, then all others at random (C3, C4).
    fn spread(&self, kind: ServiceChain, endpoints: &[EndpointAddr]) -> Vec<Rule> {
        let mut rules: Vec<Rule> = self.internal(kind).into_iter().collect();
        let jump = |to: EndpointAddr| {
            let comment = || Some(Comment::Endpoint(self.label.clone()?, to));
            let comment = self.endpoint_comments.then(comment).flatten();
            let chain = ChainName::endpoint(&self.plan.key, to);
            (chain, Rule::jump(chain).comment(comment))
        };
        if let Some(seconds) = self.plan.affinity_timeout_s {
            let family = self.plan.key.family;
            rules.extend(endpoints.iter().map(|to| {
                let (list, rule) = jump(*to);
                rule.when(Match::Remembered {
                    list,
                    seconds,
                    family,
                })
            }));
        }
        let left = (1..=endpoints.len()).rev();
        rules.extend(endpoints.iter().zip(left).map(|(to, left)| match left {
            1 => jump(*to).1,
            _ => jump(*to).1.when(Match::OneOf(left)),
        }));
        rules
    }

    /// Returns the rule that masquerades packets to the ClusterIP (A15, A17), for the chain to which they go.
    fn internal(&self, kind: ServiceChain) -> Option<Rule> {
        let is_it = |frontend: &&Frontend| {
            let local = frontend.policy == TrafficPolicy::Local;
            frontend.origin == Origin::ClusterIp && local == (kind == ServiceChain::Local)
        };
        let FrontendAddr::Address { ip, protocol, port } =
            self.plan.frontends.iter().find(is_it)?.at
        else {
            return None;
        };
        let rule = Rule::new(Target::Continue)
            .destination(Sense::Is, Cidr::single(ip))
            .comment(self.of("cluster IP"))
            .port(protocol, port);
        self.pods.masquerade_others(rule)
    }

    /// Returns the rules for packets to external destinations (A15, A16).
    fn external(&self) -> Option<Vec<Rule>> {
        let external = self
            .plan
            .frontends
            .iter()
            .find(|frontend| frontend.origin != Origin::ClusterIp)?;
        if !has_endpoints(external) {
            return None;
        }
        let about = |before| {
            let label = self.label.clone();
            label.map(|label| Comment::About(before, label, "external destinations"))
        };
        let mark = Rule::jump(ChainName::MARK_MASQ);
        let cluster = Rule::jump(self.name(ServiceChain::Cluster));
        let mut rules = Vec::new();
        if external.policy == TrafficPolicy::Cluster {
            rules.push(mark.comment(about("masquerade traffic for")));
            rules.extend((!self.cluster.is_empty()).then_some(cluster));
            return Some(rules);
        }
        if !self.cluster.is_empty() {
            let pods = cluster.clone().comment(about("pod traffic for"));
            rules.extend(self.pods.only_pods(&pods));
            let masquerade = mark.comment(about("masquerade LOCAL traffic for"));
            rules.push(masquerade.when(Match::SourceLocal));
            let route = cluster.comment(about("route LOCAL traffic for"));
            rules.push(route.when(Match::SourceLocal));
        }
        if !self.local.is_empty() {
            rules.push(Rule::jump(self.name(ServiceChain::Local)));
        }
        Some(rules)
    }

    /// Returns the rules for packets to a load balancer's address that only some sources may use (A8, A9).
    fn firewall(&self) -> Option<Vec<Rule>> {
        let restricted =
            self.plan.frontends.iter().find(|frontend| self.is_restricted(frontend))?;
        let allow = |range: &Cidr| {
            Rule::jump(self.name(ServiceChain::External))
                .source(Sense::Is, *range)
                .comment(self.of("loadbalancer IP"))
        };
        let mut rules: Vec<Rule> = restricted.source_ranges.iter().map(allow).collect();
        // The comment says where the other packets go. Without a name, it would say nothing.
        let comment = self.label.clone().map(|label| {
            Comment::About(
                "other traffic to",
                label,
                "will be dropped by KUBE-PROXY-FIREWALL",
            )
        });
        rules.extend(comment.map(|comment| Rule::new(Target::Continue).comment(Some(comment))));
        Some(rules)
    }

    fn name(&self, kind: ServiceChain) -> ChainName {
        ChainName::service(kind, &self.plan.key)
    }

    fn of(&self, text: &'static str) -> Option<Comment> {
        self.label.clone().map(|label| Comment::Of(label, text))
    }
}

/// Returns the number of endpoints of a ServicePort that packets may reach.
pub(super) fn endpoints(plan: &ServicePlan) -> usize {
    let frontends = plan.frontends.iter();
    let inside = |frontend: &Frontend| frontend.inside.as_ref().map_or(0, Vec::len);
    frontends
        .map(|frontend| frontend.endpoints.len().max(inside(frontend)))
        .max()
        .unwrap_or(0)
}

/// Returns the entry that lets requests for a Service's health pass (A26).
pub(super) fn health_entry(key: &ServiceKey) -> DispatchRule {
    let comment = Label::new(key).map(|label| Comment::Of(label, "health check node port"));
    DispatchRule::new(Target::Accept, comment)
}

/// Returns whether there is an endpoint anywhere (A18).
fn has_endpoints(frontend: &Frontend) -> bool {
    frontend.unserved != Some(Unserved::Reject)
}

/// Returns endpoints in kube-proxy's order, which is that of their text. The order decides which endpoint
/// gets which share of the packets that are left.
fn sorted(endpoints: Option<&Vec<EndpointAddr>>) -> Vec<EndpointAddr> {
    let mut endpoints = endpoints.cloned().unwrap_or_default();
    endpoints.sort_by_cached_key(|endpoint| Address::port(*endpoint).to_string());
    endpoints
}
