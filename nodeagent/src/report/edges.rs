//! Answers to questions about who talked to whom, in the wire format.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use kplane_dataplane::backend::Description;
use kplane_model::{ServiceKey, ServiceName};
use kplane_proto::v1 as pb;
use prost::Message as _;

use crate::service_connections::{
    EdgeCounts, EdgeKey, EdgeSums, ServiceConnections, events_are_off,
};

/// Maximum number of Services in a question.
const SERVICES: usize = 32;
/// Maximum number of edges in an answer.
const EDGES: usize = 1_000;
/// Maximum size of the ServicePorts and edges of an answer, in bytes: a message has less than 256 KiB.
const BYTES: usize = 240 << 10;
/// Longest time to look back, in seconds.
const LONGEST_S: u32 = 3_600;

/// Returns who talked to whom.
pub(crate) fn answer(
    backend: &Description,
    connections: Option<&ServiceConnections>,
    question: &pb::EdgesQuestion,
) -> pb::Edges {
    let answered = try_answer(backend, connections, question);
    answered.unwrap_or_else(|error| pb::Edges {
        error,
        ..pb::Edges::default()
    })
}

fn try_answer(
    backend: &Description,
    connections: Option<&ServiceConnections>,
    question: &pb::EdgesQuestion,
) -> Result<pb::Edges, String> {
    let Some(wanted) = WantedServices::read(question) else {
        return Err("the agent does not understand the question".to_owned());
    };
    let since_s = match question.since_s {
        0 => LONGEST_S,
        since_s => since_s.min(LONGEST_S),
    };
    let ago = Duration::from_secs(since_s.into());
    let sums = connections.and_then(|all| all.edges(ago, |key| wanted.has(key))).ok_or(
        "its agent does not count connections: it needs the option --flows (in the chart agent.flows), and the kernel's module \
         nf_conntrack_netlink",
    )?;
    if backend.has_virtual_servers {
        return Err("connections are not counted in mode ipvs: the kernel reports them before IPVS has chosen an endpoint".into());
    }
    if let Some(error) = connections.and_then(ServiceConnections::failure) {
        return Err(format!(
            "its agent does not count connections any more: {error}; restart the agent"
        ));
    }
    if events_are_off() {
        return Err("its kernel reports no connections: set net.netfilter.nf_conntrack_events to 1, and restart the agent".into());
    }
    let most = usize::try_from(question.most).unwrap_or(EDGES);
    let most = if most == 0 { EDGES } else { most.min(EDGES) };
    Ok(wire(&sums, most, wanted.is_everything()))
}

/// The ServicePorts that a question means.
struct WantedServices<'a> {
    namespace: &'a str,
    services: HashSet<ServiceName>,
}

impl<'a> WantedServices<'a> {
    fn read(question: &'a pb::EdgesQuestion) -> Option<Self> {
        let services = question.services.iter().map(|text| {
            let (namespace, name) = text.split_once('/')?;
            Some(ServiceName::new(namespace, name))
        });
        if question.services.len() > SERVICES {
            return None;
        }
        Some(Self {
            namespace: &question.namespace,
            services: services.collect::<Option<_>>()?,
        })
    }

    fn is_everything(&self) -> bool {
        self.namespace.is_empty() && self.services.is_empty()
    }

    fn has(&self, key: &ServiceKey) -> bool {
        let service = &key.service;
        let in_namespace = self.namespace.is_empty() || *service.namespace == *self.namespace;
        in_namespace && (self.services.is_empty() || self.services.contains(service))
    }
}

/// Returns the answer, as far as there is room in a message. Connections that the agent had no room for may be of any Service,
/// so they count as wanted only if `everything` is.
fn wire(sums: &EdgeSums, most: usize, everything: bool) -> pb::Edges {
    let (more, more_failed, lost) = if everything {
        (sums.more, sums.more_failed, 0)
    } else {
        (0, 0, (sums.more.max(sums.more_failed) > 0).into())
    };
    let mut answer = pb::Edges {
        more,
        more_failed,
        lost: sums.lost.saturating_add(lost),
        covered_s: u32::try_from(sums.covered.as_secs()).unwrap_or(u32::MAX),
        ..pb::Edges::default()
    };
    let mut ports = HashMap::<ServiceKey, u32>::new();
    let mut bytes = 0;
    for (key, counts, age) in &sums.edges {
        let next = u32::try_from(ports.len()).unwrap_or(u32::MAX);
        let known = ports.get(&key.port).copied();
        let edge = edge(known.unwrap_or(next), key, counts, *age);
        let port = known.is_none().then(|| pb::ServiceKey::from(&key.port));
        // Each field has a tag and a length of four bytes at most.
        bytes += edge.encoded_len() + port.as_ref().map_or(0, |port| port.encoded_len() + 4) + 4;
        if answer.edges.len() == most || bytes > BYTES {
            answer.more = answer.more.saturating_add(counts.begun.into());
            answer.more_failed = answer.more_failed.saturating_add(counts.failed.into());
            continue;
        }
        if let Some(port) = port {
            ports.insert(key.port.clone(), next);
            answer.ports.push(port);
        }
        answer.edges.push(edge);
    }
    answer
}

