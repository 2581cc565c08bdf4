//! Turns of questions, so that many callers at once do not make replicas too slow: few questions about Services at a time,
//! and one about all nodes, which all callers share that came before it began.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep};

use super::Collected;

/// Time for which the pages of one list come from the same answers.
const PAGES: Duration = Duration::from_secs(5);
/// Maximum number of questions about Services at a time.
const SERVICES: usize = 4;
/// Maximum number of questions to agents at a time. Together they are fewer than a connection may have (16).
const AGENTS: usize = 8;

#[derive(Debug)]
pub(super) struct Turns {
    services: Semaphore,
    agents: Semaphore,
    nodes: tokio::sync::Mutex<()>,
    /// The latest answers about all nodes, and when the question began.
    latest: Mutex<Option<(Instant, Arc<Collected>)>>,
}

impl Default for Turns {
    fn default() -> Self {
        Self {
            services: Semaphore::new(SERVICES),
            agents: Semaphore::new(AGENTS),
            nodes: tokio::sync::Mutex::default(),
            latest: Mutex::default(),
        }
    }
}

impl Turns {
    /// Waits until a question about a Service may be asked.
    pub(super) async fn service(&self) -> Option<SemaphorePermit<'_>> {
        // It is never closed.
        self.services.acquire().await.ok()
    }

    /// Waits until a question to agents of other replicas may be asked.
    pub(super) async fn agents(&self) -> Option<SemaphorePermit<'_>> {
        self.agents.acquire().await.ok()
    }

    /// Asks about all nodes, unless another caller has asked since this one came.
    pub(super) async fn nodes(
        self: &Arc<Self>,
        ask: impl Future<Output = Collected>,
    ) -> Arc<Collected> {
        let came = Instant::now();
        let _turn = self.nodes.lock().await;
        let latest = self.lock().clone();
        if let Some((_, collected)) = latest.filter(|(began, _)| *began >= came) {
            return collected;
        }
        let began = Instant::now();
        let collected = Arc::new(ask.await);
        *self.lock() = Some((began, Arc::clone(&collected)));
        let turns = Arc::downgrade(self);
        tokio::spawn(async move {
            sleep(PAGES).await;
            if let Some(turns) = turns.upgrade() {
                turns.lock().take_if(|(at, _)| *at == began);
            }
        });
        collected
    }

    /// Returns the latest answers about all nodes, if that is not too long ago.
    pub(super) fn latest(&self) -> Option<Arc<Collected>> {
        let latest = self.lock();
        let (_, collected) = latest.as_ref()?;
        Some(Arc::clone(collected))
    }

    fn lock(&self) -> MutexGuard<'_, Option<(Instant, Arc<Collected>)>> {
        // The value is replaced as a whole.
        self.latest.lock()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn callers_at_once_share_a_question_that_began_after_they_came() {
        let (turns, asked) = (Arc::new(Turns::default()), AtomicUsize::new(0));
        let ask = async || {
            asked.fetch_add(1, Ordering::Relaxed);
            sleep(Duration::from_millis(100)).await;
            Collected::default()
        };
        let first = turns.nodes(ask());
        let later = async {
            // The first question has begun, and may know less than these callers want.
            sleep(Duration::from_millis(50)).await;
            join_all((0..50).map(|_| turns.nodes(ask()))).await
        };
        let (first, later) = tokio::join!(first, later);
        assert_eq!(asked.load(Ordering::Relaxed), 2);
        assert!(later.iter().all(|one| Arc::ptr_eq(one, &later[0])));
        assert!(!Arc::ptr_eq(&first, &later[0]));
        assert!(turns.latest().is_some());
        sleep(PAGES * 2).await;
        assert!(turns.latest().is_none(), "the memory is given back");
    }
}
