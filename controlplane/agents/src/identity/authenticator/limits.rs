//! Limits of callers of the status API: their questions, and their watches.

use std::time::Duration;

use futures_util::future::OptionFuture;
use kplane_util::buckets::Rate;
use tokio::sync::mpsc;
use tonic::Status;

use super::super::watches::{Full, WatchPermit};
use super::super::{Refusal, RefusalReason};
use super::Caller;
use crate::connection_limits::network;

/// Questions of a caller to the status API: an answer about a small fleet costs 1.
pub(super) const QUESTIONS: Rate = Rate {
    burst: 2_000,
    refill: Duration::from_millis(2),
};
/// Most callers whose questions are counted; further ones share theirs.
pub(super) const MAX_CALLERS: usize = 1_024;

impl Caller {
    /// Charges the caller for a question to the status API. Questions cost more where answers are large, or where
    /// agents are asked.
    ///
    /// # Errors
    /// [`Refusal`] when the caller asked too much in the last seconds.
    pub fn charge(&self, cost: u32) -> Result<(), Refusal> {
        let mut questions = self.authenticator.questions.lock();
        let Err(wait) = questions.take(self.caller(), cost) else {
            return Ok(());
        };
        drop(questions);
        let text = format!("too many questions; ask again in {} ms", wait.as_millis());
        let refusal = Refusal::new(RefusalReason::TooMuch, text);
        self.refused("ask", &refusal);
        Err(refusal)
    }

    /// Returns the name under which the caller's questions and watches are counted.
    fn caller(&self) -> String {
        match self.name() {
            Some(name) => name.to_owned(),
            None => network(self.connection.peer().ip()).to_string(),
        }
    }

    /// Takes the right to one more watch, until the value is dropped.
    ///
    /// # Errors
    /// [`Refusal`] when there are too many watches, or too many of this caller.
    pub fn watch(&self) -> Result<WatchPermit, Refusal> {
        self.authenticator.watches.begin(self.caller()).map_err(|full| {
            let text = match full {
                Full::All => {
                    "too many watches are open; see --max-watches of the control plane, or ask without a watch"
                }
                Full::Caller => {
                    "this caller has half of all watches that may be open; close some, or see --max-watches of the \
                     control plane"
                }
            };
            let refusal = Refusal::new(RefusalReason::TooMuch, text);
            self.refused("watch", &refusal);
            refusal
        })
    }
}

/// Starts a watch, which ends with the caller's credential. A caller in the same process has none.
///
/// # Errors
/// [`Refusal`] when there are too many watches.
pub fn spawn_watch<T: Send + 'static>(
    caller: Option<Caller>,
    outbox: mpsc::Sender<Result<T, Status>>,
    watch: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Refusal> {
    let permit = caller.as_ref().map(Caller::watch).transpose()?;
    let ended = caller.map(|caller| async move { caller.ended().await });
    let ended = OptionFuture::from(ended);
    tokio::spawn(async move {
        tokio::select! {
            () = watch => {}
            Some(refusal) = ended => drop(outbox.send(Err(refusal.into())).await),
        }
        drop(permit);
    });
    Ok(())
}
