//! The chains and rules of the table of NetworkPolicies. They are constant: all state is elements.
//!
//! ```text
//! forward (output) > cut                               no TCP, denied since it began
//!                  > new > midstream > refuse          TCP that begins in its midst
//!                        > egress-check > egress-match > ingress > ingress-check > ingress-match > allowed
//! egress-check > egress-climb > egress-around > egress-match                          from a range to those around it
//! egress-tiers (before egress-check) > egress-admin, egress-baseline > egress-row > egress-action
//! ingress-tiers                      > the same of ingress
//! ```
//!
//! A Pod that ClusterNetworkPolicies select takes the way through the tiers: the number of the other end leads to a row of
//! ports, and that to an action. A tier that passes returns.
//!
//! What passes before it is known whether an end is isolated, and why nobody else passes with it:
//!
//! * *Packets of known connections, and errors about them.* Policies judged the first packet. What they deny since then is
//!   cut: TCP's entries are deleted, all others get the mark [`CUT`](super::policy_schema::CUT). An error must quote a
//!   packet of a connection that is not cut.
//! * *`output`: packets from the node's own addresses* (NP11). What IPVS hands on has the client's address.
//! * *Neighbour discovery* with hop limit 255 and code 0. The kernel takes one from the hop limit of a packet that it
//!   routes before it comes here, so only a bridge hands such a packet on, and its ends are neighbours.
//! * *Queries and reports of listeners to multicast*, to addresses that no router hands on.
//! * *A Pod to itself* (NP15). Who pretends to be the Pod must forge its address.
//!
//! `meta priority` carries the number of the packet's other end from one rule to the next, for the first packet of a
//! connection only. It is set back to 0 before the packet goes on.

use kplane_model::{Direction, Family, Protocol, Tier};

use super::chain::{Chain, HookPoint, RuleStep};
use super::policy_schema::{ACCEPT, DENY, PolicySet};
use super::policy_step::{ListenerTypes, PolicyStep};
use super::schema::{Field, Set};

/// Behind destination NAT and the refusals of Services, before source NAT.
const PRIORITY: i32 = 10;

use Direction::{Egress, Ingress};
use Field::{Destination, Source};
use PolicySet::{
    All, Denied, Isolated, LocalPods, LocalRanges, Loops, Ports, Ranges, Sampled, Tiered,
};
use PolicyStep::{
    Accept, AddressIn, AddressNotIn, Anybody, Count, Invalid, IsCut, IsNumber, KnownConnection,
    Limit, Listeners, Log, MidStream, Neighbour, NumberOf, Related, Reply, TakeUp,
};
use RuleStep::{Drop, FromThisNode, Goto, In, Is, Jump, Policy, TcpReset};

/// Returns all chains in the order in which they are created and listed.
pub(super) fn chains(family: Family, output: bool, log: bool) -> Vec<Chain> {
    let mut chains = vec![
        matching("ingress-match", Ingress, "allowed"),
        matching("egress-match", Egress, "ingress"),
        Chain::new("allowed")
            .rule([Policy(TakeUp)])
            .rule([Policy(Anybody), Policy(Accept)]),
        deny(Ingress, log),
        deny(Egress, log),
    ];
    chains.extend(checks(family, Ingress));
    chains.extend(checks(family, Egress));
    chains.extend(of_tiers(Ingress, "allowed"));
    chains.extend(of_tiers(Egress, "ingress"));
    chains.extend([
        ingress(Chain::new("ingress")).rule([Goto("allowed")]),
        refuse(),
        midstream(),
        cut(),
        new(family),
        judge(known(HookPoint::Forward, "forward")),
    ]);
    if output {
        let from_here = known(HookPoint::Output, "output")
            .rule([FromThisNode, Policy(Accept)])
            .because("the node itself; the rest is what IPVS leads to pods");
        chains.push(judge(from_here));
    }
    chains
}

fn known(point: HookPoint, name: &'static str) -> Chain {
    let chain = Chain::base(name, "filter", (point, PRIORITY));
    chain.rule([Policy(KnownConnection), Policy(Accept)])
}

