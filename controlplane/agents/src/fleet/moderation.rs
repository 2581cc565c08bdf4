//! Limits on what one node may make the control plane do and write, also if a thief has the node's key.

use std::time::Duration;

use kplane_model::NodeName;
use kplane_util::buckets::{Buckets, Rate};
use parking_lot::Mutex;

/// Streams of a node, and so its snapshots: one that an agent asks for needs a stream of its own. An agent that ends at
/// each start connects once in a few seconds.
const STREAMS: Rate = Rate {
    burst: 30,
    refill: Duration::from_secs(1),
};
/// Log lines about one kind of problem with one node.
const LINES: Rate = Rate {
    burst: 1,
    refill: Duration::from_secs(60),
};
/// Maximum number of nodes that are remembered. Further ones share what one may do.
const NODES: usize = 65_536;

/// A kind of problem with what an agent does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Misbehaviour {
    /// It opens streams too often.
    Streams,
    /// Its Hello is too long.
    Hello,
    /// Its report is too long.
    Report,
    /// Another agent has the node's name.
    CompetingAgent,
    /// It says nothing.
    Silent,
}

/// The latest streams and log lines of each node.
#[derive(Debug)]
pub(crate) struct Moderation {
    streams: Mutex<Buckets<NodeName>>,
    lines: Mutex<Buckets<(NodeName, Misbehaviour)>>,
}

impl Default for Moderation {
    fn default() -> Self {
        Self {
            streams: Mutex::new(Buckets::new(STREAMS, NODES)),
            lines: Mutex::new(Buckets::new(LINES, NODES)),
        }
    }
}

impl Moderation {
    /// Admits a stream of a node.
    ///
    /// # Errors
    /// The time after which the node may open another one.
    pub(crate) fn admit(&self, node: &NodeName) -> Result<(), Duration> {
        let mut streams = self.streams.lock();
        let admitted = streams.take(node.clone(), 1).map(drop);
        drop(streams);
        admitted.inspect_err(|_| {
            self.tell(node, Misbehaviour::Streams, || {
                "the agent connects too often, and is asked to come back later; read the agent's log".to_owned()
            });
        })
    }

    /// Logs a problem, at most once a minute for each node and kind.
    pub(crate) fn tell(
        &self,
        node: &NodeName,
        problem: Misbehaviour,
        text: impl FnOnce() -> String,
    ) {
        let mut lines = self.lines.lock();
        let left_out = lines.take((node.clone(), problem), 1);
        drop(lines);
        if let Ok(left_out) = left_out {
            let text = text();
            tracing::warn!(%node, left_out, "{text}");
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_node_has_its_streams_and_takes_none_from_others() {
        let moderation = Moderation::default();
        let admitted = |node: &str, times| {
            (0..times).filter(|_| moderation.admit(&node.into()).is_ok()).count()
        };
        assert_eq!(admitted("n1", 1_000), 30);
        assert_eq!(admitted("n2", 10), 10);
        advance(Duration::from_secs(10)).await;
        assert_eq!(admitted("n1", 1_000), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn a_problem_is_told_once_a_minute() {
        let moderation = Moderation::default();
        let reported = std::cell::Cell::new(0);
        let tell = |node: &str, problem| {
            moderation.tell(&node.into(), problem, || {
                reported.set(reported.get() + 1);
                String::new()
            });
            reported.get()
        };
        assert_eq!([(); 3].map(|()| tell("n1", Misbehaviour::Hello)), [1; 3]);
        assert_eq!(tell("n1", Misbehaviour::Report), 2);
        assert_eq!(tell("n2", Misbehaviour::Hello), 3);
        advance(Duration::from_secs(60)).await;
        assert_eq!(tell("n1", Misbehaviour::Hello), 4);
    }
}
