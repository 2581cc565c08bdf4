//! Nodes that are probably dead: their streams ended or are silent, and their neighbours do not reach them.
//!
//! ```text
//! streams of agents -> AgentRegistry::signs -> Judge <-> neighbours, by questions to their agents (`reach`)
//!                                        |
//!        other replicas <- shared -> Suspects -> index: endpoints there count as terminating
//! ```
//!
//! This is what all may know; `failure_detector.rs` finds it out.

mod shared;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use clap::ValueEnum;
use kplane_desired_state::index::{Suspicion, Suspicions};
use kplane_model::{Issue, NodeName, ObjectRef, Reason, Severity};
use parking_lot::Mutex;
use tokio::sync::watch as channel;

#[cfg(test)]
pub(crate) use shared::{COUNTS, MOST, REMEMBERED};
pub(crate) use shared::{ReplicaWords, Said, SuspicionsByNode};

/// Longest time between two messages of an agent.
pub const BEAT: Duration = Duration::from_millis(1_500);
/// Time without a message after which a stream is silent.
pub(crate) const SILENT: Duration = Duration::from_millis(1_800);

/// What the control plane does about dead nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// It asks nobody.
    #[default]
    Off,
    /// It finds dead nodes, says what it would have done, and changes nothing.
    Observe,
    /// It takes the endpoints of dead nodes out of rotation.
    Act,
}

/// What happens to established connections to endpoints on dead nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Connections {
    /// They end: agents have the kernel forget them, and another endpoint resets them.
    #[default]
    End,
    /// They stay, and the clients' own timeouts decide.
    Keep,
}

/// The suspected nodes, for all who need them.
#[derive(Debug, Default)]
pub struct Suspects {
    mode: OnceLock<(Mode, Connections)>,
    pub(crate) now: channel::Sender<Arc<Suspicions>>,
    /// The reason why nobody is suspected, if some nodes would be.
    holds: Mutex<Option<&'static str>>,
    pub(crate) shared: ReplicaWords,
    /// Number of suspicions so far.
    pub(crate) begun: AtomicU64,
}

impl Suspects {
    /// Sets the mode, before the first agent is served.
    pub fn set_mode(&self, mode: Mode, connections: Connections) {
        // Nobody else sets it.
        let _ = self.mode.set((mode, connections));
    }

    /// Returns the mode.
    pub fn mode(&self) -> Mode {
        self.mode.get().map(|(mode, _)| *mode).unwrap_or_default()
    }

    /// Returns whether connections to endpoints on dead nodes end.
    pub(crate) fn ends_connections(&self) -> bool {
        self.mode.get() == Some(&(Mode::Act, Connections::End))
    }

    /// Returns the suspected nodes.
    pub fn now(&self) -> Arc<Suspicions> {
        Arc::clone(&self.now.borrow())
    }

    /// Returns a receiver of the suspected nodes.
    pub fn changes(&self) -> channel::Receiver<Arc<Suspicions>> {
        self.now.subscribe()
    }

    /// Replaces the suspected nodes.
    pub fn replace(&self, now: Suspicions) {
        self.now.send_replace(Arc::new(now));
    }

    /// Returns the Nodes on which other replicas run that were heard lately.
    pub fn replicas(&self) -> Vec<NodeName> {
        self.shared.nodes()
    }

    /// Returns the number of suspicions so far.
    pub fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    /// Returns why a node is suspected, human-readable.
    pub fn of(&self, node: &NodeName) -> Option<String> {
        let now = self.now.borrow();
        let suspicion = now.nodes.get(node)?;
        Some(Words(suspicion, &now, node).to_string())
    }

    /// Returns the beat that agents are asked for, in milliseconds; 0 = none.
    pub(crate) fn beat_ms(&self) -> u32 {
        match self.mode() {
            Mode::Off => 0,
            Mode::Observe | Mode::Act => u32::try_from(BEAT.as_millis()).unwrap_or(u32::MAX),
        }
    }

    /// Returns an issue for each suspected node, and one if nobody is suspected for a reason.
    pub(crate) fn issues(&self) -> Vec<Issue> {
        let now = self.now();
        let issue = |name: &str, reason| Issue {
            severity: Severity::Warning,
            code: Reason::NodeSuspected,
            location: String::new(),
            object: ObjectRef::new("Node", "", name),
            reason,
        };
        let nodes = now
            .nodes
            .iter()
            .map(|(node, of)| issue(node, format!("has been {}", Words(of, &now, node))));
        let holds = *self.lock_holds();
        let holds = holds.map(|why| {
            issue(
                "",
                format!("some nodes do not answer, and none is suspected: {why}"),
            )
        });
        nodes.chain(holds).collect()
    }

    pub(crate) fn lock_holds(&self) -> parking_lot::MutexGuard<'_, Option<&'static str>> {
        // It is replaced as a whole.
        self.holds.lock()
    }
}

/// A suspicion and its effect, human-readable.
pub(crate) struct Words<'a>(
    pub(crate) &'a Suspicion,
    pub(crate) &'a Suspicions,
    pub(crate) &'a NodeName,
);

impl fmt::Display for Words<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(_, all, node) = self;
        let effect = if all.dead.contains(*node) {
            "its endpoints get new connections only where no other endpoint is ready, and established ones end"
        } else if all.act {
            "its endpoints get new connections only where no other endpoint is ready"
        } else {
            "with --dead-node act its endpoints would get no new connections"
        };
        write!(
            f,
            "suspected for {} s: {}; {effect}",
            self.0.age_s(),
            self.0
        )
    }
}

/// Returns the time of something that was so long ago.
pub(crate) fn ago(time: Duration) -> SystemTime {
    SystemTime::now().checked_sub(time).unwrap_or(SystemTime::UNIX_EPOCH)
}
