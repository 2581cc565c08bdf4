//! Chains that always exist, and the jumps to them (C1, C5-C8, C11).

use kplane_model::{Cidr, Family};

use super::name::{BuiltIn, ChainName, TableName};
use super::rule::{Comment, Counter, Mark, Match, Rule, Sense, States, Target};
use super::settings::RuleSettings;
use super::structure::Layout;
use crate::backend::PodInterface;
use crate::plan::{NodePlan, loopback};

/// The packets that count as coming from pods (A15, A16).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::backend) struct Pods {
    /// The sources of such packets; empty = packets from pods are not distinguished.
    sources: Vec<Source>,
    /// Whether all packets to ClusterIPs are masqueraded (A17).
    masquerade_all: bool,
}

/// A property that identifies packets from pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Range(Cidr),
    Interface(PodInterface),
}

impl Pods {
    pub(in crate::backend) fn new(settings: &RuleSettings, node: &NodePlan) -> Self {
        let ranges = node.pod_sources.iter().copied().map(Source::Range);
        let interface = settings.pod_interface.map(Source::Interface);
        Self {
            sources: ranges.chain(interface).collect(),
            masquerade_all: node.unmasqueraded_sources.is_empty(),
        }
    }

    /// Returns a rule for each source of pods, made from `rule`, which applies to all packets.
    pub(super) fn only_pods(&self, rule: &Rule) -> Vec<Rule> {
        self.sources
            .iter()
            .map(|source| source.limit(rule.clone(), Sense::Is))
            .collect()
    }

    /// Returns the rule that marks packets to a ClusterIP for masquerading if they are not from pods. It is
    /// made from `rule`, which applies to all packets. `None` if no packets are marked.
    pub(in crate::backend) fn masquerade_others(&self, rule: Rule) -> Option<Rule> {
        let always = rule.with(Target::Jump(ChainName::MARK_MASQ));
        match self.sources[..] {
            _ if self.masquerade_all => Some(always),
            [] => None,
            [source] => Some(source.limit(always, Sense::IsNot)),
            _ => Some(always.with(Target::Jump(ChainName::MARK_NOT_POD))),
        }
    }

    /// Returns the rules of [`ChainName::MARK_NOT_POD`], if a rule needs this chain.
    pub(in crate::backend) fn mark_not_pod(&self) -> Option<Vec<Rule>> {
        if self.masquerade_all || self.sources.len() < 2 {
            return None;
        }
        let mut rules = self.only_pods(&Rule::new(Target::Return));
        rules.push(Rule::jump(ChainName::MARK_MASQ));
        Some(rules)
    }
}

impl Source {
    fn limit(self, rule: Rule, sense: Sense) -> Rule {
        match self {
            Self::Range(range) => rule.source(sense, range),
            Self::Interface(interface) => rule.input(sense, interface),
        }
    }
}

/// A chain that always exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::backend) struct Constant {
    pub(in crate::backend) table: TableName,
    pub(in crate::backend) name: ChainName,
    /// The rules; `None` for a chain that has to exist, with any rules.
    pub(in crate::backend) rules: Option<Vec<Rule>>,
}

/// Returns the chains that always exist, without those that have a part for each Service.
pub(super) fn constants(settings: &RuleSettings, node: &NodePlan) -> Vec<Constant> {
    let constant = |table, name, rules| Constant { table, name, rules };
    let (filter, nat) = (TableName::Filter, TableName::Nat);
    let mark = Mark::bit(settings.masquerade_bit);
    let canaries = TableName::ALL.map(|table| constant(table, ChainName::CANARY, None));
    let mark_rules = vec![Rule::new(Target::SetMark(mark))];
    let mut constants = vec![
        constant(filter, ChainName::FORWARD, Some(forward(settings, mark))),
        constant(filter, ChainName::FIREWALL, martians(settings, node)),
        constant(nat, ChainName::MARK_MASQ, Some(mark_rules)),
        constant(
            nat,
            ChainName::POSTROUTING,
            Some(postrouting(settings, mark)),
        ),
    ];
    if let Some(rules) = Pods::new(settings, node).mark_not_pod() {
        constants.push(constant(nat, ChainName::MARK_NOT_POD, Some(rules)));
    }
    constants.extend(canaries);
    constants
}

