//! Gathers the pieces of a picture until it is complete: bytes from outside, with limits on everything.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kplane_model::{Cidr, Family, NodeFacts, NodeName, ObjectHash, ServiceKey, ServiceName};
use kplane_proto::convert::{ConvertError, family};
use kplane_proto::v1 as pb;
use kplane_proto::v1::object::Kind;
use kplane_proto::v1::object_key::Kind as KeyKind;
use prost::Message;
use tracing::warn;

use crate::freshness::Freshness;
use crate::publish::{PortChange, Program, Raw, Trigger};
use crate::source::relayed::Heard;
use crate::trust::Trust;

/// Largest picture, in bytes: 1,000,000 ServicePorts with 150 bytes, and as much again for nodes.
const MAX_PICTURE: usize = 1 << 30;
/// Longest text of the other control plane, in bytes.
const MAX_TEXT: usize = 2_000;
/// Maximum number of endpoint changes in a message.
const MAX_TRIGGERS: usize = 256;
/// Longest time since the origin was current.
const MAX_AGE: Duration = Duration::from_secs(30 * 86_400);

/// The reason why a message cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Invalid {
    #[error("changes came before a picture")]
    Disorder,
    #[error("a complete picture without the state of its source")]
    NoSource,
    #[error("the picture is larger than {MAX_PICTURE} bytes")]
    TooLarge,
    #[error("{0}")]
    Field(#[from] ConvertError),
}

/// The pieces of a picture, or of changes of it.
#[derive(Debug, Default)]
pub(super) struct Gathering {
    /// A picture has begun.
    begun: bool,
    snapshot: bool,
    ports: BTreeMap<ServiceKey, Option<PortChange>>,
    nodes: BTreeMap<NodeName, Option<NodeFacts>>,
    unread_nodes: BTreeSet<NodeName>,
    bytes: usize,
}

impl Gathering {
    /// Adds a message; returns everything since the last complete picture if it is complete now.
    pub(super) fn add(
        &mut self,
        message: pb::LayeredState,
        now: Instant,
        clock: SystemTime,
    ) -> Result<Option<Heard>, Invalid> {
        if message.snapshot {
            *self = Self {
                begun: true,
                snapshot: true,
                ..Self::default()
            };
        }
        if !self.begun {
            let waits = message.source.as_ref().is_some_and(|source| !source.read);
            return if waits {
                Ok(None)
            } else {
                Err(Invalid::Disorder)
            };
        }
        self.bytes = self.bytes.saturating_add(message.encoded_len());
        if self.bytes > MAX_PICTURE {
            return Err(Invalid::TooLarge);
        }
        for program in message.programs {
            self.add_program(program)?;
        }
        for key in message.deleted_programs {
            self.ports.insert(key.try_into()?, None);
        }
        for object in message.node_objects {
            self.add_object(object)?;
        }
        for deleted in message.deleted_node_objects {
            self.delete_object(deleted)?;
        }
        if !message.complete {
            return Ok(None);
        }
        let source = message.source.ok_or(Invalid::NoSource)?;
        let cidrs = message.service_cidrs.iter().map(Cidr::try_from);
        let age = Duration::from_millis(source.upstream_age_ms).min(MAX_AGE);
        let gathered = std::mem::take(self);
        self.begun = true;
        Ok(Some(Heard {
            service_cidrs: cidrs.collect::<Result<_, _>>()?,
            changed_at: match (gathered.snapshot, message.changed_at_ms) {
                (true, _) | (_, 0) => clock,
                (false, ms) => (UNIX_EPOCH + Duration::from_millis(ms.min(MAX_MS))).min(clock),
            },
            triggers: triggers(message.endpoint_changes)?,
            trust: trust(&source),
            freshness: Freshness::of_wire(&source.freshness),
            current_at: now.checked_sub(age).unwrap_or(now),
            snapshot: gathered.snapshot,
            ports: gathered.ports,
            nodes: gathered.nodes,
            unread_nodes: gathered.unread_nodes,
        }))
    }

    /// Returns the change of a ServicePort; `None` if it was deleted.
    fn change_of(&mut self, key: ServiceKey) -> Option<&mut PortChange> {
        let whole = self.snapshot;
        let new = || {
            Some(PortChange {
                whole,
                ..PortChange::default()
            })
        };
        self.ports.entry(key).or_insert_with(new).as_mut()
    }

