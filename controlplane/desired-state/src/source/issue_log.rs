//! The log of problems with the input. All are in the status; a log that has a line for each would grow as fast as a tenant
//! writes wrong Services.

use std::collections::BTreeMap;
use std::time::Duration;

use kplane_model::{Issue, Reason, Severity, one_line};

use kplane_util::buckets::{Bucket, Rate};

/// Lines about one kind of problem: a few at once, for a person who tries things.
const LINES: Rate = Rate {
    burst: 5,
    refill: Duration::from_secs(60),
};

/// The lines about each kind of problem. There are as many kinds as the program has.
#[derive(Debug, Default)]
pub(super) struct IssueLog(BTreeMap<(Severity, Reason), Reported>);

#[derive(Debug)]
struct Reported {
    lines: Bucket,
    /// Problems that have no line.
    unsaid: usize,
}

impl IssueLog {
    /// Returns the lines about issues of `after` that are not in `before`; both sorted. A line names one issue of its
    /// kind, and counts the other ones.
    pub(super) fn new_lines(
        &mut self,
        before: &[Issue],
        after: &[Issue],
    ) -> Vec<(Severity, String)> {
        let is_new = |issue: &&Issue| before.binary_search(issue).is_err();
        let mut kinds = BTreeMap::<_, (&Issue, usize)>::new();
        for issue in after.iter().filter(is_new) {
            let kind = kinds.entry((issue.severity, issue.code));
            kind.or_insert((issue, 0)).1 += 1;
        }
        let line = |(kind, (example, count)): ((Severity, Reason), (&Issue, usize))| {
            let reported = self.0.entry(kind).or_insert_with(|| Reported {
                lines: Bucket::new(LINES),
                unsaid: 0,
            });
            reported.unsaid += count;
            reported.lines.take(1).ok()?;
            let further = std::mem::take(&mut reported.unsaid) - 1;
            let example = one_line(&example.to_string());
            let line = match further {
                0 => example,
                further => format!(
                    "{example} (and {further} more problems of the kind {}: kpctl status --all)",
                    kind.1
                ),
            };
            Some((kind.0, line))
        };
        kinds.into_iter().filter_map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use kplane_model::ObjectRef;
    use tokio::time::advance;

    use super::*;

    fn issue(name: &str, code: Reason) -> Issue {
        Issue {
            severity: Severity::Error,
            code,
            location: String::new(),
            object: ObjectRef::new("Service", "shop", name),
            reason: "\u{1b}[2J".to_owned() + &"x".repeat(4_000),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn thousands_of_bad_services_are_a_line_a_kind() {
        let mut log = IssueLog::default();
        let all: Vec<_> = (0..3_000)
            .flat_map(|n| {
                [Reason::InvalidPort, Reason::TooLarge].map(|code| issue(&format!("s-{n}"), code))
            })
            .collect();
        let mut sorted = all.clone();
        sorted.sort();
        let lines = log.new_lines(&[], &sorted);
        assert_eq!(lines.len(), 2);
        assert!(lines.iter().all(|(_, line)| line.len() < 500 && !line.contains('\u{1b}')));
        assert!(
            lines[0]
                .1
                .ends_with("(and 2999 more problems of the kind TooLarge: kpctl status --all)"),
            "{lines:?}"
        );
        assert_eq!(log.new_lines(&sorted, &sorted), []);
        // One after the other: a few have a line, and the rest is counted.
        let one_by_one = |log: &mut IssueLog| -> usize {
            all.iter()
                .map(|issue| log.new_lines(&[], std::slice::from_ref(issue)).len())
                .sum()
        };
        assert_eq!(one_by_one(&mut log), 2 * 4);
        advance(Duration::from_secs(60)).await;
        let lines = log.new_lines(&[], &all[..1]);
        assert!(lines[0].1.contains("(and 2996 more"), "{lines:?}");
    }
}
