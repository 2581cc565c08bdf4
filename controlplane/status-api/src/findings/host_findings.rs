//! What stands in the way of packets on nodes, as their agents report it.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use kplane_model::NodeName;
use kplane_proto::v1 as pb;

use super::named;

/// Returns one finding for each reason, errors first: the worst that a node says, and the names of all nodes.
pub(crate) fn host_findings<'a>(
    nodes: impl Iterator<Item = (&'a NodeName, &'a [pb::Finding])>,
) -> Vec<pb::Finding> {
    let is_error = |finding: &pb::Finding| finding.severity() == pb::Severity::Error;
    let mut found = BTreeMap::<&str, (&pb::Finding, Vec<&NodeName>)>::new();
    for (node, findings) in nodes {
        for finding in findings {
            let (worst, nodes) =
                found.entry(&finding.code).or_insert_with(|| (finding, Vec::new()));
            if is_error(finding) && !is_error(worst) {
                *worst = finding;
            }
            // A node may say the same about each family.
            if nodes.last() != Some(&node) {
                nodes.push(node);
            }
        }
    }
    let mut merged: Vec<_> = found
        .into_values()
        .map(|(worst, nodes)| {
            let (nodes, nodes_omitted) = named(nodes.into_iter());
            pb::Finding {
                nodes,
                nodes_omitted,
                ..worst.clone()
            }
        })
        .collect();
    merged.sort_by_key(|finding| Reverse(is_error(finding)));
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(code: &str, severity: pb::Severity, text: &str) -> pb::Finding {
        pb::Finding {
            code: code.to_owned(),
            severity: severity.into(),
            text: text.to_owned(),
            ..pb::Finding::default()
        }
    }

    #[test]
    fn nodes_with_the_same_reason_share_a_finding_and_errors_come_first() {
        let [warning, error] = [pb::Severity::Warning, pb::Severity::Error];
        let a = [finding("ForwardPolicyDrop", warning, "a drops some")];
        let b = [
            finding("ForwardPolicyDrop", warning, "b drops some"),
            finding("ForwardPolicyDrop", warning, "b drops some of IPv6"),
            finding("ForwardingOff", error, "b forwards nothing"),
        ];
        let nodes: [NodeName; 2] = ["a".into(), "b".into()];
        let all = [(&nodes[0], &a[..]), (&nodes[1], &b[..])];
        let found = host_findings(all.into_iter());
        let found: Vec<_> = found.iter().map(|f| (f.text.as_str(), f.nodes.join(","))).collect();
        let expected = [("b forwards nothing", "b"), ("a drops some", "a,b")];
        assert_eq!(
            found,
            expected.map(|(text, nodes)| (text, nodes.to_owned()))
        );
    }
}
