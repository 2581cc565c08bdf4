//! Plans ServicePorts, without places that are reserved on this node.

use kplane_model::{NodeFacts, ServiceKey};

use crate::desired::{Desired, View};
use kplane_dataplane::backend;
use kplane_dataplane::plan::{Reserved, ServicePlan, cut, plan_service};

/// Plans for the backend.
#[derive(Debug, Default)]
pub(super) struct Planned {
    /// Plans of ServicePorts; `None` for those that are gone.
    pub(super) services: Vec<(ServiceKey, Option<ServicePlan>)>,
    /// ServicePorts of which a part is left out on purpose.
    pub(super) withheld: Vec<backend::Failure>,
}

/// Plans ServicePorts one after the other.
pub(super) struct Planner<'a> {
    desired: &'a Desired,
    reserved: &'a Reserved,
    unknown: NodeFacts,
    planned: Planned,
}

impl<'a> Planner<'a> {
    pub(super) fn new(desired: &'a Desired, reserved: &'a Reserved) -> Self {
        Self {
            desired,
            reserved,
            unknown: NodeFacts::default(),
            planned: Planned::default(),
        }
    }

    /// Plans a ServicePort; without a view it is gone.
    pub(super) fn port(&mut self, key: &ServiceKey, view: Option<View<'_>>) {
        let plan = view.map(|view| self.plan(key, view));
        self.planned.services.push((key.clone(), plan));
    }

    fn plan(&mut self, key: &ServiceKey, (program, local): View<'_>) -> ServicePlan {
        let node = self.desired.node().unwrap_or(&self.unknown);
        let mut reasons = Vec::new();
        let mut plan = match self.desired.allowance(&key.service) {
            None => plan_service(program, local, node),
            Some(allowed) => {
                let (program, local, reason) = cut(program, local, allowed);
                reasons.push(reason);
                plan_service(&program, local.as_ref(), node)
            }
        };
        reasons.extend(self.reserved.withhold(node, &mut plan));
        if !reasons.is_empty() {
            self.planned.withheld.push(backend::Failure {
                key: key.clone(),
                reason: reasons.join("; "),
                degraded: true,
            });
        }
        plan
    }

    pub(super) fn finish(self) -> Planned {
        self.planned
    }
}
