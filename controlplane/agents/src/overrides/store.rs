//! The orders in force, for all who need them, and the task that follows their document.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kplane_model::{Issue, NodeName, ObjectRef, Reason, Severity};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{error, info, warn};

use super::backend::{Backend, Unchanged};
use super::{Approval, Change, Override, Overrides, Wish};

/// Interval between two readings of the document.
const LOOK: Duration = Duration::from_secs(1);
/// Time after which agents get updates although the document could not be read since the start.
const PATIENCE: Duration = Duration::from_secs(30);

/// The orders in force; `None` until the document was read.
#[derive(Debug)]
pub struct OverrideStore {
    overrides: watch::Sender<Option<Arc<Overrides>>>,
    place: OnceLock<Backend>,
    /// The problem with the document.
    trouble: Mutex<Option<(Reason, String)>>,
    /// The reason why no order could be written.
    unwritable: Mutex<Option<String>>,
}

/// Creates a store without orders and without a place to keep any.
impl Default for OverrideStore {
    fn default() -> Self {
        Self {
            overrides: watch::Sender::new(Some(Arc::default())),
            place: OnceLock::new(),
            trouble: Mutex::default(),
            unwritable: Mutex::default(),
        }
    }
}

impl OverrideStore {
    /// Sets the place of the document. The orders are unknown from now until `follow` has read it.
    pub fn keep_in(&self, place: Backend) {
        if self.place.set(place).is_ok() {
            self.overrides.send_replace(None);
        }
    }

    /// Returns a receiver of the orders.
    pub fn changes(&self) -> watch::Receiver<Option<Arc<Overrides>>> {
        self.overrides.subscribe()
    }

    /// Returns the order that freezes a node.
    pub fn frozen(&self, node: &NodeName) -> Option<Override> {
        self.overrides.borrow().as_ref()?.frozen(node).cloned()
    }

    /// Returns the problem with the document, if there is one.
    pub fn issue(&self) -> Option<Issue> {
        let place = self.place.get().map(Backend::to_string).unwrap_or_default();
        let issue =
            |code, reason| Issue::error(code, ObjectRef::new("Orders", "", ""), reason).at(place);
        if let Some((code, reason)) = self.trouble.lock().clone() {
            return Some(issue(code, reason));
        }
        let why = self.unwritable.lock().clone()?;
        let text = format!("kpctl freeze would fail: {why}");
        Some(Issue {
            severity: Severity::Warning,
            ..issue(Reason::OrdersUnreadable, text)
        })
    }

    /// Follows the document until the control plane ends.
    pub async fn follow(&self) {
        let Some(place) = self.place.get() else {
            return;
        };
        let begun = Instant::now();
        let mut was_older = false;
        loop {
            let known = self.overrides.borrow().is_some();
            let read = place.read().await;
            let older = match &read {
                Ok(Some(read)) => {
                    self.overrides.borrow().as_ref().and_then(|now| now.outdated(read))
                }
                _ => None,
            };
            let is_older = older.is_some();
            match read {
                Ok(Some(overrides)) => match older {
                    None => self.take(overrides),
                    Some(why) if was_older => self.complain(Reason::OrdersOlder, &why, known),
                    // An order of this replica may have been written since the document was read.
                    Some(_) => {}
                },
                Ok(None) => self.missing(),
                Err(trouble) => {
                    let why = trouble.to_string();
                    self.complain(Reason::OrdersUnreadable, &why, known);
                    if !known && (trouble.is_final() || begun.elapsed() > PATIENCE) {
                        self.overrides.send_replace(Some(Arc::default()));
                    }
                }
            }
            was_older = is_older;
            self.check_place(place).await;
            sleep(LOOK).await;
        }
    }

    /// Checks that orders can be written, before an operator gives one. The log says once that they cannot.
    async fn check_place(&self, place: &Backend) {
        let why = place.unwritable().await.map(|trouble| trouble.to_string());
        let mut known = self.unwritable.lock();
        if known.is_none()
            && let Some(why) = why.as_ref()
        {
            warn!("cannot write orders of operators, so kpctl freeze would fail: {why}");
        }
        *known = why;
    }

    /// Puts a new order in force, for all replicas.
    ///
    /// # Errors
    /// [`Unchanged`]: nothing has changed, unless it is unsure.
    pub async fn order(&self, wish: &Wish) -> Result<(), Unchanged> {
        self.change(Change::Override(wish.clone())).await
    }

    /// Puts an approval in force, for all replicas.
    ///
    /// # Errors
    /// [`Unchanged`]: other replicas do not learn of it.
    pub async fn approve(&self, approval: Approval) -> Result<(), Unchanged> {
        self.change(Change::Approve(approval)).await
    }

    async fn change(&self, change: Change) -> Result<(), Unchanged> {
        let place = self.place.get().ok_or(Unchanged::NoPlace)?;
        let in_force = self.overrides.borrow().clone().unwrap_or_default();
        let overrides = place.change(&in_force, &change).await?;
        self.take(overrides);
        Ok(())
    }

    /// Returns the place of the document.
    pub fn backend(&self) -> Option<&Backend> {
        self.place.get()
    }

    /// Puts the orders of a document in force.
    pub fn take(&self, overrides: Overrides) {
        if self.trouble.lock().take().is_some() {
            info!("the document with the orders of operators is whole again");
        }
        self.overrides.send_if_modified(|now| {
            let is_news = now.as_deref() != Some(&overrides);
            if is_news {
                *now = Some(Arc::new(overrides));
            }
            is_news
        });
    }

    /// Keeps the orders of a document that is gone: absence is not deletion. Without orders, there need not be one.
    fn missing(&self) {
        let in_force = self.overrides.borrow().clone().unwrap_or_default();
        if in_force.is_empty() {
            self.take(Overrides::default());
        } else {
            let why = "the document is gone; its orders stay in force until this process ends. `kpctl freeze` or \
                       `kpctl thaw` writes it again";
            self.complain(Reason::OrdersUnreadable, why, true);
        }
    }

    fn complain(&self, code: Reason, why: &str, known: bool) {
        let mut trouble = self.trouble.lock();
        if trouble.as_ref().is_some_and(|(_, reported)| reported == why) {
            return;
        }
        if known {
            error!("cannot use the orders of operators; those read before stay in force: {why}");
        } else {
            error!(
                "cannot use the orders of operators (kpctl freeze); nodes that they freeze may get updates: {why}"
            );
        }
        *trouble = Some((code, why.to_owned()));
    }
}
