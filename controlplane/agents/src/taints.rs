//! The start-up taint: Pods are not scheduled to a node before its data path works.
//!
//! kubelet (`--register-with-taints`) or a cluster autoscaler puts the taint on a new Node. The control plane takes it
//! away when the node's agent reports that its canary answers, and puts it back when the canary stops to answer. Each
//! Node has one writer: the replica that has the agent's stream. An agent that is away changes nothing, because the
//! rules of its kernel stay.

mod plan;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kplane_desired_state::kubernetes::Api;
use kplane_model::NodeName;
use kplane_proto::v1::Canary;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, warn};

use crate::fleet::{AgentRecord, AgentRegistry};
use plan::{Plan, plan};

/// Pause after which reports that came together are read at once.
const LOOK: Duration = Duration::from_millis(250);
/// Pause between two requests to the API server.
const PACE: Duration = Duration::from_millis(50);
/// Time for a Node that was written to come back from the API server, and the pause before a failed write is tried again.
const AGAIN: Duration = Duration::from_secs(10);

/// Keeps the taints of all Nodes whose agents this replica serves, until the control plane ends.
/// `tainted`: the Nodes that have the taint.
pub async fn keep(
    fleet: Arc<AgentRegistry>,
    tainted: watch::Receiver<BTreeSet<NodeName>>,
    api: Arc<Api>,
) {
    let mut keeper = Keeper {
        fleet,
        tainted,
        api,
        written: BTreeMap::new(),
        complained: LoggedProblems::default(),
    };
    let mut reports = keeper.fleet.changes();
    loop {
        let again = keeper.look().await;
        tokio::select! {
            changed = reports.changed() => if changed.is_err() { return },
            changed = keeper.tainted.changed() => if changed.is_err() { return },
            () = sleep_until(again.unwrap_or_else(Instant::now)), if again.is_some() => {}
        }
        sleep(LOOK).await;
    }
}

/// Problems that were logged, so that each is logged once.
#[derive(Debug, Default)]
struct LoggedProblems {
    unwritten: bool,
    many: bool,
}

#[derive(Debug)]
struct Keeper {
    fleet: Arc<AgentRegistry>,
    api: Arc<Api>,
    tainted: watch::Receiver<BTreeSet<NodeName>>,
    /// Until when a Node is left alone after a write.
    written: BTreeMap<NodeName, Instant>,
    complained: LoggedProblems,
}

impl Keeper {
    /// Writes what is due; returns when to look again, if a Node is left alone until then.
    async fn look(&mut self) -> Option<Instant> {
        let canaries = self
            .fleet
            .records()
            .into_iter()
            .filter_map(|(node, record)| Some((node, answers(&record)?)));
        let plan = plan(&canaries.collect(), &self.tainted.borrow_and_update());
        self.tell(&plan);
        let now = Instant::now();
        self.written.retain(|_, until| *until > now);
        for (node, wanted) in plan.writes {
            if self.written.contains_key(&node) {
                continue;
            }
            sleep(PACE).await;
            self.written.insert(node.clone(), Instant::now() + AGAIN);
            match write::write(&self.api, &node, wanted).await {
                Ok(done) => {
                    self.complained.unwritten = false;
                    // If not, another writer was quicker, or the Node is gone: the source says so in a moment.
                    if done {
                        log_written(&node, wanted);
                    }
                }
                Err(error) => {
                    if !std::mem::replace(&mut self.complained.unwritten, true) {
                        warn!(%node, %error, "cannot write a start-up taint; trying again every {AGAIN:?}");
                    }
                }
            }
        }
        self.written.values().min().copied()
    }

    fn tell(&mut self, plan: &Plan) {
        let many = plan.kept_back > 0;
        if many && !self.complained.many {
            warn!(
                nodes = plan.kept_back,
                "the canaries of many nodes do not answer; that is rather the canary's fault than the nodes', so they \
                 get no start-up taint. See the canary's Service: kpctl describe service"
            );
        }
        self.complained.many = many;
    }
}

fn log_written(node: &NodeName, tainted: bool) {
    if tainted {
        warn!(%node, "the node's canary does not answer; the node has the start-up taint again");
    } else {
        info!(%node, "the node's canary answers; the start-up taint is gone");
    }
}

/// Returns whether an agent reports that its canary answers; `None` if it has none, does not know, or is away.
fn answers(record: &AgentRecord) -> Option<bool> {
    if !record.connected {
        return None;
    }
    let report = record.report.as_ref()?;
    match report.canary() {
        Canary::Unspecified => None,
        Canary::Answers => Some(true),
        Canary::Silent => Some(false),
    }
}
