//! Counters that the agent updates while it works. They are plain atomics, so that neither counting
//! nor a scrape has to wait. [`super::collect`] gives them their names.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kplane_model::Family;

use super::Transactions;
use crate::desired::Changes;
use kplane_dataplane::backend::Applied;

/// Upper bounds of durations in seconds, as kube-proxy has them: 1 ms, doubled 14 times.
pub(crate) const SYNC_BUCKETS: [f64; 15] = [
    0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096,
    8.192, 16.384,
];

/// Upper bounds of the network programming latency in seconds, as kube-proxy has them: 1/4 and 1/2 s,
/// each second of the first minute, every 5 s of the second, then every 30 s up to five minutes.
#[rustfmt::skip]
pub(super) const PROGRAMMING_BUCKETS: [f64; 80] = [
    0.25, 0.5,
    1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0,
    19.0, 20.0, 21.0, 22.0, 23.0, 24.0, 25.0, 26.0, 27.0, 28.0, 29.0, 30.0, 31.0, 32.0, 33.0, 34.0,
    35.0, 36.0, 37.0, 38.0, 39.0, 40.0, 41.0, 42.0, 43.0, 44.0, 45.0, 46.0, 47.0, 48.0, 49.0, 50.0,
    51.0, 52.0, 53.0, 54.0, 55.0, 56.0, 57.0, 58.0, 59.0,
    60.0, 65.0, 70.0, 75.0, 80.0, 85.0, 90.0, 95.0, 100.0, 105.0, 110.0, 115.0,
    120.0, 150.0, 180.0, 210.0, 240.0, 270.0, 300.0,
];

/// Upper bounds for the steps of one sync in seconds: a change usually takes well below 1 ms.
pub(super) const PHASE_BUCKETS: [f64; 15] = [
    0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.05,
    0.1, 0.5, 1.0, 5.0,
];

/// Upper bounds of the time that a preStop hook waits, in seconds: a healthy cluster takes some 100 ms.
const PRESTOP_BUCKETS: [f64; 12] = [
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
];

/// The total in seconds, and for each upper bound in seconds the number of values between it and the
/// previous bound.
pub(crate) type Distribution = (f64, Vec<(f64, u64)>);

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds a number to the count.
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// Returns the count.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Sets the number.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Returns the number.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A histogram of durations.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// The counts by bound; the last one counts values above all bounds.
    counts: Box<[AtomicU64]>,
    nanoseconds: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self {
            bounds,
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            nanoseconds: AtomicU64::new(0),
        }
    }

    /// Counts one duration.
    pub fn observe(&self, took: Duration) {
        let seconds = took.as_secs_f64();
        let place = self.bounds.partition_point(|bound| *bound < seconds);
        self.counts[place].fetch_add(1, Ordering::Relaxed);
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// Returns the total in seconds, and the number of values between each bound and the previous
    /// one.
    pub(crate) fn read(&self) -> Distribution {
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        let counts = self.counts.iter().map(|n| n.load(Ordering::Relaxed));
        let total = Duration::from_nanos(self.nanoseconds.load(Ordering::Relaxed));
        (total.as_secs_f64(), bounds.zip(counts).collect())
    }
}

/// The counters of one family.
#[derive(Debug)]
pub struct FamilyCounters {
    /// The durations of attempts to program the kernel, failed ones included.
    pub(crate) sync: Histogram,
    /// The durations of attempts that considered everything.
    pub(crate) full: Histogram,
    /// The durations of attempts that considered only what changed.
    pub(crate) partial: Histogram,
    /// The times from a change in the cluster until the kernel held its result.
    pub(crate) programming: Histogram,
    /// The number of attempts that failed.
    pub(crate) failures: Counter,
    /// The number of failed attempts that considered only what changed.
    pub(crate) partial_failures: Counter,
    /// The numbers of iptables rules by table: in total, and in the last change.
    pub(crate) rules: [Gauge; 2],
    pub(crate) rules_last: [Gauge; 2],
    /// The time when the kernel last took a change, and the time of the last desired change:
    /// milliseconds since 1970.
    pub(crate) synced_at_ms: Gauge,
    pub(crate) queued_at_ms: Gauge,
    /// The number of changes seen, and the number of those that the kernel does not hold.
    pub(crate) service_changes: Counter,
    pub(crate) service_pending: Gauge,
    pub(crate) endpoint_changes: Counter,
    pub(crate) endpoint_pending: Gauge,
    /// The numbers of ServicePorts that drop packets for lack of a local endpoint, by the internal
    /// and by the external policy.
    pub(crate) no_local: [Gauge; 2],
    /// The durations of the steps of successful attempts: planning, encoding, the kernel.
    pub(crate) phases: [Histogram; 3],
    pub(crate) operations: Counter,
    pub(crate) bytes: Counter,
}

