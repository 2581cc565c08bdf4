//! The chains and rules of the table: constant, the same for every cluster. Services and endpoints
//! are elements of sets only, so a change never touches a rule.
//!
//! ```text
//! prerouting-firewall, output-firewall   who may reach a destination with source ranges
//! prerouting-nat, output-nat > services > service | nodeport      choose an endpoint, DNAT
//!                                         > inside-service | inside-nodeport  A16
//! prerouting-remember, output-remember > remember                 session affinity
//! input, forward, output > unserved, unserved-nodeports, unallocated   refuse the rest
//! postrouting                            masquerade what is marked, and hairpins
//! ```
//!
//! VIP below means `ip daddr . meta l4proto . th dport`. A class chain is jumped to several times:
//! each time it draws an index, and a draw beyond the last endpoint misses and returns.
//!
//! Our own connections, which carry a mark, pass `output-*`, `output` and `input` untouched, unless they
//! are to a ClusterIP: nothing that a Service claims keeps an agent from its control plane.
//!
//! **Session affinity** (A11): before the classes, `sticky-*` leads to a chain of the ServicePort
//! that knows the client's last endpoint; if it knows none, an endpoint is drawn. Either way
//! `remember`, right behind the NAT chains of the same hook, takes note of the endpoint. What the
//! packet asked for is then known from conntrack only: hence `Original*`. The ServicePort's own
//! chains are in `affinity.rs`; they are the only ones that are not constant.

use std::borrow::Cow;

use kplane_model::Protocol;

use super::affinity::AffinityId;
use super::schema::{Balancer, Class, Set};

/// Draws before the first endpoint is taken: at most half of all draws miss, so the first endpoint
/// gets at most 2^-16 too much.
const DRAWS: usize = 16;

/// `enum nf_inet_hooks` (linux/netfilter.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HookPoint {
    Prerouting = 0,
    Input = 1,
    Forward = 2,
    Output = 3,
    Postrouting = 4,
}

/// Where a base chain is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hook {
    /// `filter` or `nat`.
    pub(super) chain_type: &'static str,
    pub(super) point: HookPoint,
    /// Lower ones run first. Destination NAT is at -100, source NAT at 100.
    pub(super) priority: i32,
}

/// A chain with its rules.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    /// Owned for those of one ServicePort.
    pub(super) name: Cow<'static, str>,
    /// `None` for chains that are only jumped to.
    pub(super) hook: Option<Hook>,
    pub(super) comment: Option<&'static str>,
    pub(super) rules: Vec<Rule>,
}

/// A rule: steps from left to right until one does not match.
#[derive(Clone, Debug)]
pub(super) struct Rule {
    pub(super) steps: Vec<Step>,
    pub(super) comment: Option<Cow<'static, str>>,
}