/// Returns the rules of [`ChainName::FORWARD`].
pub(in crate::backend) fn forward(settings: &RuleSettings, mark: Mark) -> Vec<Rule> {
    let mut rules = Vec::new();
    if !settings.tcp_be_liberal {
        let mut rule = Rule::new(Target::Drop).when(Match::State(Sense::Is, States::Invalid));
        if settings.counters {
            rule = rule.when(Match::Count(Counter::InvalidDropped));
        }
        rules.push(rule);
    }
    let accept = |text| Rule::new(Target::Accept).when(Match::Comment(Comment::Fixed(text)));
    rules.push(accept("kubernetes forwarding rules").when(Match::Marked(Sense::Is, mark)));
    let established = Match::State(Sense::Is, States::Established);
    rules.push(accept("kubernetes forwarding conntrack rule").when(established));
    rules
}

/// Returns the rules that drop packets from outside to the loopback network. Node ports on the loopback
/// address need `route_localnet`, which would let packets from outside reach programs that listen there.
/// kubelet writes the same rule.
fn martians(settings: &RuleSettings, node: &NodePlan) -> Option<Vec<Rule>> {
    let comment = Comment::Fixed("block incoming localnet connections");
    let states = Match::State(Sense::IsNot, States::EstablishedOrTranslated);
    let rule = Rule::new(Target::Drop)
        .source(Sense::IsNot, loopback(Family::V4))
        .destination(Sense::Is, loopback(Family::V4))
        .when(Match::Comment(comment))
        .when(states);
    serves_localhost(settings, node).then(|| vec![rule])
}

/// Returns the rules of [`ChainName::POSTROUTING`].
pub(in crate::backend) fn postrouting(settings: &RuleSettings, mark: Mark) -> Vec<Rule> {
    let random_fully = settings.random_fully;
    let comment = Comment::Fixed("kubernetes service traffic requiring SNAT");
    vec![
        Rule::new(Target::Return).when(Match::Marked(Sense::IsNot, mark)),
        // The packet may pass here again, so the mark is removed.
        Rule::new(Target::FlipMark(mark)),
        Rule::new(Target::Masquerade { random_fully }).when(Match::Comment(comment)),
    ]
}

/// Returns whether node ports are served on the loopback address.
pub(super) fn serves_localhost(settings: &RuleSettings, node: &NodePlan) -> bool {
    let mut served = node.nodeport_ips.iter();
    settings.family == Family::V4
        && settings.localhost_nodeports
        && served.any(|range| super::meets_loopback(*range))
}

/// Returns the destination of the rule that counts: node ports on the loopback address.
pub(super) fn localhost() -> Cidr {
    loopback(Family::V4)
}

/// Returns the first rule of the chains that may redirect or refuse packets. It lets kplane's own connections
/// pass, unless they are to a ClusterIP. The rule exists only in layout tree, and only if there is exactly
/// one known range of ClusterIPs, because a rule has one condition on the destination.
pub(super) fn spare_ours(
    settings: &RuleSettings,
    node: &NodePlan,
    chain: ChainName,
) -> Option<Rule> {
    const CHAINS: [ChainName; 2] = [ChainName::SERVICES, ChainName::PROXY_FIREWALL];
    let [range] = node.service_cidrs[..] else {
        return None;
    };
    let ours = settings.own_mark != 0 && settings.layout == Layout::Tree;
    (ours && CHAINS.contains(&chain)).then(|| {
        Rule::new(Target::Return)
            .destination(Sense::IsNot, range)
            .when(Match::MarkIs(Mark::whole(settings.own_mark)))
    })
}

