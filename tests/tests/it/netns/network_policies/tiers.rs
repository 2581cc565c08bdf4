//! ClusterNetworkPolicies.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use kplane_model::Family;
use kplane_tests::client::Probe;
use kplane_tests::wait::DEADLINE;
use serde_json::json;

use super::{SILENCE, Stage, WEB, destination, namespace, play, pod, policy};

pub(crate) fn tiers_come_before_and_behind_network_policies() -> Result<()> {
    play("tiers")
}

/// Rules with parts that are not known: `Accept` accepts nothing, the others deny everything. They are reported.
pub(crate) fn what_is_not_understood_opens_nothing() -> Result<()> {
    let mut stage = Stage::open()?;
    stage.apply(&policy(
        "isolated",
        "in x: podSelector: {}, policyTypes: [Ingress]",
    ))?;
    stage.apply(&policy(
        "odd",
        "tier: Admin, priority: 1, subject: {namespaces: {}}, \
         ingress: [{action: Accept, from: [{namespaces: {}, workloads: {}}]}, {action: Allow, from: [{namespaces: {matchLabels: \
         {team: green}}}]}]",
    ))?;
    stage.check(
        "an unknown action denies everything",
        "a>b no; here>a no; a>here no; outside>a no; node1>a",
    )?;
    stage.apply(&policy(
        "odd",
        "tier: Admin, priority: 1, subject: {namespaces: {matchLabels: {team: red}}}, \
         egress: [{action: Accept, to: [{domainNames: [example.org]}]}, {action: Deny, to: [{networks: ['0.0.0.0/0', '::/0']}]}]",
    ))?;
    stage.check("names of domains", "a>here no; a>c no; here>c")?;
    stage.apply(&policy("odd", "tier: Other, priority: 1, subject: {namespaces: {}}, egress: [{action: Deny, to: [{namespaces: {}}]}]"))?;
    stage.check("an unknown tier has no effect", "a>here; a>c; here>a no")
}

/// Labels change, policies go, and what is denied now is cut.
pub(crate) fn tiers_follow_labels_and_cut() -> Result<()> {
    let mut stage = Stage::open()?;
    let mut open = Probe::tcp(destination("a", WEB, Family::V4)?).open(stage.ns("here")?)?;
    let mut other = Probe::tcp(destination("a", WEB, Family::V6)?).open(stage.ns("there")?)?;
    let deny = "tier: Admin, priority: 1, subject: {namespaces: {matchLabels: {team: red}}}, \
                ingress: [{action: Deny, from: [{pods: {namespaceSelector: {matchLabels: {team: blue}}, podSelector: {}}}]}]";
    stage.apply(&policy("deny", deny))?;
    let started = Instant::now();
    while open.echo(SILENCE).is_ok() {
        ensure!(started.elapsed() < DEADLINE, "a denied connection goes on");
    }
    other.echo(DEADLINE)?;
    stage.check("at first", "here>a no; c>b no; there>a")?;
    stage.cluster.apply(&[namespace("z", "team: blue")?, namespace("y", "")?])?;
    stage.check("other namespaces", "here>a; c>b; there>a no")?;
    let started = Instant::now();
    while other.echo(Duration::from_millis(100)).is_ok() {
        ensure!(
            started.elapsed() < DEADLINE,
            "a connection of a namespace that is denied now goes on"
        );
    }
    let by_label = deny.replace(
        "podSelector: {}",
        "podSelector: {matchLabels: {bad: 'yes'}}",
    );
    stage.apply(&policy("deny", &by_label))?;
    stage.check("by labels of Pods", "there>a; here>a")?;
    let mut there = pod("there")?;
    there["metadata"]["labels"] = json!({"bad": "yes"});
    stage.cluster.apply(&[there])?;
    stage.check("another label", "there>a no; there>b no; here>a")?;
    let accept = by_label.replace("priority: 1", "priority: 0").replace("Deny", "Accept");
    stage.apply(&policy("accept", &accept))?;
    stage.check("an earlier policy", "there>a")?;
    stage.delete(&policy("accept", &accept))?;
    stage.check("without it", "there>a no")?;
    stage.delete(&policy("deny", deny))?;
    stage.check("without policies", "there>a; here>a; c>b")
}
