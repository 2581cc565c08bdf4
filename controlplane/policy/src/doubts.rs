//! What a policy says, and its author hardly means: pure questions about what is there now.

use std::collections::BTreeSet;
use std::sync::Arc;

use kplane_model::{Direction, PodName, PolicyName, PolicyPort, Protocol, Tier, TierAction};

use crate::pods::PodEntry;
use crate::rules::Entry;
use crate::{PeerSpec, Policies, Rule};

/// Maximum number of peers, and of Pods, that are examined.
const PEERS: usize = 1_000;
const PODS: usize = 100;
/// The port of DNS.
const DNS: u16 = 53;

/// Something in a policy that allows less than it seems to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// The namespaceSelector of a peer selects no namespace that exists.
    NoNamespace {
        /// The rule's direction.
        direction: Direction,
        /// The rule's index among the policy's rules of the direction.
        rule: usize,
        /// The peer's index in the rule.
        peer: usize,
    },
    /// A rule for connections to the policy's Pods names a container port that none of them has.
    NoPort(Arc<str>, Protocol),
    /// The policy isolates a Pod for connections from it, and no rule of any policy lets it reach port 53 of anything.
    NoDns(PodName),
}

impl Policies {
    /// Returns what is doubtful about a policy; of the Pods that reach no DNS the first one.
    pub fn doubts(&self, name: &PolicyName) -> Vec<Doubt> {
        let Some(entry) = self.policies.get(name) else {
            return Vec::new();
        };
        let mut doubts = self.without_namespace(entry);
        doubts.extend(self.without_port(entry));
        doubts.extend(self.without_dns(entry));
        doubts
    }

    fn without_namespace(&self, entry: &Entry) -> Vec<Doubt> {
        let peers = Direction::ALL.into_iter().flat_map(|direction| {
            entry.rules(direction).unwrap_or_default().iter().enumerate().flat_map(
                move |(rule, of)| {
                    of.peers
                        .iter()
                        .flatten()
                        .enumerate()
                        .map(move |(peer, of)| (direction, rule, peer, of))
                },
            )
        });
        let doubtful = peers.take(PEERS).filter(|(.., of)| match of {
            PeerSpec::Pods {
                namespaces: Some(selector),
                ..
            } => self.namespaces.selected(selector).next().is_none(),
            _ => false,
        });
        let doubt = |(direction, rule, peer, _)| Doubt::NoNamespace {
            direction,
            rule,
            peer,
        };
        doubtful.map(doubt).collect()
    }

    fn without_port(&self, entry: &Entry) -> Vec<Doubt> {
        let mut names = entry.names(Direction::Ingress);
        let mut pods = self.selected(entry).filter_map(|pod| self.pods.get(pod));
        if names.is_empty() || self.selected(entry).next().is_none() {
            return Vec::new();
        }
        while let Some(pod) = pods.next()
            && !names.is_empty()
        {
            for port in pod.ports.iter() {
                names.remove(&(Arc::clone(&port.name), port.protocol));
            }
        }
        names.into_iter().map(|(name, of)| Doubt::NoPort(name, of)).collect()
    }

    fn without_dns(&self, entry: &Entry) -> Option<Doubt> {
        entry.rules(Direction::Egress)?;
        let pods: BTreeSet<_> = self.selected(entry).take(PODS).collect();
        let cut_off = pods
            .into_iter()
            .find(|name| self.pods.get(name).is_some_and(|of| !self.asks(name, of)));
        cut_off.map(|name| Doubt::NoDns(name.clone()))
    }

    /// Returns whether some rule lets a Pod reach port 53 of something.
    fn asks(&self, name: &PodName, pod: &PodEntry) -> bool {
        let accepted = self.tiers.policies.values().any(|policy| {
            let accepts = policy
                .egress
                .iter()
                .any(|of| of.action == TierAction::Accept && is_for_dns(&of.rule));
            policy.tier == Tier::Admin && accepts && policy.selects(name, pod, &self.namespaces)
        });
        let policies = self.policies.enforced(&name.namespace, &pod.labels).0;
        let mut rules = policies
            .into_iter()
            .flat_map(|of| of.rules(Direction::Egress).unwrap_or_default());
        accepted || rules.any(is_for_dns)
    }
}

/// Returns whether a rule allows connections to port 53 of something. The number behind a name is not known.
fn is_for_dns(rule: &Rule) -> bool {
    let is_dns = |port: &PolicyPort| match port {
        PolicyPort::All(of) => *of != Protocol::Sctp,
        PolicyPort::Range(of, first, last) => {
            *of != Protocol::Sctp && (*first..=*last).contains(&DNS)
        }
        PolicyPort::Named(..) => true,
    };
    let has_peer = rule.peers.as_ref().is_none_or(|peers| !peers.is_empty());
    let has_port = rule.ports.as_ref();
    has_peer && has_port.is_none_or(|ports| ports.iter().any(is_dns))
}
