//! The followers of the data path: health check servers and metrics. They never report more than
//! the kernel holds, and the engine never waits for them.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use futures_util::future::OptionFuture;
use kplane_dataplane::conntrack::{ConntrackCounts, EndedConnections, FailedScans};
use kplane_dataplane::plan::{NodePlan, NodeSettings};
use kplane_model::{Family, ServiceKey, ServiceName, TrafficPolicy};
use tokio::sync::watch;

use super::triggers::{PendingTriggers, Results};
use crate::avoided::Seen;
use crate::canary;
use crate::desired::{Desired, Dirty, View};
use crate::host_checks::{self, Finding, HostFacts, node_ports, pod_ranges};
use crate::metrics::{Counters, FamilyCounters, NAMED, Transaction};
use crate::prestop;
use crate::report::{Avoided, Failure, Subject, Sync, TriggerProgrammed};
use crate::service_connections::ServiceConnections;
use crate::service_health::{self, Publisher};

/// Number of scans for stale UDP flows that fail one after the other until the node is degraded: a second or two.
const LASTING: u64 = 3;

/// Informs the followers. Owned by the engine.
#[derive(Debug)]
pub struct Followers {
    health: Publisher,
    counters: Arc<Counters>,
    no_local: [NoLocal; 2],
    triggers: Results,
    /// Another program that programs this node, or its rules.
    competing_proxy: Option<watch::Receiver<Option<Failure>>>,
    canary: Option<canary::Canary>,
    prestop: Option<prestop::Follower>,
    host_checks: Option<watch::Receiver<HostFacts>>,
    proxy: Option<watch::Receiver<Seen>>,
    connections: Option<Arc<ServiceConnections>>,
    conntrack: ConntrackCounts,
}

/// ServicePorts whose packets are dropped here for lack of a local endpoint (A18), by policy.
#[derive(Debug, Default)]
struct NoLocal {
    internal: HashSet<ServiceKey>,
    external: HashSet<ServiceKey>,
}

impl Default for Followers {
    /// Creates followers of which none is connected.
    fn default() -> Self {
        let (health, _) = service_health::channel();
        Self::new(health, Arc::default())
    }
}

impl Followers {
    /// Creates followers: health check servers, and counters.
    pub fn new(health: Publisher, counters: Arc<Counters>) -> Self {
        Self {
            health,
            counters,
            no_local: Default::default(),
            triggers: Results::default(),
            competing_proxy: None,
            canary: None,
            prestop: None,
            host_checks: None,
            proxy: None,
            connections: None,
            conntrack: ConntrackCounts::default(),
        }
    }

    /// Adds the report of another program that programs this node, or of its rules.
    #[must_use]
    pub fn with_competing_proxy(
        mut self,
        competing_proxy: watch::Receiver<Option<Failure>>,
    ) -> Self {
        self.competing_proxy = Some(competing_proxy);
        self
    }

    /// Adds a canary, whose addresses and answers are followed.
    #[must_use]
    pub fn with_canary(mut self, canary: Option<canary::Canary>) -> Self {
        self.canary = canary;
        self
    }

    /// Adds the answers to preStop hooks, which have to know where the node's Pods are.
    #[must_use]
    pub fn with_prestop(mut self, prestop: Option<prestop::Follower>) -> Self {
        self.prestop = prestop;
        self
    }

    /// Adds the counter of connections, which has to know where ServicePorts are.
    #[must_use]
    pub fn with_connections(mut self, connections: Option<Arc<ServiceConnections>>) -> Self {
        self.connections = connections;
        self
    }

    /// Adds what stands in the way of packets on the node.
    #[must_use]
    pub fn with_host_checks(mut self, host_checks: watch::Receiver<HostFacts>) -> Self {
        self.host_checks = Some(host_checks);
        self
    }

    /// Adds the results of scans for stale UDP flows.
    #[must_use]
    pub(super) fn with_conntrack(mut self, conntrack: ConntrackCounts) -> Self {
        self.conntrack = conntrack;
        self
    }

    /// Adds what the userspace proxy shows of its connections.
    #[must_use]
    pub fn with_proxy(mut self, proxy: watch::Receiver<Seen>) -> Self {
        self.proxy = Some(proxy);
        self
    }

    /// Returns the endpoints that the userspace proxy avoids.
    pub(super) fn avoided(&self) -> Avoided {
        let proxy = self.proxy.as_ref();
        proxy.map_or_else(Vec::new, |proxy| proxy.borrow().avoided.clone())
    }

