//! Random events in a small world, so that objects meet. The simulation of control planes and agents includes this file
//! as well.

use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{
    NamedPort, NodeName, PodName, PolicyName, PolicyPort, Protocol, Tier, TierAction,
};

use super::{
    ClusterPolicy, Labels, NetworkPolicy, Node, PeerSpec, Pod, Requirement, Rule, Selector,
    TierRule, block, name, named,
};

/// What happens to an index.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    PutPolicy(NetworkPolicy),
    DeletePolicy(PolicyName),
    PutNamespace(Arc<str>, Labels),
    DeleteNamespace(Arc<str>),
    PutPod(Pod),
    DeletePod(PodName),
    PutTiers(ClusterPolicy),
    DeleteTiers(Arc<str>),
    SetNode(NodeName, Option<Node>),
    Take,
}

/// Addresses that Pods have, by turns.
const POD_ADDRESSES: [&str; 7] = [
    "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "fd00::1", "fd00::2", "fd00::3",
];

/// Returns these, and some that no Pod has.
pub(crate) fn addresses() -> Vec<IpAddr> {
    let others = ["192.0.2.1", "2001:db8::1"];
    POD_ADDRESSES
        .into_iter()
        .chain(others)
        .map(|address| address.parse().unwrap())
        .collect()
}

