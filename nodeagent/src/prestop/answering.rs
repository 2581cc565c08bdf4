//! The answer to one hook. Hooks of one Pod share a question to the control plane.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use kplane_model::Family;
use kplane_proto::v1::LeavingOutcome;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::pods::Known;
use super::problems::Problems;
use super::request::{Asked, MAX_HEAD};
use super::{DepartureAsked, DepartureQuestion, original};
use crate::metrics::{PrestopCounters, PrestopOutcome as Outcome};

/// Longest time for a request's head, and for taking the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause before a question is asked again after its stream has ended.
const AGAIN: Duration = Duration::from_millis(200);
/// A hook takes the answer to a question whose time ends at most this long before its own.
const SLACK: Duration = Duration::from_secs(1);
/// Maximum number of hooks of one Pod that are answered at a time. All Pods in the node's own network count as one.
const SHARE: usize = 64;
/// Maximum number of questions about a Pod with an address of its own.
const QUESTIONS: usize = 8;

/// What answers need.
#[derive(Debug)]
pub(super) struct Answering {
    pub(super) within: Duration,
    pub(super) known: watch::Receiver<Known>,
    pub(super) ask: mpsc::Sender<DepartureQuestion>,
    pub(super) counters: Arc<PrestopCounters>,
    pub(super) problems: Problems,
    pub(super) pods: Mutex<HashMap<Option<IpAddr>, Weak<PodHooks>>>,
}

/// A question for which hooks wait together.
type Joint = Shared<BoxFuture<'static, Outcome>>;
type WeakJoint = WeakShared<BoxFuture<'static, Outcome>>;

/// The questions about one Pod by port, with the times at which they end. Each hook that waits holds a reference.
#[derive(Debug, Default)]
pub(super) struct PodHooks(Mutex<HashMap<u16, (Instant, WeakJoint)>>);

impl PodHooks {
    /// Returns the question about a port and its end: the one that other hooks wait for, or a new one. `None` if there are
    /// too many.
    fn join(
        &self,
        question: &DepartureAsked,
        most: usize,
        ask: &mpsc::Sender<DepartureQuestion>,
    ) -> Option<(Instant, Joint)> {
        let mut open = self.0.lock();
        open.retain(|_, (_, asked)| asked.upgrade().is_some_and(|asked| asked.peek().is_none()));
        let known = open
            .get(&question.port)
            .and_then(|(until, asked)| Some((*until, asked.upgrade()?)));
        if known.is_some() || open.len() >= most {
            return known;
        }
        let asked = question.clone().answered(ask.clone()).boxed().shared();
        if let Some(weak) = asked.downgrade() {
            open.insert(question.port, (question.until, weak));
        }
        Some((question.until, asked))
    }
}

impl Answering {
    /// Answers a hook.
    pub(super) async fn answer(&self, mut stream: TcpStream, family: Family) {
        let began = Instant::now();
        let pod = original(&stream, family);
        let Ok(Some(head)) = timeout(PATIENCE, read_head(&mut stream)).await else {
            return;
        };
        let Some(asked) = Asked::read(&head) else {
            let text = "only /gone is here: preStop hooks of Pods, see kplane's documentation\n";
            return respond(&mut stream, "404 Not Found", text).await;
        };
        let outcome = tokio::select! {
            outcome = self.outcome(pod, asked) => outcome,
            // kubelet does not wait any longer.
            () = hung_up(&mut stream) => return,
        };
        self.counters.observe(outcome, began.elapsed());
        respond(&mut stream, "200 OK", &format!("{}\n", outcome.name())).await;
    }

    /// Waits for the control plane's answer, until the time is over. Without a place, the hook waits for its whole time.
    async fn outcome(&self, pod: Option<IpAddr>, asked: Asked) -> Outcome {
        let within = asked.within.unwrap_or(self.within);
        let until = Instant::now() + within;
        let outcome = self.wait(pod, asked.port, until, within).await;
        if outcome == Outcome::Busy {
            self.problems.busy(Instant::now());
            sleep_until(until).await;
        }
        outcome
    }

