//! One Service at all replicas: how far it has come, and virtual servers.

use kplane_proto::v1::{self as pb, LagState, ServiceState, agent_message, server_message};
use tokio::time::{Instant, timeout};

use super::{Agent, AgentMessage, Replica, address, three};
use crate::support::DEADLINE;
use crate::support::watch::{Watch, lags};

async fn programmed(watch: &mut Watch, nodes: u64) -> pb::Convergence {
    watch.until(|answer| answer.programmed == nodes).await
}

/// Connects an agent to each of three replicas.
async fn agents(replicas: &[Replica; 3]) -> Vec<Agent> {
    let mut agents = Vec::new();
    for (replica, node) in replicas.iter().zip(["a", "b", "c"]) {
        let revision = replica.bound.hub().store().head().borrow().revision;
        agents.push(replica.agent(node, revision).await);
    }
    agents
}

#[tokio::test]
async fn a_change_is_followed_into_the_kernels_of_all_replicas() {
    let replicas = three().await;
    let agents = agents(&replicas).await;
    // The revisions of replicas differ.
    replicas[1].publish(Some(79), &[]);
    replicas[1].publish(Some(80), &[]);
    let mut watches = Vec::new();
    for replica in &replicas {
        watches.push(Watch::begin(&replica.bound, "web").await);
    }
    let [first, second, third] = &replicas;
    agents[1].holds(second.bound.hub().store().head().borrow().revision).await;
    for watch in &mut watches {
        let all = programmed(watch, 3).await;
        assert_eq!((all.nodes, all.verified, lags(&all).len()), (3, 3, 0));
    }
    // The third replica has not seen the change yet: what its agent holds is not the newest state.
    let revisions = [first, second].map(|replica| replica.publish(Some(81), &[]));
    for watch in &mut watches[..2] {
        let none = programmed(watch, 0).await;
        assert_eq!(none.nodes, 3);
    }
    agents[0].holds(revisions[0]).await;
    agents[1].holds(revisions[1]).await;
    let behind = programmed(&mut watches[0], 2).await;
    assert_eq!(lags(&behind), [("c", LagState::Behind)]);
    let reason = &behind.laggards[0].reason;
    assert!(reason.contains(&address(third)), "{reason}");
    let revision = third.publish(Some(81), &[]);
    let says = |answer: &pb::Convergence| lags(answer) == [("c", LagState::Behind)];
    let applied = "applied revision";
    let is_its_own = |answer: &pb::Convergence| {
        assert!(answer.programmed <= 2);
        says(answer) && answer.laggards[0].reason.starts_with(applied)
    };
    watches[0].until(is_its_own).await;
    agents[2].holds(revision).await;
    for watch in &mut watches {
        let all = |all: &pb::Convergence| {
            all.programmed == 3 && all.durations.is_some_and(|durations| durations.nodes == 3)
        };
        watch.until(all).await;
    }
}

#[tokio::test]
async fn a_replica_that_stops_takes_its_nodes_out_of_the_count() {
    let replicas = three().await;
    let _agents = agents(&replicas).await;
    let [first, _second, third] = replicas;
    let mut watch = Watch::begin(&first.bound, "web").await;
    programmed(&mut watch, 3).await;
    third.bound.shutdown_token().cancel();
    timeout(DEADLINE, third.bound.wait()).await.unwrap().unwrap();
    let less = programmed(&mut watch, 2).await;
    assert_eq!(less.state(), ServiceState::Served);
    assert_eq!(lags(&less), [("c", LagState::Unknown)]);
    assert_eq!((less.nodes, less.missing_replicas.len()), (3, 1));
    // A folder need not name all nodes.
    assert!(less.nodes_incomplete);
}

/// Virtual servers are read from agents, wherever these are connected.
#[tokio::test]
async fn agents_of_other_replicas_are_asked_for_virtual_servers() {
    let replicas = three().await;
    let mut agents = agents(&replicas).await;
    let manifests = "
kind: Service
apiVersion: v1
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.1, ports: [{name: http, port: 80}]}
";
    for replica in &replicas {
        std::fs::write(replica._folder.path().join("web.yaml"), manifests).unwrap();
    }
    let with = pb::Report {
        applied_revision: u64::MAX,
        families: vec![pb::FamilyStatus {
            servers: Some(pb::ServerStats::default()),
            ..pb::FamilyStatus::default()
        }],
        ..pb::Report::default()
    };
    for agent in &mut agents[1..] {
        agent.say(with.clone()).await;
        agent.peer.is_answered().await;
    }
    let mut answering = agents.remove(1);
    let answering = tokio::spawn(async move {
        loop {
            if let server_message::Kind::Inspect(inspect) = answering.peer.next().await.unwrap() {
                let key = pb::ServiceKey {
                    namespace: inspect.namespace,
                    name: inspect.name,
                    ..pb::ServiceKey::default()
                };
                let kind = agent_message::Kind::Inspection(pb::Inspection {
                    token: inspect.token,
                    servers: vec![pb::VirtualServer {
                        key: Some(key),
                        scheduler: "rr".to_owned(),
                        ..pb::VirtualServer::default()
                    }],
                    ..pb::Inspection::default()
                });
                let message = AgentMessage { kind: Some(kind) };
                answering.peer.send.send(message).await.unwrap();
            }
        }
    });
    let until = Instant::now() + DEADLINE;
    let description = loop {
        let request = pb::DescribeServiceRequest {
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
        };
        match replicas[0].status().await.describe_service(request).await {
            Ok(description) => break description.into_inner(),
            Err(status) => assert!(Instant::now() < until, "{status}"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    };
    let servers: Vec<_> = description.nodes.iter().map(|node| node.servers.as_ref()).collect();
    assert_eq!(servers[0], None);
    assert_eq!(servers[1].unwrap().servers[0].scheduler, "rr");
    // The third agent does not answer.
    assert!(
        servers[2].unwrap().error.contains("did not answer"),
        "{servers:?}"
    );
    answering.abort();
}
