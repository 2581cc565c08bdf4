//! A whole agent that begins anew beside a folder that was emptied meanwhile: connections go on.

use std::fmt::Display;
use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use kp_nodeagent::app;
use kp_nodeagent::config::Config;
use kp_nodeagent::report::Report;
use kplane_tests::client::Probe;
use kplane_tests::load::{Load, Pace};
use kplane_tests::wait::eventually;
use tokio::runtime::Runtime;

use crate::netns::alone::agent_config;
use kplane_tests::support::{Client, TARGET, World, node_name, pod_ips};

const DEADLINE: Duration = Duration::from_secs(30);

/// As many as it takes for a cliff.
const SERVICES: usize = 12;

fn manifests() -> String {
    (0..SERVICES).map(yaml).collect()
}

/// Returns a Service at `10.96.7.NUMBER`, port 80, with one endpoint, as YAML documents.
pub(crate) fn yaml(number: impl Display) -> String {
    let [pod, _] = pod_ips(1, 1);
    yaml_with(number, &[pod])
}

/// Returns a Service like [`yaml`], with these endpoints.
pub(crate) fn yaml_with(number: impl Display, pods: &[IpAddr]) -> String {
    let endpoints = pods
        .iter()
        .map(|pod| format!("{{addresses: ['{pod}'], conditions: {{ready: true}}}}"));
    let endpoints: Vec<_> = endpoints.collect();
    format!(
        "---\n{{apiVersion: v1, kind: Service, metadata: {{name: s{number}, namespace: shop}}, \
         spec: {{clusterIP: 10.96.7.{number}, clusterIPs: [10.96.7.{number}], \
         ports: [{{port: 80, protocol: TCP}}]}}}}\n\
         ---\n{{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {{name: \
         s{number}-1, namespace: shop, labels: {{kubernetes.io/service-name: s{number}}}}}, \
         addressType: IPv4, ports: [{{name: '', port: {TARGET}, protocol: TCP}}], \
         endpoints: [{}]}}\n",
        endpoints.join(", ")
    )
}

fn config(manifests: &Path, cache: &str) -> Result<Config> {
    let manifests = format!("--manifests={}", manifests.display());
    let cache = format!("--cache-dir={cache}");
    let name = format!("--node-name={}", node_name(1));
    let source = ["--standalone", "--status-bind-address=", &manifests];
    Ok(Config {
        inside: Some(kp_controlplane::app::inside),
        ..agent_config(&[&source[..], &[&cache, &name]].concat())?
    })
}

/// Runs an agent until its report is as it should be, and then as long as a load takes to notice.
fn run(config: Config, load: Option<&Load>, wanted: impl Fn(&Report) -> bool) -> Result<()> {
    let runtime = Runtime::new()?;
    let agent = runtime.block_on(app::build(config))?;
    let reports = agent.reports();
    eventually(DEADLINE, "the report", || {
        let report = reports.borrow().clone();
        wanted(&report).then_some(()).ok_or_else(|| format!("{report:?}"))
    })?;
    if let Some(load) = load {
        let goal = load.report().ok() + 20;
        eventually(DEADLINE, "answers", || match load.report() {
            report if report.ok() >= goal || report.lost() > 0 => Ok(()),
            report => Err(report.to_string()),
        })?;
    }
    agent.shutdown_token().cancel();
    runtime.block_on(agent.wait())?;
    Ok(())
}

pub(crate) fn a_start_beside_an_emptied_folder_cuts_nobody_off() -> Result<()> {
    let (folder, cache) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let cache = cache.path().to_string_lossy();
    let file = folder.path().join("services.yaml");
    fs::write(&file, manifests())?;
    let world = World::without_agents()?;
    let client = world.net.ns(Client::Outside)?;
    let to = Probe::tcp("10.96.7.3:80".parse()?);
    let applied = |report: &Report| report.held.is_some() && report.applied == report.held;
    let start = |cache: &str, load, wanted: &(dyn Fn(&Report) -> bool + Sync)| {
        let config = config(folder.path(), cache)?;
        world.node(1)?.run(|| run(config, load, wanted))
    };
    start(&cache, None, &|report| {
        applied(report) && report.counts.services == 12
    })?;
    let pace = Pace {
        threads: 1,
        ..Pace::default()
    };
    let load = Load::start(client, to, pace)?;
    let mut session = to.open(client)?;

    fs::remove_file(&file)?;
    let kept = |report: &Report| {
        let held = report.keeps.as_ref().is_some_and(|held| held.services == SERVICES);
        applied(report) && held
    };
    start(&cache, Some(&load), &kept)?;
    session.echo(DEADLINE)?;
    // Without memory nobody can tell which these are: nothing is touched.
    let untouched = |report: &Report| {
        let untouched =
            report.keeps.as_ref().is_some_and(kp_nodeagent::desired::Held::is_untouched);
        report.applied.is_none() && untouched
    };
    start("", Some(&load), &untouched)?;
    session.echo(DEADLINE)?;
    let report = load.stop();
    ensure!(report.lost() == 0 && report.ok() > 0, "{report}");
    Ok(())
}
