//! The counters of nfacct that kube-proxy's metrics show (C7, C8), in the calling thread's network
//! namespace. They are for information only: where they cannot be had, rules do without.

use super::rule::Counter;
use super::tool::Tool;
use crate::netlink::{NetlinkError, counted_packets, ensure_counter};

/// Makes the counters, as far as they are not there.
///
/// # Errors
/// [`NetlinkError`].
pub(super) fn make() -> Result<(), NetlinkError> {
    Counter::ALL
        .into_iter()
        .try_for_each(|counter| ensure_counter(counter.as_str()))
}

/// Whether rules can have counters: makes them if so.
pub(super) fn usable(tool: &Tool) -> bool {
    let reason = match make() {
        Ok(()) => match tool.test_counters() {
            Ok(()) => return true,
            Err(error) => error.to_string(),
        },
        Err(error) => error.to_string(),
    };
    tracing::info!(
        tool = tool.name(),
        reason,
        "no nfacct: two metrics are missing"
    );
    false
}

/// What the counters have counted, with their names in kube-proxy's metrics; those that are not there
/// are left out.
pub fn counted() -> Vec<(&'static str, u64)> {
    let read = |counter: Counter| Some((counter.metric(), counted_packets(counter.as_str()).ok()?));
    Counter::ALL.into_iter().filter_map(read).collect()
}
