//! The control plane's status API, queried over gRPC from its own network namespace.

use std::sync::mpsc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, anyhow};
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_proto::v1::{Fleet, GetFleetRequest, NodeState, NodeStatus, SyncStats};
use kplane_rig::netns::NetNs;
use kplane_rig::wait::eventually;
use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::timeout;
use tonic::transport::Endpoint;

use super::cast::Cast;
use super::interrupt;

/// The address of the status API, inside the control plane's namespace.
const ADDRESS: &str = "http://127.0.0.1:7444";
/// Longest wait for one answer.
const ANSWER: Duration = Duration::from_secs(2);

/// Longest wait for the fleet: a busy machine needs a second or two to start.
const PATIENCE: Duration = Duration::from_secs(20);

/// A connection to the status API, on a thread inside the control plane's namespace.
#[derive(Debug)]
pub(crate) struct Status {
    /// The channel to the thread; closing it ends the thread.
    questions: UnboundedSender<Question>,
}

/// The channel for the answer.
type Question = mpsc::Sender<Result<Fleet>>;

/// The arrival of a change in the kernel of a node.
#[derive(Clone, Debug)]
pub(crate) struct Landing {
    /// The node.
    pub(crate) node: String,
    /// Time from the change of the file to the kernel's acknowledgement. It is rounded up, because
    /// the agent's clock, which is this machine's, ticks in milliseconds.
    pub(crate) took: Duration,
}

impl Status {
    /// Connects, at the latest with the first question.
    pub(crate) fn connect(ns: &NetNs) -> Result<Self> {
        // The caller waits for each answer, so the channel never holds more than one question.
        let (questions, inbox) = unbounded_channel();
        ns.spawn(move || serve(inbox))?;
        Ok(Self { questions })
    }

    /// Returns the fleet at this moment.
    pub(crate) fn fleet(&self) -> Result<Fleet> {
        let (answer, answered) = mpsc::channel();
        self.questions
            .send(answer)
            .ok()
            .context("the status thread has ended")?;
        answered.recv().context("the status thread has ended")?
    }

    /// Queries until the closure succeeds, or fails with its last error. It also gives up when a process
    /// of the cast has ended.
    pub(crate) fn wait<T>(
        &self,
        cast: &mut Cast,
        what: &str,
        mut look: impl FnMut(&Fleet) -> Result<T, String>,
    ) -> Result<T> {
        // The outer result ends the waiting, the inner one is for the caller.
        eventually(PATIENCE, what, || {
            let go_on = interrupt::check()
                .map_err(Into::into)
                .and_then(|()| cast.check());
            if let Err(error) = go_on {
                return Ok(Err(error));
            }
            let fleet = self.fleet().map_err(|error| format!("{error:#}"))?;
            look(&fleet).map(Ok)
        })?
    }

    /// Waits until the kernel of every node holds everything that it should.
    pub(crate) fn wait_in_sync(&self, cast: &mut Cast, nodes: usize) -> Result<Fleet> {
        self.wait(cast, "every node is in sync", |fleet| {
            let late: Vec<String> = fleet.nodes.iter().filter_map(trouble).collect();
            if late.is_empty() && fleet.nodes.len() >= nodes {
                return Ok(fleet.clone());
            }
            Err(format!(
                "{} nodes known; {}",
                fleet.nodes.len(),
                late.join("; ")
            ))
        })
    }

    /// Waits until a change made at `written`, after `revision`, is in every kernel.
    pub(crate) fn wait_landed(
        &self,
        cast: &mut Cast,
        written: SystemTime,
        revision: u64,
    ) -> Result<Vec<Landing>> {
        self.wait(cast, "the change is in every kernel", |fleet| {
            fleet
                .nodes
                .iter()
                .map(|node| landing(node, written, revision))
                .collect()
        })
    }
}

/// Returns why a node is not in sync.
fn trouble(node: &NodeStatus) -> Option<String> {
    if node.state() == NodeState::InSync {
        return None;
    }
    let state = node
        .state()
        .as_str_name()
        .trim_start_matches("NODE_STATE_")
        .to_lowercase();
    Some(
        format!("{} is {state} {}", node.name, node.last_error)
            .trim_end()
            .to_owned(),
    )
}

fn landing(node: &NodeStatus, written: SystemTime, revision: u64) -> Result<Landing, String> {
    let late = || format!("{} holds revision {}", node.name, applied(node));
    if node.wanted_revision <= revision || applied(node) < node.wanted_revision {
        return Err(late());
    }
    let sync = last_sync(node)
        .filter(|sync| sync.revision > revision)
        .ok_or_else(late)?;
    let finished = UNIX_EPOCH + Duration::from_millis(sync.finished_at_ms + 1);
    let took = finished.duration_since(written).unwrap_or_default();
    Ok(Landing {
        node: node.name.clone(),
        took,
    })
}

/// Returns the revision that a node's kernel holds.
fn applied(node: &NodeStatus) -> u64 {
    node.report
        .as_ref()
        .map_or(0, |report| report.applied_revision)
}

/// Returns the course of a node's last update.
pub(crate) fn last_sync(node: &NodeStatus) -> Option<&SyncStats> {
    node.report.as_ref()?.last_sync.as_ref()
}

/// Answers questions until the channel is closed. The connection is opened on this thread, inside
/// its namespace, and kept alive between questions.
fn serve(inbox: UnboundedReceiver<Question>) -> Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async move {
        let mut inbox = inbox;
        let mut client = StatusServiceClient::new(Endpoint::from_static(ADDRESS).connect_lazy());
        while let Some(answer) = inbox.recv().await {
            let asked = timeout(ANSWER, client.get_fleet(GetFleetRequest::default())).await;
            let fleet = match asked {
                Ok(Ok(response)) => Ok(response.into_inner()),
                Ok(Err(status)) => Err(anyhow!("the control plane says: {}", status.message())),
                Err(_) => Err(anyhow!("the control plane does not answer")),
            };
            // The receiver may have given up.
            let _ = answer.send(fleet);
        }
    });
    Ok(())
}
