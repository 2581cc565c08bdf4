//! Taking over from kube-proxy: its rules are removed once kplane's rules serve, never before, and never
//! while a kube-proxy runs. Rules that stay lead packets as well, so they are a failure of the node.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use crate::desired::now_ms;
use crate::report::{Failure, Report, Subject};
use kplane_dataplane::leftovers::{
    CompetingProxy, Ports, Problem, Serving, find, find_sparing, running, spare_connections,
};

/// Time between two checks for connections that IPVS carries, and for rules that stay.
const DRAIN_LOOK: Duration = Duration::from_secs(10);
/// Time between two checks for a kube-proxy that runs.
const COMPETING_PROXY_CHECK: Duration = Duration::from_secs(2);
/// Number of times that rules are removed which have come back. After that, a program keeps writing them, and perhaps
/// relies on them.
const MOST_RETURNS: u8 = 3;

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
#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    Begins,
    /// A kube-proxy runs: nothing is touched.
    Beside(CompetingProxy),
    /// All is done, except that connections through IPVS have not ended yet.
    Drains,
    /// Rules stay: the reason, and the command that removes them.
    Stays(String),
    Done,
}

/// The progress, and how often rules have come back since.
#[derive(Clone, Debug)]
struct Progress {
    stage: Stage,
    returns: u8,
}

/// Waits until the kernel holds the first complete snapshot in all needed families. Then removes what kube-proxy left in
/// the process' network namespace, and looks again at each read-back. While a kube-proxy runs there, nothing is removed,
/// and the channel reports that kube-proxy. The channel also reports what cannot be removed. The parts of IPVS that
/// established TCP connections need stay until those connections have ended.
///
/// A snapshot without a single Service does not count: no real cluster is empty, and what kube-proxy left
/// may be all that works. Neither does a snapshot of a control plane that knows that its data is incomplete,
/// nor the content of the cache file.
pub(crate) async fn keep_removing(
    task: TakeOver,
    mut reports: watch::Receiver<Report>,
    reported: watch::Sender<Option<Failure>>,
) {
    let mut progress = Progress {
        stage: Stage::Begins,
        returns: 0,
    };
    let mut looked = None;
    loop {
        if matches!(progress.stage, Stage::Begins | Stage::Done) {
            let is_due = |report: &Report| serves(report) && looked != Some(read_backs(report));
            let due = reports.wait_for(is_due).await;
            let Ok(read) = due.map(|report| read_backs(&report)) else {
                return;
            };
            looked = Some(read);
        }
        let before = progress.clone();
        // A panic in the task has been printed already; what it did not remove stays.
        let next = tokio::task::spawn_blocking(move || step(task, &before)).await;
        progress.stage = Stage::Done;
        progress = next.unwrap_or(progress);
        tell(&reported, &progress.stage);
        match progress.stage {
            Stage::Beside(_) => sleep(COMPETING_PROXY_CHECK).await,
            Stage::Drains | Stage::Stays(_) => sleep(DRAIN_LOOK).await,
            Stage::Begins | Stage::Done => {}
        }
    }
}

/// Returns the times when each family was last read back.
fn read_backs(report: &Report) -> [u64; 2] {
    let [v4, v6] = &report.families;
    [v4.verified_at_ms, v6.verified_at_ms]
}

fn serves(report: &Report) -> bool {
    let applied = report.held.is_some() && report.applied == report.held;
    let whole = !report.partial && report.stale_since_ms.is_none();
    applied && report.counts.services > 0 && whole
}

/// Reports what the stage means for the node. A failure that lasts keeps its start.
fn tell(reported: &watch::Sender<Option<Failure>>, stage: &Stage) {
    let (reason, degraded) = match stage {
        Stage::Beside(competing_proxy) => (
            format!(
                "kube-proxy also runs on this node ({competing_proxy}) and may serve what the agent refuses; \
                 stop kube-proxy, and the agent removes its rules"
            ),
            true,
        ),
        Stage::Stays(why) => (
            format!("other rules lead packets as well as kplane's: {why}"),
            false,
        ),
        Stage::Begins | Stage::Drains | Stage::Done => {
            reported.send_if_modified(|reported| reported.take().is_some());
            return;
        }
    };
    reported.send_if_modified(|reported| {
        let is_new = reported.as_ref().is_none_or(|reported| reported.reason != reason);
        if is_new {
            *reported = Some(Failure {
                about: Subject::Node,
                reason,
                since_ms: now_ms(),
                degraded,
            });
        }
        is_new
    });
}

fn step(task: TakeOver, before: &Progress) -> Progress {
    if let Some(competing_proxy) = running(task.ports) {
        if !matches!(before.stage, Stage::Beside(_)) {
            tracing::warn!(
                evidence = %competing_proxy,
                "kube-proxy also runs on this node and may serve what the agent refuses; stop \
                 kube-proxy, and the agent removes its rules"
            );
        }
        return Progress {
            stage: Stage::Beside(competing_proxy),
            returns: 0,
        };
    }
    if matches!(before.stage, Stage::Beside(_)) {
        tracing::info!("kube-proxy no longer runs on this node");
    }
    let mut returns = before.returns;
    let stage = remove_and_log(task, &before.stage, &mut returns);
    if let Stage::Stays(why) = &stage
        && stage != before.stage
    {
        tracing::warn!(
            problem = why,
            "cannot remove rules that lead packets as well as kplane's"
        );
    }
    Progress { stage, returns }
}

