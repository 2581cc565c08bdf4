//! Classes of Pods whose ports have names, by the name: of an egress rule that names a port, the number is the other end's
//! (NP9).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use kplane_model::{NamedPort, PeerId, PolicyPort, Protocol};

/// The protocol and the name of a port.
pub(super) type PortName = (Protocol, Arc<str>);

/// The classes that have a port of one name, and the port's numbers there.
#[derive(Debug, Default)]
struct Bearers {
    classes: BTreeMap<PeerId, Vec<u16>>,
    of_namespace: HashMap<PeerId, BTreeSet<PeerId>>,
}

/// All classes that have ports with names.
#[derive(Debug, Default)]
pub(super) struct Ported {
    names: HashMap<PortName, Bearers>,
    ports: HashMap<PeerId, (PeerId, Vec<NamedPort>)>,
}

impl Ported {
    /// Returns the names of a class's ports.
    pub(super) fn names(&self, class: PeerId) -> impl Iterator<Item = PortName> {
        let ports = self.ports.get(&class).into_iter();
        ports.flat_map(|(_, ports)| ports.iter().map(name_of))
    }

    /// Replaces the ports of a class.
    pub(super) fn set(&mut self, class: PeerId, parent: PeerId, ports: &[NamedPort]) {
        if let Some((parent, old)) = self.ports.remove(&class) {
            for port in &old {
                self.take_out(class, parent, port);
            }
        }
        for port in ports {
            let bearers = self.names.entry(name_of(port)).or_default();
            bearers.classes.entry(class).or_default().push(port.port);
            let of_namespace = bearers.of_namespace.entry(parent).or_default();
            of_namespace.insert(class);
        }
        if !ports.is_empty() {
            self.ports.insert(class, (parent, ports.to_vec()));
        }
    }

    fn take_out(&mut self, class: PeerId, parent: PeerId, port: &NamedPort) {
        let name = name_of(port);
        let Some(bearers) = self.names.get_mut(&name) else {
            return;
        };
        bearers.classes.remove(&class);
        if let Some(classes) = bearers.of_namespace.get_mut(&parent) {
            classes.remove(&class);
            if classes.is_empty() {
                bearers.of_namespace.remove(&parent);
            }
        }
        if bearers.classes.is_empty() {
            self.names.remove(&name);
        }
    }

    /// Returns the classes of a member of a rule that have a port of this name, each with the port's number. `member` is a
    /// class, a namespace, or all Pods; `None` = everybody.
    pub(super) fn bearers<'a>(
        &'a self,
        member: Option<PeerId>,
        name: &PortName,
    ) -> impl Iterator<Item = (PeerId, u16)> + use<'a> {
        let bearers = self.names.get(name);
        let is_all = member.is_none_or(|member| member == PeerId::ALL_PODS);
        let all = if is_all { bearers } else { None };
        let all = all.into_iter().flat_map(|bearers| &bearers.classes);
        let some = if is_all { None } else { bearers.zip(member) };
        let some = some.into_iter().flat_map(|(bearers, member)| {
            bearers
                .of_namespace
                .get(&member)
                .into_iter()
                .flatten()
                .filter_map(|class| bearers.classes.get_key_value(class))
                .chain(bearers.classes.get_key_value(&member))
        });
        let ports = all.chain(some);
        ports.flat_map(|(class, ports)| ports.iter().map(|port| (*class, *port)))
    }
}

/// Returns the protocol and the name of a port.
pub(super) fn name_of(port: &NamedPort) -> PortName {
    (port.protocol, Arc::clone(&port.name))
}

/// Returns the name of a port of a rule, if it has one.
pub(super) fn port_name(port: &PolicyPort) -> Option<PortName> {
    match port {
        PolicyPort::Named(protocol, name) => Some((*protocol, Arc::clone(name))),
        PolicyPort::All(_) | PolicyPort::Range(..) => None,
    }
}
