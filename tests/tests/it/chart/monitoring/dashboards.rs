//! Dashboards: their panels ask for what the programs export, with the variables that every Grafana fills.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::chart::{find, folder};
use serde_json::Value;

use super::super::chart;
use super::exported::Exported;

/// Returns the files, and the dashboards in them.
fn all() -> Result<Vec<(PathBuf, Value)>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder().join("files/dashboards"))? {
        let path = entry?.path();
        let text = fs::read_to_string(&path)?;
        let dashboard = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        all.push((path, dashboard));
    }
    ensure!(all.len() >= 3, "{all:?}");
    Ok(all)
}

fn panels(dashboard: &Value) -> impl Iterator<Item = &Value> {
    dashboard["panels"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|panel| panel["type"] != "row")
}

fn texts<'a>(of: &'a Value, key: &str) -> Vec<&'a str> {
    of.as_array()
        .into_iter()
        .flatten()
        .filter_map(|one| one[key].as_str())
        .collect()
}

pub(in crate::chart) fn panels_ask_for_what_the_programs_export() -> Result<()> {
    let exported = Exported::get()?;
    for (path, dashboard) in all()? {
        for panel in panels(&dashboard) {
            let title = &panel["title"];
            let exprs = texts(&panel["targets"], "expr");
            let legends = texts(&panel["targets"], "legendFormat");
            ensure!(!exprs.is_empty() && exprs.len() == legends.len(), "{title}");
            for (expr, legend) in exprs.into_iter().zip(legends) {
                let labels =
                    exported.check(expr).with_context(|| format!("{}: {title}", path.display()))?;
                ensure!(expr.contains("cluster=~\"$cluster\""), "{title}: {expr}");
                for text in legend.split("{{").skip(1) {
                    let label = text.split("}}").next().unwrap_or_default();
                    ensure!(labels.contains(label), "{title}: {legend} of {labels:?}");
                }
            }
        }
        let variables = dashboard["templating"]["list"].as_array();
        for variable in variables.into_iter().flatten() {
            if let Some(query) = variable["query"]["query"].as_str() {
                let inside = query.strip_prefix("label_values(").context("no label")?;
                let (series, label) = inside.rsplit_once(',').context("no label")?;
                let labels = exported.check(series)?;
                let label = label.trim_matches([' ', ')']);
                ensure!(labels.contains(label), "{query}");
            }
        }
    }
    Ok(())
}

/// A data source with a fixed name works nowhere else.
pub(in crate::chart) fn every_panel_has_the_datasource_of_the_variable() -> Result<()> {
    let mut uids = BTreeSet::new();
    for (path, dashboard) in all()? {
        let shown = path.display();
        let names = texts(&dashboard["templating"]["list"], "name");
        ensure!(names.starts_with(&["datasource", "cluster"]), "{shown}");
        let uid = dashboard["uid"].as_str().context("no uid")?.to_owned();
        let name = path.file_stem().context("no name")?.to_string_lossy();
        ensure!(uid == name && uids.insert(uid), "{shown}");
        let mut ids = BTreeSet::new();
        for panel in panels(&dashboard) {
            let title = panel["title"].as_str().context("no title")?;
            ensure!(ids.insert(panel["id"].as_u64()), "{shown}: {title}: id");
            let text = panel["description"].as_str().unwrap_or_default();
            ensure!(text.ends_with('.'), "{shown}: {title} has no description");
            let targets = panel["targets"].as_array().into_iter().flatten();
            for with_source in targets.chain([panel]) {
                let source = &with_source["datasource"]["uid"];
                ensure!(source == "$datasource", "{shown}: {title}: {source}");
            }
        }
    }
    Ok(())
}

pub(in crate::chart) fn the_chart_has_every_dashboard_in_a_config_map() -> Result<()> {
    let chart = chart()?;
    let objects = chart.objects(&["monitoring.dashboards.enabled=true"])?;
    for (path, dashboard) in all()? {
        let file = path.file_name().context("no name")?.to_string_lossy();
        let name = format!("{}-dashboard", file.trim_end_matches(".json"));
        let map = find(&objects, "ConfigMap", &name)?;
        let labels = &map["metadata"]["labels"];
        ensure!(labels["grafana_dashboard"] == "1", "{labels}");
        let text = map["data"][&*file].as_str().context("no dashboard")?;
        let inside: Value = serde_json::from_str(text)?;
        ensure!(inside == dashboard, "{name} differs from {file}");
    }
    Ok(())
}
