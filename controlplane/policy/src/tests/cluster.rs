//! The inputs of an index, and short ways to write them.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{
    Block, Cidr, NamedPort, NodeName, PodName, PolicyName, PolicyPort, Protocol, ServiceName,
};

use super::agent::Agent;
use super::oracle;
use crate::limits::Limits;
use crate::{
    ClusterPolicy, End, Labels, NetworkPolicy, Node, PeerSpec, Pod, Policies, Requirement, Rule,
    Selector,
};

/// Everything that was put and not deleted.
#[derive(Clone, Debug, Default)]
pub(super) struct Cluster {
    pub(super) policies: BTreeMap<PolicyName, NetworkPolicy>,
    pub(super) tiers: BTreeMap<Arc<str>, ClusterPolicy>,
    pub(super) nodes: BTreeMap<NodeName, Node>,
    pub(super) namespaces: BTreeMap<Arc<str>, Labels>,
    pub(super) pods: BTreeMap<PodName, Pod>,
}

impl Cluster {
    /// A cluster with namespaces `a` (team=x) and `b` (team=y).
    pub(super) fn two() -> Self {
        let mut cluster = Self::default();
        for (name, team) in [("a", "x"), ("b", "y")] {
            let labels = labels(&[("team", team)]);
            cluster.namespaces.insert(name.into(), labels);
        }
        cluster
    }

    pub(super) fn with(mut self, pod: Pod) -> Self {
        self.pods.insert(pod.name.clone(), pod);
        self
    }

    /// Adds a node with a range.
    pub(super) fn node(mut self, name: &str, range: &str) -> Self {
        let ranges = vec![range.parse().unwrap()];
        let node = Node {
            ranges,
            ..Node::default()
        };
        self.nodes.insert(name.into(), node);
        self
    }

    pub(super) fn policy(mut self, policy: NetworkPolicy) -> Self {
        self.policies.insert(policy.name.clone(), policy);
        self
    }

    /// Returns an index that got everything in another order than events usually have.
    pub(super) fn index(&self) -> Policies {
        self.index_with(Limits::default())
    }

    pub(super) fn index_with(&self, limits: Limits) -> Policies {
        let mut index = Policies::with_limits(limits);
        for pod in self.pods.values().rev() {
            index.put_pod(pod.clone());
        }
        for policy in self.tiers.values().rev() {
            index.put_cluster_policy(policy.clone());
        }
        for (name, node) in &self.nodes {
            index.set_node(name, Some(node.clone()));
        }
        for policy in self.policies.values().rev() {
            index.put_policy(policy.clone());
        }
        for (name, labels) in self.namespaces.iter().rev() {
            index.put_namespace(name, labels.clone());
        }
        index
    }

    /// Returns whether a connection comes about, after checking that all agree on it.
    pub(super) fn allows(&self, from: &str, to: &str, protocol: Protocol, port: u16) -> bool {
        let mut index = self.index();
        let mut agent = Agent::default();
        agent.apply(index.take());
        let [from, to] = [from, to].map(|text| text.parse::<IpAddr>().unwrap());
        let expected = oracle::allows(self, from, to, protocol, port);
        assert_eq!(agent.allows(from, to, protocol, port), expected, "agent");
        let judged = index.judge(&End::Address(from), &End::Address(to), protocol, port);
        oracle::compare(self, (from, to), expected, &judged);
        expected
    }

    pub(super) fn tcp(&self, from: &str, to: &str, port: u16) -> bool {
        self.allows(from, to, Protocol::Tcp, port)
    }
}

/// Reads `namespace/name`.
pub(super) fn name(text: &str) -> ServiceName {
    let (namespace, name) = text.split_once('/').unwrap();
    ServiceName::new(namespace, name)
}

pub(super) fn labels(labels: &[(&str, &str)]) -> Labels {
    labels.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect()
}

/// A Pod on node `n`.
pub(super) fn pod(of: &str, addresses: &[&str], with: &[(&str, &str)]) -> Pod {
    Pod {
        name: name(of),
        node: "n".into(),
        addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
        labels: labels(with),
        ports: Vec::new(),
        terminating: false,
        created: None,
    }
}

pub(super) fn named(name: &str, protocol: Protocol, port: u16) -> NamedPort {
    NamedPort {
        name: name.into(),
        protocol,
        port,
    }
}

/// A policy for Pods with these labels, which is about no direction.
pub(super) fn policy(of: &str, pods: &[(&str, &str)]) -> NetworkPolicy {
    NetworkPolicy {
        name: name(of),
        pods: selector(pods),
        ingress: None,
        egress: None,
    }
}

pub(super) fn ingress(of: &str, pods: &[(&str, &str)], rules: &[Rule]) -> NetworkPolicy {
    NetworkPolicy {
        ingress: Some(rules.to_vec()),
        ..policy(of, pods)
    }
}

pub(super) fn egress(of: &str, pods: &[(&str, &str)], rules: &[Rule]) -> NetworkPolicy {
    NetworkPolicy {
        egress: Some(rules.to_vec()),
        ..policy(of, pods)
    }
}

pub(super) fn selector(labels: &[(&str, &str)]) -> Selector {
    let labels = labels.iter();
    let equal = |(key, value): &(&str, &str)| Requirement::In((*key).into(), vec![(*value).into()]);
    Selector(labels.map(equal).collect())
}

/// A rule for all ports.
pub(super) fn from(peers: &[PeerSpec]) -> Rule {
    Rule {
        peers: Some(peers.to_vec()),
        ports: None,
    }
}

/// A rule for everybody.
pub(super) fn ports(ports: &[PolicyPort]) -> Rule {
    Rule {
        peers: None,
        ports: Some(ports.to_vec()),
    }
}

pub(super) fn pods(namespaces: Option<Selector>, pods: Option<Selector>) -> PeerSpec {
    PeerSpec::Pods { namespaces, pods }
}

pub(super) fn block(range: &str, except: &[&str]) -> PeerSpec {
    let cidr = |text: &str| text.parse::<Cidr>().unwrap();
    PeerSpec::Block(Block {
        range: cidr(range),
        except: except.iter().map(|text| cidr(text)).collect(),
    })
}
