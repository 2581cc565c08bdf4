//! The Helm chart: what Helm renders, compared with what kplane's programs accept. The API server's opinion is in the
//! suite `cluster`.

mod documents;
mod flags;
mod monitoring;
mod rendered;
mod settings;
mod values;

use std::sync::OnceLock;

use anyhow::{Result, anyhow};
use kplane_tests::chart::{Chart, combinations};
use kplane_tests::privilege;
use serde_json::Value;

/// Returns the chart; `None` if Helm cannot be built here.
fn chart() -> Result<Option<Chart>> {
    privilege::available(Chart::open())
}

/// What Helm makes of some values.
struct Rendering {
    settings: Vec<&'static str>,
    objects: Vec<Value>,
}

/// Returns the renderings of all combinations of values, which Helm makes once for all tests.
fn renderings() -> Result<Option<&'static [Rendering]>> {
    static ALL: OnceLock<Result<Vec<Rendering>>> = OnceLock::new();
    let Some(chart) = chart()? else {
        return Ok(None);
    };
    let render = |settings: Vec<&'static str>| {
        let objects = chart.objects(&settings)?;
        Ok(Rendering { settings, objects })
    };
    let all = ALL.get_or_init(|| combinations().into_iter().map(render).collect());
    match all {
        Ok(all) => Ok(Some(all)),
        Err(error) => Err(anyhow!("{error:#}")),
    }
}
