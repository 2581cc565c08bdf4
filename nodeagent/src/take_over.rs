//! Taking over from kube-proxy: its rules go once ours serve, never before, and never under a kube-proxy
//! that still runs.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use crate::desired::now_ms;
use crate::report::{Failure, Report};
use kplane_dataplane::leftovers::{
    Ports, Rival, Serving, find, find_sparing, running, spare_connections,
};

/// From one look at connections that IPVS carries to the next.
const DRAIN_LOOK: Duration = Duration::from_secs(10);
/// From one look for a kube-proxy that runs to the next.
const RIVAL_LOOK: Duration = Duration::from_secs(2);

/// What is to be done on a node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TakeOver {
    /// What of ours serves.
    pub(crate) serving: Serving,
    /// See [`spare_connections`].
    pub(crate) spare: [bool; 2],
    /// Where a kube-proxy may listen.
    pub(crate) ports: Ports,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Begins,
    /// A kube-proxy runs: nothing is touched.
    Beside(Rival),
    /// Connections through IPVS are waited for; all else is done.
    Drains,
    Done,
}

/// Waits until the kernel holds the first complete snapshot in all needed families, and removes
/// what kube-proxy left in the process' network namespace, once: as soon as no kube-proxy runs there, which
/// is `told` until then. What established TCP connections need of IPVS stays until they have ended.
///
/// A snapshot without a single Service does not count: no cluster is like that, and what kube-proxy
/// left may be all that works. Nor does one of a control plane that knows that it lacks something.
pub(crate) async fn remove_once_serving(
    task: TakeOver,
    mut reports: watch::Receiver<Report>,
    told: watch::Sender<Option<Failure>>,
) {
    if reports.wait_for(serves).await.is_err() {
        return;
    }
    let mut stage = Stage::Begins;
    loop {
        let step = move || step(task, stage);
        // A panic there has been printed; what is left is left.
        let next = tokio::task::spawn_blocking(step).await;
        let next = next.unwrap_or(Stage::Done);
        let pause = match next {
            Stage::Beside(rival) => {
                if next != stage {
                    told.send_replace(Some(failure(rival)));
                }
                RIVAL_LOOK
            }
            Stage::Begins | Stage::Drains | Stage::Done => {
                told.send_if_modified(|told| told.take().is_some());
                DRAIN_LOOK
            }
        };
        if next == Stage::Done {
            return;
        }
        stage = next;
        sleep(pause).await;
    }
}

fn serves(report: &Report) -> bool {
    let applied = report.held.is_some() && report.applied == report.held;
    applied && report.counts.services > 0 && !report.partial
}

fn failure(rival: Rival) -> Failure {
    Failure {
        object: None,
        reason: format!(
            "kube-proxy works on this node too ({rival}): what one refuses the other may serve; stop \
             kube-proxy, and its rules are removed"
        ),
        since_ms: now_ms(),
        degraded: true,
    }
}

fn step(task: TakeOver, before: Stage) -> Stage {
    if let Some(rival) = running(task.ports) {
        if !matches!(before, Stage::Beside(_)) {
            tracing::warn!(
                evidence = %rival,
                "kube-proxy is running on this node: two proxies now do the same work, and what one \
                 refuses the other may serve; its rules are removed when it is stopped"
            );
        }
        return Stage::Beside(rival);
    }
    if matches!(before, Stage::Beside(_)) {
        tracing::info!("no kube-proxy runs on this node any more");
    }
    match remove_and_log(task, before == Stage::Drains) {
        true => Stage::Drains,
        false => Stage::Done,
    }
}

/// Returns whether connections are waited for. `again`: it was so before, and all else is done.
fn remove_and_log(task: TakeOver, again: bool) -> bool {
    let serving = task.serving;
    let used = spare_connections(serving, task.spare);
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