/// Random choices that follow from a seed.
#[derive(Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a number below a limit (SplitMix64).
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }

    fn one_in(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        let at = self.below(of.len() as u64);
        of[usize::try_from(at).unwrap()].clone()
    }

    fn some<T>(&mut self, most: u64, mut make: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.below(most + 1)).map(|_| make(self)).collect()
    }

    pub(crate) fn event(&mut self) -> Event {
        match self.below(68) {
            0..16 => Event::PutPolicy(self.policy()),
            16..20 => Event::DeletePolicy(self.policy_name()),
            20..36 => Event::PutPod(self.pod()),
            36..39 => Event::DeletePod(self.pod_name()),
            39..44 => Event::PutNamespace(self.namespace(), self.namespace_labels()),
            44..46 => Event::DeleteNamespace(self.namespace()),
            46..58 => Event::PutTiers(self.tiers()),
            58..60 => Event::DeleteTiers(self.pick(&["s", "t", "u"]).into()),
            60..63 => {
                let labels = self.labels(&[("zone", &["1", "2"])]);
                let addresses = self.some(2, |dice| {
                    dice.pick(&["192.0.2.1", "192.0.2.2", "2001:db8::1", "10.0.0.4"])
                        .parse()
                        .unwrap()
                });
                let node = Node {
                    labels,
                    addresses,
                    ranges: Vec::new(),
                };
                let node = (!self.one_in(4)).then_some(node);
                Event::SetNode(self.pick(&["m1", "m2"]).into(), node)
            }
            63..65 => {
                let ranges = self.pick(&["10.0.0.0/31", "10.0.0.2/31", "fd00::2/127"]);
                let node = Node {
                    ranges: vec![ranges.parse().unwrap()],
                    ..Node::default()
                };
                Event::SetNode(self.pick(&["n1", "n2"]).into(), Some(node))
            }
            _ => Event::Take,
        }
    }

    fn namespace(&mut self) -> Arc<str> {
        self.pick(&["a", "b", "c"]).into()
    }

    fn policy_name(&mut self) -> PolicyName {
        name(self.pick(&["a/n0", "a/n1", "a/n2", "b/n0", "b/n1", "c/n0"]))
    }

    fn pod_name(&mut self) -> PodName {
        name(self.pick(&["a/p0", "a/p1", "a/p2", "b/p0", "b/p1", "c/p0"]))
    }

    fn labels(&mut self, all: &[(&str, &[&str])]) -> Labels {
        let mut labels = Labels::new();
        for (key, values) in all {
            if !self.one_in(3) {
                labels.insert((*key).into(), self.pick(values).into());
            }
        }
        labels
    }

    fn namespace_labels(&mut self) -> Labels {
        self.labels(&[("team", &["x", "y"]), ("env", &["p", "q"])])
    }

    fn pod(&mut self) -> Pod {
        let addresses = self.some(2, |dice| dice.pick(&POD_ADDRESSES).parse().unwrap());
        let node = if addresses.is_empty() { ["", "n1"] } else { ["n1", "n2"] };
        Pod {
            name: self.pod_name(),
            node: self.pick(&node).into(),
            addresses,
            labels: self.labels(&[("app", &["w", "d"]), ("tier", &["1", "2"]), ("x", &["1"])]),
            ports: self.some(3, Self::container_port),
            terminating: self.one_in(3),
            created: self
                .pick(&[
                    None,
                    Some("2026-01-01T00:00:00Z"),
                    Some("2026-01-02T00:00:00Z"),
                ])
                .map(Into::into),
        }
    }

    fn protocol(&mut self) -> Protocol {
        self.pick(&[Protocol::Tcp, Protocol::Tcp, Protocol::Udp, Protocol::Sctp])
    }

    fn container_port(&mut self) -> NamedPort {
        named(
            self.pick(&["http", "dns"]),
            self.protocol(),
            self.pick(&[80, 81]),
        )
    }

    fn policy(&mut self) -> NetworkPolicy {
        let direction = self.below(5);
        let rules = |dice: &mut Self, wanted: bool| wanted.then(|| dice.some(2, Self::rule));
        NetworkPolicy {
            name: self.policy_name(),
            pods: self.pod_selector(),
            ingress: rules(self, matches!(direction, 0 | 1 | 4)),
            egress: rules(self, matches!(direction, 2..=4)),
        }
    }

    fn rule(&mut self) -> Rule {
        let peers = (!self.one_in(5)).then(|| self.some(2, Self::peer));
        let ports = self.one_in(2).then(|| self.some(2, Self::port));
        Rule { peers, ports }
    }

    fn port(&mut self) -> PolicyPort {
        let protocol = self.protocol();
        match self.below(4) {
            0 => PolicyPort::All(protocol),
            1 => PolicyPort::Range(protocol, self.pick(&[80, 81]), 81),
            _ => PolicyPort::Named(protocol, self.pick(&["http", "dns"]).into()),
        }
    }

    fn peer(&mut self) -> PeerSpec {
        if self.one_in(4) {
            return self.pick(&[
                block("0.0.0.0/0", &[]),
                block("10.0.0.0/29", &["10.0.0.2/32", "10.0.0.4/31"]),
                block("10.0.0.2/31", &[]),
                block("::/0", &["fd00::2/128"]),
                block("192.0.2.0/24", &[]),
            ]);
        }
        PeerSpec::Pods {
            namespaces: self.one_in(2).then(|| self.namespace_selector()),
            pods: (!self.one_in(3)).then(|| self.pod_selector()),
        }
    }

    fn tiers(&mut self) -> ClusterPolicy {
        ClusterPolicy {
            name: self.pick(&["s", "t", "u"]).into(),
            tier: self.pick(&Tier::ALL),
            priority: self.pick(&[1, 2]),
            namespaces: self.namespace_selector(),
            pods: self.pod_selector(),
            ingress: self.some(3, Self::tier_rule),
            egress: self.some(3, Self::tier_rule),
        }
    }

    fn tier_rule(&mut self) -> TierRule {
        let peer = |dice: &mut Self| match dice.below(6) {
            0 => PeerSpec::Nodes(dice.selector(&[("zone", &["1", "2"])])),
            1..3 => dice.pick(&[
                block("0.0.0.0/0", &[]),
                block("10.0.0.0/30", &[]),
                block("10.0.0.2/31", &[]),
                block("fd00::2/127", &[]),
                block("192.0.2.0/24", &[]),
            ]),
            _ => PeerSpec::Pods {
                namespaces: Some(dice.namespace_selector()),
                pods: Some(dice.pod_selector()),
            },
        };
        let peers = (!self.one_in(8)).then(|| self.some(2, peer));
        let ports = self.one_in(2).then(|| self.some(3, Self::port));
        let actions = [TierAction::Accept, TierAction::Deny, TierAction::Pass];
        TierRule {
            action: self.pick(&actions),
            rule: Rule { peers, ports },
        }
    }

    fn namespace_selector(&mut self) -> Selector {
        const NAME: &str = "kubernetes.io/metadata.name";
        self.selector(&[
            ("team", &["x", "y"]),
            ("env", &["p", "q"]),
            (NAME, &["a", "b", "c"]),
        ])
    }

    fn pod_selector(&mut self) -> Selector {
        self.selector(&[
            ("app", &["w", "d"]),
            ("tier", &["1", "2", "3"]),
            ("x", &["1", "2"]),
        ])
    }

    fn selector(&mut self, keys: &[(&str, &[&str])]) -> Selector {
        let requirements = self.some(2, |dice| {
            let (key, all) = dice.pick(keys);
            let mut values = dice.some(2, |dice| Arc::from(dice.pick(all)));
            values.push(dice.pick(all).into());
            values.sort_unstable();
            values.dedup();
            match dice.below(7) {
                0..4 => Requirement::In(key.into(), values),
                4 => Requirement::NotIn(key.into(), values),
                5 => Requirement::Exists(key.into()),
                _ => Requirement::DoesNotExist(key.into()),
            }
        });
        Selector(requirements)
    }
}
