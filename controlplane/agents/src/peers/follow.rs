//! Watches that share one question to the other replicas. The question is asked again and again while there is a watch,
//! and not otherwise.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kplane_model::ServiceName;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

use super::{Collected, PATIENCE, PeerQuestion, Peers};

/// Minimum time between two questions to the replicas.
const PAUSE: Duration = Duration::from_millis(100);
/// Part of the time that answers may take: one part in this many.
const SHARE: u32 = 5;
/// Time after which answers come whole again, so that states which depend on the time stay current.
const WHOLE: Duration = Duration::from_secs(2);
/// Maximum number of different Services that are watched.
const MAX_SERVICES: usize = 1_024;

/// The subject of a watch; `None` = all nodes.
type Subject = Option<ServiceName>;

/// The common state of all watches.
#[derive(Debug, Default)]
pub(super) struct SharedWatches(Mutex<Watched>);

#[derive(Debug, Default)]
struct Watched {
    /// The number of watches of each subject.
    subjects: BTreeMap<Subject, usize>,
    polling: Option<Polling>,
}

/// The task that asks, and its latest answers. The task ends with the value.
#[derive(Debug)]
struct Polling {
    task: AbortHandle,
    latest: watch::Receiver<Arc<Collected>>,
}

impl Polling {
    fn start(peers: &Arc<Peers>) -> Self {
        let (publish, latest) = watch::channel(Arc::default());
        let task = tokio::spawn(poll(Arc::downgrade(peers), publish)).abort_handle();
        Self { task, latest }
    }
}

impl Drop for Polling {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl SharedWatches {
    fn lock(&self) -> MutexGuard<'_, Watched> {
        // Counts are changed as a whole.
        self.0.lock()
    }

    /// Returns the question of all watches together.
    fn question(&self) -> PeerQuestion {
        let watched = self.lock();
        PeerQuestion {
            statuses: watched.subjects.contains_key(&None),
            services: watched.subjects.keys().flatten().cloned().collect(),
        }
    }
}

/// A watch's share in the questions. Dropping it ends them if it was the last.
#[derive(Debug)]
pub struct Following {
    peers: Arc<Peers>,
    subject: Subject,
    question: PeerQuestion,
    changes: watch::Receiver<Arc<Collected>>,
    current: Arc<Collected>,
}

impl Following {
    /// Begins to follow all nodes, or one Service. The first answers are there when this returns, after a second at most.
    /// `None` when too many different Services are watched.
    pub async fn begin(peers: &Arc<Peers>, subject: Subject) -> Option<Self> {
        let question = match &subject {
            None => PeerQuestion::nodes(),
            Some(service) => PeerQuestion::service(service.clone()),
        };
        let changes = {
            let mut watched = peers.shared.lock();
            if watched.subjects.len() >= MAX_SERVICES && !watched.subjects.contains_key(&subject) {
                return None;
            }
            *watched.subjects.entry(subject.clone()).or_default() += 1;
            let polling = watched.polling.get_or_insert_with(|| Polling::start(peers));
            polling.latest.clone()
        };
        let mut following = Self {
            peers: Arc::clone(peers),
            subject,
            question,
            changes,
            current: Arc::default(),
        };
        following.current = match &following.subject {
            None => peers.nodes().await,
            Some(service) => Arc::new(peers.service(service).await),
        };
        Some(following)
    }

    /// Returns the latest answers.
    pub fn latest(&mut self) -> Arc<Collected> {
        let latest = Arc::clone(&self.changes.borrow_and_update());
        let mut answers = latest.answers.iter();
        // The first answers for others do not know this subject.
        if latest.replicas() > 0 && answers.all(|answer| answer.question.covers(&self.question)) {
            self.current = latest;
        }
        Arc::clone(&self.current)
    }

    /// Waits for other answers.
    pub async fn changed(&mut self) {
        if self.changes.changed().await.is_err() {
            // The task has panicked. The answers stay as they are.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let mut watched = self.peers.shared.lock();
        if let Some(count) = watched.subjects.get_mut(&self.subject) {
            *count -= 1;
            if *count == 0 {
                watched.subjects.remove(&self.subject);
            }
        }
        if watched.subjects.is_empty() {
            watched.polling = None;
        }
    }
}

/// Asks the replicas until it is aborted.
async fn poll(peers: Weak<Peers>, publish: watch::Sender<Arc<Collected>>) {
    let mut whole = Instant::now();
    let mut before = Arc::<Collected>::default();
    loop {
        let Some(peers) = peers.upgrade() else {
            return;
        };
        let question = peers.shared.question();
        let started = Instant::now();
        if whole.elapsed() >= WHOLE {
            (whole, before) = (started, Arc::default());
        }
        let latest = Arc::new(peers.collect_after(&question, &before).await);
        let took = started.elapsed();
        if !is_same(&before, &latest) {
            publish.send_replace(Arc::clone(&latest));
        }
        before = latest;
        drop(peers);
        // A replica that does not answer takes time and no work.
        let work = if took < PATIENCE { took * SHARE } else { PAUSE };
        sleep(work.max(PAUSE)).await;
    }
}

/// Returns whether no replica has said anything new.
fn is_same(before: &Collected, latest: &Collected) -> bool {
    before.missing == latest.missing
        && before.answers.len() == latest.answers.len()
        && before
            .answers
            .iter()
            .zip(&latest.answers)
            .all(|(before, latest)| Arc::ptr_eq(before, latest))
}