/// Removes what kube-proxy left, unless it has come back too often.
fn remove_and_log(task: TakeOver, before: &Stage, returns: &mut u8) -> Stage {
    let serving = task.serving;
    let used = spare_connections(serving, task.spare);
    match &used {
        Ok(Some(_)) if *before == Stage::Drains => return Stage::Drains,
        Ok(Some(used)) if !matches!(before, Stage::Stays(_)) => tracing::info!(
            used,
            "established connections continue through IPVS; the agent removes what they need when \
             they have ended"
        ),
        Ok(None) if *before == Stage::Drains => {
            tracing::info!("the last connections through IPVS have ended");
        }
        Ok(_) | Err(_) => {}
    }
    let waits = !matches!(used, Ok(None));
    let leftovers = if waits { find_sparing(serving) } else { find(serving) };
    if !leftovers.is_empty() {
        // The search took a while. A kube-proxy that has started meanwhile may have read what is there, and would not write
        // it again.
        if let Some(competing_proxy) = running(task.ports) {
            return Stage::Beside(competing_proxy);
        }
        *returns = returns.saturating_add(u8::from(*before == Stage::Done));
        if *returns > MOST_RETURNS {
            return Stage::Stays(format!(
                "{leftovers} came back {MOST_RETURNS} times after the agent had removed them; stop the program that \
                 writes them, or restart the agent"
            ));
        }
        tracing::info!(found = %leftovers, "kplane's rules serve; removing what kube-proxy left");
    }
    let outcome = leftovers.remove();
    if !outcome.removed.is_empty() {
        tracing::info!(
            steps = outcome.removed.len(),
            "removed what kube-proxy left"
        );
    }
    let (harmless, stays): (Vec<_>, Vec<_>) =
        outcome.problems.into_iter().partition(Problem::is_harmless);
    for problem in harmless.iter().filter(|_| *before != Stage::Done) {
        tracing::info!(%problem, "leaving chains that lead no packet");
    }
    let unknown = used.err();
    let mut stays = unknown.iter().chain(&stays).map(ToString::to_string);
    match stays.next() {
        Some(first) => Stage::Stays(match stays.count() {
            0 => first,
            more => format!("{first} (and {more} more)"),
        }),
        None if waits => Stage::Drains,
        None => Stage::Done,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use kplane_dataplane::backend::Kind;
    use kplane_rig::kernel::{in_netns, nft};
    use tokio::runtime::Builder;
    use tokio::time::timeout;

    use super::*;
    use crate::desired::{Counts, Position};

    /// Rules that lead packets, in nf_tables.
    const RULES: &str = "table ip nat {\n\
        chain KUBE-SERVICES { ip daddr 10.96.0.1 counter; }\n\
        chain PREROUTING { type nat hook prerouting priority dstnat; jump KUBE-SERVICES; }\n}\n";
    /// A chain of another program that needs one of them.
    const FOREIGN: &str = "table ip nat { chain MINE { goto KUBE-SERVICES; }; }\n";
    /// Beyond any delay of a busy machine.
    const DEADLINE: Duration = Duration::from_secs(60);

    fn is_there() -> bool {
        nft(&["list", "ruleset"], "").contains("chain KUBE-SERVICES")
    }

    /// A report of a node that serves, and was read back then.
    fn read_back(verified_at_ms: u64) -> Report {
        let at = Some(Position {
            epoch: 1,
            revision: 1,
        });
        let mut report = Report {
            held: at,
            applied: at,
            ..Report::default()
        };
        report.counts.services = 1;
        report.families[0].verified_at_ms = verified_at_ms;
        report
    }

    /// I4: not once, but at each read-back; what stays is a failure of the node until it has gone.
    #[test]
    fn i4_rules_are_looked_for_at_each_read_back_and_told_while_they_stay() {
        in_netns(|| {
            let runtime = Builder::new_current_thread().enable_all().start_paused(true).build();
            runtime.unwrap().block_on(rules_come_back());
        });
    }

    async fn rules_come_back() {
        let task = TakeOver {
            serving: Kind::Nftables.serving([None; 2]),
            spare: [true; 2],
            ports: Ports::new(None, None),
        };
        let (reports, follow) = watch::channel(Report::default());
        let (reported, mut failure) = watch::channel(None);
        let _task = tokio::spawn(keep_removing(task, follow, reported));
        let gone = async || {
            let begun = Instant::now();
            while is_there() {
                assert!(begun.elapsed() < DEADLINE, "the rules are still there");
                tokio::task::spawn_blocking(std::thread::yield_now).await.unwrap();
            }
        };
        let mut stays = async |rules: &str, at: u64, cause: &str| {
            nft(&["-f", "-"], rules);
            reports.send_replace(read_back(at));
            let reported = timeout(DEADLINE, failure.wait_for(Option::is_some))
                .await
                .unwrap()
                .unwrap()
                .clone()
                .unwrap();
            assert!(
                reported.reason.contains(cause) && !reported.degraded,
                "{reported:?}"
            );
            assert!(reported.about == Subject::Node && is_there());
            nft(&["flush", "ruleset"], "");
            let ended = timeout(DEADLINE, failure.wait_for(Option::is_none)).await;
            assert!(ended.unwrap().is_ok());
        };
        let foreign = format!("{RULES}{FOREIGN}");
        stays(&foreign, 1, "rules of other programs jump to them").await;
        for round in 0..u64::from(MOST_RETURNS) {
            nft(&["-f", "-"], RULES);
            reports.send_replace(read_back(2 + round));
            gone().await;
        }
        // A program keeps on writing them.
        stays(RULES, 9, "came back 3 times").await;
    }

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
