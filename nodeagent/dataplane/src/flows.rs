//! Ages of connections in the kernel's tables, and why the tables cannot be read.

use std::time::{Duration, SystemTime};

use kplane_netlink::NetlinkError;
use kplane_netlink::conntrack::Tracked;

/// The reason why a table cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CountError {
    #[error(
        "cannot read conntrack entries: {0} (CAP_NET_ADMIN and the module nf_conntrack_netlink are needed)"
    )]
    Conntrack(#[from] NetlinkError),
    #[error("cannot read the connections of IPVS: {0}")]
    Ipvs(#[from] std::io::Error),
    #[error("the table has too many entries to read in {} s: conntrack -C shows their number", .0.as_secs())]
    Late(Duration),
}

/// Returns the time by which the kernel dates entries, in nanoseconds since 1970.
pub(crate) fn now_ns() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}

/// Returns the age of an entry, if the kernel keeps times.
pub(crate) fn age(flow: &Tracked, now_ns: u64) -> Option<Duration> {
    let began = flow.began_ns?;
    Some(Duration::from_nanos(now_ns.saturating_sub(began)))
}

/// Returns the ages of the newest and the oldest of several flows, with one flow more.
pub(crate) fn widened(
    ages: Option<(Duration, Duration)>,
    age: Option<Duration>,
) -> Option<(Duration, Duration)> {
    match (ages, age) {
        (Some((newest, oldest)), Some(age)) => Some((newest.min(age), oldest.max(age))),
        (None, Some(age)) => Some((age, age)),
        (ages, None) => ages,
    }
}
