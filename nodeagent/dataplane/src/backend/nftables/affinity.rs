//! Session affinity (A11): the objects of a ServicePort with affinity, besides elements.
//!
//! ```text
//! map   affinity-ID        client -> endpoint, deleted by the kernel when unused for the timeout
//! chain affinity-pick-ID   in the NAT chains: DNAT to the remembered endpoint, if there is one
//! chain affinity-keep-ID   behind the NAT chains: stores the endpoint, or restarts its timeout
//! chain affinity-split-ID  Local only: which of the ServicePort's two groups a client belongs to
//! ```
//!
//! A group is a ServicePort together with the endpoints that may be chosen: those of the cluster, or, where a
//! Local policy requires it, those of this node. All addresses of a ServicePort that choose among the same
//! endpoints share a group. An endpoint chosen in one of the two groups of a ServicePort is remembered in the
//! other group too, if that group may choose the endpoint. Elements lead to these chains: `Set::Sticky`
//! (pick), `Set::RememberServices` and `Set::RememberNodeports` (keep or split).
//!
//! Groups cannot share a map and its chains: the group would have to be a part of the map's key, and nft 1.0.6
//! can load no rule with `dnat to` a map of which a part of the key is a constant or the result of another map.
//!
//! nft 1.0.6 cannot load a rule that stores an IPv6 address and a port as one value. So IPv6 has a second map
//! for ports, always written together with the first. Both maps may disagree on a client that opens two first
//! connections at once, to endpoints with different ports. `stale.rs` then finds that the pair is no
//! endpoint.

use kplane_model::{Family, Protocol};

use super::affinity_id::{AffinityId, GroupPart, Scope};
use super::chain::{Chain, RuleStep};
use super::schema::Set;

/// Most clients that one group remembers, at about 100 bytes of the kernel's memory each. Connections of
/// further clients are spread as without affinity.
pub(super) const MAX_CLIENTS: u32 = 1 << 18;

/// A group with the properties that determine its rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Group {
    pub(super) id: AffinityId,
    pub(super) protocol: Protocol,
    /// Seconds without a new connection until a client is forgotten.
    pub(super) timeout_s: u32,
    /// Whether clients inside the cluster reach all endpoints, and so belong to the other group of the
    /// ServicePort (A16). Local only.
    pub(super) inside_apart: bool,
    /// Whether the other group of the ServicePort may choose all endpoints that this group may choose.
    /// Endpoints remembered here are then remembered there, too.
    pub(super) shared: bool,
}

impl Group {
    /// Returns the maps of a group.
    pub(super) fn maps(family: Family) -> &'static [GroupPart] {
        match family {
            Family::V4 => &[GroupPart::Clients],
            Family::V6 => &[GroupPart::Clients, GroupPart::Ports],
        }
    }

    /// Returns the comment of the rule in `affinity-keep-ID`. It describes the group to operators, and to
    /// kplane after a restart.
    pub(super) fn comment(&self) -> String {
        let (protocol, timeout_s) = (self.protocol, self.timeout_s);
        let mut text = format!("{protocol} {timeout_s}s");
        for (word, _) in self.words().iter().filter(|(_, said)| *said) {
            text += word;
        }
        text
    }

    /// Returns the words in the comment behind protocol and timeout, and whether they apply to this group.
    fn words(&self) -> [(&'static str, bool); 3] {
        [
            (", local", self.id.scope() == Scope::Local),
            (", inside apart", self.inside_apart),
            (", shared", self.shared),
        ]
    }

    /// Returns the group with this comment, if kplane wrote the comment.
    pub(super) fn from_comment(id: AffinityId, comment: &str) -> Option<Self> {
        let first = comment.split(',').next()?;
        let (protocol, timeout_s) = first.split_once(' ')?;
        let mut protocols = Protocol::ALL.into_iter();
        let group = Self {
            id,
            protocol: protocols.find(|p| p.as_str() == protocol)?,
            timeout_s: timeout_s.strip_suffix('s')?.parse().ok()?,
            inside_apart: comment.contains(", inside apart"),
            shared: comment.ends_with(", shared"),
        };
        (group.comment() == comment).then_some(group)
    }

    /// Returns the chains with their rules. A chain comes before those that lead to it.
    pub(super) fn chains(&self) -> Vec<Chain> {
        let chain = |part| Chain::new(self.id.name(part));
        let keep = chain(GroupPart::Keep)
            .rule([RuleStep::Remember(self.id, self.timeout_s)])
            .because(self.comment());
        let other = self.shared.then(|| self.id.other());
        let keep = other.into_iter().fold(keep, |keep, other| {
            keep.rule([RuleStep::Remember(other, self.timeout_s)])
        });
        let pick = chain(GroupPart::Pick).rule([
            RuleStep::Is(self.protocol),
            RuleStep::UseRemembered(self.id),
        ]);
        let mut chains = vec![pick, keep];
        if self.id.scope() == Scope::Local {
            let inside = self.inside_apart.then(|| self.id.other());
            let split = inside.into_iter().fold(chain(GroupPart::Split), |split, inside| {
                split
                    .rule([RuleStep::In(Set::PodCidrs), RuleStep::GotoKeep(inside)])
                    .rule([RuleStep::FromPodInterface, RuleStep::GotoKeep(inside)])
                    .rule([RuleStep::FromThisNode, RuleStep::GotoKeep(inside)])
            });
            chains.push(split.rule([RuleStep::GotoKeep(self.id)]));
        }
        chains
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_are_read_back() {
        let id = AffinityId::from_bits(7);
        for (bits, inside_apart, shared) in [
            (6, false, false),
            (6, false, true),
            (7, false, true),
            (7, true, false),
            (7, true, true),
        ] {
            let group = Group {
                id: AffinityId::from_bits(bits),
                protocol: Protocol::Udp,
                timeout_s: 10_800,
                inside_apart,
                shared,
            };
            assert_eq!(Group::from_comment(group.id, &group.comment()), Some(group));
        }
        for other in [
            "",
            "TCP",
            "ICMP 1s",
            "TCP 1",
            "tcp 1s",
            "TCP 1s remote",
            "TCP 1s, local, shared.",
        ] {
            assert_eq!(Group::from_comment(id, other), None, "{other}");
        }
    }
}
