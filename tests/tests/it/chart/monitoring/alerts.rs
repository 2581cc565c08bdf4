//! Alerts: their names, their pages and their tests.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use kplane_rig::cluster::promtool;
use kplane_tests::chart::{find, root};
use kplane_tests::privilege;
use kplane_tests::process::output;
use kplane_tests::product::Product;
use serde_json::{Value, json};

use super::super::chart;
use super::cases::{Series, cases};
use super::exported::Exported;
use super::{alerts_file, rules};

/// The place of the runbooks.
const PAGE: &str = "https://github.com/kplane/kplane/blob/main/docs/alerts.md#";
/// The severities that an alert may have.
const SEVERITIES: [&str; 3] = ["critical", "info", "warning"];

pub(in crate::chart) fn expressions_and_texts_use_what_the_programs_export() -> Result<()> {
    let exported = Exported::get()?;
    for rule in rules()? {
        let labels = exported
            .check(&rule.expr)
            .with_context(|| format!("{}{}", rule.alert, rule.record))?;
        let texts = rule.annotations.to_string();
        for text in texts.split("$labels.").skip(1) {
            let label = text
                .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                .next()
                .unwrap_or_default();
            ensure!(labels.contains(label), "{}: no {label}", rule.alert);
        }
    }
    Ok(())
}

/// Each section has the four parts, and one command of kpctl, which the program accepts.
pub(in crate::chart) fn every_alert_has_a_page_with_a_command() -> Result<()> {
    let kpctl = Product::build()?.kpctl;
    let page = fs::read_to_string(root().join("docs/alerts.md"))?;
    let sections: Vec<(&str, &str)> = page
        .split("\n### ")
        .skip(1)
        .filter_map(|section| section.split_once('\n'))
        .collect();
    let mut documented: BTreeSet<&str> = sections.iter().map(|(name, _)| *name).collect();
    for rule in rules()?.iter().filter(|rule| !rule.alert.is_empty()) {
        let name = &*rule.alert;
        ensure!(SEVERITIES.contains(&&*rule.severity), "{name}: severity");
        let url = rule.annotations["runbook_url"].as_str();
        let anchor = format!("{PAGE}{}", name.to_lowercase());
        ensure!(url == Some(&anchor), "{name}: {url:?}");
        for part in ["summary", "description"] {
            let text = rule.annotations[part].as_str().unwrap_or_default();
            ensure!(text.ends_with('.'), "{name}: no {part}");
        }
        ensure!(documented.remove(name), "docs/alerts.md has no {name}");
        let section = sections.iter().find(|(title, _)| *title == name).context("no section")?.1;
        for part in ["**Means:**", "**Users see:**", "**Fix:**"] {
            ensure!(section.contains(part), "{name}: no {part}");
        }
        let severity = format!("Severity: {}.", rule.severity);
        ensure!(section.contains(&severity), "{name}: not {severity}");
        let commands: Vec<&str> =
            section.lines().filter_map(|l| l.strip_prefix("    kpctl ")).collect();
        ensure!(commands.len() == 1, "{name}: {commands:?}");
        let mut program = Command::new(&kpctl);
        program.args(commands[0].split(' ')).arg("--help");
        output(program).with_context(|| format!("{name}: kpctl {}", commands[0]))?;
    }
    ensure!(documented.is_empty(), "no such alerts: {documented:?}");
    Ok(())
}

pub(in crate::chart) fn prometheus_accepts_the_rules() -> Result<()> {
    let promtool = privilege::needed(promtool())?;
    let check = |file: &Path| {
        let mut command = Command::new(&promtool);
        command.args(["check", "rules", "--lint=all", "--lint-fatal"]);
        command.arg(file);
        output(command)
    };
    check(&alerts_file())?;
    // The check can fail.
    let folder = tempfile::tempdir()?;
    let broken = folder.path().join("alerts.yaml");
    let text = fs::read_to_string(alerts_file())?;
    fs::write(&broken, text.replacen("sum by", "sum buy", 1))?;
    ensure!(check(&broken).is_err(), "a broken expression is accepted");
    Ok(())
}

/// Returns a series with the labels of its target, for promtool.
fn series((name, values): &Series) -> Value {
    let (name, target) = name.split_once('@').unwrap_or_default();
    let job = if target.starts_with('n') {
        "kplane/kplane-nodeagent"
    } else {
        "kplane-controlplane"
    };
    let labels = format!("namespace=\"kplane\",job=\"{job}\",instance=\"{target}\"");
    let series = match name.strip_suffix('}') {
        Some(open) => format!("{open},{labels}}}"),
        None => format!("{name}{{{labels}}}"),
    };
    json!({ "series": series, "values": values })
}

/// Returns a test of promtool: with these differences from a healthy cluster, these alerts fire and no others.
fn scenario(
    name: &str,
    healthy: &[Series],
    (differ, minute): (&[Series], u32),
    firing: &[&str],
) -> Value {
    let same = |one: &&Series| differ.iter().all(|other| other.0 != one.0);
    let input = healthy.iter().filter(same).chain(differ).map(series);
    let expected = firing
        .iter()
        .map(|alert| json!({ "labels": format!("{{alertname=\"{alert}\"}}"), "value": 1 }));
    json!({
        "name": name,
        "interval": "1m",
        "input_series": input.collect::<Vec<_>>(),
        "promql_expr_test": [{
            "expr": "group by (alertname) (ALERTS{alertstate=\"firing\"})",
            "eval_time": format!("{minute}m"),
            "exp_samples": expected.collect::<Vec<_>>(),
        }],
    })
}

