//! Fleets of fixed sizes.

use crate::workload::{show, shown};
use anyhow::Result;
use kplane_tests::fleet::{Fleet, Size, apart, percentiles};

use super::floods::{CHANGES, beside_floods};
use crate::goal;

/// Numbers of agents, and of Services that each gets.
const FLEETS: [(u32, u32); 4] = [(1_000, 1), (10_000, 1), (5_000, 10_000), (10_000, 10_000)];
/// Agents beside floods.
const BESIDE: u32 = 1_000;

/// Measures and prints all of them.
pub(crate) fn run() -> Result<()> {
    println!("agents with mutual TLS at one control plane, all on one machine\n");
    println!(
        "{:>7} {:>8} {:>8} | {:>9} {:>11} {:>8} {:>11} | change at all agents: {:>8} {:>8} {:>8} {:>8} {:>12}",
        "agents",
        "Services",
        "reports",
        "connected",
        "CPU",
        "memory",
        "each",
        "p50",
        "p90",
        "p99",
        "max",
        "CPU per agent"
    );
    for (agents, services) in FLEETS {
        for reports in [false, true] {
            apart(measure(agents, services, reports))?;
        }
    }
    println!("\n{BESIDE} agents beside floods from another address\n");
    println!(
        "{:>12} | {:>11} {:>11} | change at all agents: {:>8} {:>8} {:>8} {:>8} {:>8}",
        "flood", "connections", "CPU a second", "p50", "p90", "p99", "max", "p99"
    );
    apart(beside_floods(BESIDE))
}

async fn measure(agents: u32, services: u32, reports: bool) -> Result<()> {
    let size = Size {
        agents,
        services,
        replicas: 1,
        reports,
    };
    let mut fleet = Fleet::start(crate::program("kp-controlplane")?, size).await?;
    let before = fleet.usage()?;
    let connected = fleet.connect().await?;
    let after = fleet.usage()?;
    let each = (after.memory.now - before.memory.now) / 1_024 / u64::from(agents);
    let (latencies, spent) = fleet.change(CHANGES).await?;
    let per_agent = spent / u32::try_from(CHANGES)? / agents;
    println!(
        "{agents:>7} {services:>8} {:>8} | {:>9} {:>11} {:>4} MiB {each:>7} KiB |                       {} {:>12}",
        if reports { "yes" } else { "no" },
        show(connected),
        show(after.cpu - before.cpu),
        after.memory.now >> 20,
        shown(&percentiles(&latencies)),
        show(per_agent),
    );
    if agents == 5_000 {
        let [p99, cpu] = [percentiles(&latencies)[2], per_agent].map(|it| it.as_secs_f64());
        goal::print("a change at 99 % of 5,000 agents", 150.0, p99 * 1e3, "ms");
        goal::print("memory of an agent's stream", 30.0, each as f64, "KiB");
        goal::print("CPU of a delivery", 20.0, cpu * 1e6, "us");
    }
    Ok(())
}
