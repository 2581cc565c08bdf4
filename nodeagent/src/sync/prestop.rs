//! Questions about Pods that wait to end, on one stream.

use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use kplane_proto::convert::ip_bytes;
use kplane_proto::v1 as pb;
use kplane_proto::v1::LeavingOutcome;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::prestop::{DepartureQuestion, Questions};

/// Time before the end of a wait at which the control plane says what is missing, in milliseconds, so that the answer
/// arrives in time.
const MARGIN_MS: u32 = 100;

/// The questions of a stream. Those that have no answer when the stream ends are asked again on another one.
#[derive(Debug, Default)]
pub(super) struct Prestop {
    asked: u64,
    due: VecDeque<pb::Leaving>,
    open: BTreeMap<u64, oneshot::Sender<LeavingOutcome>>,
}

impl Prestop {
    /// Waits until a question is to be sent, or one is withdrawn because its hooks no longer wait.
    pub(super) async fn next(&mut self, questions: &mut Option<Questions>) {
        poll_fn(|context| {
            let closed: Vec<u64> = self
                .open
                .iter_mut()
                .filter_map(|(token, answer)| {
                    answer.poll_closed(context).is_ready().then_some(*token)
                })
                .collect();
            if !closed.is_empty() {
                closed.into_iter().for_each(|token| self.withdraw(token));
                return Poll::Ready(());
            }
            match questions.as_mut().map(|all| all.poll_recv(context)) {
                Some(Poll::Ready(Some(question))) => {
                    self.ask(question);
                    Poll::Ready(())
                }
                _ => Poll::Pending,
            }
        })
        .await;
    }

    fn withdraw(&mut self, token: u64) {
        self.open.remove(&token);
        let waiting = self.due.len();
        self.due.retain(|leaving| leaving.token != token);
        if self.due.len() == waiting {
            self.due.push_back(pb::Leaving {
                token,
                withdrawn: true,
                ..pb::Leaving::default()
            });
        }
    }

    /// Takes a question that is to be sent.
    fn ask(&mut self, DepartureQuestion { asked, answer }: DepartureQuestion) {
        let left = asked.until.saturating_duration_since(Instant::now());
        let left = millis(left);
        if answer.is_closed() || left == 0 {
            return;
        }
        self.asked += 1;
        self.open.insert(self.asked, answer);
        self.due.push_back(pb::Leaving {
            token: self.asked,
            addresses: asked.addresses.into_iter().map(ip_bytes).collect(),
            port: asked.port.into(),
            within_ms: left - MARGIN_MS.min(left / 10),
            unless_terminating_ms: millis(asked.unless_terminating),
            withdrawn: false,
        });
    }

    /// Returns whether a question is to be sent.
    pub(super) fn is_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// Returns the next question to send.
    pub(super) fn take(&mut self) -> Option<pb::Leaving> {
        self.due.pop_front()
    }

    /// Takes an answer.
    pub(super) fn answered(&mut self, left: pb::Left) {
        if let Some(answer) = self.open.remove(&left.token) {
            // The hook may not wait any longer.
            let _ = answer.send(left.outcome());
        }
    }
}

fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::sync::mpsc;

    use super::*;
    use crate::prestop::DepartureAsked;

    #[tokio::test]
    async fn a_question_whose_hooks_hang_up_is_withdrawn() {
        let (ask, questions) = mpsc::channel(3);
        let mut questions = Some(questions);
        let mut prestop = Prestop::default();
        let mut hooks = Vec::new();
        for second in 1..=3 {
            let (answer, answered) = oneshot::channel();
            let asked = DepartureAsked {
                addresses: vec![[10, 0, 0, 1].into()],
                port: 0,
                until: Instant::now() + Duration::from_secs(300),
                unless_terminating: Duration::from_secs(second),
            };
            let question = DepartureQuestion { asked, answer };
            ask.send(question).await.unwrap();
            prestop.next(&mut questions).await;
            hooks.push(answered);
        }
        let sent = prestop.take().unwrap();
        assert_eq!((sent.token, sent.unless_terminating_ms), (1, 1_000));
        assert!(prestop.next(&mut questions).now_or_never().is_none());
        // One that was sent, and one that was not.
        hooks.drain(..2);
        prestop.next(&mut questions).await;
        let rest: Vec<_> = std::iter::from_fn(|| prestop.take()).collect();
        let rest: Vec<_> = rest.iter().map(|of| (of.token, of.withdrawn)).collect();
        assert_eq!(rest, [(3, false), (1, true)]);
        let gone = LeavingOutcome::Gone.into();
        for token in [1, 3] {
            prestop.answered(pb::Left {
                token,
                outcome: gone,
            });
        }
        assert_eq!(hooks.remove(0).await, Ok(LeavingOutcome::Gone));
    }
}