/// Returns the last rules of `KUBE-SERVICES`: packets for the node itself may be for a node port (C6).
pub(super) fn to_node_ports(settings: &RuleSettings, node: &NodePlan) -> Vec<Rule> {
    const TEXT: &str =
        "kubernetes service nodeports; NOTE: this must be the last rule in this chain";
    let jump = || {
        Rule::jump(ChainName::NODEPORTS)
            .when(Match::Comment(Comment::Fixed(TEXT)))
            .when(Match::DestinationLocal)
    };
    let excluded = (!serves_localhost(settings, node)).then(|| loopback(settings.family));
    if let [range] = node.nodeport_ips[..]
        && range.prefix_len() == 0
    {
        return vec![match excluded {
            Some(loopback) => jump().destination(Sense::IsNot, loopback),
            None => jump(),
        }];
    }
    let inside = |range: &Cidr| excluded.is_some_and(|loopback| loopback.covers(*range));
    let ranges: Vec<Cidr> =
        node.nodeport_ips.iter().copied().filter(|range| !inside(range)).collect();
    // One rule has one condition on the destination.
    let around = excluded.filter(|loopback| ranges.iter().any(|range| range.covers(*loopback)));
    let except = around.map(|loopback| Rule::new(Target::Return).destination(Sense::Is, loopback));
    let ranges = ranges.into_iter().map(|range| jump().destination(Sense::Is, range));
    except.into_iter().chain(ranges).collect()
}

/// A jump from a built-in chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::backend) struct Jump {
    pub(in crate::backend) table: TableName,
    pub(in crate::backend) from: BuiltIn,
    pub(in crate::backend) rule: Rule,
}

/// Returns the jumps from built-in chains, in the order in which they are inserted at the front. The last one
/// is the first that packets meet (C1).
pub(super) fn jumps() -> Vec<Jump> {
    const PORTALS: &str = "kubernetes service portals";
    const VISIBLE: &str = "kubernetes externally-visible service portals";
    const FIREWALL: &str = "kubernetes load balancer firewall";
    let jump = |table, from, rule| Jump { table, from, rule };
    let always = |to, text| Rule::jump(to).when(Match::Comment(Comment::Fixed(text)));
    let first = |to, text| {
        Rule::jump(to)
            .when(Match::State(Sense::Is, States::New))
            .when(Match::Comment(Comment::Fixed(text)))
    };
    let (filter, nat) = (TableName::Filter, TableName::Nat);
    let external = || first(ChainName::EXTERNAL_SERVICES, VISIBLE);
    let services = || first(ChainName::SERVICES, PORTALS);
    let firewall = || first(ChainName::PROXY_FIREWALL, FIREWALL);
    let health = always(
        ChainName::NODEPORTS,
        "kubernetes health check service ports",
    );
    let forward = always(ChainName::FORWARD, "kubernetes forwarding rules");
    let postrouting = always(ChainName::POSTROUTING, "kubernetes postrouting rules");
    vec![
        jump(filter, BuiltIn::Input, external()),
        jump(filter, BuiltIn::Forward, external()),
        jump(filter, BuiltIn::Input, health),
        jump(filter, BuiltIn::Forward, services()),
        jump(filter, BuiltIn::Output, services()),
        jump(filter, BuiltIn::Forward, forward),
        jump(filter, BuiltIn::Input, firewall()),
        jump(filter, BuiltIn::Output, firewall()),
        jump(filter, BuiltIn::Forward, firewall()),
        jump(nat, BuiltIn::Output, always(ChainName::SERVICES, PORTALS)),
        jump(
            nat,
            BuiltIn::Prerouting,
            always(ChainName::SERVICES, PORTALS),
        ),
        jump(nat, BuiltIn::Postrouting, postrouting),
        jump(filter, BuiltIn::Input, Rule::jump(ChainName::FIREWALL)),
        jump(filter, BuiltIn::Output, Rule::jump(ChainName::FIREWALL)),
    ]
}
