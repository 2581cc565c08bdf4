//! A Pod that waits to end: the kernels of all replicas' nodes count, and both families of the Pod.

use std::fs;

use kplane_proto::v1::{self as pb, LeavingOutcome, agent_message, server_message};
use tokio::time::{Instant, sleep};

use super::{Agent, AgentMessage, Replica, three};
use crate::support::DEADLINE;

/// Writes a Service with the Pods p and q in two families, of which p is ready or terminating.
fn write(replicas: &[Replica], [v4, v6]: [bool; 2]) {
    let slice = |family: &str, ips: [&str; 2], ready: bool| {
        let endpoint = |pod: &str, ip: &str, ready: bool| {
            format!(
                "{{addresses: ['{ip}'], nodeName: a, targetRef: {{kind: Pod, name: {pod}}}, \
                 conditions: {{ready: {ready}, terminating: {}}}}}",
                !ready
            )
        };
        format!(
            "---\n{{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {{name: api-{}, namespace: shop, \
             labels: {{kubernetes.io/service-name: api}}}}, addressType: {family}, \
             ports: [{{name: '', port: 8080}}], endpoints: [{}, {}]}}\n",
            family.to_lowercase(),
            endpoint("p", ips[0], ready),
            endpoint("q", ips[1], true)
        )
    };
    let text = "---\n{apiVersion: v1, kind: Service, metadata: {name: api, namespace: shop}, spec: {clusterIP: 10.96.0.9, \
                clusterIPs: [10.96.0.9, 'fd96::9'], ipFamilies: [IPv4, IPv6], ports: [{port: 80}]}}\n";
    let text = format!(
        "{text}{}{}",
        slice("IPv4", ["10.244.0.1", "10.244.0.2"], v4),
        slice("IPv6", ["fd44::1", "fd44::2"], v6)
    );
    for replica in replicas {
        fs::write(replica._folder.path().join("api.yaml"), &text).unwrap();
    }
}

impl Agent {
    /// Asks about Pod p; returns the outcome.
    async fn leaves(&mut self, within_ms: u32) -> LeavingOutcome {
        let leaving = pb::Leaving {
            token: 7,
            addresses: vec![vec![10, 244, 0, 1]],
            within_ms,
            ..pb::Leaving::default()
        };
        let kind = Some(agent_message::Kind::Leaving(leaving));
        self.peer.send.send(AgentMessage { kind }).await.unwrap();
        loop {
            if let server_message::Kind::Left(left) = self.peer.next().await.unwrap() {
                assert_eq!(left.token, 7);
                return left.outcome();
            }
        }
    }
}

fn head(replica: &Replica) -> u64 {
    replica.bound.hub().store().head().borrow().revision
}

/// Waits until all replicas publish the same as the first one, after a revision of each.
async fn agree(replicas: &[Replica], before: &[u64]) {
    let until = Instant::now() + DEADLINE;
    loop {
        let moved = replicas.iter().zip(before).all(|(r, before)| head(r) > *before);
        let digest = |replica: &Replica| replica.bound.hub().store().digest("a");
        let same = replicas.iter().all(|r| digest(r) == digest(&replicas[0]));
        if moved && same {
            return;
        }
        assert!(Instant::now() < until, "the replicas do not agree");
        sleep(std::time::Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_pod_is_gone_when_the_nodes_of_all_replicas_say_so() {
    let replicas = three().await;
    let last_reason = || {
        let latest = replicas[0].bound.hub().streams().departures.latest();
        latest.last().map(|(_, one)| one.reason.clone()).unwrap()
    };
    let before: Vec<_> = replicas.iter().map(head).collect();
    write(&replicas, [true, true]);
    agree(&replicas, &before).await;
    let mut agents = Vec::new();
    for (replica, node) in replicas.iter().zip(["a", "b", "c"]) {
        agents.push(replica.agent(node, head(replica)).await);
    }
    let ready = "the Pod still counted as ready for shop/api, by its EndpointSlices";
    assert_eq!(agents[0].leaves(300).await, LeavingOutcome::Bound);
    assert_eq!(last_reason(), ready);

    // The agent has asked for one family.
    let before: Vec<_> = replicas.iter().map(head).collect();
    write(&replicas, [false, true]);
    agree(&replicas, &before).await;
    assert_eq!(agents[0].leaves(300).await, LeavingOutcome::Bound);
    assert_eq!(last_reason(), ready);

    let before: Vec<_> = replicas.iter().map(head).collect();
    write(&replicas, [false, false]);
    agree(&replicas, &before).await;
    agents[0].holds(head(&replicas[0])).await;
    assert_eq!(agents[0].leaves(1_500).await, LeavingOutcome::Bound);
    assert_eq!(last_reason(), "b, c did not confirm");
    agents[1].holds(head(&replicas[1])).await;
    assert_eq!(agents[0].leaves(1_500).await, LeavingOutcome::Bound);
    assert_eq!(last_reason(), "c did not confirm");
    agents[2].holds(head(&replicas[2])).await;
    assert_eq!(agents[0].leaves(60_000).await, LeavingOutcome::Gone);
    let latest = replicas[0].bound.hub().streams().departures.latest();
    let (_, last) = latest.last().unwrap();
    assert_eq!(
        (&*last.namespace, &*last.pod, &*last.node),
        ("shop", "p", "a")
    );
    // Another node's agent has no say about the Pod.
    assert_eq!(agents[1].leaves(60_000).await, LeavingOutcome::Gone);
    assert_eq!(
        replicas[1].bound.hub().streams().departures.latest().len(),
        0
    );
}
