//! A small fleet of simulated agents at real control planes: what `cargo xtask fleet` measures is right.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::fleet::{Fleet, Size, Violated, apart};

use crate::cluster::support::world::product;

const SIZE: Size = Size {
    agents: 50,
    services: 20,
    replicas: 2,
    reports: true,
};
/// Changes a second.
const CHURN: u32 = 20;

/// Agents follow changes. Some stop reading, one of two replicas is killed, the other restarts: all agents hold all
/// changes, nothing was lost or came back, and nobody needed a snapshot.
pub(crate) fn agents_resume_at_other_replicas_and_lose_nothing() -> Result<()> {
    apart(async {
        let mut fleet = Fleet::start(product()?.control_plane.clone(), SIZE).await?;
        fleet.connect().await?;
        // Each agent has its Node as well.
        ensure!(fleet.objects() == 21, "{} objects", fleet.objects());
        let churned = fleet.churn(CHURN, Duration::from_secs(3)).await?;
        let deliveries = churned.changes * u64::from(SIZE.agents);
        ensure!(churned.latencies.count() == deliveries, "{churned:?}");
        ensure!(churned.reports > 0, "no reports");
        fleet.stall(10, 3).await?;
        let killed = fleet.kill(1, CHURN, Duration::ZERO).await?;
        ensure!(killed.back.agents > 0, "the replica had no agent");
        ensure!(killed.back.ways.snapshots == 0, "{:?}", killed.back.ways);
        ensure!(killed.survivors[1].1 == 50, "{:?}", killed.survivors);
        let back = fleet.restart().await.context("restart")?;
        ensure!(back.ways.snapshots == 0, "{:?}", back.ways);
        ensure!(back.ways.equal > 0, "{:?}", back.ways);
        let violated = fleet.violated();
        ensure!(violated == Violated::default(), "{violated:?}");
        Ok(())
    })
}
