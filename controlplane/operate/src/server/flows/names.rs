//! Names for addresses of clients: Pods, as far as the control plane knows them, and nodes.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use kplane_fleet::hub::Hub;
use kplane_model::{Cidr, Endpoint, NodeFacts, NodeName, PodName};
use kplane_proto::v1 as pb;
use tonic::Status;

use crate::server::closing;

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

/// Names of Pods and nodes by address.
#[derive(Debug, Default)]
pub(in crate::server) struct Names {
    /// Pods of the addresses that were asked for; `None` = Pods are not known.
    pods: Option<HashMap<IpAddr, PodName>>,
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
        let pods = hub.policies(move |policies, _| {
            let known = addresses.into_iter();
            let known = known.filter_map(|ip| Some((ip, policies.pod_at(ip)?.clone())));
            known.collect()
        });
        let pods = pods.await.map_err(closing)?;
        Ok(Self::new(pods, hub.store.nodes().into_values()))
    }

    pub(in crate::server) fn new(
        pods: Option<HashMap<IpAddr, PodName>>,
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

    /// Returns what has an address.
    pub(in crate::server) fn get(&self, ip: IpAddr) -> Named {
        let named = |kind, name: &dyn ToString| Named {
            kind,
            name: name.to_string(),
        };
        if let Some(node) = self.nodes.get(&ip) {
            return named(pb::ClientKind::Node, node);
        }
        if let Some(pod) = self.pods.as_ref().and_then(|pods| pods.get(&ip)) {
            return named(pb::ClientKind::Pod, pod);
        }
        let mut lengths = self.lengths.iter().rev();
        let range = lengths.find_map(|length| self.ranges.get(&Cidr::new(ip, *length)?));
        match range {
            Some(node) => named(pb::ClientKind::PodOnNode, node),
            None if self.ranges.is_empty() && self.pods.is_none() => {
                named(pb::ClientKind::Unspecified, &"")
            }
            None => named(pb::ClientKind::Outside, &""),
        }
    }
}
