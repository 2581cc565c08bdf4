//! Results that follow changes. During an outage the last picture stays, with the error.

use std::io::Write;
use std::time::Duration;

use kplane_proto::v1 as pb;
use tokio::time::{Interval, MissedTickBehavior, interval, sleep};

use crate::client::{Client, Error, FleetStream};
use crate::failure::Failure;
use crate::output::Output;
use crate::view::View;

/// Time between two requests to a control plane that is polled for changes, or that does not
/// answer.
const PERIOD: Duration = Duration::from_secs(1);

/// Shows the fleet and each change of it. Returns only on failure.
pub(crate) async fn fleet<V: View + From<pb::Fleet>, W: Write>(
    client: &Client,
    output: &mut Output<W>,
) -> Result<(), Failure> {
    let mut source = FleetSource {
        client,
        stream: None,
        clock: output.redraws().then(ticks),
    };
    let mut last = None;
    loop {
        let fleet = match source.next().await {
            Ok(fleet) => fleet,
            Err(error) => {
                outage(error, last.is_some(), output).await?;
                continue;
            }
        };
        let picture = without_clocks(fleet.clone());
        // On a terminal the ages advance even when nothing else changes.
        if output.redraws() || last.as_ref() != Some(&picture) {
            output.show(&V::from(fleet))?;
        }
        last = Some(picture);
    }
}

/// Shows Services and each change of them, by a request every second. Returns only on failure.
pub(crate) async fn services<V: View, W: Write>(
    client: &Client,
    output: &mut Output<W>,
    namespace: Option<&str>,
    view: impl Fn(Vec<pb::ServiceView>) -> V,
) -> Result<(), Failure> {
    let mut clock = ticks();
    let mut last = None;
    let mut mended = false;
    loop {
        clock.tick().await;
        match client.services(namespace).await {
            Ok(services) => {
                if mended && output.redraws() || last.as_ref() != Some(&services) {
                    output.show(&view(services.clone()))?;
                }
                last = Some(services);
                mended = false;
            }
            Err(error) => {
                outage(error, last.is_some(), output).await?;
                mended = true;
            }
        }
    }
}

/// Waits a moment after a transient error, if a result was already shown.
async fn outage<W: Write>(
    error: Error,
    started: bool,
    output: &mut Output<W>,
) -> Result<(), Failure> {
    if !started || !error.is_transient() {
        return Err(error.into());
    }
    output.show_trouble(&error.to_string())?;
    sleep(PERIOD).await;
    Ok(())
}

/// Returns a timer that ticks once a second, however long the answers take.
fn ticks() -> Interval {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// A source of pictures of the fleet: from the server after each change, and by the clock, if any.
struct FleetSource<'a> {
    client: &'a Client,
    stream: Option<FleetStream>,
    clock: Option<Interval>,
}

impl FleetSource<'_> {
    async fn next(&mut self) -> Result<pb::Fleet, Error> {
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => self.client.watch_fleet().await?,
        };
        let fleet = match &mut self.clock {
            None => stream.next().await?,
            Some(clock) => tokio::select! {
                biased;
                fleet = stream.next() => fleet?,
                _ = clock.tick() => self.client.fleet().await?,
            },
        };
        // A stream that failed is not used again.
        self.stream = Some(stream);
        Ok(fleet)
    }
}

/// Returns the same fleet without the fields that change all the time.
fn without_clocks(mut fleet: pb::Fleet) -> pb::Fleet {
    if let Some(status) = &mut fleet.control_plane {
        status.now_ms = 0;
        status.upstream_age_ms = 0;
    }
    for node in &mut fleet.nodes {
        node.last_heard_ms = 0;
        if let Some(report) = &mut node.report {
            report.round_trip_us = 0;
        }
    }
    fleet
}

#[cfg(test)]
mod tests {
    use super::*;
    use kpctl_samples as samples;

    #[test]
    fn the_passing_of_time_is_no_change() {
        let fleet = samples::healthy_fleet();
        let mut later = fleet.clone();
        let plane = later.control_plane.as_mut().unwrap();
        plane.now_ms += 1_000;
        plane.upstream_age_ms += 1_000;
        later.nodes[0].last_heard_ms += 1_000;
        later.nodes[0].report.as_mut().unwrap().round_trip_us += 1;
        assert_eq!(without_clocks(fleet.clone()), without_clocks(later.clone()));
        later.nodes[0].report.as_mut().unwrap().applied_revision -= 1;
        assert_ne!(without_clocks(fleet), without_clocks(later));
    }
}
