//! What the control plane says of the fleet: its status API, asked over gRPC from its own network
//! namespace.

use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, anyhow};
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_proto::v1::{Fleet, GetFleetRequest, NodeState, NodeStatus, SyncStats};
use kplane_tests::netns::NetNs;
use kplane_tests::wait::eventually;
use tokio::runtime::Builder;
use tokio::time::timeout;
use tonic::transport::Endpoint;

use super::interrupt;

/// Where the control plane serves its status, inside its namespace.
const ADDRESS: &str = "http://127.0.0.1:7444";
/// Longest wait for one answer.
const ANSWER: Duration = Duration::from_secs(2);

/// A connection to the status API, on a thread inside the control plane's namespace.
#[derive(Debug)]
pub(crate) struct Status {
    /// A question is where its answer shall go; closed = the thread ends.
    questions: Sender<Sender<Result<Fleet>>>,
}

/// When a change reached the kernel of a node.
#[derive(Clone, Debug)]
pub(crate) struct Landing {
    /// The node.
    pub(crate) node: String,
    /// From the change of the file to the kernel's acknowledgement; the agent's clock, which is
    /// this machine's, ticks in milliseconds: rounded up.
    pub(crate) took: Duration,
}

impl Status {
    /// Connects, at the latest with the first question.
    pub(crate) fn connect(ns: &NetNs) -> Result<Self> {
        let (questions, inbox) = mpsc::channel();
        ns.spawn(move || serve(&inbox))?;
        Ok(Self { questions })
    }

    /// The fleet at this moment.
    pub(crate) fn fleet(&self) -> Result<Fleet> {
        let (answer, answered) = mpsc::channel();
        self.questions.send(answer).context("the status thread has ended")?;
        answered.recv().context("the status thread has ended")?
    }

    /// Asks until `look` is content, or fails with what it last said.
    pub(crate) fn wait<T>(
        &self,
        within: Duration,
        what: &str,
        mut look: impl FnMut(&Fleet) -> Result<T, String>,
    ) -> Result<T> {
        // The outer result ends the waiting, the inner one is for the caller.
        let seen = eventually(within, what, || {
            if let Err(interrupted) = interrupt::check() {
                return Ok(Err(interrupted));
            }
            let fleet = self.fleet().map_err(|error| format!("{error:#}"))?;
            look(&fleet).map(Ok)
        })?;
        Ok(seen?)
    }

    /// Waits until the kernel of every node holds everything that it should.
    pub(crate) fn wait_in_sync(&self, nodes: usize, within: Duration) -> Result<Fleet> {
        self.wait(within, "every node is in sync", |fleet| {
            let late: Vec<String> = fleet.nodes.iter().filter_map(trouble).collect();
            if late.is_empty() && fleet.nodes.len() >= nodes {
                return Ok(fleet.clone());
            }
            Err(format!("{} nodes known; {}", fleet.nodes.len(), late.join("; ")))
        })
    }

    /// Waits until a change made at `written`, after `revision`, is in every kernel.
    pub(crate) fn wait_landed(
        &self,
        written: SystemTime,
        revision: u64,
        within: Duration,
    ) -> Result<Vec<Landing>> {
        self.wait(within, "the change is in every kernel", |fleet| {
            fleet.nodes.iter().map(|node| landing(node, written, revision)).collect()
        })
    }
}

/// Why a node is not in sync.
fn trouble(node: &NodeStatus) -> Option<String> {
    if node.state() == NodeState::InSync {
        return None;
    }
    let state = node.state().as_str_name().trim_start_matches("NODE_STATE_").to_lowercase();
    Some(format!("{} is {state} {}", node.name, node.last_error).trim_end().to_owned())
}

fn landing(node: &NodeStatus, written: SystemTime, revision: u64) -> Result<Landing, String> {
    let late = || format!("{} holds revision {}", node.name, applied(node));
    if node.wanted_revision <= revision || applied(node) < node.wanted_revision {
        return Err(late());
    }
    let sync = last_sync(node).filter(|sync| sync.revision > revision).ok_or_else(late)?;
    let finished = UNIX_EPOCH + Duration::from_millis(sync.finished_at_ms + 1);
    let took = finished.duration_since(written).unwrap_or_default();
    Ok(Landing { node: node.name.clone(), took })
}

/// The revision that a node's kernel holds.
fn applied(node: &NodeStatus) -> u64 {
    node.report.as_ref().map_or(0, |report| report.applied_revision)
}

/// How a node's last update went.
pub(crate) fn last_sync(node: &NodeStatus) -> Option<&SyncStats> {
    node.report.as_ref()?.last_sync.as_ref()
}

fn serve(inbox: &Receiver<Sender<Result<Fleet>>>) {
    let runtime = match Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("no runtime for the status thread: {error}");
            return;
        }
    };
    // Connections are opened on this thread, inside the namespace, by the channel's own task.
    let mut client = {
        let _context = runtime.enter();
        StatusServiceClient::new(Endpoint::from_static(ADDRESS).connect_lazy())
    };
    for answer in inbox {
        let asked = runtime.block_on(async {
            timeout(ANSWER, client.get_fleet(GetFleetRequest {})).await
        });
        let fleet = match asked {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(anyhow!("the control plane says: {}", status.message())),
            Err(_) => Err(anyhow!("the control plane does not answer")),
        };
        // Whoever asked may have given up.
        let _ = answer.send(fleet);
    }
}
