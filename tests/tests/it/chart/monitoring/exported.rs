//! The metrics that both programs export, and the comparison of expressions with them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::Parser as _;
use kp_controlplane::app as control_plane;
use kp_nodeagent::app;
use kp_nodeagent::config::{Config, Flags, Task};
use kplane_agents::certs;
use kplane_dataplane::backend::Kind;
use kplane_http::client::until;
use kplane_tests::process::Process;
use kplane_tests::product::Product;
use serde_json::Value;

use super::query::names;
use super::rules;

/// Labels that Prometheus adds to series of a target, and the one of several clusters.
const OF_TARGETS: [&str; 4] = ["cluster", "instance", "job", "namespace"];
/// Prefixes of all names that the programs export.
const PREFIXES: [&str; 3] = ["kplane_", "kubeproxy_", "process_"];

const MANIFESTS: &str = "
apiVersion: v1
kind: Node
metadata: {name: n1}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: '', port: 8080}]
endpoints: [{addresses: [10.0.0.1]}]
";

/// An API server that nobody serves.
const KUBECONFIG: &str = "
apiVersion: v1
kind: Config
current-context: none
contexts: [{name: none, context: {cluster: none, user: none}}]
clusters: [{name: none, cluster: {server: 'http://127.0.0.1:1'}}]
users: [{name: none, user: {}}]
";

/// The values of each label of a series.
type Labels = BTreeMap<String, BTreeSet<String>>;

/// Names of series and their labels, and what the programs say about them.
#[derive(Debug, Default)]
pub(super) struct Exported {
    series: BTreeMap<String, Labels>,
    families: BTreeMap<String, Family>,
}

/// A metric.
#[derive(Debug, Default)]
pub(super) struct Family {
    pub(super) kind: String,
    pub(super) help: String,
    pub(super) labels: BTreeSet<String>,
}

impl Exported {
    /// Returns what the programs export, and what the rules record.
    pub(super) fn get() -> Result<&'static Self> {
        static ALL: OnceLock<Result<Exported>> = OnceLock::new();
        ALL.get_or_init(|| {
            let mut all = Exported::default();
            let folder = tempfile::tempdir()?;
            all.add(&without_api_server(folder.path())?);
            let runtime = tokio::runtime::Runtime::new()?;
            for text in runtime.block_on(fleet(folder.path()))? {
                all.add(&text);
            }
            all.series
                .retain(|name, _| PREFIXES.iter().any(|prefix| name.starts_with(prefix)));
            for rule in rules()?.into_iter().filter(|rule| !rule.record.is_empty()) {
                all.series.entry(rule.record).or_default();
            }
            Ok(all)
        })
        .as_ref()
        .map_err(|error| anyhow!("{error:#}"))
    }

    /// Adds the series of a program.
    fn add(&mut self, text: &str) {
        let (mut name, mut help) = ("", "");
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                help = rest.split_once(' ').unwrap_or_default().1;
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let kind;
                (name, kind) = rest.split_once(' ').unwrap_or_default();
                // Some series appear only when there is something to count.
                self.series.entry(name.to_owned()).or_default();
                let family = self.families.entry(name.to_owned()).or_default();
                (family.kind, family.help) = (kind.to_owned(), help.to_owned());
            } else {
                self.add_series(name, line);
            }
        }
    }

    /// Adds a series of a metric.
    fn add_series(&mut self, family: &str, line: &str) {
        let (series, _) = line.rsplit_once(' ').unwrap_or_default();
        let (name, pairs) = series.split_once('{').unwrap_or((series, ""));
        let labels = self.series.entry(name.to_owned()).or_default();
        let pairs = pairs.trim_end_matches('}').split(',');
        for (label, value) in pairs.filter_map(|pair| pair.split_once('=')) {
            let values = labels.entry(label.to_owned()).or_default();
            values.insert(value.trim_matches('"').to_owned());
            let family = self.families.entry(family.to_owned()).or_default();
            family.labels.insert(label.to_owned());
        }
    }

    /// Returns all metrics by name.
    pub(super) fn families(&self) -> &BTreeMap<String, Family> {
        &self.families
    }

    /// Returns the labels of all series that an expression names. Refuses names, labels and values that no program
    /// exports.
    pub(super) fn check(&self, expr: &str) -> Result<BTreeSet<String>> {
        let names = names(expr);
        ensure!(!names.selectors.is_empty(), "{expr} names no series");
        let mut all: BTreeSet<String> = OF_TARGETS.map(str::to_owned).into();
        for selector in &names.selectors {
            let name = &selector.name;
            let labels =
                self.series.get(name).with_context(|| format!("no program exports {name}"))?;
            all.extend(labels.keys().cloned());
            for (label, values) in &selector.matchers {
                if OF_TARGETS.contains(&&**label) {
                    continue;
                }
                let known =
                    labels.get(label).with_context(|| format!("{name} has no label {label}"))?;
                let is_known = |value: &&String| known.contains(*value) || is_failure(label, value);
                let unknown: Vec<_> = values.iter().filter(|value| !is_known(value)).collect();
                ensure!(
                    unknown.is_empty(),
                    "{name}: {label} is never {unknown:?}, but {known:?}"
                );
            }
        }
        let listed = names.grouped.iter().chain(&names.joined);
        let unknown: Vec<_> = listed.filter(|label| !all.contains(*label)).collect();
        ensure!(unknown.is_empty(), "{expr}: no series has {unknown:?}");
        if names.grouped.is_empty() {
            return Ok(all);
        }
        Ok(names.grouped.into_iter().collect())
    }
}

