//! Clusters as a whole: what the API says, what an agent makes of the published objects, and what `judge` answers must be
//! the same.

mod agent;
mod cluster;
mod interest;
mod limits;
mod oracle;
mod random;
mod rules;
mod shares;
mod size;
mod steps;

use crate::{
    ClusterPolicy, Judgement, Labels, NetworkPolicy, Node, PeerSpec, Pod, Requirement, Rule,
    Selector, TierRule,
};
use cluster::{Cluster, block, name, named};
