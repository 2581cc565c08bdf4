//! Names of the groups of session affinity, and of their parts in the kernel (see `affinity.rs`).

use std::fmt;
use std::hash::Hasher;

use kplane_model::ServiceKey;
use siphasher::sip::SipHasher13;

/// Name of a group, the same on every node and after every restart: a hash of the ServicePort, with the scope
/// in the lowest bit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AffinityId(u64);

/// The endpoints from which a group chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Scope {
    /// All endpoints, for policy Cluster.
    Cluster = 0,
    /// The endpoints on this node, for policy Local.
    Local = 1,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupPart {
    /// Map of clients to endpoints; IPv6: to addresses.
    Clients,
    /// IPv6: map of clients to ports.
    Ports,
    Pick,
    Keep,
    Split,
}

impl fmt::Debug for AffinityId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl AffinityId {
    pub(super) fn new(key: &ServiceKey, scope: Scope) -> Self {
        let mut hasher = SipHasher13::new();
        // No part contains a zero byte: names are DNS labels.
        let parts = [
            key.service.namespace.as_bytes(),
            key.service.name.as_bytes(),
            key.port_name.as_bytes(),
            &[key.protocol.number()],
        ];
        for part in parts {
            hasher.write(part);
            hasher.write(&[0]);
        }
        Self(hasher.finish() & !1 | scope as u64)
    }

    pub(super) fn scope(self) -> Scope {
        match self.0 & 1 {
            0 => Scope::Cluster,
            _ => Scope::Local,
        }
    }

    /// Returns the group of the same ServicePort with the other scope.
    pub(super) fn other(self) -> Self {
        Self(self.0 ^ 1)
    }

    /// Returns a number that both groups of a ServicePort share, and no other group has.
    pub(super) fn pair(self) -> u64 {
        self.0 >> 1
    }

    #[cfg(test)]
    pub(super) const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns the name of a part in the kernel.
    pub(super) fn name(self, part: GroupPart) -> String {
        format!("{}{self:?}", part.prefix())
    }

    /// Returns the group whose part has this name.
    pub(super) fn from_name(name: &str, part: GroupPart) -> Option<Self> {
        let digits = name.strip_prefix(part.prefix())?;
        let id = u64::from_str_radix(digits, 16).ok().map(Self)?;
        (id.name(part) == name).then_some(id)
    }
}

impl GroupPart {
    fn prefix(self) -> &'static str {
        match self {
            Self::Clients => "affinity-",
            Self::Ports => "affinity-port-",
            Self::Pick => "affinity-pick-",
            Self::Keep => "affinity-keep-",
            Self::Split => "affinity-split-",
        }
    }
}

#[cfg(test)]
mod tests {
    use kplane_model::{Family, KeyParts, Protocol, ServiceName};

    use super::*;

    fn key(name: &str, port: &str) -> ServiceKey {
        ServiceKey::from(KeyParts {
            service: ServiceName::new("shop", name),
            port_name: port.into(),
            protocol: Protocol::Tcp,
            family: Family::V4,
        })
    }

    #[test]
    fn a_group_belongs_to_one_service_port_and_scope() {
        let ids = [
            AffinityId::new(&key("web", ""), Scope::Cluster),
            AffinityId::new(&key("web", ""), Scope::Local),
            AffinityId::new(&key("web", "http"), Scope::Cluster),
            AffinityId::new(&key("we", "bhttp"), Scope::Cluster),
        ];
        let distinct: std::collections::BTreeSet<_> = ids.iter().collect();
        assert_eq!(distinct.len(), ids.len());
        // The name is found again after a restart, whatever the version of the compiler.
        assert_eq!(
            ids[0].name(GroupPart::Pick),
            "affinity-pick-751c656c31309f24"
        );
    }

    #[test]
    fn names_are_read_back() {
        let id = AffinityId(7);
        for part in [
            GroupPart::Clients,
            GroupPart::Ports,
            GroupPart::Pick,
            GroupPart::Keep,
            GroupPart::Split,
        ] {
            assert_eq!(AffinityId::from_name(&id.name(part), part), Some(id));
        }
        for other in [
            "affinity-",
            "affinity-7",
            "affinity-+000000000000007",
            "services",
        ] {
            assert_eq!(AffinityId::from_name(other, GroupPart::Clients), None);
        }
    }
}
