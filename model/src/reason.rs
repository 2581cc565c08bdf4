//! Stable names for everything that kplane says about a Service, a node or the input.
//!
//! A name never changes its meaning. Problems with the input and findings carry one, and `docs/reasons.md` explains
//! each.

use std::fmt;

/// Defines the codes, with the rule that a name is written once.
macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// The reason for a problem or a state, as a name that programs can compare. It never changes its
        /// meaning. `docs/reasons.md` has a paragraph for each.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason {
            $($(#[doc = $doc])+ $name,)+
        }

        impl Reason {
            /// All codes, in the order of `docs/reasons.md`.
            pub const ALL: &'static [Self] = &[$(Self::$name,)+];

            /// Returns the name, such as `NoEndpointSlice`.
            pub const fn code(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)+
                }
            }
        }
    };
}

reasons! {
    /// The Service is headless: DNS answers with its endpoints.
    Headless,
    /// The Service is an alias in DNS.
    ExternalName,
    /// A label gives the Service to another proxy.
    OtherProxy,
    /// The Service has no cluster address.
    NoClusterIp,

    /// No EndpointSlice belongs to the Service.
    NoEndpointSlice,
    /// An EndpointSlice names no Service.
    SliceWithoutService,
    /// The Service's EndpointSlices have ports, but none with the name and protocol of a port of the Service.
    PortNameMismatch,
    /// No Pod of the Service has a container port with the name that `targetPort` asks for.
    TargetPortNotFound,
    /// No Pod has the labels that the Service selects.
    SelectorMatchesNoPod,
    /// The Service's EndpointSlices list no endpoint.
    NoEndpoints,
    /// The Service has no endpoint of one of its address families.
    FamilyWithoutEndpoints,
    /// Endpoints exist, but none is ready.
    NoReadyEndpoint,
    /// Some endpoints are not ready and get no new connections.
    SomeNotReady,
    /// All endpoints that could serve are about to end. They are used until others are ready.
    OnlyTerminating,
    /// Endpoints count as ready although their Pods are not, because the Service says so.
    PublishedNotReady,
    /// EndpointSlices call a Pod ready that is being deleted.
    SliceBehindPod,
    /// An endpoint is the cluster address of another Service.
    EndpointIsService,
    /// The userspace proxies of nodes avoid an endpoint, since connections to it failed.
    EndpointAvoided,
    /// A node's stream is gone, and its neighbours do not reach the node.
    NodeSuspected,
    /// Agents ended connections to endpoints that are gone.
    ConnectionsEnded,

    /// Policy Local: some nodes have no endpoint for clients outside of the cluster.
    ExternalPolicyLocal,
    /// Policy Local: some nodes have no endpoint for their own Pods.
    InternalPolicyLocal,
    /// Only some sources may use the load balancer's addresses.
    SourceRanges,
    /// Clients stay with the endpoint that they had.
    SessionAffinity,
    /// The Service asks for a load balancer, and nobody has given it an address.
    NoLoadBalancerAddress,

    /// Another Service has an address or a node port of this one.
    AddressConflict,
    /// Another Service wants an address or a node port of this one and does not get it.
    AddressContested,
    /// A program of the cluster itself listens at an address that the Service wants.
    AddressReserved,
    /// An external address is that of a node.
    NodeAddress,
    /// An external address lies in the cluster's own ranges.
    InsideClusterRange,
    /// The ClusterIP lies in none of the cluster's ranges for Services.
    OutsideServiceRange,
    /// The cluster's operator does not allow the Service's external address.
    ExternalIpRefused,
    /// The cluster's operator does not let the Service have the userspace proxy, or the proxy its endpoints.
    ProxyRefused,
    /// The namespace has used up its quota.
    QuotaExceeded,
    /// The object exceeds a limit.
    TooLarge,
    /// An address cannot be used.
    InvalidAddress,
    /// A port cannot be used.
    InvalidPort,
    /// A part of a NetworkPolicy cannot be used, and allows nothing.
    InvalidPolicy,
    /// A rule of a NetworkPolicy names namespaces by labels that none has.
    SelectsNoNamespace,
    /// A rule of a NetworkPolicy names a port that no Pod of the policy has.
    NoSuchPortName,
    /// A NetworkPolicy isolates a Pod for connections from it, and no policy lets the Pod ask DNS.
    EgressWithoutDns,
    /// A NetworkPolicy allows addresses of clients, and its Pods see those of nodes.
    ClientsMasqueraded,
    /// Pods of two nodes say that they have the same address.
    PodAddressConflict,
    /// Nodes do not enforce NetworkPolicies.
    PolicyNotEnforced,
    /// A field has a value that kplane does not know.
    InvalidField,
    /// A source range cannot be used.
    InvalidSourceRange,
    /// The families of a Service and its addresses do not agree.
    FamilyMismatch,
    /// An EndpointSlice has names instead of addresses.
    UnsupportedAddressType,
    /// An object cannot be read.
    Unreadable,
    /// An object stands in two places.
    DuplicateObject,
    /// More problems exist than are listed.
    MoreProblems,

    /// The object is kept although the source no longer names it.
    Held,
    /// The API server cannot be reached.
    ApiUnreachable,
    /// The API server does not accept the control plane's credentials.
    ApiUnauthorized,
    /// The API server does not allow what the control plane asks for.
    ApiForbidden,
    /// The API server answers, but not as it should.
    ApiFailing,
    /// A folder of manifests cannot be read.
    FolderUnreadable,
    /// The document of orders cannot be read.
    OrdersUnreadable,
    /// The document of orders is older than the orders in force.
    OrdersOlder,
    /// Replicas of the control plane say different things about NetworkPolicies.
    ReplicasDiffer,
    /// A part of the control plane panicked.
    Panicked,

    /// No agent has connected for a node.
    NoAgent,
    /// A node's agent is not connected.
    AgentDisconnected,
    /// A node's kernel does not take the Service.
    NotProgrammed,
    /// Two agents claim a node, or program its kernel.
    AgentConflict,
    /// An operator's order freezes a node.
    NodeFrozen,
    /// A node has not applied the newest state yet.
    Behind,
    /// A node's agent keeps objects that the source does not name.
    AgentHolding,
    /// A node has not compared its kernel with the desired state for too long.
    Unverified,
    /// Nothing is known of a node, because a replica does not answer.
    NodeUnknown,
    /// A node serves the Service, but not in every respect.
    Degraded,
    /// A node does not enforce NetworkPolicies as they are written.
    PolicyDegraded,

    /// The node does not forward packets.
    ForwardingOff,
    /// Another program's chain drops packets that the node forwards, unless a rule of its own accepts them.
    ForwardPolicyDrop,
    /// The node drops packets whose answers would take another way.
    ReversePathFilter,
    /// A setting of the kernel is off that the backend needs.
    SettingOff,
    /// Packets between Pods on one bridge pass the rules of Services by.
    BridgeNetfilterOff,
    /// The agent cannot answer preStop hooks of the node's Pods.
    HooksFail,
    /// The connection tracking table is nearly full.
    ConntrackFull,
    /// The node's range of Pods is not within the ranges that the agent takes for Pods'.
    PodRangeNotCovered,
    /// The address on which the node serves node ports is not known.
    NodeAddressUnknown,
    /// NetworkPolicies are enforced, and the agent cannot tell by their addresses which unknown Pods are the node's.
    PodRangeUnknown,
    /// Rules of kube-proxy are in the node's kernel as well.
    OtherProxyRules,
    /// Pods may send larger packets than the node's way out takes.
    PodMtuTooLarge,
    /// firewalld runs on the node.
    Firewalld,
    /// A node's kernel, asked just now, does not hold what its agent has acknowledged.
    KernelDiffers,
    /// An endpoint refused a connection of its node or another one: no program listens there.
    NobodyListens,
    /// An endpoint did not answer a connection of a node within a second.
    EndpointSilent,
    /// NetworkPolicies deny the way to an endpoint that the node chooses.
    PolicyDenies,
    /// NetworkPolicies isolate Pods behind the Service.
    EndpointsIsolated,
}

impl Reason {
    /// Returns the reasons of findings about the surroundings of nodes.
    pub fn of_nodes() -> impl Iterator<Item = Self> {
        Self::ALL
            .iter()
            .copied()
            .filter(|reason| (Self::ForwardingOff..=Self::Firewalld).contains(reason))
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_its_paragraph() {
        let page = include_str!("../../docs/reasons.md");
        let headings: Vec<_> = page.lines().filter_map(|line| line.strip_prefix("### ")).collect();
        let codes: Vec<_> = Reason::ALL.iter().map(|reason| reason.code()).collect();
        assert_eq!(headings, codes);
    }

    #[test]
    fn reasons_of_nodes_are_those_that_agents_find_around_them() {
        let all: Vec<_> = Reason::of_nodes().collect();
        for one in [
            Reason::ForwardingOff,
            Reason::OtherProxyRules,
            Reason::Firewalld,
        ] {
            assert!(all.contains(&one), "{one}");
        }
        // The control plane finds these itself.
        for one in [
            Reason::Degraded,
            Reason::KernelDiffers,
            Reason::ReplicasDiffer,
        ] {
            assert!(!all.contains(&one), "{one}");
        }
    }
}
