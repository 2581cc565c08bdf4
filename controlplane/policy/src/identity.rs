//! Identities: SHA-256 of what they stand for, cut to 16 bytes. Users choose labels and names, and must not be able to
//! make two things equal.

use std::sync::Arc;

use kplane_model::{NamedPort, PeerId};
use ring::digest::{SHA256, digest};

use crate::{Requirement, Selector};

/// The kind of thing that is encoded, so that things of different kinds differ.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Namespace = 1,
    Class = 2,
    Group = 3,
    Part = 4,
    Pod = 5,
    TierClass = 6,
    TierSubject = 7,
    Network = 8,
    Nodes = 9,
    Decisions = 10,
    Peer = 11,
}

/// An encoding that two different things never share: each text stands after its length, and each list after its number.
#[derive(Debug)]
pub(crate) struct Encoding(Vec<u8>);

impl Encoding {
    pub(crate) fn new(kind: Kind) -> Self {
        let mut bytes = Vec::with_capacity(256);
        bytes.push(kind as u8);
        Self(bytes)
    }

    pub(crate) fn number(&mut self, number: usize) -> &mut Self {
        self.raw(&(number as u64).to_be_bytes())
    }

    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        self.number(text.len()).raw(text.as_bytes())
    }

    /// Adds bytes of a length that follows from what stands before them.
    pub(crate) fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn labels<'a>(
        &mut self,
        labels: impl Iterator<Item = &'a (Arc<str>, Arc<str>)> + Clone,
    ) -> &mut Self {
        self.number(labels.clone().count());
        for (key, value) in labels {
            self.text(key).text(value);
        }
        self
    }

    pub(crate) fn ports<'a>(
        &mut self,
        ports: impl Iterator<Item = &'a NamedPort> + Clone,
    ) -> &mut Self {
        self.number(ports.clone().count());
        for port in ports {
            let [high, low] = port.port.to_be_bytes();
            self.text(&port.name).raw(&[port.protocol.number(), high, low]);
        }
        self
    }

    pub(crate) fn selector(&mut self, selector: &Selector) -> &mut Self {
        self.number(selector.0.len());
        for requirement in &selector.0 {
            let (kind, values): (u8, &[Arc<str>]) = match requirement {
                Requirement::In(_, values) => (0, values),
                Requirement::NotIn(_, values) => (1, values),
                Requirement::Exists(_) => (2, &[]),
                Requirement::DoesNotExist(_) => (3, &[]),
            };
            self.raw(&[kind]).text(requirement.key());
            self.number(values.len());
            for value in values {
                self.text(value);
            }
        }
        self
    }

    /// Returns the first 16 bytes of the digest.
    pub(crate) fn sum(&self) -> [u8; 16] {
        let digest = digest(&SHA256, &self.0);
        let mut sum = [0; 16];
        for (to, from) in sum.iter_mut().zip(digest.as_ref()) {
            *to = *from;
        }
        sum
    }

    pub(crate) fn id(&self) -> PeerId {
        PeerId(self.sum())
    }
}

/// Returns the identity of a namespace.
pub(crate) fn namespace_id(namespace: &str) -> PeerId {
    Encoding::new(Kind::Namespace).text(namespace).id()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Replicas of two versions of kplane must agree on it.
    #[test]
    fn identities_are_stable() {
        let id = format!("{:?}", namespace_id("default"));
        assert_eq!(id, "8a49d9a06e880daf45088fd120fa7008");
    }

    #[test]
    fn texts_do_not_run_into_each_other() {
        let mut one = Encoding::new(Kind::Class);
        let mut two = Encoding::new(Kind::Class);
        assert_ne!(one.text("ab").text("c").id(), two.text("a").text("bc").id());
    }
}
