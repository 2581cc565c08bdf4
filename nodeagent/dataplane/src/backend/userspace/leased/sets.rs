//! The IP sets of the chain that leads to the proxy, and what belongs into each. Pure.

use kplane_model::{Cidr, Family, FrontendAddr, Protocol};
use kplane_netlink::ipset::{Command, Entry, SetType};

use crate::backend::nftables::{NodePort, Place};

/// A set of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SetId {
    /// All addresses, as long as the agent renews them.
    Lease,
    /// Addresses of Services, with protocol and port.
    Places,
    /// Addresses with node ports.
    Nodes,
    /// Node ports.
    Tcp,
    /// Node ports.
    Udp,
    /// Node ports that are only served on loopback addresses.
    LoopbackTcp,
    /// Node ports that are only served on loopback addresses.
    LoopbackUdp,
}

/// Seconds for which a lease holds.
const LEASE_S: u32 = 1;

/// Most entries of a set of addresses. Memory grows with the entries only.
const CAPACITY: u32 = 1 << 20;

impl SetId {
    /// All sets.
    pub(super) const ALL: [Self; 7] = [
        Self::Lease,
        Self::Places,
        Self::Nodes,
        Self::Tcp,
        Self::Udp,
        Self::LoopbackTcp,
        Self::LoopbackUdp,
    ];

    /// The sets of places.
    pub(super) const OF_PLACES: [Self; 5] = [
        Self::Places,
        Self::Tcp,
        Self::Udp,
        Self::LoopbackTcp,
        Self::LoopbackUdp,
    ];

    /// Returns the name in the kernel.
    pub(super) fn name(self, family: Family) -> &'static str {
        let names = match self {
            Self::Lease => ["KPLANE-LEASE", "KPLANE-6-LEASE"],
            Self::Places => ["KPLANE-PLACES", "KPLANE-6-PLACES"],
            Self::Nodes => ["KPLANE-NODES", "KPLANE-6-NODES"],
            Self::Tcp => ["KPLANE-TCP", "KPLANE-6-TCP"],
            Self::Udp => ["KPLANE-UDP", "KPLANE-6-UDP"],
            Self::LoopbackTcp => ["KPLANE-LOCAL-TCP", "KPLANE-6-LOCAL-TCP"],
            Self::LoopbackUdp => ["KPLANE-LOCAL-UDP", "KPLANE-6-LOCAL-UDP"],
        };
        names[family as usize]
    }

    /// Returns the type.
    pub(super) fn kind(self) -> SetType {
        match self {
            Self::Lease | Self::Nodes => SetType::Net,
            Self::Places => SetType::IpPort,
            Self::Tcp | Self::Udp | Self::LoopbackTcp | Self::LoopbackUdp => SetType::Port,
        }
    }

    /// Returns the command that creates the set.
    pub(super) fn create(self, family: Family) -> Command<'static> {
        Command::Create {
            name: self.name(family),
            kind: self.kind(),
            family,
            capacity: CAPACITY,
            timeout_s: (self == Self::Lease).then_some(LEASE_S),
        }
    }
}

/// Returns where a place belongs; `None` if the proxy does not know its protocol.
pub(super) fn item(place: Place) -> Option<(SetId, Entry)> {
    match place {
        Place::Of(FrontendAddr::Address { ip, protocol, port }) => {
            Some((SetId::Places, Entry::IpPort(ip, protocol, port)))
        }
        Place::Of(FrontendAddr::NodePort { protocol, port }) => {
            let set = of_protocol(protocol, SetId::Tcp, SetId::Udp)?;
            Some((set, Entry::Port(port)))
        }
        Place::OnLoopback(NodePort { protocol, port }) => {
            let set = of_protocol(protocol, SetId::LoopbackTcp, SetId::LoopbackUdp)?;
            Some((set, Entry::Port(port)))
        }
    }
}

fn of_protocol(protocol: Protocol, tcp: SetId, udp: SetId) -> Option<SetId> {
    match protocol {
        Protocol::Tcp => Some(tcp),
        Protocol::Udp => Some(udp),
        Protocol::Sctp => None,
    }
}

/// Returns the entries of a range. A set takes no range of all addresses, but its two halves.
pub(super) fn entries(range: Cidr) -> Vec<Entry> {
    if range.prefix_len() > 0 {
        return vec![Entry::Net(range)];
    }
    let halves = [range.first(), range.last()].map(|ip| Cidr::new(ip, 1));
    halves.into_iter().flatten().map(Entry::Net).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_all_addresses_has_two_halves() {
        let texts = |range: &str| {
            let entries = entries(range.parse().unwrap()).into_iter();
            entries.map(|entry| entry.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(texts("0.0.0.0/0"), ["0.0.0.0/1", "128.0.0.0/1"]);
        assert_eq!(texts("::/0"), ["::/1", "8000::/1"]);
        assert_eq!(texts("192.0.2.0/24"), ["192.0.2.0/24"]);
    }
}
