//! Puts the parts of an engine together, on its thread.

use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use super::Opener;
use super::core::Core;
use super::followers::Followers;
use kplane_dataplane::backend::{OpenError, ProxyHandle};
use kplane_dataplane::conntrack::{AnyFlow, ConntrackCounts, Sweeper};
use kplane_dataplane::plan::NodeSettings;

/// Opens the backend, and what works beside it in the thread's network namespace.
pub(super) fn assemble(
    open: Opener,
    settings: NodeSettings,
    followers: Followers,
    counts: ConntrackCounts,
    hand: mpsc::Sender<Vec<AnyFlow>>,
) -> Result<(Core, ProxyHandle, Runtime), OpenError> {
    let backend = open()?;
    let proxy = backend.proxy.clone();
    let (leaves_entries, cuts_denied) = (
        backend.description.leaves_conntrack_entries,
        backend.cuts_denied,
    );
    let mut core = Core::new(backend, settings, followers);
    if leaves_entries {
        let hand = move |lot| drop(hand.blocking_send(lot));
        let sweeper = Sweeper::start(counts, Box::new(hand))
            .map_err(|error| cannot_start(&error.to_string()))?;
        if cuts_denied {
            core.cut_denied(sweeper.clone());
        }
        core.delete_stale(sweeper);
    }
    Ok((core, proxy, runtime()?))
}

pub(super) fn cannot_start(reason: &str) -> OpenError {
    OpenError {
        backend: "engine",
        reason: format!("cannot start: {reason}"),
    }
}

/// Builds a runtime for the timers of the engine's thread and the kernel's notifications.
fn runtime() -> Result<Runtime, OpenError> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_time().enable_io().build();
    runtime.map_err(|error| cannot_start(&error.to_string()))
}
