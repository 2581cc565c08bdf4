//! The proxy in front of a backend of the kernel, which serves all Services: rules lead connections to the proxy before
//! the kernel's own rules see them (U51). They end with the process, and the kernel's backend is left.
//!
//! In mode userspace, the proxy serves all Services. In the other modes it serves those whose annotations ask for it
//! (`Proxied`).

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kplane_model::{Cidr, Family, Protocol, ServiceKey, ServiceName};

use super::super::nftables::{self, proxy_tables::CapturedFrontend};
use super::super::{
    Applied, ApplyError, Backend, Change, Failure, Inspection, OpenError, ServerCounts, Side,
    Verification,
};
use super::address_watch::with_addresses;
use super::capture::NEEDS;
use super::frontends::{captured, node_ports};
use super::localhost::Localhost;
use super::refused::Refused;
use super::staged::{Fate, Staged, beneath, failed, places_of};
use super::way::{Starter, Way};
use super::{CAPTURE, own, spec};
use crate::plan::{NodePlan, ServicePlan};

/// Time for which the proxy still serves connections that were on their way to it when the kernel got their ServicePort.
const LATE: Duration = Duration::from_secs(5);

/// Opens backend `userspace`: nftables, and the proxy in front of it for all Services.
pub(super) fn open(settings: &super::super::Settings) -> Result<Backend, OpenError> {
    let backend = nftables::open(settings).map_err(|error| {
        OpenError::new(
            CAPTURE.name,
            format!(
                "{NEEDS}: {}; --backend userspace-loopback needs neither nf_tables nor a right",
                error.reason
            ),
        )
    })?;
    let starter = starter(settings);
    let ways = Family::ALL.map(|family| (family, starter.open(family)));
    for (family, way) in &ways {
        let Err(reason) = way else { continue };
        match family {
            Family::V4 => {
                return Err(OpenError::new(CAPTURE.name, reason));
            }
            Family::V6 => {
                tracing::info!(%family, reason, "this family cannot be led to the proxy; the kernel serves it");
            }
        }
    }
    let [v4, v6] = ways.map(|(_, way)| way.ok());
    let backend = in_front(backend, settings, &starter, CaptureScope::All, [v4, v6]);
    Ok(Backend {
        description: &CAPTURE,
        ..backend
    })
}

/// Puts the proxy in front of a backend for the Services that ask for it, and for node ports on loopback addresses. It
/// starts with the first of them.
pub(super) fn on_request(backend: Backend, settings: &super::super::Settings) -> Backend {
    let starter = starter(settings);
    starter.inherit();
    in_front(
        backend,
        settings,
        &starter,
        CaptureScope::Asked,
        [None, None],
    )
}

fn starter(settings: &super::super::Settings) -> Arc<Starter> {
    Arc::new(Starter::new(settings.userspace.clone(), settings.own_mark))
}

fn in_front(
    backend: Backend,
    settings: &super::super::Settings,
    starter: &Arc<Starter>,
    scope: CaptureScope,
    ways: [Option<Way>; 2],
) -> Backend {
    let description = backend.description;
    let side = |family, inner, way| -> Box<dyn Side> {
        Box::new(Captured {
            family,
            scope,
            inner,
            starter: starter.clone(),
            way,
            by_interface: settings.pod_interface.is_some(),
            localhost: Localhost::of(description, family, settings),
            refused: Refused::new(settings.userspace.endpoints.clone()),
            frontends: HashMap::new(),
            late: Vec::new(),
            nodes: None,
        })
    };
    let ([v4, v6], [way_v4, way_v6]) = (backend.sides, ways);
    Backend {
        sides: [side(Family::V4, v4, way_v4), side(Family::V6, v6, way_v6)],
        notifications: with_addresses(backend.notifications),
        proxy: starter.handle.clone(),
        ..backend
    }
}

/// The ServicePorts that the proxy serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CaptureScope {
    /// All of which it is able to.
    All,
    /// Those whose Services ask for it.
    Asked,
}

