//! The chains and rules of the table. They are constant, and the same for every cluster. Services and
//! endpoints are only elements of sets, so a change of them never touches a rule.
//!
//! ```text
//! prerouting-firewall, output-firewall   which clients may go on with what has no answer yet
//! prerouting-nat, output-nat > services > place > special > inside   which endpoints (A16), which clients (A8)
//!                                               > again > service-1, .. inside-nodeport-16384   DNAT
//! prerouting-remember, output-remember > remember, taken          session affinity; what another program translated
//! input, forward, output > unserved, unserved-nodeports, unallocated   refuse the rest
//! unserved-nodeports > refuse-on-loopback   refuse and count node ports on loopback addresses (K6)
//! postrouting                            masquerade what is marked, and hairpins
//! ```
//!
//! `services` keeps the place's word (`word.rs`) in `meta priority`. Its bits decide everything else. `remember`, which comes
//! last in the hook, takes it away. Packets jump to the chain of their class several times. Each time, the chain draws an
//! index, and a draw beyond the last endpoint misses and returns.
//!
//! kplane's own connections, which carry a mark, pass `output-*`, `output` and `input` untouched, except
//! those to a ClusterIP. So no Service's addresses can cut off an agent from its control plane.
//!
//! **Session affinity** (A11): before the classes, `sticky-*` leads to a chain of the ServicePort that knows the client's last
//! endpoint. If the chain knows none, the rules draw an endpoint. In both cases `remember`, right behind the NAT chains of the
//! same hook, stores the endpoint. There, only conntrack still knows the packet's first destination. The ServicePort's own
//! chains are in `affinity.rs`; they are the only chains that are not constant.

use kplane_model::Protocol;

use super::chain::RuleStep::{
    Count, Dnat, Dnatted, Drop, FlipMark, FromPodInterface, FromThisNode, Goto, In, Is, Jump, Lead,
    Marked, Masquerade, NewConnection, NotDnatted, NotFromPodInterface, NotIn, NotToLoopback,
    OfOurs, OriginalIn, OriginalLead, OriginalNotIn, Return, SetMark, TcpReset, ToLoopback,
    ToThisNode, Unanswered, Unreachable,
};
use super::chain::{Chain, HookPoint, RuleStep};
use super::schema::{Balancer, Class, Set};
use super::word::{Word, WordStep};

/// Number of draws before the first endpoint is taken: one, and then several times as many as a chain makes. At most half of
/// all draws miss, so the first endpoint gets at most 2^-16 of all connections too much.
const AGAIN: usize = 3;
const AT_ONCE: usize = 5;

/// Takes the word away.
const FORGET: RuleStep = RuleStep::Word(WordStep::Forget);

fn look_up(map: Set) -> RuleStep {
    RuleStep::Word(WordStep::LookUp(map))
}

fn draw(map: Set) -> RuleStep {
    RuleStep::Word(WordStep::Draw(map))
}

/// Returns the match of words with this value in these bits.
fn equals(mask: u32, value: u32) -> RuleStep {
    RuleStep::Word(WordStep::Equals(mask, value))
}

impl Chain {
    /// Adds a rule for packets to places with this bit.
    fn with(self, bit: u32, steps: impl IntoIterator<Item = RuleStep>) -> Self {
        let steps = [equals(bit, bit)].into_iter().chain(steps);
        self.rule(steps.collect::<Vec<_>>())
    }

    /// Adds rules that take the remembered endpoint, of a place by address or of a node port.
    fn by_kind(self, service: RuleStep, nodeport: RuleStep) -> Self {
        let mask = Word::STICKY | Word::NODEPORT;
        self.rule([equals(mask, Word::STICKY), service])
            .rule([equals(mask, mask), nodeport])
    }

    /// Adds rules that draw again until a draw hits an endpoint, or else take the first endpoint.
    fn draw_again(self, map: Set, of: Balancer, again: &'static str) -> Self {
        let chain = (0..AGAIN).fold(self, |chain, _| chain.rule([Jump(again)]));
        chain
            .rule([RuleStep::Word(WordStep::First(of)), draw(map)])
            .because("16 misses: the first endpoint")
    }
}

