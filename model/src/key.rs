//! Identities of Services and their ports.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::net::{Family, Protocol};

/// A Service's namespace and name, printed `namespace/name`.
///
/// Clones share one allocation, so that a map with this key holds a pointer.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceName(Arc<NameParts>);

/// The parts of a [`ServiceName`].
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NameParts {
    /// The namespace.
    pub namespace: Arc<str>,
    /// The name within the namespace.
    pub name: Arc<str>,
}

impl ServiceName {
    /// Creates a name from its two parts.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self::of(namespace.into(), name.into())
    }

    /// Creates a name from texts that others share.
    pub fn of(namespace: Arc<str>, name: Arc<str>) -> Self {
        Self(Arc::new(NameParts { namespace, name }))
    }
}

impl Deref for ServiceName {
    type Target = NameParts;

    fn deref(&self) -> &NameParts {
        &self.0
    }
}

impl fmt::Debug for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
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
///
/// Clones share one allocation, so that a map with this key holds a pointer.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceKey(Arc<KeyParts>);

/// The parts of a [`ServiceKey`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyParts {
    /// The Service.
    pub service: ServiceName,
    /// The port's name; empty for the only port of a Service.
    pub port_name: Arc<str>,
    /// The port's protocol.
    pub protocol: Protocol,
    /// The address family.
    pub family: Family,
}

impl From<KeyParts> for ServiceKey {
    fn from(parts: KeyParts) -> Self {
        Self(Arc::new(parts))
    }
}

impl Deref for ServiceKey {
    type Target = KeyParts;

    fn deref(&self) -> &KeyParts {
        &self.0
    }
}

/// Copies the parts if others share them.
impl DerefMut for ServiceKey {
    fn deref_mut(&mut self) -> &mut KeyParts {
        Arc::make_mut(&mut self.0)
    }
}

impl fmt::Debug for ServiceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
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
