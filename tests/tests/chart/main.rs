//! The Helm chart: what Helm renders, compared with what kplane's programs accept. The API server's opinion is in the
//! suite `cluster`.

mod flags;
mod rendered;
mod values;

use anyhow::Result;
use kplane_tests::chart::Chart;
use kplane_tests::privilege;

/// Returns the chart; `None` if Helm cannot be built here.
fn chart() -> Result<Option<Chart>> {
    privilege::available(Chart::open())
}
