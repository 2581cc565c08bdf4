//! A background stream of probes that counts failures: "no connection was lost while ...".

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::client::{Outcome, PATIENCE, Probe};
use crate::histogram::Histogram;
use crate::netns::NetNs;
use crate::wait::eventually;

/// The rate of a [`Load`].
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Number of threads, each with one probe under way.
    pub threads: usize,
    /// Pause of a thread between two probes; zero for none.
    pub think: Duration,
}

/// Threads that repeat a probe. Dropping the load stops them.
#[derive(Debug)]
pub struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    /// One tally per thread, so that threads do not wait for each other.
    tallies: Vec<Arc<Mutex<Report>>>,
}

/// The results of a load so far.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Number of probes answered, by server name.
    pub answered: BTreeMap<String, u64>,
    /// Number of probes not answered, by reason.
    pub failed: BTreeMap<String, u64>,
    /// The time when the last of these ended, to find it in the logs of others.
    pub last_failed: Option<Instant>,
    /// Times of the answered probes, from first packet to the server's line.
    pub latency: Histogram,
    /// The longest time that a thread went without an answer.
    pub longest_gap: Duration,
}

impl Default for Pace {
    /// Returns 2 threads and 0.5 ms: about 3,000 probes a second, without using up a small machine.
    fn default() -> Self {
        Self {
            threads: 2,
            think: Duration::from_micros(500),
        }
    }
}

impl Load {
    /// Starts probing from a namespace.
    ///
    /// # Errors
    /// A thread could not be started there.
    pub fn start(ns: &NetNs, probe: Probe, pace: Pace) -> Result<Self> {
        let mut load = Self {
            stop: Arc::default(),
            threads: Vec::new(),
            tallies: Vec::new(),
        };
        // Under load from others, servers are slow. A packet that is lost on the way to them counts all the same.
        let probe = probe.timeout(probe.timeout.max(PATIENCE));
        for _ in 0..pace.threads {
            let tally = Arc::<Mutex<Report>>::default();
            let (stop, mine) = (load.stop.clone(), tally.clone());
            let thread = ns.spawn(move || repeat(&probe, pace.think, &stop, &mine))?;
            load.threads.push(thread);
            load.tallies.push(tally);
        }
        Ok(load)
    }

    /// Returns the results so far.
    pub fn report(&self) -> Report {
        let mut sum = Report::default();
        for tally in &self.tallies {
            sum.merge(&tally.lock().unwrap_or_else(PoisonError::into_inner));
        }
        sum
    }

    /// Waits until so many more probes were answered, or one was not.
    ///
    /// # Errors
    /// The time has passed.
    pub fn goes_on(&self, more: u64, within: Duration) -> Result<()> {
        let goal = self.report().ok() + more;
        eventually(within, "the load goes on", || match self.report() {
            report if report.ok() >= goal || report.lost() > 0 => Ok(()),
            report => Err(report.to_string()),
        })
    }

    /// Lets every thread finish its probe, and requires that each was answered, and one at least.
    ///
    /// # Errors
    /// A probe was not answered.
    pub fn unharmed(self) -> Result<()> {
        let report = self.stop();
        ensure!(report.lost() == 0 && report.ok() > 0, "{report}");
        Ok(())
    }

    /// Lets every thread finish its probe and returns the results.
    pub fn stop(mut self) -> Report {
        self.end();
        self.report()
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic in the thread has been printed already.
            let _ = thread.join();
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.end();
    }
}

impl Report {
    /// Returns the number of probes answered.
    pub fn ok(&self) -> u64 {
        self.answered.values().sum()
    }

    /// Returns the number of probes not answered.
    pub fn lost(&self) -> u64 {
        self.failed.values().sum()
    }

    fn record(&mut self, outcome: &Outcome, gap: Duration) {
        self.longest_gap = self.longest_gap.max(gap);
        match outcome {
            Outcome::Reply(reply) => {
                self.latency.record(reply.took);
                bump(&mut self.answered, &reply.name, 1);
            }
            failure => {
                self.last_failed = Some(Instant::now());
                bump(&mut self.failed, &failure.to_string(), 1);
            }
        }
    }

    /// Adds the results of another load.
    pub fn merge(&mut self, other: &Self) {
        for (name, count) in &other.answered {
            bump(&mut self.answered, name, *count);
        }
        for (reason, count) in &other.failed {
            bump(&mut self.failed, reason, *count);
        }
        self.last_failed = self.last_failed.max(other.last_failed);
        self.latency.merge(&other.latency);
        self.longest_gap = self.longest_gap.max(other.longest_gap);
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let latency = |percent| self.latency.percentile(percent);
        write!(
            f,
            "{} ok, {} failed {:?}, p50 {:?}, p99 {:?}, max {:?}, longest gap {:?}",
            self.ok(),
            self.lost(),
            self.failed,
            latency(50.0),
            latency(99.0),
            self.latency.max(),
            self.longest_gap
        )?;
        match self.last_failed {
            Some(at) => write!(f, ", last failure {:.1?} ago", at.elapsed()),
            None => Ok(()),
        }
    }
}

fn repeat(probe: &Probe, think: Duration, stop: &AtomicBool, tally: &Mutex<Report>) {
    let mut answered = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        let outcome = probe.here();
        let gap = answered.elapsed();
        if matches!(outcome, Outcome::Reply(_)) {
            answered = Instant::now();
        }
        tally.lock().unwrap_or_else(PoisonError::into_inner).record(&outcome, gap);
        if !think.is_zero() {
            thread::sleep(think);
        }
    }
}

/// Adds to a count; allocates a key only if it is new.
fn bump(counts: &mut BTreeMap<String, u64>, key: &str, by: u64) {
    match counts.get_mut(key) {
        Some(count) => *count += by,
        None => drop(counts.insert(key.to_owned(), by)),
    }
}
