//! What an API server does for kube-proxies on so many nodes, and for control planes that serve agents on them.

use std::time::{Duration, Instant};

use crate::kube_proxies::{self, Proxies};
use crate::workload::show;
use anyhow::{Context as _, Result};
use kplane_tests::cluster::Cluster;
use kplane_tests::fleet::{Fleet, Input, Size, Violated, inside};
use kplane_tests::usage;
use tokio::task::block_in_place;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::simulator::{Args, machine};

const HEAD: &str = "\
| who reads | watch events | compared | CPU a change | compared | memory |
| --------- | -----------: | -------: | -----------: | -------: | -----: |
";
/// The counter of events that the server sent to all watches.
const EVENTS: &str = "apiserver_watch_events_total{";
/// Numbers of control planes.
const REPLICAS: [usize; 2] = [1, 3];
/// Time until what a start has left over is done.
const SETTLE: Duration = Duration::from_secs(5);
/// Time in which the last change is sent to everybody.
const ARRIVE: Duration = Duration::from_secs(1);

/// What an API server did for changes.
#[derive(Clone, Copy, Debug)]
struct Load {
    changes: u64,
    /// As the server writes it, which may be with an exponent.
    events: f64,
    cpu: Duration,
    memory: u64,
}

/// Measures an API server that nobody reads, that kube-proxies read, and that control planes read; each has the same
/// objects and the same changes. Returns the table.
pub(crate) fn run(args: &Args, nodes: u32) -> Result<String> {
    let machine = machine()?;
    let proxies = with_proxies(args, nodes)?;
    let mut rows = row(&format!("{nodes} kube-proxies"), &proxies, &proxies);
    for replicas in REPLICAS {
        let planes = with_planes(args, nodes, replicas)?;
        let who = format!("{nodes} agents, by {replicas} control planes");
        rows += &row(&who, &planes, &proxies);
    }
    rows += &row("nobody", &with_nobody(args, nodes)?, &proxies);
    let (churn, seconds, services) = (args.churn, args.seconds, args.services);
    Ok(format!(
        "{nodes} nodes, {services} Services, {churn} changes/s for {seconds} s; {machine}\n\n{HEAD}{rows}"
    ))
}

fn with_nobody(args: &Args, nodes: u32) -> Result<Load> {
    let (cluster, mut input) = kube_proxies::cluster(nodes, args.services)?;
    let changes = async || churn(&mut input, args).await;
    inside(cluster.ns(), load(&cluster, changes))
}

fn with_proxies(args: &Args, nodes: u32) -> Result<Load> {
    let (cluster, mut input) = kube_proxies::cluster(nodes, args.services)?;
    inside(cluster.ns(), async {
        let _proxies = Proxies::start(&cluster, nodes).await?;
        load(&cluster, async || churn(&mut input, args).await).await
    })
}

fn with_planes(args: &Args, nodes: u32, replicas: usize) -> Result<Load> {
    let (cluster, input) = kube_proxies::cluster(nodes, args.services)?;
    let size = Size {
        agents: nodes,
        services: args.services,
        replicas,
        reports: args.reports,
    };
    inside(cluster.ns(), async {
        let mut fleet = Fleet::at(
            crate::program("kp-controlplane")?,
            size,
            cluster.kubeconfig(),
            input,
        )
        .await?;
        fleet.connect().await?;
        let time = Duration::from_secs(args.seconds);
        let changes = async || Ok(fleet.churn(args.churn, time).await?.changes);
        let load = load(&cluster, changes).await?;
        let violated = fleet.violated();
        anyhow::ensure!(violated == Violated::default(), "{violated:?}");
        Ok(load)
    })
}

/// Makes changes at a rate; returns their number.
async fn churn(input: &mut Input, args: &Args) -> Result<u64> {
    let (begun, mut changes) = (Instant::now(), 0);
    let mut turns = interval(Duration::from_secs(1) / args.churn.max(1));
    turns.set_missed_tick_behavior(MissedTickBehavior::Burst);
    while begun.elapsed().as_secs() < args.seconds {
        turns.tick().await;
        block_in_place(|| input.change())?;
        changes += 1;
    }
    Ok(changes)
}

/// Measures the API server during changes.
async fn load(cluster: &Cluster, changes: impl AsyncFnOnce() -> Result<u64>) -> Result<Load> {
    sleep(SETTLE).await;
    let events = || block_in_place(|| events(cluster));
    let pid = [cluster.apiserver()?];
    let (events_before, cpu_before) = (events()?, usage::cpu(&pid)?);
    let changes = changes().await?;
    sleep(ARRIVE).await;
    let cpu = usage::cpu(&pid)?.saturating_sub(cpu_before);
    Ok(Load {
        changes,
        events: events()? - events_before,
        cpu,
        memory: usage::memory(&pid)?.now,
    })
}

/// Returns the number of events that the server has sent.
fn events(cluster: &Cluster) -> Result<f64> {
    let metrics = cluster.api().text("/metrics")?;
    metrics
        .lines()
        .filter(|line| line.starts_with(EVENTS))
        .map(|line| {
            let (_, count) = line.rsplit_once(' ').context("a counter")?;
            Ok(count.parse::<f64>()?)
        })
        .sum()
}

fn row(who: &str, load: &Load, proxies: &Load) -> String {
    let each = |load: &Load| load.cpu.div_f64(load.changes as f64);
    let row = format!(
        "| {who} | {:.0} | 1/{:.0} | {} | {:.2} x | {} MiB |\n",
        load.events,
        proxies.events / load.events,
        show(each(load)),
        each(load).div_duration_f64(each(proxies)),
        load.memory >> 20,
    );
    print!("{row}");
    row
}
