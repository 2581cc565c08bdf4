//! The sets of the table of NetworkPolicies.

use kplane_model::{Direction, Tier};

use super::fields::{Carries, Field};

/// A set or map of the table of NetworkPolicies. Numbers stand for anybody (0), classes of Pods, namespaces, all Pods,
/// and ranges of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicySet {
    /// Ranges of this node's Pods.
    LocalRanges,
    /// Row of ports to the action for what [`PolicySet::RowPorts`] does not name.
    RowAll,
    /// Row of ports, and ports, to an action.
    RowPorts,
    /// What a tier decides for Pods: a Pod and the number of the other end to a row of ports.
    Decisions(Direction, Tier),
    /// Addresses outside of Pods to what tiers take them for.
    TierBlocks,
    /// Address of a Pod to what tiers take it for.
    TierPeers,
    /// Pods of this node for which tiers decide.
    Tiered(Direction),
    /// Pods of this node whose policies are known.
    LocalPods,
    /// Pods of this node for which a policy says what is allowed.
    Isolated(Direction),
    /// Pods of this node to themselves (NP15).
    Loops,
    /// Address of a Pod to its class.
    Peers,
    /// Class to its namespace, namespace to all Pods, and range of policies to the next one around it.
    Parents,
    /// Addresses to the innermost range of policies that covers them.
    Blocks,
    /// What Pods may use on all ports.
    All(Direction),
    /// What Pods may use on a port.
    Ports(Direction),
    /// What Pods may use on several ports.
    Ranges(Direction),
    /// Pods that policies may deny something, each with a counter of denied packets.
    Denied(Direction),
    /// Those of them whose denied packets are sampled.
    Sampled,
}

/// The conntrack mark of a connection without a beginning of its own that policies deny since it began: UDP and all
/// others but TCP. A deleted entry would come back from the side that may begin connections. It is the whole mark, and
/// no bit of it, so that nobody else's bits close a connection; nobody needs a mark of one that is dropped.
pub const CUT: u32 = 0x6b70_6375;

/// Numbers of actions in [`PolicySet::RowAll`] and [`PolicySet::RowPorts`].
pub const ACCEPT: u32 = 1;
/// See [`ACCEPT`].
pub const DENY: u32 = 2;
/// See [`ACCEPT`].
pub const PASS: u32 = 3;

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
    /// Returns whether an element closes something by itself: what others open comes later.
    pub(crate) fn closes(self) -> bool {
        matches!(self, Self::LocalRanges | Self::Isolated(_))
    }

    /// All sets, in the order in which they are created.
    pub const ALL: [Self; 27] = [
        Self::LocalRanges,
        Self::RowAll,
        Self::RowPorts,
        Self::Decisions(Ingress, Tier::Admin),
        Self::Decisions(Ingress, Tier::Baseline),
        Self::Decisions(Egress, Tier::Admin),
        Self::Decisions(Egress, Tier::Baseline),
        Self::TierBlocks,
        Self::TierPeers,
        Self::Tiered(Ingress),
        Self::Tiered(Egress),
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
            Self::RowAll => "row-all",
            Self::RowPorts => "row-ports",
            Self::Decisions(Ingress, Tier::Admin) => "ingress-admin",
            Self::Decisions(Ingress, Tier::Baseline) => "ingress-baseline",
            Self::Decisions(Egress, Tier::Admin) => "egress-admin",
            Self::Decisions(Egress, Tier::Baseline) => "egress-baseline",
            Self::TierBlocks => "tier-blocks",
            Self::TierPeers => "tier-peers",
            Self::Tiered(Ingress) => "ingress-tiered",
            Self::Tiered(Egress) => "egress-tiered",
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
            Self::Parents => Some("class to namespace to all pods; range to the one around it"),
            Self::Blocks => Some("ipBlock and except, cut into ranges"),
            Self::Denied(_) => Some("packets that policies denied, by pod"),
            Self::Sampled => Some("pods whose denied packets are sampled"),
            Self::RowAll => Some("ClusterNetworkPolicy: 1 accept, 2 deny, 3 pass"),
            Self::Decisions(..) => Some("pod and the other end's number to a row of ports"),
            Self::TierBlocks | Self::TierPeers => Some("what ClusterNetworkPolicies tell apart"),
            Self::Tiered(_) => Some("pods that ClusterNetworkPolicies select"),
            Self::RowPorts => None,
            Self::Isolated(_) | Self::All(_) | Self::Ports(_) | Self::Ranges(_) => None,
        }
    }

    /// Returns whether elements count the packets that find them.
    pub(super) fn counts(self) -> bool {
        matches!(self, Self::Denied(_))
    }

    pub(super) fn is_interval(self) -> bool {
        matches!(
            self,
            Self::LocalRanges | Self::Blocks | Self::Ranges(_) | Self::TierBlocks | Self::RowPorts
        )
    }

    pub(super) fn carries(self) -> Carries {
        match self {
            Self::Peers
            | Self::Parents
            | Self::Blocks
            | Self::RowAll
            | Self::RowPorts
            | Self::Decisions(..)
            | Self::TierBlocks
            | Self::TierPeers => Carries::Number,
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
            | Self::Tiered(_)
            | Self::TierBlocks
            | Self::TierPeers
            | Self::Peers
            | Self::Blocks => SOURCE,
            Self::Parents | Self::RowAll => NUMBER,
            Self::RowPorts => &[NetworkNumber, Protocol, Port],
            Self::Loops => &[Source, Destination],
            Self::All(Ingress) | Self::Decisions(Ingress, _) => &[Destination, Number],
            Self::All(Egress) | Self::Decisions(Egress, _) => &[Source, Number],
            Self::Ports(Ingress) => &[Destination, Number, Protocol, Port],
            Self::Ports(Egress) => &[Source, Number, Protocol, Port],
            Self::Ranges(Ingress) => &[Destination, NetworkNumber, Protocol, Port],
            Self::Ranges(Egress) => &[Source, NetworkNumber, Protocol, Port],
        }
    }
}