/// Adds rules for what is not a known connection's. What nothing isolates passes.
fn judge(chain: Chain) -> Chain {
    chain
        .rule([Policy(IsCut), Jump("cut")])
        .rule([Jump("new")])
        .rule([Policy(TakeUp)])
}

/// Returns the chain for connections that policies denied after they had begun. While an end is isolated, only the side
/// that began one can have it back: when it is allowed again.
fn cut() -> Chain {
    let text = "denied since it began: answers stay denied, and the asking side is judged anew";
    let chain = Chain::new("cut").comment(text).rule([Policy(Related), Drop]);
    isolated_ends().fold(chain, |chain, end| {
        chain.rule([Policy(Reply), Policy(end), Drop])
    })
}

/// Returns the matches of packets one end of which is isolated.
fn isolated_ends() -> impl Iterator<Item = PolicyStep> {
    [Source, Destination]
        .into_iter()
        .flat_map(|end| [Isolated, Tiered].map(|set| (end, set)))
        .flat_map(|(end, set)| [Ingress, Egress].map(|direction| AddressIn(end, set(direction))))
}

fn matching(name: &'static str, direction: Direction, then: &'static str) -> Chain {
    let sets = [All(direction), Ports(direction), Ranges(direction)];
    sets.into_iter().fold(Chain::new(name), |chain, set| {
        chain.rule([In(Set::Policy(set)), Goto(then)])
    })
}

/// Steps from a range to the one around it that one chain makes.
const STEPS: usize = 16;

/// Returns the chains that look for what allows a packet, with each number that stands for its other end. Ranges come
/// last: the innermost one, and then those around it. A range has at most as many around it as an address has bits.
fn checks(family: Family, direction: Direction) -> [Chain; 3] {
    let (_, other) = ends(direction);
    let [check, climb, around, matching] = match direction {
        Ingress => [
            "ingress-check",
            "ingress-climb",
            "ingress-around",
            "ingress-match",
        ],
        Egress => [
            "egress-check",
            "egress-climb",
            "egress-around",
            "egress-match",
        ],
    };
    let number = |field, set| Policy(PolicyStep::Number(field, set));
    let numbers = [
        Policy(Anybody),
        number(other, PolicySet::Peers),
        number(Field::Number, PolicySet::Parents),
        number(Field::Number, PolicySet::Parents),
        number(other, PolicySet::Blocks),
    ];
    let chain = numbers.into_iter().fold(Chain::new(check), |chain, number| {
        chain.rule([number, Jump(matching)])
    });
    let bits = 8 * family.address_len();
    let repeat =
        |chain: Chain, times, name| (0..times).fold(chain, |chain, _| chain.rule([Jump(name)]));
    [
        Chain::new(around)
            .rule([number(Field::Number, PolicySet::Parents), Goto(matching)])
            .rule([Goto(denying(direction))]),
        repeat(Chain::new(climb), STEPS, around),
        repeat(chain, bits / STEPS, climb).rule([Goto(denying(direction))]),
    ]
}

/// Returns the fields of a direction's Pod, and of the other end.
fn ends(direction: Direction) -> (Field, Field) {
    match direction {
        Ingress => (Destination, Source),
        Egress => (Source, Destination),
    }
}

fn denying(direction: Direction) -> &'static str {
    match direction {
        Ingress => "ingress-deny",
        Egress => "egress-deny",
    }
}

/// Returns the chain that drops what policies of a direction deny, counts it, and logs it for those who follow.
fn deny(direction: Direction, log: bool) -> Chain {
    let (pod, _) = ends(direction);
    let chain = Chain::new(denying(direction));
    let sample = [
        Policy(AddressIn(pod, Sampled)),
        Policy(Limit),
        Policy(Log(direction)),
    ];
    let chain = if log { chain.rule(sample) } else { chain };
    let denied = Policy(AddressIn(pod, Denied(direction)));
    chain.rule([denied, Policy(Count(direction)), Drop]).rule([Drop])
}