impl CaptureScope {
    fn asks(self, plan: &ServicePlan) -> bool {
        self == Self::All || plan.proxied.is_some()
    }
}

/// One family: the kernel's backend, and the proxy in front of it.
struct Captured {
    family: Family,
    scope: CaptureScope,
    inner: Box<dyn Side>,
    starter: Arc<Starter>,
    /// `None` as long as nothing needed it, or if the kernel refuses it.
    way: Option<Way>,
    /// Whether pods are known by their interfaces, which the proxy does not see.
    by_interface: bool,
    localhost: Localhost,
    /// The endpoints to which the proxy must not connect.
    refused: Refused,
    /// The ServicePorts of the proxy, and their frontends in the table.
    frontends: HashMap<ServiceKey, Vec<CapturedFrontend>>,
    /// ServicePorts that went to the kernel, for connections that were on their way, and since when.
    late: Vec<(ServiceKey, Instant)>,
    /// The addresses with node ports in the table.
    nodes: Option<Vec<Cidr>>,
}

impl Captured {
    /// Returns whether the proxy has or gets a ServicePort of a change.
    fn is_concerned(&self, change: Change<'_>) -> bool {
        let has = |plan: &Option<ServicePlan>| {
            let plan = plan.as_ref();
            plan.is_some_and(|plan| self.wanted(plan, change.node).is_some())
        };
        !self.frontends.is_empty()
            || !self.late.is_empty()
            || change.services.iter().any(|(_, plan)| has(plan))
    }

    /// Returns the frontends of a ServicePort that the proxy serves; `None` if it is the kernel's alone.
    fn wanted(&self, plan: &ServicePlan, node: &NodePlan) -> Option<Vec<CapturedFrontend>> {
        let asks = self.scope.asks(plan) && self.refused.endpoint(plan).is_none();
        let mut frontends = if asks { captured(plan, self.by_interface) } else { Vec::new() };
        let is_captured = |at| frontends.contains(&CapturedFrontend::Of(at));
        let on_loopback = self.localhost.lacks(plan, node, is_captured);
        frontends.extend(on_loopback.map(CapturedFrontend::OnLoopback));
        (asks || !frontends.is_empty()).then_some(frontends)
    }

    fn is_captured(&self, plan: &ServicePlan, node: &NodePlan) -> bool {
        self.wanted(plan, node)
            .into_iter()
            .flatten()
            .any(|place| matches!(place, CapturedFrontend::Of(_)))
    }

    /// Returns the ServicePorts of a change that ask for the proxy, and have endpoints to which it must not connect.
    fn refusals(&self, change: Change<'_>) -> Vec<Failure> {
        change.services.iter().filter_map(|(key, plan)| {
            let plan = plan.as_ref().filter(|plan| plan.proxied.is_some())?;
            let endpoint = self.refused.endpoint(plan)?;
            Some(Failure::degraded(key, format!(
                    "the kernel serves it instead of the userspace proxy: its endpoint {endpoint} is not one to which the \
                     proxy may connect with this node's rights (--userspace-endpoints)"
                )))
        }).collect()
    }

    /// Opens the way, if the proxy starts with the first Service that asks for it.
    fn open(&mut self) -> Result<(), String> {
        if self.way.is_none() && self.scope == CaptureScope::Asked {
            self.way = Some(self.starter.open(self.family)?);
            self.nodes = None;
            tracing::info!(
                family = %self.family,
                "the userspace proxy runs: a Service asks for it, or node ports are served on loopback addresses"
            );
        }
        Ok(())
    }

