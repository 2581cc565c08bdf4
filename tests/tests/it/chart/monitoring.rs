//! Alerts and dashboards: they use what the programs export, and each alert fires when it must and not otherwise.

pub(super) mod alerts;
mod cases;
pub(super) mod dashboards;
pub(super) mod exported;
pub(super) mod query;
pub(super) mod reference;

use std::fs;

use anyhow::{Context as _, Result};
use kplane_tests::chart::folder;
use serde_json::Value;

/// A rule of the file of alerts.
struct Rule {
    /// The alert's name; empty for a series that is recorded.
    alert: String,
    /// The name of the recorded series; empty for an alert.
    record: String,
    expr: String,
    severity: String,
    annotations: Value,
}

/// Returns the path of the file of alerts.
fn alerts_file() -> std::path::PathBuf {
    folder().join("files/alerts.yaml")
}

/// Returns all rules.
fn rules() -> Result<Vec<Rule>> {
    let text = fs::read_to_string(alerts_file())?;
    let file: Value = serde_saphyr::from_str(&text)?;
    let groups = file["groups"].as_array().context("no groups")?;
    let rules = groups.iter().filter_map(|group| group["rules"].as_array()).flatten();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok(rules
        .map(|rule| Rule {
            alert: text(&rule["alert"]),
            record: text(&rule["record"]),
            expr: text(&rule["expr"]),
            severity: text(&rule["labels"]["severity"]),
            annotations: rule["annotations"].clone(),
        })
        .collect())
}
