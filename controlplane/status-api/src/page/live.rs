//! Sheets that change while a browser shows them: each is rendered once for all its viewers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::answers::AnswerSources;
use super::html::Section;
use super::sheet::Sheet;

/// Shortest time between two renderings of a sheet.
const PAUSE: Duration = Duration::from_secs(1);
/// Share of one CPU that rendering a sheet may take, as 1/n.
const SHARE: u32 = 20;
/// Maximum number of different sheets that change at a time.
const SHEETS: usize = 64;

/// What is on a sheet; `None` = it is gone.
pub(super) type Content = Option<Arc<Vec<Section>>>;

/// The sheets that have viewers.
#[derive(Debug, Default)]
pub(super) struct Live(Mutex<HashMap<Sheet, watch::Receiver<Content>>>);

impl Live {
    /// Follows a sheet; `None` if too many different ones are followed.
    pub(super) fn follow(
        self: &Arc<Self>,
        answers: &Arc<AnswerSources>,
        sheet: &Sheet,
    ) -> Option<watch::Receiver<Content>> {
        let mut sheets = self.0.lock();
        // A task that has ended leaves a channel without a sender.
        sheets.retain(|_, content| content.has_changed().is_ok());
        let len = sheets.len();
        match sheets.entry(sheet.clone()) {
            Entry::Occupied(known) => Some(known.get().clone()),
            Entry::Vacant(_) if len >= SHEETS => None,
            Entry::Vacant(new) => {
                let (sender, receiver) = watch::channel(Some(Arc::default()));
                new.insert(receiver.clone());
                let task = render(Arc::clone(self), Arc::clone(answers), sheet.clone(), sender);
                tokio::spawn(task);
                Some(receiver)
            }
        }
    }

    /// Forgets a sheet without viewers; returns false if it has some.
    fn forget(&self, sheet: &Sheet, sender: &watch::Sender<Content>) -> bool {
        let mut sheets = self.0.lock();
        // The one in the table.
        let alone = sender.receiver_count() <= 1;
        if alone {
            sheets.remove(sheet);
        }
        alone
    }
}

/// Renders a sheet for as long as it has viewers.
async fn render(
    live: Arc<Live>,
    answers: Arc<AnswerSources>,
    sheet: Sheet,
    sender: watch::Sender<Content>,
) {
    while !live.forget(&sheet, &sender) {
        let start = Instant::now();
        let content = answers.sections(&sheet, None).await.ok().map(Arc::new);
        sender.send_if_modified(|last| {
            let changed = *last != content;
            if changed {
                *last = content;
            }
            changed
        });
        // Without viewers there is nothing to wait for.
        let pause = PAUSE.max(start.elapsed() * SHARE);
        tokio::select! {
            () = sleep(pause) => {}
            () = answers.hub.shutdown().cancelled() => return,
        }
    }
}
