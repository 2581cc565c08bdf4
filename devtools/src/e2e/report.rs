//! Results: read from Ginkgo's report, written to and read from the files in `docs/conformance`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;

pub(super) const KPLANE: &str = "kplane";
pub(super) const KUBE_PROXY: &str = "kube-proxy";
pub(super) const IPV4: &str = "IPv4";
pub(super) const DUAL_STACK: &str = "dual-stack";
/// Longest reason of a result, in characters.
const LONGEST: usize = 160;

/// How a spec ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Passed,
    /// Failed among others, and passed when it ran again alone.
    PassedAlone,
    Failed,
    /// The spec itself found that it cannot run here.
    Skipped,
}

impl Outcome {
    pub(super) const ALL: [Self; 4] =
        [Self::Passed, Self::PassedAlone, Self::Failed, Self::Skipped];

    /// Returns the outcome as files and the page have it.
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::PassedAlone => "passed alone",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        }
    }
}

/// A spec that was run.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Spec {
    pub(super) name: String,
    pub(super) outcome: Outcome,
    pub(super) seconds: u64,
    /// The reason of a failure or a skip; empty for others.
    pub(super) reason: String,
}

/// The specs of one proxy in one mode.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Run {
    pub(super) proxy: String,
    pub(super) mode: String,
    pub(super) families: String,
    /// What a reader must know to judge the results, by name.
    pub(super) facts: Vec<(String, String)>,
    pub(super) specs: Vec<Spec>,
}

impl Run {
    /// Returns the number of specs with an outcome.
    pub(super) fn count(&self, outcome: Outcome) -> usize {
        self.specs.iter().filter(|spec| spec.outcome == outcome).count()
    }

    /// Returns a fact; empty if it is not there.
    pub(super) fn fact(&self, name: &str) -> &str {
        self.facts.iter().find(|(it, _)| it == name).map_or("", |(_, value)| value)
    }

    /// Returns a line with the numbers.
    pub(super) fn summary(&self) -> String {
        let mut line = format!("{} {} {}:", self.proxy, self.mode, self.families);
        for outcome in Outcome::ALL {
            // Writing to a text does not fail.
            let _ = write!(line, " {} {},", self.count(outcome), outcome.text());
        }
        let failed = self.specs.iter().filter(|spec| spec.outcome == Outcome::Failed);
        for spec in failed {
            let _ = write!(line, "\nfailed: {}: {}", spec.name, spec.reason);
        }
        line
    }

    /// Writes the file of this proxy, mode and families.
    ///
    /// # Errors
    /// The folder is not writable.
    pub(super) fn save(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        let file = format!("{}-{}-{}.tsv", self.proxy, self.mode, self.families).to_lowercase();
        let path = folder.join(file);
        fs::write(&path, self.to_text()).with_context(|| format!("write {}", path.display()))
    }

    fn to_text(&self) -> String {
        let mut text = String::new();
        let own = [
            ("proxy", &self.proxy),
            ("mode", &self.mode),
            ("families", &self.families),
        ];
        let facts = self.facts.iter().map(|(name, value)| (&**name, value));
        for (name, value) in own.into_iter().chain(facts) {
            let _ = writeln!(text, "# {name}: {value}");
        }
        for spec in &self.specs {
            let (outcome, name) = (spec.outcome.text(), &spec.name);
            let _ = write!(text, "{outcome}\t{}\t{name}", spec.seconds);
            let separator = if spec.reason.is_empty() { "" } else { "\t" };
            let _ = writeln!(text, "{separator}{}", spec.reason);
        }
        text
    }

    fn from_text(text: &str) -> Result<Self> {
        let mut facts = Vec::new();
        let mut specs = Vec::new();
        for line in text.lines() {
            if let Some(fact) = line.strip_prefix("# ") {
                let (name, value) = fact.split_once(": ").context("a fact has a value")?;
                facts.push((name.to_owned(), value.to_owned()));
                continue;
            }
            let mut fields = line.split('\t');
            let mut next = || fields.next().unwrap_or_default();
            let (outcome, seconds, name) = (next(), next(), next());
            let known = Outcome::ALL.into_iter().find(|it| it.text() == outcome);
            specs.push(Spec {
                name: name.to_owned(),
                outcome: known.with_context(|| format!("there is no outcome {outcome:?}"))?,
                seconds: seconds.parse().context("a number of seconds")?,
                reason: next().to_owned(),
            });
        }
        let mut own = facts.drain(..3.min(facts.len())).map(|(_, value)| value);
        let mut next = || own.next().context("proxy, mode or families are missing");
        let (proxy, mode, families) = (next()?, next()?, next()?);
        drop(own);
        Ok(Self {
            proxy,
            mode,
            families,
            facts,
            specs,
        })
    }
}

