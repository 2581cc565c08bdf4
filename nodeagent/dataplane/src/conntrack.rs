//! The sweeper of conntrack entries: one thread ends the flows that a change left behind.
//!
//! ```text
//! commit of Services: Tracker (what changed) -----.
//! commit of policies: addresses that lost something -> Schedule (when to scan) -> Pass (list, decide, delete)
//!                                                                                   | lots of flows     ^
//!                                                                                   '-> engine judges --'
//! ```
//!
//! * **Stale UDP flows** (F1 to F5). A UDP client that keeps its source port keeps its conntrack entry, and with it the
//!   endpoint that was chosen for its first packet. So after a commit, kplane asks the kernel for the entries that the
//!   change may concern. It deletes the entries that do not lead to a serving endpoint, and the next packet is balanced
//!   anew.
//! * **Connections without a reply**. Entries of TCP and SCTP stay (F5), except for those to an endpoint that was taken out
//!   of service before it answered: the client sends again, and is led to another endpoint. They are deleted at the second
//!   scan only, when an answer that was on its way has arrived; at once if the address is in service again, as another
//!   Pod's.
//! * **Connections to dead nodes**. When the control plane finds a node dead, entries of TCP and SCTP to its endpoints go, with
//!   a reply or without. The client's next packet is led to another endpoint, which resets the connection. They are deleted at
//!   the first scan only, and only while the endpoint is marked.
//! * **Connections that policies deny** (NP13). Only the engine knows what policies say, so it judges the flows of
//!   addresses that lost something. A flow of TCP is deleted: the table refuses segments from the midst of a connection.
//!   All others are marked ([`CUT`](crate::backend::nftables::CUT)), since each datagram of the other side would begin the
//!   flow anew, the other way round. A mark lasts as long as its flow, and costs no memory; the table takes it back when
//!   it allows a packet of the side that began.
//!
//! **Invariants.** An entry of TCP or SCTP with a reply is never deleted because of a Service, unless its endpoint is dead.
//! Nothing here runs before the commit, delays it or its report, or makes it fail. A commit that takes nothing from a Service or
//! an address costs no system call. Every change is scanned for twice: a packet that was in transit during the commit may have
//! created its entry by the old rules just after the first scan. What fails is scanned for again.

mod flows;
mod schedule;
mod totals;
mod tracker;

#[cfg(test)]
pub(crate) mod tests;

pub(crate) use flows::{Filter, open};
pub use totals::{
    BUCKETS, ConntrackCounts, ConntrackTotals, EndedConnections, FailedScans, bucket_bound,
};
pub use tracker::{Tracker, Verdict, Work};

use std::cell::OnceCell;
use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use kplane_model::Family;
use kplane_netlink::NfSocket;
pub use kplane_netlink::conntrack::{AnyFlow, Flow, IPS_DST_NAT, IPS_SEEN_REPLY, Tuple};
use nix::time::{ClockId, clock_gettime};
use parking_lot::Mutex;

use self::flows::{Pass, SweepError, Swept};
use self::schedule::{Budget, Job, Schedule};
use crate::backend::{Change, Failure};
use crate::chain;

/// Time after which a thread without work looks for some.
const IDLE: Duration = Duration::from_secs(3600);

/// The function that gets lots of flows, of one family each, to judge. Denied ones come back by [`Sweeper::cut`].
pub type Hand = Box<dyn Fn(Vec<AnyFlow>) + Send>;

/// A handle to the thread, which ends some time after its last handle.
#[derive(Clone, Debug)]
pub struct Sweeper {
    families: Arc<[Mutex<FamilyState>; 2]>,
    wake: SyncSender<()>,
}

#[derive(Debug, Default)]
struct FamilyState {
    tracker: Tracker,
    schedule: Schedule,
    /// Flows that policies deny, to be cut at once.
    denied: Vec<AnyFlow>,
    /// The error of the last pass. An error that lasts is logged once.
    error: Option<String>,
}

impl Sweeper {
    /// Starts the thread in the calling thread's network namespace. The thread counts scans for stale UDP flows in
    /// `counts`.
    ///
    /// # Errors
    /// The thread could not be started.
    pub fn start(counts: ConntrackCounts, hand: Hand) -> std::io::Result<Self> {
        let families = Arc::<[Mutex<FamilyState>; 2]>::default();
        let (wake, woken) = sync_channel(1);
        let mut thread = SweeperThread {
            families: families.clone(),
            socket: None,
            budget: Budget::default(),
            counts,
            hand,
        };
        let run = move || thread.run(&woken);
        std::thread::Builder::new().name("conntrack".to_owned()).spawn(run)?;
        Ok(Self { families, wake })
    }

    /// Records that the data path holds a change, except for `failures`. O(changed ServicePorts).
    pub fn committed(&self, change: &Change<'_>, failures: &[Failure]) {
        self.update(change.family, |family| {
            let work = family.tracker.commit(change, failures);
            family.schedule.add(work, Instant::now())
        });
    }

