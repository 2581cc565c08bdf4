//! A line of JSON a second about a fleet.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use kplane_rig::usage;
use serde_json::json;
use tokio::time::interval;

use super::agent::World;
use super::{Fleet, percentiles};

impl Fleet {
    /// Adds a line to a file every second from now on.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn trace(&mut self, path: &Path) -> Result<()> {
        let file = File::create(path).with_context(|| format!("create {}", path.display()))?;
        self.tasks.spawn(lines(file, Arc::clone(&self.world)));
        Ok(())
    }
}

async fn lines(mut file: File, world: Arc<World>) {
    let begun = Instant::now();
    let mut turns = interval(Duration::from_secs(1));
    loop {
        turns.tick().await;
        let line = line(&world, begun.elapsed());
        if writeln!(file, "{line}").is_err() {
            return;
        }
    }
}

fn line(world: &World, at: Duration) -> serde_json::Value {
    let meter = &world.meter;
    let latest = meter.latest();
    let [p50, _, p99, max] = percentiles(&latest).map(|took| took.as_secs_f64() * 1e3);
    let violated = meter.violated();
    // Nothing is known of a process that has ended.
    let pids = world.pids();
    let planes = pids.iter().map(|pid| {
        let of = [*pid];
        let cpu = usage::cpu(&of).ok().map(|cpu| cpu.as_secs_f64());
        let memory = usage::memory(&of).ok().map(|memory| memory.now);
        json!({"cpu_s": cpu, "memory_bytes": memory})
    });
    json!({
        "at_s": at.as_secs_f64(),
        "agents": meter.on.iter().map(|on| on.load(Relaxed)).collect::<Vec<_>>(),
        "updates": meter.updates.load(Relaxed),
        "reports": meter.reports.load(Relaxed),
        "deliveries": latest.count(),
        "p50_ms": p50, "p99_ms": p99, "max_ms": max,
        "lost": violated.lost, "back": violated.back, "unreadable": violated.unreadable,
        "control_planes": planes.collect::<Vec<_>>(),
    })
}
