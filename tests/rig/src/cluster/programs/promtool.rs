//! promtool, for tests of the alerts.

use std::path::PathBuf;

use anyhow::Result;

use super::build::{Build, Recipe, STRIP, cache, module, version};

const MODULE: &str = "github.com/prometheus/prometheus";
const PROGRAM: &str = "promtool";
/// Leaves out the discovery of targets at cloud providers, which rules do not need.
const TAGS: &str = "remove_all_sd";

/// Returns promtool's path. Go builds the program the first time, which takes 1 to 2 minutes.
///
/// # Errors
/// Go is missing, a download or the build failed, or the checkout is not writable.
pub fn promtool() -> Result<PathBuf> {
    let module = module(PROGRAM)?;
    let version = version(&module.join("go.mod"), MODULE)?;
    let recipe = Recipe {
        programs: vec![PROGRAM],
        packages: vec![format!("{MODULE}/cmd/{PROGRAM}")],
        ld_flags: STRIP.to_owned(),
        tags: TAGS,
        ..Recipe::default()
    };
    let build = Build {
        module,
        folder: cache()?.join(format!("{PROGRAM}-{version}")),
        what: format!("promtool {version}: 1 to 2 minutes the first time, then never again"),
        recipes: vec![recipe],
    };
    Ok(build.ensure()?.join(PROGRAM))
}
