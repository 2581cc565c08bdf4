//! The chains and rules of the table. They are constant, and the same for every cluster. Services and
//! endpoints are only elements of sets, so a change of them never touches a rule.
//!
//! ```text
//! prerouting-firewall, output-firewall   which clients may reach a destination with source ranges
//! prerouting-nat, output-nat > services > service | nodeport      choose an endpoint, DNAT
//!                                         > inside-service | inside-nodeport  A16
//! prerouting-remember, output-remember > remember                 session affinity
//! input, forward, output > unserved, unserved-nodeports, unallocated   refuse the rest
//! input > loopback-nodeports             refuse and count node ports on loopback addresses (K6)
//! postrouting                            masquerade what is marked, and hairpins
//! ```
//!
//! VIP below means `ip daddr . meta l4proto . th dport`. Packets jump to a class chain several times. Each
//! time, the chain draws an index, and a draw beyond the last endpoint misses and returns.
//!
//! kplane's own connections, which carry a mark, pass `output-*`, `output` and `input` untouched, except
//! those to a ClusterIP. So no Service's addresses can cut off an agent from its control plane.
//!
//! **Session affinity** (A11): before the classes, `sticky-*` leads to a chain of the ServicePort that knows
//! the client's last endpoint. If the chain knows none, the rules draw an endpoint. In both cases `remember`,
//! right behind the NAT chains of the same hook, stores the endpoint. There, only conntrack still knows the
//! packet's first destination, hence the steps `Original*`. The ServicePort's own chains are in
//! `affinity.rs`; they are the only chains that are not constant.

use std::borrow::Cow;

use kplane_model::Protocol;

use super::affinity_id::AffinityId;
use super::policy_step::PolicyStep;
use super::schema::{Balancer, Class, Set};

/// Number of draws before the first endpoint is taken. At most half of all draws miss, so the first endpoint
/// gets at most 2^-16 of all connections too much.
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

/// Place at which a base chain is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hook {
    /// `filter` or `nat`.
    pub(super) chain_type: &'static str,
    pub(super) point: HookPoint,
    /// Priority: lower ones run first. Destination NAT is at -100, source NAT at 100.
    pub(super) priority: i32,
}

/// A chain with its rules.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    /// The name; owned for chains of one ServicePort.
    pub(super) name: Cow<'static, str>,
    /// The hook; `None` for chains that are only jumped to.
    pub(super) hook: Option<Hook>,
    pub(super) comment: Option<&'static str>,
    pub(super) rules: Vec<NftRule>,
}

/// A rule: a list of steps, executed until one does not match.
#[derive(Clone, Debug)]
pub(super) struct NftRule {
    pub(super) steps: Vec<RuleStep>,
    pub(super) comment: Option<Cow<'static, str>>,
}

/// One match or action of a rule. Set lookups load the key fields of the set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RuleStep {
    /// `KEY @set`
    In(Set),
    /// `KEY != @set`
    NotIn(Set),
    /// `KEY vmap @set`
    Lead(Set),
    /// `KEY != @set`, with the destination that the packet had at first
    OriginalNotIn(Set),
    /// `KEY vmap @set`, with the destination that the packet had at first
    OriginalLead(Set),
    /// `iifname NAME`: from a pod of this node. Rules with this step are left out where pods are recognized
    /// by their addresses.
    FromPodInterface,
    /// `iifname != NAME`: as [`RuleStep::FromPodInterface`]
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
    /// `ip daddr 127.0.0.0/8` or `ip6 daddr ::1`. Rules with this step are left out where node ports on
    /// loopback addresses belong to other programs.
    ToLoopback,
    /// `counter name NAME`, of [`counter_name`]. Left out as [`RuleStep::ToLoopback`].
    Count(Protocol),
    /// `meta l4proto PROTOCOL`
    Is(Protocol),
    /// `meta mark MARK`: one of kplane's own connections. Rules with this step are left out if there is no
    /// mark.
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
    UseRemembered(AffinityId),
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
    /// A step of the table of NetworkPolicies.
    Policy(PolicyStep),
}

use RuleStep::{
    Count, Dnat, Dnatted, Drop, FlipMark, FromPodInterface, FromThisNode, Goto, In, Is, Jump, Lead,
    Marked, Masquerade, NewConnection, NotDnatted, NotFromPodInterface, NotIn, NotToLoopback,
    OfOurs, OriginalLead, OriginalNotIn, Return, SetMark, TcpReset, ToLoopback, ToThisNode,
    Unreachable,
};

impl NftRule {
    /// Returns whether the rule only applies where pods are recognized by their interface.
    pub(super) fn is_about_interfaces(&self) -> bool {
        let about = |step: &RuleStep| matches!(step, FromPodInterface | NotFromPodInterface);
        self.steps.iter().any(about)
    }

    /// Returns whether the rule only applies where node ports on loopback addresses are refused.
    pub(super) fn is_about_loopback(&self) -> bool {
        let about = |step: &RuleStep| matches!(step, ToLoopback | Count(_));
        self.steps.iter().any(about)
    }

    /// Returns whether the rule only applies where kplane's own connections have a mark.
    pub(super) fn is_about_ours(&self) -> bool {
        self.steps.contains(&OfOurs)
    }
}