    /// Hands the proxy those ServicePorts of a change whose frontends are (`true`) or are not the ones that it has. The
    /// second kind must wait for the kernel's backend, which says who gets a frontend that two want.
    fn hand(&self, change: Change<'_>, has_places: bool, failures: &[Failure]) {
        let Some(way) = &self.way else { return };
        let failed = failed(failures);
        let specs = change.services.iter().filter_map(|(key, plan)| {
            let plan = plan.as_ref()?;
            let wanted = self.wanted(plan, change.node)?;
            let is_held = self.frontends.get(key) == Some(&wanted);
            let is_wanted = is_held == has_places && !failed.contains(key);
            is_wanted.then(|| (key.clone(), Some(spec::spec(plan))))
        });
        way.proxy.table().change(specs);
        if change.complete || self.nodes.is_none() {
            let mut inside = change.node.pod_sources.clone();
            inside.extend(own::of_machine().into_iter().map(Cidr::single));
            way.proxy.table().set_inside(self.family, inside);
        }
    }

    /// Serves what an earlier agent left, once all ServicePorts are known.
    fn settle(&self, change: Change<'_>) {
        if change.complete {
            self.starter.settle(self.family);
        }
    }

    /// Works out which frontends the table must lose and get.
    fn stage(&self, change: Change<'_>) -> Staged {
        let mut wanted = Vec::new();
        for (key, plan) in change.services {
            let wants = plan.as_ref().map(|plan| self.wanted(plan, change.node));
            let fate = match wants {
                Some(Some(frontends)) => Fate::Proxy(frontends),
                _ if !self.frontends.contains_key(key) => continue,
                Some(None) => Fate::Kernel,
                None => Fate::Gone,
            };
            wanted.push((key.clone(), fate));
        }
        if change.complete {
            let named: HashSet<&ServiceKey> = change.services.iter().map(|(key, _)| key).collect();
            let gone = self.frontends.keys().filter(|key| !named.contains(key));
            wanted.extend(gone.map(|key| (key.clone(), Fate::Gone)));
        }
        let before: HashSet<CapturedFrontend> = wanted
            .iter()
            .filter_map(|(key, _)| self.frontends.get(key))
            .flatten()
            .copied()
            .collect();
        let after = places_of(&wanted, |_| true);
        Staged {
            delete: before.difference(&after).copied().collect(),
            add: after.difference(&before).copied().collect(),
            wanted,
        }
    }

    /// Has the table lead frontends no longer to the proxy, so that the kernel serves them.
    fn release(&mut self, node: &NodePlan, staged: &Staged) -> Result<(), String> {
        let Some(Way { capture, .. }) = &mut self.way else {
            return Ok(());
        };
        let nodes = node_ports(self.family, node);
        if self.nodes.as_ref() != Some(&nodes) {
            capture.set_nodes(&nodes)?;
            self.nodes = Some(nodes);
        }
        capture.change(&staged.delete, &[])
    }

    /// Has the table lead new frontends to the proxy, and ends ServicePorts that are gone.
    fn take(&mut self, staged: Staged) -> Result<(), String> {
        let Some(Way { proxy, capture }) = &mut self.way else {
            return Ok(());
        };
        capture.change(&[], &staged.add)?;
        let now = Instant::now();
        let mut gone = Vec::new();
        for (key, fate) in staged.wanted {
            self.late.retain(|(late, _)| *late != key);
            match fate {
                Fate::Proxy(frontends) => drop(self.frontends.insert(key, frontends)),
                // UDP flows follow their Service at once.
                Fate::Kernel if key.protocol == Protocol::Tcp => {
                    self.frontends.remove(&key);
                    self.late.push((key, now));
                }
                Fate::Kernel | Fate::Gone => {
                    self.frontends.remove(&key);
                    gone.push((key, None));
                }
            }
        }
        let is_over = |(_, since): &mut (ServiceKey, Instant)| now.duration_since(*since) >= LATE;
        let over = self.late.extract_if(.., is_over);
        gone.extend(over.map(|(key, _)| (key, None)));
        proxy.table().change(gone);
        Ok(())
    }

    /// Gives the kernel back what leads to the proxy, if another program has removed it.
    fn restore(&mut self) -> Option<Verification> {
        self.way.as_ref()?;
        match self.starter.restore(self.family) {
            Ok(gone) => gone.map(Verification::Repaired),
            Err(problem) => {
                let family = self.family;
                let further = self.give_up();
                tracing::warn!(%family, problem, further, "the kernel serves all Services, since nothing can lead to the proxy");
                Some(Verification::Outdated(problem))
            }
        }
    }

