//! Groups: the selectors of a peer in a rule.

use std::sync::Arc;

use kplane_model::GroupId;

use crate::Selector;
use crate::identity::{Encoding, Kind};

/// The namespaces of a group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Namespaces {
    /// The policy's own.
    Own(Arc<str>),
    /// Those that a selector selects; canonical.
    Selected(Arc<Selector>),
}

/// What a group consists of (NP6). Equal peers of all policies are one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupSpec {
    pub(crate) namespaces: Namespaces,
    /// The Pods in these namespaces; canonical. A missing selector selects all of them, as an empty one does.
    pub(crate) pods: Selector,
}

impl GroupSpec {
    /// Returns the group of a peer of a policy in a namespace.
    pub(crate) fn of(
        own: &Arc<str>,
        namespaces: Option<&Selector>,
        pods: Option<&Selector>,
    ) -> Self {
        let namespaces = match namespaces {
            None => Namespaces::Own(Arc::clone(own)),
            Some(selector) => Namespaces::Selected(Arc::new(selector.canonical())),
        };
        let pods = pods.map(Selector::canonical).unwrap_or_default();
        Self { namespaces, pods }
    }

    /// Returns the identity.
    pub(crate) fn id(&self) -> GroupId {
        let mut encoding = Encoding::new(Kind::Group);
        match &self.namespaces {
            Namespaces::Own(namespace) => encoding.raw(&[0]).text(namespace),
            Namespaces::Selected(selector) => encoding.raw(&[1]).selector(selector),
        };
        encoding.selector(&self.pods).id()
    }

    /// Returns whether its members are classes, and not namespaces or all Pods.
    pub(crate) fn has_classes(&self) -> bool {
        !self.pods.is_everything()
    }
}