    fn add_program(&mut self, shared: pb::SharedProgram) -> Result<(), Invalid> {
        let missing = || ConvertError::new("program", "missing");
        let default = shared.program.ok_or_else(missing)?;
        let key = key_of(default.key.as_ref())?;
        if let Entry::Occupied(mut entry) = self.ports.entry(key.clone())
            && entry.get().is_none()
        {
            // It was deleted, and is there again.
            entry.insert(Some(PortChange {
                whole: true,
                ..PortChange::default()
            }));
        }
        let endpoint_bytes = match key.family {
            Family::V4 => 6,
            Family::V6 => 18,
        };
        let (endpoints, has_any) = (default.endpoints.len() / endpoint_bytes, default.has_any);
        let mut by_zone = BTreeMap::new();
        for zone in shared.zones {
            let program = zone.program.ok_or_else(missing)?;
            by_zone.insert(zone.zone.into(), raw(Kind::Service(program)));
        }
        let program = Program {
            default: raw(Kind::Service(default)),
            by_zone,
            endpoints,
            has_any,
        };
        if let Some(change) = self.change_of(key) {
            change.program = Some(program);
        }
        Ok(())
    }

    fn add_object(&mut self, object: pb::NodeObject) -> Result<(), Invalid> {
        let node = NodeName::from(object.node);
        match object.object.and_then(|object| object.kind) {
            Some(Kind::Service(program)) => {
                let key = key_of(program.key.as_ref())?;
                if let Some(change) = self.change_of(key) {
                    let program = raw(Kind::Service(program));
                    change.programs.insert(node, Some(program));
                }
            }
            Some(Kind::Local(local)) => {
                let key = key_of(local.key.as_ref())?;
                if let Some(change) = self.change_of(key) {
                    change.locals.insert(node, Some(raw(Kind::Local(local))));
                }
            }
            Some(Kind::Node(config)) => match NodeFacts::try_from(config) {
                Ok(facts) if facts.name == node => {
                    self.unread_nodes.remove(&node);
                    self.nodes.insert(node, Some(facts));
                }
                Ok(_) => return Err(ConvertError::new("node", "two names").into()),
                Err(error) => {
                    warn!(node = &*node, %error, "a relay cannot read what a node is; it keeps what it knows of it");
                    self.unread_nodes.insert(node);
                }
            },
            // A kind that only newer versions know.
            None => {}
        }
        Ok(())
    }

    fn delete_object(&mut self, deleted: pb::NodeObjectKey) -> Result<(), Invalid> {
        let node = NodeName::from(deleted.node);
        match deleted.key.and_then(|key| key.kind) {
            Some(KeyKind::Service(key)) => {
                if let Some(change) = self.change_of(key.try_into()?) {
                    change.programs.insert(node, None);
                }
            }
            Some(KeyKind::Local(key)) => {
                if let Some(change) = self.change_of(key.try_into()?) {
                    change.locals.insert(node, None);
                }
            }
            Some(KeyKind::Node(_)) => drop(self.nodes.insert(node, None)),
            None => {}
        }
        Ok(())
    }
}

/// Last time that fits into a clock, in milliseconds since 1970: the year 2286.
const MAX_MS: u64 = 9_999_999_999_999;

fn key_of(key: Option<&pb::ServiceKey>) -> Result<ServiceKey, ConvertError> {
    let missing = || ConvertError::new("key", "missing");
    key.cloned().ok_or_else(missing)?.try_into()
}

/// Encodes an object as the other control plane did: agents that come from there find the same bytes here.
fn raw(kind: Kind) -> Raw {
    let object = pb::Object { kind: Some(kind) };
    let bytes = object.encode_to_vec();
    let hash = ObjectHash::of(&bytes);
    (bytes.into(), hash)
}

fn triggers(changes: Vec<pb::EndpointChange>) -> Result<Vec<Trigger>, ConvertError> {
    let triggers = changes.into_iter().take(MAX_TRIGGERS).map(|change| {
        Ok(Trigger {
            at_ms: change.at_ms,
            service: ServiceName::new(&change.namespace, &change.name),
            family: family(change.family)?,
        })
    });
    triggers.collect()
}

fn trust(source: &pb::SourceState) -> Trust {
    match source.confidence() {
        pb::Confidence::Partial => Trust::Partial(cut(&source.doubt).into()),
        pb::Confidence::Confirmed => Trust::Confirmed,
        pb::Confidence::Unspecified => Trust::Whole,
    }
}

/// Cuts a text of the other control plane to the longest that is shown.
pub(super) fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_TEXT)].to_owned()
}
