//! Answers of many replicas, some of which are missing.

use std::time::Duration;

use expect_test::expect;
use kplane_proto::v1 as pb;

use super::super::approve::ApprovalView;
use super::super::convergence::ConvergenceView;
use super::super::describe::DescriptionView;
use super::super::fleet::FleetView;
use super::super::nodes::{NodeListView, NodeStateView};
use super::super::testing::{has, table, wide};
use super::super::wait::WaitView;
use crate::goal::{Goal, Threshold};
use kpctl_samples as samples;

fn missing() -> Vec<pb::MissingReplica> {
    vec![pb::MissingReplica {
        address: "10.0.0.3:7466".to_owned(),
        reason: "it did not answer within 1 s".to_owned(),
    }]
}

/// Three replicas, one of which is missing, and a node that only another replica knows.
fn fleet() -> pb::Fleet {
    let mut elsewhere = samples::node("node-b");
    elsewhere.replica = "10.0.0.2:7466".to_owned();
    elsewhere.epoch = 7;
    let report = elsewhere.report.as_mut().unwrap();
    (
        report.epoch,
        report.applied_revision,
        elsewhere.wanted_revision,
    ) = (7, 30, 31);
    let mut unknown = samples::no_agent("node-c");
    unknown.state = pb::NodeState::Unknown.into();
    "a replica may serve the node".clone_into(&mut unknown.last_error);
    pb::Fleet {
        missing_replicas: missing(),
        replicas: 2,
        ..samples::fleet(vec![samples::node("node-a"), elsewhere, unknown])
    }
}

#[test]
fn a_missing_replica_is_a_warning_under_the_table() {
    let view = FleetView::from(fleet());
    assert!(!view.summary.healthy);
    assert_eq!(view.nodes[1].revisions.lag, Some(1), "by its own replica");
    assert_eq!(view.nodes[2].state, NodeStateView::Unknown);
    expect![[r#"
        Control plane   0.1.0, up 3h5m
        Source          manifests, last contact 2s ago
        Revision        4711, 12s ago, 10000 services, 20000 endpoints
        Nodes           2/3 in sync, 1 unknown
        Replicas        2 answered, 1 missing

        NODE    STATE    SINCE  VERIFIED   LAG  SYNC   OBJECTS      BACKEND
        node-a  InSync   3h     3m12s ago  -    412us  10000/20000  nftables
        node-b  InSync   3h     3m12s ago  1    412us  10000/20000  nftables
        node-c  Unknown  3d4h   -          -    -      -            -
          a replica may serve the node

        Replica 10.0.0.3:7466 is missing: it did not answer within 1 s. Nothing is known
          of its agents.
    "#]]
    .assert_eq(&table(&view));
    let all = pb::Fleet {
        missing_replicas: Vec::new(),
        ..samples::fleet(vec![samples::node("node-a")])
    };
    let all = FleetView::from(pb::Fleet { replicas: 3, ..all });
    assert!(all.summary.healthy);
    assert!(table(&all).contains("Replicas        3 answered\n"));
}

#[test]
fn the_replica_of_each_node_is_listed() {
    expect![[r#"
        NODE    STATE    ZONE        BACKEND   VERSION  HEARD  ADDRESS    OTHER-ADDRESSES  POD-CIDRS                         PEER             REPLICA        RTT
        node-a  InSync   eu-west-1a  nftables  0.1.0    1s     10.0.0.11  fd00::11         10.244.1.0/24,fd00:10:244:1::/64  10.0.0.11:41234  the one asked  230us
        node-b  InSync   eu-west-1a  nftables  0.1.0    1s     10.0.0.11  fd00::11         10.244.1.0/24,fd00:10:244:1::/64  10.0.0.11:41234  10.0.0.2:7466  230us
        node-c  Unknown  -           -         -        -      10.0.0.15  -                -                                 -                -              -

        Replica 10.0.0.3:7466 is missing: it did not answer within 1 s. Nothing is known of its agents.
    "#]].assert_eq(&wide(&NodeListView::from(fleet())));
}

#[test]
fn nobody_knows_what_is_enough_while_nodes_are_unknown() {
    let limit = Duration::from_secs(60);
    let answer = pb::Convergence {
        missing_replicas: missing(),
        ..samples::converged()
    };
    let known = ConvergenceView::from(answer.clone());
    assert!(known.has_reached(Goal::Programmed, Threshold::ALL));
    let unknown = ConvergenceView::from(pb::Convergence {
        nodes_incomplete: true,
        ..answer
    });
    assert!(!unknown.has_reached(Goal::Programmed, Threshold::ALL));
    let view = WaitView::new(Goal::Programmed, Threshold::ALL, limit, vec![unknown]);
    assert!(!view.reached);
    expect![[r#"
        not programmed within 1m: service/shop/web: in the kernel of 5,000 of 5,000
          nodes; p50 9ms, p99 40ms, max 1.3s

        Replica 10.0.0.3:7466 is missing: it did not answer within 1 s. Nothing is known
          of its agents.

        Next
          kpctl status
    "#]]
    .assert_eq(&table(&view));
}

#[test]
fn a_replica_that_did_not_approve_is_named() {
    let done = pb::ApproveResponse {
        nodes: vec!["node-b".to_owned()],
        missing_replicas: missing(),
        ..pb::ApproveResponse::default()
    };
    expect![[r#"
        Approved: objects that are missing from the source are removed.
        On nodes        node-b

        Replica 10.0.0.3:7466 did not approve: it did not answer within 1 s. Approve
          again.
    "#]]
    .assert_eq(&table(&ApprovalView::from(done)));
}

#[test]
fn a_description_says_that_a_replica_is_missing() {
    let mut description = samples::description();
    let convergence = description.convergence.as_mut().unwrap();
    convergence.missing_replicas = missing();
    let view = DescriptionView::new("shop", "web", description);
    let text = table(&view);
    let warning = "Replica 10.0.0.3:7466 is missing: it did not answer within 1 s.";
    has(&text, warning);
}
