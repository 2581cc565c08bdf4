//! Alerts in real faults: what Prometheus says of the metrics that control planes export before, during and after each.
//!
//! Faults take seconds here, and alerts wait for minutes. So each picture of the metrics is stretched over two hours, and
//! promtool evaluates the rules on that.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::cluster::promtool;
use kplane_tests::privilege;
use kplane_tests::wait::eventually;
use serde_json::{Value, json};

use crate::support::with_world;
use crate::support::world::{BINDING, DEADLINE, World, grant};

/// Minutes that each picture lasts, and the minute of the last one in which alerts are looked up.
const MINUTES: usize = 120;
const AT: usize = 45;

/// The metrics of all replicas: values by series, as Prometheus names them.
#[derive(Clone, Debug, Default)]
struct Picture(BTreeMap<String, f64>);

pub(crate) fn alerts_fire_in_real_faults_and_end_with_them() -> Result<()> {
    let Some(promtool) = privilege::available(promtool())? else {
        return Ok(());
    };
    let alarms = Alarms {
        promtool,
        rules: Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart/files/alerts.yaml"),
    };
    with_world(|world| {
        world.settle()?;
        let healthy = Picture::of(world)?;
        let none = alarms.firing(&[], (&healthy, &healthy))?;
        ensure!(none.is_empty(), "without a fault: {none:?}");

        world.stop_agent("node-1");
        let lost = alarms.until(world, &[&healthy], |firing| {
            firing.contains("KplaneAgentLost") && firing.contains("KplaneNodeWithoutAgent")
        })?;
        world.restart_agent("node-1", 0)?;
        alarms.until(world, &[&healthy, &lost], BTreeSet::is_empty)?;

        world.api().delete("ClusterRoleBinding", BINDING)?;
        // Open watches go on without rights; new ones need them.
        world.cluster.kill_apiserver()?;
        world.cluster.start_apiserver()?;
        let refused = alarms.until(world, &[&healthy], |firing| {
            firing.contains("KplaneSourceRefused")
        })?;
        grant(&world.cluster)?;
        world.settle()?;
        alarms.until(world, &[&healthy, &refused], |firing| {
            !firing.contains("KplaneSourceRefused")
        })?;

        drop(world.planes.pop());
        let alone = alarms.until(world, &[&healthy], |firing| {
            firing.contains("KplaneReplicaLost")
        })?;
        let kubeconfig = world
            .cluster
            .account_kubeconfig("kplane/kplane-controlplane")?;
        let plane = world.plane(1, &kubeconfig)?;
        world.planes.push(plane);
        alarms.until(world, &[&healthy, &alone], |firing| {
            !firing.contains("KplaneReplicaLost")
        })?;
        world.settle()
    })
}

impl Picture {
    /// Reads the metrics of all replicas.
    fn of(world: &World) -> Result<Self> {
        let control = world.topology.host("control")?.ns();
        let mut all = BTreeMap::new();
        for (replica, instance) in ["a", "b"].iter().enumerate().take(world.planes.len()) {
            let mut curl = Command::new("curl");
            let port = 7445 + 10 * replica;
            curl.args(["-s", "-f", &format!("http://127.0.0.1:{port}/metrics")]);
            let target =
                format!("namespace=\"kplane\",job=\"kplane-controlplane\",instance=\"{instance}\"");
            for line in control.output(curl)?.lines() {
                let sample = line
                    .rsplit_once(' ')
                    .filter(|_| line.starts_with("kplane_"));
                let Some((series, value)) = sample else {
                    continue;
                };
                let series = match series.strip_suffix('}') {
                    Some(open) => format!("{open},{target}}}"),
                    None => format!("{series}{{{target}}}"),
                };
                all.insert(series, value.parse().context("a value")?);
            }
        }
        Ok(Self(all))
    }
}

/// Prometheus' evaluation of the rules.
struct Alarms {
    promtool: PathBuf,
    rules: PathBuf,
}

impl Alarms {
    /// Waits until these alerts fire after pictures of the past and the present one, and returns that.
    fn until(
        &self,
        world: &World,
        past: &[&Picture],
        wanted: impl Fn(&BTreeSet<String>) -> bool,
    ) -> Result<Picture> {
        let mut before = Picture::of(world)?;
        eventually(DEADLINE, "the alerts of this fault, or of none", || {
            let now = Picture::of(world)?;
            let firing = self.firing(past, (&before, &now))?;
            before = now.clone();
            ensure!(wanted(&firing), "{firing:?} fire");
            Ok(now)
        })
    }

    /// Returns the alerts that fire now, after these pictures of the past. What has grown since the picture before goes
    /// on growing.
    fn firing(
        &self,
        past: &[&Picture],
        (before, now): (&Picture, &Picture),
    ) -> Result<BTreeSet<String>> {
        let text = fs::read_to_string(&self.rules)?;
        let names = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let names: BTreeSet<&str> = names.filter(|name| name.starts_with("kplane_")).collect();
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
        let minute = MINUTES * past.len() + AT;
        let test = json!({
            "rule_files": [self.rules],
            "evaluation_interval": "1m",
            "tests": [{
                "interval": "1m",
                "input_series": input,
                "promql_expr_test": [{
                    "expr": "group by (alertname) (ALERTS{alertstate=\"firing\"})",
                    "eval_time": format!("{minute}m"),
                    "exp_samples": [{ "labels": "{alertname=\"none\"}", "value": 1 }],
                }],
            }],
        });
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("test.yaml");
        fs::write(&file, test.to_string())?;
        let mut command = Command::new(&self.promtool);
        let said = command.args(["test", "rules"]).arg(file).output()?;
        let said = String::from_utf8_lossy(&[said.stdout, said.stderr].concat()).into_owned();
        // The expectation is wrong on purpose: the complaint names what fires.
        let got = said.split("got:").nth(1).context(said.clone())?;
        let names = got.split("alertname=\"").skip(1);
        let names = names.filter_map(|rest| Some(rest.split_once('"')?.0.to_owned()));
        Ok(names.collect())
    }
}

/// Returns the values of a series in promtool's notation: each picture lasts, and in the last one counters grow.
fn values(series: &str, past: &[&Picture], (before, now): (&Picture, &Picture)) -> String {
    let name = series.split('{').next().unwrap_or_default();
    let in_picture = |picture: &Picture| picture.0.get(series).copied();
    let part = |value: Option<f64>, step: f64| match value {
        None => format!("_x{MINUTES}"),
        Some(value) => format!("{value}+{step}x{}", MINUTES - 1),
    };
    let grown = in_picture(now).unwrap_or_default() - in_picture(before).unwrap_or_default();
    let step = match name.ends_with("_total") {
        true => grown.max(0.0),
        false => 0.0,
    };
    let past = past.iter().map(|picture| part(in_picture(picture), 0.0));
    let parts: Vec<String> = past.chain([part(in_picture(now), step)]).collect();
    parts.join(" ")
}
