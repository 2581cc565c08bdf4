//! The iptables rules around IPVS, which are exactly kube-proxy's chains (D4). They refer to sets, not to
//! Services, and so hardly ever change. This module is pure.
//!
//! kube-proxy leaves out rules about empty sets. kplane writes these rules, and they match nothing. As long
//! as no Service has external addresses, kplane leaves out the rules with `physdev`, because that match makes
//! the kernel load a module that changes how packets pass bridges.

use kplane_model::{Cidr, Family, Protocol};

use super::sets::SetId;
use crate::backend::iptables::FoundRules;
use crate::backend::iptables::layout::{self, Constant, Jump, Pods};
use crate::backend::iptables::rule::{Comment, Mark, Match, Rule, Sense, States, Target};
use crate::backend::iptables::{
    BuiltIn, ChainDigest, ChainName, JumpOp, RuleSettings, TableChange, TableName, Written,
};
use crate::plan::{NodePlan, loopback};
use kplane_netlink::ipvs::ServerKey;

/// Matches that the kernel lacks. Rules with them are left out, and everything else works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Lacks {
    /// Whether the match for the bridge port of a packet is missing.
    pub(super) physdev: bool,
    /// Whether the match for packets of IPVS is missing, which [`RuleFacts::denied`] needs.
    pub(super) ipvs: bool,
}

/// The facts that determine the rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RuleFacts {
    pub(super) settings: RuleSettings,
    pub(super) node: NodePlan,
    /// Whether any Service has external addresses.
    pub(super) external_ips: bool,
    /// Load balancers that the node itself may not use, sorted.
    pub(super) denied: Vec<ServerKey>,
    /// Whether packets of no known connection are dropped instead of forwarded.
    pub(super) drop_invalid: bool,
    pub(super) lacks: Lacks,
}

/// A builder for rules about sets.
struct InSet(Family);

impl InSet {
    /// Adds the condition with kube-proxy's comment.
    fn reported(&self, rule: Rule, set: SetId, parts: &'static str) -> Rule {
        let comment = Match::Comment(Comment::Fixed(set.comment()));
        self.silent(rule.when(comment), set, parts)
    }

    fn silent(&self, rule: Rule, set: SetId, parts: &'static str) -> Rule {
        rule.when(Match::InSet(set.name(self.0), parts))
    }
}

/// Address and port of the destination.
const PLACE: &str = "dst,dst";
/// The destination's port or address.
const ONE: &str = "dst";
/// Address and port of the destination, and the source.
const PLACE_AND_SOURCE: &str = "dst,dst,src";

impl RuleFacts {
    fn family(&self) -> Family {
        self.settings.family
    }

    fn mark(&self) -> Mark {
        Mark::bit(self.settings.masquerade_bit)
    }

    /// Returns all chains with their rules.
    fn chains(&self) -> Vec<Constant> {
        let (filter, nat) = (TableName::Filter, TableName::Nat);
        let chain = |table, name, rules| Constant {
            table,
            name,
            rules: Some(rules),
        };
        let mark = vec![Rule::new(Target::SetMark(self.mark()))];
        let pods = Pods::new(&self.settings, &self.node);
        let mut chains = vec![
            chain(nat, ChainName::MARK_MASQ, mark),
            chain(nat, ChainName::POSTROUTING, self.postrouting()),
            chain(nat, ChainName::LOAD_BALANCER, self.load_balancer()),
            chain(nat, ChainName::NODE_PORT, self.node_ports()),
            chain(filter, ChainName::FORWARD, self.forward()),
            chain(filter, ChainName::NODE_PORT, self.health_checks()),
            chain(filter, ChainName::SOURCE_RANGES, self.source_ranges()),
            chain(filter, ChainName::PROXY_FIREWALL, self.firewall()),
            chain(filter, ChainName::IPVS_FILTER, self.closed_ports()),
            chain(filter, ChainName::IPVS_OUT_FILTER, self.denied()),
        ];
        if let Some(rules) = pods.mark_not_pod() {
            chains.push(chain(nat, ChainName::MARK_NOT_POD, rules));
        }
        chains.push(chain(nat, ChainName::SERVICES, self.services(&pods)));
        chains
    }

    /// Returns the rules that masquerade hairpins, and marked packets.
    fn postrouting(&self) -> Vec<Rule> {
        let hairpin = Rule::new(Target::Masquerade {
            random_fully: false,
        });
        let hairpin = InSet(self.family()).reported(hairpin, SetId::LoopBack, PLACE_AND_SOURCE);
        let mut rules = vec![hairpin];
        rules.extend(layout::postrouting(&self.settings, self.mark()));
        rules
    }

    fn load_balancer(&self) -> Vec<Rule> {
        let exempt = Rule::new(Target::Return);
        let exempt = InSet(self.family()).reported(exempt, SetId::LoadBalancerLocal, PLACE);
        vec![exempt, Rule::jump(ChainName::MARK_MASQ)]
    }

