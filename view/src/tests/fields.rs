//! Fields in JSON and YAML: programs depend on them, so they only ever grow.

use expect_test::{ExpectFile, expect_file};
use serde::Serialize;

use super::super::approve::ApprovalView;
use super::super::describe::DescriptionView;
use super::super::endpoints::EndpointListView;
use super::super::fleet::FleetView;
use super::super::services::ServiceListView;
use super::super::version::VersionView;
use super::super::wait::WaitView;
use crate::goal::Goal;
use kpctl_samples as samples;

fn check(view: &impl Serialize, expected: &ExpectFile) {
    let json = serde_json::to_string_pretty(view).unwrap();
    expected.assert_eq(&(json.clone() + "\n"));
    let yaml = serde_saphyr::to_string(view).unwrap();
    let from_yaml: serde_json::Value = serde_saphyr::from_str(&yaml).unwrap();
    let from_json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(from_yaml, from_json, "YAML says the same:\n{yaml}");
}

#[test]
fn fleet() {
    let mut fleet = samples::troubled_fleet();
    fleet.nodes = fleet.nodes.split_off(2);
    fleet.nodes.remove(1);
    let failing = fleet.nodes[0].report.as_mut().unwrap();
    failing.failures.truncate(1);
    check(&FleetView::from(fleet), &expect_file!["golden/fleet.json"]);
}

#[test]
fn approval() {
    let view = ApprovalView::from(samples::holding_fleet());
    check(&view, &expect_file!["golden/approval.json"]);
}

#[test]
fn node_with_ipvs() {
    let fleet = samples::fleet(vec![samples::ipvs_node("node-a")]);
    let view = FleetView::from(fleet);
    let families = &view.nodes[0].families;
    check(families, &expect_file!["golden/families_ipvs.json"]);
}

#[test]
fn description_with_ipvs() {
    let view = DescriptionView::new("shop", "web", samples::ipvs_description());
    let nodes: Vec<_> = view.nodes.iter().map(|node| &node.ipvs).collect();
    check(&nodes, &expect_file!["golden/description_ipvs.json"]);
}

#[test]
fn services() {
    let view = ServiceListView::new(vec![samples::web()], None);
    check(&view, &expect_file!["golden/services.json"]);
}

#[test]
fn endpoints() {
    let mut web = samples::web();
    web.endpoints.truncate(1);
    check(
        &EndpointListView::new(vec![web], None),
        &expect_file!["golden/endpoints.json"],
    );
}

#[test]
fn description() {
    let mut description = samples::description();
    description.ports.clear();
    description.nodes = description.nodes.split_off(2);
    let view = DescriptionView::new("shop", "web", description);
    check(&view, &expect_file!["golden/description.json"]);
}

#[test]
fn wait() {
    let services = vec![samples::lagging().into()];
    let threshold = "99.9%".parse().unwrap();
    let limit = std::time::Duration::from_secs(60);
    let view = WaitView::new(Goal::Programmed, threshold, limit, services);
    check(&view, &expect_file!["golden/wait.json"]);
}

#[test]
fn policies() {
    use super::super::policies::{JudgementView, PolicyDescriptionView, PolicyListView};

    let view = PolicyListView::new(samples::policies(), None);
    check(&view, &expect_file!["golden/policies.json"]);
    let mut policy = samples::policy_description();
    policy.pods.truncate(2);
    let view = PolicyDescriptionView::from(policy);
    check(&view, &expect_file!["golden/policy.json"]);
    let asked = kplane_proto::v1::JudgeConnectionRequest {
        from: "shop/web-1".to_owned(),
        to: "shop/db-0".to_owned(),
        protocol: kplane_proto::v1::Protocol::Tcp.into(),
        port: 9_187,
    };
    let view = JudgementView::new(&asked, samples::judgement());
    check(&view, &expect_file!["golden/judgement.json"]);
}

#[test]
fn version() {
    let view = VersionView::new(Some("0.2.0".to_owned()));
    check(&view, &expect_file!["golden/version.json"]);
}
