//! The page `docs/conformance.md`, made of the committed results.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::report::{KPLANE, KUBE_PROXY, Outcome, Run, Spec};
use super::specs::{LEFT_OUT, ONE_FAMILY};

const HEAD: &str = include_str!("head.md");
/// The fact that a person may add to a file of results.
const NOTE: &str = "note";

/// Returns the page.
pub(super) fn render(runs: &[Run]) -> String {
    let mut page = HEAD.to_owned();
    page.push_str("\n## Results\n\n");
    page.push_str(&totals(runs));
    page.push_str("\n## Specs that did not pass at once\n\n");
    page.push_str(&troubles(runs));
    page.push_str("\n## Specs that skip themselves\n\n");
    page.push_str(&skipped(runs));
    page.push_str("\n## What is left out\n\n");
    page.push_str("| Specs whose names match | Reason |\n|---|---|\n");
    for (pattern, reason) in LEFT_OUT.iter().chain([&ONE_FAMILY]) {
        let pattern = pattern.replace('\\', "").replace('|', "` or `");
        line(&mut page, &format!("| `{pattern}` | {reason} |"));
    }
    page
}

/// Returns the specs that fail with kplane and pass with kube-proxy in the same mode.
pub(super) fn worse(runs: &[Run]) -> Vec<String> {
    let mut found = Vec::new();
    for run in runs.iter().filter(|run| run.proxy == KPLANE) {
        let Some(other) = counterpart(runs, run, KUBE_PROXY) else {
            continue;
        };
        for spec in &run.specs {
            let passes = spec_of(other, &spec.name).is_some_and(passes);
            if spec.outcome == Outcome::Failed && passes {
                found.push(format!("{} {}: {}", run.mode, run.families, spec.name));
            }
        }
    }
    found
}

fn totals(runs: &[Run]) -> String {
    let mut text = "\
| Proxy | Mode | Families | Specs | Passed | Passed alone | Failed | Skipped | Nodes | At a time | Minutes | Date |
|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|
"
    .to_owned();
    for run in runs {
        let name = format!("{}-{}-{}", run.proxy, run.mode, run.families).to_lowercase();
        let mut cells = vec![
            format!("[{}](conformance/{name}.tsv)", run.proxy),
            run.mode.clone(),
            run.families.clone(),
            run.specs.len().to_string(),
        ];
        cells.extend(Outcome::ALL.map(|outcome| run.count(outcome).to_string()));
        let facts = ["nodes", "at a time", "minutes", "date"];
        cells.extend(facts.map(|fact| run.fact(fact).to_owned()));
        line(&mut text, &format!("| {} |", cells.join(" | ")));
    }
    let facts = ["kubernetes", "kplane", "kernel"].map(|name| {
        let values: BTreeSet<_> = runs.iter().map(|run| run.fact(name)).collect();
        values.into_iter().collect::<Vec<_>>().join(", ")
    });
    let [kubernetes, kplane, kernel] = facts;
    let versions = format!("\nKubernetes {kubernetes}, kplane {kplane}, Linux {kernel}.");
    line(&mut text, &versions);
    for run in runs.iter().filter(|run| !run.fact(NOTE).is_empty()) {
        let (proxy, mode, families) = (&run.proxy, &run.mode, &run.families);
        let note = format!("\n{proxy}, {mode}, {families}: {}", run.fact(NOTE));
        line(&mut text, &note);
    }
    text
}

/// Returns a table of the specs that failed at first, with the outcomes of both proxies.
fn troubles(runs: &[Run]) -> String {
    let mut rows = String::new();
    for (run, other) in pairs(runs) {
        let bad = |run: &Run| {
            run.specs
                .iter()
                .filter(|spec| matches!(spec.outcome, Outcome::Failed | Outcome::PassedAlone))
                .map(|spec| spec.name.clone())
                .collect::<Vec<_>>()
        };
        let both = [Some(run), other].into_iter().flatten();
        let names: BTreeSet<_> = both.flat_map(bad).collect();
        for name in names {
            let of = |proxy: &str| {
                let found =
                    [Some(run), other].into_iter().flatten().filter(|run| run.proxy == proxy);
                let spec = found.filter_map(|run| spec_of(run, &name)).next();
                spec.map_or("not run", |spec| spec.outcome.text())
            };
            let (mode, families) = (&run.mode, &run.families);
            let (theirs, ours) = (of(KUBE_PROXY), of(KPLANE));
            let row = format!("| {name} | {mode}, {families} | {theirs} | {ours} |");
            line(&mut rows, &row);
        }
    }
    if rows.is_empty() {
        return "None.\n".to_owned();
    }
    format!("| Spec | Mode, families | kube-proxy | kplane |\n|---|---|---|---|\n{rows}")
}