/// Reads all files of a folder, kube-proxy's and nftables' first.
///
/// # Errors
/// A file cannot be understood.
pub(super) fn load(folder: &Path) -> Result<Vec<Run>> {
    let mut runs = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let run = Run::from_text(&text).with_context(|| path.display().to_string())?;
        runs.push(run);
    }
    let first = |text: &str, first: &str| text != first;
    runs.sort_by_key(|run| {
        (
            first(&run.families, IPV4),
            first(&run.mode, "nftables"),
            first(&run.proxy, KUBE_PROXY),
        )
    });
    Ok(runs)
}

/// Ginkgo's report of a suite (`types.Report`).
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Suite {
    spec_reports: Vec<Entry>,
}

/// Ginkgo's report of a spec, or of what runs before and after all (`types.SpecReport`).
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    #[serde(default)]
    container_hierarchy_texts: Option<Vec<String>>,
    leaf_node_type: String,
    leaf_node_text: String,
    state: String,
    /// In nanoseconds.
    #[serde(default)]
    run_time: u64,
    #[serde(default)]
    failure: Option<Failure>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Failure {
    #[serde(default)]
    message: String,
}

/// Reads a report: the specs that were selected, by name.
///
/// # Errors
/// The file is no report, or the suite has failed before any spec.
pub(super) fn parse(file: &Path) -> Result<Vec<Spec>> {
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let suites: Vec<Suite> =
        serde_json::from_str(&text).with_context(|| format!("{}", file.display()))?;
    let mut specs = BTreeMap::new();
    for entry in suites.into_iter().flat_map(|suite| suite.spec_reports) {
        let reason = reason(&entry);
        let outcome = match &*entry.state {
            "passed" => Outcome::Passed,
            // Specs that were not selected have no reason.
            "skipped" if reason.is_empty() => continue,
            "skipped" => Outcome::Skipped,
            "pending" => continue,
            _ => Outcome::Failed,
        };
        if entry.leaf_node_type != "It" {
            let what = &entry.leaf_node_type;
            ensure!(outcome != Outcome::Failed, "{what} has failed: {reason}");
            continue;
        }
        let mut words = entry.container_hierarchy_texts.unwrap_or_default();
        words.push(entry.leaf_node_text);
        let name = words.join(" ");
        let spec = Spec {
            name: name.clone(),
            outcome,
            seconds: entry.run_time / 1_000_000_000,
            reason,
        };
        specs.insert(name, spec);
    }
    if specs.is_empty() {
        bail!("no spec was selected");
    }
    Ok(specs.into_values().collect())
}

/// Returns the reason of an entry's state, on one line.
fn reason(entry: &Entry) -> String {
    let message = entry.failure.as_ref().map(|failure| &*failure.message);
    let words: Vec<_> = message.unwrap_or_default().split_whitespace().collect();
    words.join(" ").chars().take(LONGEST).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"[{"SpecReports":[
        {"ContainerHierarchyTexts":null,"LeafNodeType":"SynchronizedBeforeSuite","LeafNodeText":"","State":"passed"},
        {"ContainerHierarchyTexts":["[sig-network] Services"],"LeafNodeType":"It","LeafNodeText":"b","State":"failed",
         "RunTime":2500000000,"Failure":{"Message":"no\n  answer"}},
        {"ContainerHierarchyTexts":["[sig-network] Services"],"LeafNodeType":"It","LeafNodeText":"a","State":"passed"},
        {"ContainerHierarchyTexts":["[sig-network] Services"],"LeafNodeType":"It","LeafNodeText":"c","State":"skipped",
         "Failure":{"Message":"needs a cloud"}},
        {"ContainerHierarchyTexts":["[sig-node] Pods"],"LeafNodeType":"It","LeafNodeText":"d","State":"skipped"}]}]"#;

    #[test]
    fn a_report_is_read_and_its_file_written_and_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("report.json");
        fs::write(&file, REPORT).unwrap();
        let specs = parse(&file).unwrap();
        let names: Vec<_> = specs.iter().map(|spec| &*spec.name).collect();
        let services = |name| format!("[sig-network] Services {name}");
        assert_eq!(names, ["a", "b", "c"].map(services));
        assert_eq!(specs[1].reason, "no answer");
        assert_eq!(specs[1].seconds, 2);
        let run = Run {
            proxy: KPLANE.to_owned(),
            mode: "nftables".to_owned(),
            families: IPV4.to_owned(),
            facts: vec![("nodes".to_owned(), "3".to_owned())],
            specs,
        };
        assert_eq!(run.count(Outcome::Failed), 1);
        assert_eq!(Run::from_text(&run.to_text()).unwrap(), run);
    }

    #[test]
    fn a_suite_that_fails_before_its_specs_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("report.json");
        fs::write(&file, REPORT.replacen("\"passed\"", "\"failed\"", 1)).unwrap();
        assert!(parse(&file).is_err());
    }
}
