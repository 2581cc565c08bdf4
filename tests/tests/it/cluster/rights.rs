//! The rights that deploy/kubernetes/rbac.yaml gives to control planes are those that they use.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Result, ensure};
use kplane_tests::chart::{find, objects, root};
use serde_json::Value;

use crate::cluster::support::audit::Request;
use crate::cluster::support::with_world;

/// Rights that control planes use too seldom for a test with a real clock: group, resource, verb.
const SELDOM: [[&str; 3]; 1] = [
    // A certificate is renewed after 60 days.
    ["", "secrets", "update"],
];

/// Returns the requests that the rules of a role allow; an empty name stands for all objects.
fn granted(role: &Value) -> Vec<Request> {
    let texts = |value: &Value| -> Vec<String> {
        value
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect()
    };
    let mut granted = Vec::new();
    for rule in role["rules"].as_array().into_iter().flatten() {
        let mut names = texts(&rule["resourceNames"]);
        if names.is_empty() {
            names.push(String::new());
        }
        for group in texts(&rule["apiGroups"]) {
            for resource in texts(&rule["resources"]) {
                for name in &names {
                    for verb in texts(&rule["verbs"]) {
                        granted.push([group.clone(), resource.clone(), name.clone(), verb]);
                    }
                }
            }
        }
    }
    granted
}

fn uses(used: &BTreeSet<Request>, [group, resource, name, verb]: &Request) -> bool {
    used.iter().any(|[of_group, of_resource, of_name, by]| {
        (of_group, of_resource, by) == (group, resource, verb)
            && (name.is_empty() || of_name == name)
    })
}

/// The last test: it looks back at all others.
pub(crate) fn control_planes_use_each_right_that_they_have() -> Result<()> {
    // A run of some tests does not show everything. Options begin with dashes; a filter does not.
    if std::env::args().skip(1).any(|arg| !arg.starts_with('-')) {
        println!("skipped: this needs all tests before it");
        return Ok(());
    }
    let text = fs::read_to_string(root().join("deploy/kubernetes/rbac.yaml"))?;
    let manifests = objects(&text)?;
    with_world(|world| {
        let used = world.audit.allowed()?;
        let mut rights = Vec::new();
        for kind in ["ClusterRole", "Role"] {
            rights.extend(granted(find(&manifests, kind, "kplane-controlplane")?));
        }
        ensure!(rights.len() > 15, "{rights:?}");
        rights.retain(|right| {
            let [group, resource, _, verb] = right.each_ref().map(String::as_str);
            !uses(&used, right) && !SELDOM.contains(&[group, resource, verb])
        });
        ensure!(
            rights.is_empty(),
            "control planes have rights that they do not use: {rights:?}"
        );
        Ok(())
    })
}
