//! Tests of the engine: with time as an argument, and once with its thread.

mod checkpoint;
mod drift;
mod followers;
mod offline_start;
mod policies;
mod settings;
mod steps;
mod thread;
mod triggers;
mod withheld;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use kplane_model::{Cidr, DesiredKey, DesiredObject, Family, ServiceKey};

use super::core::Core;
use super::now::Now;
use super::*;
use crate::desired::Position;
use crate::desired::fixture::{EPOCH, Plane, key_of, local, node, svc, svc6};
use crate::metrics::{Counters, FamilyCounters, Gauge};
use crate::service_health;
use kplane_dataplane::backend::{
    Applied, ApplyError, Change, Failure, Notifications, Side, Verification,
    noop::{self, Noop},
};
use kplane_dataplane::plan::{NodePlan, ServicePlan};

/// The behaviour of a scripted backend, and the calls that it got.
#[derive(Debug, Default)]
struct Script {
    /// Families that refuse every change.
    broken: Vec<Family>,
    /// The results of the next readings of a family.
    drift: Vec<(Family, &'static str)>,
    outdated: Option<&'static str>,
    /// The changes of other programs, as the kernel reports them.
    drifted: Vec<(Family, &'static str)>,
    unreadable: bool,
    /// Whether the kernel has Services of an earlier process.
    found: bool,
    /// ServicePorts that are refused.
    refused: Vec<ServiceKey>,
    /// The content of the kernel.
    kernel: BTreeMap<ServiceKey, ServicePlan>,
    /// The node's own settings that the kernel holds.
    nodes: BTreeMap<Family, NodePlan>,
    calls: Vec<String>,
}

#[derive(Clone, Debug, Default)]
struct Scripted(Arc<Mutex<Script>>);

impl Scripted {
    fn lock(&self) -> MutexGuard<'_, Script> {
        self.0.lock().unwrap()
    }

    fn backend(&self) -> Backend {
        let side = |family| {
            let script = self.clone();
            Box::new(ScriptedSide { family, script }) as Box<dyn Side>
        };
        Backend {
            notifications: Some(Box::new(self.clone())),
            ..noop::open_with(side)
        }
    }

    fn set(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.0.lock().unwrap());
    }

    /// Calls since the last time, such as `apply IPv4 complete a,b`.
    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().calls)
    }

    /// Sources that count as pods in the kernel.
    fn pod_sources(&self, family: Family) -> Vec<Cidr> {
        let script = self.0.lock().unwrap();
        let node = script.nodes.get(&family);
        node.map(|node| node.pod_sources.clone()).unwrap_or_default()
    }

    fn kernel(&self) -> Vec<String> {
        let script = self.0.lock().unwrap();
        script.kernel.keys().map(|key| key.service.name.to_string()).collect()
    }
}

fn refuse(family: Family, what: &str) -> ApplyError {
    ApplyError {
        family,
        source: what.to_owned().into(),
    }
}

/// One family of a scripted backend.
struct ScriptedSide {
    family: Family,
    script: Scripted,
}

impl Side for ScriptedSide {
    fn apply(&mut self, change: Change<'_>) -> Result<Applied, ApplyError> {
        let mut script = self.script.lock();
        let complete = if change.complete { " complete" } else { "" };
        let names = change
            .services
            .iter()
            .map(|(key, plan)| {
                let gone = if plan.is_none() { "-" } else { "" };
                format!("{gone}{}", key.service.name)
            })
            .collect::<Vec<_>>()
            .join(",");
        script.calls.push(format!("apply {}{complete} {names}", change.family));
        if script.broken.contains(&change.family) {
            return Err(refuse(change.family, "no such family"));
        }
        script.nodes.insert(change.family, change.node.clone());
        if change.complete {
            script.kernel.retain(|key, _| key.family != change.family);
        }
        let mut applied = Applied {
            operations: change.services.len() as u64,
            bytes: 100,
            ..Applied::default()
        };
        for (key, plan) in change.services {
            match plan {
                Some(_) if script.refused.contains(key) => applied.failures.push(Failure {
                    key: key.clone(),
                    reason: "taken by another program".into(),
                    degraded: true,
                }),
                Some(plan) => drop(script.kernel.insert(key.clone(), plan.clone())),
                None => drop(script.kernel.remove(key)),
            }
        }
        Ok(applied)
    }

