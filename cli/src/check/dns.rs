//! Whether every node reaches the cluster's DNS through its own data path.

use kplane_proto::v1::{self as pb, ProbeVerdict};

use super::{Finding, NAMED};

pub(crate) const CHECK: &str = "dns";

/// Returns the finding of what the agents got.
pub(crate) fn finding(report: &pb::ProbeReport) -> Finding {
    let name = &report.dns_name;
    if name.is_empty() {
        let text = "the control plane is older than kpctl, and lets no agent ask DNS";
        return Finding::skipped(CHECK, text);
    }
    let works = |node: &&pb::ProbedNode| node.verdict() == ProbeVerdict::Works;
    let works = report.nodes.iter().filter(works).count();
    // A node whose agent does not answer is the matter of other checks.
    let is_bad = |node: &&pb::ProbedNode| {
        !matches!(
            node.verdict(),
            ProbeVerdict::Works | ProbeVerdict::Unspecified
        )
    };
    let bad: Vec<_> = report.nodes.iter().filter(is_bad).collect();
    let text = format!("{works} of {} nodes get an answer", report.nodes.len());
    if bad.is_empty() && works > 0 {
        return Finding::ok(CHECK, text);
    }
    if bad.is_empty() {
        return Finding::unknown(CHECK, "no agent answered", "kpctl probe --dns");
    }
    if bad.iter().copied().all(knows_no_name) {
        let text = format!(
            "DNS answers, and knows no {name}: kpctl probe --dns=NAME with the domain of your cluster"
        );
        return Finding::skipped(CHECK, text);
    }
    let details = bad.iter().take(NAMED).map(|node| format!("{}: {}", node.node, node.reason));
    Finding::bad(CHECK, text, "kpctl probe --dns").with(details.collect())
}

/// Returns whether a server answered that there is no such name.
fn knows_no_name(node: &pb::ProbedNode) -> bool {
    node.failed
        .iter()
        .filter_map(|of| of.attempt.as_ref())
        .any(|attempt| attempt.error.contains("NXDOMAIN"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Outcome;

    fn node(verdict: ProbeVerdict, error: &str) -> pb::ProbedNode {
        let failed = pb::ProbedConnection {
            attempt: Some(pb::Attempt {
                error: error.to_owned(),
                ..pb::Attempt::default()
            }),
            ..pb::ProbedConnection::default()
        };
        pb::ProbedNode {
            node: "n1".to_owned(),
            verdict: verdict.into(),
            reason: "nothing comes back".to_owned(),
            failed: vec![failed],
            ..pb::ProbedNode::default()
        }
    }

    #[test]
    fn a_node_without_dns_is_bad_and_another_domain_is_not() {
        use ProbeVerdict::{DataPath, Endpoints, Unspecified, Works};
        let outcome = |nodes: &[pb::ProbedNode]| {
            let found = finding(&pb::ProbeReport {
                dns_name: "kubernetes.default".to_owned(),
                nodes: nodes.to_vec(),
                ..pb::ProbeReport::default()
            });
            (found.outcome, found.details.len())
        };
        let [works, silent] = [node(Works, ""), node(DataPath, "")];
        let unknown = node(Unspecified, "");
        let domain = node(Endpoints, "no such name (NXDOMAIN)");
        assert_eq!(outcome(&[works.clone(), unknown.clone()]), (Outcome::Ok, 0));
        assert_eq!(outcome(&[unknown]), (Outcome::Unknown, 0));
        assert_eq!(outcome(&[works, silent.clone()]), (Outcome::Bad, 1));
        assert_eq!(
            outcome(std::slice::from_ref(&domain)),
            (Outcome::Skipped, 0)
        );
        assert_eq!(outcome(&[domain, silent]), (Outcome::Bad, 2));
        let older = finding(&pb::ProbeReport::default());
        assert_eq!(older.outcome, Outcome::Skipped);
    }
}
