//! Whether nodes reach the ports of other nodes by which a dead node is distinguished from one whose agent is silent: what `kpctl
//! check` asks while all is well. A firewall between nodes would make living nodes look dead.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kplane_agents::hub::Hub;
use kplane_agents::node_query::Timeouts;
use kplane_agents::peers::Peers;
use kplane_agents::suspects::Mode;
use kplane_model::{Family, HEALTHZ_PORT, KUBELET_PORTS, NodeFacts, NodeName};
use kplane_proto::v1 as pb;

use super::attempts;
use super::node_query::{self, Agents};
use super::pages::Snapshot;

/// Number of nodes that are asked, each about one other node.
const PAIRS: usize = 8;
const PATIENCE: Timeouts = Timeouts {
    each: Duration::from_secs(5),
    within: Duration::from_secs(8),
};

/// The ports of a node that an agent tries: of kubelet and of the agent, in each family.
struct Target<'a> {
    node: &'a NodeName,
    places: Vec<SocketAddr>,
}

/// Lets some nodes try the ports of others. The answer has no node if the control plane judges none.
pub(super) async fn probe(hub: &Hub, peers: Option<&Peers>) -> pb::ProbeReport {
    let mut report = pb::ProbeReport {
        neighbours: true,
        ..pb::ProbeReport::default()
    };
    if hub.suspects().mode() == Mode::Off {
        return report;
    }
    let (facts, others) = (hub.store().nodes(), node_query::others(peers).await);
    let snapshot = Snapshot::with(hub, &others);
    let connected = snapshot.nodes().filter(|(_, node)| node.is_connected());
    let known = connected.filter_map(|(node, _)| facts.get_key_value(node));
    let targets = targets(&known.collect::<Vec<_>>());
    let question = |of: &NodeName| {
        let places = targets.get(of).into_iter().flat_map(|target| &target.places);
        Arc::new(pb::Inspect {
            attempts: places.map(ToString::to_string).collect(),
            ..pb::Inspect::default()
        })
    };
    let (hub, others) = (hub, &others);
    let agents = Agents { hub, peers, others };
    let answers = agents.ask(question, |of, _| targets.contains_key(of), PATIENCE);
    for heard in answers.await.nodes {
        let mut probed = pb::ProbedNode {
            node: heard.node.to_string(),
            ..pb::ProbedNode::default()
        };
        match (attempts::of(&heard), targets.get(&heard.node)) {
            (Ok(tried), Some(target)) => judge(&mut probed, target, tried),
            (Err(reason), _) => probed.reason = reason,
            (Ok(_), None) => {}
        }
        report.nodes.push(probed);
    }
    report
}

/// Returns the nodes that are asked, spread over all of them, and what each tries: the node behind it.
fn targets<'a>(all: &[(&'a NodeName, &'a Arc<NodeFacts>)]) -> BTreeMap<&'a NodeName, Target<'a>> {
    let [kubelet, _] = KUBELET_PORTS;
    let asked = all.len().min(PAIRS);
    (0..asked)
        .filter_map(|number| {
            let at = number * all.len() / asked;
            let (from, (node, facts)) = (all.get(at)?.0, *all.get((at + 1) % all.len())?);
            let addresses =
                Family::ALL.into_iter().filter_map(|family| facts.primary_address(family));
            let places: Vec<_> = addresses
                .flat_map(|ip| [kubelet, HEALTHZ_PORT].map(|port| (ip, port).into()))
                .collect();
            (from != node && !places.is_empty()).then_some((from, Target { node, places }))
        })
        .collect()
}

/// A refusal is an answer of a node that is alive.
fn judge(probed: &mut pb::ProbedNode, target: &Target<'_>, tried: &[pb::Attempt]) {
    use pb::AttemptOutcome::{Connected, Refused};
    let tried = target.places.iter().zip(tried);
    let silent = tried.filter(|(_, one)| !matches!(one.outcome(), Connected | Refused));
    let failed = silent.map(|(place, one)| pb::ProbedConnection {
        kind: "neighbour".to_owned(),
        node: target.node.to_string(),
        attempt: Some(pb::Attempt {
            address: place.to_string(),
            outcome: one.outcome,
            ..pb::Attempt::default()
        }),
    });
    probed.failed = failed.collect();
    probed.verdict = if probed.failed.is_empty() {
        pb::ProbeVerdict::Works
    } else {
        pb::ProbeVerdict::NodePort
    }
    .into();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_most_eight_nodes_are_asked_and_none_about_itself() {
        let of = |count: u8| {
            let facts = |at: u8| NodeFacts {
                addresses: vec![[192, 0, 2, at].into()],
                ..NodeFacts::default()
            };
            let all: Vec<_> = (0..count)
                .map(|at| (NodeName::from(format!("n{at:03}")), facts(at)))
                .map(|(name, facts)| (name, Arc::new(facts)))
                .collect();
            let all: Vec<_> = all.iter().map(|(name, facts)| (name, facts)).collect();
            let targets = targets(&all);
            assert!(targets.iter().all(|(from, to)| *from != to.node));
            assert!(targets.values().all(|to| to.places.len() == 2));
            targets.len()
        };
        assert_eq!([of(0), of(1), of(2), of(8), of(200)], [0, 0, 2, 8, 8]);
    }
}
