//! What happens to a fleet, and what comes of it.

use std::process::Command;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kplane_rig::histogram::Histogram;
use kplane_rig::usage::{self, Memory};
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::meter::WayCounts;
use super::plane::agent_address;
use super::{DEADLINE, Fleet, LOOK};

/// Changes at a rate.
#[derive(Debug)]
pub struct Churned {
    /// Number of changes.
    pub changes: u64,
    /// Time in which they were made.
    pub took: Duration,
    /// Time from a change until an agent had it.
    pub latencies: Histogram,
    /// Number of updates that agents got: one may have several changes.
    pub updates: u64,
    /// Number of reports that agents sent.
    pub reports: u64,
    /// CPU time of the control planes.
    pub cpu: Duration,
}

/// Agents that lost their control plane, and came back.
#[derive(Debug)]
pub struct Back {
    /// Number of these agents.
    pub agents: usize,
    /// Time until all of them were up to date again.
    pub took: Duration,
    /// How they got up to date.
    pub ways: WayCounts,
}

/// The end of some of the replicas.
#[derive(Debug)]
pub struct Killed {
    /// Their agents.
    pub back: Back,
    /// Resident memory of the survivors before and after, and agents of theirs.
    pub survivors: [(Memory, usize); 2],
}

/// Agents that stop reading.
#[derive(Debug)]
pub struct Stalled {
    /// Time from a change until each of the others had it, before and meanwhile.
    pub latencies: [Histogram; 2],
    /// Resident memory of the control planes, before and meanwhile.
    pub memory: [Memory; 2],
}

impl Fleet {
    /// Makes changes at a rate for some time, and waits until all agents have them.
    ///
    /// # Errors
    /// Some agents do not get a change.
    pub async fn churn(&mut self, rate: u32, time: Duration) -> Result<Churned> {
        let meter = &self.world.meter;
        meter.latencies();
        let counts = |fleet: &Self| {
            let meter = &fleet.world.meter;
            let [updates, reports] = [&meter.updates, &meter.reports].map(|n| n.load(Relaxed));
            (fleet.input.last(), updates, reports)
        };
        let (before, cpu) = (counts(self), self.usage()?.cpu);
        let begun = Instant::now();
        self.churn_until(rate, |_| begun.elapsed() >= time).await?;
        let took = begun.elapsed();
        self.all_complete().await?;
        let after = counts(self);
        Ok(Churned {
            changes: after.0 - before.0,
            took,
            latencies: self.world.meter.latencies(),
            updates: after.1 - before.1,
            reports: after.2 - before.2,
            cpu: self.usage()?.cpu - cpu,
        })
    }

    /// Waits for some time without any change, and returns the CPU time of the control planes.
    ///
    /// # Errors
    /// A control plane has ended.
    pub async fn rest(&mut self, time: Duration) -> Result<Duration> {
        let before = self.usage()?.cpu;
        sleep(time).await;
        Ok(self.usage()?.cpu - before)
    }

    /// Kills the first replicas while changes go on, and looks at the memory of the others after a time.
    ///
    /// # Errors
    /// Some agents do not come back.
    pub async fn kill(&mut self, replicas: usize, rate: u32, settle: Duration) -> Result<Killed> {
        let others = self.size.replicas.checked_sub(replicas);
        ensure!(
            others.is_some_and(|others| others > 0),
            "no replica would be left of {}",
            self.size.replicas
        );
        let before = self.survivors(replicas)?;
        let begun = Instant::now();
        self.churn_until(rate, |_| begun.elapsed() > Duration::from_secs(1)).await?;
        let agents = self.agents_of(replicas);
        self.world.meter.take_ways();
        let gone = Instant::now();
        for plane in self.planes.iter_mut().take(replicas) {
            // Ends the process with SIGKILL.
            drop(plane.take());
        }
        let back = self.come_back(agents, replicas, rate, gone).await?;
        self.churn_until(rate, |_| gone.elapsed() > settle).await?;
        self.all_complete().await?;
        Ok(Killed {
            back,
            survivors: [before, self.survivors(replicas)?],
        })
    }

    /// Starts the first replicas again, lets their agents go back, and returns the memory and the agents of the others
    /// after a time.
    ///
    /// # Errors
    /// A replica does not start, or some agents do not come back.
    pub async fn revive(&mut self, replicas: usize, settle: Duration) -> Result<(Memory, usize)> {
        let planes = self.places.start_first(replicas).await?;
        for (place, plane) in self.planes.iter_mut().zip(planes) {
            *place = Some(plane);
        }
        self.world.note_pids(self.pids());
        let at_home = self.agents.iter().filter(|agent| agent.first() < replicas).count();
        self.world.home.send_modify(|times| *times += 1);
        let are_back = |fleet: &Self| {
            fleet.agents_of(replicas) >= at_home && fleet.attending() == fleet.agents.len()
        };
        self.churn_until(0, are_back).await?;
        sleep(settle).await;
        self.all_complete().await?;
        self.survivors(replicas)
    }

