//! The check of what stands in the way of packets on nodes, besides Services.

use std::collections::BTreeMap;

use kplane_model::Reason;
use kplane_proto::v1 as pb;
use kplane_view::text::plural;

use super::{Finding, NAMED, connected, names};

/// Returns the finding: what agents call an error is bad.
pub(super) fn host_checks(fleet: &pb::Fleet) -> Finding {
    const CHECK: &str = "surroundings";
    // Errors come first.
    let mut found = BTreeMap::<(bool, &str), (Vec<&str>, &str)>::new();
    for node in connected(fleet) {
        let findings = node.report.iter().flat_map(|report| &report.findings);
        // Unknown ranges are the matter of the check of policies.
        let others = |finding: &&pb::Finding| finding.code != Reason::PodRangeUnknown.code();
        for finding in findings.filter(others) {
            let is_error = match finding.severity() {
                pb::Severity::Info => continue,
                severity => severity == pb::Severity::Error,
            };
            let entry = found.entry((!is_error, finding.code.as_str()));
            let nodes = &mut entry.or_insert((Vec::new(), finding.text.as_str())).0;
            // A node may say the same about each family.
            if nodes.last() != Some(&node.name.as_str()) {
                nodes.push(&node.name);
            }
        }
    }
    let Some(((is_minor, _), (nodes, _))) = found.first_key_value() else {
        let text = "nothing on a node stands in the way of packets";
        return Finding::ok(CHECK, text);
    };
    let remedy = format!("kpctl describe node {}", nodes.first().unwrap_or(&"NAME"));
    let finding = if *is_minor {
        Finding::warning(CHECK, "nodes may drop packets of Services", &remedy)
    } else {
        Finding::bad(CHECK, "nodes drop packets of Services", &remedy)
    };
    let details = found.iter().take(NAMED).map(|((_, code), (nodes, text))| {
        let count = plural(nodes.len(), "node");
        format!("{code} on {count} ({}): {text}", names(nodes))
    });
    finding.with(details.collect())
}

#[cfg(test)]
mod tests {
    use kplane_proto::v1::NodeState;

    use super::*;
    use crate::check::Outcome;

    fn node(name: &str, state: NodeState, found: &[(&str, pb::Severity)]) -> pb::NodeStatus {
        let findings = found.iter().map(|(code, severity)| pb::Finding {
            code: (*code).to_owned(),
            severity: (*severity).into(),
            text: "drops".to_owned(),
            ..pb::Finding::default()
        });
        pb::NodeStatus {
            name: name.to_owned(),
            state: state.into(),
            report: Some(pb::Report {
                findings: findings.collect(),
                ..pb::Report::default()
            }),
            ..pb::NodeStatus::default()
        }
    }

    fn check(nodes: &[pb::NodeStatus]) -> Finding {
        host_checks(&pb::Fleet {
            nodes: nodes.to_vec(),
            ..pb::Fleet::default()
        })
    }

    #[test]
    fn errors_are_bad_warnings_are_warnings_and_old_reports_do_not_count() {
        let [error, warning, info] = [
            ("ForwardingOff", pb::Severity::Error),
            ("ForwardPolicyDrop", pb::Severity::Warning),
            ("Firewalld", pb::Severity::Info),
        ];
        let plain = node("a", NodeState::InSync, &[info]);
        let gone = node("b", NodeState::Disconnected, &[error]);
        let fine = check(&[plain, gone]);
        assert_eq!(fine.outcome, Outcome::Ok);
        let unknown = ("PodRangeUnknown", pb::Severity::Warning);
        let of_policies = node("a", NodeState::InSync, &[unknown]);
        let fine = check(&[of_policies]);
        assert_eq!(fine.outcome, Outcome::Ok, "another check has it");
        let some = node("c", NodeState::InSync, &[warning]);
        assert_eq!(check(std::slice::from_ref(&some)).outcome, Outcome::Warning);
        let all = check(&[
            some,
            node("d", NodeState::InSync, &[warning, warning, error]),
        ]);
        assert_eq!(all.outcome, Outcome::Bad);
        assert_eq!(all.remedy, "kpctl describe node d");
        assert_eq!(
            all.details,
            [
                "ForwardingOff on 1 node (d): drops",
                "ForwardPolicyDrop on 2 nodes (c, d): drops"
            ]
        );
    }
}
