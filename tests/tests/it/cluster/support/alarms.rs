//! Evaluates the alerts of the chart on what the programs export in a fault.
//!
//! Faults take seconds here, and alerts wait for minutes. So each picture of the metrics is stretched over hours, and
//! promtool evaluates the rules on that.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Error, Result, ensure};
use kplane_tests::cluster::promtool;
use kplane_tests::privilege;
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use super::World;
use super::world::{DEADLINE, NODES};

/// Samples of each picture, and the sample of the last one at which alerts are looked up.
const SAMPLES: usize = 120;
const AT: usize = 45;
/// Pause after a picture that shows nothing new.
const PAUSE: Duration = Duration::from_millis(300);
/// Flags for a scrape. A program that does not answer is as good as absent.
const CURL: [&str; 4] = ["-s", "-f", "--max-time", "5"];

/// The metrics of all replicas and agents: values by series, as Prometheus names them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Picture(BTreeMap<String, f64>);

impl Picture {
    /// Reads the metrics of all replicas, and of the agents that run.
    pub(crate) fn of(world: &World) -> Result<Self> {
        let control = world.topology.host("control")?.ns();
        let mut all = Self::default();
        for (replica, instance) in ["a", "b"].iter().enumerate().take(world.planes.len()) {
            let mut curl = Command::new("curl");
            let port = 7467 + 10 * replica;
            curl.args(CURL).arg(format!("http://127.0.0.1:{port}/metrics"));
            all.add(&control.output(curl)?, "kplane-controlplane", instance)?;
        }
        for (node, _) in NODES {
            let mut curl = Command::new("curl");
            curl.args(CURL).arg("http://127.0.0.1:10249/metrics");
            if let Ok(text) = world.ns(node)?.output(curl) {
                all.add(&text, "kplane-nodeagent", node)?;
            }
        }
        Ok(all)
    }

    /// Adds the metrics of one program.
    fn add(&mut self, text: &str, job: &str, instance: &str) -> Result<()> {
        let target = format!("namespace=\"kplane\",job=\"{job}\",instance=\"{instance}\"");
        for line in text.lines() {
            let sample = line.rsplit_once(' ');
            if !line.starts_with("kplane_") {
                continue;
            }
            let Some((series, value)) = sample else {
                continue;
            };
            let series = match series.strip_suffix('}') {
                Some(open) => format!("{open},{target}}}"),
                None => format!("{series}{{{target}}}"),
            };
            self.0.insert(series, value.parse().context("a value")?);
        }
        Ok(())
    }
}

/// Prometheus' evaluation of the rules.
#[derive(Clone)]
pub(crate) struct Alarms {
    promtool: PathBuf,
    rules: PathBuf,
    /// Minutes between two samples.
    interval: usize,
}

impl Alarms {
    /// Returns the evaluation. A test ends here if promtool is missing.
    pub(crate) fn get() -> Result<Self> {
        let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart/files/alerts.yaml");
        Ok(Self {
            promtool: privilege::needed(promtool())?,
            rules,
            interval: 1,
        })
    }

    /// Stretches each picture over days, for alerts that wait for one. Rates are too short for that and say nothing.
    pub(crate) fn over_days(&self) -> Self {
        Self {
            interval: 40,
            ..self.clone()
        }
    }

    /// Waits until all of these alerts fire, as [`until`](Self::until) does.
    pub(crate) fn fire(&self, world: &World, past: &[&Picture], all: &[&str]) -> Result<Picture> {
        self.until(world, past, |firing| {
            all.iter().all(|a| firing.contains(*a))
        })
    }

    /// Waits until none of these alerts fires, as [`until`](Self::until) does.
    pub(crate) fn end(&self, world: &World, past: &[&Picture], all: &[&str]) -> Result<Picture> {
        self.until(world, past, |firing| {
            !all.iter().any(|a| firing.contains(*a))
        })
    }

    /// Waits until nodes are as they should be and no alert fires, and returns the picture of that.
    pub(crate) fn healthy(&self, world: &World) -> Result<Picture> {
        world.settle()?;
        // A moment at which a kernel is behind would last for hours.
        self.none(world, &[])
    }

    /// Waits until no alert fires, as [`until`](Self::until) does.
    pub(crate) fn none(&self, world: &World, past: &[&Picture]) -> Result<Picture> {
        self.until(world, past, BTreeSet::is_empty)
    }

