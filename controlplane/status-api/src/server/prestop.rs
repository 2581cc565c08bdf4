//! Pods that wait to end: agents ask when no kernel leads new connections to a Pod any more.
//!
//! ```text
//! agent --Leaving--> stream -> PrestopQuestions -> serve -> Depart: index, store, reports of all agents -> Wait
//!       <---Left---- stream <------------------------------ the outcome, once --------------------------
//! ```
//!
//! Each question has a task of its own, which looks again when a report or a change of the source comes. What is missing is
//! in `wait.rs`. The criterion is [`Index::lead`](kplane_desired_state::index::Index::lead): the rules of no node lead new
//! connections to the Pod. A node counts when it is in reach, and has confirmed when its kernel holds the first revision
//! without the Pod, and it keeps no Service whose absence it does not believe. A node that its neighbours do not reach need
//! not confirm. Nodes of other replicas confirm by the digest of the Service (`Standings`).

#[cfg(test)]
mod tests;
mod wait;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kplane_agents::hub::{Closing, Hub};
use kplane_agents::peers::{Collected, Peers};
use kplane_agents::prestop::Leaving;
use kplane_desired_state::index::PodEndpoints;
use kplane_desired_state::publish::Followed;
use kplane_model::select::Lead;
use kplane_model::{NodeName, ServiceName};
use kplane_proto::v1 as pb;
use kplane_proto::v1::LeavingOutcome;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use self::wait::Wait;
use super::convergence::counts;
use super::lag::{failure_of, report_of};
use super::millis;
use super::others::Others;
use super::pages::{Node, Snapshot};
use super::service_on_node::Standings;

/// Shortest time between two looks.
const PAUSE: Duration = Duration::from_millis(5);
/// Share of the time that one wait may spend on its looks: one part in this many.
const SHARE: u32 = 10;
/// Longest time between two looks while other replicas have a part in the answer, which wake nobody.
const REFRESH: Duration = Duration::from_millis(100);
/// Time after the end of its stream for which a node is still in reach: its agent may be restarting, and its kernel goes on
/// leading to the Pod.
const AWAY: Duration = Duration::from_secs(30);
/// Time for which a Pod that no EndpointSlice names is looked for: what this control plane reads may be late.
const UNKNOWN: Duration = Duration::from_secs(2);
/// Maximum number of Services that an answer names.
const SERVICES: usize = 16;

/// Answers questions until the control plane ends.
pub async fn serve(hub: Arc<Hub>, peers: Option<Arc<Peers>>) {
    let Some(mut questions) = hub.streams().departures.take_questions() else {
        return;
    };
    while let Some(leaving) = questions.recv().await {
        tokio::spawn(Depart::answer(Arc::clone(&hub), peers.clone(), leaving));
    }
}

/// One Pod that waits.
struct Depart {
    hub: Arc<Hub>,
    pod: PodEndpoints,
    /// The Pod's Services, and what other replicas tell of each.
    followed: Vec<(Followed, Others)>,
    wait: Wait,
    /// Those of its Services that have no endpoints now. A node that does not believe this keeps them.
    emptied: BTreeSet<ServiceName>,
    /// The latest time of the answer while rules lead to the Pod and no EndpointSlice says that it is terminating.
    unless_terminating: Instant,
    is_serving: bool,
}

impl Depart {
    async fn answer(hub: Arc<Hub>, peers: Option<Arc<Peers>>, leaving: Leaving) {
        let began = Instant::now();
        let (until, unless_terminating) = (leaving.until, leaving.unless_terminating);
        let address = leaving.addresses.first().copied();
        let node = leaving.node.clone();
        let mut answer = leaving.answer;
        let pod = (leaving.node, leaving.addresses, leaving.port);
        // The agent asks again on its next stream if this one ends.
        let found = tokio::select! {
            found = timeout_at(until, Self::find(hub, peers.as_ref(), pod)) => found,
            () = answer.closed() => return,
        };
        // Without an answer, the agent waits until the time is over.
        let Ok(Some(mut depart)) = found else { return };
        depart.unless_terminating = unless_terminating;
        tokio::select! {
            over = timeout_at(until, depart.over(peers.is_some())) => if let Ok(Err(Closing)) = over {
                return;
            },
            () = answer.closed() => return,
        }
        let (outcome, reason) = depart.wait.ends();
        // The agent may have gone.
        let _ = answer.send(outcome);
        if !depart.pod.services.is_empty() {
            let departure = depart.departure(address, &node, began.elapsed(), (outcome, reason));
            depart.hub.streams().departures.note(departure);
        }
    }