impl Default for FamilyCounters {
    fn default() -> Self {
        let sync = || Histogram::new(&SYNC_BUCKETS);
        Self {
            sync: sync(),
            full: sync(),
            partial: sync(),
            programming: Histogram::new(&PROGRAMMING_BUCKETS),
            failures: Counter::default(),
            partial_failures: Counter::default(),
            rules: Default::default(),
            rules_last: Default::default(),
            synced_at_ms: Gauge::default(),
            queued_at_ms: Gauge::default(),
            service_changes: Counter::default(),
            service_pending: Gauge::default(),
            endpoint_changes: Counter::default(),
            endpoint_pending: Gauge::default(),
            no_local: Default::default(),
            phases: std::array::from_fn(|_| Histogram::new(&PHASE_BUCKETS)),
            operations: Counter::default(),
            bytes: Counter::default(),
        }
    }
}

impl FamilyCounters {
    /// Counts the changes of an update.
    pub(crate) fn queued(&self, changes: Changes, now_ms: u64) {
        self.queued_at_ms.set(now_ms);
        self.service_changes.add(changes.services);
        self.endpoint_changes.add(changes.endpoints);
        // Only the engine writes here, so nothing is lost between reading and writing.
        let pending = self.service_pending.get() + changes.services;
        self.service_pending.set(pending);
        let pending = self.endpoint_pending.get() + changes.endpoints;
        self.endpoint_pending.set(pending);
    }

    /// Records that the kernel holds everything that was desired.
    pub(crate) fn caught_up(&self, now_ms: u64) {
        self.synced_at_ms.set(now_ms);
        self.service_pending.set(0);
        self.endpoint_pending.set(0);
    }

    /// Counts an attempt; `full` if it considered everything.
    pub(crate) fn attempted(&self, took: Duration, full: bool, applied: Option<&Applied>) {
        self.sync.observe(took);
        let kind = if full { &self.full } else { &self.partial };
        kind.observe(took);
        let Some(applied) = applied else {
            self.failures.add(1);
            self.partial_failures.add(u64::from(!full));
            return;
        };
        let steps = [applied.plan, applied.encode, applied.kernel];
        for (phase, took) in self.phases.iter().zip(steps) {
            phase.observe(took);
        }
        self.operations.add(applied.operations);
        self.bytes.add(applied.bytes);
        if let Some(rules) = applied.rules {
            let pairs = self.rules.iter().zip(rules.total);
            let last = self.rules_last.iter().zip(rules.last);
            pairs.chain(last).for_each(|(gauge, count)| gauge.set(count));
        }
    }

    /// Sets how many ServicePorts have no local endpoint although their policy requires one: internal
    /// policy, external policy.
    pub(crate) fn set_no_local(&self, counts: [u64; 2]) {
        for (gauge, count) in self.no_local.iter().zip(counts) {
            gauge.set(count);
        }
    }
}

/// The end of a preStop hook's wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrestopOutcome {
    /// No kernel leads to the Pod any more.
    Gone,
    /// The time was over.
    Bound,
    /// The time was over, and the Pod is the last endpoint of a Service.
    Last,
    /// The time was over without an answer of a control plane.
    Alone,
    /// Too many hooks wait.
    Busy,
    /// The request was not about a Pod.
    NoPod,
}

impl PrestopOutcome {
    const ALL: [Self; 6] = [
        Self::Gone,
        Self::Bound,
        Self::Last,
        Self::Alone,
        Self::Busy,
        Self::NoPod,
    ];

