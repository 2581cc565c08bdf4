//! Questions to the agents of this replica, for facts that no report has.
//!
//! Answers are not kept: each goes to its caller. They are bounded in number, size and time. An agent without an answer
//! is in the result, with the reason: it never counts as one that answered "nothing".

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, Stream, StreamExt as _};
use kplane_model::NodeName;
use kplane_proto::v1 as pb;
use tokio::time::{Instant, timeout_at};

use crate::fleet::{AgentRegistry, label};

/// Maximum number of agents that are asked at once.
const AT_A_TIME: usize = 1_024;
/// Maximum size of all answers together, in bytes: some 200,000 real servers.
pub(crate) const ANSWERS_BYTES: usize = 16 << 20;
/// Longest text of an agent that is shown, in bytes.
const TEXT: usize = 300;

/// The questions to the agents of some nodes.
pub type Questions = Vec<(NodeName, Arc<pb::Inspect>)>;

/// Limits on the time to wait for agents.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// Longest time to wait for each of them.
    pub each: Duration,
    /// Longest time to wait for all together.
    pub within: Duration,
}

impl Timeouts {
    /// Returns the patience that is the same for one agent and for all.
    pub const fn all(within: Duration) -> Self {
        let each = within;
        Self { each, within }
    }
}

/// The answer of an agent.
#[derive(Debug)]
pub struct Reply {
    /// The node.
    pub node: NodeName,
    /// Version of the agent; empty = not known.
    pub version: String,
    /// The answer, or the reason why there is none.
    pub outcome: Result<pb::Inspection, String>,
}

impl Reply {
    /// Creates the outcome for a node without an answer.
    pub fn nothing(node: NodeName, reason: impl Into<String>) -> Self {
        Self {
            node,
            version: String::new(),
            outcome: Err(reason.into()),
        }
    }

    /// Returns a part of the answer. An agent that leaves it out does not know the question.
    ///
    /// # Errors
    /// The reason why there is none, which may be the agent's own `error`.
    pub fn part<T: ?Sized>(
        &self,
        part: impl Fn(&pb::Inspection) -> Option<&T>,
        error: impl Fn(&T) -> &str,
    ) -> Result<&T, String> {
        let answer = self.outcome.as_ref().map_err(String::clone)?;
        let part = part(answer).ok_or_else(|| match self.version.as_str() {
            "" => "its agent does not know this question: it is of an older version".to_owned(),
            version => format!(
                "its agent of version {} does not know this question: update it",
                label(version, TEXT)
            ),
        })?;
        match error(part) {
            "" => Ok(part),
            text => Err(label(text, TEXT)),
        }
    }
}

/// Room for answers.
pub(crate) struct Room(usize);

impl Default for Room {
    fn default() -> Self {
        Self(ANSWERS_BYTES)
    }
}

/// Largest count that a node can have come to: 1,000 million a second for a year.
const MOST: u64 = 1 << 55;

impl Room {
    /// Returns what was heard, without an answer for which there is no room, or that cannot be.
    pub(crate) fn fit(&mut self, mut heard: Reply) -> Reply {
        let answer = heard.outcome.as_ref();
        if answer.is_ok_and(|answer| counts(answer).any(|count| count > MOST)) {
            heard.outcome = Err("not shown: its agent names counts that cannot be".to_owned());
            return heard;
        }
        let bytes = answer.map_or(0, prost::Message::encoded_len);
        match self.0.checked_sub(bytes) {
            Some(left) => self.0 = left,
            None => heard.outcome = Err("not shown: too many answers".to_owned()),
        }
        heard
    }
}

/// Returns what is added up over all nodes: one count that cannot be would make a sum meaningless.
fn counts(answer: &pb::Inspection) -> impl Iterator<Item = u64> {
    let denials = answer
        .denials
        .iter()
        .flat_map(|of| of.pods.iter().map(|pod| pod.packets).chain([of.more, of.lost]));
    let connected = answer.connected.iter().flat_map(|of| {
        of.groups
            .iter()
            .flat_map(|of| [of.unreplied, of.handshake, of.established, of.closing])
            .chain([of.more, of.read])
    });
    let edges = answer.edges.iter().flat_map(|of| {
        of.edges
            .iter()
            .flat_map(|of| {
                [
                    of.begun,
                    of.failed,
                    of.reset,
                    of.bytes_to_endpoint,
                    of.bytes_to_client,
                ]
            })
            .chain([of.more, of.lost, of.more_failed])
    });
    let remembered = answer.affinity.iter().map(|of| of.more);
    denials.chain(connected).chain(edges).chain(remembered)
}

/// Asks agents that are connected to this replica, and yields their answers as they come.
pub fn ask(
    fleet: &AgentRegistry,
    nodes: Questions,
    timeouts: Timeouts,
) -> impl Stream<Item = Reply> {
    let end = Instant::now() + timeouts.within;
    let asked = nodes.into_iter().map(move |(node, question)| async move {
        let version = fleet.record(&node).map(|record| record.version.clone());
        let answer = fleet.ask(&node, question);
        let until = end.min(Instant::now() + timeouts.each);
        let outcome = match timeout_at(until, answer).await {
            Ok(Ok(inspection)) => Ok(inspection),
            Ok(Err(_)) => Err("its agent disconnected, or has too many open questions".into()),
            Err(_) => Err("its agent is connected, and did not answer in time".into()),
        };
        Reply {
            node,
            version: version.unwrap_or_default(),
            outcome,
        }
    });
    let mut room = Room::default();
    let heard = stream::iter(asked).buffer_unordered(AT_A_TIME);
    heard.map(move |heard| room.fit(heard))
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;

    /// Answers are shown as they come, as long as all that are shown fit.
    #[test]
    fn answers_fit_into_their_room_and_the_others_say_why() {
        for seed in 0..100 {
            let mut dice = SmallRng::seed_from_u64(seed);
            let size = dice.random_range(0..1_000);
            let (mut room, mut shown) = (Room(size), 0);
            for _ in 0..dice.random_range(1..50) {
                let nodes = vec![true; dice.random_range(0..200)];
                let mut heard = Reply::nothing("n1".into(), "it is away");
                let is_answer = dice.random_bool(0.8);
                if is_answer {
                    heard.outcome = Ok(pb::Inspection {
                        reached: Some(pb::Reached { nodes }),
                        ..pb::Inspection::default()
                    });
                }
                let bytes = heard.outcome.as_ref().map_or(0, prost::Message::encoded_len);
                let fits = is_answer && shown + bytes <= size;
                shown += if fits { bytes } else { 0 };
                let outcome = room.fit(heard).outcome.map(drop);
                let expected = match (is_answer, fits) {
                    (_, true) => Ok(()),
                    (true, false) => Err("not shown: too many answers".to_owned()),
                    (false, _) => Err("it is away".to_owned()),
                };
                assert_eq!(outcome, expected, "seed {seed}: {shown} of {size} bytes");
            }
        }
    }

    /// One node that names senseless counts is named, and spoils no sum.
    #[test]
    fn an_answer_that_cannot_be_is_none() {
        for (more, is_shown) in [(MOST, true), (u64::MAX, false)] {
            let mut answer = pb::Inspection::default();
            answer.denials.get_or_insert_default().more = more;
            let mut heard = Reply::nothing("n1".into(), "");
            heard.outcome = Ok(answer);
            assert_eq!(Room::default().fit(heard).outcome.is_ok(), is_shown);
        }
    }
}
