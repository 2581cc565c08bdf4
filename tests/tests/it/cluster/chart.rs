//! The Helm chart at a real API server: every object of every combination of values passes its validation, defaults and
//! admission, as a dry run.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use http::Method;
use kplane_rig::cluster::helm;
use kplane_tests::chart::{Chart, MONITORING, combinations, folder};
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
        let accepted = said.lines().filter(|line| line.ends_with("(server dry run)"));
        ensure!(accepted.count() == objects.len(), "{said}");
        // The check can fail.
        let daemon_set = objects
            .iter()
            .find(|object| object.contains("\"DaemonSet\""))
            .context("no DaemonSet")?;
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

pub(crate) fn pods_with_the_label_get_a_hook() -> Result<()> {
    let chart = Chart::open()?;
    let rendered = chart.objects(&["preStop.enabled=true"])?;
    let is_policy = |object: &&Value| {
        let kind = object["kind"].as_str();
        kind.is_some_and(|kind| kind.starts_with("MutatingAdmissionPolicy"))
    };
    let policies: Vec<_> = rendered.iter().filter(is_policy).collect();
    ensure!(policies.len() == 2, "{policies:?}");
    let resources = [
        "mutatingadmissionpolicies",
        "mutatingadmissionpolicybindings",
    ];
    let folder = "/apis/admissionregistration.k8s.io/v1";
    let own = json!({"preStop": {"exec": {"command": ["true"]}}});
    let pod = |label: &str, host: bool, grace: u64| {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"generateName": "drain-", "namespace": "default", "labels": {"kplane.io/drain": label}},
            "spec": {"hostNetwork": host, "terminationGracePeriodSeconds": grace, "containers": [
                {"name": "one", "image": "one"},
                {"name": "other", "image": "other", "lifecycle": own},
            ]},
        })
    };
    let hook = |path: &str| json!({"httpGet": {"path": path, "port": 7468, "scheme": "HTTP"}});
    with_world(|world| {
        let create = |label: &str, host: bool, grace: u64| {
            let path = "/api/v1/namespaces/default/pods?dryRun=All";
            let made = world.api().request(Method::POST, path, Some(&pod(label, host, grace)))?;
            let hook = |n: usize| made["spec"]["containers"][n]["lifecycle"]["preStop"].clone();
            Ok::<_, anyhow::Error>([hook(0), hook(1)])
        };
        for (resource, policy) in resources.iter().zip(&policies) {
            let path = format!("{folder}/{resource}");
            world.api().request(Method::POST, &path, Some(policy))?;
        }
        eventually(DEADLINE, "Pods get the hook", || {
            match create("true", false, 30)? {
                [first, second] if first == hook("/gone") && second == own["preStop"] => Ok(()),
                others => Err(anyhow::anyhow!("{others:?}")),
            }
        })?;
        // The hook of a Pod that has little time leaves some of it for the end.
        for (grace, path) in [
            (20, "/gone"),
            (7, "/gone?within=3s"),
            (0, "/gone?within=0s"),
        ] {
            let [first, _] = create("true", false, grace)?;
            ensure!(first == hook(path), "{grace}: {first}");
        }
        for (label, host) in [("false", false), ("true", true)] {
            let [first, second] = create(label, host, 30)?;
            ensure!(
                first == Value::Null && second == own["preStop"],
                "{label}: {first}"
            );
        }
        for resource in resources {
            let path = format!("{folder}/{resource}/kplane-drain");
            world.api().request(Method::DELETE, &path, None)?;
        }
        Ok(())
    })
}

/// K34: kubeadm 1.37 writes `mode: iptables` into a file that named no mode, and the next upgrade copies it.
pub(crate) fn k34_an_upgrade_keeps_the_mode_that_agents_have() -> Result<()> {
    with_world(|world| {
        let put = |namespace: &str, name: &str, mode: &str| {
            let text = format!(
                "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n\
                 clusterCIDR: 10.244.0.0/16\n{mode}"
            );
            world.api().apply(&json!({
                "apiVersion": "v1", "kind": "ConfigMap",
                "metadata": { "namespace": namespace, "name": name },
                "data": { "config.conf": text },
            }))
        };
        let mode = |settings: &[&str]| -> Result<Value> {
            let mut helm = Command::new(helm()?);
            helm.args([
                "template",
                "kplane",
                "--namespace",
                "kplane",
                "--dry-run=server",
                // Other tests leave objects, which an installation would not take over.
                "--is-upgrade",
            ])
            .arg("--kubeconfig")
            .arg(world.cluster.kubeconfig())
            .args(["--set", "agent.kubeProxyConfig.copyFrom.name=kube-proxy"])
            .args(["--show-only", "templates/nodeagent-config.yaml"]);
            for setting in settings {
                helm.args(["--set", setting]);
            }
            helm.arg(folder());
            let said = world.cluster.ns().output(helm)?;
            let map: Value = serde_saphyr::from_str(&said)?;
            let text = map["data"]["config.conf"].as_str().context("no file")?;
            let mut file: Value = serde_saphyr::from_str(text)?;
            ensure!(file["clusterCIDR"] == "10.244.0.0/16", "{text}");
            Ok(file["mode"].take())
        };
        world.api().apply(&json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "kplane" },
        }))?;
        put("kube-system", "kube-proxy", "mode: iptables\n")?;
        ensure!(
            mode(&[])? == "iptables",
            "an installation takes the file as it is"
        );
        put("kplane", "kplane-kube-proxy-config", "mode: \"\"\n")?;
        ensure!(mode(&[])? == "nftables", "an upgrade keeps what agents had");
        ensure!(
            mode(&["agent.backend=iptables"])? == "iptables",
            "the operator chose"
        );
        put("kplane", "kplane-kube-proxy-config", "mode: iptables\n")?;
        put("kube-system", "kube-proxy", "")?;
        ensure!(mode(&[])? == "iptables", "also the other way round");
        put("kube-system", "kube-proxy", "mode: iptables\n")?;
        ensure!(mode(&[])? == "iptables", "the same mode");
        for (namespace, name) in [
            ("kplane", "kplane-kube-proxy-config"),
            ("kube-system", "kube-proxy"),
        ] {
            let path = format!("/api/v1/namespaces/{namespace}/configmaps/{name}");
            world.api().request(Method::DELETE, &path, None)?;
        }
        Ok(())
    })
}
