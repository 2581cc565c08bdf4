//! Random events in random order.

use kplane_model::{Family, Protocol};
use proptest::prelude::*;

use super::agent::Agent;
use super::cluster::Cluster;
use super::oracle;
use super::random::{Dice, Event, addresses};
use crate::{End, Policies};

/// An index, what it got, and what it published.
#[derive(Default)]
struct Play {
    index: Policies,
    cluster: Cluster,
    agent: Agent,
}

impl Play {
    fn step(&mut self, event: Event) {
        let Self { index, cluster, .. } = self;
        match event {
            Event::PutPolicy(policy) => {
                cluster.policies.insert(policy.name.clone(), policy.clone());
                index.put_policy(policy);
            }
            Event::DeletePolicy(name) => {
                cluster.policies.remove(&name);
                index.delete_policy(&name);
            }
            Event::PutNamespace(name, labels) => {
                cluster.namespaces.insert(name.clone(), labels.clone());
                index.put_namespace(&name, labels);
            }
            Event::DeleteNamespace(name) => {
                cluster.namespaces.remove(&name);
                index.delete_namespace(&name);
            }
            Event::PutPod(pod) => {
                cluster.pods.insert(pod.name.clone(), pod.clone());
                index.put_pod(pod);
            }
            Event::DeletePod(name) => {
                cluster.pods.remove(&name);
                index.delete_pod(&name);
            }
            Event::PutTiers(policy) => {
                cluster.tiers.insert(policy.name.clone(), policy.clone());
                index.put_cluster_policy(policy);
            }
            Event::DeleteTiers(name) => {
                cluster.tiers.remove(&name);
                index.delete_cluster_policy(&name);
            }
            Event::SetNode(name, node) => {
                match node.clone() {
                    Some(node) => drop(cluster.nodes.insert(name.clone(), node)),
                    None => drop(cluster.nodes.remove(&name)),
                }
                index.set_node(&name, node);
            }
            Event::Take => self.take(),
        }
    }

    /// Takes the changes. What is published then is what a new index publishes.
    fn take(&mut self) {
        self.agent.apply(self.index.take());
        assert_eq!(self.index.take(), crate::PolicyChanges::default());
        let mut fresh = self.cluster.index();
        let mut agent = Agent::default();
        agent.apply(fresh.take());
        assert_eq!(self.agent, agent);
        assert_eq!(self.index.counts(), fresh.counts());
        if self.cluster.policies.is_empty() && self.cluster.tiers.is_empty() {
            assert_eq!(agent, Agent::default());
        }
    }

    /// Compares which policies select which Pods.
    fn check_selections(&self) {
        let Self { index, cluster, .. } = self;
        for pod in cluster.pods.values() {
            let policies = cluster.policies.values().filter(|p| oracle::is_for(p, pod));
            let names: Vec<_> = policies.map(|policy| policy.name.clone()).collect();
            assert_eq!(index.policies_of(&pod.name), Some(names));
        }
        for policy in cluster.policies.values() {
            let pods = cluster.pods.values().filter(|p| oracle::is_for(policy, p));
            let names: Vec<_> = pods.map(|pod| pod.name.clone()).collect();
            let facts = index.policy(&policy.name).unwrap();
            assert_eq!((facts.pods, facts.names), (names.len(), names));
        }
        for policy in cluster.tiers.values() {
            let pods = cluster.pods.values().filter(|pod| oracle::is_subject(cluster, policy, pod));
            let names: Vec<_> = pods.map(|pod| pod.name.clone()).collect();
            let facts = index.cluster_policy(&policy.name).unwrap();
            assert_eq!((facts.pods, facts.names), (names.len(), names));
        }
        let summaries = index.list().map(|summary| summary.name);
        assert!(summaries.eq(cluster.policies.keys().cloned()));
    }

    /// Compares answers for Pods by name with those by address.
    fn check_names(&self) {
        let addresses = addresses()
            .into_iter()
            .map(|address| (address, self.index.pods.of_address(address)));
        let named: Vec<_> = addresses.filter_map(|(address, pod)| Some((address, pod?))).collect();
        let only = |pod| self.index.pods.addresses(pod).count() == 1;
        for (from, source) in named.iter().filter(|(_, pod)| only(pod)) {
            for (to, destination) in named.iter().filter(|(_, pod)| only(pod)) {
                let judge = |from: End, to: End| self.index.judge(&from, &to, Protocol::Tcp, 80);
                let by_name = judge(
                    End::Pod((*source).clone()),
                    End::Pod((*destination).clone()),
                );
                assert_eq!(by_name, judge(End::Address(*from), End::Address(*to)));
            }
        }
    }

    /// Compares all connections.
    fn check(&self) {
        let view = self.agent.view();
        let ports = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp].map(|p| (p, 80));
        for from in addresses() {
            for to in addresses() {
                if Family::of(from) != Family::of(to) {
                    continue;
                }
                for (protocol, port) in ports.into_iter().chain([(Protocol::Tcp, 81)]) {
                    let expected = oracle::allows(&self.cluster, from, to, protocol, port);
                    let agent = view.allows(from, to, protocol, port);
                    let (source, destination) = (End::Address(from), End::Address(to));
                    let judged = self.index.judge(&source, &destination, protocol, port);
                    let context = || format!("{from} -> {to} {port}/{protocol}: {judged:?}");
                    assert_eq!(agent, expected, "agent: {}", context());
                    oracle::compare(&self.cluster, (from, to), expected, &judged);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn agents_and_answers_do_what_the_api_says(seeds in prop::collection::vec(any::<u64>(), 1..40)) {
        let mut play = Play::default();
        for name in ["a", "b"] {
            play.step(Event::PutNamespace(name.into(), Default::default()));
        }
        for seed in seeds {
            play.step(Dice::new(seed).event());
        }
        play.take();
        play.check();
        play.check_names();
        play.check_selections();
    }
}
