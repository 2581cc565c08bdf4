//! Packets that NetworkPolicies denied, asked of the nodes: counts by Pod, and samples for those who follow them.
//!
//! Agents know addresses, and the index knows the Pods that have them now.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kplane_agents::hub::{Hub, IndexHandle};
use kplane_agents::node_query::Timeouts;
use kplane_agents::peers::Peers;
use kplane_model::{Direction, NodeName, PodName, Protocol, TierAction, parse_ip};
use kplane_policy::{End, Policies, Verdict};
use kplane_proto::v1 as pb;
use parking_lot::Mutex;
use tokio::time::Instant;
use tonic::Status;

use super::node_query::Agents;
use super::pages::Node;
use super::policy_index::{ask as ask_index, no_pod};
use super::request::bounded_names;
use super::{millis, node_query};

/// Maximum number of counts and of samples in an answer, and of either that one agent may send.
const PODS: usize = 5_000;
const PACKETS: usize = 500;
const OF_AGENT: usize = 1_024;
/// Maximum number of policies that are named with a sample.
const ISOLATING: usize = 20;
/// Time for all agents, and for those of a note.
const WITHIN: Duration = Duration::from_millis(4_500);
const FOR_NOTE: Duration = Duration::from_secs(1);
/// Maximum number of nodes that are asked for a note.
const NODES_FOR_NOTE: usize = 16;
/// Time after which a follower that goes on is written down again, and most that are remembered.
const AUDITED: Duration = Duration::from_secs(60);
const REMEMBERED: usize = 1_024;

/// Followers that were written down lately, each with its time.
#[derive(Clone, Debug, Default)]
pub(super) struct Audited(Arc<Mutex<HashMap<String, Instant>>>);

impl Audited {
    /// Returns whether this has to be written down: a follower asks every second.
    pub(super) fn is_news(&self, text: &str) -> bool {
        let now = Instant::now();
        let mut known = self.0.lock();
        known.retain(|_, at| now.duration_since(*at) < AUDITED);
        let is_news = !known.contains_key(text);
        if is_news && known.len() < REMEMBERED {
            known.insert(text.to_owned(), now);
        }
        is_news
    }
}

/// Pods that a request means.
#[derive(Clone, Debug)]
struct Wanted {
    namespace: String,
    pod: String,
}

impl Wanted {
    fn covers(&self, pod: Option<&PodName>) -> bool {
        let is = |wanted: &str, actual: &str| wanted.is_empty() || wanted == actual;
        match pod {
            Some(of) => is(&self.namespace, &of.namespace) && is(&self.pod, &of.name),
            None => self.namespace.is_empty() && self.pod.is_empty(),
        }
    }
}

/// Asks all agents, or that of one node, what policies denied: counts, or samples if there is a follower.
pub(super) async fn ask(
    hub: &Hub,
    peers: Option<&Peers>,
    request: pb::DropsRequest,
) -> Result<pb::DropsAnswer, Status> {
    let pb::DropsRequest {
        namespace,
        pod,
        node,
        follower,
    } = request;
    bounded_names(&[&namespace, &pod, &node])?;
    if !pod.is_empty() && namespace.is_empty() {
        return Err(Status::invalid_argument("name the Pod's namespace"));
    }
    let wanted = Wanted { namespace, pod };
    let node = match (wanted.pod.as_str(), node.is_empty()) {
        ("", _) | (_, false) => node,
        _ => node_of(hub.index(), &wanted).await?.to_string(),
    };
    let question = pb::DenialsQuestion {
        follower,
        namespace: wanted.namespace.clone(),
        pod: wanted.pod.clone(),
    };
    let answers = node_query::ask(hub, peers, inspect(question), &node, WITHIN).await;
    let parts = answers.parts(|answer| answer.denials.as_ref(), |of| of.error.as_str());
    let reported: Vec<(NodeName, pb::Denials)> = parts
        .reported
        .into_iter()
        .map(|(node, of)| (node.clone(), of.clone()))
        .collect();
    let named = ask_index(hub.index(), move |policies, _| {
        name(policies, &reported, &wanted)
    });
    let pb::DropsAnswer {
        pods,
        more,
        packets,
        lost,
        ..
    } = named.await?;
    Ok(pb::DropsAnswer {
        pods,
        more,
        packets,
        lost,
        nodes: Some(parts.asked),
    })
}

fn inspect(question: pb::DenialsQuestion) -> pb::Inspect {
    pb::Inspect {
        denials: Some(question),
        ..pb::Inspect::default()
    }
}

