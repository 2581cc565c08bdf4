//! Taking over from kube-proxy: its rules go once ours serve, never before.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use super::{Serving, find, find_sparing, rival, spare_connections};
use crate::report::Report;

/// From one look at connections that IPVS carries to the next.
const DRAIN_LOOK: Duration = Duration::from_secs(10);

/// Waits until the kernel holds the first complete snapshot in all needed families, and removes
/// what kube-proxy left in the process' network namespace, once. What established TCP connections
/// need of IPVS stays until they have ended; for `spare` see [`spare_connections`].
///
/// A snapshot without a single Service does not count: no cluster is like that, and what kube-proxy
/// left may be all that works. Nor does one of a control plane that knows that it lacks something.
pub async fn remove_once_serving(
    serving: Serving,
    spare: [bool; 2],
    mut reports: watch::Receiver<Report>,
) {
    if reports.wait_for(serves).await.is_err() {
        return;
    }
    let mut again = false;
    loop {
        let step = move || remove_and_log(serving, spare, again);
        // A panic there has been printed; what is left is left.
        let waits = tokio::task::spawn_blocking(step).await.unwrap_or(false);
        if !waits {
            return;
        }
        again = true;
        sleep(DRAIN_LOOK).await;
    }
}

fn serves(report: &Report) -> bool {
    let applied = report.held.is_some() && report.applied == report.held;
    applied && report.counts.services > 0 && !report.partial
}

/// Returns whether connections are waited for. `again`: it was so before, and all else is done.
fn remove_and_log(serving: Serving, spare: [bool; 2], again: bool) -> bool {
    let used = spare_connections(serving, spare);
    let waits = !matches!(used, Ok(None));
    match used {
        Ok(Some(used)) if !again => tracing::info!(
            used,
            "established connections go on through IPVS; what they need goes when they have ended"
        ),
        Ok(None) if again => tracing::info!("the last connections through IPVS have ended"),
        Ok(_) => {}
        Err(problem) => tracing::warn!(
            %problem, "it is not known which connections need IPVS: all of it stays; tried again"
        ),
    }
    if waits && again {
        return true;
    }
    let leftovers = if waits {
        find_sparing(serving)
    } else {
        find(serving)
    };
    if !again {
        warn_of_rival();
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
    waits
}

fn warn_of_rival() {
    if let Some(pid) = rival::running() {
        tracing::warn!(
            pid,
            "kube-proxy is running on this node and will write its rules again: two proxies now do \
             the same work, and what one refuses the other may serve; stop kube-proxy"
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
        let partial = Report {
            partial: true,
            ..report(at(2), at(2), 5)
        };
        assert!(!serves(&partial));
    }
}
