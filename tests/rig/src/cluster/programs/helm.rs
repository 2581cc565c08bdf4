//! Helm, for tests of the chart.

use std::path::PathBuf;

use anyhow::Result;

use super::build::{Build, Recipe, STRIP, cache, module, version};

const MODULE: &str = "helm.sh/helm/v4";
const PROGRAM: &str = "helm";

/// Returns Helm's path. Go builds the program the first time, which takes 2 to 4 minutes.
///
/// # Errors
/// Go is missing, a download or the build failed, or the checkout is not writable.
pub fn helm() -> Result<PathBuf> {
    let module = module("helm")?;
    let version = version(&module.join("go.mod"), MODULE)?;
    let recipe = Recipe {
        programs: vec![PROGRAM],
        packages: vec![format!("{MODULE}/cmd/{PROGRAM}")],
        ld_flags: STRIP.to_owned(),
        ..Recipe::default()
    };
    let build = Build {
        module,
        folder: cache()?.join(format!("{PROGRAM}-{version}")),
        what: format!("Helm {version}: 2 to 4 minutes the first time, then never again"),
        recipes: vec![recipe],
    };
    Ok(build.ensure()?.join(PROGRAM))
}
