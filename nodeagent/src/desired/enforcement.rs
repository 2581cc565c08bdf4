//! What the control plane says about NetworkPolicies as a whole. Pure.
//!
//! A replica that was started without an order knows no NetworkPolicies. Its silence about them does not open a Pod: an agent
//! keeps the parts that it has until a control plane says that nodes enforce what it names, or that they enforce none.

use kplane_proto::v1 as pb;

use super::{Confidence, Desired};

/// The finding of a node whose control plane names fewer parts of NetworkPolicies than the node has, and says nothing of them.
const UNSAID: &str = "NetworkPolicies: the node keeps those that it has, because this control plane was started without \
    --network-policy and does not say that they are gone; start all replicas with --network-policy, or with \
    --network-policy=off if nodes must enforce none";
/// The finding of a node whose control plane has not read NetworkPolicies yet.
const UNREAD: &str = "NetworkPolicies: the control plane has not read them yet (see `kpctl status` for what it waits); the \
    node keeps those that it has, and unknown Pods in its ranges are cut off if it never had any";

/// The control plane's word about NetworkPolicies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Enforcement {
    /// It says nothing.
    #[default]
    Unsaid,
    /// Nodes enforce none.
    Off,
    /// Nodes enforce those that it names.
    On,
    /// Nodes enforce them, and it has not read them yet.
    Unread,
}

impl From<pb::Enforcement> for Enforcement {
    fn from(wire: pb::Enforcement) -> Self {
        match wire {
            pb::Enforcement::Unspecified => Self::Unsaid,
            pb::Enforcement::Off => Self::Off,
            pb::Enforcement::On => Self::On,
            pb::Enforcement::Unread => Self::Unread,
        }
    }
}

impl Enforcement {
    /// Returns the confidence with which a part of NetworkPolicies that is not named counts as deleted, given that of the
    /// source; `None` = its absence says nothing.
    pub(super) fn confidence(self, source: Confidence) -> Option<Confidence> {
        match self {
            Self::Unsaid | Self::Unread => None,
            Self::Off => Some(Confidence::Confirmed),
            Self::On => Some(source),
        }
    }
}

impl Desired {
    /// Records the word of an update.
    pub(super) fn note_enforcement(&mut self, said: Enforcement) {
        self.enforcement = said;
        self.knew_policies |= matches!(said, Enforcement::On | Enforcement::Off);
    }

    /// Returns whether no control plane ever named the NetworkPolicies that there are, and the current one has not read them: then no unknown Pod of the node may pass.
    pub fn lacks_policies(&self) -> bool {
        self.enforcement == Enforcement::Unread && !self.knew_policies
    }

    /// Returns whether there are no NetworkPolicies although no control plane has said so. What an earlier process left in the
    /// kernel stays then.
    pub fn knows_no_policies(&self) -> bool {
        let is_unsaid = matches!(self.enforcement, Enforcement::Unsaid | Enforcement::Unread);
        is_unsaid && !self.lacks_policies() && self.policies().next().is_none()
    }

    /// Returns why the node's NetworkPolicies may not be those of the cluster, if that is so.
    pub fn policy_doubt(&self) -> Option<&'static str> {
        match self.enforcement {
            Enforcement::Unsaid => {
                (!self.held.is_empty() && self.keeps_policies()).then_some(UNSAID)
            }
            Enforcement::Unread => Some(UNREAD),
            Enforcement::Off | Enforcement::On => None,
        }
    }
}
