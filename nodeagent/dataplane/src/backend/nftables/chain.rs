//! Chains, rules, and the steps that rules consist of.

use std::borrow::Cow;

use kplane_model::Protocol;

use super::affinity_id::AffinityId;
use super::policy_step::PolicyStep;
use super::schema::{Balancer, Class, Set, TableSettings};
use super::word::WordStep;

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
    /// `KEY vmap @set`, with the destination that the packet had at first
    OriginalLead(Set),
    /// `KEY @set`, with the destination that the packet had at first
    OriginalIn(Set),
    /// `KEY != @set`, with the destination that the packet had at first
    OriginalNotIn(Set),
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
    /// `ct state new ct status confirmed`: a later packet of a connection without an answer
    Unanswered,
    /// A step that reads or writes the word of a place.
    Word(WordStep),
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

impl NftRule {
    /// Returns whether a table with these settings has the rule.
    pub(super) fn is_in(&self, settings: TableSettings) -> bool {
        self.steps.iter().all(|step| match step {
            RuleStep::FromPodInterface | RuleStep::NotFromPodInterface => {
                settings.pod_interface.is_some()
            }
            RuleStep::ToLoopback | RuleStep::Count(_) => settings.refuse_loopback,
            RuleStep::OfOurs => settings.own_mark != 0,
            _ => true,
        })
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
}
