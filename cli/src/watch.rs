//! Results that follow changes. During an outage the last snapshot stays, with the error.

use std::io::Write;
use std::time::Duration;

use kplane_proto::v1 as pb;
use tokio::time::{Interval, MissedTickBehavior, interval, sleep};

use crate::client::{Client, Error, FleetStream, ServiceStream};
use crate::connection::Route;
use crate::failure::Failure;
use crate::output::Output;
use kplane_view::View;

/// Time between two requests to a control plane that is polled for changes, or that does not
/// answer.
const PERIOD: Duration = Duration::from_secs(1);

/// Shows the fleet and each change of it. Returns only on failure.
pub(crate) async fn fleet<V: View, W: Write>(
    link: &mut Link,
    output: &mut Output<W>,
    view: impl Fn(pb::Fleet) -> Result<V, Failure>,
) -> Result<(), Failure> {
    let mut source = FleetSource {
        link,
        stream: None,
        clock: output.redraws().then(ticks),
    };
    let mut last = None;
    loop {
        let fleet = match source.next().await {
            Ok(fleet) => fleet,
            Err(error) => {
                source.stream = None;
                source.link.outage(error, output).await?;
                continue;
            }
        };
        let snapshot = without_clocks(fleet.clone());
        // On a terminal the ages advance even when nothing else changes.
        if output.redraws() || last.as_ref() != Some(&snapshot) {
            output.show(&view(fleet)?)?;
        }
        last = Some(snapshot);
    }
}

/// Shows Services and each change of them. Returns only on failure.
pub(crate) async fn services<V: View, W: Write>(
    link: &mut Link,
    output: &mut Output<W>,
    request: &pb::ListServicesRequest,
    view: impl Fn(Vec<pb::ServiceView>) -> Result<V, Failure>,
) -> Result<(), Failure> {
    let mut stream = None;
    let mut last = None;
    let mut again = false;
    loop {
        match next_services(link, &mut stream, request).await {
            Ok(services) => {
                if again && output.redraws() || last.as_ref() != Some(&services) {
                    output.show(&view(services.clone())?)?;
                }
                last = Some(services);
                again = false;
            }
            Err(error) => {
                stream = None;
                link.outage(error, output).await?;
                again = true;
            }
        }
    }
}

/// Returns the next snapshot of Services. A control plane that has no watch of Services is asked every second.
async fn next_services(
    link: &mut Link,
    stream: &mut Option<ServiceStream>,
    request: &pb::ListServicesRequest,
) -> Result<Vec<pb::ServiceView>, Error> {
    let client = link.client().await?;
    if stream.is_none() && !link.polls {
        let watch = pb::WatchServicesRequest {
            namespace: request.namespace.clone(),
            name: request.name.clone(),
            node: request.node.clone(),
        };
        match client.watch_services(watch).await {
            Ok(begun) => *stream = Some(begun),
            Err(Error::NotStatus { .. }) => link.polls = true,
            Err(error) => return Err(error),
        }
    }
    let services = match stream {
        Some(stream) => match stream.next().await {
            // Some servers refuse an unknown method with the first message only.
            Err(Error::NotStatus { .. }) if !link.proven => {
                link.polls = true;
                client.services(request.clone()).await?
            }
            next => next?,
        },
        None => {
            if link.proven {
                sleep(PERIOD).await;
            }
            client.services(request.clone()).await?
        }
    };
    link.prove();
    Ok(services)
}

/// The connection of a watch, which is made again after an outage.
pub(crate) struct Link {
    route: Route,
    /// The connection; `None` after an outage.
    client: Option<Client>,
    /// Whether the connection has brought an answer.
    proven: bool,
    /// Whether any connection has brought an answer.
    started: bool,
    /// Whether the control plane has no watch of Services, and is asked every second.
    polls: bool,
}

impl Link {
    /// Starts with a connection.
    pub(crate) fn new((client, route): (Client, Route)) -> Self {
        Self {
            route,
            client: Some(client),
            proven: false,
            started: false,
            polls: false,
        }
    }

    /// Returns the connection, or makes a new one.
    pub(crate) async fn client(&mut self) -> Result<Client, Error> {
        if let Some(client) = &self.client {
            return Ok(client.clone());
        }
        let client = Client::connect(&mut self.route).await?;
        Ok(self.client.insert(client).clone())
    }

    /// Notes that the connection has brought an answer.
    pub(crate) fn prove(&mut self) {
        (self.proven, self.started) = (true, true);
    }

    /// Drops the route, and waits a moment. Returns an error that a new connection cannot help against, and any
    /// error before the first answer.
    pub(crate) async fn outage<W: Write>(
        &mut self,
        error: Error,
        output: &mut Output<W>,
    ) -> Result<(), Failure> {
        // Another control plane may answer next.
        self.polls = false;
        // Credentials that were accepted have expired since. There may be new ones.
        let expired = self.proven && error.is_unauthenticated();
        if !self.started || !(expired || error.is_transient()) {
            return Err(error.into());
        }
        if expired {
            self.route.forget_credentials();
        }
        self.client = None;
        self.proven = false;
        output.show_trouble(&error.to_string())?;
        sleep(PERIOD).await;
        Ok(())
    }
}

/// Returns a timer that ticks once a second, however long the answers take.
fn ticks() -> Interval {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// A source of snapshots of the fleet: from the server after each change, and by the clock, if any.
struct FleetSource<'a> {
    link: &'a mut Link,
    stream: Option<FleetStream>,
    clock: Option<Interval>,
}

impl FleetSource<'_> {
    async fn next(&mut self) -> Result<pb::Fleet, Error> {
        let client = self.link.client().await?;
        let stream = match &mut self.stream {
            Some(stream) => stream,
            None => self.stream.insert(client.watch_fleet().await?),
        };
        let fleet = match &mut self.clock {
            None => stream.next().await?,
            Some(clock) => tokio::select! {
                biased;
                fleet = stream.next() => fleet?,
                _ = clock.tick() => client.fleet().await?,
            },
        };
        self.link.prove();
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
