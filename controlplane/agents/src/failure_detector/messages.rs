//! Messages between replicas about dead nodes. Each replica says every second that it is there, and twice as often as long as
//! it suspects a node.

use std::collections::BTreeSet;
use std::time::Duration;

use kplane_desired_state::index::{Suspicion, Suspicions};
use kplane_model::NodeName;
use kplane_proto::v1 as pb;
use kplane_util::clock::millis;
use tokio::time::Instant;

use crate::hub::Hub;
use crate::peers::Peers;
use crate::streams::is_node_name;
use crate::suspects::{SILENT, Said, SuspicionsByNode, ago};

/// Maximum number of nodes in the word of one replica.
pub(super) const NODES: usize = 65_536;

/// Takes what another replica says; returns the nodes that it suspects or finds quiet, and whose agents are alive here.
pub fn receive(hub: &Hub, request: &pb::SuspectRequest) -> Vec<String> {
    if request.from == hub.store().epoch() {
        return Vec::new();
    }
    let nodes = read(request);
    let quiet = request.quiet.iter().map(String::as_str).take(NODES);
    let named = nodes.keys().map(|node| &**node).chain(quiet);
    let alive = named
        .filter(|node| hub.agents().is_alive(node, SILENT))
        .map(ToOwned::to_owned)
        .collect();
    let on_node = Some(&*request.on_node).filter(|node| is_node_name(node));
    let said = Said {
        at: Instant::now(),
        nodes,
        on_node: on_node.map(Into::into),
    };
    hub.suspects().shared.take(request.from, said);
    alive
}

/// Reads the nodes of a request; those that have no valid name are left out.
fn read(request: &pb::SuspectRequest) -> SuspicionsByNode {
    request
        .nodes
        .iter()
        .take(NODES)
        .filter(|of| is_node_name(&of.node))
        .map(|of| {
            let suspicion = Suspicion {
                since: ago(Duration::from_millis(of.for_ms)),
                missed: usize::try_from(of.missed).unwrap_or_default(),
                asked: usize::try_from(of.asked).unwrap_or_default(),
            };
            (of.node.as_str().into(), suspicion)
        })
        .collect()
}

/// Sends to all other replicas what this one suspects and which other nodes are quiet; returns the nodes that have a stream
/// elsewhere.
pub(super) async fn send(
    peers: &Peers,
    from: u64,
    on_node: Option<NodeName>,
    own: &Suspicions,
    quiet: Vec<String>,
) -> BTreeSet<NodeName> {
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
        on_node: on_node.map(|node| node.to_string()).unwrap_or_default(),
        quiet,
    };
    peers
        .suspect(request)
        .await
        .into_iter()
        .map(|node| node.as_str().into())
        .collect()
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;
    use crate::fleet::Session;
    use crate::suspects::{COUNTS, MOST, REMEMBERED};

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
            on_node: format!("m{from}"),
            quiet: Vec::new(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_word_of_another_replica_counts_for_a_while() {
        let hub = Hub::sample(1, "test");
        let _here = Session::sample(&hub, "here");
        let all = || {
            let all = hub.suspects().shared.all();
            all.into_keys().map(|node| node.to_string()).collect::<Vec<_>>()
        };
        assert!(receive(&hub, &request(1, &["n1"])).is_empty());
        assert!(all().is_empty(), "its own word");
        assert_eq!(
            receive(&hub, &request(2, &["n1", "here", "no name!"])),
            ["here"]
        );
        let moved = pb::SuspectRequest {
            quiet: ["here", "n1", ""].map(str::to_owned).into(),
            ..request(2, &["n1", "here"])
        };
        assert_eq!(receive(&hub, &moved), ["here", "here"]);
        assert_eq!(all(), ["here", "n1"]);
        let of = hub.suspects().shared.all().remove("n1").unwrap();
        assert_eq!((of.missed, of.asked, of.age_s()), (4, 5, 2));
        // Another one says something else, and the first nobody any more.
        receive(&hub, &request(3, &["n3"]));
        receive(&hub, &request(2, &[]));
        assert_eq!(all(), ["n3"]);
        sleep(COUNTS).await;
        assert!(all().is_empty(), "what nobody repeats");
        let silent = hub.suspects().shared.silent().into_iter();
        assert_eq!(
            silent.map(|(node, _)| node).collect::<Vec<_>>(),
            ["m2".into(), "m3".into()] as [NodeName; 2]
        );
        // A replica that started anew there is no silent one.
        receive(
            &hub,
            &pb::SuspectRequest {
                on_node: "m2".to_owned(),
                ..request(4, &[])
            },
        );
        assert_eq!(hub.suspects().shared.silent().len(), 1);
        sleep(REMEMBERED).await;
        assert!(hub.suspects().shared.silent().is_empty());
        // No more replicas than there can be.
        (2..100).for_each(|from| drop(receive(&hub, &request(from, &["n1"]))));
        assert_eq!(hub.suspects().shared.lock().len(), MOST);
    }
}