    /// Finds the Pod, once the source has been read. Returns `None` if the control plane ends, or there are so many watches
    /// that agents of other replicas cannot confirm.
    async fn find(
        hub: Arc<Hub>,
        peers: Option<&Arc<Peers>>,
        (node, addresses, port): (NodeName, Vec<IpAddr>, u16),
    ) -> Option<Self> {
        let mut head = hub.store().head();
        head.wait_for(|head| head.synced).await.ok()?;
        let known = Self::known(&hub, &node, &addresses, port);
        let pod = known.await.ok()?;
        let mut followed = Vec::new();
        for service in &pod.services {
            let others = Others::follow(peers, Some(service.clone())).await.ok()?;
            let mut service = Followed::new(service.clone());
            // From now on: what is deleted later may be forgotten soon.
            hub.store().follow(&mut service);
            followed.push((service, others));
        }
        Some(Self {
            wait: Wait::new(pod.services.iter().cloned()),
            hub,
            pod,
            followed,
            emptied: BTreeSet::new(),
            unless_terminating: Instant::now(),
            is_serving: false,
        })
    }

    /// Returns the endpoints of a Pod, as soon as an EndpointSlice names it; nothing if none does for a while.
    async fn known(
        hub: &Hub,
        node: &NodeName,
        addresses: &[IpAddr],
        port: u16,
    ) -> Result<PodEndpoints, Closing> {
        let mut changes = hub.index().summary();
        let until = Instant::now() + UNKNOWN;
        loop {
            let began = Instant::now();
            changes.mark_unchanged();
            let (node, addresses) = (node.clone(), addresses.to_vec());
            let pod = hub.index().look(move |index| index.pod_at(&node, &addresses, port)).await?;
            if !pod.services.is_empty() {
                return Ok(pod);
            }
            let pause = pause_after(began);
            match timeout_at(until, changes.changed()).await {
                Ok(changed) => changed.map_err(|_| Closing)?,
                Err(_) => return Ok(pod),
            }
            sleep(pause).await;
        }
    }

    /// Waits until nothing is missing, or a Pod that is not terminating has waited for long enough.
    async fn over(&mut self, has_peers: bool) -> Result<(), Closing> {
        let mut agents = self.hub.agents().changes();
        let mut changes = self.hub.index().summary();
        let mut suspects = self.hub.suspects().changes();
        let mut is_new = true;
        loop {
            let began = Instant::now();
            if is_new {
                changes.mark_unchanged();
                self.look_at_source().await?;
            }
            agents.mark_unchanged();
            suspects.mark_unchanged();
            self.look_at_nodes();
            if self.wait.is_over() {
                return Ok(());
            }
            sleep(pause_after(began)).await;
            let refresh = Instant::now() + REFRESH;
            is_new = tokio::select! {
                biased;
                () = sleep_until(self.unless_terminating), if self.is_serving => return Ok(()),
                changed = changes.changed() => {
                    changed.map_err(|_| Closing)?;
                    true
                }
                changed = suspects.changed() => {
                    changed.map_err(|_| Closing)?;
                    false
                }
                changed = agents.changed() => {
                    changed.map_err(|_| Closing)?;
                    false
                }
                () = sleep_until(refresh), if has_peers => false,
            };
        }
    }