async fn node_of(index: &IndexHandle, wanted: &Wanted) -> Result<NodeName, Status> {
    let pod = PodName::new(&wanted.namespace, &wanted.pod);
    let unknown = no_pod(&pod);
    let found = ask_index(index, move |policies, _| policies.node_of(&pod).cloned());
    found.await?.ok_or(unknown)
}

/// Puts answers of agents together, and names the Pods in them.
fn name(
    policies: &Policies,
    reported: &[(NodeName, pb::Denials)],
    wanted: &Wanted,
) -> pb::DropsAnswer {
    let mut answer = pb::DropsAnswer::default();
    for (node, of) in reported {
        answer.more = answer.more.saturating_add(of.more);
        answer.lost = answer.lost.saturating_add(of.lost);
        for pod in of.pods.iter().take(OF_AGENT) {
            answer.pods.extend(name_pod(policies, node, pod, wanted));
        }
        for packet in of.packets.iter().take(OF_AGENT) {
            answer.packets.extend(name_packet(policies, node, packet, wanted));
        }
    }
    answer.pods.sort_by_key(|pod| std::cmp::Reverse(pod.packets));
    answer.more = answer.more.saturating_add(rest(&mut answer.pods, PODS));
    answer.packets.sort_by_key(|packet| packet.at_ms);
    answer.lost = answer.lost.saturating_add(rest(&mut answer.packets, PACKETS));
    answer
}

/// Cuts a list; returns how many were left out.
fn rest<T>(list: &mut Vec<T>, most: usize) -> u64 {
    let more = list.len().saturating_sub(most);
    list.truncate(most);
    more as u64
}

fn name_pod(
    policies: &Policies,
    node: &NodeName,
    of: &pb::DeniedPod,
    wanted: &Wanted,
) -> Option<pb::DroppedPod> {
    let address = parse_ip(&of.address).ok()?;
    let pod = policies.pod_at(address);
    let is_wanted = wanted.covers(pod) && direction(of.direction()).is_some();
    is_wanted.then(|| pb::DroppedPod {
        pod: pod.map(ToString::to_string).unwrap_or_default(),
        address: address.to_string(),
        node: node.to_string(),
        direction: of.direction,
        packets: of.packets,
    })
}

fn name_packet(
    policies: &Policies,
    node: &NodeName,
    of: &pb::DeniedPacket,
    wanted: &Wanted,
) -> Option<pb::DroppedPacket> {
    let direction = direction(of.direction())?;
    let [from, to] = [&of.from, &of.to].map(|text| parse_ip(text).ok());
    let (from, to) = (from?, to?);
    let [from_pod, to_pod] = [from, to].map(|ip| policies.pod_at(ip));
    let subject = match direction {
        Direction::Ingress => to_pod,
        Direction::Egress => from_pod,
    };
    if !wanted.covers(subject) {
        return None;
    }
    let shown = |pod: Option<&PodName>| pod.map(ToString::to_string).unwrap_or_default();
    Some(pb::DroppedPacket {
        node: node.to_string(),
        packet: Some(pb::DeniedPacket {
            from: from.to_string(),
            to: to.to_string(),
            ..of.clone()
        }),
        from_pod: shown(from_pod),
        to_pod: shown(to_pod),
        isolating: isolating(policies, of, direction, (from, to)),
        at_ms: millis(SystemTime::now()).saturating_sub(of.age_ms),
    })
}

/// Returns the policies that isolate the Pod of a packet and do not allow the connection now.
fn isolating(
    policies: &Policies,
    of: &pb::DeniedPacket,
    direction: Direction,
    (from, to): (IpAddr, IpAddr),
) -> Vec<String> {
    let protocol = u8::try_from(of.protocol).ok();
    let (Some(protocol), Ok(port)) = (
        protocol.and_then(Protocol::from_number),
        u16::try_from(of.to_port),
    ) else {
        return Vec::new();
    };
    let judged = policies.judge(&End::Address(from), &End::Address(to), protocol, port);
    let verdict = match direction {
        Direction::Ingress => judged.ingress,
        Direction::Egress => judged.egress,
    };
    match verdict {
        Verdict::Denied(names) => names.iter().take(ISOLATING).map(ToString::to_string).collect(),
        Verdict::Ruled(ruling) if ruling.action == TierAction::Deny => {
            vec![format!("ClusterNetworkPolicy {}", ruling.policy)]
        }
        Verdict::Itself | Verdict::NotIsolated | Verdict::Allowed { .. } | Verdict::Ruled(_) => {
            Vec::new()
        }
    }
}