/// Returns all chains in the order in which they are created and listed.
pub(super) fn chains() -> Vec<Chain> {
    let again = |name, map| {
        let text = "a draw beyond the last endpoint misses and is repeated";
        (0..AT_ONCE).fold(Chain::new(name).comment(text), |chain, _| {
            chain.rule([draw(map)])
        })
    };
    let mut chains = base_chains().to_vec();
    chains.extend([
        firewall(),
        taken(),
        services(),
        place(),
        special(),
        inside(),
        inside_balance(),
        again("again", Set::Classes),
        again("inside-again", Set::InsideClasses),
        unserved(),
        unserved_nodeports(),
        unallocated(),
        refuse_on_loopback(),
        refuse(),
        remember(),
        remember_in("remember-services", Set::RememberServices),
        remember_in("remember-nodeports", Set::RememberNodeports),
    ]);
    chains.extend(Balancer::ALL.into_iter().flat_map(|balancer| {
        Class::all()
            .map(move |class| Chain::new(balancer.chain(class)).rule([Dnat(balancer, class)]))
    }));
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
    // The first packet is judged where its place is known: by `special`.
    let firewall = |name, point| {
        base(name, "filter", (point, -110)).rule([
            Unanswered,
            In(Set::FirewallServices),
            Goto("firewall"),
        ])
    };
    // These chains are in the same hook as the choice of the endpoint. So no packet is between the two when a
    // change takes effect. A priority without our bit is another program's, and so was the choice.
    let remember = |name, point| {
        let ours = equals(Word::OURS, Word::OURS);
        Chain::base(name, "filter", (point, -99))
            .rule([NewConnection, Dnatted, ours, Goto("remember")])
            .rule([NewConnection, Dnatted, Jump("taken")])
    };
    // Without the test for DNAT, an endpoint would be unreachable if its address and port were also a
    // destination without endpoints.
    let unserved = [
        NewConnection,
        NotDnatted,
        look_up(Set::Places),
        Jump("unserved"),
    ];
    // Also after DNAT, as in kube-proxy: an endpoint that is another Service's address, to which DNAT leads no further.
    let unallocated = [NewConnection, In(Set::ServiceCidrs), Goto("unallocated")];
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
            look_up(Set::Nodeports),
            Goto("unserved-nodeports"),
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

/// Returns the chain for connections whose endpoint another program chose, so that `special` did not see them.
fn taken() -> Chain {
    let guarded = OriginalIn(Set::FirewallServices);
    let denied = OriginalNotIn(Set::FirewallSources);
    let chain =
        Chain::new("taken").comment("loadBalancerSourceRanges where another program translates");
    Protocol::ALL.into_iter().fold(chain, |chain, protocol| {
        chain.rule([Is(protocol), guarded, denied, Drop])
    })
}

fn services() -> Chain {
    Chain::new("services")
        .rule([look_up(Set::Places), Goto("place")])
        .rule([
            look_up(Set::Nodeports),
            ToThisNode,
            NotToLoopback,
            In(Set::NodeportIps),
            Goto("place"),
        ])
        .with(Word::OURS, [FORGET])
        .because("a port number that is a node port's elsewhere")
}

fn place() -> Chain {
    let special = Word::EXTERNAL | Word::MASQUERADE | Word::INSIDE | Word::STICKY;
    let class = Word::class_mask(Balancer::Service);
    Chain::new("place")
        .with(
            Word::CLUSTER_IP,
            [NotIn(Set::UnmasqueradedSources), SetMark],
        )
        .because("clients outside the pod network")
        .with(Word::CLUSTER_IP, [NotFromPodInterface, SetMark])
        .rule([RuleStep::Word(WordStep::HasAny(special)), Jump("special")])
        .rule([draw(Set::Classes)])
        .rule([equals(class, 0), FORGET, Return])
        .because("no endpoint for this client")
        .draw_again(Set::Classes, Balancer::Service, "again")
        .rule([FORGET])
}

/// Returns the chain for places with more to do than to draw an endpoint.
fn special() -> Chain {
    Chain::new("special")
        .with(
            Word::EXTERNAL,
            [In(Set::FirewallServices), Jump("firewall")],
        )
        .with(Word::MASQUERADE, [SetMark])
        .with(Word::INSIDE, [Jump("inside")])
        .by_kind(
            Lead(Set::Sticky(Balancer::Service)),
            Lead(Set::Sticky(Balancer::Nodeport)),
        )
}

/// Returns the chain for destinations with `externalTrafficPolicy: Local`. Pods and the node itself reach all
/// endpoints; packets of other clients return, and are balanced over the endpoints of this node.
fn inside() -> Chain {
    let balance = Goto("inside-balance");
    Chain::new("inside")
        .comment("externalTrafficPolicy Local: pods and this node reach all endpoints")
        .rule([In(Set::PodCidrs), balance])
        .rule([FromPodInterface, balance])
        .rule([FromThisNode, SetMark, balance])
}

fn inside_balance() -> Chain {
    Chain::new("inside-balance")
        .by_kind(
            Lead(Set::Sticky(Balancer::InsideService)),
            Lead(Set::Sticky(Balancer::InsideNodeport)),
        )
        .rule([draw(Set::InsideClasses)])
        .draw_again(Set::InsideClasses, Balancer::InsideService, "inside-again")
}

/// Returns the chain for packets to the number of a node port. On loopback addresses, the table serves none. What the
/// agent's proxy serves there has another destination by now, and does not come here.
fn unserved_nodeports() -> Chain {
    Chain::new("unserved-nodeports")
        .rule([ToLoopback, Goto("refuse-on-loopback")])
        .rule([
            ToThisNode,
            NotToLoopback,
            In(Set::NodeportIps),
            Goto("unserved"),
        ])
        .rule([FORGET])
}

fn unserved() -> Chain {
    Chain::new("unserved")
        .with(Word::REJECT, [Goto("refuse")])
        .with(Word::DROP, [Drop])
        .rule([FORGET])
}

fn unallocated() -> Chain {
    Chain::new("unallocated")
        .rule([In(Set::ClusterIps), Goto("refuse")])
        .because("a port that the Service does not have")
        .rule([Drop])
        .because("an address that no Service has")
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

/// Returns the chain behind DNAT, which stores the endpoint that a client got, and takes the word away.
fn remember() -> Chain {
    Chain::new("remember")
        .by_kind(Jump("remember-services"), Jump("remember-nodeports"))
        .rule([FORGET])
}

/// Returns the chain that leads to the group. nft needs to know the protocol before it reads a port from conntrack.
fn remember_in(name: &'static str, map: Set) -> Chain {
    let chain = Chain::new(name).comment("sessionAffinity");
    Protocol::ALL.into_iter().fold(chain, |chain, protocol| {
        chain.rule([Is(protocol), OriginalLead(map)])
    })
}