    /// Waits until these alerts fire after pictures of the past and the present one, and returns that.
    pub(crate) fn until(
        &self,
        world: &World,
        past: &[&Picture],
        mut wanted: impl FnMut(&BTreeSet<String>) -> bool,
    ) -> Result<Picture> {
        let mut before: Option<Picture> = None;
        let mut known: Option<(Value, BTreeSet<String>)> = None;
        eventually(2 * DEADLINE, "the alerts of this fault, or of none", || {
            // Programs may be starting.
            let now = Picture::of(world)?;
            let last = before.replace(now.clone()).context("one picture so far")?;
            let test = self.test(past, (&last, &now))?;
            let firing = match known.take() {
                // promtool needs all of a processor, which programs need to get on.
                Some((same, firing)) if same == test => {
                    thread::sleep(PAUSE);
                    firing
                }
                _ => self.evaluate(&test)?,
            };
            known = Some((test, firing.clone()));
            ensure!(wanted(&firing), "{firing:?} fire");
            Ok::<_, Error>(now)
        })
    }

    /// Returns promtool's test of these pictures: of the past, and of now. What has grown since the picture before goes on
    /// growing.
    fn test(&self, past: &[&Picture], (before, now): (&Picture, &Picture)) -> Result<Value> {
        let text = fs::read_to_string(&self.rules)?;
        let names: BTreeSet<&str> = text
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .filter(|name| name.starts_with("kplane_"))
            .collect();
        let pictures = past.iter().chain([&now]);
        let all: BTreeSet<&String> = pictures.flat_map(|picture| picture.0.keys()).collect();
        let used = all
            .into_iter()
            .filter(|series| names.contains(series.split('{').next().unwrap_or_default()));
        let input: Vec<Value> = used
            .map(
                |series| json!({ "series": series, "values": values(series, past, (before, now)) }),
            )
            .collect();
        let minute = self.interval * (SAMPLES * past.len() + AT);
        let interval = format!("{}m", self.interval);
        Ok(json!({
            "rule_files": [self.rules],
            "evaluation_interval": interval,
            "tests": [{
                "interval": interval,
                "input_series": input,
                "promql_expr_test": [{
                    "expr": "group by (alertname) (ALERTS{alertstate=\"firing\"})",
                    "eval_time": format!("{minute}m"),
                    "exp_samples": [{ "labels": "{alertname=\"none\"}", "value": 1 }],
                }],
            }],
        }))
    }

    /// Returns the alerts that fire at the end of a test.
    fn evaluate(&self, test: &Value) -> Result<BTreeSet<String>> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("test.yaml");
        fs::write(&file, test.to_string())?;
        let mut command = Command::new(&self.promtool);
        let said = command.args(["test", "rules"]).arg(file).output()?;
        let said = String::from_utf8_lossy(&[said.stdout, said.stderr].concat()).into_owned();
        // The expectation is wrong on purpose: the complaint names what fires.
        let got = said.split("got:").nth(1).context(said.clone())?;
        Ok(got
            .split("alertname=\"")
            .skip(1)
            .filter_map(|rest| Some(rest.split_once('"')?.0.to_owned()))
            .collect())
    }
}

/// Returns the values of a series in promtool's notation: each picture lasts, and in the last one counters grow.
fn values(series: &str, past: &[&Picture], (before, now): (&Picture, &Picture)) -> String {
    let name = series.split('{').next().unwrap_or_default();
    let in_picture = |picture: &Picture| picture.0.get(series).copied();
    let part = |value: Option<f64>, step: f64| match value {
        None => format!("_x{SAMPLES}"),
        Some(value) => format!("{value}+{step}x{}", SAMPLES - 1),
    };
    let grown = in_picture(now).unwrap_or_default() - in_picture(before).unwrap_or_default();
    let step = if grows(name) { grown.max(0.0) } else { 0.0 };
    let past = past.iter().map(|picture| part(in_picture(picture), 0.0));
    let parts: Vec<String> = past.chain([part(in_picture(now), step)]).collect();
    parts.join(" ")
}

/// Returns whether a metric counts what happened since the program's start.
fn grows(name: &str) -> bool {
    let histogram = ["_bucket", "_sum", "_count"].iter().any(|end| name.ends_with(end));
    // A histogram over the nodes at this moment.
    let moment = name.contains("_applied_lag_seconds");
    name.ends_with("_total") || histogram && !moment
}
