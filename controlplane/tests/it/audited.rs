//! The lines of the audit log about requests that make agents act, or that tell who a Service's clients are.

use std::path::Path;

use kplane_agents::identity::AuditLog;
use kplane_proto::v1 as pb;
use tokio::time::{Instant, sleep};

use crate::support::start::start;
use crate::support::{DEADLINE, status};

#[tokio::test]
async fn probes_attempts_and_questions_about_clients_leave_lines() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("audit");
    let audit = AuditLog::File(log.clone());
    let (bound, _manifests) = start(|config| config.identity.audit = audit).await;
    let mut client = status(&bound).await;
    let (namespace, name) = ("shop".to_owned(), "web".to_owned());
    // There is no such Service. Whoever asks is written down all the same.
    let probe = pb::ProbeRequest {
        node: "n1".to_owned(),
        ..pb::ProbeRequest::default()
    };
    assert!(client.probe_nodes(probe).await.is_err());
    let tried = pb::ExplainRequest {
        namespace: namespace.clone(),
        name: name.clone(),
        ..pb::ExplainRequest::default()
    };
    assert!(client.try_service(tried.clone()).await.is_err());
    let clients = pb::AffinityRequest {
        namespace: namespace.clone(),
        name: name.clone(),
        ..pb::AffinityRequest::default()
    };
    assert!(client.get_affinity(clients).await.is_err());
    let follower = pb::DropsRequest {
        namespace: namespace.clone(),
        follower: 7,
        ..pb::DropsRequest::default()
    };
    let flows = pb::FlowsRequest {
        namespace,
        name,
        ..pb::FlowsRequest::default()
    };
    let graph = pb::GraphRequest {
        services: vec!["shop/web".to_owned(), "shop/api".to_owned()],
        ..pb::GraphRequest::default()
    };
    // Followers and watches ask all the time, and are written down once.
    for _ in 0..2 {
        assert!(client.follow_drops(follower.clone()).await.is_err());
        assert!(client.get_flows(flows.clone()).await.is_err());
        client.get_graph(graph.clone()).await.unwrap();
    }
    // These make nobody act.
    assert!(client.get_drops(pb::DropsRequest::default()).await.is_err());
    assert!(client.explain(tried).await.is_err());
    let expected = [
        "\"action\":\"create /kplane/probes\",\"text\":\"probed the default Service from node n1\"",
        "\"action\":\"create /kplane/probes\",\"text\":\"tried connections to shop/web from the only node\"",
        "\"action\":\"get /kplane/clients\",\"text\":\"read the clients of shop/web on all nodes\"",
        "\"action\":\"create /kplane/samples\",\"text\":\"sampled packets that policies of Pods of shop deny on all nodes\"",
        "\"action\":\"get /kplane/clients\",\"text\":\"read who is connected to shop/web on all nodes\"",
        "\"action\":\"get /kplane/clients\",\"text\":\"read who talked to shop/web, shop/api on all nodes\"",
    ];
    has_lines(&log, &expected).await;
}

/// Waits for the lines of a log, of which each contains its part.
async fn has_lines(log: &Path, expected: &[&str]) {
    let until = Instant::now() + DEADLINE;
    loop {
        let lines = std::fs::read_to_string(log).unwrap();
        let lines: Vec<&str> = lines.lines().collect();
        if lines.len() >= expected.len() || Instant::now() >= until {
            assert_eq!(lines.len(), expected.len(), "{lines:?}");
            for (line, part) in lines.iter().zip(expected) {
                assert!(line.contains(part), "{line}");
            }
            return;
        }
        sleep(std::time::Duration::from_millis(10)).await;
    }
}