/// Runs tests of promtool; JSON is YAML.
fn test(promtool: &Path, tests: &[Value]) -> Result<String> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("tests.yaml");
    let all = json!({ "rule_files": [alerts_file()], "evaluation_interval": "1m", "tests": tests });
    fs::write(&file, all.to_string())?;
    let mut command = Command::new(promtool);
    command.args(["test", "rules"]).arg(file);
    let said = command.output().context("start promtool")?;
    let text = String::from_utf8_lossy(&[said.stdout, said.stderr].concat()).into_owned();
    ensure!(said.status.success(), "{text}");
    Ok(text)
}

pub(in crate::chart) fn every_alert_fires_alone_and_only_when_it_must() -> Result<()> {
    let promtool = privilege::needed(promtool())?;
    let rules = rules()?;
    let alerts: Vec<&str> = rules.iter().map(|rule| &*rule.alert).collect();
    let alerts: Vec<&str> = alerts.into_iter().filter(|alert| !alert.is_empty()).collect();
    let (healthy, cases) = cases()?;
    let tested: Vec<&str> = cases.iter().map(|case| case.alert).collect();
    ensure!(tested == alerts, "{tested:?} of {alerts:?}");
    let test_of = |name: &str, (differ, minute): &(Vec<Series>, u32), firing: &[&str]| {
        scenario(name, &healthy, (differ, *minute), firing)
    };
    let mut tests = vec![test_of("healthy", &(vec![], 1_900), &[])];
    for case in &cases {
        let name = case.alert;
        tests.push(test_of(&format!("{name} fires"), &case.fires, &[name]));
        tests.push(test_of(&format!("{name} is quiet"), &case.quiet, &[]));
    }
    test(&promtool, &tests)?;
    // The tests can fail.
    let wrong = test_of("wrong", &(vec![], 30), &["KplaneAgentLost"]);
    ensure!(test(&promtool, &[wrong]).is_err(), "a wrong test succeeds");
    Ok(())
}

/// Every series of a healthy cluster is one that the programs export, or the tests prove nothing.
pub(in crate::chart) fn the_cases_have_series_that_exist() -> Result<()> {
    let exported = Exported::get()?;
    let (healthy, cases) = cases()?;
    let differ = cases.iter().flat_map(|case| &case.fires.0);
    for (name, _) in healthy.iter().chain(differ) {
        let name = name.split('@').next().unwrap_or_default();
        // Values of free labels are examples.
        let names_only = ["version", "source", "backend", "verb", "reason", "le"];
        let is_free = names_only.iter().any(|label| name.contains(&format!("{label}=")));
        if is_free {
            exported.check(name.split('{').next().unwrap_or_default())?
        } else {
            exported.check(name)?
        };
    }
    Ok(())
}

pub(in crate::chart) fn the_chart_has_all_alerts_but_those_that_are_left_out() -> Result<()> {
    let chart = chart()?;
    let on = "monitoring.prometheusRule.enabled=true";
    let all: BTreeSet<String> = rules()?.into_iter().map(|rule| rule.alert).collect();
    let rendered = |settings: &[&str]| -> Result<BTreeSet<String>> {
        let objects = chart.objects(settings)?;
        let rule = find(&objects, "PrometheusRule", "kplane")?;
        let groups = rule["spec"]["groups"].as_array().context("no groups")?;
        Ok(groups
            .iter()
            .filter_map(|group| group["rules"].as_array())
            .flatten()
            .map(|rule| rule["alert"].as_str())
            .map(|name| name.unwrap_or_default().to_owned())
            .collect())
    };
    let without = |names: &[&str]| -> BTreeSet<String> {
        all.iter().filter(|name| !names.contains(&&***name)).cloned().collect()
    };
    ensure!(chart.objects(&[])?.iter().all(|o| o["kind"] != "PrometheusRule"));
    ensure!(rendered(&[on])? == all);
    let disabled = "monitoring.prometheusRule.disabled={KplaneNodesFrozen}";
    ensure!(rendered(&[on, disabled])? == without(&["KplaneNodesFrozen"]));
    let during = rendered(&[on, "migration.enabled=true"])?;
    ensure!(during == without(&["KplaneNodeWithoutAgent"]));
    let unknown = "monitoring.prometheusRule.disabled={KplaneNone}";
    let refused = chart.objects(&[on, unknown]).err().context("accepted")?;
    let refused = format!("{refused:#}");
    ensure!(
        refused.contains("there is no alert KplaneNone"),
        "{refused}"
    );
    Ok(())
}

/// Helm writes expressions and texts as they are in the file.
pub(in crate::chart) fn rules_come_through_helm_unchanged() -> Result<()> {
    let chart = chart()?;
    let objects = chart.objects(&["monitoring.prometheusRule.enabled=true"])?;
    let rule = find(&objects, "PrometheusRule", "kplane")?;
    let file: Value = serde_saphyr::from_str(&fs::read_to_string(alerts_file())?)?;
    ensure!(rule["spec"]["groups"] == file["groups"], "{rule}");
    Ok(())
}