    /// Has all flows of a family scanned: some may have begun while another program's change was in effect.
    pub fn doubt(&self, family: Family) {
        let work = Work {
            everything: true,
            ..Work::default()
        };
        self.update(family, |family| family.schedule.add(work, Instant::now()));
    }

    /// Has the flows of these addresses judged.
    pub fn judge(&self, family: Family, judged: HashSet<IpAddr>) {
        let work = Work {
            judged,
            ..Work::default()
        };
        self.update(family, |family| family.schedule.add(work, Instant::now()));
    }

    /// Has flows cut that policies deny.
    pub fn cut(&self, family: Family, denied: Vec<AnyFlow>) {
        self.update(family, |family| {
            family.denied.extend(denied);
            !family.denied.is_empty()
        });
    }

    /// Changes the state of a family by a function that returns whether the thread has to know.
    fn update(&self, family: Family, change: impl FnOnce(&mut FamilyState) -> bool) {
        if change(&mut self.families[family as usize].lock()) {
            // If a call waits already, it covers this one.
            let _ = self.wake.try_send(());
        }
    }
}

struct SweeperThread {
    families: Arc<[Mutex<FamilyState>; 2]>,
    socket: Option<(NfSocket, Filter)>,
    budget: Budget,
    counts: ConntrackCounts,
    hand: Hand,
}

impl SweeperThread {
    fn run(&mut self, woken: &Receiver<()>) {
        loop {
            let now = Instant::now();
            let next_at = self.budget.next_at(now);
            let due = self.families.iter().filter_map(|family| family.lock().due(now, next_at));
            let wait = due.min().map_or(IDLE, |due| due.saturating_duration_since(now));
            if woken.recv_timeout(wait) == Err(RecvTimeoutError::Disconnected) {
                return;
            }
            // Both families have a turn, whatever the first one costs.
            let is_paid = next_at <= Instant::now();
            Family::ALL.into_iter().for_each(|family| self.sweep(family, is_paid));
        }
    }

    /// Does what is due in a family; scans only if they are paid for.
    fn sweep(&mut self, family: Family, is_paid: bool) {
        let (started, processor) = (Instant::now(), processor_time());
        let state = &self.families[family as usize];
        let job = {
            let mut state = state.lock();
            let job = if is_paid { state.schedule.take(started) } else { Job::default() };
            if job.work.is_empty() && state.denied.is_empty() {
                return;
            }
            job
        };
        let pass = Pass {
            family,
            work: &job.work,
            state,
            hand: &self.hand,
            own: OnceCell::new(),
        };
        let mut swept = Swept::default();
        let result = pass.run(&mut self.socket, &mut swept);
        let took = started.elapsed();
        if job.work.seeks_stale() {
            let error = result.as_ref().err().map(|error| chain(error));
            self.counts.count(family, swept.deleted, error, took);
        }
        self.counts.ended(family, swept.half_open, swept.dead, swept.cut);
        self.counts.ended_of(std::mem::take(&mut swept.ended));
        let spent = processor_time()
            .zip(processor)
            .map_or(took, |(now, then)| now.saturating_sub(then));
        let now = Instant::now();
        self.budget.spend(now, spent);
        if swept != Swept::default() {
            tracing::info!(
                %family, deleted = swept.deleted, half_open = swept.half_open, dead = swept.dead, cut = swept.cut, ?took,
                "deleted stale UDP flows, deleted connections that wait for endpoints out of service or lead to dead \
                 nodes, and cut denied connections"
            );
        }
        state.lock().finish(family, job, result, now);
    }
}

/// Returns the processor time that the calling thread has taken, also in the kernel; `None` if the kernel does not say.
fn processor_time() -> Option<Duration> {
    let taken = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID);
    taken.ok().map(Duration::from)
}

impl FamilyState {
    /// Returns when there is something to do, if scans are paid for at `next_at`.
    fn due(&self, now: Instant, next_at: Instant) -> Option<Instant> {
        if self.denied.is_empty() {
            self.schedule.due(now).map(|due| due.max(next_at))
        } else {
            Some(now)
        }
    }

    /// Records the outcome of a pass. After a failure, the flows of all addresses are judged again of which flows were to be
    /// cut.
    fn finish(
        &mut self,
        family: Family,
        mut job: Job,
        result: Result<(), SweepError>,
        now: Instant,
    ) {
        let Err(error) = result else {
            self.error = None;
            self.schedule.done(job, now);
            return;
        };
        let denied = std::mem::take(&mut self.denied);
        let ends = denied.iter().flat_map(|flow| [flow.source, flow.destination]);
        job.work.judged.extend(ends);
        let (wait, reason) = (self.schedule.failed(job, now), chain(&error));
        if self.error.replace(reason.clone()).as_ref() != Some(&reason) {
            tracing::warn!(
                %family,
                error = reason,
                ?wait,
                "cannot sweep conntrack entries; trying again with pauses of up to 30 s. UDP clients that keep their \
                 source port may still reach removed endpoints, connections that begin may wait for these, and \
                 connections that policies deny may live on"
            );
        }
    }
}
