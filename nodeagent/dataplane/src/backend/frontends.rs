//! The one decision which ServicePort holds a frontend (address, port and protocol, or node port), in front of
//! all backends.
//!
//! The control plane gives a frontend to one Service only. This module protects a node whose desired state still
//! breaks that rule, for example while a Service is held. The ServicePort that has the place keeps it.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use kplane_model::ServiceKey;

use super::{Change, Failure};
use crate::plan::{FrontendAddr, ServicePlan};

/// The ServicePort that holds each place of one family.
#[derive(Debug, Default)]
pub(super) struct FrontendOwners(HashMap<FrontendAddr, ServiceKey>);

/// A change without the frontends that other ServicePorts hold.
#[derive(Debug)]
pub(super) struct Claims<'a> {
    services: Cow<'a, [(ServiceKey, Option<ServicePlan>)]>,
    /// PlaceOwners that the change's ServicePorts held before, unless the change is complete.
    released: HashSet<FrontendAddr>,
    /// One failure for each ServicePort that does not get all of its frontends.
    pub(super) failures: Vec<Failure>,
}

impl Claims<'_> {
    /// Returns the change as the backend gets it.
    pub(super) fn change<'a>(&'a self, asked: Change<'a>) -> Change<'a> {
        Change {
            services: &self.services,
            ..asked
        }
    }
}

impl FrontendOwners {
    /// Decides which ServicePorts of a change get their frontends. `held` returns the frontends that a ServicePort
    /// of the content has. PlaceOwners of the change's own ServicePorts are free, whatever the order of these.
    pub(super) fn claim<'a, 'c>(
        &self,
        change: Change<'a>,
        held: impl Fn(&ServiceKey) -> &'c [FrontendAddr],
    ) -> Claims<'a> {
        let keys = change.services.iter().map(|(key, _)| key);
        let released = if change.complete {
            HashSet::new()
        } else {
            keys.flat_map(held).copied().collect()
        };
        let mut claims = Claims {
            services: Cow::Borrowed(change.services),
            released,
            failures: Vec::new(),
        };
        let mut taken: HashMap<FrontendAddr, &ServiceKey> = HashMap::new();
        for (index, (key, plan)) in change.services.iter().enumerate() {
            for frontend in plan.iter().flat_map(|plan| &plan.frontends) {
                let at = frontend.at;
                let is_free = change.complete || claims.released.contains(&at);
                let before = if is_free { None } else { self.0.get(&at) };
                match taken.get(&at).copied().or(before) {
                    Some(owner) if owner != key => claims.lose(index, at, owner),
                    _ => drop(taken.insert(at, key)),
                }
            }
        }
        claims
    }

    /// Records that the data path holds a change. `held` returns the frontends that a ServicePort has now.
    pub(super) fn accept<'c>(
        &mut self,
        claims: &Claims<'_>,
        complete: bool,
        held: impl Fn(&ServiceKey) -> &'c [FrontendAddr],
    ) {
        if complete {
            self.0.clear();
        }
        for at in &claims.released {
            self.0.remove(at);
        }
        for (key, _) in &*claims.services {
            self.0.extend(held(key).iter().map(|at| (*at, key.clone())));
        }
    }
}

