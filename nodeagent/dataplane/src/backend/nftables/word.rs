//! The word of a place: what rules have to do with packets to it, in one number.
//!
//! The maps [`Set::Places`] and [`Set::Nodeports`] hold the words. Rules keep a packet's word in `meta priority`, within the
//! hook that looked it up.
//!
//! ```text
//! bits     0-4  class of the endpoints, 1..17 in the order of the classes; 0 = none
//!            5  a node port
//!         6-10  class of the endpoints for clients inside the cluster; 0 = none of their own
//!           11  clients are masqueraded
//!           12  a ClusterIP: clients outside the pod network are masqueraded
//!           13  an address to look for among those with source ranges
//!           14  clients inside the cluster have endpoints of their own
//!           15  session affinity
//!       16, 17  no endpoint: packets are refused, dropped
//!           31  set in all words, and in no priority that a program may set without privileges
//! ```

use std::collections::BTreeSet;
use std::sync::LazyLock;

use super::element::{Data, Element, Key};
use super::schema::{Balancer, Class, Set};
use crate::plan::Unserved;

/// A step of a rule that reads or writes the word of a packet's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WordStep {
    /// `meta priority set KEY map @map`
    LookUp(Set),
    /// `meta priority & MASK == VALUE`
    Equals(u32, u32),
    /// `meta priority & MASK != none`
    HasAny(u32),
    /// `meta priority & MASK vmap @map`, with a map of classes
    Draw(Set),
    /// `meta priority set meta priority & MASK | BIT`: the class of a single endpoint
    First(Balancer),
    /// `meta priority set none`
    Forget,
}

/// The word of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Word(pub(super) u32);

impl Word {
    const CLASS: u32 = 0x1f;
    pub(super) const NODEPORT: u32 = 0x20;
    /// Number of the bit at which the class for clients inside the cluster begins.
    const INSIDE_SHIFT: u32 = 6;
    pub(super) const MASQUERADE: u32 = 1 << 11;
    pub(super) const CLUSTER_IP: u32 = 1 << 12;
    pub(super) const EXTERNAL: u32 = 1 << 13;
    pub(super) const INSIDE: u32 = 1 << 14;
    pub(super) const STICKY: u32 = 1 << 15;
    pub(super) const REJECT: u32 = 1 << 16;
    pub(super) const DROP: u32 = 1 << 17;
    pub(super) const OURS: u32 = 1 << 31;

    /// Adds the class of a balancer's endpoints.
    pub(super) fn with(self, balancer: Balancer, class: Option<Class>) -> Self {
        Self(self.0 | class.map_or(0, |class| class.number() << Self::shift(balancer)))
    }

    /// Returns the class of a balancer's endpoints.
    pub(super) fn class(self, balancer: Balancer) -> Option<Class> {
        let number = self.0 >> Self::shift(balancer) & Self::CLASS;
        Class::all().find(|class| class.number() == number)
    }

    pub(super) fn has(self, bits: u32) -> bool {
        self.0 & bits == bits
    }

    /// Returns the fate of packets for which there is no endpoint.
    pub(super) fn unserved(self) -> Option<Unserved> {
        let fates = [
            (Self::REJECT, Unserved::Reject),
            (Self::DROP, Unserved::Drop),
        ];
        fates.into_iter().find(|(bit, _)| self.has(*bit)).map(|(_, fate)| fate)
    }

    /// Returns the word with the class of a single endpoint.
    pub(super) fn first(self, balancer: Balancer) -> Self {
        Self(self.0 & !Self::class_mask(balancer)).with(balancer, Class::of(1))
    }

    /// Returns the mask of a balancer's class.
    pub(super) fn class_mask(balancer: Balancer) -> u32 {
        Self::CLASS << Self::shift(balancer)
    }

    fn shift(balancer: Balancer) -> u32 {
        if balancer.is_inside() { Self::INSIDE_SHIFT } else { 0 }
    }
}

/// Returns the bits of a word that the keys of a map of classes consist of: a class, and whether the place is a node port.
pub(super) fn draw_mask(map: Set) -> u32 {
    let balancer = match map {
        Set::InsideClasses => Balancer::InsideService,
        _ => Balancer::Service,
    };
    Word::class_mask(balancer) | Word::NODEPORT
}

/// The elements of the maps of classes, which are always the same.
pub(super) static DRAWS: LazyLock<BTreeSet<Element>> = LazyLock::new(|| {
    let of = |balancer: Balancer| {
        let set = if balancer.is_inside() { Set::InsideClasses } else { Set::Classes };
        let kind = if balancer.by_address() { 0 } else { Word::NODEPORT };
        Class::all().map(move |class| Element {
            set,
            key: Key::Number(Word(kind).with(balancer, Some(class)).0),
            data: Some(Data::Draw(balancer, class)),
        })
    };
    Balancer::ALL.into_iter().flat_map(of).collect()
});
