//! The cost of a change, worked out by the backends themselves on tables that exist in memory only. Nothing is applied.

use kplane_model::{Family, ServiceKey};

use super::{Applied, Change, Kind, Settings, Side, iptables, nftables};
use crate::chain;
use crate::plan::{NodePlan, ServicePlan};

/// Plans of ServicePorts; `None` for those that are gone.
pub type Plans = [(ServiceKey, Option<ServicePlan>)];

/// The cost of a change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DryRun {
    /// Operations for the kernel: elements of nftables, or lines of iptables.
    pub operations: u64,
    /// Bytes for the kernel.
    pub bytes: u64,
    /// All rules after the change less those before it, in backends whose rules grow with the number of Services.
    pub rules: Option<i64>,
    /// ServicePorts that would be left out, and why.
    pub refused: Vec<(ServiceKey, String)>,
}

impl Kind {
    /// Works out what a change would cost on a node that holds `before`: the transaction that the backend would send.
    ///
    /// # Errors
    /// The reason why that cannot be known.
    pub fn dry_run(
        self,
        family: Family,
        node: &NodePlan,
        before: &Plans,
        after: &Plans,
    ) -> Result<DryRun, String> {
        let mut side = match self {
            Self::Nftables | Self::Userspace => nftables::dry(family, &Settings::default()),
            Self::Iptables => iptables::dry(family, &Settings::default()),
            Self::Ipvs | Self::UserspaceLoopback | Self::Noop => {
                let name = self.describe().name;
                return Err(format!("the cost of a change in mode {name} is not known"));
            }
        };
        let change = |services, complete| Change {
            family,
            node,
            services,
            complete,
        };
        let start = apply(&mut *side, change(before, true))?;
        let applied = apply(&mut *side, change(after, false))?;
        let rules = |applied: &Applied| {
            let counts = applied.rules?;
            let total: u64 = counts.total.iter().sum();
            i64::try_from(total).ok()
        };
        let failures = applied.failures.iter();
        Ok(DryRun {
            operations: applied.operations,
            bytes: applied.bytes,
            rules: rules(&applied)
                .zip(rules(&start))
                .map(|(after, before)| after - before),
            refused: failures
                .map(|failure| (failure.key.clone(), failure.reason.clone()))
                .collect(),
        })
    }
}

fn apply(side: &mut dyn Side, change: Change<'_>) -> Result<Applied, String> {
    side.apply(change).map_err(|error| chain(&error))
}

#[cfg(test)]
mod tests {
    use kplane_model::{EndpointAddr, NodeFacts, ServicePort, ServiceProgram, TrafficPolicy};

    use super::*;
    use crate::plan::plan_service;

    fn plan(name: &str, endpoints: u8) -> (ServiceKey, Option<ServicePlan>) {
        let key = ServiceKey::sample("shop", name);
        let port = ServicePort {
            internal_policy: TrafficPolicy::Cluster,
            ..ServicePort::sample(key.clone())
        };
        let endpoint = |n| EndpointAddr {
            ip: [10, 244, 0, n].into(),
            port: 8080,
        };
        let program = ServiceProgram {
            port,
            endpoints: (1..=endpoints).map(endpoint).collect(),
            has_any: endpoints > 0,
            serving_others: Vec::new(),
        };
        let plan = plan_service(&program, None, &NodeFacts::default());
        (key, Some(plan))
    }

    #[test]
    fn more_endpoints_cost_more_and_no_change_costs_nothing() {
        for kind in [Kind::Nftables, Kind::Iptables] {
            let cost = |before: &Plans, after: &Plans| {
                let node = NodePlan::default();
                kind.dry_run(Family::V4, &node, before, after).unwrap()
            };
            let (two, three, gone) = (plan("web", 2), plan("web", 3), ("web", None));
            let gone = (ServiceKey::sample("shop", gone.0), gone.1);
            let two = std::slice::from_ref(&two);
            let same = cost(two, two);
            assert_eq!((same.operations, same.bytes), (0, 0), "{kind:?}: {same:?}");
            let more = cost(two, std::slice::from_ref(&three));
            assert!(more.operations > 0 && more.bytes > 0, "{kind:?}: {more:?}");
            let new = cost(&[], std::slice::from_ref(&three));
            assert!(new.bytes >= more.bytes, "{kind:?}: {new:?} {more:?}");
            let less = cost(two, std::slice::from_ref(&gone));
            assert!(less.operations > 0, "{kind:?}: {less:?}");
            let grows = kind == Kind::Iptables;
            assert_eq!(new.rules.is_some_and(|rules| rules > 0), grows, "{new:?}");
            assert_eq!(less.rules.is_some_and(|rules| rules < 0), grows, "{less:?}");
        }
        let node = NodePlan::default();
        assert!(Kind::Ipvs.dry_run(Family::V4, &node, &[], &[]).is_err());
    }
}
