//! Questions to one agent. It gets one at a time, so that a client with many questions costs every agent little; urgent ones
//! go beside that one.

use kplane_proto::v1 as pb;
use tokio::sync::{mpsc, oneshot};

use crate::fleet::Question;

/// Questions to one agent.
pub(super) struct AgentQuestions {
    urgent: Lane,
    others: Lane,
    /// The agent answers an urgent question beside another one.
    answers_both: bool,
    last: u64,
}

/// Questions that wait for each other.
struct Lane {
    waiting: mpsc::Receiver<Question>,
    asked: Option<(u64, oneshot::Sender<pb::Inspection>)>,
}

impl AgentQuestions {
    pub(super) fn new([urgent, others]: [mpsc::Receiver<Question>; 2], answers_both: bool) -> Self {
        let lane = |waiting| Lane {
            waiting,
            asked: None,
        };
        Self {
            urgent: lane(urgent),
            others: lane(others),
            answers_both,
            last: 0,
        }
    }

    /// Returns the next question, once the last one is answered or its caller has gone. Safe to
    /// drop at any time.
    pub(super) async fn next(&mut self) -> pb::Inspect {
        if !self.answers_both {
            self.urgent.is_free().await;
            self.others.is_free().await;
        }
        let token = self.last + 1;
        let next = tokio::select! {
            biased;
            next = self.urgent.next(token) => next,
            next = self.others.next(token) => next,
        };
        self.last = token;
        next
    }

    /// Handles the agent's answer. An answer that was not requested, or comes too late, is dropped.
    pub(super) fn answered(&mut self, inspection: pb::Inspection) {
        let is_asked = |asked: &mut (u64, _)| asked.0 == inspection.token;
        let of = [&mut self.urgent, &mut self.others]
            .into_iter()
            .find_map(|lane| lane.asked.take_if(is_asked));
        if let Some((_, answer)) = of {
            // The caller may have gone.
            let _ = answer.send(inspection);
        }
    }
}

impl Lane {
    /// Waits until the last question is answered, or its caller has gone.
    async fn is_free(&mut self) {
        if let Some((_, answer)) = &mut self.asked {
            answer.closed().await;
            self.asked = None;
        }
    }

    async fn next(&mut self, token: u64) -> pb::Inspect {
        self.is_free().await;
        loop {
            let Some(question) = self.waiting.recv().await else {
                return std::future::pending().await;
            };
            if question.answer.is_closed() {
                continue;
            }
            self.asked = Some((token, question.answer));
            return pb::Inspect {
                token,
                ..pb::Inspect::clone(&question.inspect)
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures_util::FutureExt as _;

    use super::*;
    use crate::fleet::lanes;

    /// A question that nobody has answered holds up no urgent one, unless the agent can answer one only.
    #[test]
    fn urgent_questions_go_beside_others() {
        for answers_both in [true, false] {
            let ([to_urgent, to_others], asked) = lanes();
            let mut questions = AgentQuestions::new(asked, answers_both);
            let ask = |urgent| {
                let (answer, answered) = oneshot::channel();
                let inspect = Arc::new(pb::Inspect {
                    urgent,
                    ..pb::Inspect::default()
                });
                let lane = if urgent { &to_urgent } else { &to_others };
                lane.try_send(Question { inspect, answer }).unwrap();
                answered
            };
            let mut first = ask(false);
            let question = questions.next().now_or_never().unwrap();
            let (mut second, mut urgent) = (ask(false), ask(true));
            let next = questions.next().now_or_never();
            assert_eq!(
                next.as_ref().map(|next| next.urgent),
                answers_both.then_some(true)
            );
            assert!(questions.next().now_or_never().is_none());
            let mut answer = |token| {
                questions.answered(pb::Inspection {
                    token,
                    ..pb::Inspection::default()
                });
                questions.next().now_or_never()
            };
            let next = answer(question.token).unwrap();
            assert!(first.try_recv().is_ok());
            assert_eq!(next.urgent, !answers_both);
            answer(next.token);
            let heard = if answers_both { &mut second } else { &mut urgent };
            assert!(heard.try_recv().is_ok());
        }
    }
}
