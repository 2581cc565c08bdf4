//! The values: each has a description, a type, and a default that Helm accepts; unknown ones are refused.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::chart::folder;
use serde_json::Value;

use super::chart;

/// Adds the paths of all values that the schema describes, and checks their descriptions.
fn described(schema: &Value, path: &str, into: &mut BTreeSet<String>) -> Result<()> {
    let properties = schema["properties"].as_object();
    for (name, value) in properties.into_iter().flatten() {
        let path = format!("{path}.{name}");
        let text = value["description"].as_str().unwrap_or_default();
        ensure!(text.ends_with('.'), "{path} has no description");
        if value["properties"].is_object() {
            let closed = value["additionalProperties"] == false;
            ensure!(closed, "{path} accepts misspelt values");
            described(value, &path, into)?;
        } else {
            into.insert(path);
        }
    }
    Ok(())
}

/// Adds the paths of all values of the file, as deep as the schema goes.
fn present(values: &Value, schema: &Value, path: &str, into: &mut BTreeSet<String>) {
    for (name, value) in values.as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        let schema = &schema["properties"][name];
        if schema["properties"].is_object() {
            present(value, schema, &path, into);
        } else {
            into.insert(path);
        }
    }
}

pub(in crate::chart) fn the_schema_and_the_file_have_the_same_values() -> Result<()> {
    let schema = fs::read_to_string(folder().join("values.schema.json"))?;
    let schema: Value = serde_json::from_str(&schema)?;
    let values = fs::read_to_string(folder().join("values.yaml"))?;
    let values: Value = serde_saphyr::from_str(&values)?;
    let (mut in_schema, mut in_file) = (BTreeSet::new(), BTreeSet::new());
    described(&schema, "", &mut in_schema)?;
    present(&values, &schema, "", &mut in_file);
    // For charts above this one, which give it by the name of the dependency.
    ensure!(in_schema.remove(".enabled"), "{in_schema:?}");
    let differ: Vec<_> = in_schema.symmetric_difference(&in_file).collect();
    ensure!(differ.is_empty(), "in one place only: {differ:?}");
    ensure!(in_file.len() > 50, "{}", in_file.len());
    Ok(())
}

/// Each line with a value has a comment above it, unless it begins a group.
pub(in crate::chart) fn every_value_is_documented_in_the_file() -> Result<()> {
    let text = fs::read_to_string(folder().join("values.yaml"))?;
    let schema = fs::read_to_string(folder().join("values.schema.json"))?;
    let schema: Value = serde_json::from_str(&schema)?;
    let mut groups: Vec<(usize, &str)> = Vec::new();
    let mut before = "";
    for line in text.lines() {
        let depth = line.len() - line.trim_start().len();
        let name = line.trim_start().split_once(':').map(|(name, _)| name);
        let is_name = |name: &&str| name.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if let Some(name) = name.filter(is_name) {
            groups.retain(|(of_group, _)| *of_group < depth);
            let found = groups.iter().try_fold(&schema, |found, (_, group)| {
                found["properties"].get(group).context("no such group")
            });
            // Lines of lists and of free objects are not in the schema.
            let value = found.ok().and_then(|found| found["properties"].get(name));
            if let Some(value) = value {
                let is_group = value["properties"].is_object();
                let has_comment = before.trim_start().starts_with('#');
                ensure!(is_group || has_comment, "{line} has no comment above it");
                groups.push((depth, name));
            }
        }
        before = line;
    }
    Ok(())
}

pub(in crate::chart) fn what_is_no_value_or_contradicts_another_is_refused() -> Result<()> {
    let chart = chart()?;
    chart.objects(&["global.anything=1", "enabled=true"])?;
    for (settings, reason) in [
        (
            &["agent.bakend=nftables"][..],
            "additional properties 'bakend' not allowed",
        ),
        (&["agent.backend=ebpf"], "value must be one of"),
        (&["controlPlane.drain=1000"], "maximum"),
        (&["agent.clusterCIDR=banana"], "does not match pattern"),
        (&["agent.clusterCIDR=10.244.0.0"], "does not match pattern"),
        (
            &["agent.backend=iptables", "agent.variant=plain"],
            "mode iptables needs the image with iptables",
        ),
        (
            &[
                "agent.kubeProxyConfig.inline=mode: nftables",
                "agent.clusterCIDR=10.0.0.0/8",
            ],
            "agent.clusterCIDR is not for agent.kubeProxyConfig",
        ),
        (
            &[
                "agent.kubeProxyConfig.inline=a: b",
                "agent.kubeProxyConfig.existingConfigMap=c",
            ],
            "give one of inline, existingConfigMap and copyFrom.name",
        ),
        (
            &["agent.kubeProxyConfig.copyFrom.name=kube-proxy"],
            "there is no ConfigMap kube-system/kube-proxy",
        ),
    ] {
        let refused = chart.objects(settings).err().context("it is accepted")?;
        let refused = format!("{refused:#}");
        ensure!(refused.contains(reason), "{settings:?}: {refused}");
    }
    Ok(())
}

pub(in crate::chart) fn helm_has_no_complaint() -> Result<()> {
    let chart = chart()?;
    let folder = folder();
    let said = chart.helm(&["lint", "--strict", &folder.to_string_lossy()])?;
    ensure!(
        said.contains("1 chart(s) linted, 0 chart(s) failed"),
        "{said}"
    );
    Ok(())
}
