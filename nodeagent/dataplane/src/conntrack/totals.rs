//! Counts about the deletion of stale entries, for metrics.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kplane_model::{Family, ServiceName};
use parking_lot::Mutex;

/// Number of buckets of the histogram of durations. The last bucket has no bound.
pub const BUCKETS: usize = 16;

/// Returns the upper bound of a bucket: 1 ms, 2 ms, .. 16.384 s as in kube-proxy; `None` for the last.
pub fn bucket_bound(bucket: usize) -> Option<Duration> {
    let exponent = u32::try_from(bucket).ok()?;
    (bucket + 1 < BUCKETS).then(|| Duration::from_millis(1 << exponent))
}

/// Counts of one family since the start: `conntrack_reconciler_deleted_entries_total` and
/// `conntrack_reconciler_sync_duration_seconds` (section h).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConntrackTotals {
    /// Number of deleted entries of UDP.
    pub deleted: u64,
    /// Number of deleted connections without a reply, to endpoints out of service.
    pub half_open: u64,
    /// Number of deleted connections with a reply, to dead nodes.
    pub dead: u64,
    /// Number of connections and flows that were cut because policies deny them.
    pub denied: u64,
    /// Number of failed scans. They were repeated, or will be.
    pub failures: u64,
    /// Sum of the durations of all scans.
    pub duration_sum: Duration,
    /// Number of scans by duration; see [`bucket_bound`]. Not cumulative.
    pub durations: [u64; BUCKETS],
    /// Why scans fail; `None` if the last one did not.
    pub problem: Option<FailedScans>,
}

/// Scans that failed one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedScans {
    /// The error of the last one, human-readable.
    pub reason: String,
    /// The time of the first one.
    pub since: SystemTime,
    /// Their number.
    pub times: u64,
}

/// Maximum number of Services of which it is known how many connections ended.
const SERVICES: usize = 64;

/// Time after the last one for which it is known.
const RECENT: Duration = Duration::from_secs(3_600);

/// Numbers of a Service's connections that ended because of what they led to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndedConnections {
    /// Those with a reply, to endpoints on dead nodes.
    pub dead: u64,
    /// Those without one, to endpoints out of service. The client's next packet gets another endpoint.
    pub half_open: u64,
}

/// The latest Services whose connections ended, the one of the last connection at the end.
#[derive(Debug, Default)]
struct EndedByService(VecDeque<(ServiceName, Instant, EndedConnections)>);

#[derive(Debug, Default)]
struct Counts {
    totals: [ConntrackTotals; 2],
    ended: EndedByService,
}

/// A handle to the counts of both families, which a [`Sweeper`](super::Sweeper) updates after every scan.
#[derive(Clone, Debug, Default)]
pub struct ConntrackCounts(Arc<Mutex<Counts>>);

impl ConntrackCounts {
    /// Returns the counts of each family since the start, IPv4 first.
    pub fn totals(&self) -> [ConntrackTotals; 2] {
        self.0.lock().totals.clone()
    }

    /// Adds one scan of a family: the number of deleted entries of UDP, the error, and its duration.
    pub fn count(&self, family: Family, deleted: u64, error: Option<String>, took: Duration) {
        self.0.lock().totals[family as usize].count(deleted, error, took);
    }

    /// Adds connections that ended: those that waited for endpoints out of service, those to dead nodes, and those that
    /// policies deny.
    pub fn ended(&self, family: Family, half_open: u64, dead: u64, denied: u64) {
        let totals = &mut self.0.lock().totals[family as usize];
        totals.half_open += half_open;
        totals.dead += dead;
        totals.denied += denied;
    }

    /// Adds connections that ended, by Service.
    pub fn ended_of(&self, ended: HashMap<ServiceName, EndedConnections>) {
        let (counts, now) = (&mut self.0.lock().ended, Instant::now());
        ended.into_iter().for_each(|(service, ended)| counts.add(service, ended, now));
    }

    /// Returns how many connections have ended of the Services of which some did within the last hour: the latest 64.
    pub fn ended_by_service(&self) -> Vec<(ServiceName, EndedConnections)> {
        let counts = &mut self.0.lock().ended;
        counts.forget(Instant::now());
        counts.0.iter().map(|(service, _, ended)| (service.clone(), *ended)).collect()
    }
}

impl EndedByService {
    fn add(&mut self, service: ServiceName, more: EndedConnections, now: Instant) {
        let known = self.0.iter().position(|(name, ..)| *name == service);
        let mut ended =
            known.and_then(|at| self.0.remove(at)).map_or_else(Default::default, |of| of.2);
        ended.dead += more.dead;
        ended.half_open += more.half_open;
        if self.0.len() == SERVICES {
            self.0.pop_front();
        }
        self.0.push_back((service, now, ended));
    }

    fn forget(&mut self, now: Instant) {
        self.0.retain(|(_, at, _)| now.saturating_duration_since(*at) < RECENT);
    }
}

impl ConntrackTotals {
    /// Returns the number of scans so far, including failed ones.
    pub fn looks(&self) -> u64 {
        self.durations.iter().sum()
    }

    pub(super) fn count(&mut self, deleted: u64, error: Option<String>, took: Duration) {
        self.deleted += deleted;
        self.failures += u64::from(error.is_some());
        let before = self.problem.take();
        self.problem = error.map(|reason| FailedScans {
            reason,
            since: before.as_ref().map_or_else(SystemTime::now, |of| of.since),
            times: before.map_or(0, |of| of.times) + 1,
        });
        self.duration_sum += took;
        let fits = |bucket: &usize| bucket_bound(*bucket).is_none_or(|bound| took <= bound);
        let bucket = (0..BUCKETS).find(fits).unwrap_or(BUCKETS - 1);
        self.durations[bucket] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_services_are_known_for_an_hour() {
        let mut counts = EndedByService::default();
        let began = Instant::now();
        let one = EndedConnections {
            dead: 1,
            half_open: 2,
        };
        let name = |number: usize| ServiceName::new("shop", &format!("svc-{number}"));
        for number in 0..SERVICES {
            counts.add(name(number), one, began);
        }
        let later = began + RECENT / 2;
        counts.add(name(0), one, later);
        counts.add(name(SERVICES), one, later);
        assert_eq!(counts.0.len(), SERVICES);
        assert!(
            counts.0.iter().all(|(service, ..)| *service != name(1)),
            "the oldest one goes"
        );
        counts.forget(began + RECENT);
        let twice = EndedConnections {
            dead: 2,
            half_open: 4,
        };
        let left: Vec<_> =
            counts.0.iter().map(|(service, _, ended)| (service.clone(), *ended)).collect();
        assert_eq!(left, [(name(0), twice), (name(SERVICES), one)]);
    }
}
