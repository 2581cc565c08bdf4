//! What the userspace proxy shows of its connections, for the control plane: the endpoints that it avoids (U53), the
//! ServicePorts of which it refuses clients, since they have their share, and times when the kernel served in its place.
//!
//! A task checks them every ten seconds, so that failures of connections do not cause reports of their own.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kplane_dataplane::backend::{Lapse, ProxyHandle};
use kplane_model::{DesiredKey, ServiceKey};
use tokio::sync::watch;
use tokio::time::sleep;

use crate::desired::now_ms;
use crate::report::{Avoided, Failure, Subject};

/// Interval between two checks.
const INTERVAL: Duration = Duration::from_secs(10);

/// Maximum number of endpoints, and of ServicePorts, in a report.
pub const MOST: usize = 32;

/// Time after the last refusal or lapse for which it is reported.
const RECENT: Duration = Duration::from_secs(60);

/// The outcome of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Endpoints that new connections avoid.
    pub avoided: Avoided,
    /// ServicePorts of which clients were refused lately, and the proxy itself if the kernel lately served in its place.
    pub limited: Vec<Failure>,
}

/// Publishes what the proxy shows, if a proxy runs, until no receiver is left.
pub async fn follow(proxy: ProxyHandle, news: watch::Sender<Seen>) {
    let (mut refusals, mut lapses) = (Refusals::default(), Lapses::default());
    while !news.is_closed() {
        let (at, at_ms) = (Instant::now(), now_ms());
        let lapsed = lapses.look(proxy.last_lapse(), at, at_ms);
        let now = match proxy.get() {
            None => Seen::default(),
            Some(proxy) => {
                let mut limited = refusals.look(proxy.limited(), at, at_ms);
                limited.extend(lapsed);
                Seen {
                    avoided: proxy.avoided(MOST),
                    limited,
                }
            }
        };
        news.send_if_modified(|known| {
            let is_new = *known != now;
            *known = now;
            is_new
        });
        sleep(INTERVAL).await;
    }
}

/// A ServicePort with refusals: their number, the time of the last ones, and of the first ones (milliseconds since 1970).
struct Refused(u64, Instant, u64);

/// The ServicePorts with refusals, and when their number last grew.
#[derive(Default)]
struct Refusals(HashMap<ServiceKey, Refused>);

impl Refusals {
    /// Takes note of the numbers of refusals since the start. Returns the ServicePorts with recent ones.
    fn look(&mut self, counts: Vec<(ServiceKey, u64)>, now: Instant, now_ms: u64) -> Vec<Failure> {
        // ServicePorts that are gone are forgotten.
        let mut before = std::mem::take(&mut self.0);
        for (key, count) in counts {
            let mut known = before.remove(&key).unwrap_or(Refused(0, now, now_ms));
            if count != known.0 {
                let is_over = now.duration_since(known.1) >= RECENT;
                let since_ms = if is_over { now_ms } else { known.2 };
                known = Refused(count, now, since_ms);
            }
            self.0.insert(key, known);
        }
        let is_recent = |at: Instant| now.duration_since(at) < RECENT;
        let mut recent: Vec<_> = self
            .0
            .iter()
            .filter(|(_, refused)| is_recent(refused.1))
            .map(|(key, refused)| (key, refused.2))
            .collect();
        recent.sort_unstable();
        recent
            .into_iter()
            .take(MOST)
            .map(|(key, since_ms)| failure(key, since_ms))
            .collect()
    }
}

fn failure(key: &ServiceKey, since_ms: u64) -> Failure {
    Failure {
        about: Subject::Object(DesiredKey::Service(key.clone())),
        reason: format!(
            "the userspace proxy refuses clients: {} or its namespace has its share of connections or flows on this node, or \
             one client too many to one endpoint (kpctl get proxied {}; RLIMIT_NOFILE of the agent)",
            key.service, key.service
        ),
        since_ms,
        degraded: true,
    }
}

/// Since when the kernel has served in the proxy's place, now and then (milliseconds since 1970).
#[derive(Default)]
struct Lapses(Option<u64>);

impl Lapses {
    /// Takes note of the last lapse. Returns the node's failure if it is recent.
    fn look(&mut self, last: Option<Lapse>, now: Instant, now_ms: u64) -> Option<Failure> {
        let recent = last.filter(|lapse| now.duration_since(lapse.at) < RECENT);
        let Some(lapse) = recent else {
            self.0 = None;
            return None;
        };
        let reason = format!(
            "the kernel served new connections instead of the userspace proxy within the last minute: {}",
            lapse.reason
        );
        Some(Failure {
            about: Subject::Node,
            reason,
            since_ms: *self.0.get_or_insert(now_ms),
            degraded: true,
        })
    }
}

#[cfg(test)]
mod tests {
    use kplane_model::{Family, KeyParts, Protocol, ServiceName};

    use super::*;

    #[test]
    fn a_service_of_which_clients_are_refused_is_reported_for_a_minute() {
        let key = ServiceKey::from(KeyParts {
            service: ServiceName::new("shop", "web"),
            port_name: "".into(),
            protocol: Protocol::Tcp,
            family: Family::V4,
        });
        let (start, mut refusals) = (Instant::now(), Refusals::default());
        let mut since = |seconds: u64, count| {
            let at = start + Duration::from_secs(seconds);
            let counts = vec![(key.clone(), count)];
            let reported = refusals.look(counts, at, seconds * 1000);
            reported.first().map(|failure| failure.since_ms)
        };
        assert_eq!(since(10, 2), Some(10_000));
        assert_eq!(since(20, 5), Some(10_000));
        assert_eq!(since(70, 5), Some(10_000));
        assert_eq!(since(80, 5), None);
        assert_eq!(since(200, 6), Some(200_000));
    }

    #[test]
    fn a_kernel_that_serves_in_the_proxys_place_is_reported_for_a_minute() {
        let (start, mut lapses) = (Instant::now(), Lapses::default());
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut since = |seconds, last: Option<u64>| {
            let last = last.map(|last| Lapse {
                reason: "the proxy is full".to_owned(),
                at: at(last),
            });
            let reported = lapses.look(last, at(seconds), seconds * 1000)?;
            assert!(
                reported.reason.ends_with("the proxy is full"),
                "{reported:?}"
            );
            Some(reported.since_ms)
        };
        assert_eq!(since(10, None), None);
        assert_eq!(since(20, Some(15)), Some(20_000));
        assert_eq!(since(70, Some(65)), Some(20_000));
        assert_eq!(since(130, Some(65)), None);
        assert_eq!(since(140, Some(139)), Some(140_000));
    }
}
