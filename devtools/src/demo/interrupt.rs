//! Ctrl-C: the signal only sets a flag, so that everything started can be ended in order.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};

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
    let kinds = [
        SignalKind::interrupt(),
        SignalKind::terminate(),
        SignalKind::hangup(),
    ];
    let signals: Vec<Signal> = {
        let _context = runtime.enter();
        kinds
            .into_iter()
            .map(signal)
            .collect::<Result<_, _>>()
            .context("catch Ctrl-C")?
    };
    for mut signal in signals {
        runtime.spawn(async move {
            while signal.recv().await.is_some() {
                INTERRUPTED.store(true, Ordering::Relaxed);
            }
        });
    }
    let forever = move || runtime.block_on(std::future::pending::<()>());
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(forever)
        .context("start a thread")?;
    Ok(())
}

/// Returns whether the flag is set.
pub(crate) fn is_set() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Clears the flag, after the demo has reacted to it.
pub(crate) fn clear() {
    INTERRUPTED.store(false, Ordering::Relaxed);
}

/// Fails if the flag is set.
pub(crate) fn check() -> Result<(), Interrupted> {
    if is_set() { Err(Interrupted) } else { Ok(()) }
}

/// Sleeps until the time is over or the flag is set.
pub(crate) fn sleep(time: Duration) -> Result<(), Interrupted> {
    let end = Instant::now() + time;
    loop {
        check()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(TICK));
    }
}
