//! In the machine: starts a contender and asks the kernel what it holds.

use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use kplane_tests::cluster::Api;
use kplane_tests::netns::NetNs;
use kplane_tests::process::{Process, output};

use crate::ipvs::{Args, Contender, RESULT, Row};
use crate::objects::{NAMESPACE, PAIRS, fresh, node};
use kplane_tests::usage::{cpu, memory, received};

/// The machine's only way to the API server.
const LINK: &str = "eth0";
/// No start and no change takes longer.
const DEADLINE: Duration = Duration::from_secs(2_400);
/// Between two looks, and at least so many times the time that a look takes: looking takes CPU from
/// whoever is measured.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_SHARE: u32 = 10;
/// The same for looking at one virtual server.
const SHORT_PAUSE: Duration = Duration::from_millis(5);
/// From the start's end until everybody has settled.
const SETTLE: Duration = Duration::from_secs(5);
/// From a change's end to the next: longer than kube-proxy's `minSyncPeriod` of 1 s, so that no
/// change has to wait for it.
const BETWEEN: Duration = Duration::from_millis(1_500);

pub(crate) fn run(args: &Args) -> Result<()> {
    let services = args.services.first().copied().context("a number of Services")?;
    let contender = args.contender.context("a contender")?;
    let folder = Path::new(&args.folder);
    let api = Api::open(&NetNs::current("machine")?, Path::new(&args.kubeconfig))?;
    let row = measure(args, &api, contender, services).with_context(|| {
        let log = fs::read_to_string(folder.join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    })?;
    fs::write(folder.join(RESULT), serde_json::to_string(&row)?)?;
    Ok(())
}

fn measure(args: &Args, api: &Api, contender: Contender, services: u32) -> Result<Row> {
    let machine = NetNs::current("machine")?;
    let (started, before) = (Instant::now(), received(&machine, LINK)?);
    let process = start(args, contender)?;
    let cold = all(services, started)?;
    let start_bytes = received(&machine, LINK)? - before;
    let pids = [process.id()];
    let cold_cpu = cpu(&pids)?.as_secs_f64();
    println!("  cold start {cold:.2} s");
    thread::sleep(SETTLE);
    let before = cpu(&pids)?;
    let mut changes = Vec::new();
    for change in 0..args.changes {
        let service = service_of(change, services);
        let address = address(api, service)?;
        PAIRS.change(api, service, fresh(change))?;
        let answered = Instant::now();
        holds(&address, fresh(change), answered)?;
        changes.push(answered.elapsed().as_secs_f64());
        thread::sleep(BETWEEN);
    }
    let used = (cpu(&pids)? - before).as_secs_f64();
    println!("  changes {changes:.3?} s");
    changes.sort_by(f64::total_cmp);
    Ok(Row {
        cold,
        cold_cpu,
        start_bytes,
        change_cpu: used / f64::from(args.changes),
        changes,
        memory: memory(&pids)?.now,
    })
}

/// All over the place: 7,919 is prime.
pub(crate) fn service_of(change: u32, services: u32) -> u32 {
    change.wrapping_mul(7_919) % services
}

/// Each with the same configuration file.
fn start(args: &Args, contender: Contender) -> Result<Process> {
    let config = Path::new(&args.folder).join("config.yaml");
    let text = format!(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: ipvs\n\
         hostnameOverride: {}\nclusterCIDR: 10.128.0.0/9\nclientConnection:\n  kubeconfig: {}\n\
         conntrack: {{maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}}\n",
        node(),
        args.kubeconfig
    );
    fs::write(&config, text)?;
    let mut command = match contender {
        Contender::KubeProxy => Command::new(&args.kube_proxy),
        Contender::Kplane => {
            let mut agent = Command::new(crate::program("kp-nodeagent")?);
            agent.arg("--standalone").args(["--status-bind-address", "", "--cache-dir", ""]);
            agent.arg("--kubeconfig").arg(&args.kubeconfig);
            agent
        }
    };
    let log = File::create(Path::new(&args.folder).join("log"))?;
    command.arg("--config").arg(&config);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    Process::start(command)
}

/// Waits until all real servers and all entries of the set of ClusterIPs are there.
fn all(services: u32, started: Instant) -> Result<f64> {
    let wanted = PAIRS.endpoints(services).len();
    loop {
        let looked = Instant::now();
        let text = fs::read_to_string("/proc/net/ip_vs").unwrap_or_default();
        // The heading has one, too.
        let reals = text.lines().filter(|line| line.trim_start().starts_with("-> ")).count();
        if reals > wanted && entries()? >= services {
            return Ok((looked - started).as_secs_f64());
        }
        if started.elapsed() > DEADLINE {
            bail!("the kernel holds {reals} real servers, not {wanted}, after {DEADLINE:?}");
        }
        thread::sleep(PAUSE.max(looked.elapsed() * PAUSE_SHARE));
    }
}

fn entries() -> Result<u32> {
    let mut command = Command::new("ipset");
    command.args(["list", "-terse", "KUBE-CLUSTER-IP"]);
    let text = output(command).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Number of entries: "));
    line.map_or(Ok(0), |number| Ok(number.trim().parse()?))
}

fn address(api: &Api, service: u32) -> Result<String> {
    let object = api
        .get("Service", &format!("{NAMESPACE}/service-{service:05}"))?
        .context("no such Service")?;
    let ip = object["spec"]["clusterIP"].as_str().context("no ClusterIP")?;
    Ok(ip.to_owned())
}

/// Waits until a virtual server has a real server.
fn holds(address: &str, endpoint: Ipv4Addr, since: Instant) -> Result<()> {
    let wanted = format!("{endpoint}:");
    loop {
        let mut command = Command::new("ipvsadm");
        command.args(["-Ln", "-t", &format!("{address}:80")]);
        if output(command)?.contains(&wanted) {
            return Ok(());
        }
        if since.elapsed() > DEADLINE {
            bail!("the kernel does not hold {endpoint} after {DEADLINE:?}");
        }
        thread::sleep(SHORT_PAUSE);
    }
}