    /// Returns the name, in metrics and answers.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Bound => "bound",
            Self::Last => "last-endpoint",
            Self::Alone => "no-control-plane",
            Self::Busy => "busy",
            Self::NoPod => "no-pod",
        }
    }
}

/// The times that preStop hooks waited, by outcome.
#[derive(Debug)]
pub(crate) struct PrestopCounters([Histogram; PrestopOutcome::ALL.len()]);

impl Default for PrestopCounters {
    fn default() -> Self {
        Self(PrestopOutcome::ALL.map(|_| Histogram::new(&PRESTOP_BUCKETS)))
    }
}

impl PrestopCounters {
    /// Counts the end of a wait.
    pub(crate) fn observe(&self, outcome: PrestopOutcome, took: Duration) {
        self.0[outcome as usize].observe(took);
    }

    /// Returns the times of each outcome by its name.
    pub(crate) fn read(&self) -> [(&'static str, Distribution); PrestopOutcome::ALL.len()] {
        PrestopOutcome::ALL.map(|outcome| (outcome.name(), self.0[outcome as usize].read()))
    }
}

/// All counters of the agent.
#[derive(Debug, Default)]
pub struct Counters {
    /// The times that preStop hooks waited.
    pub(crate) prestop: Arc<PrestopCounters>,
    families: [FamilyCounters; 2],
    /// The number of failed attempts to open a health check node port (A25).
    pub(crate) service_health_failures: Counter,
    /// The numbers of health check node ports that are open, and that are closed but should be open.
    pub(crate) service_health_open: Gauge,
    pub(crate) service_health_closed: Gauge,
    /// The latest transactions with the kernel.
    pub(crate) transactions: Transactions,
}

impl Counters {
    /// Returns the counters of a family.
    pub fn family(&self, family: Family) -> &FamilyCounters {
        &self.families[family as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_counts_up_to_and_with_its_bounds() {
        let histogram = Histogram::new(&SYNC_BUCKETS);
        for ms in [1, 2, 3, 20_000] {
            histogram.observe(Duration::from_millis(ms));
        }
        let (sum, counts) = histogram.read();
        assert_eq!((sum, counts.len()), (20.006, 16));
        assert_eq!(counts[..3], [(0.001, 1), (0.002, 1), (0.004, 1)]);
        assert_eq!(counts[15], (f64::INFINITY, 1));
    }

    /// Section (h): 1 ms * 2^0..14.
    #[test]
    fn h_buckets_are_kube_proxys() {
        for (n, bound) in SYNC_BUCKETS.iter().enumerate() {
            let expected = 0.001 * f64::from(1_u32 << n);
            assert!((bound - expected).abs() < 1e-9, "{bound}");
        }
    }

    /// Section (h): 0.25, 0.5, 1..59, 60..115 step 5, 120..300 step 30.
    #[test]
    fn h_programming_buckets_are_kube_proxys() {
        let steps = [
            (0.25, 0.25, 2),
            (1.0, 1.0, 59),
            (60.0, 5.0, 12),
            (120.0, 30.0, 7),
        ];
        let expected = steps
            .into_iter()
            .flat_map(|(first, step, count)| (0..count).map(move |n| first + step * f64::from(n)));
        assert_eq!(expected.collect::<Vec<_>>(), PROGRAMMING_BUCKETS);
    }

    #[test]
    fn changes_are_pending_until_the_kernel_holds_them() {
        let counters = FamilyCounters::default();
        let changes = Changes {
            services: 2,
            endpoints: 3,
        };
        counters.queued(changes, 5);
        counters.queued(changes, 6);
        let read = |c: &FamilyCounters| [c.service_pending.get(), c.endpoint_pending.get()];
        assert_eq!(read(&counters), [4, 6]);
        counters.caught_up(7);
        assert_eq!(read(&counters), [0, 0]);
        assert_eq!(counters.service_changes.get(), 4);
        assert_eq!(
            (counters.queued_at_ms.get(), counters.synced_at_ms.get()),
            (6, 7)
        );
    }
}
