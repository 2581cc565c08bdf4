//! A change of the rules that lead to the proxy, before it is made. Pure.

use std::borrow::Cow;
use std::collections::HashSet;

use kplane_model::ServiceKey;

use super::super::Failure;
use super::super::nftables::proxy_tables::CapturedFrontend;
use crate::plan::ServicePlan;

/// A change of the table, worked out.
pub(super) struct Staged {
    pub(super) delete: Vec<CapturedFrontend>,
    pub(super) add: Vec<CapturedFrontend>,
    pub(super) wanted: Vec<(ServiceKey, Fate)>,
}

/// What becomes of a ServicePort that the proxy has or gets.
pub(super) enum Fate {
    /// The proxy serves these frontends, and the kernel its other ones.
    Proxy(Vec<CapturedFrontend>),
    /// The kernel serves it from now on.
    Kernel,
    /// It does not exist any more.
    Gone,
}

/// Returns the frontends that the proxy gets of some ServicePorts.
pub(super) fn places_of(
    wanted: &[(ServiceKey, Fate)],
    mut of: impl FnMut(&ServiceKey) -> bool,
) -> HashSet<CapturedFrontend> {
    wanted
        .iter()
        .filter(|(key, _)| of(key))
        .filter_map(|(_, fate)| match fate {
            Fate::Proxy(frontends) => Some(frontends),
            Fate::Kernel | Fate::Gone => None,
        })
        .flatten()
        .copied()
        .collect()
}

impl Staged {
    /// Leaves out ServicePorts that the kernel's backend does not serve: another ServicePort may have their frontends.
    pub(super) fn without(&mut self, failures: &[Failure]) {
        let failed = failed(failures);
        if failed.is_empty() {
            return;
        }
        let lost = places_of(&self.wanted, |key| failed.contains(key));
        self.wanted.retain(|(key, _)| !failed.contains(key));
        let kept = places_of(&self.wanted, |_| true);
        self.add.retain(|at| kept.contains(at) || !lost.contains(at));
    }
}

/// Returns the ServicePorts that the kernel's backend does not serve.
pub(super) fn failed(failures: &[Failure]) -> HashSet<&ServiceKey> {
    failures
        .iter()
        .filter(|failure| !failure.degraded)
        .map(|failure| &failure.key)
        .collect()
}

/// The ServicePorts of a change as the kernel gets them. Where the proxy remembers clients, the kernel must not: it would
/// take the proxy's socket for the endpoint of each client, and lead the client there when the proxy has ended.
pub(super) fn beneath(
    services: &[(ServiceKey, Option<ServicePlan>)],
    is_captured: impl Fn(&ServicePlan) -> bool,
) -> Cow<'_, [(ServiceKey, Option<ServicePlan>)]> {
    let is_sticky = |plan: &ServicePlan| plan.affinity_timeout_s.is_some() && is_captured(plan);
    let mut services = Cow::Borrowed(services);
    for index in 0..services.len() {
        if services[index].1.as_ref().is_some_and(is_sticky)
            && let Some(plan) = &mut services.to_mut()[index].1
        {
            plan.affinity_timeout_s = None;
        }
    }
    services
}
