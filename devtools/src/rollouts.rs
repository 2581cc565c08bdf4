//! `cargo xtask bench --against kube-proxy-rollouts`: how many connections fail while Pods and nodes go.
//!
//! A real cluster for each proxy: kubelets, containers, the controllers of Kubernetes. Clients on all nodes connect to a
//! Service at a steady rate while its Deployment is updated, and while a node loses its link.

mod starts;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use kplane_rig::client::Probe;
use kplane_rig::cluster::{helm, objects};
use kplane_rig::load::{Load, Pace, Report};
use kplane_rig::real::{self, Mode, NodePrograms, Options, POD, Proxy, RealCluster, require};
use kplane_rig::topology::LINK;
use kplane_rig::userns;
use kplane_rig::wait::eventually;
use serde_json::{Value, json};

use crate::e2e::install::Chart;

const NAMESPACE: &str = "default";
const SERVICE: &str = "web";
/// Longest time until a cluster has what was asked for.
const DEADLINE: Duration = Duration::from_secs(180);
/// Time before and after an update in which clients connect, too.
const MARGIN: Duration = Duration::from_secs(3);
/// Number of clients on each node.
const THREADS: usize = 6;
/// The chart's values with which agents answer hooks, and kplane takes endpoints of dead nodes, and of Pods that are being deleted,
/// out of the rotation.
const SETTINGS: [&str; 3] = [
    "preStop.enabled=true",
    "controlPlane.watchPods=true",
    "deadNode.mode=act",
];
/// Time in which a node that lost its link is out of the rotation of every proxy: kubelet's lease ends after 40 s.
const CUT: Duration = Duration::from_secs(75);

/// Prints the counts of an agent's histogram of waits.
const WAITS: &str = r"
    exec 3<>/dev/tcp/127.0.0.1/10249
    printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3
    grep '^kplane_agent_pre_stop_wait_duration_seconds_bucket' <&3";

/// Options of the comparison.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Needs root, cgroups of version 1, and Go for the first start. Takes about four minutes for each proxy.

Examples:
  cargo xtask bench --against kube-proxy-rollouts
  cargo xtask bench --against kube-proxy-rollouts --proxy kplane --hook gone --runs 1")]
pub(crate) struct Args {
    /// A proxy to measure; may be given more than once [default: both]
    #[arg(long, value_enum)]
    proxy: Vec<Name>,
    /// What Pods do before they end; may be given more than once [default: all that the proxy can serve]
    #[arg(long, value_enum)]
    hook: Vec<Hook>,
    /// Nodes of a cluster
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u8).range(2..=9))]
    nodes: u8,
    /// Pods of the Deployment
    #[arg(long, default_value_t = 12)]
    pods: u32,
    /// Connections a second, from all nodes together
    #[arg(long, default_value_t = 360)]
    rate: u32,
    /// Updates for each hook
    #[arg(long, default_value_t = 3)]
    runs: u32,
    /// Leave out the node that loses its link
    #[arg(long)]
    no_cut: bool,
    /// Update once more with kplane while the agent of the last node is stopped
    #[arg(long)]
    frozen: bool,
    /// Instead: how long new Pods of kplane's cluster wait for their NetworkPolicies
    #[arg(long)]
    pod_starts: bool,
    /// The folder of the images that `cargo xtask images` has written
    #[arg(long, hide = true, default_value = "target/images-of-tests")]
    images: PathBuf,
}

/// The name of a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Name {
    /// kube-proxy in mode nftables, as kubeadm installs it
    KubeProxy,
    /// kplane, installed by its chart
    Kplane,
}

/// What a Pod does between the decision that it ends and SIGTERM, at which its server exits at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Hook {
    /// Nothing
    None,
    /// It sleeps 15 s, as many recommend
    Sleep,
    /// It asks kplane to say when no kernel leads to it
    Gone,
}

impl Hook {
    fn text(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Sleep => "`sleep: {seconds: 15}`",
            Self::Gone => "`/gone`",
        }
    }

    fn lifecycle(self) -> Value {
        match self {
            Self::None => Value::Null,
            Self::Sleep => json!({ "preStop": { "sleep": { "seconds": 15 } } }),
            Self::Gone => json!({ "preStop": { "httpGet": { "path": "/gone", "port": 7468 } } }),
        }
    }
}

/// Measures, and prints the table.
pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(require()?, "a real cluster cannot run on this machine");
    NodePrograms::ensure()?;
    let helm = helm()?;
    userns::isolate()?;
    if args.pod_starts {
        let stand = Stand::start(args, Name::Kplane, &helm)?;
        print!("{}", starts::measure(&stand)?);
        return Ok(());
    }
    let mut table = format!(
        "{} nodes, {} Pods (maxSurge 3), {} connections a second from all nodes\n\n\
         | proxy | what happens | hook | took | connections | failed | reasons |\n\
         | ----- | ------------ | ---- | ---: | ----------: | -----: | ------- |\n",
        args.nodes, args.pods, args.rate
    );
    let mut waits = String::new();
    for name in [Name::KubeProxy, Name::Kplane] {
        if !args.proxy.is_empty() && !args.proxy.contains(&name) {
            continue;
        }
        let stand = Stand::start(args, name, &helm)?;
        for hook in stand.hooks() {
            for _ in 0..args.runs {
                table += &stand.update(hook)?;
            }
            if hook == Hook::Gone {
                waits += &stand.waits()?;
            }
        }
        if args.frozen && name == Name::Kplane {
            table += &stand.frozen()?;
            waits += "\nWith those while an agent was stopped: ";
            waits += &stand.waits()?;
        }
        if !args.no_cut {
            table += &stand.cut()?;
        }
    }
    println!("\n{table}\n{waits}");
    Ok(())
}