/// Returns the name of the counter of packets that are refused on loopback addresses.
pub(super) fn counter_name(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "refused-on-loopback-tcp",
        Protocol::Udp => "refused-on-loopback-udp",
        Protocol::Sctp => "refused-on-loopback-sctp",
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

    pub(super) fn base(name: &'static str, chain_type: &'static str, at: (HookPoint, i32)) -> Self {
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

    /// Returns the chain's name in errors, which contain only constant names.
    pub(super) fn label(&self) -> &'static str {
        match self.name {
            Cow::Borrowed(name) => name,
            Cow::Owned(_) => "a chain of session affinity",
        }
    }

    pub(super) fn comment(self, text: &'static str) -> Self {
        let comment = Some(text);
        Self { comment, ..self }
    }

    pub(super) fn rule(mut self, steps: impl Into<Vec<RuleStep>>) -> Self {
        self.rules.push(NftRule {
            steps: steps.into(),
            comment: None,
        });
        self
    }

    /// Sets the comment of the rule added last.
    pub(super) fn because(mut self, text: impl Into<Cow<'static, str>>) -> Self {
        if let Some(rule) = self.rules.last_mut() {
            rule.comment = Some(text.into());
        }
        self
    }

    /// Adds rules that take the remembered endpoint, or else draw from the class until a draw hits an
    /// endpoint, or else take the first endpoint.
    fn balance(self, balancer: Balancer) -> Self {
        let chain = self.rule([Lead(Set::Sticky(balancer))]);
        let chain = (0..DRAWS).fold(chain, |chain, _| chain.rule([Jump(classes_name(balancer))]));
        let first = Class::all().next();
        let chain = chain.rule(first.map(|class| Dnat(balancer, class)).as_slice());
        chain.because("16 misses: the first endpoint")
    }
}

/// Returns all chains in the order in which they are created and listed.
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
        loopback_nodeports(),
        refuse_on_loopback(),
        refuse(),
        remember(),
    ]);
    chains
}

fn base_chains() -> [Chain; 10] {
    // This covers packets that this node sends, and packets that the node receives from itself: a mark does
    // not leave the node.
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
    // These chains are in the same hook as the choice of the endpoint. So no packet is between the two when a
    // change takes effect.
    let remember = |name, point| {
        let chain = Chain::base(name, "filter", (point, -99));
        chain.rule([NewConnection, Dnatted, Jump("remember")])
    };
    // Without the test for DNAT, an endpoint would be unreachable if its address and port were also a
    // destination without endpoints.
    let unserved = [NewConnection, NotDnatted, Jump("unserved")];
    // Also after DNAT, as in kube-proxy: an endpoint that is another Service's address, to which DNAT leads no further.
    let unallocated = [NewConnection, Jump("unallocated")];
    [
        firewall("prerouting-firewall", HookPoint::Prerouting),
        firewall("output-firewall", HookPoint::Output),
        nat("prerouting-nat", HookPoint::Prerouting),
        nat("output-nat", HookPoint::Output),
        remember("prerouting-remember", HookPoint::Prerouting),
        remember("output-remember", HookPoint::Output),
        filter("input", HookPoint::Input)
            .rule(unserved)
            .rule([
                NewConnection,
                NotDnatted,
                ToThisNode,
                NotToLoopback,
                In(Set::NodeportIps),
                Jump("unserved-nodeports"),
            ])
            .rule([
                NewConnection,
                NotDnatted,
                ToLoopback,
                Jump("loopback-nodeports"),
            ]),
        filter("forward", HookPoint::Forward).rule(unserved).rule(unallocated),
        filter("output", HookPoint::Output).rule(unserved).rule(unallocated),
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
    Chain::new("services").rule([In(Set::Services), Goto("service")]).rule([
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

/// Returns the chain for destinations with `externalTrafficPolicy: Local`. Pods and the node itself reach all
/// endpoints; packets of other clients return, and are balanced over the endpoints of this node.
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
    Chain::new(name).rule([In(reject), Goto("refuse")]).rule([In(drop), Drop])
}

fn unallocated() -> Chain {
    Chain::new("unallocated")
        .rule([In(Set::ClusterIps), Goto("refuse")])
        .because("a port that the Service does not have")
        .rule([In(Set::ServiceCidrs), Drop])
        .because("an address that no Service has")
}

/// Returns the chain for packets to loopback addresses, on which the table serves no node port. What the agent's proxy
/// serves there has another destination by now, and does not come here.
fn loopback_nodeports() -> Chain {
    [Set::Nodeports, Set::RejectNodeports, Set::DropNodeports]
        .into_iter()
        .fold(Chain::new("loopback-nodeports"), |chain, set| {
            chain.rule([In(set), Goto("refuse-on-loopback")])
        })
}

fn refuse_on_loopback() -> Chain {
    let chain = Protocol::ALL
        .into_iter()
        .fold(Chain::new("refuse-on-loopback"), |chain, protocol| {
            chain.rule([Is(protocol), Count(protocol)])
        });
    chain.rule([Goto("refuse")])
}

/// Returns the chain that refuses connections. A TCP reset reaches the client at once. An ICMPv6 error would
/// reach a local client only after its first retransmission.
fn refuse() -> Chain {
    Chain::new("refuse").rule([Is(Protocol::Tcp), TcpReset]).rule([Unreachable])
}

/// Returns the chain that stores the endpoint that a client got, for destinations with affinity. The sets are
/// searched in the order in which `services` decided. nft needs to know the protocol before it reads a port
/// from conntrack.
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
