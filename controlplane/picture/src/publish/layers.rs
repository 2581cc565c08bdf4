//! The desired state of all nodes, in layers: what nodes share, and what single nodes have on top of it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use kplane_model::{Cidr, DesiredKey, NodeName, ServiceKey, ServiceName, ZoneName};

use super::Store;
use super::cursor::{DELETED_BYTES, PIECE_BYTES};
use super::overlays::Overlays;
use super::state::{Shared, State};
use crate::freshness::Freshness;
use crate::trust::Trust;

/// A place in both logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Place {
    /// Revision, in the log of shared objects.
    shared: u64,
    /// Position in the log of nodes' objects.
    own: u64,
}

/// The position of a watch of more than one node.
#[derive(Clone, Debug, Default)]
pub struct LayerCursor {
    /// The only Service of interest.
    only: Option<ServiceName>,
    /// Place of the last complete picture; `None` = the watch has none.
    held: Option<Place>,
    /// Place up to which changes have been collected.
    at: Place,
    /// The newest place when collecting began; `None` = nothing has been collected since the last complete picture.
    began: Option<Place>,
    /// ServicePorts of the Service of interest that the watch has.
    ports: BTreeSet<ServiceKey>,
}

/// A part of what a watch lacks.
#[derive(Clone, Debug, Default)]
pub struct LayerPiece {
    /// The piece begins a new picture.
    pub snapshot: bool,
    /// Encoded shared programs, with those of zones.
    pub programs: Vec<(Bytes, Vec<(ZoneName, Bytes)>)>,
    /// ServicePorts that are gone.
    pub deleted: Vec<ServiceKey>,
    /// Encoded objects of single nodes.
    pub node_objects: Vec<(NodeName, Bytes)>,
    /// Objects of single nodes that are gone.
    pub deleted_node_objects: Vec<(NodeName, DesiredKey)>,
    /// The end of the picture; set when nothing is left.
    pub end: Option<LayerEnd>,
}

/// The picture after the last piece.
#[derive(Clone, Debug)]
pub struct LayerEnd {
    /// Revision.
    pub revision: u64,
    /// Time at which the oldest change that the watch lacked was observed.
    pub changed_at: Option<SystemTime>,
    /// Trust that objects missing from the picture are gone.
    pub trust: Trust,
    /// Value of [`Head::trust`](super::Head::trust) that belongs to `trust`.
    pub trust_changes: u64,
    /// The versions of the source that the picture contains.
    pub freshness: Arc<Freshness>,
    /// The cluster's ServiceCIDRs.
    pub service_cidrs: Vec<Cidr>,
    /// The picture has a port of the Service of interest.
    pub serves: bool,
}

impl LayerCursor {
    /// Creates the cursor of a watch that has nothing, and wants one Service or all.
    pub fn new(only: Option<ServiceName>) -> Self {
        Self {
            only,
            ..Self::default()
        }
    }

    /// Returns whether changes up to `head` have not been collected, or collecting is not complete.
    pub fn is_behind(&self, head: u64) -> bool {
        self.held.is_none_or(|held| held.shared < head)
    }

    /// Returns whether deletions that the watch lacks may be forgotten.
    fn is_lost(&self, state: &State) -> bool {
        let oldest = self.held.or(self.began);
        oldest.is_some_and(|oldest| {
            oldest.shared < state.horizon || oldest.own < state.overlays.horizon
        })
    }

    fn wants(&self, key: &ServiceKey) -> bool {
        self.only.as_ref().is_none_or(|only| *only == key.service)
    }

    /// Returns whether a watch of this kind gets the object of a node.
    fn wants_own(&self, key: &DesiredKey) -> bool {
        match key {
            DesiredKey::Service(key) | DesiredKey::Local(key) => self.wants(key),
            DesiredKey::Node => self.only.is_none(),
            DesiredKey::Policy(_) => false,
        }
    }
}

impl LayerPiece {
    /// Returns whether the piece changes nothing.
    pub fn is_empty(&self) -> bool {
        !self.snapshot
            && self.programs.is_empty()
            && self.deleted.is_empty()
            && self.node_objects.is_empty()
            && self.deleted_node_objects.is_empty()
    }
}

impl Store {
    /// Registers a watch of more than one node, until [`Store::leave_all`]. The first one costs as much as all nodes
    /// have objects of their own.
    pub fn attend_all(&self) {
        let mut state = self.write();
        state.overlays.watches += 1;
        if state.overlays.watches == 1 {
            state.note_overlays();
        }
    }

    /// Unregisters a watch of more than one node.
    pub fn leave_all(&self) {
        let mut state = self.write();
        state.overlays.watches = state.overlays.watches.saturating_sub(1);
        if state.overlays.watches == 0 {
            state.overlays = Overlays {
                changes: state.overlays.changes,
                ..Overlays::default()
            };
        }
    }

    /// Returns the next part of what a watch of more than one node lacks; moves the cursor behind it. The watch is
    /// [registered](Store::attend_all).
    pub fn collect_layers(&self, cursor: &mut LayerCursor) -> LayerPiece {
        self.read().collect_layers(cursor, PIECE_BYTES)
    }

