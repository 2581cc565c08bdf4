//! The check of NetworkPolicies: who enforces them, and where that is not as they are written.

use kplane_model::Reason;
use kplane_proto::v1::{self as pb, Enforcement};
use kplane_view::text::plural;

use super::{Finding, NAMED, connected};

const CHECK: &str = "policies";

/// Returns the finding. What is closed although a policy allows it is bad; unknown ranges of Pods are a warning.
pub(super) fn policies(fleet: &pb::Fleet) -> Finding {
    let plane = fleet.control_plane.clone().unwrap_or_default();
    let differing = differing(&plane);
    let failing = Nodes::with(fleet, |report| {
        report
            .failures
            .iter()
            .filter(|failure| failure.policies)
            .map(|failure| &*failure.reason)
            .collect()
    });
    let unknown = Nodes::with(fleet, |report| {
        let code = Reason::PodRangeUnknown.code();
        report
            .findings
            .iter()
            .filter(|finding| finding.code == code)
            .map(|finding| &*finding.text)
            .collect()
    });
    let is_unread = plane.enforcement() == Enforcement::Unread;
    let details: Vec<String> = [&differing, &failing.details, &unknown.details]
        .into_iter()
        .flatten()
        .cloned()
        .collect();
    let on = |nodes: &Nodes<'_>, what| format!("{what} on {}", plural(nodes.count, "node"));
    let finding = if !differing.is_empty() {
        let text = "replicas of the control plane say different things about NetworkPolicies";
        let remedy = "start all replicas with the same --network-policy";
        Finding::bad(CHECK, text, remedy)
    } else if is_unread {
        let text =
            "the control plane has not read NetworkPolicies, and all that they are about, yet";
        Finding::bad(CHECK, text, "kpctl status")
    } else if failing.count > 0 {
        let text = on(
            &failing,
            "NetworkPolicies are not enforced as they are written",
        );
        Finding::bad(CHECK, text, &failing.remedy())
    } else if unknown.count > 0 {
        let text = on(&unknown, "new Pods cannot be recognized by their addresses");
        Finding::warning(CHECK, text, &unknown.remedy())
    } else {
        return without_trouble(fleet, &plane);
    };
    finding.with(details)
}

/// Returns the replicas that say something else than the one that was asked.
fn differing(plane: &pb::ControlPlaneStatus) -> Vec<String> {
    let code = Reason::ReplicasDiffer.code();
    plane
        .issues
        .iter()
        .filter(|issue| issue.code == code)
        .map(|issue| format!("{} {} {}", issue.kind, issue.name, issue.reason))
        .take(NAMED)
        .collect()
}

/// Nodes with the same kind of trouble.
struct Nodes<'a> {
    count: usize,
    /// The name of the first one.
    first: &'a str,
    /// What the first ones say.
    details: Vec<String>,
}

impl<'a> Nodes<'a> {
    /// Returns the connected nodes of whose reports `says` returns something.
    fn with(fleet: &'a pb::Fleet, says: impl Fn(&'a pb::Report) -> Vec<&'a str>) -> Self {
        let mut nodes = Self {
            count: 0,
            first: "",
            details: Vec::new(),
        };
        for node in connected(fleet) {
            let said: Vec<&str> = node.report.iter().flat_map(&says).collect();
            let Some((first, more)) = said.split_first() else {
                continue;
            };
            if nodes.count == 0 {
                nodes.first = &node.name;
            }
            nodes.count += 1;
            if nodes.details.len() < NAMED {
                let more = match more.len() {
                    0 => String::new(),
                    more => format!(" (and {more} more)"),
                };
                nodes.details.push(format!("{}: {first}{more}", node.name));
            }
        }
        nodes
    }

    fn remedy(&self) -> String {
        format!("kpctl describe node {}", self.first)
    }
}

/// Returns who enforces what, where nothing is wrong.
fn without_trouble(fleet: &pb::Fleet, plane: &pb::ControlPlaneStatus) -> Finding {
    match plane.enforcement() {
        Enforcement::Off => {
            let text = "nodes enforce none: the control plane has --network-policy=off";
            return Finding::ok(CHECK, text);
        }
        Enforcement::Unspecified => {
            let text = "nodes enforce none: the control plane was started without --network-policy";
            return Finding::skipped(CHECK, text);
        }
        Enforcement::On | Enforcement::Unread => {}
    }
    let enforced = connected(fleet).filter_map(|node| node.report.as_ref()?.policies.as_ref());
    let (isolated, pods) = enforced.fold((0, 0), |(isolated, pods), of| {
        (isolated + of.isolated, pods + of.pods)
    });
    let all = usize::try_from(plane.policies).unwrap_or(usize::MAX);
    let all = match all {
        1 => "1 policy".to_owned(),
        all => format!("{all} policies"),
    };
    let absent = if plane.cluster_policies_absent {
        "; no ClusterNetworkPolicies: the API server does not have their definition (CRD)"
    } else {
        ""
    };
    Finding::ok(
        CHECK,
        format!("{all} isolate {isolated} of {pods} Pods{absent}"),
    )
}