/// One match or action of a rule. Set look-ups load the set's own key fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// `KEY @set`
    In(Set),
    /// `KEY != @set`
    NotIn(Set),
    /// `KEY vmap @set`
    Lead(Set),
    /// `KEY != @set`, with the destination that the packet had first
    OriginalNotIn(Set),
    /// `KEY vmap @set`, with the destination that the packet had first
    OriginalLead(Set),
    /// `iifname NAME`: from a pod of this node. Rules with this one are left out where pods are
    /// told by their addresses.
    FromPodInterface,
    /// `iifname != NAME`: as [`Step::FromPodInterface`]
    NotFromPodInterface,
    /// `ct state new`
    NewConnection,
    /// `ct status dnat`
    Dnatted,
    /// `ct status ! dnat`
    NotDnatted,
    /// `fib daddr type local`
    ToThisNode,
    /// `fib saddr type local`
    FromThisNode,
    /// `ip daddr != 127.0.0.0/8` or `ip6 daddr != ::1`
    NotToLoopback,
    /// `meta l4proto PROTOCOL`
    Is(Protocol),
    /// `meta mark MARK`: a connection of our own. Rules with this one are left out without a mark.
    OfOurs,
    /// `meta mark & BIT == BIT`
    Marked,
    /// `meta mark set meta mark | BIT`
    SetMark,
    /// `meta mark set meta mark ^ BIT`
    FlipMark,
    /// `dnat to KEY . numgen random mod M map @endpoints`
    Dnat(Balancer, Class),
    /// `dnat to ip saddr map @affinity-ID`; IPv6 with a second map for the port
    Recall(AffinityId),
    /// `update @affinity-ID { ip saddr timeout SECONDS : ip daddr . th dport }`; IPv6 with a second
    /// map for the port
    Remember(AffinityId, u32),
    /// `goto affinity-keep-ID`
    GotoKeep(AffinityId),
    /// `masquerade fully-random`
    Masquerade,
    /// `reject with tcp reset`
    TcpReset,
    /// `reject`: ICMP port unreachable
    Unreachable,
    /// `jump CHAIN`
    Jump(&'static str),
    /// `goto CHAIN`
    Goto(&'static str),
    /// `return`
    Return,
    /// `drop`
    Drop,
}

use Step::{
    Dnat, Dnatted, Drop, FlipMark, FromPodInterface, FromThisNode, Goto, In, Is, Jump, Lead,
    Marked, Masquerade, NewConnection, NotDnatted, NotFromPodInterface, NotIn, NotToLoopback,
    OfOurs, OriginalLead, OriginalNotIn, Return, SetMark, TcpReset, ToThisNode, Unreachable,
};

impl Rule {
    /// Whether it only makes sense where pods are told by their interface.
    pub(super) fn is_about_interfaces(&self) -> bool {
        let about = |step: &Step| matches!(step, FromPodInterface | NotFromPodInterface);
        self.steps.iter().any(about)
    }

    /// Whether it only makes sense where our own connections have a mark.
    pub(super) fn is_about_ours(&self) -> bool {
        self.steps.contains(&OfOurs)
    }
}

impl Chain {
    pub(super) fn new(name: impl Into<Cow<'static, str>>) -> Self {
        Self {
            name: name.into(),
            hook: None,
            comment: None,
            rules: Vec::new(),
        }
    }

    fn base(name: &'static str, chain_type: &'static str, at: (HookPoint, i32)) -> Self {
        let (point, priority) = at;
        let hook = Hook {
            chain_type,
            point,
            priority,
        };
        Self {
            hook: Some(hook),
            ..Self::new(name)
        }
    }

    /// What it is called in errors, which name constants only.
    pub(super) fn label(&self) -> &'static str {
        match self.name {
            Cow::Borrowed(name) => name,
            Cow::Owned(_) => "a chain of session affinity",
        }
    }

    fn comment(self, text: &'static str) -> Self {
        let comment = Some(text);
        Self { comment, ..self }
    }

    pub(super) fn rule(mut self, steps: impl Into<Vec<Step>>) -> Self {
        self.rules.push(Rule {
            steps: steps.into(),
            comment: None,
        });
        self
    }

    /// A comment on the rule added last.
    pub(super) fn because(mut self, text: impl Into<Cow<'static, str>>) -> Self {
        if let Some(rule) = self.rules.last_mut() {
            rule.comment = Some(text.into());
        }
        self
    }

    /// Takes the endpoint that is remembered, or draws from the class until an endpoint is hit, or takes the first endpoint.
    fn balance(self, balancer: Balancer) -> Self {
        let chain = self.rule([Lead(Set::Sticky(balancer))]);
        let chain = (0..DRAWS).fold(chain, |chain, _| chain.rule([Jump(classes_name(balancer))]));
        let first = Class::all().next();
        let chain = chain.rule(first.map(|class| Dnat(balancer, class)).as_slice());
        chain.because("16 misses: the first endpoint")
    }
}

/// All chains in the order in which they are created and listed.
pub(super) fn chains() -> Vec<Chain> {
    let mut chains = base_chains().to_vec();
    chains.extend([
        firewall(),
        services(),
        service(),
        nodeport(),
        inside("inside-service", "inside-service-balance"),
        Chain::new("inside-service-balance").balance(Balancer::InsideService),
        inside("inside-nodeport", "inside-nodeport-balance"),
        Chain::new("inside-nodeport-balance").balance(Balancer::InsideNodeport),
    ]);
    chains.extend(Balancer::ALL.map(classes));
    chains.extend([
        Chain::new("mark-for-masquerade").rule([SetMark]),
        unserved("unserved", Set::RejectServices, Set::DropServices),
        unserved(
            "unserved-nodeports",
            Set::RejectNodeports,
            Set::DropNodeports,
        ),
        unallocated(),
        refuse(),
        remember(),
    ]);
    chains
}

fn base_chains() -> [Chain; 10] {
    // What this node sends, or receives from itself: a mark does not leave the node.
    let spared = |chain: Chain| match chain.hook.map(|hook| hook.point) {
        Some(HookPoint::Output | HookPoint::Input) => chain
            .rule([OfOurs, NotIn(Set::ClusterIps), Return])
            .because("our own connections"),
        _ => chain,
    };
    let base = |name, chain_type, at| spared(Chain::base(name, chain_type, at));
    let nat = |name, point| base(name, "nat", (point, -100)).rule([Jump("services")]);
    let filter = |name, point| base(name, "filter", (point, 0));
    let firewall = |name, point| {
        base(name, "filter", (point, -110)).rule([
            NewConnection,
            In(Set::FirewallServices),
            Goto("firewall"),
        ])
    };
    // In the same hook as the choice: a packet cannot be between both when a change takes effect.
    let remember = |name, point| {
        let chain = Chain::base(name, "filter", (point, -99));
        chain.rule([NewConnection, Dnatted, Jump("remember")])
    };
    // Without the test for DNAT, an endpoint whose address and port are also a destination without
    // endpoints could not be reached.
    let unserved = [NewConnection, NotDnatted, Jump("unserved")];
    let unallocated = [NewConnection, NotDnatted, Jump("unallocated")];
    [
        firewall("prerouting-firewall", HookPoint::Prerouting),
        firewall("output-firewall", HookPoint::Output),
        nat("prerouting-nat", HookPoint::Prerouting),
        nat("output-nat", HookPoint::Output),
        remember("prerouting-remember", HookPoint::Prerouting),
        remember("output-remember", HookPoint::Output),
        filter("input", HookPoint::Input).rule(unserved).rule([
            NewConnection,
            NotDnatted,
            ToThisNode,
            NotToLoopback,
            In(Set::NodeportIps),
            Jump("unserved-nodeports"),
        ]),
        filter("forward", HookPoint::Forward)
            .rule(unserved)
            .rule(unallocated),
        filter("output", HookPoint::Output)
            .rule(unserved)
            .rule(unallocated),
        postrouting(),
    ]
}

