//! Taking over from kube-proxy: its rules go once ours serve, never before.

use tokio::sync::watch;

use super::{Serving, find, rival};
use crate::report::Report;

/// Waits until the kernel holds the first complete snapshot in all needed families, and removes
/// what kube-proxy left in the process' network namespace, once.
///
/// A snapshot without a single Service does not count: no cluster is like that, and what kube-proxy
/// left may be all that works.
pub async fn remove_once_serving(serving: Serving, mut reports: watch::Receiver<Report>) {
    if reports.wait_for(serves).await.is_ok() {
        // A panic there has been printed; what is left is left.
        let _ = tokio::task::spawn_blocking(move || remove_and_log(serving)).await;
    }
}

fn serves(report: &Report) -> bool {
    report.held.is_some() && report.applied == report.held && report.counts.services > 0
}

fn remove_and_log(serving: Serving) {
    let leftovers = find(serving);
    if let Some(pid) = rival::running() {
        tracing::warn!(
            pid,
            "kube-proxy is running on this node and will write its rules again: two proxies now do \
             the same work, and what one refuses the other may serve; stop kube-proxy"
        );
    }
    if !leftovers.is_empty() {
        tracing::info!(found = %leftovers, "our rules serve; removing what kube-proxy left");
    }
    let outcome = leftovers.remove();
    for problem in &outcome.problems {
        tracing::warn!(%problem, "something of kube-proxy's is left");
    }
    if !outcome.removed.is_empty() {
        tracing::info!(
            steps = outcome.removed.len(),
            "removed what kube-proxy left"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::{Counts, Position};

    /// I4: not a moment before everything is in the kernel.
    #[test]
    fn i4_leftovers_stay_until_everything_is_served() {
        let at = |revision| Some(Position { epoch: 1, revision });
        let report = |held, applied, services| Report {
            held,
            applied,
            counts: Counts {
                services,
                ..Counts::default()
            },
            ..Report::default()
        };
        assert!(!serves(&Report::default()));
        assert!(!serves(&report(at(1), None, 5)));
        assert!(!serves(&report(at(2), at(1), 5)));
        assert!(!serves(&report(at(2), at(2), 0)));
        assert!(serves(&report(at(2), at(2), 5)));
    }
}
