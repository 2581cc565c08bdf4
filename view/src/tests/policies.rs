//! NetworkPolicies at 80 columns.

use expect_test::expect;
use kpctl_samples as samples;
use kplane_proto::v1 as pb;

use super::super::View as _;
use super::super::fleet::FleetView;
use super::super::node::NodeDescriptionView;
use super::super::nodes::NodeListView;
use super::super::policies::{JudgementView, PolicyDescriptionView, PolicyListView};
use super::super::testing::{has, table, wide};

#[test]
fn a_list_of_policies() {
    let view = PolicyListView::new(samples::policies(), None);
    expect![[]].assert_eq(&table(&view));
    let names = view.names().unwrap();
    assert_eq!(names[0], "policy/kube-system/dns");
    let view = PolicyListView::new(Vec::new(), Some("shop"));
    assert_eq!(table(&view), "No NetworkPolicies in namespace shop.\n");
}

#[test]
fn a_policy_in_words() {
    let view = PolicyDescriptionView::from(samples::policy_description());
    expect![[]].assert_eq(&table(&view));
    has(&wide(&view), "db-98, db-99, and 2 more");
}

#[test]
fn a_policy_that_allows_nothing() {
    let mut policy = samples::policy_description();
    let summary = policy.summary.as_mut().unwrap();
    (summary.egress, summary.pods) = (true, 0);
    policy.ingress.clear();
    policy.pods.clear();
    policy.issues.clear();
    policy.selector.clear();
    expect![[]].assert_eq(&table(&PolicyDescriptionView::from(policy)));
}

fn asked() -> pb::JudgeConnectionRequest {
    pb::JudgeConnectionRequest {
        from: "shop/web-1".to_owned(),
        to: "shop/db-0".to_owned(),
        protocol: pb::Protocol::Tcp.into(),
        port: 9_187,
    }
}

#[test]
fn a_connection_that_is_denied() {
    let view = JudgementView::new(&asked(), samples::judgement());
    expect![[]].assert_eq(&table(&view));
}

#[test]
fn a_connection_that_is_allowed() {
    let mut judgement = samples::judgement();
    judgement.allowed = true;
    let ingress = judgement.ingress.as_mut().unwrap();
    ingress.set_verdict(pb::PolicyVerdict::NotIsolated);
    ingress.reason = "no policy isolates 10.0.0.11 for connections to it".to_owned();
    ingress.isolating.clear();
    judgement.notes = vec!["10.0.0.11 is an address of node-a".to_owned()];
    let asked = pb::JudgeConnectionRequest {
        to: "10.0.0.11".to_owned(),
        ..asked()
    };
    expect![[]].assert_eq(&table(&JudgementView::new(&asked, judgement)));
}

#[test]
fn nodes_show_what_they_enforce() {
    let mut fleet = samples::troubled_fleet();
    fleet.control_plane.as_mut().unwrap().policies = 12;
    let report = fleet.nodes[0].report.as_mut().unwrap();
    report.policies = Some(pb::EnforcedPolicies {
        policies: 7,
        pods: 57,
        isolated: 40,
        elements: 4_311,
    });
    has(
        &table(&FleetView::from(fleet.clone())),
        "\nPolicies        12, enforced on 2 of 5 nodes\n",
    );
    has(&wide(&NodeListView::from(fleet.clone())), "POLICIES");
    fleet.nodes.truncate(1);
    has(
        &table(&NodeDescriptionView::new(fleet).unwrap()),
        "\nPolicies        7 for 40 of 57 Pods, 4311 elements\n",
    );
}