    fn node_ports(&self) -> Vec<Rule> {
        let mut rules = Vec::new();
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Sctp] {
            let (all, local) = SetId::of_node_ports(protocol);
            let parts = match protocol {
                Protocol::Sctp => PLACE,
                Protocol::Tcp | Protocol::Udp => ONE,
            };
            for (set, target) in [
                (local, Target::Return),
                (all, Target::Jump(ChainName::MARK_MASQ)),
            ] {
                let rule = Rule::new(target).protocol(protocol);
                rules.push(InSet(self.family()).reported(rule, set, parts));
            }
        }
        rules
    }

    fn services(&self, pods: &Pods) -> Vec<Rule> {
        let sets = InSet(self.family());
        let loopback = loopback(self.family());
        let mut rules = vec![
            Rule::new(Target::Return).source(Sense::Is, loopback),
            sets.reported(
                Rule::jump(ChainName::LOAD_BALANCER),
                SetId::LoadBalancer,
                PLACE,
            ),
        ];
        let to_cluster_ip =
            |parts| sets.reported(Rule::new(Target::Continue), SetId::ClusterIp, parts);
        rules.push(match pods.masquerade_others(to_cluster_ip(PLACE)) {
            Some(rule) => rule,
            // Pods are not distinguished here. But the node's own packets must be masqueraded: they may have
            // a Service's address as their source, because the node has that address.
            None => to_cluster_ip("src,dst").with(Target::Jump(ChainName::MARK_MASQ)),
        });
        if self.external_ips {
            rules.extend(self.external_ips());
        }
        rules.push(Rule::jump(ChainName::NODE_PORT).when(Match::DestinationLocal));
        for set in [SetId::ClusterIp, SetId::LoadBalancer] {
            rules.push(sets.silent(Rule::new(Target::Accept), set, PLACE));
        }
        rules
    }

    fn external_ips(&self) -> Vec<Rule> {
        let sets = InSet(self.family());
        let to = |set, target| sets.reported(Rule::new(target), set, PLACE);
        let jump = Target::Jump(ChainName::MARK_MASQ);
        let mut rules = vec![to(SetId::ExternalIp, jump)];
        for set in [SetId::ExternalIp, SetId::ExternalIpLocal] {
            let accept = || to(set, Target::Accept);
            if !self.lacks.physdev {
                let elsewhere = accept().when(Match::NotBridged);
                rules.push(elsewhere.when(Match::SourceElsewhere));
            }
            rules.push(accept().when(Match::DestinationLocal));
        }
        rules
    }

    /// Returns the rules for forwarded packets. Packets of no known connection are only dropped if the
    /// settings ask for it (D9).
    fn forward(&self) -> Vec<Rule> {
        let settings = RuleSettings {
            tcp_be_liberal: !self.drop_invalid,
            ..self.settings
        };
        layout::forward(&settings, self.mark())
    }

    fn health_checks(&self) -> Vec<Rule> {
        let accept = Rule::new(Target::Accept);
        let set = SetId::HealthCheckNodePort;
        vec![InSet(self.family()).reported(accept, set, ONE)]
    }

    fn firewall(&self) -> Vec<Rule> {
        let jump = Rule::jump(ChainName::SOURCE_RANGES);
        vec![InSet(self.family()).reported(jump, SetId::LoadBalancerFw, PLACE)]
    }

    fn source_ranges(&self) -> Vec<Rule> {
        let sets = [SetId::LoadBalancerSourceCidr, SetId::LoadBalancerSourceIp];
        let mut rules: Vec<Rule> = sets
            .into_iter()
            .map(|set| {
                let rule = Rule::new(Target::Return);
                InSet(self.family()).reported(rule, set, PLACE_AND_SOURCE)
            })
            .collect();
        rules.push(Rule::new(Target::Drop));
        rules
    }

    /// Returns the rules that close the node's own ports on Services' addresses.
    fn closed_ports(&self) -> Vec<Rule> {
        let sets = InSet(self.family());
        let open = [
            (SetId::LoadBalancer, PLACE),
            (SetId::ClusterIp, PLACE),
            (SetId::ExternalIp, PLACE),
            (SetId::ExternalIpLocal, PLACE),
            (SetId::HealthCheckNodePort, ONE),
        ];
        let mut rules: Vec<Rule> = open
            .into_iter()
            .map(|(set, parts)| sets.silent(Rule::new(Target::Return), set, parts))
            .collect();
        let reject =
            Rule::new(Target::Reject(self.family())).when(Match::State(Sense::Is, States::New));
        rules.push(sets.silent(reject, SetId::IpvsIps, ONE));
        rules
    }

    fn denied(&self) -> Vec<Rule> {
        let rule = |key: &ServerKey| {
            Rule::new(Target::Drop)
                .source(Sense::Is, Cidr::single(key.ip))
                .when(Match::Virtual(*key))
        };
        self.denied.iter().filter(|_| !self.lacks.ipvs).map(rule).collect()
    }
}

