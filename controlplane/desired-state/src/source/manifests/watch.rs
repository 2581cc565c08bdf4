//! The edge to the file system: detects changes through inotify, reads changed files, and sends
//! batches.
//!
//! A file is read when its writer has closed it or renamed it into place, never in between. Its
//! content counts only if no write was seen meanwhile.

use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use futures_util::{FutureExt, StreamExt};
use inotify::{EventOwned, EventStream, Inotify};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, interval, timeout_at};

use super::folder::Root;
use super::view::FolderView;
use crate::source::{Batch, Event, SourceError};

/// Interval at which the source reports that it is alive, and scans places without events.
const ALIVE_EVERY: Duration = Duration::from_secs(5);
/// Silence after which related events are complete: editors and `kubectl` rename and write within a
/// millisecond.
const QUIET: Duration = Duration::from_millis(2);
/// Time for the event of a write to arrive: the kernel queues it right after the write, and the
/// runtime learns of it with its next timer at the latest.
const SETTLE: Duration = Duration::from_millis(1);
/// Maximum time for which events are gathered.
const GATHER_AT_MOST: Duration = Duration::from_millis(20);
/// Size of the event buffer in bytes: an event with a name of 255 bytes takes 272, so 240 of them
/// fit.
const EVENT_BUFFER_BYTES: usize = 64 << 10;

type Events = EventStream<Vec<u8>>;

/// Watches a folder or file until `sink` is closed.
pub(super) async fn run(path: &Path, sink: mpsc::Sender<Batch>) -> Result<(), SourceError> {
    let unreadable = |source| SourceError::Unreadable {
        path: path.display().to_string(),
        source,
    };
    let unwatchable = |source| SourceError::Unwatchable {
        path: path.display().to_string(),
        source,
    };
    let root = open(path).await.map_err(unreadable)?;
    let inotify = Inotify::init().map_err(unwatchable)?;
    let mut view = FolderView::new(root, inotify.watches());
    let buffer = vec![0; EVENT_BUFFER_BYTES];
    let mut events = inotify.into_event_stream(buffer).map_err(unwatchable)?;

    let observed_at = SystemTime::now();
    view.start(path)?;
    let (mut view, _) = look(view, &mut events).await;
    if !send(&sink, view.catalog.snapshot(), observed_at).await {
        return Ok(());
    }
    let mut alive = interval(ALIVE_EVERY);
    alive.reset();
    loop {
        let observed_at = tokio::select! {
            () = sink.closed() => return Ok(()),
            _ = alive.tick() => {
                if !send(&sink, vec![Event::Alive], SystemTime::now()).await {
                    return Ok(());
                }
                view.poll();
                SystemTime::now()
            }
            event = events.next(), if view.has_nothing_pending() => {
                note(&mut view, event);
                SystemTime::now()
            }
            () = std::future::ready(()), if !view.has_nothing_pending() => SystemTime::now(),
        };
        if view.has_nothing_pending() {
            continue;
        }
        gather(&mut view, &mut events).await;
        let (back, reported) = look(view, &mut events).await;
        view = back;
        if !reported.is_empty() && !send(&sink, reported, observed_at).await {
            return Ok(());
        }
    }
}

/// Opens the root at a path, on a thread that the end of the process does not wait for.
async fn open(path: &Path) -> io::Result<Root> {
    let path = path.to_owned();
    let opened = tokio::task::spawn_blocking(move || Root::at(&path)).await;
    opened.unwrap_or_else(|error| Err(io::Error::other(error)))
}

/// Sends the content of standard input, once.
pub(super) async fn run_stdin(sink: mpsc::Sender<Batch>) -> Result<(), SourceError> {
    // This needs a thread outside of the runtime, which could not shut down while a read from a
    // terminal waits.
    let (done, loaded) = oneshot::channel();
    std::thread::spawn(move || drop(done.send(super::load_stdin())));
    let loaded = tokio::select! {
        () = sink.closed() => return Ok(()),
        loaded = loaded => loaded.unwrap_or_else(|_| Err(io::ErrorKind::Interrupted.into())),
    };
    let catalog = loaded.map_err(|source| SourceError::Unreadable {
        path: super::STDIN_NAME.to_owned(),
        source,
    })?;
    let mut events = catalog.snapshot();
    let mut alive = interval(ALIVE_EVERY);
    loop {
        alive.tick().await;
        if !send(
            &sink,
            std::mem::replace(&mut events, vec![Event::Alive]),
            SystemTime::now(),
        )
        .await
        {
            return Ok(());
        }
    }
}

/// Sends a batch; returns false when the consumer has gone.
async fn send(sink: &mpsc::Sender<Batch>, events: Vec<Event>, observed_at: SystemTime) -> bool {
    let batch = Batch {
        events,
        observed_at,
    };
    sink.send(batch).await.is_ok()
}

fn note(view: &mut FolderView, event: Option<io::Result<EventOwned>>) {
    match event {
        Some(Ok(event)) => view.note(&event),
        // An error counts as a loss of events, which it may be.
        Some(Err(_)) | None => view.note_loss(),
    }
}

/// Waits for related events, such as both halves of a rename.
async fn gather(view: &mut FolderView, events: &mut Events) {
    let deadline = Instant::now() + GATHER_AT_MOST;
    while let Ok(event) = timeout_at(deadline.min(Instant::now() + QUIET), events.next()).await {
        note(view, event);
        if Instant::now() >= deadline {
            return;
        }
    }
}

/// Handles all events up to this moment, including events that have not reached the runtime yet.
async fn catch_up(view: &mut FolderView, events: &mut Events) {
    let settled = Instant::now() + SETTLE;
    while Instant::now() < settled
        && let Ok(event) = timeout_at(settled, events.next()).await
    {
        note(view, event);
    }
    while let Some(event) = events.next().now_or_never() {
        note(view, event);
    }
}

/// Reads what is pending and returns the differences. Runs on a thread for blocking work: a large
/// file takes a second to parse.
async fn look(view: FolderView, events: &mut Events) -> (FolderView, Vec<Event>) {
    let (mut view, read) = blocking(view, FolderView::read_pending).await;
    // After this, all writes during the read are known; content read from these files is discarded.
    catch_up(&mut view, events).await;
    blocking(view, move |view| view.accept(read)).await
}

async fn blocking<T: Send + 'static>(
    mut view: FolderView,
    work: impl FnOnce(&mut FolderView) -> T + Send + 'static,
) -> (FolderView, T) {
    let work = move || {
        let result = work(&mut view);
        (view, result)
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down: there will be no other poll.
            Err(_) => std::future::pending().await,
        },
    }
}
