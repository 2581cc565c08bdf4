//! What a relay hears of the control plane that it follows.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Instant, SystemTime};

use kplane_model::{Cidr, NodeFacts, NodeName, ServiceKey};

use crate::freshness::Freshness;
use crate::publish::{PortChange, Trigger};
use crate::trust::Trust;

/// Name of this source in the status API; more of it is known once it has answered.
pub const NAME: &str = "relay";

/// Everything that changed up to a revision of the other control plane.
#[derive(Clone, Debug, PartialEq)]
pub struct Heard {
    /// The changes begin a new picture: what they do not name is not part of it.
    pub snapshot: bool,
    /// ServicePorts that changed, or were deleted by name.
    pub ports: BTreeMap<ServiceKey, Option<PortChange>>,
    /// Nodes that changed, or were deleted by name.
    pub nodes: BTreeMap<NodeName, Option<NodeFacts>>,
    /// Nodes that are there and cannot be read.
    pub unread_nodes: BTreeSet<NodeName>,
    /// The cluster's ServiceCIDRs.
    pub service_cidrs: Vec<Cidr>,
    /// Time at which the first of the changes was observed, by the control plane that reads the objects.
    pub changed_at: SystemTime,
    /// Changes of endpoints in the cluster that led to the others.
    pub triggers: Vec<Trigger>,
    /// Trust that objects which the picture lacks are gone.
    pub trust: Trust,
    /// Versions of the source that the picture contains.
    pub freshness: Freshness,
    /// Time at which the control plane that reads the objects was last in touch with their origin.
    pub current_at: Instant,
}
