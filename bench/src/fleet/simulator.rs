//! A fleet of the size that a user plans, step by step.

use std::path::PathBuf;
use std::time::Duration;

use crate::workload::show;
use anyhow::{Result, ensure};
use clap::{ArgAction, Parser};
use kplane_tests::fleet::{Back, Fleet, Size, Violated, percentiles};

use super::table::Table;

/// Time for which nothing changes.
const REST: Duration = Duration::from_secs(20);

/// Simulates a fleet; started by `cargo xtask fleet`, whose help explains the flags.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Number of agents; without it, fleets of fixed sizes are measured.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub(crate) agents: Option<u32>,
    /// Services that each agent holds.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub(crate) services: u32,
    /// Control planes.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=20))]
    replicas: u8,
    /// Single changes, one after the other.
    #[arg(long, default_value_t = 20)]
    changes: usize,
    /// Changes a second, in a further step and while replicas are away.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=10_000))]
    pub(crate) churn: u32,
    /// Duration of that step.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3_600))]
    pub(crate) seconds: u64,
    /// Agents that stop reading.
    #[arg(long)]
    stall: Option<u32>,
    /// Replicas that are cut off from their agents.
    #[arg(long)]
    partition: Option<u8>,
    /// Kills all replicas and starts them again.
    #[arg(long)]
    restart: bool,
    /// Replicas that are killed.
    #[arg(long)]
    kill: Option<u8>,
    /// Time until the memory of the others is compared.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(..=3_600))]
    settle: u64,
    /// Measures the load of an API server instead.
    #[arg(long)]
    pub(crate) api_server: bool,
    /// Measures so many agents without a network instead, each number in a process of its own.
    #[arg(long, value_delimiter = ',')]
    pub(crate) cursors: Vec<u32>,
    /// Whether agents report what they hold.
    #[arg(long, default_value_t = true, action = ArgAction::Set)]
    pub(crate) reports: bool,
    /// File to which a line of JSON is added every second.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Puts the table into docs/benchmarks.md.
    #[arg(long)]
    pub(crate) write: bool,
}

/// Takes a fleet through all steps; returns the table as Markdown.
pub(crate) async fn run(args: &Args, agents: u32) -> Result<String> {
    let size = Size {
        agents,
        services: args.services,
        replicas: args.replicas.into(),
        reports: args.reports,
    };
    let title = title(&size)?;
    println!("{title}\n");
    let mut fleet = Fleet::start(crate::program("kp-controlplane")?, size).await?;
    // Until work that the start has left over is done.
    tokio::time::sleep(Duration::from_secs(2)).await;
    if let Some(path) = &args.trace {
        fleet.trace(path)?;
    }
    let mut table = Table::default();
    let memory_each = connect(&mut fleet, &mut table, agents).await?;
    rest(&mut fleet, &mut table).await?;
    if args.changes > 0 {
        change(&mut fleet, &mut table, args.changes, agents).await?;
    }
    if args.churn > 0 {
        churn(&mut fleet, &mut table, args).await?;
    }
    if let Some(stalled) = args.stall {
        stall(&mut fleet, &mut table, args, stalled).await?;
    }
    if let Some(replicas) = args.partition {
        let back = fleet.partition(replicas.into(), args.churn).await?;
        came_back(&mut table, &format!("{replicas} cut off"), &back, "20 s");
    }
    if args.restart {
        let back = fleet.restart().await?;
        came_back(&mut table, "all control planes restarted", &back, "30 s");
    }
    if let Some(replicas) = args.kill {
        kill(&mut fleet, &mut table, args, replicas, memory_each).await?;
    }
    let violated = fleet.violated();
    let counts = format!("{} lost, {} back", violated.lost, violated.back);
    table.row("violations in all steps", counts, "0, 0");
    ensure!(violated == Violated::default(), "{violated:?}");
    Ok(format!("{title}\n\n{}", table.markdown()))
}

/// Returns when and where this runs, and what.
fn title(size: &Size) -> Result<String> {
    let planes = match size.replicas {
        1 => "1 control plane".to_owned(),
        more => format!("{more} control planes"),
    };
    let reports = if size.reports { "" } else { ", without reports" };
    let (agents, services) = (size.agents, size.services);
    Ok(format!(
        "{agents} agents, {services} Services, {planes}{reports}; {}",
        machine()?
    ))
}

/// Returns when and where this runs.
pub(crate) fn machine() -> Result<String> {
    let load = std::fs::read_to_string("/proc/loadavg")?
        .split(' ')
        .next()
        .unwrap_or_default()
        .to_owned();
    let cores = std::thread::available_parallelism()?;
    Ok(format!(
        "{}, {cores} cores, load {load} before the start",
        jiff::Zoned::now().date()
    ))
}