    /// Returns whether deletions after a revision may be forgotten.
    pub fn forgot_after(&self, revision: u64) -> bool {
        revision < self.read().horizon
    }
}

impl Shared {
    /// Returns whether what nodes share changed after a revision.
    fn is_newer_than(&self, revision: u64) -> bool {
        let zones = self.by_zone.values();
        std::iter::once(&self.default)
            .chain(zones)
            .any(|blob| blob.revision > revision)
    }

    fn program(&self) -> (Bytes, Vec<(ZoneName, Bytes)>) {
        let zones = self.by_zone.iter();
        let zones = zones.map(|(zone, blob)| (zone.clone(), blob.bytes.clone()));
        (self.default.bytes.clone(), zones.collect())
    }
}

fn size_of((default, zones): &(Bytes, Vec<(ZoneName, Bytes)>)) -> usize {
    let zones = zones.iter();
    default.len()
        + zones
            .map(|(zone, bytes)| zone.len() + bytes.len())
            .sum::<usize>()
}

impl State {
    /// Collects in pieces of at least so many bytes.
    pub(super) fn collect_layers(&self, cursor: &mut LayerCursor, mut room: usize) -> LayerPiece {
        let head = Place {
            shared: self.revision,
            own: self.overlays.changes,
        };
        if cursor.is_lost(self) {
            *cursor = LayerCursor::new(cursor.only.take());
        }
        let mut piece = LayerPiece {
            snapshot: cursor.held.is_none() && cursor.began.is_none(),
            ..LayerPiece::default()
        };
        cursor.began.get_or_insert(head);
        if !self.collect_programs(cursor, &mut piece, &mut room)
            || !self.collect_node_objects(cursor, &mut piece, &mut room)
        {
            return piece;
        }
        piece.end = Some(LayerEnd {
            revision: self.revision,
            changed_at: self.changed_after(cursor.held.map_or(0, |held| held.shared)),
            trust: self.trust.clone(),
            trust_changes: self.trust_changes,
            freshness: Arc::clone(&self.freshness),
            service_cidrs: self.service_cidrs.clone(),
            serves: !cursor.ports.is_empty(),
        });
        cursor.held = Some(head);
        cursor.at = head;
        cursor.began = None;
        piece
    }

    /// Collects what nodes share; returns false if there was no room for all of it.
    fn collect_programs(
        &self,
        cursor: &mut LayerCursor,
        piece: &mut LayerPiece,
        room: &mut usize,
    ) -> bool {
        let base = cursor.held.map_or(0, |held| held.shared);
        // A picture that begins does not have what was deleted before.
        let known = cursor.held.or(cursor.began).unwrap_or_default().shared;
        for (revision, key) in self.log.after(cursor.at.shared) {
            if *room == 0 {
                return false;
            }
            cursor.at.shared = revision;
            let Some(port) = key.service().filter(|port| cursor.wants(port)) else {
                continue;
            };
            match self.shared.get(key) {
                Some(shared) if shared.is_newer_than(base) => {
                    let program = shared.program();
                    *room = room.saturating_sub(size_of(&program));
                    piece.programs.push(program);
                    if cursor.only.is_some() {
                        cursor.ports.insert(port.clone());
                    }
                }
                // Only programs of single nodes changed.
                Some(_) => {}
                None if revision > known => {
                    *room = room.saturating_sub(DELETED_BYTES);
                    piece.deleted.push(port.clone());
                    cursor.ports.remove(port);
                }
                None => {}
            }
        }
        true
    }

    /// Collects objects of single nodes; returns false if there was no room for all of them.
    fn collect_node_objects(
        &self,
        cursor: &mut LayerCursor,
        piece: &mut LayerPiece,
        room: &mut usize,
    ) -> bool {
        let base = cursor.held.map_or(0, |held| held.shared);
        let known = cursor.held.or(cursor.began).unwrap_or_default().own;
        for (position, (node, key)) in self.overlays.log.after(cursor.at.own) {
            if *room == 0 {
                return false;
            }
            cursor.at.own = position;
            if !cursor.wants_own(key) {
                continue;
            }
            match self.node_object(node, key) {
                Some((revision, bytes)) if revision > base => {
                    *room = room.saturating_sub(node.len() + bytes.len());
                    piece.node_objects.push((node.clone(), bytes));
                }
                // The objects of its siblings changed.
                Some(_) => {}
                None if position > known => {
                    *room = room.saturating_sub(DELETED_BYTES);
                    let gone = (node.clone(), key.clone());
                    piece.deleted_node_objects.push(gone);
                }
                None => {}
            }
        }
        true
    }

    /// Returns an object of a node, with the revision of its last change.
    fn node_object(&self, node: &NodeName, key: &DesiredKey) -> Option<(u64, Bytes)> {
        let blob = match key {
            DesiredKey::Service(_) => self.shared.get(key)?.by_node.get(node)?,
            DesiredKey::Local(_) | DesiredKey::Policy(_) => {
                self.views.get(node)?.objects.get(key)?
            }
            DesiredKey::Node => {
                let view = self.views.get(node)?;
                view.facts.as_ref().filter(|facts| facts.known)?;
                view.objects.get(key)?
            }
        };
        Some((blob.revision, blob.bytes.clone()))
    }
}
