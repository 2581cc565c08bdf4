//! Pods that wait to end: the way of agents' questions to the task that answers them, and the latest answers.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kplane_model::NodeName;
use kplane_proto::convert::unpack_ip;
use kplane_proto::v1 as pb;
use tokio::sync::{mpsc, oneshot};

/// Maximum number of questions that wait for the task that takes them.
const QUEUE: usize = 1_024;
/// Maximum number of answers that are remembered, of some 300 bytes each.
const REMEMBERED: usize = 256;
/// Maximum number of addresses of a Pod.
const ADDRESSES: usize = 16;
/// Longest time that a Pod waits.
const LONGEST: Duration = Duration::from_secs(300);

/// A Pod that waits to end.
#[derive(Debug)]
pub struct Leaving {
    /// The node of the agent that asks.
    pub node: NodeName,
    /// Addresses of the Pod.
    pub addresses: Vec<IpAddr>,
    /// Port of its endpoints; 0 = all.
    pub port: u16,
    /// Longest time until the answer.
    pub within: Duration,
    /// Channel for the answer.
    pub answer: oneshot::Sender<pb::LeavingOutcome>,
}

/// Questions about Pods that wait to end, and the latest answers.
#[derive(Debug)]
pub struct Departures {
    questions: mpsc::Sender<Leaving>,
    asked: Mutex<Option<mpsc::Receiver<Leaving>>>,
    latest: Mutex<Latest>,
}

/// The latest answers, numbered from 1, oldest first.
#[derive(Debug, Default)]
struct Latest {
    number: u64,
    all: VecDeque<(u64, Arc<pb::Departure>)>,
}

impl Default for Departures {
    fn default() -> Self {
        let (questions, asked) = mpsc::channel(QUEUE);
        Self {
            questions,
            asked: Mutex::new(Some(asked)),
            latest: Mutex::default(),
        }
    }
}

impl Departures {
    /// Passes an agent's question on; returns the channel on which the answer comes, which is closed at once if there are too
    /// many questions.
    pub(crate) fn ask(
        &self,
        node: &NodeName,
        leaving: &pb::Leaving,
    ) -> oneshot::Receiver<pb::LeavingOutcome> {
        let (answer, answered) = oneshot::channel();
        let addresses = leaving.addresses.iter().take(ADDRESSES);
        let leaving = Leaving {
            node: node.clone(),
            addresses: addresses
                .filter_map(|ip| unpack_ip("addresses", ip).ok())
                .collect(),
            port: u16::try_from(leaving.port).unwrap_or_default(),
            within: Duration::from_millis(leaving.within_ms.into()).min(LONGEST),
            answer,
        };
        // On failure the answer's sender is dropped.
        let _ = self.questions.try_send(leaving);
        answered
    }

    /// Returns the questions; `None` if another task has them.
    pub fn take_questions(&self) -> Option<mpsc::Receiver<Leaving>> {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.take()
    }

    /// Remembers an answer.
    pub fn note(&self, departure: pb::Departure) {
        let mut latest = self.lock();
        latest.number += 1;
        let number = latest.number;
        if latest.all.len() >= REMEMBERED {
            latest.all.pop_front();
        }
        latest.all.push_back((number, Arc::new(departure)));
    }

    /// Returns the latest answers with their numbers, oldest first.
    pub fn latest(&self) -> Vec<(u64, Arc<pb::Departure>)> {
        self.lock().all.iter().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Latest> {
        // Each write leaves it usable.
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_agent_says_is_bounded() {
        let departures = Departures::default();
        let mut asked = departures.take_questions().unwrap();
        assert!(departures.take_questions().is_none());
        let hostile = pb::Leaving {
            addresses: vec![vec![10, 0, 0, 1], vec![1; 3], vec![0; 16]]
                .into_iter()
                .chain(vec![vec![10; 4]; 100])
                .collect(),
            port: 70_000,
            within_ms: u32::MAX,
            ..pb::Leaving::default()
        };
        let _answers: Vec<_> = (0..QUEUE)
            .map(|_| departures.ask(&"n1".into(), &hostile))
            .collect();
        let mut refused = departures.ask(&"n1".into(), &hostile);
        assert!(
            refused
                .try_recv()
                .is_err_and(|error| error == oneshot::error::TryRecvError::Closed)
        );
        let leaving = asked.try_recv().unwrap();
        assert_eq!(leaving.addresses.len(), ADDRESSES - 1);
        assert_eq!((leaving.port, leaving.within), (0, LONGEST));
        for n in 0..300 {
            departures.note(pb::Departure {
                waited_ms: n,
                ..pb::Departure::default()
            });
        }
        let latest = departures.latest();
        assert_eq!(
            (latest.len(), latest[0].0, latest[0].1.waited_ms),
            (256, 45, 44)
        );
    }
}
