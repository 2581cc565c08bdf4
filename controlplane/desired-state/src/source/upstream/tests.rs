use kplane_model::{ObjectRef, Severity};

use super::*;

fn issue(reason: &str) -> Issue {
    Issue {
        severity: Severity::Error,
        code: kplane_model::Reason::InvalidField,
        location: String::new(),
        object: ObjectRef::new("API server", "", "https://192.0.2.1"),
        reason: reason.to_owned(),
    }
}

fn trouble(reason: &str) -> Option<Trouble> {
    Some(Trouble {
        since: SystemTime::UNIX_EPOCH,
        issue: issue(reason),
    })
}

/// Readers of issues are woken by each change of them, and by no other change.
#[test]
fn readers_of_issues_are_woken_only_by_issues() {
    let upstream = Upstream::default();
    let mut reader = upstream.issue_changes();
    let mut woken = || {
        let changed = reader.has_changed().unwrap();
        let now = reader.borrow_and_update().clone();
        changed.then(|| now.iter().map(|issue| issue.reason.clone()).collect())
    };
    let mut said: Vec<Option<Vec<String>>> = Vec::new();
    for kind in [Kind::Service, Kind::Node] {
        upstream.begin(kind);
    }
    said.push(woken());
    upstream.update(Kind::Service, |state| state.trouble = trouble("away"));
    said.push(woken());
    // The same problem of another kind is the same issue; counts and times are no issues.
    upstream.update(Kind::Node, |state| state.trouble = trouble("away"));
    upstream.update(Kind::Service, |state| {
        state.counts.events += 1;
        state.current_at = Some(Instant::now());
    });
    said.push(woken());
    upstream.update(Kind::Node, |state| {
        state.unreadable = Arc::new(vec![issue("unreadable")]);
    });
    said.push(woken());
    upstream.update(Kind::Service, |state| state.trouble = None);
    said.push(woken());
    upstream.update(Kind::Node, |state| state.trouble = None);
    said.push(woken());
    upstream.update(Kind::Node, |state| state.unreadable = Arc::default());
    said.push(woken());
    let some = |reasons: &[&str]| Some(reasons.iter().map(ToString::to_string).collect());
    assert_eq!(
        said,
        [
            None,
            some(&["away"]),
            None,
            some(&["away", "unreadable"]),
            None,
            some(&["unreadable"]),
            some(&[])
        ]
    );
}