fn direction(wire: pb::PolicyDirection) -> Option<Direction> {
    match wire {
        pb::PolicyDirection::Ingress => Some(Direction::Ingress),
        pb::PolicyDirection::Egress => Some(Direction::Egress),
        pb::PolicyDirection::Unspecified => None,
    }
}

/// Returns how many packets the node of a Pod has denied, as a note to a verdict; `None` = none, or the node does not say.
pub(super) async fn note(
    hub: &Hub,
    peers: Option<&Peers>,
    (pod, node): (PodName, NodeName),
    of: Direction,
) -> Option<String> {
    let others = node_query::others(peers).await;
    let agents = Agents {
        hub,
        peers,
        others: &others,
    };
    let pods = BTreeMap::from([(pod.clone(), node.clone())]);
    let packets = denied(agents, &pods, of).await.packets;
    let (way, preposition) = match of {
        Direction::Ingress => ("to", "from"),
        Direction::Egress => ("from", "to"),
    };
    (packets > 0).then(|| {
        let packets = of_new_connections(packets);
        format!(
            "{node} has dropped {packets} {way} Pod {pod}; kpctl get drops --follow --pod {pod} \
             shows {preposition} where"
        )
    })
}

pub(super) fn of_new_connections(packets: u64) -> String {
    match packets {
        1 => "1 packet of a new connection".to_owned(),
        packets => format!("{packets} packets of new connections"),
    }
}

/// Packets that the nodes of some Pods have denied.
#[derive(Debug)]
pub(super) struct Denied {
    pub(super) packets: u64,
    /// All nodes have answered.
    pub(super) is_all: bool,
}

/// Asks the first nodes of some Pods how many packets they have denied in a direction.
pub(super) async fn denied(
    agents: Agents<'_>,
    pods: &BTreeMap<PodName, NodeName>,
    of: Direction,
) -> Denied {
    let nodes: BTreeSet<_> = pods.values().collect();
    let all = nodes.len();
    let asked: BTreeSet<_> = nodes.into_iter().take(NODES_FOR_NOTE).collect();
    let question = Arc::new(inspect(pb::DenialsQuestion::default()));
    let wanted = |node: &NodeName, _: &Node<'_>| asked.contains(node);
    let timeouts = Timeouts::all(FOR_NOTE);
    let answers = agents.ask(|_| Arc::clone(&question), wanted, timeouts).await;
    let parts = answers.parts(|answer| answer.denials.as_ref(), |of| of.error.as_str());
    let is_all = parts.reported.len() == all;
    let denials = parts.reported.into_iter();
    let denials = denials.flat_map(|(_, denials)| denials.pods.iter().take(OF_AGENT));
    let counted = denials.filter_map(|reported| {
        let address = parse_ip(&reported.address).ok()?;
        (direction(reported.direction()) == Some(of)).then_some((address, reported.packets))
    });
    let (counted, names) = (counted.collect::<Vec<_>>(), pods.keys().cloned());
    let names: BTreeSet<_> = names.collect();
    let packets = ask_index(agents.hub.index(), move |policies, _| {
        counted
            .iter()
            .filter(|(address, _)| {
                let pod = policies.pod_at(*address);
                pod.is_some_and(|pod| names.contains(pod))
            })
            .fold(0_u64, |sum, (_, packets)| sum.saturating_add(*packets))
    });
    Denied {
        packets: packets.await.unwrap_or_default(),
        is_all,
    }
}

#[cfg(test)]
mod tests {
    use kplane_policy::{NetworkPolicy, Pod, Selector};

    use super::*;

    fn pod(namespace: &str, name: &str, ip: &str) -> Pod {
        Pod {
            name: PodName::new(namespace, name),
            node: "n1".into(),
            addresses: vec![ip.parse().unwrap()],
            labels: kplane_policy::Labels::default(),
            ports: Vec::new(),
            terminating: false,
            created: None,
        }
    }

    /// Nothing may come to Pods of shop.
    fn policies() -> Policies {
        let mut policies = Policies::default();
        for (namespace, name, ip) in [
            ("shop", "db-0", "10.0.0.1"),
            ("shop", "web-0", "10.0.0.2"),
            ("ops", "job", "10.0.0.3"),
        ] {
            policies.put_namespace(&namespace.into(), kplane_policy::Labels::default());
            policies.put_pod(pod(namespace, name, ip));
        }
        policies.put_policy(NetworkPolicy {
            name: PodName::new("shop", "deny"),
            pods: Selector::default(),
            ingress: Some(Vec::new()),
            egress: None,
        });
        policies
    }

