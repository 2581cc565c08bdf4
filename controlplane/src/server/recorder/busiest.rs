//! The Services with the most connections through the userspace proxies of all nodes: a part of `kpctl top`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kplane_model::NodeName;
use kplane_proto::v1 as pb;

use super::super::inquiry::{self, Parts};
use crate::hub::Hub;
use crate::peers::Peers;

/// Maximum number of ServicePorts that an agent names.
const PORTS: usize = 100;
/// Minimum number that an agent is asked for, however large the fleet is.
const LEAST_PORTS: usize = 10;
/// Number of ServicePorts of all agents together that fit into the limit of all answers.
const ALL_PORTS: usize = 60_000;
/// Longest name, in bytes.
const NAME: usize = 253;
/// Time for all agents.
const WITHIN: Duration = Duration::from_millis(2_500);

/// Asks all agents.
pub(super) async fn ask(hub: &Hub, peers: Option<&Peers>, limit: usize) -> pb::TopProxied {
    let replicas = peers.map_or(0, Peers::known) + 1;
    let nodes = hub.fleet.agents().saturating_mul(replicas).max(1);
    let most = (ALL_PORTS / nodes).clamp(LEAST_PORTS, PORTS);
    let question = pb::Inspect {
        busiest: Some(pb::BusiestQuestion {
            ports: u32::try_from(most).unwrap_or(u32::MAX),
        }),
        ..pb::Inspect::default()
    };
    let answers = inquiry::ask(hub, peers, question, |_| true, WITHIN).await;
    put_together(answers.parts(|answer| answer.busiest, |_| ""), most, limit)
}

/// The sums of a Service, and the nodes that name it.
#[derive(Debug, Default)]
struct Sum<'a> {
    service: pb::ProxiedService,
    nodes: BTreeSet<&'a NodeName>,
}

impl<'a> Sum<'a> {
    fn add(&mut self, node: &'a NodeName, port: &pb::ProxiedPort) {
        let failed = port.failed.iter().map(|failed| failed.count);
        let failed = failed.fold(0, u64::saturating_add);
        let sum = &mut self.service;
        for (sum, more) in [
            (&mut sum.open, port.open),
            (&mut sum.opened, port.opened),
            (&mut sum.failed, failed),
            (&mut sum.retries, port.retries),
            (&mut sum.bytes_to_endpoints, port.bytes_to_endpoints),
            (&mut sum.bytes_to_clients, port.bytes_to_clients),
        ] {
            *sum = sum.saturating_add(more);
        }
        self.nodes.insert(node);
    }
}

/// Sums up what agents say, of which each counts for `most` ServicePorts.
fn put_together(parts: Parts<pb::BusiestPorts>, most: usize, limit: usize) -> pb::TopProxied {
    let mut sums = BTreeMap::<(&str, &str), Sum<'_>>::new();
    let mut cut = 0;
    for (node, busiest) in &parts.answered {
        cut += u64::from(busiest.more > 0);
        for port in busiest.ports.iter().take(most) {
            let Some(key) = port.key.as_ref() else {
                continue;
            };
            let names = [&key.namespace, &key.name];
            if names.iter().all(|name| (1..=NAME).contains(&name.len())) {
                let sum = sums.entry((&key.namespace, &key.name)).or_default();
                sum.add(node, port);
            }
        }
    }
    let more = sums.len().saturating_sub(limit) as u64;
    let services = sums
        .into_iter()
        .map(|((namespace, name), sum)| pb::ProxiedService {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            nodes: sum.nodes.len() as u64,
            ..sum.service
        });
    let mut services: Vec<_> = services.collect();
    // Stable, so that equal ones stay in the order of their names.
    services.sort_by_key(|sum| Reverse((sum.open, sum.opened)));
    services.truncate(limit);
    pb::TopProxied {
        services,
        more,
        cut,
        asked: parts.asked,
        answered: parts.answered.len() as u64,
        silent: parts.silent,
        more_silent: parts.more_silent,
        missing_replicas: parts.missing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(name: &str, open: u64, opened: u64) -> pb::ProxiedPort {
        pb::ProxiedPort {
            key: Some(pb::ServiceKey {
                namespace: "shop".to_owned(),
                name: name.to_owned(),
                ..pb::ServiceKey::default()
            }),
            open,
            opened,
            failed: vec![pb::ProxiedFailure {
                reason: "silent".to_owned(),
                count: 2,
            }],
            bytes_to_clients: u64::MAX,
            ..pb::ProxiedPort::default()
        }
    }

    fn of(answered: Vec<(NodeName, pb::BusiestPorts)>) -> Parts<pb::BusiestPorts> {
        Parts {
            asked: 3,
            answered,
            silent: Vec::new(),
            more_silent: 0,
            missing: Vec::new(),
        }
    }

    fn busiest(ports: Vec<pb::ProxiedPort>, more: u64) -> pb::BusiestPorts {
        pb::BusiestPorts { ports, more }
    }

    #[test]
    fn u56_services_are_summed_over_ports_and_nodes_and_the_most_open_come_first() {
        let answered = vec![
            (
                "n1".into(),
                busiest(vec![port("b", 1, 9), port("a", 5, 5), port("a", 1, 1)], 0),
            ),
            (
                "n2".into(),
                busiest(vec![port("a", 1, 1), port("c", 1, 20)], 7),
            ),
        ];
        let top = put_together(of(answered.clone()), 100, 100);
        let seen: Vec<_> = top
            .services
            .iter()
            .map(|sum| {
                (
                    sum.name.as_str(),
                    sum.open,
                    sum.opened,
                    sum.failed,
                    sum.nodes,
                )
            })
            .collect();
        let expected = [("a", 7, 7, 6, 2), ("c", 1, 20, 2, 1), ("b", 1, 9, 2, 1)];
        assert_eq!(seen, expected);
        assert_eq!(top.services[0].bytes_to_clients, u64::MAX, "no overflow");
        assert_eq!((top.asked, top.answered, top.more, top.cut), (3, 2, 0, 1));
        let first = put_together(of(answered), 100, 1);
        assert_eq!((first.services.len(), first.more), (1, 2));
    }

    #[test]
    fn an_agent_that_names_too_much_is_cut_and_what_has_no_name_does_not_count() {
        let mut nameless = port("", 9, 9);
        let many = vec![port("a", 1, 1); 1_000];
        let top = put_together(of(vec![("n1".into(), busiest(many, 0))]), 10, 10);
        assert_eq!(top.services[0].open, 10);
        let long = port(&"x".repeat(254), 1, 1);
        let without = pb::ProxiedPort {
            key: None,
            ..nameless.clone()
        };
        nameless.open = 1;
        let all = busiest(vec![nameless, long, without], 0);
        assert_eq!(
            put_together(of(vec![("n1".into(), all)]), 10, 10).services,
            []
        );
    }
}
