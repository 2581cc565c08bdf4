//! One test per rule, with the rule's id in its name. Objects are written as operators write them.

use kplane_model::Issue;
use serde::de::DeserializeOwned;

mod addresses;
mod cluster;
mod cyclonus;
mod policy;
mod ports;
mod proxied;
mod service;
mod slice;
mod tiers;

fn yaml<T: DeserializeOwned>(text: &str) -> T {
    serde_saphyr::from_str(text).unwrap()
}

/// Formats issues as the operator sees them.
fn lines(issues: &[Issue]) -> Vec<String> {
    issues.iter().map(|issue| format!("{}: {issue}", issue.severity)).collect()
}
