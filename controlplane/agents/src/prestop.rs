//! Pods that wait to end: the way of agents' questions to the task that answers them, and the latest answers.

use std::collections::{HashMap, VecDeque};
use std::future::ready;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use kplane_model::NodeName;
use kplane_proto::convert::unpack_ip;
use kplane_proto::v1 as pb;
use kplane_proto::v1::LeavingOutcome;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{Instant, timeout_at};

/// Maximum number of Pods that wait at a time.
const WAITING: usize = 1_024;
/// Maximum number of them on one node.
const SHARE: usize = WAITING / 8;
/// Maximum number of questions of one agent, with those that have no place yet.
const OPEN: usize = 1_024;
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
    /// The latest time of the answer.
    pub until: Instant,
    /// The latest time of the answer if no EndpointSlice says that the Pod is terminating.
    pub unless_terminating: Instant,
    /// Channel for the answer.
    pub answer: oneshot::Sender<LeavingOutcome>,
}

/// Questions about Pods that wait to end, and the latest answers.
#[derive(Debug)]
pub struct PrestopQuestions {
    room: Arc<Semaphore>,
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

impl Default for PrestopQuestions {
    fn default() -> Self {
        let (questions, asked) = mpsc::channel(WAITING);
        Self {
            room: Arc::new(Semaphore::new(WAITING)),
            questions,
            asked: Mutex::new(Some(asked)),
            latest: Mutex::default(),
        }
    }
}

impl PrestopQuestions {
    /// Passes an agent's question on as soon as it has a place in the agent's share and at this control plane. Without
    /// one until its time is over, the outcome is unspecified. A question that is dropped gives its place back.
    fn ask(
        &self,
        node: &NodeName,
        leaving: &pb::Leaving,
        share: Arc<Semaphore>,
    ) -> impl Future<Output = LeavingOutcome> + Send + 'static {
        let began = Instant::now();
        let within = Duration::from_millis(leaving.within_ms.into()).min(LONGEST);
        let usual = match leaving.unless_terminating_ms {
            0 => within,
            ms => Duration::from_millis(ms.into()).min(within),
        };
        let (answer, answered) = oneshot::channel();
        let addresses = leaving.addresses.iter().take(ADDRESSES);
        let leaving = Leaving {
            node: node.clone(),
            addresses: addresses.filter_map(|ip| unpack_ip("addresses", ip).ok()).collect(),
            port: u16::try_from(leaving.port).unwrap_or_default(),
            until: began + within,
            unless_terminating: began + usual,
            answer,
        };
        let (room, questions) = (Arc::clone(&self.room), self.questions.clone());
        async move {
            let places = async {
                let share = share.acquire_owned().await.ok()?;
                Some((share, room.acquire_owned().await.ok()?))
            };
            let Ok(Some(_places)) = timeout_at(leaving.until, places).await else {
                return LeavingOutcome::Unspecified;
            };
            // On failure the answer's sender is dropped.
            let _ = questions.send(leaving).await;
            answered.await.unwrap_or_default()
        }
    }

    /// Returns the questions; `None` if another task has them.
    pub fn take_questions(&self) -> Option<mpsc::Receiver<Leaving>> {
        let mut asked = self.asked.lock();
        asked.take()
    }

    /// Remembers an answer.
    pub fn note(&self, departure: pb::Departure) {
        let mut latest = self.latest.lock();
        latest.number += 1;
        let number = latest.number;
        if latest.all.len() >= REMEMBERED {
            latest.all.pop_front();
        }
        latest.all.push_back((number, Arc::new(departure)));
    }

    /// Returns the latest answers with their numbers, oldest first.
    pub fn latest(&self) -> Vec<(u64, Arc<pb::Departure>)> {
        self.latest.lock().all.iter().cloned().collect()
    }
}

/// The questions of one agent's stream.
#[derive(Debug)]
pub(crate) struct NodeDepartures {
    share: Arc<Semaphore>,
    open: FuturesUnordered<BoxFuture<'static, pb::Left>>,
    /// A question is withdrawn by dropping its entry.
    asked: HashMap<u64, oneshot::Sender<()>>,
}

impl Default for NodeDepartures {
    fn default() -> Self {
        Self {
            share: Arc::new(Semaphore::new(SHARE)),
            open: FuturesUnordered::new(),
            asked: HashMap::new(),
        }
    }
}

impl NodeDepartures {
    /// Takes a question, or withdraws one.
    pub(crate) fn take(
        &mut self,
        prestop: &PrestopQuestions,
        node: &NodeName,
        leaving: &pb::Leaving,
    ) {
        let token = leaving.token;
        // An agent that asks twice with one token wants the later answer.
        self.asked.remove(&token);
        if leaving.withdrawn {
            return;
        }
        let left = move |outcome: LeavingOutcome| pb::Left {
            token,
            outcome: outcome.into(),
        };
        if self.open.len() >= OPEN {
            let refused = ready(left(LeavingOutcome::Unspecified));
            return self.open.push(refused.boxed());
        }
        let (entry, withdrawn) = oneshot::channel::<()>();
        self.asked.insert(token, entry);
        let outcome = prestop.ask(node, leaving, Arc::clone(&self.share));
        let outcome = async move {
            tokio::select! {
                outcome = outcome => left(outcome),
                _ = withdrawn => left(LeavingOutcome::Unspecified),
            }
        };
        self.open.push(outcome.boxed());
    }