/// Returns the jumps from built-in chains, in the order in which they are inserted at the front.
fn jumps() -> Vec<Jump> {
    let (filter, nat) = (TableName::Filter, TableName::Nat);
    let jump = |table, from, to, text| Jump {
        table,
        from,
        rule: Rule::new(Target::Continue)
            .when(Match::Comment(Comment::Fixed(text)))
            .with(Target::Jump(to)),
    };
    let portals = "kubernetes service portals";
    let firewall = "kube-proxy firewall rules";
    let access = "kubernetes ipvs access filter";
    vec![
        jump(nat, BuiltIn::Output, ChainName::SERVICES, portals),
        jump(nat, BuiltIn::Prerouting, ChainName::SERVICES, portals),
        jump(
            nat,
            BuiltIn::Postrouting,
            ChainName::POSTROUTING,
            "kubernetes postrouting rules",
        ),
        jump(
            filter,
            BuiltIn::Forward,
            ChainName::FORWARD,
            "kubernetes forwarding rules",
        ),
        jump(
            filter,
            BuiltIn::Input,
            ChainName::NODE_PORT,
            "kubernetes health check rules",
        ),
        jump(filter, BuiltIn::Input, ChainName::PROXY_FIREWALL, firewall),
        jump(
            filter,
            BuiltIn::Forward,
            ChainName::PROXY_FIREWALL,
            firewall,
        ),
        jump(filter, BuiltIn::Input, ChainName::IPVS_FILTER, access),
        jump(filter, BuiltIn::Output, ChainName::IPVS_OUT_FILTER, access),
    ]
}

/// The steps from the rules that were found to those that must exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Steps {
    /// Steps before addresses are bound.
    pub(super) first: Vec<TableChange>,
    /// Steps after addresses are bound. If rules of mode iptables translate packets, they stay until IPVS can
    /// do so.
    pub(super) last: Vec<TableChange>,
}

impl Steps {
    /// Returns the number of chains written and jumps set.
    pub(super) fn len(&self) -> usize {
        self.first.iter().chain(&self.last).map(TableChange::len).sum()
    }

    /// Returns the first difference, human-readable.
    pub(super) fn describe(&self) -> Option<String> {
        let step = self.first.iter().chain(&self.last).next()?;
        let table = step.table;
        let chain = step.write.first().map(|chain| chain.name.to_string());
        let jump = || Some(step.jumps.first()?.chain.to_string());
        let chain = chain.or_else(jump).unwrap_or_default();
        Some(format!("{table} {chain} has other rules"))
    }
}

/// Compares the rules that were found with those that must exist.
pub(super) fn compare(shape: &RuleFacts, found: &FoundRules) -> Steps {
    let mut steps = [TableName::Filter, TableName::Nat].map(TableChange::new);
    let mut last = TableChange::new(TableName::Nat);
    for chain in shape.chains() {
        let id = (chain.table, chain.name);
        let before = found.chains().get(&id);
        let written = written(&chain);
        if before == Some(&written.content) {
            continue;
        }
        let translates = id == (TableName::Nat, ChainName::SERVICES)
            && before.is_some_and(|content| content.rules() > 0);
        match chain.table {
            TableName::Nat if translates => last.write.push(written),
            TableName::Nat => steps[1].write.push(written),
            TableName::Filter | TableName::Mangle => steps[0].write.push(written),
        }
    }
    for jump in jumps() {
        let line = jump.rule.line_in(jump.from);
        let count = found.jumps.get(&(jump.table, line)).copied().unwrap_or(0);
        let op = JumpOp {
            chain: jump.from,
            insert: count == 0,
            rule: jump.rule.to_string(),
        };
        let times = if count == 0 { 1 } else { count - 1 };
        let step = &mut steps[usize::from(jump.table == TableName::Nat)];
        step.jumps.extend(std::iter::repeat_n(op, times));
    }
    let full = |step: &TableChange| !step.is_empty();
    Steps {
        first: steps.into_iter().filter(full).collect(),
        last: Some(last).into_iter().filter(full).collect(),
    }
}

/// Returns a chain in its written form.
fn written(chain: &Constant) -> Written {
    let mut lines = String::new();
    for rule in chain.rules.iter().flatten() {
        rule.push(chain.name, &mut lines);
    }
    Written {
        name: chain.name,
        depth: 0,
        content: ChainDigest::of(&lines),
        lines,
    }
}

/// Updates the rules that were found after the steps were executed.
pub(super) fn accept(found: &mut FoundRules, steps: &[TableChange]) {
    for step in steps {
        for chain in &step.write {
            found.put(step.table, chain);
        }
        for jump in &step.jumps {
            let line = format!("-A {}{}", jump.chain, jump.rule);
            found.set_jumps(step.table, line, 1);
        }
    }
}