impl Claims<'_> {
    /// Removes a frontend from the plan of a ServicePort, since `owner` has it.
    fn lose(&mut self, index: usize, at: FrontendAddr, owner: &ServiceKey) {
        let (key, plan) = &mut self.services.to_mut()[index];
        if let Some(plan) = plan {
            plan.frontends.retain(|frontend| frontend.at != at);
        }
        let reason = format!("{at}: is already programmed for {owner}");
        match self.failures.last_mut() {
            Some(last) if last.key == *key => last.reason = format!("{}; {reason}", last.reason),
            _ => self.failures.push(Failure::unserved(key, reason)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::net::IpAddr;

    use kplane_model::{Family, KeyParts, Protocol, ServiceName, TrafficPolicy};

    use super::*;
    use crate::plan::{Frontend, NodePlan, Origin};

    fn key(name: &str) -> ServiceKey {
        ServiceKey::from(KeyParts {
            service: ServiceName::new("shop", name),
            port_name: "".into(),
            protocol: Protocol::Tcp,
            family: Family::V4,
        })
    }

    fn at(port: u16) -> FrontendAddr {
        FrontendAddr::NodePort {
            protocol: Protocol::Tcp,
            port,
        }
    }

    type Services = Vec<(ServiceKey, Option<ServicePlan>)>;

    fn plan(name: &str, ports: &[u16]) -> (ServiceKey, Option<ServicePlan>) {
        let frontend = |port: &u16| Frontend {
            at: at(*port),
            origin: Origin::NodePort,
            unserved: None,
            endpoints: Vec::new(),
            policy: TrafficPolicy::Cluster,
            inside: None,
            masquerade: true,
            source_ranges: Vec::new(),
        };
        let plan = ServicePlan {
            key: key(name),
            cluster_ip: IpAddr::from([10, 96, 0, 1]),
            frontends: ports.iter().map(frontend).collect(),
            local: Vec::new(),
            affinity_timeout_s: None,
            health_check_node_port: None,
            ipvs_scheduler: None,
            proxied: None,
            dead: Vec::new(),
            serving: Vec::new(),
        };
        (key(name), Some(plan))
    }

    /// The registry, and what a backend holds of each ServicePort.
    #[derive(Default)]
    struct Node {
        frontends: FrontendOwners,
        held: BTreeMap<ServiceKey, Vec<FrontendAddr>>,
    }

    impl Node {
        /// Returns the reasons of failures.
        fn apply(&mut self, services: &Services, complete: bool) -> Vec<String> {
            let node = NodePlan::default();
            let change = Change {
                family: Family::V4,
                node: &node,
                services,
                complete,
            };
            let before = self.held.clone();
            let claims = self.frontends.claim(change, |key| before.get(key).map_or(&[], |at| at));
            if complete {
                self.held.clear();
            }
            for (key, plan) in claims.change(change).services {
                let frontends = plan
                    .iter()
                    .flat_map(|plan| &plan.frontends)
                    .map(|frontend| frontend.at)
                    .collect();
                self.held.insert(key.clone(), frontends);
            }
            let now = &self.held;
            self.frontends
                .accept(&claims, complete, |key| now.get(key).map_or(&[], |at| at));
            claims.failures.into_iter().map(|failure| failure.reason).collect()
        }

        fn owner(&self, port: u16) -> Option<&str> {
            self.frontends.0.get(&at(port)).map(|key| &*key.service.name)
        }
    }

    #[test]
    fn a_place_stays_with_its_service_until_that_gives_it_up() {
        let mut node = Node::default();
        assert!(node.apply(&vec![plan("a", &[1, 2])], true).is_empty());
        let lost = "TCP: is already programmed for shop/a/TCP (IPv4)";
        let failures = node.apply(&vec![plan("b", &[1, 2, 3])], false);
        assert_eq!(
            failures,
            [format!("node port 1/{lost}; node port 2/{lost}")]
        );
        assert_eq!(
            [1, 2, 3].map(|port| node.owner(port)),
            [Some("a"), Some("a"), Some("b")]
        );
        // In one change, the order does not matter.
        let swap = vec![plan("b", &[1]), plan("a", &[3])];
        assert!(node.apply(&swap, false).is_empty());
        assert_eq!(
            [1, 2, 3].map(|port| node.owner(port)),
            [Some("b"), None, Some("a")]
        );
        assert!(node.apply(&vec![(key("b"), None)], false).is_empty());
        assert_eq!(node.owner(1), None);
        assert!(node.apply(&vec![plan("c", &[3])], true).is_empty());
        assert_eq!(node.owner(3), Some("c"));
    }

    #[test]
    fn the_first_of_two_in_one_change_gets_the_place() {
        let mut node = Node::default();
        let failures = node.apply(&vec![plan("a", &[1]), plan("b", &[1])], true);
        assert_eq!(failures.len(), 1);
        assert_eq!(node.owner(1), Some("a"));
    }
}
