//! What other replicas suspect. Each of them repeats it twice a second as long as it suspects a node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kplane_model::NodeName;
use kplane_picture::index::{Suspicion, Suspicions};
use kplane_picture::wire::millis;
use kplane_proto::v1 as pb;
use tokio::time::Instant;

use super::{SILENT, ago};
use crate::hub::Hub;
use crate::peers::Peers;

/// Time for which the word of another replica counts.
const COUNTS: Duration = Duration::from_secs(5);
/// Maximum number of replicas whose words are kept.
const MOST: usize = 64;
/// Maximum number of nodes in the word of one replica.
const NODES: usize = 65_536;

type Nodes = BTreeMap<NodeName, Suspicion>;

/// The words of other replicas, by epoch.
#[derive(Debug, Default)]
pub(crate) struct Shared(Mutex<BTreeMap<u64, (Instant, Nodes)>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, (Instant, Nodes)>> {
        // Words are replaced as a whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what a replica says.
    pub(super) fn adopt(&self, from: u64, nodes: Nodes) {
        let mut all = self.lock();
        if nodes.is_empty() {
            all.remove(&from);
        } else if all.len() < MOST || all.contains_key(&from) {
            all.insert(from, (Instant::now() + COUNTS, nodes));
        }
    }

    /// Returns everything that counts now.
    pub(super) fn all(&self, now: Instant) -> Nodes {
        let mut all = self.lock();
        all.retain(|_, (until, _)| *until > now);
        let nodes = all.values().flat_map(|(_, nodes)| nodes);
        nodes.map(|(node, of)| (node.clone(), of.clone())).collect()
    }
}

/// Takes what another replica suspects; returns the nodes of it whose agents are alive here.
pub fn hear(hub: &Hub, request: &pb::SuspectRequest) -> Vec<String> {
    if request.from == hub.store.epoch() {
        return Vec::new();
    }
    let nodes = read(request);
    let alive = nodes.keys().filter(|node| hub.fleet.is_alive(node, SILENT));
    let alive = alive.map(ToString::to_string).collect();
    hub.suspects.shared.adopt(request.from, nodes);
    alive
}

/// Reads the nodes of a request; those that have no valid name are left out.
fn read(request: &pb::SuspectRequest) -> Nodes {
    let nodes = request.nodes.iter().take(NODES);
    let nodes = nodes.filter(|of| crate::streams::is_node_name(&of.node));
    let nodes = nodes.map(|of| {
        let suspicion = Suspicion {
            since: ago(Duration::from_millis(of.for_ms)),
            missed: usize::try_from(of.missed).unwrap_or_default(),
            asked: usize::try_from(of.asked).unwrap_or_default(),
        };
        (of.node.as_str().into(), suspicion)
    });
    nodes.collect()
}

/// Tells all other replicas what this one suspects; returns the nodes that have a stream elsewhere.
pub(super) async fn tell(peers: &Peers, from: u64, own: &Suspicions) -> BTreeSet<NodeName> {
    let now = std::time::SystemTime::now();
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let nodes = own.nodes.iter().map(|(node, of)| pb::SuspectedNode {
        node: node.to_string(),
        for_ms: millis(now).saturating_sub(millis(of.since)),
        missed: count(of.missed),
        asked: count(of.asked),
    });
    let request = pb::SuspectRequest {
        from,
        nodes: nodes.take(NODES).collect(),
    };
    let alive = peers.suspect(request).await.into_iter();
    alive.map(|node| node.as_str().into()).collect()
}
