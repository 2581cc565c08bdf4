//! Network programming latency (section (h)): from the time that an EndpointSlice tells to a real
//! kernel's acknowledgement.

use std::time::Duration;

use anyhow::{Result, ensure};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::netns::combined::cluster;
use kplane_tests::support::Setup;
use kplane_tests::support::objects::{service, with_pods};

/// The change happened so long before its slice was written.
const BEFORE: Duration = Duration::from_secs(2);

/// A Service whose slices were written because of a change at a time.
fn triggered(pods: &[&str], at: Timestamp) -> Vec<Value> {
    let mut objects = with_pods(service(1), pods);
    for slice in &mut objects[1..] {
        let at = at.to_string();
        slice["metadata"]["annotations"] =
            json!({"endpoints.kubernetes.io/last-change-trigger-time": at});
    }
    objects
}

/// Both families of every node measure each change once, and none of what they begin with.
pub(crate) fn h_both_families_measure_each_change_once() -> Result<()> {
    let (_world, mut cluster) = cluster(Setup::PodRanges)?;
    cluster.apply(&with_pods(service(1), &["a"]))?;
    let at = Timestamp::now() - BEFORE;
    cluster.apply(&triggered(&["a", "b"], at))?;
    let took = at.duration_until(Timestamp::now()).unsigned_abs();
    for report in cluster.reports() {
        let latencies: Vec<u64> = report.triggers.iter().map(|one| one.latency_ms).collect();
        ensure!(latencies.len() == 2, "not one a family: {latencies:?}");
        // Whole milliseconds of another clock.
        let range = BEFORE.as_millis()..=took.as_millis() + 1;
        let fits = |ms: &u64| range.contains(&u128::from(*ms));
        ensure!(latencies.iter().all(fits), "{latencies:?} not in {range:?}");
    }
    // The same slices again, as after a new list, and a change that no time is known of.
    cluster.apply(&triggered(&["a", "b"], at))?;
    cluster.apply(&with_pods(service(1), &["b"]))?;
    for report in cluster.reports() {
        ensure!(report.triggers.len() == 2, "{:?}", report.triggers);
    }
    Ok(())
}