/// A cluster with a proxy and the Service.
struct Stand<'a> {
    args: &'a Args,
    name: Name,
    cluster: RealCluster,
    service: SocketAddr,
}

impl<'a> Stand<'a> {
    fn start(args: &'a Args, name: Name, helm: &PathBuf) -> Result<Self> {
        let root = crate::workspace();
        let chart = Chart {
            root,
            images: &root.join(&args.images),
            helm,
            policies: args.pod_starts,
            settings: if args.no_cut { &SETTINGS[..2] } else { &SETTINGS },
        };
        let (proxy, images) = match name {
            Name::KubeProxy => (Proxy::KubeProxy(Mode::Nftables), Vec::new()),
            Name::Kplane => (Proxy::None, chart.archives().collect()),
        };
        let cluster = RealCluster::start(&Options {
            nodes: args.nodes,
            proxy,
            images,
            ..Options::default()
        })?;
        if name == Name::Kplane {
            chart.install(&cluster, Mode::Nftables, false)?;
        }
        for number in 1..=args.nodes {
            let (client, node) = (client(number), format!("node-{number}"));
            cluster.api().apply(&real::pod(NAMESPACE, &client, &node))?;
            cluster.wait_for_pods(NAMESPACE, &format!("app={client}"), 1)?;
        }
        let mut stand = Self {
            args,
            name,
            cluster,
            service: SocketAddr::from(([0; 4], 0)),
        };
        stand.deploy(Hook::None)?;
        let key = format!("{NAMESPACE}/{SERVICE}");
        let api = stand.cluster.api();
        api.apply(&real::service(NAMESPACE, SERVICE))?;
        let ips = real::ips(&api.get("Service", &key)?.context("no Service")?);
        stand.service = SocketAddr::new(*ips.first().context("no ClusterIP")?, 80);
        Ok(stand)
    }