fn edge(port: u32, key: &EdgeKey, counts: &EdgeCounts, age: Duration) -> pb::Edge {
    let [bytes_to_endpoint, bytes_to_client] = counts.bytes;
    pb::Edge {
        port,
        client: key.client.map_or_else(String::new, |ip| ip.to_string()),
        endpoint: key.endpoint.to_string(),
        begun: counts.begun.into(),
        failed: counts.failed.into(),
        reset: counts.reset.into(),
        bytes_to_endpoint,
        bytes_to_client,
        age_s: age.as_secs(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use kplane_dataplane::backend::Kind;

    use super::*;

    fn sums(edges: u32, name: &str) -> EdgeSums {
        let ip = |n: u32| IpAddr::from((u128::MAX - u128::from(n)).to_be_bytes());
        let edges = (0..edges).map(|n| {
            let key = EdgeKey {
                port: ServiceKey::sample("shop", &format!("{name}-{n}")),
                client: Some(ip(n)),
                endpoint: (ip(n), u16::MAX).into(),
            };
            let counts = EdgeCounts {
                begun: 7,
                failed: u32::MAX - 1,
                reset: u32::MAX,
                bytes: [u64::MAX; 2],
            };
            (key, counts, Duration::from_secs(u64::MAX))
        });
        EdgeSums {
            edges: edges.collect(),
            more: 1,
            more_failed: 5,
            lost: u64::MAX,
            covered: Duration::MAX,
        }
    }

    #[test]
    fn the_largest_answer_fits_into_a_message_and_the_rest_is_counted() {
        let answer = wire(&sums(1_000, &"n".repeat(200)), EDGES, true);
        let size = answer.encoded_len();
        assert!(size < 250 << 10, "{size}");
        let shown = answer.edges.len() as u64;
        assert!((500..1_000).contains(&shown), "{shown}");
        assert_eq!(answer.more, 1 + 7 * (1_000 - shown));
        assert_eq!(answer.ports.len(), answer.edges.len());
        let answer = wire(&sums(20, "web"), 5, true);
        assert_eq!((answer.edges.len(), answer.more), (5, 1 + 7 * 15));
        assert_eq!(answer.more_failed, 5 + 15 * u64::from(u32::MAX - 1));
        // The connections without room may be of other Services than those that were asked for.
        let mut few = sums(20, "web");
        for (more, lost) in [(1, 1), (0, 0)] {
            (few.more, few.more_failed, few.lost) = (more, 0, 0);
            let answer = wire(&few, 5, false);
            assert_eq!((answer.more, answer.lost), (7 * 15, lost));
        }
    }

    #[test]
    fn what_cannot_be_counted_is_said() {
        let (nftables, ipvs) = (Kind::Nftables.describe(), Kind::Ipvs.describe());
        let question = pb::EdgesQuestion::default();
        let counter = ServiceConnections::with_edges();
        let error = |backend, counter, question| answer(backend, counter, question).error;
        assert!(error(nftables, None, &question).contains("--flows"));
        let other = ServiceConnections::default();
        assert!(error(nftables, Some(&other), &question).contains("--flows"));
        assert!(error(ipvs, Some(&counter), &question).contains("mode ipvs"));
        counter.end(Err("no descriptors".to_owned()));
        let ended = error(nftables, Some(&counter), &question);
        assert!(ended.contains("any more: no descriptors"), "{ended}");
        for services in [vec!["shop/web".to_owned(); 33], vec!["web".to_owned()]] {
            let question = pb::EdgesQuestion {
                services,
                ..pb::EdgesQuestion::default()
            };
            let error = answer(nftables, Some(&counter), &question).error;
            assert!(error.contains("does not understand"), "{error}");
        }
    }

    #[test]
    fn a_question_may_name_a_namespace_and_services() {
        let key = ServiceKey::sample("shop", "web");
        let has = |namespace: &str, services: &[&str]| {
            let question = pb::EdgesQuestion {
                namespace: namespace.to_owned(),
                services: services.iter().map(ToString::to_string).collect(),
                ..pb::EdgesQuestion::default()
            };
            let wanted = WantedServices::read(&question).unwrap();
            wanted.has(&key)
        };
        assert!(has("", &[]) && has("shop", &[]) && has("", &["shop/api", "shop/web"]));
        assert!(!has("other", &[]) && !has("", &["shop/api"]));
    }
}
