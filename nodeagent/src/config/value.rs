//! Parsers of values of flags.

use std::time::Duration;

use kplane_kube_proxy_config::GoDuration;

/// Parses a time greater than 0, as Go writes it.
pub(super) fn interval(text: &str) -> Result<Duration, &'static str> {
    text.parse::<GoDuration>()
        .ok()
        .and_then(GoDuration::to_std)
        .filter(|d| !d.is_zero())
        .ok_or("must be a duration greater than 0, such as 2s")
}

/// Parses a time, as Go writes it.
pub(super) fn duration(text: &str) -> Result<Duration, &'static str> {
    let duration = text.parse::<GoDuration>().ok().and_then(GoDuration::to_std);
    duration.ok_or("must be a duration such as 30s, or 0s")
}
