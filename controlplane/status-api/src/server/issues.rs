//! Problems with the input, in a bounded part of an answer.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use kplane_model::{Issue, Severity};
use kplane_proto::v1 as pb;
use prost::Message as _;

use crate::findings;

/// Size of all problems in an answer, in bytes.
const BYTES: usize = 1 << 20;
/// Maximum number of problems in an answer.
const LISTED: usize = 1_000;
/// Maximum number of listed problems that differ only in the object, where not all problems fit.
const LISTED_ALIKE: usize = 8;

/// The problems that fit, and the number of all problems.
#[derive(Debug, Default)]
pub(super) struct Issues {
    /// Listed problems, errors first; among them those of objects without a namespace, which no tenant can crowd out.
    pub(super) listed: Vec<pb::InputIssue>,
    /// Number of problems that are neither listed nor counted as alike.
    pub(super) omitted: u64,
    pub(super) errors: u64,
    pub(super) warnings: u64,
}

impl Issues {
    /// Lists as many problems as fit. If there are too many, only the first objects of each problem
    /// are listed, so that one problem of a thousand objects does not hide another.
    pub(super) fn bounded(all: &[Issue]) -> Self {
        let errors = all.iter().filter(|i| i.severity == Severity::Error).count();
        let mut groups = BTreeMap::<_, Vec<&Issue>>::new();
        for issue in all {
            let of_tenant = !issue.object.namespace.is_empty();
            let problem = (&issue.object.kind, &issue.reason);
            let urgency = (Reverse(issue.severity), of_tenant);
            groups.entry((urgency, problem)).or_default().push(issue);
        }
        let size = |issue: &Issue| issue.reason.len() + issue.location.len();
        let few = all.len() <= LISTED && all.iter().map(size).sum::<usize>() < BYTES / 2;
        let mut issues = Self {
            errors: errors as u64,
            warnings: (all.len() - errors) as u64,
            ..Self::default()
        };
        let mut room = BYTES;
        for group in groups.values() {
            issues.list(group, if few { LISTED } else { LISTED_ALIKE }, &mut room);
        }
        issues
    }

    /// Lists the first problems of a group of alike ones.
    fn list(&mut self, group: &[&Issue], most: usize, room: &mut usize) {
        let mut listed = 0;
        for issue in group.iter().take(most) {
            let issue = cut((*issue).into());
            let bytes = issue.encoded_len();
            if bytes > *room || self.listed.len() >= LISTED {
                break;
            }
            *room -= bytes;
            self.listed.push(issue);
            listed += 1;
        }
        let left_out = (group.len() - listed) as u64;
        if listed > 0
            && let Some(last) = self.listed.last_mut()
        {
            last.alike = left_out;
        } else {
            self.omitted += left_out;
        }
    }
}

/// Returns a problem with its texts cut to the maximum length.
fn cut(mut issue: pb::InputIssue) -> pb::InputIssue {
    let texts = [
        &mut issue.location,
        &mut issue.kind,
        &mut issue.namespace,
        &mut issue.name,
        &mut issue.reason,
    ];
    texts.into_iter().for_each(findings::cut);
    issue
}

#[cfg(test)]
mod tests {
    use kplane_model::ObjectRef;

    use super::*;

    fn issue(name: usize, severity: Severity, reason: &str) -> Issue {
        Issue {
            severity,
            code: kplane_model::Reason::InvalidField,
            location: String::new(),
            object: ObjectRef {
                kind: "Service".to_owned(),
                namespace: "shop".to_owned(),
                name: format!("svc-{name}"),
            },
            reason: reason.to_owned(),
        }
    }

    #[test]
    fn few_are_listed_one_by_one_errors_first() {
        let all = [
            issue(1, Severity::Warning, "is odd"),
            issue(2, Severity::Error, "is wrong"),
            issue(3, Severity::Error, "is wrong"),
        ];
        let issues = Issues::bounded(&all);
        let names: Vec<&str> = issues.listed.iter().map(|i| i.name.as_str()).collect();
        assert_eq!(names, ["svc-2", "svc-3", "svc-1"]);
        assert!(issues.listed.iter().all(|issue| issue.alike == 0));
        assert_eq!((issues.errors, issues.warnings, issues.omitted), (2, 1, 0));
    }

    #[test]
    fn a_problem_of_thousands_hides_no_other() {
        let mut all: Vec<Issue> = (0..3_000)
            .map(|n| issue(n, Severity::Error, &"is wrong ".repeat(600)))
            .collect();
        all.push(issue(7, Severity::Warning, "is odd"));
        let issues = Issues::bounded(&all);
        assert_eq!(issues.listed.len(), LISTED_ALIKE + 1);
        let alike: Vec<u64> = issues.listed.iter().map(|issue| issue.alike).collect();
        assert_eq!(alike, [0, 0, 0, 0, 0, 0, 0, 2_992, 0]);
        assert_eq!(
            (issues.errors, issues.warnings, issues.omitted),
            (3_000, 1, 0)
        );
    }

    #[test]
    fn what_does_not_fit_is_counted() {
        let reason = |n| format!("{n} {}", "is wrong ".repeat(600));
        let all: Vec<Issue> = (0..3_000).map(|n| issue(n, Severity::Error, &reason(n))).collect();
        let issues = Issues::bounded(&all);
        let bytes: usize = issues.listed.iter().map(pb::InputIssue::encoded_len).sum();
        assert!(bytes <= BYTES, "{bytes}");
        assert!(issues.listed.len() > 900, "{}", issues.listed.len());
        assert_eq!(issues.omitted, 3_000 - issues.listed.len() as u64);
    }

    #[test]
    fn what_tenants_write_hides_nothing_of_the_control_plane() {
        let reason = |n| format!("{n} {}", "is wrong ".repeat(600));
        let mut all: Vec<Issue> =
            (0..3_000).map(|n| issue(n, Severity::Error, &reason(n))).collect();
        let replica = ObjectRef::new("replica", "", "192.0.2.1:7466");
        all.push(Issue::error(
            kplane_model::Reason::ReplicasDiffer,
            replica,
            "differs".to_owned(),
        ));
        let issues = Issues::bounded(&all);
        assert_eq!(issues.listed[0].code, "ReplicasDiffer");
    }
}
