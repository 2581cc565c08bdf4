//! The Helm chart at a real API server: every object of every combination of values passes its validation, defaults and
//! admission, as a dry run.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use http::Method;
use kplane_tests::chart::{Chart, MONITORING, combinations};
use kplane_tests::cluster::Api;
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use crate::cluster::support::{World, with_world};

/// Longest wait until the API server serves a kind that was just defined.
const DEADLINE: Duration = Duration::from_secs(30);

/// Where the API server has definitions of kinds.
const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";

/// Lets the API server check these objects without keeping them.
fn dry_run(world: &World, objects: &BTreeSet<String>) -> Result<String> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("objects.yaml");
    // JSON is YAML.
    let all: Vec<&str> = objects.iter().map(String::as_str).collect();
    fs::write(&file, all.join("\n---\n"))?;
    let mut kubectl = world.cluster.programs().command("kubectl");
    kubectl
        .arg("--kubeconfig")
        .arg(world.cluster.kubeconfig())
        .args(["apply", "--server-side", "--dry-run=server"])
        .args(["--validate=strict", "--force-conflicts", "--filename"])
        .arg(file);
    world.cluster.ns().output(kubectl)
}

/// The kinds of the Prometheus operator that the chart uses, and their plurals.
const OPERATORS: [(&str, &str); 3] = [
    ("PodMonitor", "podmonitors"),
    ("PrometheusRule", "prometheusrules"),
    ("ServiceMonitor", "servicemonitors"),
];

/// Defines a kind of the Prometheus operator, without a schema.
fn define(api: &Api, kind: &str, plural: &str) -> Result<()> {
    let group = "monitoring.coreos.com";
    let definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{plural}.{group}") },
        "spec": {
            "group": group, "scope": "Namespaced",
            "names": { "kind": kind, "plural": plural },
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "schema": { "openAPIV3Schema": {
                    "type": "object", "x-kubernetes-preserve-unknown-fields": true,
                } },
            }],
        },
    });
    api.request(Method::POST, DEFINITIONS, Some(&definition))?;
    eventually(DEADLINE, &format!("the API server serves {plural}"), || {
        let path = format!("/apis/{group}/v1/namespaces/kplane/{plural}");
        api.request(Method::GET, &path, None).map(drop)
    })
}

pub(crate) fn the_api_server_accepts_every_combination_of_values() -> Result<()> {
    let chart = Chart::open()?;
    let mut combinations = combinations();
    combinations.extend(MONITORING.map(<[&str]>::to_vec));
    let mut objects = BTreeSet::new();
    for settings in &combinations {
        let rendered = chart.objects(settings)?;
        ensure!(rendered.len() > 8, "{settings:?}: {}", rendered.len());
        objects.extend(rendered.iter().map(Value::to_string));
    }
    with_world(|world| {
        for (kind, plural) in OPERATORS {
            define(world.api(), kind, plural)?;
        }
        let said = dry_run(world, &objects)?;
        let accepted = said
            .lines()
            .filter(|line| line.ends_with("(server dry run)"));
        ensure!(accepted.count() == objects.len(), "{said}");
        // The check can fail.
        let daemon_set = objects
            .iter()
            .find(|object| object.contains("\"DaemonSet\""));
        let daemon_set = daemon_set.context("no DaemonSet")?;
        let broken = daemon_set.replace("\"readOnlyRootFilesystem\"", "\"readOnlyRoot\"");
        ensure!(
            dry_run(world, &BTreeSet::from([broken])).is_err(),
            "a misspelt field is accepted"
        );
        for (_, plural) in OPERATORS {
            let own = format!("{DEFINITIONS}/{plural}.monitoring.coreos.com");
            world.api().request(Method::DELETE, &own, None)?;
        }
        Ok(())
    })
}
