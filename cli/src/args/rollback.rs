//! The arguments of `kpctl rollback`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use kplane_proto::v1 as pb;
use kplane_proto::v1::change_rollback_request::Change;

use super::parse_timeout;

/// The state to go back to, or the way on.
#[derive(Clone, Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("state").required(true).args(["to", "to_time", "undo"])))]
pub(crate) struct RollbackArgs {
    /// The state of this revision; `kpctl history` lists them
    #[arg(long, value_name = "REVISION")]
    to: Option<u64>,
    /// The state of this time: RFC 3339, or a duration before now, such as 10m
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    to_time: Option<u64>,
    /// End the rollback: publish the newest state
    #[arg(long)]
    undo: bool,
    /// Reason, for others and for the audit log
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    reason: String,
}

/// Parses a point in time; returns milliseconds since 1970.
pub(super) fn parse_time(text: &str) -> Result<u64, String> {
    let since = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let ms = |since: Duration| u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    if let Ok(at) = text.parse::<Timestamp>() {
        return Ok(ms(since(at.into())));
    }
    let before = parse_timeout(text).map_err(|_| {
        "expected a time such as 2026-01-31T12:00:00Z, or a duration before now such as 10m"
            .to_owned()
    })?;
    Ok(ms(since(SystemTime::now()).saturating_sub(before)))
}

impl RollbackArgs {
    /// Returns the request.
    pub(crate) fn request(&self) -> pb::ChangeRollbackRequest {
        let change = match (self.to, self.to_time) {
            (Some(revision), _) => Change::ToRevision(revision),
            (None, Some(ms)) => Change::ToMs(ms),
            (None, None) => Change::Undo(pb::Undo {}),
        };
        pb::ChangeRollbackRequest {
            change: Some(change),
            reason: self.reason.clone(),
        }
    }
}