/// Adds rules that lead to what judges connections to a Pod.
fn ingress(chain: Chain) -> Chain {
    chain
        .rule([
            Policy(AddressIn(Destination, Tiered(Ingress))),
            Goto("ingress-tiers"),
        ])
        .rule([
            Policy(AddressIn(Destination, Isolated(Ingress))),
            Goto("ingress-check"),
        ])
}

/// Returns the chains of ClusterNetworkPolicies for a direction. `then` judges what they accept or do not decide.
fn of_tiers(direction: Direction, then: &'static str) -> [Chain; 5] {
    let [tiers, admin, baseline, row, action] = match direction {
        Ingress => [
            "ingress-tiers",
            "ingress-admin",
            "ingress-baseline",
            "ingress-row",
            "ingress-action",
        ],
        Egress => [
            "egress-tiers",
            "egress-admin",
            "egress-baseline",
            "egress-row",
            "egress-action",
        ],
    };
    let (this, other) = ends(direction);
    let check = match direction {
        Ingress => "ingress-check",
        Egress => "egress-check",
    };
    let number = |set| Policy(PolicyStep::Number(other, set));
    let tier = |name, tier| {
        // A Pod's number counts more than that of a range which covers it.
        let chain = Chain::new(name).rule([Policy(Anybody)]).rule([number(PolicySet::TierBlocks)]);
        let decisions = Policy(NumberOf(PolicySet::Decisions(direction, tier)));
        chain.rule([number(PolicySet::TierPeers)]).rule([decisions, Goto(row)])
    };
    [
        Chain::new(action)
            .rule([Policy(IsNumber(ACCEPT)), Goto(then)])
            .rule([Policy(IsNumber(DENY)), Goto(denying(direction))]),
        Chain::new(row)
            .rule([Policy(NumberOf(PolicySet::RowPorts)), Goto(action)])
            .rule([Policy(NumberOf(PolicySet::RowAll)), Goto(action)]),
        tier(admin, Tier::Admin),
        tier(baseline, Tier::Baseline),
        Chain::new(tiers)
            .rule([Jump(admin)])
            .rule([Policy(AddressIn(this, Isolated(direction))), Goto(check)])
            .rule([Jump(baseline)])
            .rule([Goto(then)]),
    ]
}

/// Returns the chain that resets TCP connections which are not taken up. A segment that conntrack takes for invalid may be
/// an old one of a connection that goes on.
fn refuse() -> Chain {
    Chain::new("refuse")
        .rule([Policy(Invalid), Drop])
        .rule([Is(Protocol::Tcp), TcpReset])
}

fn midstream() -> Chain {
    let text = "a connection that was forgotten or cut: not taken up again, from neither side";
    isolated_ends().fold(Chain::new("midstream").comment(text), |chain, end| {
        chain.rule([Policy(end), Goto("refuse")])
    })
}

fn new(family: Family) -> Chain {
    let chain = match family {
        Family::V4 => Chain::new("new"),
        Family::V6 => Chain::new("new")
            .rule([Policy(Neighbour), Policy(Accept)])
            .rule([Policy(Listeners(ListenerTypes::First)), Policy(Accept)])
            .rule([Policy(Listeners(ListenerTypes::Second)), Policy(Accept)]),
    };
    let unknown = |end| {
        let in_range = Policy(AddressIn(end, LocalRanges));
        [in_range, Policy(AddressNotIn(end, LocalPods)), Drop]
    };
    let chain = chain
        .rule([Policy(MidStream), Jump("midstream")])
        .rule([In(Set::Policy(Loops)), Policy(Accept)])
        .rule(unknown(Source))
        .rule(unknown(Destination))
        .rule([
            Policy(AddressIn(Source, Tiered(Egress))),
            Goto("egress-tiers"),
        ])
        .rule([
            Policy(AddressIn(Source, Isolated(Egress))),
            Goto("egress-check"),
        ]);
    ingress(chain)
}
