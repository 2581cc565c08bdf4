//! Names, keys and classes: the parts of the table's definition that the planner and the tables share.

use kplane_model::OWN_MARK;

pub use super::fields::Carries;
pub(super) use super::fields::{Field, key_len};
use super::policy_schema::PolicySet;
use super::table_kind::TableKind;
pub use super::table_kind::{TABLE, TABLE_COMMENT};
use crate::backend::PodInterface;

/// Defines the sizes of the classes, and the names of their chains, which end with them.
macro_rules! classes {
    ($($modulus:literal)*) => {
        /// Sizes of the classes ([`Class`]).
        pub const CLASSES: [u32; [$($modulus),*].len()] = [$($modulus),*];

        /// Names of the chains that draw an endpoint, by balancer and class.
        const CLASS_NAMES: [[&str; CLASSES.len()]; Balancer::ALL.len()] = [
            [$(concat!("service-", $modulus)),*],
            [$(concat!("nodeport-", $modulus)),*],
            [$(concat!("inside-service-", $modulus)),*],
            [$(concat!("inside-nodeport-", $modulus)),*],
        ];
    };
}

classes!(1 2 3 4 6 8 16 32 64 128 256 512 1024 2048 4096 8192 16384);

/// Settings of the constant rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableSettings {
    /// Bit of the packet mark that asks for masquerading: 0..=31.
    pub masquerade_bit: u8,
    /// Mark of kplane's own connections, to which no rule applies; 0 = none.
    pub own_mark: u32,
    /// Interface of the pods: packets that arrive on it come from pods of this node.
    pub pod_interface: Option<PodInterface>,
    /// Whether node ports on loopback addresses are refused and counted (K6).
    pub refuse_loopback: bool,
}

impl Default for TableSettings {
    /// Returns the settings with mark 0x4000, as kube-proxy uses it.
    fn default() -> Self {
        Self {
            masquerade_bit: 14,
            own_mark: OWN_MARK,
            pod_interface: None,
            refuse_loopback: true,
        }
    }
}

impl TableSettings {
    /// Returns the mark with only this bit.
    pub(super) fn mark(self) -> u32 {
        1_u32.wrapping_shl(u32::from(self.masquerade_bit))
    }
}

/// A class of destinations by their number of endpoints: the range from which an index is drawn. A
/// destination with K endpoints is in the smallest class of at least K; its endpoints have the indices 0..K.
/// A draw of K or more misses and is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Class(u8);

impl Class {
    /// Most endpoints of a destination.
    pub const MAX_ENDPOINTS: usize = CLASSES[CLASSES.len() - 1] as usize;

    /// Returns all classes, smallest first.
    pub fn all() -> impl DoubleEndedIterator<Item = Self> {
        (0..u8::MAX).map(Self).take(CLASSES.len())
    }

    /// Returns the class for a number of endpoints; `None` for 0 and for more than [`Self::MAX_ENDPOINTS`].
    pub fn of(endpoints: usize) -> Option<Self> {
        Self::all().find(|class| endpoints > 0 && endpoints <= class.modulus() as usize)
    }

    /// Returns the number of indices in the class's range: one of [`CLASSES`].
    pub fn modulus(self) -> u32 {
        CLASSES[usize::from(self.0)]
    }

    /// Returns the class's number in the word of a place, from 1 on.
    pub(super) fn number(self) -> u32 {
        u32::from(self.0) + 1
    }
}

/// One way to spread connections: a map of endpoints, and a chain per class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Balancer {
    /// Spreads by destination address, protocol and port.
    Service,
    /// Spreads by protocol and port of a node's address.
    Nodeport,
    /// Spreads as `Service`, but for clients inside the cluster, to destinations whose external traffic
    /// policy is Local: these clients reach all endpoints (A16).
    InsideService,
    /// Spreads as `Nodeport`, for the same clients as `InsideService`.
    InsideNodeport,
}

impl Balancer {
    /// All balancers.
    pub const ALL: [Self; 4] = [
        Self::Service,
        Self::Nodeport,
        Self::InsideService,
        Self::InsideNodeport,
    ];

    /// Returns whether destinations are distinguished by address, not only by protocol and port.
    pub fn by_address(self) -> bool {
        matches!(self, Self::Service | Self::InsideService)
    }

    /// Returns whether it is for clients inside the cluster that have endpoints of their own.
    pub(super) fn is_inside(self) -> bool {
        matches!(self, Self::InsideService | Self::InsideNodeport)
    }

    /// Returns the name of the chain that draws an endpoint of a class.
    pub(super) fn chain(self, class: Class) -> &'static str {
        CLASS_NAMES[self as usize][usize::from(class.0)]
    }

    /// Returns the balancer and the class whose chain has this name.
    pub(super) fn of_chain(name: &str) -> Option<(Self, Class)> {
        Self::ALL
            .into_iter()
            .flat_map(|of| Class::all().map(move |class| (of, class)))
            .find(|(balancer, class)| balancer.chain(*class) == name)
    }
}

