//! The backend under test, in a node's namespace.

use std::sync::Arc;

use anyhow::{Result, ensure};
use kplane_dataplane::backend::Proxy;
use kplane_dataplane::backend::Verification;
use kplane_dataplane::backend::ipvs::{self, OperationBudget};
use kplane_dataplane::backend::{Applied, Backend, Change, Failure, Kind, Settings};
use kplane_dataplane::conntrack::{ConntrackCounts, Sweeper};
use kplane_dataplane::leftovers;
use kplane_dataplane::plan::{NodePlan, NodeSettings, ServicePlan};
use kplane_model::{Family, NodeFacts, ServiceKey};
use kplane_rig::netns::NetNs;

use super::service::Svc;
use super::under_test::UnderTest;

/// A backend with what it has to know of its node.
pub struct Agent {
    pub ns: NetNs,
    pub facts: NodeFacts,
    pub settings: NodeSettings,
    /// Counts from the next start.
    pub backend_settings: Settings,
    kind: Kind,
    backend: Backend,
    /// Deletes stale conntrack entries, if asked to.
    pub conntrack: Option<Sweeper>,
    /// What [`Agent::conntrack`] has done.
    pub conntrack_counts: ConntrackCounts,
}

/// What became of a change in both families together.
#[derive(Debug, Default)]
pub struct Done {
    pub operations: u64,
    pub bytes: u64,
    pub failures: Vec<Failure>,
    /// What others had changed, and was put right before.
    pub repaired: Vec<String>,
}

/// ServicePorts with their plans, or without when they are gone.
pub(super) type Plans = Vec<(ServiceKey, Option<ServicePlan>)>;

impl Agent {
    /// Opens the backend under test in a namespace.
    pub fn open(ns: &NetNs, facts: NodeFacts, settings: NodeSettings) -> Result<Self> {
        Self::open_kind(UnderTest::current()?.kind(), ns, facts, settings)
    }

    /// The same with settings of the backend.
    pub fn open_with(
        ns: &NetNs,
        facts: NodeFacts,
        settings: NodeSettings,
        backend_settings: Settings,
    ) -> Result<Self> {
        let kind = UnderTest::current()?.kind();
        Self::of(kind, ns, facts, settings, backend_settings)
    }

    /// Opens a backend in a namespace.
    pub fn open_kind(
        kind: Kind,
        ns: &NetNs,
        facts: NodeFacts,
        settings: NodeSettings,
    ) -> Result<Self> {
        Self::of(kind, ns, facts, settings, Settings::default())
    }

    fn of(
        kind: Kind,
        ns: &NetNs,
        facts: NodeFacts,
        settings: NodeSettings,
        backend_settings: Settings,
    ) -> Result<Self> {
        Ok(Self {
            ns: ns.clone(),
            facts,
            settings,
            kind,
            backend: open(kind, ns, &backend_settings)?,
            backend_settings,
            conntrack: None,
            conntrack_counts: ConntrackCounts::default(),
        })
    }

    /// Deletes stale conntrack entries after changes from now on, as an engine does.
    pub fn clean_conntrack(&mut self) -> Result<()> {
        self.conntrack_counts = ConntrackCounts::default();
        let counts = self.conntrack_counts.clone();
        self.conntrack = Some(self.ns.run(|| Ok(Sweeper::start(counts, Box::new(drop))?))?);
        Ok(())
    }

    /// A new process takes over: nothing is remembered but what the kernel holds.
    pub fn restart(&mut self) -> Result<()> {
        self.end();
        self.backend = open(self.kind, &self.ns, &self.backend_settings)?;
        if self.conntrack.is_some() {
            self.clean_conntrack()?;
        }
        Ok(())
    }

    /// Returns the userspace proxy, if the backend has one.
    pub fn proxy(&self) -> Option<Arc<dyn Proxy>> {
        self.backend.proxy.get()
    }

    /// Returns why the kernel last served in the userspace proxy's place, and the proxy's open connections and flows.
    pub fn proxys_state(&self) -> String {
        let open = self.proxy().map(|proxy| proxy.open());
        format!("{:?}, open {open:?}", self.backend.proxy.last_lapse())
    }

    /// Ends the agent's process, as far as the kernel can see.
    pub fn end(&mut self) {
        self.backend = kplane_dataplane::backend::noop::open();
    }

