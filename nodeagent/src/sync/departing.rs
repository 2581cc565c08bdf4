//! Questions about Pods that wait to end, on one stream.

use std::collections::{BTreeMap, VecDeque};

use kplane_proto::convert::ip_bytes;
use kplane_proto::v1 as pb;
use kplane_proto::v1::LeavingOutcome;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::departing::{DepartureQuestion, Questions};

/// Time before the end of a wait at which the control plane says what is missing, in milliseconds, so that the answer
/// arrives in time.
const MARGIN_MS: u32 = 100;

/// The questions of a stream. Those that have no answer when the stream ends are asked again on another one.
#[derive(Debug, Default)]
pub(super) struct Departing {
    asked: u64,
    due: VecDeque<pb::Leaving>,
    open: BTreeMap<u64, oneshot::Sender<LeavingOutcome>>,
}

impl Departing {
    /// Waits for a question.
    pub(super) async fn next(questions: &mut Option<Questions>) -> DepartureQuestion {
        let question = match questions {
            Some(questions) => questions.recv().await,
            None => None,
        };
        match question {
            Some(question) => question,
            None => std::future::pending().await,
        }
    }

    /// Takes a question that is to be sent.
    pub(super) fn ask(&mut self, question: DepartureQuestion) {
        // Some hooks no longer wait, and an older control plane answers none.
        self.open.retain(|_, answer| !answer.is_closed());
        let left = question.until.saturating_duration_since(Instant::now());
        let left = u32::try_from(left.as_millis()).unwrap_or(u32::MAX);
        if question.answer.is_closed() || left == 0 {
            return;
        }
        self.asked += 1;
        self.open.insert(self.asked, question.answer);
        let addresses = question.addresses.into_iter();
        self.due.push_back(pb::Leaving {
            token: self.asked,
            addresses: addresses.map(ip_bytes).collect(),
            port: question.port.into(),
            within_ms: left - MARGIN_MS.min(left / 10),
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
