//! The decision of a tier: the first rule that matches counts, for each port.

use kplane_model::{Direction, PolicyPort, PortAction, PortActions, Protocol, Tier, TierAction};

use super::terms::{ResolvedRule, Terms};
use super::{AddressClass, Subject};

impl Terms {
    /// Returns what the policies of a tier decide for Pods about other ends.
    pub(super) fn decide(
        &self,
        subject: &Subject,
        class: &AddressClass,
        direction: Direction,
        tier: Tier,
    ) -> PortActions {
        let policies = subject
            .policies
            .iter()
            .map(|at| &self.policies[*at])
            .filter(|policy| policy.source.tier == tier);
        let mut decided = Decided::default();
        for rule in policies.flat_map(|policy| &policy.rules[direction as usize]) {
            let (is_peer, is_in_block) = rule.is_about(class);
            if !is_peer && !is_in_block {
                continue;
            }
            let Some(ports) = &rule.ports else {
                return decided.finish(rule.action);
            };
            for port in ports {
                match port {
                    PolicyPort::All(protocol) => decided.add(*protocol, (0, u16::MAX), rule.action),
                    PolicyPort::Range(protocol, first, last) => {
                        decided.add(*protocol, (*first, *last), rule.action);
                    }
                    PolicyPort::Named(protocol, name) => {
                        let named = match direction {
                            Direction::Ingress => &subject.ports[..],
                            // The ports of addresses outside have no names.
                            Direction::Egress if is_peer => &class.ports[..],
                            Direction::Egress => &[],
                        };
                        for port in
                            named.iter().filter(|p| (&p.name, p.protocol) == (name, *protocol))
                        {
                            decided.add(*protocol, (port.port, port.port), rule.action);
                        }
                    }
                }
            }
        }
        decided.finish(TierAction::Pass)
    }
}

impl ResolvedRule {
    /// Returns whether one of its peers that are Pods is a class, and whether one that is a range has it.
    fn is_about(&self, class: &AddressClass) -> (bool, bool) {
        let is_peer = class.peers.iter().any(|at| self.peers.contains(at));
        (
            is_peer,
            class.blocks.iter().any(|at| self.blocks.contains(at)),
        )
    }
}

/// Ranges of ports that are decided: sorted, without overlaps.
#[derive(Debug, Default)]
struct Decided(Vec<PortAction>);

impl Decided {
    /// Decides those of some ports that are not decided yet.
    fn add(&mut self, protocol: Protocol, (first, last): (u16, u16), action: TierAction) {
        let mut gaps = Vec::new();
        let mut next = Some(first);
        for (of, from, to, _) in &self.0 {
            let Some(at) = next.filter(|at| *at <= last) else {
                break;
            };
            if *of != protocol || *to < at {
                continue;
            }
            if at < *from {
                gaps.push((protocol, at, last.min(*from - 1), action));
            }
            next = to.checked_add(1);
        }
        if let Some(at) = next.filter(|at| *at <= last) {
            gaps.push((protocol, at, last, action));
        }
        self.0.extend(gaps);
        self.0.sort_unstable();
    }

    /// Returns the form that is equal for equal decisions.
    fn finish(self, rest: TierAction) -> PortActions {
        let mut ranges: Vec<PortAction> = Vec::with_capacity(self.0.len());
        for range in self.0.into_iter().filter(|(.., action)| *action != rest) {
            let (protocol, first, last, action) = range;
            match ranges.last_mut() {
                Some((of, _, end, same))
                    if (*of, *same) == (protocol, action) && end.checked_add(1) == Some(first) =>
                {
                    *end = last;
                }
                _ => ranges.push(range),
            }
        }
        PortActions { rest, ranges }
    }
}
