//! Answers for operators, straight from the policies.

use kplane_model::{Direction, PodName, PolicyPort, Tier, TierAction};

use super::Tiers;
use crate::judge::{Found, Port, Ruling};
use crate::namespaces::NamespaceLabels;
use crate::pods::PodEntry;
use crate::{ClusterPolicy, PeerSpec, TierRule};

impl Tiers {
    /// Returns the first rule of a tier that is about a connection of a Pod.
    pub(crate) fn ruling(
        &self,
        (tier, direction): (Tier, Direction),
        (name, pod): (&PodName, &PodEntry),
        other: &Found<'_>,
        port: Port<'_>,
        namespaces: &NamespaceLabels,
    ) -> Option<Ruling> {
        let mut policies: Vec<&ClusterPolicy> = self
            .policies
            .values()
            .filter(|policy| policy.tier == tier)
            .map(|policy| &**policy)
            .filter(|policy| policy.selects(name, pod, namespaces))
            .collect();
        policies.sort_by_key(|policy| policy.rank());
        policies.into_iter().find_map(|policy| {
            let rules = policy.rules(direction).iter();
            let at = rules
                .clone()
                .position(|rule| self.is_about(rule, direction, other, port, namespaces))?;
            Some(Ruling {
                policy: policy.name.clone(),
                tier,
                priority: policy.priority,
                rule: at,
                action: policy
                    .rules(direction)
                    .get(at)
                    .map_or(TierAction::Deny, |rule| rule.action),
            })
        })
    }

    fn is_about(
        &self,
        rule: &TierRule,
        direction: Direction,
        other: &Found<'_>,
        port: Port<'_>,
        namespaces: &NamespaceLabels,
    ) -> bool {
        let is = |peer: &PeerSpec| match peer {
            PeerSpec::Nodes(selector) => self
                .nodes
                .values()
                .filter(|(labels, _)| selector.selects(labels))
                .any(|(_, of)| other.addresses.iter().any(|ip| of.contains(ip))),
            peer => other.is_among(peer, &"".into(), namespaces),
        };
        let peers = rule.rule.peers.as_deref();
        let (mut is_pod, mut is_address) = (false, peers.is_none());
        for peer in peers.unwrap_or_default().iter().filter(|peer| is(peer)) {
            match peer {
                PeerSpec::Pods { .. } => is_pod = true,
                PeerSpec::Block(_) | PeerSpec::Nodes(_) => is_address = true,
            }
        }
        let Some(ports) = &rule.rule.ports else {
            return is_pod || is_address;
        };
        ports.iter().any(|wanted| {
            let has_no_names =
                matches!(wanted, PolicyPort::Named(..)) && direction == Direction::Egress;
            port.is(wanted) && (is_pod || is_address && !has_no_names)
        })
    }
}
