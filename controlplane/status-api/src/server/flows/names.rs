//! Names for addresses of clients: Pods, as far as the control plane knows them, and nodes.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use kplane_agents::hub::Hub;
use kplane_model::{Cidr, Endpoint, NodeFacts, NodeName, PodName};
use kplane_proto::v1 as pb;
use kplane_util::clock::millis;
use kplane_view::time::Time;
use tonic::Status;

use crate::server::policy_index::ask_if_enforced;

/// What has an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::server) struct Named {
    pub(in crate::server) kind: pb::ClientKind,
    /// A Pod's or a node's name; empty for others.
    pub(in crate::server) name: String,
}

/// Returns the Pod of an endpoint as NAMESPACE/NAME, and its node; empty = not known.
pub(in crate::server) fn endpoint_names(endpoint: &Endpoint, namespace: &str) -> (String, String) {
    let pod = endpoint.pod.as_deref().filter(|pod| !pod.is_empty());
    let pod = pod.map_or_else(String::new, |pod| format!("{namespace}/{pod}"));
    (pod, endpoint.node.as_deref().unwrap_or_default().to_owned())
}

/// The Pod that has an address now.
#[derive(Clone, Debug)]
pub(in crate::server) struct Holder {
    pub(in crate::server) pod: PodName,
    /// The time of its creation, as Kubernetes writes it; `None` = not known.
    pub(in crate::server) created: Option<Arc<str>>,
}

impl Holder {
    /// Returns whether the Pod is younger than a number of seconds: connections from before are another Pod's. 0 = not known.
    fn is_younger(&self, age_s: u64) -> bool {
        if age_s == 0 {
            return false;
        }
        let now_s = millis(SystemTime::now()) / 1_000;
        let start = Time::from_wire(now_s.saturating_sub(age_s) * 1_000);
        // Both are RFC 3339 in UTC and whole seconds, so their order is that of the texts.
        let is_younger = |created: &str| start.is_some_and(|start| *created > *start.to_string());
        self.created.as_deref().is_some_and(is_younger)
    }
}

/// Names of Pods and nodes by address.
#[derive(Debug, Default)]
pub(in crate::server) struct Names {
    /// Pods of the addresses that were asked for; `None` = Pods are not known.
    pods: Option<HashMap<IpAddr, Holder>>,
    nodes: HashMap<IpAddr, NodeName>,
    /// Nodes by their ranges for Pods, and the lengths of these.
    ranges: HashMap<Cidr, NodeName>,
    lengths: BTreeSet<u8>,
}

impl Names {
    /// Looks up who has these addresses.
    pub(in crate::server) async fn of(
        hub: &Hub,
        addresses: impl Iterator<Item = IpAddr>,
    ) -> Result<Self, Status> {
        let addresses: HashSet<IpAddr> = addresses.collect();
        let pods = ask_if_enforced(hub.index(), move |policies, _| {
            let known = addresses.into_iter();
            let holder = |ip| {
                let pod = policies.pod_at(ip)?.clone();
                let created = policies.created(&pod).cloned();
                Some((ip, Holder { pod, created }))
            };
            known.filter_map(holder).collect()
        })
        .await?;
        Ok(Self::new(pods, hub.store().nodes().into_values()))
    }

    pub(in crate::server) fn new(
        pods: Option<HashMap<IpAddr, Holder>>,
        nodes: impl Iterator<Item = Arc<NodeFacts>>,
    ) -> Self {
        let mut names = Self {
            pods,
            ..Self::default()
        };
        for node in nodes {
            for ip in &node.addresses {
                names.nodes.insert(*ip, node.name.clone());
            }
            for range in &node.pod_cidrs {
                names.ranges.insert(*range, node.name.clone());
                names.lengths.insert(range.prefix_len());
            }
        }
        names
    }

    /// Returns whether Pods have names.
    pub(in crate::server) fn knows_pods(&self) -> bool {
        self.pods.is_some()
    }

    /// Returns whether ranges of Pods show which clients are outside the cluster.
    pub(in crate::server) fn knows_outside(&self) -> bool {
        !self.ranges.is_empty()
    }

    /// Returns what has had an address for a number of seconds; 0 = not known. Another Pod may have had it before.
    pub(in crate::server) fn get(&self, ip: IpAddr, age_s: u64) -> Named {
        let named = |kind, name: &dyn ToString| Named {
            kind,
            name: name.to_string(),
        };
        if let Some(node) = self.nodes.get(&ip) {
            return named(pb::ClientKind::Node, node);
        }
        let holder = self.pods.as_ref().and_then(|pods| pods.get(&ip));
        if let Some(holder) = holder.filter(|holder| !holder.is_younger(age_s)) {
            return named(pb::ClientKind::Pod, &holder.pod);
        }
        let mut lengths = self.lengths.iter().rev();
        let range = lengths.find_map(|length| self.ranges.get(&Cidr::new(ip, *length)?));
        match range {
            Some(node) => named(pb::ClientKind::PodOnNode, node),
            None if !self.knows_outside() || holder.is_some() || is_local(ip) => {
                named(pb::ClientKind::Unspecified, &"")
            }
            None => named(pb::ClientKind::Outside, &""),
        }
    }
}

/// Returns whether an address means a program of the same node, or a machine beside it.
fn is_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local(),
    }
}
