//! Identities of Services and their ports.

use std::fmt;
use std::sync::Arc;

use crate::net::{Family, Protocol};

/// A Service's namespace and name, printed `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceName {
    /// The namespace.
    pub namespace: Arc<str>,
    /// The name within the namespace.
    pub name: Arc<str>,
}

impl ServiceName {
    /// Creates a name from its two parts.
    #[must_use]
    pub fn new(namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Identity of one ServicePort in one family: the unit that is selected, published, planned and
/// reported. Kubernetes identifies a port by name and protocol (behaviour Z7). The family is part
/// of the key because families are independent (Z2).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceKey {
    /// The Service.
    pub service: ServiceName,
    /// The port's name; empty for the only port of a Service.
    pub port_name: Arc<str>,
    /// The port's protocol.
    pub protocol: Protocol,
    /// The address family.
    pub family: Family,
}

impl fmt::Display for ServiceKey {
    /// Prints `namespace/name:port/TCP (IPv4)`, without the port when it has no name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.service)?;
        if !self.port_name.is_empty() {
            write!(f, ":{}", self.port_name)?;
        }
        write!(f, "/{} ({})", self.protocol, self.family)
    }
}