    async fn wait(
        &self,
        pod: Option<IpAddr>,
        port: u16,
        until: Instant,
        within: Duration,
    ) -> Outcome {
        let (addresses, most) = match pod {
            Some(pod) => (vec![pod], QUESTIONS),
            // Pods in the node's own network ask the listener itself.
            None if port > 0 => (self.known.borrow().own.clone(), SHARE),
            None => return Outcome::NoPod,
        };
        let question = DepartureAsked {
            addresses,
            port,
            until,
            unless_terminating: within.min(self.within),
        };
        let hooks = self.hooks_of(pod);
        if Arc::strong_count(&hooks) > SHARE {
            return Outcome::Busy;
        }
        loop {
            let Some((ends, asked)) = hooks.join(&question, most, &self.ask) else {
                return Outcome::Busy;
            };
            let outcome = tokio::select! {
                biased;
                outcome = asked => outcome,
                () = sleep_until(until), if until < ends => return Outcome::Bound,
            };
            let now = Instant::now();
            let is_over = now + SLACK >= ends && until > now + SLACK;
            if outcome == Outcome::Gone || !is_over {
                return outcome;
            }
        }
    }

    /// Returns the hooks of a Pod that wait.
    fn hooks_of(&self, pod: Option<IpAddr>) -> Arc<PodHooks> {
        let mut pods = self.pods.lock();
        if let Some(hooks) = pods.get(&pod).and_then(Weak::upgrade) {
            return hooks;
        }
        pods.retain(|_, hooks| hooks.strong_count() > 0);
        let hooks = Arc::<PodHooks>::default();
        pods.insert(pod, Arc::downgrade(&hooks));
        hooks
    }
}

impl DepartureAsked {
    /// Asks until there is an answer, or the time is over.
    async fn answered(self, ask: mpsc::Sender<DepartureQuestion>) -> Outcome {
        let until = self.until;
        loop {
            let (answer, answered) = oneshot::channel();
            let asked = self.clone();
            let answered = async {
                ask.send(DepartureQuestion { asked, answer }).await.ok()?;
                answered.await.ok()
            };
            match timeout_at(until, answered).await {
                Ok(Some(LeavingOutcome::Gone)) => return Outcome::Gone,
                Ok(Some(LeavingOutcome::Bound)) => return Outcome::Bound,
                Ok(Some(LeavingOutcome::Last)) => return Outcome::Last,
                Ok(Some(LeavingOutcome::Unspecified)) => return Outcome::Busy,
                // The stream has ended.
                Ok(None) => sleep_until((Instant::now() + AGAIN).min(until)).await,
                Err(_) => return Outcome::Alone,
            }
        }
    }
}

/// Reads the head of a request; `None` if it is too long or not complete.
async fn read_head(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut head = Vec::with_capacity(512);
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = MAX_HEAD.checked_sub(head.len()).filter(|left| *left > 0)?;
        let read = (&mut *stream).take(left as u64).read_buf(&mut head).await;
        if read.ok()? == 0 {
            return None;
        }
    }
    Some(head)
}

/// Waits until the client has closed the connection.
async fn hung_up(stream: &mut TcpStream) {
    let mut rest = [0; 512];
    while stream.read(&mut rest).await.is_ok_and(|read| read > 0) {}
}

async fn respond(stream: &mut TcpStream, status: &str, text: &str) {
    let answer = format!(
        "HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n{text}",
        text.len()
    );
    // The client may have gone.
    let _ = timeout(PATIENCE, stream.write_all(answer.as_bytes())).await;
}

#[cfg(test)]
mod tests {
    use futures_util::future::join_all;

    use super::*;

    const BOUND: Duration = Duration::from_secs(10);

    fn answering() -> (Answering, mpsc::Receiver<DepartureQuestion>) {
        let (ask, questions) = mpsc::channel(1_000);
        let answering = Answering {
            within: BOUND,
            known: watch::channel(Known::default()).1,
            ask,
            counters: Arc::default(),
            problems: Problems::default(),
            pods: Mutex::default(),
        };
        (answering, questions)
    }

