//! Says that a part of this control plane panicked.

use kplane_http::panics::{self, Panics};
use kplane_model::{Issue, ObjectRef, Reason};

/// Returns the problem, if there was a panic.
pub(crate) fn issues() -> Vec<Issue> {
    panics::seen().and_then(issue).into_iter().collect()
}

fn issue(panics: Panics) -> Option<Issue> {
    let times = match panics.count {
        0 => return None,
        1 => "once".to_owned(),
        count => format!("{count} times"),
    };
    let reason = format!(
        "it panicked {times} since its start, here for the last time: a request got no answer, or a part of it has \
         ended. Keep its log for a report, and restart it"
    );
    let object = ObjectRef::new("control plane", "", "");
    Some(Issue::error(Reason::Panicked, object, reason).at(panics.last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_problem_until_the_restart() {
        assert_eq!(issue(Panics::default()), None);
        let said = |count| {
            let last = "log.rs:66:1".to_owned();
            issue(Panics { count, last }).unwrap().to_string()
        };
        assert!(said(1).starts_with("log.rs:66:1: control plane: it panicked once since"));
        assert!(said(3).contains("it panicked 3 times since"), "{}", said(3));
    }
}