    /// Returns how many connections have ended, by Service.
    pub(super) fn ended(&self) -> Vec<(ServiceName, EndedConnections)> {
        self.conntrack.ended_by_service()
    }

    /// Returns what stands in the way of packets, and what is not known of the node's addresses.
    pub(super) fn findings(&self, desired: &Desired, settings: &NodeSettings) -> Vec<Finding> {
        let (node, served) = (
            desired.node(),
            Family::ALL.map(|family| desired.counts(family).services > 0),
        );
        let mut found = match &self.host_checks {
            Some(seen) => host_checks::findings(&seen.borrow(), node, settings, served),
            None => Vec::new(),
        };
        found.extend(node_ports::findings(node, settings, served));
        found.extend(pod_ranges::findings(desired));
        found.extend(self.prestop.iter().flat_map(prestop::Follower::findings));
        let seen = self.host_checks.as_ref();
        if let Some(seen) = seen
            && desired.local_pods().any(|pod| !pod.policies.is_empty())
        {
            found.extend(host_checks::unenforced(&seen.borrow()));
        }
        found
    }

    /// Returns whether the canary answers through the data path; `None` while that is not known.
    pub(super) fn canary(&self) -> Option<bool> {
        self.canary.as_ref()?.answers()
    }

    pub(super) fn counters(&self, family: Family) -> &FamilyCounters {
        self.counters.family(family)
    }

    /// Records a transaction, once the kernel has acknowledged it.
    pub(super) fn record(&self, sync: Sync, dirty: &Dirty, complete: bool, error: String) {
        let services = dirty.services.iter().take(NAMED);
        self.counters.transactions.add(Transaction {
            sync,
            touched: dirty.services.len(),
            services: services.map(|key| key.service.to_string()).collect(),
            complete,
            error,
        });
    }

    /// Records that the kernel acknowledged, at `at_ms`, everything that these triggers of a family
    /// led to.
    pub(super) fn acknowledged(
        &mut self,
        family: Family,
        waiting: &mut PendingTriggers,
        at_ms: u64,
    ) {
        let counters = self.counters.family(family);
        waiting.acknowledged(at_ms, counters, &mut self.triggers);
    }

    /// Returns the latest triggers that the kernel holds, oldest first.
    pub(super) fn triggers(&self) -> Arc<VecDeque<TriggerProgrammed>> {
        self.triggers.latest()
    }

    /// Records that the kernel holds the desired state of a family, except for `failures`.
    /// `dirty` is what has changed; `None` = anything. Work follows what has changed.
    pub(super) fn programmed(
        &mut self,
        family: Family,
        node: &NodePlan,
        desired: &Desired,
        dirty: Option<&Dirty>,
        failures: &BTreeMap<ServiceKey, Failure>,
    ) {
        let is_refused = |service: &ServiceName| {
            failures
                .iter()
                .filter(|(_, failure)| !failure.degraded)
                .any(|(key, _)| key.service == *service)
        };
        if let Some(canary) = &self.canary {
            canary.programmed(family, desired, dirty, is_refused);
        }
        if let Some(prestop) = &mut self.prestop {
            prestop.programmed(family, desired, dirty);
        }
        self.health.programmed(family, node, desired, dirty, is_refused);
        self.count_no_local(family, desired, dirty);
        if let Some(connections) = &self.connections {
            learn(connections, family, desired, dirty);
        }
    }

    fn count_no_local(&mut self, family: Family, desired: &Desired, dirty: Option<&Dirty>) {
        let found = &mut self.no_local[family as usize];
        match dirty {
            Some(dirty) => {
                let ours = dirty.services.iter().filter(|key| key.family == family);
                ours.for_each(|key| found.look(key, desired.service(key)));
            }
            None => {
                *found = NoLocal::default();
                for view in desired.services(family) {
                    found.look(&view.0.port.key, Some(view));
                }
            }
        }
        let counts = [found.internal.len() as u64, found.external.len() as u64];
        self.counters.family(family).set_no_local(counts);
    }

