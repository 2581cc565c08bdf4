//! Puts the parts of an engine together, on its thread.

use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use super::Opener;
use super::core::Core;
use super::followers::Followers;
use kplane_dataplane::backend::{Description, OpenError, ProxyHandle};
use kplane_dataplane::conntrack::{Cleaner, ConntrackCounts};
use kplane_dataplane::plan::NodeSettings;
use kplane_dataplane::policy::Flow;

/// Opens the backend, and what works beside it in the thread's network namespace.
pub(super) fn assemble(
    open: Opener,
    settings: NodeSettings,
    followers: Followers,
    counts: ConntrackCounts,
    hand: mpsc::Sender<Vec<Flow>>,
) -> Result<(Core, ProxyHandle, Runtime), OpenError> {
    let backend = open()?;
    let proxy = backend.proxy.clone();
    let cleaner = cleaner(backend.description, counts)?;
    let cuts_denied = backend.cuts_denied;
    let mut core = Core::new(backend, settings, followers).with_conntrack(cleaner);
    if cuts_denied {
        let hand = move |lot| drop(hand.blocking_send(lot));
        let cut = core.cut_denied(Box::new(hand));
        cut.map_err(|error| cannot_start(&error.to_string()))?;
    }
    Ok((core, proxy, runtime()?))
}

pub(super) fn cannot_start(reason: &str) -> OpenError {
    OpenError {
        backend: "engine",
        reason: format!("cannot start: {reason}"),
    }
}

/// Starts the cleaner of conntrack entries that this backend makes stale, in the backend's namespace.
fn cleaner(backend: &Description, counts: ConntrackCounts) -> Result<Option<Cleaner>, OpenError> {
    if !backend.leaves_conntrack_entries {
        return Ok(None);
    }
    let cleaner = Cleaner::start(counts);
    cleaner.map(Some).map_err(|error| cannot_start(&error.to_string()))
}

/// Builds a runtime for the timers of the engine's thread and the kernel's notifications.
fn runtime() -> Result<Runtime, OpenError> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_time().enable_io().build();
    runtime.map_err(|error| cannot_start(&error.to_string()))
}
