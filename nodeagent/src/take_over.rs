//! Taking over from kube-proxy: its rules are removed once kplane's rules serve, never before, and never
//! while a kube-proxy runs.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use crate::desired::now_ms;
use crate::report::{Failure, Report};
use kplane_dataplane::leftovers::{
    Ports, Rival, Serving, find, find_sparing, running, spare_connections,
};

/// Time between two checks for connections that IPVS carries.
const DRAIN_LOOK: Duration = Duration::from_secs(10);
/// Time between two checks for a kube-proxy that runs.
const RIVAL_LOOK: Duration = Duration::from_secs(2);

/// The work to do on a node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TakeOver {
    /// The part of the data path that belongs to kplane.
    pub(crate) serving: Serving,
    /// See [`spare_connections`].
    pub(crate) spare: [bool; 2],
    /// The ports on which a kube-proxy may listen.
    pub(crate) ports: Ports,
}

/// The progress of the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Begins,
    /// A kube-proxy runs: nothing is touched.
    Beside(Rival),
    /// All is done, except that connections through IPVS have not ended yet.
    Drains,
    Done,
}

/// Waits until the kernel holds the first complete snapshot in all needed families. Then removes, once,
/// what kube-proxy left in the process' network namespace. While a kube-proxy runs there, nothing is
/// removed, and the channel reports that kube-proxy. The parts of IPVS that established TCP connections need
/// stay until those connections have ended.
///
/// A snapshot without a single Service does not count: no real cluster is empty, and what kube-proxy left
/// may be all that works. Neither does a snapshot of a control plane that knows that its data is incomplete,
/// nor the content of the cache file.
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
        // A panic in the task has been printed already; what it did not remove stays.
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
    let whole = !report.partial && report.stale_since_ms.is_none();
    applied && report.counts.services > 0 && whole
}

fn failure(rival: Rival) -> Failure {
    Failure {
        object: None,
        reason: format!(
            "kube-proxy also runs on this node ({rival}) and may serve what the agent refuses; \
             stop kube-proxy, and the agent removes its rules"
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
                "kube-proxy also runs on this node and may serve what the agent refuses; stop \
                 kube-proxy, and the agent removes its rules"
            );
        }
        return Stage::Beside(rival);
    }
    if matches!(before, Stage::Beside(_)) {
        tracing::info!("kube-proxy no longer runs on this node");
    }
    match remove_and_log(task, before == Stage::Drains) {
        true => Stage::Drains,
        false => Stage::Done,
    }
}

/// Removes what kube-proxy left, and returns whether connections are still waited for. `again` means that
/// an earlier call returned true, and that all else is done.
fn remove_and_log(task: TakeOver, again: bool) -> bool {
    let serving = task.serving;
    let used = spare_connections(serving, task.spare);
    let waits = !matches!(used, Ok(None));
    match used {
        Ok(Some(used)) if !again => tracing::info!(
            used,
            "established connections continue through IPVS; the agent removes what they need when \
             they have ended"
        ),
        Ok(None) if again => tracing::info!("the last connections through IPVS have ended"),
        Ok(_) => {}
        Err(problem) => tracing::warn!(
            %problem,
            "cannot determine which connections need IPVS; all IPVS objects stay; trying again"
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
        tracing::info!(found = %leftovers, "kplane's rules serve; removing what kube-proxy left");
    }
    let outcome = leftovers.remove();
    for problem in &outcome.problems {
        tracing::warn!(%problem, "cannot remove something that kube-proxy left");
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

    /// I4: nothing is removed before everything is in the kernel.
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
        let stale = Report {
            stale_since_ms: Some(1),
            ..report(at(2), at(2), 5)
        };
        assert!(!serves(&stale));
    }
}