    /// Returns health check ports that cannot be opened, another program that programs this node, a canary that does not
    /// answer, ServicePorts of which the userspace proxy refuses clients, and stale UDP flows that stay.
    pub(super) fn failures(&self) -> Vec<Failure> {
        let mut failures = self.health.failures();
        failures.extend(
            self.competing_proxy
                .as_ref()
                .and_then(|competing_proxy| competing_proxy.borrow().clone()),
        );
        failures.extend(self.canary.as_ref().and_then(canary::Canary::failure));
        let proxy = self.proxy.iter();
        failures.extend(proxy.flat_map(|proxy| proxy.borrow().limited.clone()));
        let families = Family::ALL.into_iter().zip(self.conntrack.totals());
        failures.extend(families.filter_map(|(family, of)| stale_flows(family, &of.problem?)));
        failures
    }

    /// Waits until [`Self::failures`], [`Self::canary`], [`Self::findings`] or [`Self::avoided`] changes.
    pub(super) async fn changed(&mut self) {
        let canary = self.canary.as_mut().map(canary::Canary::changed);
        tokio::select! {
            biased;
            () = self.health.failures_changed() => {}
            () = changed(self.competing_proxy.as_mut()) => {}
            Some(()) = OptionFuture::from(canary) => {}
            () = changed(self.host_checks.as_mut()) => {}
            () = changed(self.proxy.as_mut()) => {}
        }
    }
}

/// Learns where the ServicePorts of a family are that have changed; `None` = all.
fn learn(
    connections: &ServiceConnections,
    family: Family,
    desired: &Desired,
    dirty: Option<&Dirty>,
) {
    let look = |key: &ServiceKey| {
        let port = desired.service(key).map(|view| &view.0.port);
        connections.learn(key, port);
    };
    match dirty {
        Some(dirty) => {
            let ours = dirty.services.iter().filter(|key| key.family == family);
            ours.for_each(look);
        }
        None => {
            let all: HashSet<ServiceKey> =
                desired.services(family).map(|view| view.0.port.key.clone()).collect();
            all.iter().for_each(look);
            connections.keep(family, &all);
        }
    }
}

/// Waits until a task reports something new; for ever without one, or once it has ended.
async fn changed<T>(news: Option<&mut watch::Receiver<T>>) {
    let alive = match news {
        Some(news) => news.changed().await.is_ok(),
        None => false,
    };
    if !alive {
        std::future::pending::<()>().await;
    }
}

impl NoLocal {
    fn look(&mut self, key: &ServiceKey, view: Option<View<'_>>) {
        let (internal, external) = view.map_or((false, false), lacks_local);
        for (set, lacks) in [
            (&mut self.internal, internal),
            (&mut self.external, external),
        ] {
            if lacks {
                set.insert(key.clone());
            } else {
                set.remove(key);
            }
        }
    }
}

/// Returns, for the internal and the external policy, whether it is Local with endpoints in the
/// cluster and none on this node.
fn lacks_local((program, local): View<'_>) -> (bool, bool) {
    let port = &program.port;
    let has_local = local.is_some_and(|local| local.selected().next().is_some());
    let lacks = program.has_any && !has_local;
    let is_local = |policy| policy == TrafficPolicy::Local;
    (
        lacks && is_local(port.internal_policy),
        lacks && is_local(port.external_policy) && port.externally_accessible(),
    )
}

/// Returns the failure of a family whose stale UDP flows cannot be deleted. A single scan may fail.
fn stale_flows(family: Family, problem: &FailedScans) -> Option<Failure> {
    let since = problem.since.duration_since(UNIX_EPOCH).unwrap_or_default();
    (problem.times >= LASTING).then(|| Failure {
        about: Subject::Node,
        reason: format!(
            "{family}: cannot delete stale UDP flows, so clients that keep their source port may still reach endpoints \
             that are gone: {}",
            problem.reason
        ),
        since_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
        degraded: true,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn f1_flows_that_cannot_be_deleted_degrade_the_node_until_a_scan_succeeds() {
        let counts = ConntrackCounts::default();
        let followers = Followers::default().with_conntrack(counts.clone());
        let after = |error: Option<&str>| {
            let error = error.map(str::to_owned);
            counts.count(Family::V6, 0, error, Duration::ZERO);
            followers.failures()
        };
        for _ in 1..LASTING {
            assert_eq!(after(Some("no")), []);
        }
        let failures = after(Some("EPERM"));
        assert_eq!(failures.len(), 1);
        assert!(failures[0].degraded && failures[0].about == Subject::Node);
        let reason = &failures[0].reason;
        assert!(
            reason.starts_with("IPv6: ") && reason.ends_with("EPERM"),
            "{reason}"
        );
        assert_eq!(after(None), []);
    }
}
