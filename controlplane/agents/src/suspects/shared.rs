//! The words of other replicas, and what of them counts.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kplane_desired_state::index::Suspicion;
use kplane_model::NodeName;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

/// Time for which the word of another replica counts.
pub(crate) const COUNTS: Duration = Duration::from_secs(5);
/// Silence after which another replica may be dead, and the Node on which it runs: each says every second that it is there.
const AWAY: Duration = Duration::from_secs(2);
/// Time after which a silent replica is forgotten.
pub(crate) const REMEMBERED: Duration = Duration::from_secs(60);
/// Maximum number of replicas whose words are kept.
pub(crate) const MOST: usize = 64;

pub(crate) type SuspicionsByNode = BTreeMap<NodeName, Suspicion>;

/// The word of another replica.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) at: Instant,
    pub(crate) nodes: SuspicionsByNode,
    /// The Node on which it runs, if that is known.
    pub(crate) on_node: Option<NodeName>,
}

/// The words of other replicas, by epoch.
#[derive(Debug, Default)]
pub(crate) struct ReplicaWords(Mutex<BTreeMap<u64, Said>>);

impl ReplicaWords {
    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Said>> {
        // Words are replaced as a whole.
        self.0.lock()
    }

    pub(crate) fn take(&self, from: u64, said: Said) {
        let mut all = self.lock();
        all.retain(|_, said| said.at.elapsed() < REMEMBERED);
        if all.len() < MOST || all.contains_key(&from) {
            all.insert(from, said);
        }
    }

    /// Returns everything that counts now.
    pub(crate) fn all(&self) -> SuspicionsByNode {
        let all = self.lock();
        all.values()
            .filter(|said| said.at.elapsed() < COUNTS)
            .flat_map(|said| &said.nodes)
            .map(|(node, of)| (node.clone(), of.clone()))
            .collect()
    }

    /// Returns the Nodes on which other replicas run.
    pub(crate) fn nodes(&self) -> Vec<NodeName> {
        let all = self.lock();
        all.values().filter_map(|said| said.on_node.clone()).collect()
    }

    /// Returns the nodes whose replicas have fallen silent, and since when.
    pub(crate) fn silent(&self) -> Vec<(NodeName, Instant)> {
        let all = self.lock();
        let is_silent = |said: &Said| said.at.elapsed() > AWAY;
        let there: BTreeSet<_> =
            all.values().filter(|said| !is_silent(said)).map(|said| &said.on_node).collect();
        all.values()
            .filter(|said| is_silent(said) && said.at.elapsed() < REMEMBERED)
            .filter(|said| !there.contains(&said.on_node))
            .filter_map(|said| Some((said.on_node.clone()?, said.at)))
            .collect()
    }
}
