//! The operator's limit on the cost of all Services of one namespace.
//!
//! A Service is admitted if it fits beside the Services that come before it. A Service that the source names comes
//! before one that is only held; then the older one, then the smaller name. So every control plane decides alike,
//! whatever the order of events. Work for a change is constant while a namespace keeps to its limit, and
//! proportional to its Services while it does not.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use kplane_model::{ServiceName, ServiceSize};

use super::claims::Seniority;

/// A Service's position in the order of admission; the smallest is first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Turn {
    seniority: Seniority,
    name: ServiceName,
}

impl Turn {
    pub(super) fn new(name: &ServiceName, seniority: Seniority) -> Self {
        let name = name.clone();
        Self { seniority, name }
    }
}

/// The accounts of all namespaces.
#[derive(Debug, Default)]
pub(super) struct Quota {
    /// Maximum number of elements of one namespace; 0 = no limit.
    limit: usize,
    namespaces: HashMap<Arc<str>, NamespaceQuota>,
    /// Namespaces whose Services must be admitted anew.
    changed: BTreeSet<Arc<str>>,
}

#[derive(Debug, Default)]
struct NamespaceQuota {
    /// Number of elements that each Service requests.
    services: BTreeMap<Turn, usize>,
    turns: HashMap<ServiceName, Turn>,
    total: usize,
    refused: BTreeSet<ServiceName>,
}

impl Quota {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            ..Self::default()
        }
    }

    /// Returns whether there is a limit.
    pub(super) fn is_on(&self) -> bool {
        self.limit > 0
    }

    /// Records the size of a Service; `None` = the Service is gone.
    pub(super) fn replace(&mut self, service: &ServiceName, asks: Option<(Turn, ServiceSize)>) {
        let namespace = self.namespaces.entry(service.namespace.clone()).or_default();
        if let Some(turn) = namespace.turns.remove(service) {
            namespace.total -= namespace.services.remove(&turn).unwrap_or_default();
        }
        if let Some((turn, size)) = asks {
            let elements = size.elements();
            namespace.total += elements;
            namespace.turns.insert(service.clone(), turn.clone());
            namespace.services.insert(turn, elements);
        }
        self.changed.insert(service.namespace.clone());
    }

    /// Admits Services anew, and returns those whose admission has changed.
    pub(super) fn settle(&mut self) -> BTreeSet<ServiceName> {
        let mut affected = BTreeSet::new();
        for name in std::mem::take(&mut self.changed) {
            let Some(namespace) = self.namespaces.get_mut(&name) else {
                continue;
            };
            let refused = namespace.beyond(self.limit);
            let before = std::mem::replace(&mut namespace.refused, refused);
            affected.extend(before.symmetric_difference(&namespace.refused).cloned());
            if namespace.services.is_empty() {
                self.namespaces.remove(&name);
            }
        }
        affected
    }

    /// Returns the reason why a Service is not admitted; `None` if it is.
    pub(super) fn refusal(&self, service: &ServiceName) -> Option<String> {
        let namespace = self.namespaces.get(&service.namespace)?;
        if !namespace.refused.contains(service) {
            return None;
        }
        let asks = namespace.services.get(namespace.turns.get(service)?)?;
        Some(format!(
            "exceeds the limit of its namespace: it needs {asks} elements on every node (ports x \
             addresses x endpoints), and the older Services of {} leave fewer of the {} that \
             --namespace-elements allows: this Service is not served; remove unneeded Services, \
             or raise the limit",
            service.namespace, self.limit
        ))
    }
}

impl NamespaceQuota {
    /// Returns the Services that do not fit beside those that come before them.
    fn beyond(&self, limit: usize) -> BTreeSet<ServiceName> {
        if self.total <= limit {
            return BTreeSet::new();
        }
        let mut room = limit;
        self.services
            .iter()
            .filter(|(_, elements)| {
                let fits = **elements <= room;
                room -= if fits { **elements } else { 0 };
                !fits
            })
            .map(|(turn, _)| turn.name.clone())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str) -> ServiceName {
        ServiceName::new("tenant", name)
    }

    /// Requests `endpoints` elements.
    fn ask(quota: &mut Quota, service: &str, created: &str, endpoints: usize) {
        let created = Arc::from(created);
        let turn = Turn::new(&name(service), Seniority::new(Some(&created), false));
        let size = ServiceSize {
            ports: 1,
            endpoints,
            ..ServiceSize::default()
        };
        quota.replace(&name(service), Some((turn, size)));
    }

    fn refused(quota: &Quota, services: &[&str]) -> Vec<bool> {
        let refusal = |service: &&str| quota.refusal(&name(service)).is_some();
        services.iter().map(refusal).collect()
    }

    #[test]
    fn older_services_get_in_and_smaller_ones_behind_one_that_does_not_fit() {
        let mut quota = Quota::new(100);
        ask(&mut quota, "young", "2026-03-01T00:00:00Z", 30);
        ask(&mut quota, "big", "2026-02-01T00:00:00Z", 80);
        ask(&mut quota, "old", "2026-01-01T00:00:00Z", 40);
        assert_eq!(quota.settle(), BTreeSet::from([name("big")]));
        assert_eq!(
            refused(&quota, &["old", "big", "young"]),
            [false, true, false]
        );
        // Removing a Service makes room: "big" is admitted, and the youngest is refused.
        quota.replace(&name("old"), None);
        assert_eq!(quota.settle(), BTreeSet::from([name("big"), name("young")]));
        assert_eq!(refused(&quota, &["big", "young"]), [false, true]);
        quota.replace(&name("young"), None);
        quota.replace(&name("big"), None);
        quota.settle();
        assert!(quota.namespaces.is_empty());
    }

    #[test]
    fn what_came_first_does_not_matter() {
        let services = [
            ("a", "1", 60),
            ("b", "2", 60),
            ("c", "3", 40),
            ("d", "4", 1),
        ];
        let settled = |order: &[usize]| {
            let mut quota = Quota::new(100);
            for index in order {
                let (service, created, elements) = services[*index];
                ask(&mut quota, service, created, elements);
                quota.settle();
            }
            refused(&quota, &["a", "b", "c", "d"])
        };
        let wanted = [false, true, false, true];
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
            assert_eq!(settled(&order), wanted, "{order:?}");
        }
    }
}
