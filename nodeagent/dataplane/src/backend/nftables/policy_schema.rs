//! The sets of the table of NetworkPolicies.

use kplane_model::Direction;

use super::fields::{Carries, Field};

/// A set or map of the table of NetworkPolicies. Numbers stand for anybody (0), classes of Pods, namespaces, all Pods,
/// and ranges of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicySet {
    /// Ranges of this node's Pods.
    LocalRanges,
    /// Pods of this node whose policies are known.
    LocalPods,
    /// Pods of this node for which a policy says what is allowed.
    Isolated(Direction),
    /// Pods of this node to themselves (NP15).
    Loops,
    /// Address of a Pod to its class.
    Peers,
    /// Class to its namespace, and namespace to all Pods.
    Parents,
    /// Addresses to what stands for the ranges of policies that cover them.
    Blocks,
    /// What Pods may use on all ports.
    All(Direction),
    /// What Pods may use on a port.
    Ports(Direction),
    /// What Pods may use on several ports.
    Ranges(Direction),
    /// Isolated Pods, each with a counter of denied packets.
    Denied(Direction),
    /// Isolated Pods whose denied packets are logged for a follower.
    Sampled,
}

use Direction::{Egress, Ingress};

/// Returns the name of the set of isolated Pods with counters, and of the counter of all packets that were denied.
pub(super) fn denied(direction: Direction) -> &'static str {
    match direction {
        Ingress => "denied-ingress",
        Egress => "denied-egress",
    }
}

const SOURCE: &[Field] = &[Field::Source];
const NUMBER: &[Field] = &[Field::Number];

impl PolicySet {
    /// All sets, in the order in which they are created.
    pub const ALL: [Self; 17] = [
        Self::LocalRanges,
        Self::LocalPods,
        Self::Isolated(Ingress),
        Self::Isolated(Egress),
        Self::Loops,
        Self::Peers,
        Self::Parents,
        Self::Blocks,
        Self::All(Ingress),
        Self::Ports(Ingress),
        Self::Ranges(Ingress),
        Self::All(Egress),
        Self::Ports(Egress),
        Self::Ranges(Egress),
        Self::Denied(Ingress),
        Self::Denied(Egress),
        Self::Sampled,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::LocalRanges => "local-ranges",
            Self::LocalPods => "local-pods",
            Self::Isolated(Ingress) => "isolated-ingress",
            Self::Isolated(Egress) => "isolated-egress",
            Self::Loops => "loops",
            Self::Peers => "peers",
            Self::Parents => "parents",
            Self::Blocks => "blocks",
            Self::All(Ingress) => "ingress-all",
            Self::All(Egress) => "egress-all",
            Self::Ports(Ingress) => "ingress-ports",
            Self::Ports(Egress) => "egress-ports",
            Self::Ranges(Ingress) => "ingress-ranges",
            Self::Ranges(Egress) => "egress-ranges",
            Self::Denied(direction) => denied(direction),
            Self::Sampled => "sampled",
        }
    }

    pub(super) fn comment(self) -> Option<&'static str> {
        match self {
            Self::LocalRanges => Some("pod ranges of this node, while unknown pods are isolated"),
            Self::LocalPods => Some("pods of this node whose policies are known"),
            Self::Loops => Some("a pod to itself, through a Service"),
            Self::Peers => Some("pod address to class"),
            Self::Parents => Some("class to namespace to all pods"),
            Self::Blocks => Some("ipBlock and except, cut into ranges"),
            Self::Denied(_) => Some("packets that policies denied, by pod"),
            Self::Sampled => Some("pods whose denied packets are logged"),
            Self::Isolated(_) | Self::All(_) | Self::Ports(_) | Self::Ranges(_) => None,
        }
    }

    /// Returns whether elements count the packets that find them.
    pub(super) fn counts(self) -> bool {
        matches!(self, Self::Denied(_))
    }

    pub(super) fn is_interval(self) -> bool {
        matches!(self, Self::LocalRanges | Self::Blocks | Self::Ranges(_))
    }

    pub(super) fn carries(self) -> Carries {
        match self {
            Self::Peers | Self::Parents | Self::Blocks => Carries::Number,
            _ => Carries::Nothing,
        }
    }

    pub(super) fn fields(self) -> &'static [Field] {
        use Field::{Destination, NetworkNumber, Number, Port, Protocol, Source};
        match self {
            Self::LocalRanges
            | Self::LocalPods
            | Self::Isolated(_)
            | Self::Denied(_)
            | Self::Sampled
            | Self::Peers
            | Self::Blocks => SOURCE,
            Self::Parents => NUMBER,
            Self::Loops => &[Source, Destination],
            Self::All(Ingress) => &[Destination, Number],
            Self::All(Egress) => &[Source, Number],
            Self::Ports(Ingress) => &[Destination, Number, Protocol, Port],
            Self::Ports(Egress) => &[Source, Number, Protocol, Port],
            Self::Ranges(Ingress) => &[Destination, NetworkNumber, Protocol, Port],
            Self::Ranges(Egress) => &[Source, NetworkNumber, Protocol, Port],
        }
    }
}
