//! What would change if some objects were applied: tried on a copy of the index.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::SystemTime;

use kplane_model::{Family, Issue, NodeFacts, ServiceKey, ServiceName, ServicePort};

use super::Index;
use crate::k8s::{LoadBalancerIngress, Object, Service};
use crate::publish::Published;
use crate::source::{Batch, Event, Located};

/// One ServicePort that would change.
#[derive(Clone, Debug)]
pub struct WouldChange {
    /// Identity.
    pub key: ServiceKey,
    /// What nodes hold now; `None` = it would be new.
    pub before: Option<Published>,
    /// What nodes would hold; `None` = it would go.
    pub after: Option<Published>,
}

/// What would change if some objects were applied.
#[derive(Clone, Debug, Default)]
pub struct WhatIf {
    /// The ServicePorts, also those of other Services that lose a place or get one.
    pub ports: Vec<WouldChange>,
    /// Problems that would be new, and those that would end.
    pub new_issues: Vec<Issue>,
    /// See above.
    pub ended_issues: Vec<Issue>,
    /// All nodes, after the change.
    pub nodes: Vec<NodeFacts>,
    /// New Services whose addresses the API server chooses: one of no use stands for it.
    pub unassigned: Vec<ServiceName>,
}

impl Index {
    /// Applies objects to this copy of the index, and returns what that changes. Fields that the API server keeps or sets
    /// are as in the objects that exist.
    #[must_use]
    pub fn what_if(mut self, objects: Vec<Located>, now: SystemTime) -> WhatIf {
        // What waits to be published is no consequence of these objects.
        self.apply(Batch {
            events: Vec::new(),
            observed_at: now,
        });
        let issues: BTreeSet<Issue> = self.issues().into_iter().collect();
        let mut unassigned = Vec::new();
        // Where objects have no times of creation, new ones have none either.
        let has_times = self.services.values().any(|entry| entry.created.is_some());
        let created = jiff::Timestamp::try_from(now).ok();
        let created = created
            .filter(|_| has_times)
            .map(|at| at.to_string().into());
        let mut events = Vec::new();
        for mut located in objects {
            if let Object::Service(service) = &mut located.object {
                let chosen = self.complete(service, created.as_ref(), unassigned.len());
                unassigned.extend(chosen);
            }
            events.push(Event::Apply(Box::new(located)));
        }
        let before = self.clone();
        let outcome = self.apply(Batch {
            events,
            observed_at: now,
        });
        let changed = outcome.publication.map(|changes| changes.services);
        let mut known = BTreeMap::<ServiceName, Vec<(ServicePort, Published)>>::new();
        let ports = changed.unwrap_or_default().into_iter();
        let ports = ports.filter_map(|(key, after)| {
            let ports = known
                .entry(key.service.clone())
                .or_insert_with(|| before.published_of(&key.service));
            let before = ports.iter().find(|(port, _)| port.key == key);
            let before = before.map(|(_, published)| published.clone());
            (before != after).then_some(WouldChange { key, before, after })
        });
        let ports = ports.collect();
        let after: BTreeSet<Issue> = self.issues().into_iter().collect();
        WhatIf {
            ports,
            new_issues: after.difference(&issues).cloned().collect(),
            ended_issues: issues.difference(&after).cloned().collect(),
            nodes: self.nodes().cloned().collect(),
            unassigned,
        }
    }

    fn published_of(&self, name: &ServiceName) -> Vec<(ServicePort, Published)> {
        let views = self.ports_of(name).into_iter();
        let published = views.map(|view| {
            let published = Published::new(view.port.clone(), &view.endpoints);
            (view.port, published)
        });
        published.collect()
    }

    /// Sets what a manifest leaves out as the API server would. Returns the name of a Service whose address the API server
    /// still has to choose.
    fn complete(
        &self,
        service: &mut Service,
        created: Option<&Arc<str>>,
        number: usize,
    ) -> Option<ServiceName> {
        let id = Object::Service(service.clone()).id();
        let name = ServiceName {
            namespace: id.namespace,
            name: id.name,
        };
        let entry = self.services.get(&name);
        let ports: &[ServicePort] = entry.map_or(&[], |entry| &entry.ports);
        let meta = &mut service.metadata;
        meta.creation_timestamp = match entry {
            Some(entry) => entry.created.clone(),
            None => created.cloned(),
        };
        if service.status.load_balancer.ingress.is_none() {
            let ips: BTreeSet<IpAddr> = ports
                .iter()
                .flat_map(|port| port.load_balancer_ips.iter().copied())
                .collect();
            let ingress = ips.into_iter().map(|ip| LoadBalancerIngress {
                ip: Some(ip.to_string()),
                ip_mode: None,
            });
            service.status.load_balancer.ingress = Some(ingress.collect());
        }
        let spec = &mut service.spec;
        let has_node_ports = matches!(spec.type_.as_deref(), Some("NodePort" | "LoadBalancer"));
        for port in spec.ports.iter_mut().flatten() {
            let protocol = port.protocol.as_deref().unwrap_or("TCP");
            let named = port.name.as_deref().unwrap_or_default();
            let same = ports.iter().find(|known| {
                *known.key.port_name == *named && known.key.protocol.as_str() == protocol
            });
            if has_node_ports && port.node_port.unwrap_or(0) == 0 {
                port.node_port = same.and_then(|known| known.node_port).map(i64::from);
            }
        }
        let has_address = |ip: &Option<String>| ip.as_deref().is_some_and(|ip| !ip.is_empty());
        let all = spec.cluster_ips.as_deref().unwrap_or_default();
        if has_address(&spec.cluster_ip)
            || !all.is_empty()
            || spec.type_.as_deref() == Some("ExternalName")
        {
            return None;
        }
        let known: BTreeMap<Family, IpAddr> = ports
            .iter()
            .map(|port| (port.key.family, port.cluster_ip))
            .collect();
        let families = spec.ip_families.as_deref().unwrap_or_default();
        let wants_six = families.iter().any(|family| family == "IPv6");
        let wants_four = families.is_empty() || families.iter().any(|family| family == "IPv4");
        let (ips, unassigned) = match known.is_empty() {
            false => (known.into_values().collect(), None),
            true => (placeholders(number, wants_four, wants_six), Some(name)),
        };
        spec.cluster_ips = Some(ips.iter().map(ToString::to_string).collect());
        spec.cluster_ip = ips.first().map(ToString::to_string);
        unassigned
    }
}

/// Returns addresses of the ranges for benchmarks (RFC 2544, RFC 5180), which no cluster has.
fn placeholders(number: usize, four: bool, six: bool) -> Vec<IpAddr> {
    let number = u32::try_from(number).unwrap_or(0) & 0x1_ffff;
    let v4 = Ipv4Addr::from(u32::from(Ipv4Addr::new(198, 18, 0, 0)) + number);
    let v6 = u128::from(Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 0)) + u128::from(number);
    let both = [
        four.then_some(IpAddr::from(v4)),
        six.then_some(IpAddr::from(Ipv6Addr::from(v6))),
    ];
    both.into_iter().flatten().collect()
}