/// Returns a table of the specs that found that they cannot run, with their reasons and the proxies.
fn skipped(runs: &[Run]) -> String {
    let mut rows: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
    for run in runs {
        for spec in run.specs.iter().filter(|it| it.outcome == Outcome::Skipped) {
            let with = format!("{} {} {}", run.proxy, run.mode, run.families);
            let row = rows.entry((&spec.name, &spec.reason)).or_default();
            row.push(with);
        }
    }
    if rows.is_empty() {
        return "None.\n".to_owned();
    }
    let mut text = "| Spec | Reason that it gives | With |\n|---|---|---|\n".to_owned();
    for ((name, reason), with) in rows {
        let with = if with.len() == runs.len() { "all".to_owned() } else { with.join("<br>") };
        let reason = reason.replace('|', "\\|");
        line(&mut text, &format!("| {name} | {reason} | {with} |"));
    }
    text
}

/// Returns each mode once: the first of its runs, and the run of the other proxy, if there is one.
fn pairs(runs: &[Run]) -> Vec<(&Run, Option<&Run>)> {
    let mut pairs: Vec<(&Run, Option<&Run>)> = Vec::new();
    for run in runs {
        let same = |(first, _): &&mut (&Run, Option<&Run>)| {
            first.mode == run.mode && first.families == run.families
        };
        match pairs.iter_mut().find(same) {
            Some((_, other)) => *other = Some(run),
            None => pairs.push((run, None)),
        }
    }
    pairs
}

fn counterpart<'a>(runs: &'a [Run], of: &Run, proxy: &str) -> Option<&'a Run> {
    runs.iter()
        .find(|run| run.proxy == proxy && run.mode == of.mode && run.families == of.families)
}

fn spec_of<'a>(run: &'a Run, name: &str) -> Option<&'a Spec> {
    run.specs.iter().find(|spec| spec.name == name)
}

fn passes(spec: &Spec) -> bool {
    matches!(spec.outcome, Outcome::Passed | Outcome::PassedAlone)
}

fn line(text: &mut String, line: &str) {
    // Writing to a text does not fail.
    let _ = writeln!(text, "{line}");
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::report;
    use super::*;

    fn run(proxy: &str, outcome: Outcome) -> Run {
        Run {
            proxy: proxy.to_owned(),
            mode: "nftables".to_owned(),
            families: report::IPV4.to_owned(),
            facts: Vec::new(),
            specs: vec![Spec {
                name: "a spec".to_owned(),
                outcome,
                seconds: 1,
                reason: String::new(),
            }],
        }
    }

    #[test]
    fn only_what_passes_with_kube_proxy_must_pass() {
        let worse = |theirs, ours| worse(&[run(KUBE_PROXY, theirs), run(KPLANE, ours)]).len();
        assert_eq!(worse(Outcome::Passed, Outcome::Failed), 1);
        assert_eq!(worse(Outcome::Failed, Outcome::Failed), 0);
        assert_eq!(worse(Outcome::Passed, Outcome::PassedAlone), 0);
        let runs = [
            run(KUBE_PROXY, Outcome::Passed),
            run(KPLANE, Outcome::PassedAlone),
        ];
        let row = "| a spec | nftables, IPv4 | passed | passed alone |";
        assert!(render(&runs).contains(row));
    }

    #[test]
    fn the_page_is_made_of_the_committed_results() {
        let root = crate::workspace();
        let runs = report::load(&root.join(super::super::RESULTS)).unwrap();
        let page = fs::read_to_string(root.join(super::super::PAGE)).unwrap();
        assert_eq!(page, render(&runs), "cargo xtask test e2e --page");
        assert_eq!(worse(&runs), [""; 0], "fails with kplane only");
    }
}