fn postrouting() -> Chain {
    Chain::base("postrouting", "nat", (HookPoint::Postrouting, 100))
        .rule([Marked, FlipMark, Masquerade])
        .rule([Dnatted, In(Set::Hairpin), Masquerade])
        .because("an endpoint that reaches itself through a Service")
}

fn firewall() -> Chain {
    Chain::new("firewall")
        .comment("loadBalancerSourceRanges")
        .rule([In(Set::FirewallSources), Return])
        .rule([Drop])
}

fn services() -> Chain {
    Chain::new("services")
        .rule([In(Set::Services), Goto("service")])
        .rule([
            In(Set::Nodeports),
            ToThisNode,
            NotToLoopback,
            In(Set::NodeportIps),
            Goto("nodeport"),
        ])
}

fn service() -> Chain {
    Chain::new("service")
        .rule([In(Set::MasqueradeServices), Jump("mark-for-masquerade")])
        .rule([
            In(Set::ClusterIps),
            NotIn(Set::UnmasqueradedSources),
            Jump("mark-for-masquerade"),
        ])
        .because("clients outside the pod network")
        .rule([
            In(Set::ClusterIps),
            NotFromPodInterface,
            Jump("mark-for-masquerade"),
        ])
        .rule([In(Set::InsideServices), Jump("inside-service")])
        .balance(Balancer::Service)
}

fn nodeport() -> Chain {
    Chain::new("nodeport")
        .rule([In(Set::MasqueradeNodeports), Jump("mark-for-masquerade")])
        .rule([In(Set::InsideNodeports), Jump("inside-nodeport")])
        .balance(Balancer::Nodeport)
}

/// Destinations with `externalTrafficPolicy: Local`: pods and the node itself reach all endpoints;
/// others return and are balanced over those of this node.
fn inside(name: &'static str, balance: &'static str) -> Chain {
    Chain::new(name)
        .comment("externalTrafficPolicy Local: pods and this node reach all endpoints")
        .rule([In(Set::PodCidrs), Goto(balance)])
        .rule([FromPodInterface, Goto(balance)])
        .rule([FromThisNode, Jump("mark-for-masquerade")])
        .rule([FromThisNode, Goto(balance)])
}

fn classes(balancer: Balancer) -> Chain {
    let chain = Chain::new(classes_name(balancer))
        .comment("a draw beyond the last endpoint misses and is repeated");
    Class::all().fold(chain, |chain, class| {
        chain.rule([In(Set::Class(balancer, class)), Dnat(balancer, class)])
    })
}

fn classes_name(balancer: Balancer) -> &'static str {
    match balancer {
        Balancer::Service => "service-classes",
        Balancer::Nodeport => "nodeport-classes",
        Balancer::InsideService => "inside-service-classes",
        Balancer::InsideNodeport => "inside-nodeport-classes",
    }
}

fn unserved(name: &'static str, reject: Set, drop: Set) -> Chain {
    Chain::new(name)
        .rule([In(reject), Goto("refuse")])
        .rule([In(drop), Drop])
}

fn unallocated() -> Chain {
    Chain::new("unallocated")
        .rule([In(Set::ClusterIps), Goto("refuse")])
        .because("a port that the Service does not have")
        .rule([In(Set::ServiceCidrs), Drop])
        .because("an address that no Service has")
}

/// A TCP client learns of a reset at once; an ICMPv6 error would reach a local one only after the
/// first retransmission.
fn refuse() -> Chain {
    Chain::new("refuse")
        .rule([Is(Protocol::Tcp), TcpReset])
        .rule([Unreachable])
}

/// Takes note of the endpoint that a client got, where there is affinity. The sets are looked up in
/// the order in which `services` decided. nft wants to know the protocol before it reads a port from
/// conntrack.
fn remember() -> Chain {
    let chain = Chain::new("remember").comment("sessionAffinity");
    let chain = Protocol::ALL.into_iter().fold(chain, |chain, protocol| {
        chain.rule([Is(protocol), OriginalLead(Set::RememberServices)])
    });
    Protocol::ALL.into_iter().fold(chain, |chain, protocol| {
        let not_a_service = OriginalNotIn(Set::Services);
        let lead = OriginalLead(Set::RememberNodeports);
        chain.rule([Is(protocol), not_a_service, lead])
    })
}