    /// Looks whether rules still lead to the Pod.
    async fn look_at_source(&mut self) -> Result<(), Closing> {
        if !self.hub.store().head().borrow().synced {
            return Ok(());
        }
        let (pod, store) = (self.pod.clone(), Arc::clone(self.hub.store()));
        let looked = self.hub.index().look(move |index| {
            let services = || pod.services.iter();
            let leads: Vec<(ServiceName, Option<Lead>)> =
                services().map(|service| (service.clone(), index.lead(service, &pod))).collect();
            let emptied = services().filter(|service| index.is_without_endpoints(service));
            let revision = store.head().borrow().revision;
            let emptied = emptied.cloned().collect::<BTreeSet<_>>();
            (leads, emptied, index.is_terminating(&pod), revision)
        });
        let (leads, emptied, is_terminating, revision) = looked.await?;
        self.emptied = emptied;
        self.is_serving = !is_terminating && leads.iter().any(|(_, lead)| lead.is_some());
        for (service, lead) in leads {
            self.wait.led(&service, lead, revision);
        }
        Ok(())
    }

    /// Looks which nodes have confirmed.
    fn look_at_nodes(&mut self) {
        let (hub, open) = (&*self.hub, self.wait.open());
        let suspects = hub.suspects().now();
        for (followed, others) in &mut self.followed {
            if !open.contains(followed.service()) {
                continue;
            }
            hub.store().follow(followed);
            let others = others.latest();
            let snapshot = Snapshot::with(hub, &others);
            let standings = Standings::new(hub, followed, &others);
            let in_reach = || {
                snapshot
                    .nodes()
                    .filter(|(_, node)| is_in_reach(hub, node, &others))
                    .map(|(name, _)| name.clone())
                    .collect::<BTreeSet<_>>()
            };
            let service = followed.service().clone();
            let is_emptied = self.emptied.contains(&service);
            let confirms = |name: &NodeName, node: &Node<'_>, revision| {
                if node.elsewhere.is_some() {
                    return standings.of(name, node).lag.is_none();
                }
                let wanted = hub.store().wanted_of_service(name, followed).min(revision);
                report_of(hub.store(), node.record.as_deref()).is_some_and(|report| {
                    holds(report, &service, wanted) && !(is_emptied && keeps(report))
                })
            };
            self.wait.ask(&service, in_reach, |name, revision| {
                // A dead node, or one whose agent and Node object are gone, leads nowhere.
                suspects.nodes.contains_key(name)
                    || snapshot.node(name).is_none_or(|node| confirms(name, node, revision))
            });
        }
    }

    fn departure(
        &self,
        address: Option<IpAddr>,
        node: &NodeName,
        waited: Duration,
        (outcome, reason): (LeavingOutcome, String),
    ) -> pb::Departure {
        let (namespace, pod) = self.pod.pod.clone().unzip();
        let text = |text: Option<Arc<str>>| text.map_or_else(String::new, |text| text.to_string());
        let services = self.pod.services.iter().take(SERVICES);
        pb::Departure {
            namespace: text(namespace),
            pod: text(pod),
            address: address.map_or_else(String::new, |address| address.to_string()),
            node: node.to_string(),
            services: services.map(ToString::to_string).collect(),
            outcome: outcome.into(),
            reason,
            waited_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
            at_ms: millis(SystemTime::now()),
        }
    }
}

/// Returns the pause after a look that began then, so that looks take a share of the time at most.
fn pause_after(began: Instant) -> Duration {
    PAUSE.max(began.elapsed() * SHARE)
}

/// Returns whether a node has to confirm: its agent is connected, was so a moment ago, or may be so at a replica that did not
/// answer or on its way to this one, which has just started.
fn is_in_reach(hub: &Hub, node: &Node<'_>, others: &Collected) -> bool {
    let may_be_elsewhere = !others.missing.is_empty() && !node.is_connected();
    let may_come = node.is_unheard() && hub.replica().started_at.elapsed() < AWAY;
    counts(hub.replica(), node) && (node.was_connected_within(AWAY) || may_be_elsewhere || may_come)
}

/// Returns whether a node's kernel holds a revision of a Service, by the last report of its agent.
fn holds(report: &pb::Report, service: &ServiceName, revision: u64) -> bool {
    report.applied_revision >= revision && failure_of(service, report, false).is_none()
}

/// Returns whether a node keeps a Service, or endpoints, whose absence it does not believe. Which ones its report does not say.
fn keeps(report: &pb::Report) -> bool {
    report
        .held
        .as_ref()
        .is_some_and(|held| held.services + held.without_endpoints > 0)
}