    fn pod(number: u8) -> Option<IpAddr> {
        Some([10, 244, 0, number].into())
    }

    fn asked(seconds: u64, port: u16) -> Asked {
        Asked {
            within: Some(Duration::from_secs(seconds)),
            port,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn hooks_of_a_pod_share_a_question_that_ends_with_them() {
        let (answering, mut questions) = answering();
        let began = Instant::now();
        let one = || answering.outcome(pod(1), asked(300, 0));
        let (outcomes, ()) = tokio::join!(join_all([one(), one(), one()]), async {
            let DepartureQuestion { asked, answer } = questions.recv().await.unwrap();
            assert_eq!(asked.addresses, [pod(1).unwrap()]);
            assert_eq!(asked.unless_terminating, BOUND);
            assert!(questions.try_recv().is_err());
            answer.send(LeavingOutcome::Gone).unwrap();
        });
        assert_eq!(outcomes, [Outcome::Gone; 3]);
        assert_eq!(began.elapsed(), Duration::ZERO);
        // Hooks that hang up, all at last.
        let mut waits = vec![Box::pin(one()), Box::pin(one())];
        assert!(waits.iter_mut().all(|wait| wait.now_or_never().is_none()));
        let question = questions.recv().await.unwrap();
        waits.pop();
        assert!(!question.answer.is_closed());
        waits.pop();
        assert!(question.answer.is_closed());
    }

    #[tokio::test(start_paused = true)]
    async fn each_hook_has_its_own_time() {
        let (answering, mut questions) = answering();
        let began = Instant::now();
        let timed = |seconds| {
            let outcome = answering.outcome(pod(1), asked(seconds, 0));
            async move { (outcome.await, began.elapsed().as_secs()) }
        };
        let all = async { tokio::join!(timed(20), timed(5), timed(60)) };
        let (all, ()) = tokio::join!(all, async {
            let first = questions.recv().await.unwrap();
            sleep_until(first.asked.until - SLACK / 10).await;
            first.answer.send(LeavingOutcome::Last).unwrap();
            let second = questions.recv().await.unwrap();
            assert_eq!(second.asked.until, began + Duration::from_secs(60));
            second.answer.send(LeavingOutcome::Gone).unwrap();
        });
        let (last, bound, gone) = (Outcome::Last, Outcome::Bound, Outcome::Gone);
        assert_eq!(all, ((last, 19), (bound, 5), (gone, 19)));
    }

    /// A Pod with very many hooks, or questions about many ports, does not end at once, and takes no place of other Pods.
    #[tokio::test(start_paused = true)]
    async fn a_hook_without_a_place_waits_for_its_time() {
        let (answering, mut questions) = answering();
        let began = Instant::now();
        let mut many: Vec<_> =
            (0..SHARE).map(|_| Box::pin(answering.outcome(pod(1), asked(300, 0)))).collect();
        let ports = (1..=8).map(|port| Box::pin(answering.outcome(pod(2), asked(300, port))));
        many.extend(ports);
        assert!(many.iter_mut().all(|wait| wait.now_or_never().is_none()));
        assert!(answering.problems.findings().is_empty());
        let timed = |pod, port| {
            let outcome = answering.outcome(pod, asked(7, port));
            async move { (outcome.await, began.elapsed().as_secs()) }
        };
        let busy = async { tokio::join!(timed(pod(1), 0), timed(pod(2), 9)) };
        let (busy, other, ()) = tokio::join!(busy, timed(pod(3), 0), async {
            while let Some(question) = questions.recv().await {
                if question.asked.addresses == [pod(3).unwrap()] {
                    return question.answer.send(LeavingOutcome::Gone).unwrap();
                }
            }
        });
        assert_eq!(other, (Outcome::Gone, 0));
        assert_eq!(busy, ((Outcome::Busy, 7), (Outcome::Busy, 7)));
        let found = answering.problems.findings();
        assert!(found[0].text.contains("no place"), "{found:?}");
        tokio::time::advance(Duration::from_secs(600)).await;
        assert!(answering.problems.findings().is_empty());
    }
}