/// A set or map of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Set {
    /// Leads from the class in a word to the chain that draws an endpoint. The elements are always the same.
    Classes,
    /// The same for the class of endpoints for clients inside the cluster.
    InsideClasses,
    /// Destinations that only [`Set::FirewallSources`] may reach.
    FirewallServices,
    /// Clients that may reach a destination in [`Set::FirewallServices`].
    FirewallSources,
    /// All ClusterIPs. Connections to them are refused on ports that no Service has.
    ClusterIps,
    /// Endpoints of this node that reach themselves through a Service: masqueraded.
    Hairpin,
    /// ClusterIP ranges, and ClusterIPs outside of them: connections to addresses without a Service are dropped.
    ServiceCidrs,
    /// Pod ranges: clients in them are inside the cluster.
    PodCidrs,
    /// Clients whose connections to ClusterIPs keep their source address.
    UnmasqueradedSources,
    /// Addresses of the node that serve NodePorts.
    NodeportIps,
    /// Destinations of a balancer with session affinity; leads to the lookup of the remembered endpoint.
    Sticky(Balancer),
    /// Destinations with session affinity; leads to the rules that store the chosen endpoint.
    RememberServices,
    /// NodePorts with session affinity; leads to the rules that store the chosen endpoint.
    RememberNodeports,
    /// The endpoints of all destinations of a balancer, by index.
    Endpoints(Balancer),
    /// The words of all destinations.
    Places,
    /// The words of all NodePorts.
    Nodeports,
    /// A set of the table of NetworkPolicies.
    Policy(PolicySet),
}

/// VIP: `ip daddr . meta l4proto . th dport`.
const SERVICE: &[Field] = &[Field::Destination, Field::Protocol, Field::Port];
/// N: `meta l4proto . th dport`.
const NODEPORT: &[Field] = &[Field::Protocol, Field::Port];

impl Set {
    /// All sets of the table of Services in the order in which they are created, and filled: a place comes after its
    /// endpoints.
    const SERVICES: [Self; 22] = [
        Self::Classes,
        Self::InsideClasses,
        Self::FirewallServices,
        Self::FirewallSources,
        Self::ClusterIps,
        Self::Hairpin,
        Self::ServiceCidrs,
        Self::PodCidrs,
        Self::UnmasqueradedSources,
        Self::NodeportIps,
        Self::Sticky(Balancer::Service),
        Self::Sticky(Balancer::Nodeport),
        Self::Sticky(Balancer::InsideService),
        Self::Sticky(Balancer::InsideNodeport),
        Self::RememberServices,
        Self::RememberNodeports,
        Self::Endpoints(Balancer::Service),
        Self::Endpoints(Balancer::Nodeport),
        Self::Endpoints(Balancer::InsideService),
        Self::Endpoints(Balancer::InsideNodeport),
        Self::Places,
        Self::Nodeports,
    ];

    /// Returns all sets of a table in the order in which they are created.
    pub(super) fn all_of(table: TableKind) -> Vec<Self> {
        match table {
            TableKind::Services => Self::all().collect(),
            TableKind::Policies => PolicySet::ALL.map(Self::Policy).to_vec(),
        }
    }

    /// Returns the set's table.
    pub(super) fn table(self) -> TableKind {
        match self {
            Self::Policy(_) => TableKind::Policies,
            _ => TableKind::Services,
        }
    }

