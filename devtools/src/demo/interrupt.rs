//! Ctrl-C: the signal only sets a flag, so that everything started can be ended in order.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind as Kind, signal};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Interval at which sleepers check the flag.
const TICK: Duration = Duration::from_millis(50);

/// The user asked the demo to end.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(crate) struct Interrupted;

/// Makes SIGINT, SIGTERM and SIGHUP set the flag instead of ending the process. Starts a thread.
pub(crate) fn watch() -> Result<()> {
    let runtime = Builder::new_current_thread().enable_io().build()?;
    let context = runtime.enter();
    for kind in [Kind::interrupt(), Kind::terminate(), Kind::hangup()] {
        let mut signal = signal(kind).context("catch Ctrl-C")?;
        runtime.spawn(async move {
            while signal.recv().await.is_some() {
                INTERRUPTED.store(true, Ordering::Relaxed);
            }
        });
    }
    drop(context);
    thread::spawn(move || runtime.block_on(std::future::pending::<()>()));
    Ok(())
}

/// Clears the flag, after the demo has reacted to it.
pub(crate) fn clear() {
    INTERRUPTED.store(false, Ordering::Relaxed);
}

/// Fails if the flag is set.
pub(crate) fn check() -> Result<(), Interrupted> {
    if INTERRUPTED.load(Ordering::Relaxed) { Err(Interrupted) } else { Ok(()) }
}

/// Sleeps until the time is over or the flag is set.
pub(crate) fn sleep(time: Duration) -> Result<(), Interrupted> {
    let end = Instant::now().checked_add(time);
    while end.is_none_or(|end| Instant::now() < end) {
        check()?;
        thread::sleep(TICK.min(time));
    }
    check()
}
