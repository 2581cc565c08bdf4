//! What the flight recorder notices about the input: problems that appear and go, and objects that are kept.

use kplane_desired_state::recorder::{NoticeKind, Recorder};
use kplane_model::Issue;

use super::Summary;

/// Maximum number of problems that are noted for one step.
const PROBLEMS: usize = 50;

/// Notes the problems that appeared or are gone; both lists are sorted.
pub(crate) fn problems(recorder: &Recorder, before: &[Issue], after: &[Issue]) {
    let sides = [
        (NoticeKind::ProblemAppeared, after, before),
        (NoticeKind::ProblemGone, before, after),
    ];
    for (kind, issues, others) in sides {
        let mut new = issues.iter().filter(|issue| others.binary_search(issue).is_err());
        for issue in new.by_ref().take(PROBLEMS) {
            let object = &issue.object;
            let namespace = match object.namespace.as_str() {
                "" => String::new(),
                namespace => format!("{namespace}/"),
            };
            let object = format!("{}/{namespace}{}", object.kind, object.name);
            let text = format!("{}: {}", issue.code, issue.reason);
            recorder.notice(kind, object, text);
        }
        let more = new.count();
        if more > 0 {
            recorder.notice(kind, String::new(), format!("{more} more problems"));
        }
    }
}

/// Notes what differs between two summaries.
pub(super) fn changes(recorder: &Recorder, before: &Summary, after: &Summary) {
    problems(recorder, &before.issues, &after.issues);
    match (&before.held, &after.held) {
        (None, Some(held)) => recorder.notice(NoticeKind::Held, String::new(), held.to_string()),
        (Some(_), None) => {
            let text = "no held objects remain".to_owned();
            recorder.notice(NoticeKind::Released, String::new(), text);
        }
        (None, None) | (Some(_), Some(_)) => {}
    }
}
