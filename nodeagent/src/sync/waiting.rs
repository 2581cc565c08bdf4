//! Updates that wait for the engine.
//!
//! The stream is read while the kernel is busy, so that the engine can take everything that came meanwhile at once.
//! What waited in the buffers of the connection instead would be programmed one by one.

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesOrdered;
use tokio::sync::mpsc::OwnedPermit;

use crate::desired::{Refusal, Update};
use crate::engine::{Command, Engine, Stopped, command};

/// Number of changed objects that may wait. With so many, the stream is not read, and the control plane joins the
/// updates that follow.
const MAX_CHANGES: usize = 10_000;

/// The engine's answer to an update.
pub(super) type UpdateResult = Result<Result<(), Refusal>, Stopped>;

/// An answer to come, with the number of objects that the update changes.
type UpdateAnswer = BoxFuture<'static, (usize, UpdateResult)>;

#[derive(Default)]
pub(super) struct Waiting {
    /// The place of the next update in the engine's queue.
    place: Option<OwnedPermit<Command>>,
    answers: FuturesOrdered<UpdateAnswer>,
    changes: usize,
}

impl Waiting {
    /// Returns whether no update waits.
    pub(super) fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }

    /// Returns whether an update may be read from the stream.
    pub(super) fn has_room(&self) -> bool {
        self.place.is_some() && self.changes < MAX_CHANGES
    }

    /// Waits for the engine's next answer, or for a place in its queue, which is `None`. Safe to drop at any time.
    pub(super) async fn next(&mut self, engine: &Engine) -> Option<UpdateResult> {
        tokio::select! {
            biased;
            Some((changes, taken)) = self.answers.next() => {
                self.changes -= changes;
                Some(taken)
            }
            place = engine.place(), if self.place.is_none() => match place {
                Ok(place) => {
                    self.place = Some(place);
                    None
                }
                Err(stopped) => Some(Err(stopped)),
            },
            else => std::future::pending().await,
        }
    }

    /// Hands an update to the engine, in the place that [`Waiting::next`] took.
    pub(super) fn push(&mut self, update: Update) {
        let Some(place) = self.place.take() else {
            return;
        };
        let changes = update.changes.len();
        self.changes += changes;
        let (command, answer) = command(update);
        place.send(command);
        self.answers.push_back(Box::pin(async move {
            (changes, answer.await.map_err(|_| Stopped))
        }));
    }
}
