//! Whether nodes reach the ports of other nodes by which the control plane finds out that a node is dead.

use kplane_proto::v1::{self as pb, ProbeVerdict};

use super::{Finding, NAMED};

pub(crate) const CHECK: &str = "neighbours";

/// Returns the finding of what some nodes got from others.
pub(crate) fn finding(report: &pb::ProbeReport) -> Finding {
    if !report.neighbours {
        let text =
            "the control plane is older than kpctl, and lets no agent try ports of other nodes";
        return Finding::skipped(CHECK, text);
    }
    // A node whose agent does not answer is the matter of other checks.
    let reported = report.nodes.iter().filter(|node| node.verdict() != ProbeVerdict::Unspecified);
    let pairs = reported.clone().count();
    if pairs == 0 {
        let text = "no node asks another one: --dead-node is off, or there are no two nodes with an address";
        return Finding::skipped(CHECK, text);
    }
    let failed = reported.flat_map(|node| node.failed.iter().map(move |failed| (node, failed)));
    let failed: Vec<String> = failed
        .map(|(node, failed)| {
            let at = failed.attempt.as_ref().map_or("", |attempt| &attempt.address);
            format!("{} gets no answer of {} at {at}", node.node, failed.node)
        })
        .collect();
    let text = format!("{pairs} nodes tried kubelet and the agent of another node");
    if failed.is_empty() {
        return Finding::ok(CHECK, text);
    }
    let text = format!("{text}, and {} ports did not answer", failed.len());
    let remedy = "allow TCP 10250 and 10256 between nodes, or docs/dead-nodes.md takes a living node for a dead one";
    Finding::warning(CHECK, text, remedy).with(failed.into_iter().take(NAMED).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Outcome;

    #[test]
    fn a_port_that_neighbours_do_not_reach_is_a_warning_with_the_pair() {
        let report = |nodes: Vec<pb::ProbedNode>| pb::ProbeReport {
            neighbours: true,
            nodes,
            ..pb::ProbeReport::default()
        };
        let silent = pb::ProbedConnection {
            node: "n2".to_owned(),
            attempt: Some(pb::Attempt {
                address: "192.0.2.2:10250".to_owned(),
                ..pb::Attempt::default()
            }),
            ..pb::ProbedConnection::default()
        };
        let node = |verdict: ProbeVerdict, failed: &[pb::ProbedConnection]| pb::ProbedNode {
            node: "n1".to_owned(),
            verdict: verdict.into(),
            failed: failed.to_vec(),
            ..pb::ProbedNode::default()
        };
        let found = finding(&report(vec![
            node(ProbeVerdict::NodePort, &[silent]),
            node(ProbeVerdict::Works, &[]),
        ]));
        assert_eq!(found.outcome, Outcome::Warning);
        assert_eq!(
            found.details,
            ["n1 gets no answer of n2 at 192.0.2.2:10250"]
        );
        let works = report(vec![node(ProbeVerdict::Works, &[])]);
        assert_eq!(finding(&works).outcome, Outcome::Ok);
        assert_eq!(finding(&report(Vec::new())).outcome, Outcome::Skipped);
        let older = finding(&pb::ProbeReport::default());
        assert_eq!(older.outcome, Outcome::Skipped);
    }
}