    /// Returns all sets of the table of Services in the order in which they are created.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::SERVICES.into_iter()
    }

    /// Returns the set's name in the kernel.
    pub fn name(self) -> &'static str {
        match self {
            Self::Classes => "classes",
            Self::InsideClasses => "inside-classes",
            Self::Places => "places",
            Self::Nodeports => "nodeports",
            Self::FirewallServices => "firewall-services",
            Self::FirewallSources => "firewall-sources",
            Self::ClusterIps => "cluster-ips",
            Self::Hairpin => "hairpin",
            Self::ServiceCidrs => "service-cidrs",
            Self::PodCidrs => "pod-cidrs",
            Self::UnmasqueradedSources => "unmasqueraded-sources",
            Self::NodeportIps => "nodeport-ips",
            Self::Sticky(Balancer::Service) => "sticky-services",
            Self::Sticky(Balancer::Nodeport) => "sticky-nodeports",
            Self::Sticky(Balancer::InsideService) => "inside-sticky-services",
            Self::Sticky(Balancer::InsideNodeport) => "inside-sticky-nodeports",
            Self::RememberServices => "remember-services",
            Self::RememberNodeports => "remember-nodeports",
            Self::Endpoints(Balancer::Service) => "service-endpoints",
            Self::Endpoints(Balancer::Nodeport) => "nodeport-endpoints",
            Self::Endpoints(Balancer::InsideService) => "inside-service-endpoints",
            Self::Endpoints(Balancer::InsideNodeport) => "inside-nodeport-endpoints",
            Self::Policy(set) => set.name(),
        }
    }

    /// Returns the set's comment in the kernel, for operators who read the table there.
    pub(super) fn comment(self) -> Option<&'static str> {
        match self {
            Self::Classes | Self::InsideClasses => Some("the chain that draws an endpoint"),
            Self::Places | Self::Nodeports => Some("what to do with packets: see docs/nftables.md"),
            Self::FirewallServices => Some("destinations with loadBalancerSourceRanges"),
            Self::FirewallSources => Some("loadBalancerSourceRanges"),
            Self::Hairpin => Some("endpoints of this node that reach themselves"),
            Self::UnmasqueradedSources => Some("clients of ClusterIPs that keep their address"),
            Self::NodeportIps => Some("addresses of this node that serve NodePorts"),
            Self::Sticky(_) => Some("sessionAffinity: the endpoint that a client had last"),
            Self::RememberServices | Self::RememberNodeports => {
                Some("sessionAffinity: the endpoint that a client got is remembered")
            }
            Self::Policy(set) => set.comment(),
            Self::ClusterIps | Self::ServiceCidrs | Self::PodCidrs | Self::Endpoints(_) => None,
        }
    }

    /// Returns whether elements are ranges of addresses. Ranges must not overlap within the set.
    pub fn is_interval(self) -> bool {
        match self {
            Self::FirewallSources
            | Self::ServiceCidrs
            | Self::PodCidrs
            | Self::UnmasqueradedSources
            | Self::NodeportIps => true,
            Self::Policy(set) => set.is_interval(),
            Self::Classes
            | Self::InsideClasses
            | Self::Places
            | Self::Nodeports
            | Self::FirewallServices
            | Self::ClusterIps
            | Self::Hairpin
            | Self::Sticky(_)
            | Self::RememberServices
            | Self::RememberNodeports
            | Self::Endpoints(_) => false,
        }
    }

    /// Returns how many elements there is room for; `None` if that is not bounded. The kernel never enlarges such a set, and so
    /// never lists an element twice while it does.
    pub(super) fn room(self) -> Option<u32> {
        matches!(self, Self::Classes | Self::InsideClasses).then_some(64)
    }

    /// Returns what elements carry besides their key.
    pub fn carries(self) -> Carries {
        match self {
            Self::Endpoints(_) => Carries::Endpoint,
            Self::Policy(set) => set.carries(),
            Self::Places | Self::Nodeports => Carries::Number,
            Self::Classes
            | Self::InsideClasses
            | Self::Sticky(_)
            | Self::RememberServices
            | Self::RememberNodeports => Carries::Chain,
            _ => Carries::Nothing,
        }
    }

    /// Returns whether elements carry data.
    pub fn is_map(self) -> bool {
        self.carries() != Carries::Nothing
    }

    /// Returns the fields of the key, which rules load for a lookup.
    pub(super) fn fields(self) -> &'static [Field] {
        match self {
            Self::Places
            | Self::FirewallServices
            | Self::RememberServices
            | Self::Sticky(Balancer::Service | Balancer::InsideService) => SERVICE,
            Self::Nodeports
            | Self::RememberNodeports
            | Self::Sticky(Balancer::Nodeport | Balancer::InsideNodeport) => NODEPORT,
            Self::Classes | Self::InsideClasses => &[Field::Number],
            Self::FirewallSources => &[
                Field::Destination,
                Field::Protocol,
                Field::Port,
                Field::Source,
            ],
            Self::Hairpin => &[
                Field::Source,
                Field::Destination,
                Field::Protocol,
                Field::Port,
            ],
            Self::ClusterIps | Self::ServiceCidrs | Self::NodeportIps => &[Field::Destination],
            Self::PodCidrs | Self::UnmasqueradedSources => &[Field::Source],
            Self::Endpoints(Balancer::Service | Balancer::InsideService) => &[
                Field::Destination,
                Field::Protocol,
                Field::Port,
                Field::Index,
            ],
            Self::Endpoints(Balancer::Nodeport | Balancer::InsideNodeport) => {
                &[Field::Protocol, Field::Port, Field::Index]
            }
            Self::Policy(set) => set.fields(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_distinct_and_say_the_modulus() {
        let names: BTreeSet<&str> = Set::all().map(Set::name).collect();
        assert_eq!(names.len(), Set::all().count());
        for balancer in Balancer::ALL {
            for class in Class::all() {
                let name = balancer.chain(class);
                let modulus = class.modulus().to_string();
                assert_eq!(name.rsplit('-').next(), Some(modulus.as_str()));
                assert_eq!(Balancer::of_chain(name), Some((balancer, class)));
            }
        }
    }

    #[test]
    fn a_class_is_the_smallest_that_holds_all_endpoints() {
        let modulus = |k| Class::of(k).map(Class::modulus);
        assert_eq!(modulus(0), None);
        assert_eq!(modulus(1), Some(1));
        assert_eq!(modulus(5), Some(6));
        assert_eq!(modulus(9), Some(16));
        assert_eq!(modulus(Class::MAX_ENDPOINTS), Some(16384));
        assert_eq!(modulus(Class::MAX_ENDPOINTS + 1), None);
    }
}