    /// Returns the next answer; `None` if there are no questions.
    pub(crate) async fn next(&mut self) -> Option<pb::Left> {
        let left = self.open.next().await?;
        self.asked.remove(&left.token);
        Some(left)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn leaving(token: u64) -> pb::Leaving {
        pb::Leaving {
            token,
            addresses: vec![vec![10, 0, 0, 1]],
            within_ms: 300_000,
            ..pb::Leaving::default()
        }
    }

    /// Wants that no answer comes now. Each question that can get a place gets one.
    async fn no_answer(node: &mut NodeDepartures) {
        let left = timeout_at(Instant::now() + Duration::from_millis(1), node.next()).await;
        assert!(left.is_err(), "{left:?}");
    }

    fn take_all(asked: &mut mpsc::Receiver<Leaving>) -> Vec<Leaving> {
        std::iter::from_fn(|| asked.try_recv().ok()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn what_an_agent_says_is_bounded() {
        let prestop = PrestopQuestions::default();
        let mut asked = prestop.take_questions().unwrap();
        assert!(prestop.take_questions().is_none());
        let hostile = pb::Leaving {
            addresses: vec![vec![10, 0, 0, 1], vec![1; 3], vec![0; 16]]
                .into_iter()
                .chain(vec![vec![10; 4]; 100])
                .collect(),
            port: 70_000,
            within_ms: u32::MAX,
            unless_terminating_ms: u32::MAX,
            ..leaving(1)
        };
        let mut node = NodeDepartures::default();
        node.take(&prestop, &"n1".into(), &hostile);
        assert!(node.next().now_or_never().is_none());
        let leaving = asked.try_recv().unwrap();
        assert_eq!(leaving.addresses.len(), ADDRESSES - 1);
        let until = Instant::now() + LONGEST;
        assert_eq!((leaving.port, leaving.until), (0, until));
        assert_eq!(leaving.unless_terminating, until);
        for n in 0..300 {
            prestop.note(pb::Departure {
                waited_ms: n,
                ..pb::Departure::default()
            });
        }
        let latest = prestop.latest();
        assert_eq!(
            (latest.len(), latest[0].0, latest[0].1.waited_ms),
            (256, 45, 44)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn no_node_takes_all_places_and_a_question_that_is_withdrawn_gives_its_place_back() {
        let prestop = PrestopQuestions::default();
        let mut asked = prestop.take_questions().unwrap();
        let (greedy, other) = ("greedy".into(), "other".into());
        let began = Instant::now();
        let mut many = NodeDepartures::default();
        let most = OPEN as u64;
        for token in 0..=most {
            many.take(&prestop, &greedy, &leaving(token));
        }
        // More than a stream may have get no place.
        let refused = many.next().await.unwrap();
        assert_eq!((refused.token, refused.outcome), (most, 0));
        no_answer(&mut many).await;
        let mut places = take_all(&mut asked);
        assert_eq!(places.len(), SHARE);
        let mut one = NodeDepartures::default();
        one.take(&prestop, &other, &leaving(7));
        no_answer(&mut one).await;
        let place = asked.try_recv().unwrap();
        place.answer.send(LeavingOutcome::Gone).unwrap();
        let left = one.next().await.unwrap();
        assert_eq!((left.token, left.outcome()), (7, LeavingOutcome::Gone));
        assert!(one.next().await.is_none());
        // A question that is answered, and one that is withdrawn, make room for two that wait.
        let answered = places.swap_remove(0);
        answered.answer.send(LeavingOutcome::Gone).unwrap();
        let withdrawn = pb::Leaving {
            withdrawn: true,
            ..leaving(1)
        };
        many.take(&prestop, &greedy, &withdrawn);
        let mut left = Vec::from_iter([many.next().await, many.next().await].map(Option::unwrap));
        left.sort_by_key(|left| left.token);
        let left: Vec<_> = left.iter().map(|left| (left.token, left.outcome())).collect();
        let none = LeavingOutcome::Unspecified;
        assert_eq!(left, [(0, LeavingOutcome::Gone), (1, none)]);
        no_answer(&mut many).await;
        places.extend(take_all(&mut asked));
        assert_eq!(places.len(), SHARE + 1);
        assert_eq!(
            places.iter().filter(|place| place.answer.is_closed()).count(),
            1
        );
        // The others wait for their time.
        let left = many.next().await.unwrap();
        assert_eq!((began.elapsed(), left.outcome()), (LONGEST, none));
        // A stream that ends gives all places back.
        drop(many);
        assert_eq!(prestop.room.available_permits(), WAITING);
    }
}