    fn count(address: &str, packets: u64) -> pb::DeniedPod {
        pb::DeniedPod {
            address: address.to_owned(),
            direction: pb::PolicyDirection::Ingress.into(),
            packets,
        }
    }

    fn sample(
        direction: pb::PolicyDirection,
        from: &str,
        to: &str,
        age_ms: u64,
    ) -> pb::DeniedPacket {
        pb::DeniedPacket {
            age_ms,
            direction: direction.into(),
            from: from.to_owned(),
            to: to.to_owned(),
            protocol: 6,
            from_port: 40_000,
            to_port: 5_432,
        }
    }

    fn named(reported: pb::Denials, namespace: &str, pod: &str) -> pb::DropsAnswer {
        let wanted = Wanted {
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
        };
        name(&policies(), &[("n1".into(), reported)], &wanted)
    }

    #[test]
    fn counts_get_the_names_of_pods_and_others_are_left_out() {
        let reported = pb::Denials {
            pods: vec![
                count("10.0.0.3", 1),
                count("10.0.0.1", 7),
                count("10.0.0.9", 2),
                count("what", 3),
                pb::DeniedPod::default(),
            ],
            ..pb::Denials::default()
        };
        let pods = |namespace: &str, pod: &str| -> Vec<(String, u64)> {
            named(reported.clone(), namespace, pod)
                .pods
                .into_iter()
                .map(|of| (of.pod, of.packets))
                .collect()
        };
        let expect = |pod: &str, packets| (pod.to_owned(), packets);
        // A Pod that is gone is still counted by its node for a moment.
        assert_eq!(
            pods("", ""),
            [expect("shop/db-0", 7), expect("", 2), expect("ops/job", 1)]
        );
        assert_eq!(pods("shop", ""), [expect("shop/db-0", 7)]);
        assert_eq!(pods("ops", "job"), [expect("ops/job", 1)]);
        let many = pb::Denials {
            pods: vec![count("10.0.0.1", 1); OF_AGENT + 5],
            more: 3,
            ..pb::Denials::default()
        };
        assert_eq!(named(many, "", "").pods.len(), OF_AGENT);
    }

    #[test]
    fn samples_name_both_ends_and_the_policies_and_are_in_order() {
        use pb::PolicyDirection::{Egress, Ingress};

        let reported = pb::Denials {
            packets: vec![
                sample(Ingress, "10.0.0.3", "10.0.0.1", 10),
                sample(Ingress, "192.0.2.1", "10.0.0.2", 4_000),
                // Its policy is gone by now.
                sample(Egress, "10.0.0.3", "10.0.0.9", 0),
                sample(Egress, "rubbish", "10.0.0.9", 0),
            ],
            lost: 2,
            ..pb::Denials::default()
        };
        let answer = named(reported.clone(), "", "");
        let ends: Vec<_> = answer
            .packets
            .iter()
            .map(|of| (&*of.from_pod, &*of.to_pod, of.isolating.join(",")))
            .collect();
        let deny = || "shop/deny".to_owned();
        let expected = [
            ("", "shop/web-0", deny()),
            ("ops/job", "shop/db-0", deny()),
            ("ops/job", "", String::new()),
        ];
        assert_eq!(ends, expected);
        assert_eq!(answer.lost, 2);
        // The Pod that policies isolate counts, not the other end.
        assert_eq!(named(reported.clone(), "shop", "").packets.len(), 2);
        assert_eq!(named(reported, "ops", "job").packets.len(), 1);
        let many = pb::Denials {
            packets: vec![sample(Ingress, "10.0.0.3", "10.0.0.1", 0); PACKETS + 9],
            ..pb::Denials::default()
        };
        let answer = named(many, "", "");
        assert_eq!((answer.packets.len(), answer.lost), (PACKETS, 9));
    }

    #[tokio::test(start_paused = true)]
    async fn a_follower_is_written_down_once_a_minute() {
        let audited = Audited::default();
        assert!(audited.is_news("alice follows"));
        assert!(!audited.is_news("alice follows"));
        assert!(audited.is_news("bob follows"));
        tokio::time::advance(AUDITED).await;
        assert!(audited.is_news("alice follows"));
    }
}
