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

#[cfg(test)]
mod tests {
    use kplane_picture::admission::Admission;
    use kplane_picture::index::CliffGuard;
    use tokio::sync::mpsc;
    use tokio::time::sleep;

    use super::*;
    use crate::fleet::Session;

    fn request(from: u64, nodes: &[&str]) -> pb::SuspectRequest {
        let nodes = nodes.iter().map(|node| pb::SuspectedNode {
            node: (*node).to_owned(),
            for_ms: 2_000,
            missed: 4,
            asked: 5,
        });
        pb::SuspectRequest {
            from,
            nodes: nodes.collect(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_word_of_another_replica_counts_for_a_while() {
        let (_, batches) = mpsc::channel(1);
        let hub = Hub::new(
            1,
            "test",
            Admission::default(),
            CliffGuard::default(),
            batches,
        )
        .0;
        let begun = Session::begin(
            &hub.fleet,
            &"here".into(),
            &pb::Hello::default(),
            String::new(),
        );
        let _here = begun.unwrap().0;
        let all = || {
            let all = hub.suspects.shared.all(Instant::now());
            all.into_keys()
                .map(|node| node.to_string())
                .collect::<Vec<_>>()
        };
        assert!(hear(&hub, &request(1, &["n1"])).is_empty());
        assert!(all().is_empty(), "its own word");
        assert_eq!(
            hear(&hub, &request(2, &["n1", "here", "no name!"])),
            ["here"]
        );
        assert_eq!(all(), ["here", "n1"]);
        let of = hub
            .suspects
            .shared
            .all(Instant::now())
            .remove("n1")
            .unwrap();
        assert_eq!((of.missed, of.asked, of.age_s()), (4, 5, 2));
        // Another one says something else, and the first nobody any more.
        hear(&hub, &request(3, &["n3"]));
        hear(&hub, &request(2, &[]));
        assert_eq!(all(), ["n3"]);
        sleep(COUNTS).await;
        assert!(all().is_empty(), "what nobody repeats");
        // No more replicas than there can be.
        (2..100).for_each(|from| drop(hear(&hub, &request(from, &["n1"]))));
        assert_eq!(hub.suspects.shared.lock().len(), MOST);
    }
}