#[cfg(test)]
mod tests {
    use kplane_proto::v1::NodeState;

    use super::*;
    use crate::check::Outcome;

    fn plane(enforcement: Enforcement) -> pb::ControlPlaneStatus {
        pb::ControlPlaneStatus {
            enforcement: enforcement.into(),
            policies: 12,
            ..pb::ControlPlaneStatus::default()
        }
    }

    fn node(name: &str, report: pb::Report) -> pb::NodeStatus {
        pb::NodeStatus {
            name: name.to_owned(),
            state: NodeState::InSync.into(),
            report: Some(report),
            ..pb::NodeStatus::default()
        }
    }

    fn closing(name: &str) -> pb::NodeStatus {
        let failure = |reason: &str, policies| pb::ObjectFailure {
            reason: reason.to_owned(),
            degraded: true,
            policies,
            ..pb::ObjectFailure::default()
        };
        node(
            name,
            pb::Report {
                failures: vec![
                    failure("no flows", false),
                    failure("NetworkPolicy shop/db: too much", true),
                    failure("NetworkPolicy shop/web: too much", true),
                ],
                ..pb::Report::default()
            },
        )
    }

    fn without_ranges(name: &str) -> pb::NodeStatus {
        let finding = pb::Finding {
            code: Reason::PodRangeUnknown.code().to_owned(),
            severity: pb::Severity::Warning.into(),
            text: "outside".to_owned(),
            ..pb::Finding::default()
        };
        node(
            name,
            pb::Report {
                findings: vec![finding],
                ..pb::Report::default()
            },
        )
    }

    fn check(plane: pb::ControlPlaneStatus, nodes: Vec<pb::NodeStatus>) -> Finding {
        policies(&pb::Fleet {
            control_plane: Some(plane),
            nodes,
            ..pb::Fleet::default()
        })
    }

    #[test]
    fn who_enforces_is_said() {
        let isolating = node(
            "a",
            pb::Report {
                policies: Some(pb::EnforcedPolicies {
                    policies: 3,
                    pods: 7,
                    isolated: 4,
                    elements: 90,
                }),
                ..pb::Report::default()
            },
        );
        let mut on = plane(Enforcement::On);
        let found = check(on.clone(), vec![isolating.clone()]);
        let isolates = "12 policies isolate 4 of 7 Pods";
        assert_eq!(found, Finding::ok(CHECK, isolates));
        on.cluster_policies_absent = true;
        let found = check(on, vec![isolating]);
        assert_eq!(found.outcome, Outcome::Ok, "an absent CRD is a state");
        assert!(found.summary.contains("(CRD)"), "{}", found.summary);
        let outcome = |said| check(plane(said), Vec::new()).outcome;
        assert_eq!(outcome(Enforcement::Unspecified), Outcome::Skipped);
        assert_eq!(outcome(Enforcement::Off), Outcome::Ok);
        assert_eq!(outcome(Enforcement::Unread), Outcome::Bad);
    }

    #[test]
    fn nodes_that_cut_pods_off_are_bad_and_unknown_ranges_a_warning() {
        let some = check(plane(Enforcement::On), vec![without_ranges("a")]);
        assert_eq!(some.outcome, Outcome::Warning);
        assert_eq!(some.details, ["a: outside"]);
        let nodes = vec![without_ranges("a"), closing("b"), closing("c")];
        let all = check(plane(Enforcement::On), nodes.clone());
        assert_eq!(all.outcome, Outcome::Bad);
        assert!(all.summary.ends_with("on 2 nodes"), "{}", all.summary);
        assert_eq!(all.remedy, "kpctl describe node b");
        let closed = |node| format!("{node}: NetworkPolicy shop/db: too much (and 1 more)");
        assert_eq!(
            all.details,
            [closed("b"), closed("c"), "a: outside".to_owned()]
        );
        // A node keeps policies whose control plane says nothing of them.
        let silent = check(plane(Enforcement::Unspecified), nodes);
        assert_eq!(silent.outcome, Outcome::Bad);
        let gone = pb::NodeStatus {
            state: NodeState::Disconnected.into(),
            ..closing("b")
        };
        assert_eq!(
            check(plane(Enforcement::On), vec![gone]).outcome,
            Outcome::Ok
        );
    }

    #[test]
    fn replicas_that_differ_are_bad_whatever_the_one_asked_says() {
        for said in [Enforcement::On, Enforcement::Off, Enforcement::Unspecified] {
            let mut plane = plane(said);
            plane.issues.push(pb::InputIssue {
                code: Reason::ReplicasDiffer.code().to_owned(),
                kind: "replica".to_owned(),
                name: "192.0.2.1:7466".to_owned(),
                reason: "was started differently".to_owned(),
                ..pb::InputIssue::default()
            });
            let found = check(plane, Vec::new());
            assert_eq!(found.outcome, Outcome::Bad);
            let detail = "replica 192.0.2.1:7466 was started differently";
            assert_eq!(found.details, [detail]);
        }
    }
}