/// Returns whether a value is the name of a failed request.
fn is_failure(label: &str, value: &str) -> bool {
    use kplane_desired_state::kubernetes::Failure;
    let (text, status) = (String::new, |code| Failure::of_status(code, "", None));
    let all = [
        Failure::Unreachable(text()),
        Failure::Certificate(text()),
        Failure::Credentials(text()),
        status(401),
        status(403),
        status(409),
    ];
    label == "reason" && all.iter().any(|failure| failure.name() == value)
}

/// Returns the metrics of a control plane with TLS, whose API server does not answer.
fn without_api_server(folder: &Path) -> Result<String> {
    let dir = folder.join("certs");
    certs::run(&certs::Command::Init {
        dir: dir.clone(),
        host: Vec::new(),
    })?;
    let kubeconfig = folder.join("kubeconfig");
    fs::write(&kubeconfig, KUBECONFIG)?;
    let mut command = Command::new(Product::build()?.control_plane);
    command.arg("--kubeconfig").arg(kubeconfig);
    for (flag, file) in [
        ("--tls-cert-file", "server.crt"),
        ("--tls-private-key-file", "server.key"),
        ("--client-ca-file", "ca.crt"),
    ] {
        command.arg(flag).arg(dir.join(file));
    }
    for port in ["agent", "status", "http"] {
        command.arg(format!("--{port}-listen=127.0.0.1:0"));
    }
    command.args(["--log-format=json", "--audit-log="]).env("RUST_LOG", "info");
    command.stdin(Stdio::null()).stderr(Stdio::piped());
    let mut program = Process::start(command)?;
    let log = program.stderr.take().context("no log")?;
    let mut lines = BufReader::new(log).lines();
    let http = lines.find_map(|line| {
        let line: Value = serde_json::from_str(&line.ok()?).ok()?;
        Some(line["fields"]["http"].as_str()?.to_owned())
    });
    // The program must be able to go on writing.
    std::thread::spawn(move || lines.for_each(drop));
    let http: SocketAddr = http.context("it serves no metrics")?.parse()?;
    tokio::runtime::Runtime::new()?.block_on(metrics(
        http,
        &[
            "kplane_controlplane_source_failures_total{",
            "kplane_controlplane_api_failures_total{",
            "kplane_controlplane_certificate_expires_timestamp_seconds ",
        ],
    ))
}

/// Returns the metrics of a control plane and of its agent, which programs nothing.
async fn fleet(folder: &Path) -> Result<[String; 2]> {
    let manifests = folder.join("services.yaml");
    fs::write(&manifests, MANIFESTS)?;
    let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let plane = control_plane::build(control_plane::Config {
        agent_listen: any,
        http_listen: any,
        ..control_plane::Config::new(control_plane::Origin::Manifests(manifests))
    })
    .await?;
    let agents = plane.agent_addr.context("no port of agents")?;
    let address = format!("--control-plane=http://{agents}");
    let line = ["kp-nodeagent", "--insecure", &address, "--node-name=n1"];
    let Task::Run(config) = Flags::try_parse_from(line)?.check()?.task else {
        return Err(anyhow!("not an agent"));
    };
    let agent = app::build(Config {
        backend: Kind::Noop,
        healthz: None,
        metrics: any,
        cache_dir: None,
        ..*config
    })
    .await?;
    let in_sync = ["kplane_controlplane_nodes{state=\"in_sync\"} 1"];
    let of_plane = metrics(plane.http_addr.context("no HTTP")?, &in_sync).await?;
    let connected = ["kplane_agent_connected 1"];
    let of_agent = metrics(agent.metrics_addr.context("no metrics")?, &connected).await?;
    Ok([of_plane, of_agent])
}

/// Returns the metrics at an address as soon as they have lines that begin so.
async fn metrics(address: SocketAddr, lines: &[&str]) -> Result<String> {
    let has = |body: &str, begin: &&str| body.lines().any(|line| line.starts_with(*begin));
    let reply = until(address, "/metrics", |reply| {
        reply.is_some_and(|reply| lines.iter().all(|line| has(&reply.body, line)))
    });
    Ok(reply.await.context("no answer")?.body)
}

/// The comparison refuses what does not exist.
pub(in crate::chart) fn names_that_no_program_exports_are_refused() -> Result<()> {
    let exported = Exported::get()?;
    exported.check("sum by (job) (kplane_controlplane_nodes{state=\"failing\"})")?;
    for (expr, reason) in [
        ("rate(kplane_controlplane_nods[5m])", "no program exports"),
        ("kplane_controlplane_nodes{stat=\"x\"}", "has no label stat"),
        ("kplane_controlplane_nodes{state=\"lost\"}", "is never"),
        ("sum by (stat) (kplane_controlplane_nodes)", "no series has"),
        ("1 + 1", "names no series"),
    ] {
        let refused = exported.check(expr).err().context("it is accepted")?;
        ensure!(refused.to_string().contains(reason), "{expr}: {refused}");
    }
    Ok(())
}
