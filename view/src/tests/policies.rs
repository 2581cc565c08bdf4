//! NetworkPolicies at 80 columns.

use expect_test::expect;
use kpctl_samples as samples;
use kplane_proto::v1 as pb;

use super::super::View as _;
use super::super::fleet::FleetView;
use super::super::node::NodeDescriptionView;
use super::super::nodes::NodeListView;
use super::super::policies::{JudgementView, PolicyDescriptionView, PolicyListView};
use super::super::testing::{has, table, wide, words};

#[test]
fn a_list_of_policies() {
    let view = PolicyListView::new(samples::policies(), None);
    expect![[r#"
        NAMESPACE    NAME          TYPES           PODS
        kube-system  dns           Ingress         2
        shop         default-deny  Ingress,Egress  41
        shop         web           Ingress         0
    "#]]
    .assert_eq(&table(&view));
    let names = view.names().unwrap();
    assert_eq!(names[0], "policy/kube-system/dns");
    let view = PolicyListView::new(Vec::new(), Some("shop"));
    assert_eq!(table(&view), "No NetworkPolicies in namespace shop.\n");
}

#[test]
fn a_policy_in_words() {
    let view = PolicyDescriptionView::from(samples::policy_description());
    expect![[r#"
        NetworkPolicy   shop/db
        For             Pods app=db,tier in (a,b) of namespace shop
        Pods            db-0, db-1, db-2, db-3, db-4, db-5, db-6, db-7, db-8, db-9,
                        db-10, db-11, db-12, db-13, db-14, db-15, db-16, db-17, db-18,
                        db-19, and 82 more

        Ingress
          isolated; allowed is:
          [0] from Pods app=web in namespaces team=a, and 10.0.0.0/8 except 10.1.0.0/16,
            to ports TCP 5432
          [1] from all Pods of the namespace, to ports TCP metrics

        Egress
          not isolated by this policy

        ISSUE  OBJECT                 LOCATION
        Error  NetworkPolicy shop/db  -
          InvalidPolicy: spec.ingress[2].from[0]: has no address; the rule allows
            nothing
    "#]]
    .assert_eq(&table(&view));
    has(&wide(&view), "db-98, db-99, and 2 more");
}

#[test]
fn policies_of_the_cluster_have_a_tier_and_no_namespace() {
    let mut policies = samples::policies();
    policies.insert(
        0,
        pb::PolicySummary {
            name: "deny-egress".to_owned(),
            egress: true,
            pods: 44,
            tier: "Admin".to_owned(),
            priority: 10,
            ..pb::PolicySummary::default()
        },
    );
    let view = PolicyListView::new(policies.clone(), None);
    expect![[r#"
        NAMESPACE    NAME          TYPES           PODS  TIER
        -            deny-egress   Egress          44    Admin 10
        kube-system  dns           Ingress         2     -
        shop         default-deny  Ingress,Egress  41    -
        shop         web           Ingress         0     -
    "#]]
    .assert_eq(&table(&view));
    assert_eq!(view.names().unwrap()[0], "clusterpolicy/deny-egress");
    let description = pb::PolicyDescription {
        summary: policies.into_iter().next(),
        selector: "all Pods of all namespaces".to_owned(),
        egress: vec!["Deny: to 10.0.0.0/8, on all ports".to_owned()],
        pods: vec!["shop/db-0".to_owned()],
        ..pb::PolicyDescription::default()
    };
    expect![[r#"
        Cluster policy  deny-egress
        Tier            Admin 10
        For             all Pods of all namespaces
        Pods            shop/db-0, and 43 more

        Ingress
          no rule

        Egress
          the first rule that matches counts:
          [0] Deny: to 10.0.0.0/8, on all ports
    "#]]
    .assert_eq(&table(&PolicyDescriptionView::from(description)));
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
    expect![[r#"
        NetworkPolicy   shop/db
        For             all Pods of namespace shop
        Pods            none

        Ingress
          isolated, and nothing is allowed

        Egress
          isolated, and nothing is allowed
    "#]]
    .assert_eq(&table(&PolicyDescriptionView::from(policy)));
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
    expect![[r#"
        Connection      from shop/web-1 to shop/db-0, TCP 9187
        Verdict         NetworkPolicies deny it

        Egress of shop/web-1
          allowed: shop/web allows it by spec.egress[1]
            rule: to Pods app=db, on ports TCP 5432, TCP 9187
            the other end is in: Pods app=db

        Ingress of shop/db-0
          denied: no rule of shop/db, shop/default-deny allows connections from Pod
            shop/web-1, TCP 9187; Pod shop/db-0 is isolated for connections to it
    "#]]
    .assert_eq(&table(&view));
    has(&wide(&view), "isolated by: shop/db, shop/default-deny\n");
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
    expect![[r#"
        Connection      from shop/web-1 to 10.0.0.11, TCP 9187
        Verdict         NetworkPolicies allow it

        Egress of shop/web-1
          allowed: shop/web allows it by spec.egress[1]
            rule: to Pods app=db, on ports TCP 5432, TCP 9187
            the other end is in: Pods app=db

        Ingress of 10.0.0.11
          not isolated: no policy isolates 10.0.0.11 for connections to it

        10.0.0.11 is an address of node-a
    "#]]
    .assert_eq(&table(&JudgementView::new(&asked, judgement)));
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

#[test]
fn a_status_says_what_is_wrong_with_policies() {
    let mut fleet = samples::troubled_fleet();
    let policies = |fleet: &pb::Fleet| words(&FleetView::from(fleet.clone()));
    assert!(!policies(&fleet).contains("Policies"));
    let plane = fleet.control_plane.as_mut().unwrap();
    plane.enforcement = pb::Enforcement::Unread.into();
    has(&policies(&fleet), "Policies not read yet");
    let plane = fleet.control_plane.as_mut().unwrap();
    plane.enforcement = pb::Enforcement::On.into();
    plane.policies = 12;
    let report = fleet.nodes[0].report.as_mut().unwrap();
    report.failures.push(pb::ObjectFailure {
        reason: "policies of Pod shop/web-0: it is cut off".to_owned(),
        degraded: true,
        policies: true,
        ..pb::ObjectFailure::default()
    });
    report.findings.push(pb::Finding {
        code: "PodRangeUnknown".to_owned(),
        severity: pb::Severity::Warning.into(),
        ..pb::Finding::default()
    });
    let line = "Policies 12, enforced on 2 of 5 nodes, not as written on 1 node, Pod ranges unknown on 1 node";
    has(&policies(&fleet), line);
}