    fn attending(&self) -> usize {
        self.world.meter.attending()
    }

    /// Cuts the agents of the first replicas off, without a word to either side, while changes go on.
    ///
    /// # Errors
    /// Some agents do not come back, or there is no `nft`.
    pub async fn partition(&mut self, replicas: usize, rate: u32) -> Result<Back> {
        ensure!(replicas < self.size.replicas, "no replica would be left");
        let agents = self.agents_of(replicas);
        self.world.meter.take_ways();
        nft("add table inet fleet")?;
        nft("add chain inet fleet cut { type filter hook input priority 0; }")?;
        let cut = Instant::now();
        for replica in 0..replicas {
            let port = agent_address(replica).port();
            nft(&format!("add rule inet fleet cut tcp dport {port} drop"))?;
            nft(&format!("add rule inet fleet cut tcp sport {port} drop"))?;
        }
        let back = self.come_back(agents, replicas, rate, cut).await?;
        nft("delete table inet fleet")?;
        self.all_complete().await?;
        Ok(back)
    }

    /// Kills all replicas, and starts them again.
    ///
    /// # Errors
    /// A replica does not start, or some agents do not come back.
    pub async fn restart(&mut self) -> Result<Back> {
        let agents = self.agents_of(self.size.replicas);
        self.world.meter.take_ways();
        let gone = Instant::now();
        self.planes.iter_mut().for_each(|plane| drop(plane.take()));
        self.planes = self.places.start().await?;
        self.world.note_pids(self.pids());
        let back = self.come_back(agents, 0, 0, gone).await?;
        self.all_complete().await?;
        Ok(back)
    }

    /// Makes the first agents stop reading, and compares what the others see of changes.
    ///
    /// # Errors
    /// Some of the others do not get a change.
    pub async fn stall(&mut self, agents: u32, changes: usize) -> Result<Stalled> {
        ensure!(agents < self.size.agents, "no agent would be left");
        let (before, _) = self.change(changes).await?;
        let memory = self.usage()?.memory;
        self.world.stalled.send_replace(agents);
        let (meanwhile, _) = self.change(changes).await?;
        let after = self.usage()?.memory;
        self.world.stalled.send_replace(0);
        self.all_attend().await?;
        self.all_complete().await?;
        Ok(Stalled {
            latencies: [before, meanwhile],
            memory: [memory, after],
        })
    }

    /// Returns how many agents the first replicas have.
    fn agents_of(&self, replicas: usize) -> usize {
        self.world.meter.on.iter().take(replicas).map(|count| count.load(Relaxed)).sum()
    }

    /// Returns the memory and the agents of all but the first replicas.
    fn survivors(&self, replicas: usize) -> Result<(Memory, usize)> {
        let survivors = self.planes.iter().skip(replicas).flatten();
        let pids: Vec<u32> = survivors.map(|plane| plane.id()).collect();
        let agents = self.world.meter.attending() - self.agents_of(replicas);
        Ok((usage::memory(&pids)?, agents))
    }

    /// Waits until no agent is at the first replicas and all are up to date.
    async fn come_back(
        &mut self,
        agents: usize,
        replicas: usize,
        rate: u32,
        since: Instant,
    ) -> Result<Back> {
        let are_back = |fleet: &Self| {
            fleet.agents_of(replicas) == 0 && fleet.world.meter.attending() == fleet.agents.len()
        };
        self.churn_until(rate, are_back).await?;
        Ok(Back {
            agents,
            took: since.elapsed(),
            ways: self.world.meter.take_ways(),
        })
    }

    /// Makes changes at a rate, which may be 0, until a condition holds.
    async fn churn_until(&mut self, rate: u32, holds: impl Fn(&Self) -> bool) -> Result<()> {
        let begun = Instant::now();
        let mut turns = interval(Duration::from_secs(1) / rate.max(1));
        turns.set_missed_tick_behavior(MissedTickBehavior::Burst);
        while !holds(self) {
            ensure!(begun.elapsed() < DEADLINE, "not done within {DEADLINE:?}");
            tokio::select! {
                _ = turns.tick(), if rate > 0 => self.publish()?,
                () = sleep(LOOK) => {}
            }
        }
        Ok(())
    }
}

fn nft(line: &str) -> Result<()> {
    let output = Command::new("nft").arg(line).output().context("start nft")?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "nft {line}: {error}");
    Ok(())
}