    /// The same with a backend of IPVS that stops for good when a budget is used up.
    pub fn restart_stopping(&mut self, budget: &OperationBudget) -> Result<()> {
        let open = || Ok(ipvs::open_stopping(&self.backend_settings, budget)?);
        self.backend = self.ns.run(open)?;
        Ok(())
    }

    /// Makes these Services everything there is.
    pub fn replace(&mut self, services: &[Svc]) -> Result<Done> {
        self.both(|agent, family| agent.apply(family, &agent.plans(family, services), true))
    }

    /// Adds or changes these Services.
    pub fn update(&mut self, services: &[Svc]) -> Result<Done> {
        self.both(|agent, family| agent.apply(family, &agent.plans(family, services), false))
    }

    /// Deletes Services and adds or changes others, in one change. A ServicePort in both is changed.
    pub fn exchange(&mut self, gone: &[Svc], services: &[Svc]) -> Result<Done> {
        self.both(|agent, family| {
            let new = agent.plans(family, services);
            let mut plans = agent.plans(family, gone);
            plans.retain(|(key, _)| new.iter().all(|(other, _)| other != key));
            plans.iter_mut().for_each(|(_, plan)| *plan = None);
            plans.extend(new);
            agent.apply(family, &plans, false)
        })
    }

    /// Plans Services for this node.
    pub fn plans(&self, family: Family, services: &[Svc]) -> Plans {
        services.iter().flat_map(|svc| svc.plans(family, &self.facts)).collect()
    }

    /// One change of one family, as an engine makes it.
    pub fn apply(&mut self, family: Family, services: &Plans, complete: bool) -> Result<Applied> {
        let node = NodePlan::new(family, &self.facts, &self.settings);
        let change = Change {
            family,
            node: &node,
            services,
            complete,
        };
        let applied = self.ns.run(|| Ok(self.backend.side(family).apply(change)?))?;
        if let Some(conntrack) = &self.conntrack {
            conntrack.committed(&change, &applied.failures);
        }
        Ok(applied)
    }

    /// Compares the data path with what was applied.
    pub fn verify(&mut self, family: Family) -> Result<Verification> {
        self.ns.run(|| Ok(Verification::of_all(|| self.backend.side(family).verify())?))
    }

    /// Puts right what the kernel says that others changed; what was wrong with each family that they did.
    pub fn repair(&mut self) -> Result<Vec<Verification>> {
        self.ns.run(|| {
            let notifications = self.backend.notifications.as_mut();
            let drifted = notifications.map_or([false, false], |reports| reports.read());
            let drifted = Family::ALL.into_iter().zip(drifted);
            drifted
                .filter(|(_, drifted)| *drifted)
                .map(|(family, _)| Ok(self.backend.side(family).repair()?))
                .collect()
        })
    }

    /// Wants the data path of both families to be as applied.
    pub fn ensure_equal(&mut self) -> Result<()> {
        for family in Family::ALL {
            let verification = self.verify(family)?;
            ensure!(
                verification == Verification::Equal,
                "{family}: {verification:?}"
            );
        }
        Ok(())
    }

    /// Takes everything of kplane's out of the data path, as `--cleanup` does once the agent has ended. A test that
    /// goes on restarts the agent.
    pub fn cleanup(&self) -> Result<()> {
        let (kind, settings) = (self.kind, &self.backend_settings);
        let ours = || leftovers::ours(kind, settings).remove();
        let problems = self.ns.run(|| Ok(ours().problems))?;
        ensure!(problems.is_empty(), "{problems:?}");
        Ok(())
    }

    /// A family that fails does not keep the other from its change.
    fn both(
        &mut self,
        mut apply: impl FnMut(&mut Self, Family) -> Result<Applied>,
    ) -> Result<Done> {
        let mut done = Done::default();
        for applied in Family::ALL.map(|family| apply(self, family)) {
            let mut applied = applied?;
            done.operations += applied.operations;
            done.bytes += applied.bytes;
            done.failures.append(&mut applied.failures);
            done.repaired.extend(applied.repaired);
        }
        Ok(done)
    }
}

fn open(kind: Kind, ns: &NetNs, settings: &Settings) -> Result<Backend> {
    ns.run(|| Ok(kind.open(settings)?))
}