    /// Leaves all frontends to the kernel, since what the table holds is not known. It begins anew with the next complete
    /// change, or as ServicePorts change.
    fn give_up(&mut self) -> Option<String> {
        self.frontends.clear();
        self.way.as_mut().map(|way| way.capture.clear())?.err()
    }

    /// Reports the ServicePorts of a change that the kernel serves though the proxy should.
    fn report(&self, change: Change<'_>, problem: &str, applied: &mut Applied) {
        let family = self.family;
        tracing::warn!(%family, problem, "cannot lead Services to the userspace proxy; the kernel serves them");
        let failures = change.services.iter().filter_map(|(key, plan)| {
            let plan = plan.as_ref()?;
            self.wanted(plan, change.node)?;
            let reason = if self.scope.asks(plan) {
                format!("the kernel serves it instead of the userspace proxy: {problem}")
            } else {
                format!("its node port is not served on loopback addresses: {problem}")
            };
            Some(Failure::degraded(key, reason))
        });
        applied.failures.extend(failures);
    }
}

impl Captured {
    /// Applies a change to the kernel's backend, and to what leads to the proxy.
    fn serve(&mut self, change: Change<'_>) -> Result<Applied, ApplyError> {
        if !self.is_concerned(change) {
            self.settle(change);
            return self.inner.apply(change);
        }
        if let Err(problem) = self.open() {
            let mut applied = self.inner.apply(change)?;
            self.report(change, &problem, &mut applied);
            self.settle(change);
            return Ok(applied);
        }
        self.hand(change, true, &[]);
        let mut staged = self.stage(change);
        let released = self.release(change.node, &staged);
        let services = match self.way {
            Some(_) => beneath(change.services, |plan| self.is_captured(plan, change.node)),
            None => Cow::Borrowed(change.services),
        };
        let beneath = Change {
            services: &services,
            ..change
        };
        let mut applied = self.inner.apply(beneath).inspect_err(|_| {
            // The frontends that the table lost may come back with the next change.
            for at in self.frontends.values_mut() {
                at.retain(|place| !staged.delete.contains(place));
            }
        })?;
        staged.without(&applied.failures);
        self.hand(change, false, &applied.failures);
        self.settle(change);
        if let Err(problem) = released.and_then(|()| self.take(staged)) {
            let problem = match self.give_up() {
                Some(further) => format!("{problem}; {further}"),
                None => problem,
            };
            self.report(change, &problem, &mut applied);
        }
        Ok(applied)
    }
}

impl Side for Captured {
    fn apply(&mut self, change: Change<'_>) -> Result<Applied, ApplyError> {
        let asks = |plan: &ServicePlan| self.scope.asks(plan);
        let mut plans = change.services.iter().flat_map(|(_, plan)| plan);
        // Nobody else needs the machine's addresses, whose list takes a dump of the kernel.
        if plans.any(asks) {
            self.refused.look(change.complete);
        }
        let mut applied = self.serve(change)?;
        applied.failures.extend(self.refusals(change));
        Ok(applied)
    }

    fn verify(&mut self) -> Result<Verification, ApplyError> {
        match self.restore() {
            Some(repaired) => Ok(repaired),
            None => self.inner.verify(),
        }
    }

    fn repair(&mut self) -> Result<Verification, ApplyError> {
        // A repair is followed by a check of everything.
        match self.restore() {
            Some(repaired) => Ok(repaired),
            None => self.inner.repair(),
        }
    }

    fn has_services(&mut self) -> bool {
        self.inner.has_services()
    }

    fn probe_interval(&self) -> Option<Duration> {
        self.inner.probe_interval()
    }

    fn servers(&self) -> Option<ServerCounts> {
        self.inner.servers()
    }

    fn inspect(&self, service: &ServiceName) -> Option<Inspection> {
        self.inner.inspect(service)
    }
}
