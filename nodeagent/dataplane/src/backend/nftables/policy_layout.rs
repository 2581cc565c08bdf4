//! The chains and rules of the table of NetworkPolicies. They are constant: all state is elements.
//!
//! ```text
//! forward (output) > new > midstream                   TCP that begins in its midst
//!                        > egress-check > egress-match > ingress-check > ingress-match > allowed
//! ```
//!
//! `meta priority` carries the number of the packet's other end from one rule to the next, for the first packet of a
//! connection only. It is set back to 0 before the packet goes on.

use kplane_model::{Direction, Family};

use super::layout::{Chain, HookPoint, Step};
use super::policy_schema::PolicySet;
use super::policy_step::PolicyStep;
use super::schema::{Field, Set};

/// Behind destination NAT and the refusals of Services, before source NAT.
const PRIORITY: i32 = 10;

use Direction::{Egress, Ingress};
use Field::{Destination, Source};
use PolicySet::{All, Denied, Isolated, LocalPods, LocalRanges, Loops, Ports, Ranges, Sampled};
use PolicyStep::{
    Accept, AddressIn, AddressNotIn, Anybody, Count, KnownConnection, Limit, Log, MidStream,
    Neighbour,
};
use Step::{Drop, FromThisNode, Goto, In, Jump, Policy};

/// Returns all chains in the order in which they are created and listed.
pub(super) fn chains(family: Family, output: bool, log: bool) -> Vec<Chain> {
    let open = Policy(AddressNotIn(Destination, Isolated(Ingress)));
    let ingress = Chain::new("ingress-check").rule([open, Goto("allowed")]);
    let mut chains = vec![
        matching("ingress-match", Ingress, "allowed"),
        matching("egress-match", Egress, "ingress-check"),
        Chain::new("allowed").rule([Policy(Anybody), Policy(Accept)]),
        check(ingress, (Ingress, Source), "ingress-match", log),
        check(
            Chain::new("egress-check"),
            (Egress, Destination),
            "egress-match",
            log,
        ),
        midstream(),
        new(family),
        base("forward", HookPoint::Forward)
            .rule([Policy(KnownConnection), Policy(Accept)])
            .rule([Jump("new")]),
    ];
    if output {
        let from_here = base("output", HookPoint::Output)
            .rule([Policy(KnownConnection), Policy(Accept)])
            .rule([FromThisNode, Policy(Accept)])
            .because("the node itself; the rest is what IPVS leads to pods");
        chains.push(from_here.rule([Jump("new")]));
    }
    chains
}

fn base(name: &'static str, point: HookPoint) -> Chain {
    Chain::base(name, "filter", (point, PRIORITY))
}

fn matching(name: &'static str, direction: Direction, then: &'static str) -> Chain {
    let sets = [All(direction), Ports(direction), Ranges(direction)];
    sets.into_iter().fold(Chain::new(name), |chain, set| {
        chain.rule([In(Set::Policy(set)), Goto(then)])
    })
}

/// Adds rules that look for what allows a packet, with each number that stands for its other end; and those that deny it.
fn check(
    chain: Chain,
    (direction, other): (Direction, Field),
    matching: &'static str,
    log: bool,
) -> Chain {
    let number = |field, set| Policy(PolicyStep::Number(field, set));
    let numbers = [
        Policy(Anybody),
        number(other, PolicySet::Peers),
        number(Field::Number, PolicySet::Parents),
        number(Field::Number, PolicySet::Parents),
        number(other, PolicySet::Blocks),
    ];
    let chain = numbers
        .into_iter()
        .fold(chain, |chain, number| chain.rule([number, Jump(matching)]));
    let pod = match direction {
        Ingress => Destination,
        Egress => Source,
    };
    let sample = [
        Policy(AddressIn(pod, Sampled)),
        Policy(Limit),
        Policy(Log(direction)),
    ];
    let chain = if log { chain.rule(sample) } else { chain };
    let denied = Policy(AddressIn(pod, Denied(direction)));
    chain
        .rule([denied, Policy(Count(direction)), Drop])
        .rule([Drop])
}

fn midstream() -> Chain {
    let text = "a connection that was forgotten or cut: not taken up again, from neither side";
    let ends = [Source, Destination]
        .into_iter()
        .flat_map(|end| [Ingress, Egress].map(|direction| AddressIn(end, Isolated(direction))));
    ends.fold(Chain::new("midstream").comment(text), |chain, end| {
        chain.rule([Policy(end), Drop])
    })
}

fn new(family: Family) -> Chain {
    let chain = match family {
        Family::V4 => Chain::new("new"),
        Family::V6 => Chain::new("new").rule([Policy(Neighbour), Policy(Accept)]),
    };
    let unknown = |end| {
        let in_range = Policy(AddressIn(end, LocalRanges));
        [in_range, Policy(AddressNotIn(end, LocalPods)), Drop]
    };
    chain
        .rule([Policy(MidStream), Jump("midstream")])
        .rule([In(Set::Policy(Loops)), Policy(Accept)])
        .rule(unknown(Source))
        .rule(unknown(Destination))
        .rule([
            Policy(AddressIn(Source, Isolated(Egress))),
            Goto("egress-check"),
        ])
        .rule([
            Policy(AddressIn(Destination, Isolated(Ingress))),
            Goto("ingress-check"),
        ])
}
