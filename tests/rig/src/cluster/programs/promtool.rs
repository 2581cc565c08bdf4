//! promtool, for tests of the alerts.

use std::path::PathBuf;

use anyhow::Result;

use super::build::command;

const MODULE: &str = "github.com/prometheus/prometheus";
/// Leaves out the discovery of targets at cloud providers, which rules do not need.
const TAGS: &str = "remove_all_sd";

/// Returns promtool's path. Go builds the program the first time, which takes 1 to 2 minutes.
///
/// # Errors
/// Go is missing, a download or the build failed, or the cache is not writable.
pub fn promtool() -> Result<PathBuf> {
    command("promtool", MODULE, TAGS, "1 to 2 minutes")
}
