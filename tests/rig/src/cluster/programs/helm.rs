//! Helm, for tests of the chart.

use std::path::PathBuf;

use anyhow::Result;

use super::build::command;

/// Returns Helm's path. Go builds the program the first time, which takes 2 to 4 minutes.
///
/// # Errors
/// Go is missing, a download or the build failed, or the cache is not writable.
pub fn helm() -> Result<PathBuf> {
    command("helm", "helm.sh/helm/v4", "", "2 to 4 minutes")
}