/// Connects all agents; returns the memory for each of them, in bytes.
async fn connect(fleet: &mut Fleet, table: &mut Table, agents: u32) -> Result<u64> {
    let before = fleet.usage()?;
    let took = fleet.connect().await?;
    let after = fleet.usage()?;
    let grown = after.memory.now.saturating_sub(before.memory.now);
    table.row("all connected, with everything", seconds(took), "30 s");
    table.row("its CPU", seconds(after.cpu - before.cpu), "");
    table.row(
        "memory of the control planes",
        mib(after.memory.now),
        "600 MiB",
    );
    let each = grown / u64::from(agents);
    let kib = format!("{} KiB", each / 1_024);
    table.row("memory for each agent", kib, "30 KiB");
    Ok(each)
}

async fn change(fleet: &mut Fleet, table: &mut Table, changes: usize, agents: u32) -> Result<()> {
    let (latencies, spent) = fleet.change(changes).await?;
    table.row(
        "one change: 50, 90, 99 %, all",
        times(&percentiles(&latencies)),
        "50 %: 80 ms, all: 200 ms",
    );
    let cpu_each = spent / u32::try_from(changes)? / agents;
    table.row("its CPU for each agent", show(cpu_each), "");
    Ok(())
}

async fn rest(fleet: &mut Fleet, table: &mut Table) -> Result<()> {
    let cpu = fleet.rest(REST).await?.div_duration_f64(REST);
    let what = format!("CPU of {} s without a change", REST.as_secs());
    table.row(what, format!("{:.1} % of a core", cpu * 100.0), "1 %");
    Ok(())
}

async fn churn(fleet: &mut Fleet, table: &mut Table, args: &Args) -> Result<()> {
    let churned = fleet.churn(args.churn, Duration::from_secs(args.seconds)).await?;
    let what = format!(
        "{} changes/s for {} s: 50, 90, 99 %, all",
        args.churn, args.seconds
    );
    let goal = "50 %: 100 ms, 99 %: 500 ms";
    table.row(what, times(&percentiles(&churned.latencies)), goal);
    let rates = format!(
        "{:.0} changes/s made; {:.0} updates/s, {:.0} reports/s, {:.2} CPUs",
        churned.changes as f64 / churned.took.as_secs_f64(),
        churned.updates as f64 / churned.took.as_secs_f64(),
        churned.reports as f64 / churned.took.as_secs_f64(),
        churned.cpu.div_duration_f64(churned.took),
    );
    table.row("its rates", rates, "");
    Ok(())
}

async fn stall(fleet: &mut Fleet, table: &mut Table, args: &Args, agents: u32) -> Result<()> {
    let stalled = fleet.stall(agents, args.changes.max(1)).await?;
    let [before, after] = stalled.latencies.map(|of| percentiles(&of)[2]);
    let ratio = after.div_duration_f64(before);
    let moved = format!("{} -> {} ({ratio:.2}x)", show(before), show(after));
    let what = format!("{agents} stalled: 99 % of others");
    table.row(what, moved, "1.05x");
    let [before, after] = stalled.memory.map(|memory| memory.now);
    let grown = after.saturating_sub(before);
    table.row("memory that they cost", mib(grown), "50 MiB");
    Ok(())
}

async fn kill(
    fleet: &mut Fleet,
    table: &mut Table,
    args: &Args,
    replicas: u8,
    memory_each: u64,
) -> Result<()> {
    let settle = Duration::from_secs(args.settle);
    let killed = fleet.kill(replicas.into(), args.churn, settle).await?;
    let what = format!("{replicas} of {} killed", args.replicas);
    came_back(table, &what, &killed.back, "10 s");
    let [before, after] = killed.survivors;
    let more = after.1.saturating_sub(before.1) as u64;
    let needed = before.0.now + more * memory_each;
    let memory = format!(
        "{} with {} agents -> {} with {} ({:.2} x of what they need), at most {}",
        mib(before.0.now),
        before.1,
        mib(after.0.now),
        after.1,
        after.0.now as f64 / needed as f64,
        mib(after.0.most),
    );
    let what = format!("the others' memory after {} s", args.settle);
    table.row(what, memory, "within 5 %");
    let (memory, agents) = fleet.revive(replicas.into(), settle).await?;
    let memory = format!(
        "{} with {agents} ({:.2} x of before)",
        mib(memory.now),
        memory.now as f64 / before.0.now as f64
    );
    let what = format!("{} s after all are back where they were", args.settle);
    table.row(what, memory, "within 5 %");
    Ok(())
}

fn came_back(table: &mut Table, what: &str, back: &Back, goal: &str) {
    let took = format!("{} agents in {}", back.agents, seconds(back.took));
    table.row(format!("{what}: all back"), took, goal);
    let ways = back.ways;
    let how = format!(
        "{} equal, {} changes, {} ranges, {} snapshots",
        ways.equal, ways.changes, ways.ranges, ways.snapshots
    );
    table.row("how they resumed", how, "0 snapshots");
    let bytes = format!("{} B, at most {} B", ways.mean_bytes(), ways.most_bytes);
    table.row("bytes for each", bytes, "1 KiB");
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

fn times(times: &[Duration]) -> String {
    let times = times.iter().map(|time| show(*time));
    Vec::from_iter(times).join(", ")
}