    fn text(&self) -> &'static str {
        match self.name {
            Name::KubeProxy => "kube-proxy",
            Name::Kplane => "kplane",
        }
    }

    /// Returns the hooks to measure.
    fn hooks(&self) -> Vec<Hook> {
        let served = |hook: &Hook| *hook != Hook::Gone || self.name == Name::Kplane;
        let wanted = |hook: &Hook| self.args.hook.is_empty() || self.args.hook.contains(hook);
        Hook::value_variants().iter().copied().filter(served).filter(wanted).collect()
    }

    /// Gives the Deployment a hook, and waits until its Pods have it and no others are left.
    fn deploy(&self, hook: Hook) -> Result<()> {
        let mut deployment =
            objects::deployment_of(NAMESPACE, SERVICE, self.args.pods, &pods(hook));
        deployment["spec"]["strategy"] =
            json!({ "rollingUpdate": { "maxSurge": 3, "maxUnavailable": 0 } });
        self.cluster.api().apply(&deployment)?;
        self.rolled()?;
        let alone = format!("only {} Pods of {SERVICE}", self.args.pods);
        eventually(DEADLINE, &alone, || {
            let pods = self.cluster.api().list("Pod", Some(NAMESPACE))?;
            let of = |pod: &&Value| pod["metadata"]["labels"]["app"] == SERVICE;
            let count = pods.iter().filter(of).count();
            ensure!(count == self.args.pods as usize, "{count} Pods");
            Ok(())
        })
    }

    fn rolled(&self) -> Result<()> {
        let of = format!("deployment/{SERVICE}");
        let words = ["rollout", "status", "--timeout=3m", "-n", NAMESPACE, &of];
        self.cluster.kubectl(&words).map(drop)
    }

    /// Has clients on nodes connect at the rate.
    fn load(&self, nodes: impl Iterator<Item = u8>) -> Result<Vec<Load>> {
        let clients = u32::from(self.args.nodes) * u32::try_from(THREADS)?;
        let pace = Pace {
            threads: THREADS,
            think: Duration::from_secs(1) * clients / self.args.rate.max(1),
        };
        let start = |number| {
            let ns = self.cluster.pod_ns(&format!("{NAMESPACE}/{}", client(number)))?;
            let probe = Probe::tcp(self.service);
            eventually(DEADLINE, "the Service answers", || probe.reply(&ns))?;
            Load::start(&ns, probe, pace)
        };
        nodes.map(start).collect()
    }

    /// Updates all Pods once, and returns a row.
    fn update(&self, hook: Hook) -> Result<String> {
        self.update_under("update", hook, self.args.nodes)
    }

    /// Updates all Pods while the last node's agent is stopped, and returns a row about connections from the other nodes.
    fn frozen(&self) -> Result<String> {
        let last = self.args.nodes;
        let node = self.cluster.node(&format!("node-{last}"))?;
        self.deploy(Hook::Gone)?;
        let found = node.exec("pgrep", &["-x", "kp-nodeagent"])?;
        let agents: Vec<&str> = found.split_whitespace().collect();
        let [agent] = agents[..] else {
            bail!("{} agents are on node-{last}", agents.len());
        };
        node.exec("kill", &["-STOP", agent])?;
        let row = self.update_under("update, an agent is stopped", Hook::Gone, last - 1);
        node.exec("kill", &["-CONT", agent])?;
        row
    }

    /// Updates all Pods once while clients on the first nodes connect, and returns a row.
    fn update_under(&self, what: &str, hook: Hook, nodes: u8) -> Result<String> {
        self.deploy(hook)?;
        let loads = self.load(1..=nodes)?;
        thread::sleep(MARGIN);
        let began = Instant::now();
        let of = format!("deployment/{SERVICE}");
        self.cluster.kubectl(&["rollout", "restart", "-n", NAMESPACE, &of])?;
        self.rolled()?;
        let took = began.elapsed();
        // Until the last of the old Pods has ended.
        self.deploy(hook)?;
        thread::sleep(MARGIN);
        let reports = loads.into_iter().map(Load::stop);
        Ok(self.row(what, hook.text(), took, &sum(reports)))
    }

    /// Returns how long hooks waited, by the counts of all agents.
    fn waits(&self) -> Result<String> {
        let mut within = BTreeMap::new();
        for node in self.cluster.nodes() {
            let lines = node.exec("bash", &["-c", WAITS])?;
            for line in lines.lines() {
                let (labels, count) = line.rsplit_once(' ').context("a metric without a count")?;
                let (_, bound) = labels.split_once("le=\"").context("no bound")?;
                let bound = bound.split('"').next().unwrap_or_default();
                *within.entry(bound.to_owned()).or_default() += count.trim().parse::<u64>()?;
            }
        }
        Ok(waited(&within))
    }

    /// Cuts the link of the last node, and returns a row: when the last connection failed from the other nodes.
    fn cut(&self) -> Result<String> {
        self.deploy(Hook::None)?;
        let last = self.args.nodes;
        let loads = self.load(1..last)?;
        thread::sleep(MARGIN);
        let began = Instant::now();
        let node = self.cluster.node(&format!("node-{last}"))?;
        node.ns()?.netlink()?.down(LINK)?;
        thread::sleep(CUT);
        let report = sum(loads.into_iter().map(Load::stop));
        let failed = report.last_failed.map(|at| at.saturating_duration_since(began));
        Ok(self.row(
            "a node's link is cut, last failure after",
            "",
            failed.unwrap_or_default(),
            &report,
        ))
    }

    fn row(&self, what: &str, hook: &str, took: Duration, report: &Report) -> String {
        let mut reasons = String::new();
        for (reason, count) in &report.failed {
            // Writing to a text cannot fail.
            let _ = write!(reasons, "{count} {reason} ");
        }
        let row = format!(
            "| {} | {what} | {hook} | {:.1} s | {} | {} | {} |\n",
            self.text(),
            took.as_secs_f64(),
            report.ok() + report.lost(),
            report.lost(),
            reasons.trim_end()
        );
        print!("{row}");
        row
    }
}

/// Says how many hooks waited no longer than each bound in seconds.
fn waited(within: &BTreeMap<String, u64>) -> String {
    let all = within.get("+Inf").copied().unwrap_or_default();
    let mut said = format!("{all} hooks waited");
    let mut bounds: Vec<(f64, u64)> = within
        .iter()
        .filter_map(|(bound, count)| Some((bound.parse().ok()?, *count)))
        .collect();
    bounds.sort_by(|one, other| one.0.total_cmp(&other.0));
    for (bound, count) in bounds.into_iter().filter(|(bound, _)| bound.is_finite()) {
        // Writing to a text cannot fail.
        let _ = write!(said, ", {count} up to {bound} s");
    }
    said + "\n"
}

/// Returns the results of all clients.
fn sum(reports: impl Iterator<Item = Report>) -> Report {
    reports.fold(Report::default(), |mut sum, report| {
        sum.merge(&report);
        sum
    })
}

fn client(number: u8) -> String {
    format!("client-{number}")
}

/// Returns the Pods of the Deployment. Their server exits at SIGTERM.
fn pods(hook: Hook) -> Value {
    json!({
        "terminationGracePeriodSeconds": 30,
        "containers": [{
            "name": "pod",
            "image": POD,
            "imagePullPolicy": "Never",
            "args": ["serve"],
            "ports": [{ "containerPort": 8080 }],
            "lifecycle": hook.lifecycle(),
            "readinessProbe": { "httpGet": { "path": "/ready", "port": 8081 }, "periodSeconds": 1 },
        }],
    })
}