    fn verify(&mut self) -> Result<Verification, ApplyError> {
        let family = self.family;
        let mut script = self.script.lock();
        script.calls.push(format!("verify {family}"));
        if script.unreadable {
            return Err(refuse(family, "interrupted"));
        }
        if let Some(what) = script.outdated.take() {
            return Ok(Verification::Outdated(what.into()));
        }
        let drift = script.drift.iter().position(|(of, _)| *of == family);
        Ok(match drift.map(|at| script.drift.remove(at).1) {
            Some(what) => Verification::Drifted(what.into()),
            None => Verification::Equal,
        })
    }

    fn repair(&mut self) -> Result<Verification, ApplyError> {
        let family = self.family;
        let mut script = self.script.lock();
        script.calls.push(format!("mend {family}"));
        let at = script.drifted.iter().position(|(of, _)| *of == family);
        Ok(match at.map(|at| script.drifted.remove(at).1) {
            Some(what) => Verification::Repaired(what.into()),
            None => Verification::Equal,
        })
    }

    fn has_services(&mut self) -> bool {
        self.script.lock().found
    }
}

impl Notifications for Scripted {
    fn readiness(&self) -> Option<OwnedFd> {
        None
    }

    fn read(&mut self) -> [bool; 2] {
        let script = self.lock();
        Family::ALL.map(|family| script.drifted.iter().any(|(of, _)| *of == family))
    }
}

/// A control plane, an engine without its thread, and a clock that stands still.
struct Rig {
    plane: Plane,
    core: Core,
    script: Scripted,
    counters: Arc<Counters>,
    now: Now,
}

impl Rig {
    fn new(objects: impl IntoIterator<Item = DesiredObject>) -> Self {
        let script = Scripted::default();
        let counters = Arc::<Counters>::default();
        let (publisher, _) = service_health::channel();
        let followers = Followers::new(publisher, counters.clone());
        Self {
            plane: Plane::new(objects),
            core: Core::new(script.backend(), NodeSettings::default(), followers),
            script,
            counters,
            now: Now::real(),
        }
    }

    /// Creates a rig that took a snapshot and was read back.
    fn settled(objects: impl IntoIterator<Item = DesiredObject>) -> Self {
        let mut rig = Self::new(objects);
        rig.snapshot();
        rig.idle();
        rig.script.calls();
        rig
    }

    /// Ends the process in order, and starts the next one.
    fn restart(&mut self, restore: CheckpointSettings) {
        let (publisher, _) = service_health::channel();
        let followers = Followers::new(publisher, self.counters.clone());
        let backend = self.script.backend();
        let next = Core::new(backend, NodeSettings::default(), followers);
        std::mem::replace(&mut self.core, next).close();
        self.core.restore(restore);
    }

    fn update(&mut self, update: Update) {
        let work = self.core.take(update).unwrap();
        self.core.program(&work, self.now);
    }

    fn snapshot(&mut self) {
        let update = self.plane.snapshot_update();
        self.update(update);
    }

    fn delta(&mut self) {
        let update = self.plane.delta_update();
        self.update(update);
    }

    fn put(&mut self, object: &DesiredObject) {
        self.plane.put(object);
        self.delta();
    }

    fn after(&mut self, wait: Duration) {
        self.now.instant += wait;
        self.now.ms += u64::try_from(wait.as_millis()).unwrap();
    }

    /// Does everything that is due now.
    fn idle(&mut self) {
        while self.core.due().is_some_and(|at| at <= self.now.instant) {
            self.core.tick(self.now);
        }
    }

    /// Waits for the next thing that is due and does it; returns how long that took.
    fn next(&mut self) -> Duration {
        let wait = self.core.due().unwrap().saturating_duration_since(self.now.instant);
        self.after(wait);
        self.core.tick(self.now);
        wait
    }

    /// Waits until the backend is called; returns how long that took. The tables of policies have their turns as well.
    fn until_called(&mut self) -> Duration {
        let mut wait = Duration::ZERO;
        while self.script.lock().calls.is_empty() {
            wait += self.next();
        }
        wait
    }

    /// Revisions applied and verified.
    fn revisions(&self) -> (u64, u64) {
        let report = self.core.report();
        let of = |at: Option<Position>| at.map_or(0, |at| at.revision);
        (of(report.applied), of(report.verified))
    }

    fn programmed(&self) -> [bool; 2] {
        self.core.report().families.map(|family| family.programmed)
    }
}

const SECOND: Duration = Duration::from_secs(1);
