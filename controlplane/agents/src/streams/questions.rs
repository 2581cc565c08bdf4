//! Questions to one agent. It gets one at a time, so that a client with many questions costs every agent little.

use kplane_proto::v1 as pb;
use tokio::sync::{mpsc, oneshot};

use crate::fleet::Question;

/// Questions to one agent.
pub(super) struct AgentQuestions {
    waiting: mpsc::Receiver<Question>,
    asked: Option<(u64, oneshot::Sender<pb::Inspection>)>,
    last: u64,
}

impl AgentQuestions {
    pub(super) fn new(waiting: mpsc::Receiver<Question>) -> Self {
        Self {
            waiting,
            asked: None,
            last: 0,
        }
    }

    /// Returns the next question, once the last one is answered or its caller has gone. Safe to
    /// drop at any time.
    pub(super) async fn next(&mut self) -> pb::Inspect {
        if let Some((_, answer)) = &mut self.asked {
            answer.closed().await;
            self.asked = None;
        }
        loop {
            let Some(question) = self.waiting.recv().await else {
                return std::future::pending().await;
            };
            if question.answer.is_closed() {
                continue;
            }
            self.last += 1;
            self.asked = Some((self.last, question.answer));
            return pb::Inspect {
                token: self.last,
                ..pb::Inspect::clone(&question.inspect)
            };
        }
    }

    /// Handles the agent's answer. An answer that was not requested, or comes too late, is dropped.
    pub(super) fn answered(&mut self, inspection: pb::Inspection) {
        let asked = self.asked.take_if(|(token, _)| *token == inspection.token);
        if let Some((_, answer)) = asked {
            // The caller may have gone.
            let _ = answer.send(inspection);
        }
    }
}
