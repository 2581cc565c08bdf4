//! A node's agent: its client, desired state, engine and cache format are real; its kernel and its wire are scripted.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use kp_nodeagent::cache::{Cache, MemoryFile};
use kp_nodeagent::connection::Connection;
use kp_nodeagent::desired::CliffGuard;
use kp_nodeagent::engine::{CheckpointSettings, Engine, OfflineStartSettings};
use kp_nodeagent::report::Report;
use kp_nodeagent::sync::{Client, Identity};
use kplane_model::{NodeName, ServiceName};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};

use crate::kernel::Kernel;
use crate::ledger::{Claim, FITS, RESTS, lock};
use crate::plan::Crash;
use crate::source::CLIFF;
use crate::truth::node_name;
use crate::wire::Wire;

/// Times that a task is woken at the same time, at most.
const POLLS: u32 = 1_000;

/// The time in which an agent ends in order.
const END: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) node: u8,
    pub(crate) kernel: Kernel,
    pub(crate) wire: Wire,
    file: MemoryFile,
    /// Earlier contents of the cache file, oldest first.
    files: Vec<Vec<u8>>,
    process: Option<Process>,
    /// The client, and the engine, do nothing before this time.
    thaw: [watch::Sender<Instant>; 2],
    /// The number of processes so far.
    starts: u64,
    pub(crate) restart_at: Option<Instant>,
    /// Processes give the tables of NetworkPolicies no owner.
    older: bool,
}

#[derive(Debug)]
struct Process {
    engine: Engine,
    reports: watch::Receiver<Report>,
    client: JoinHandle<()>,
    work: JoinHandle<()>,
}

impl Agent {
    pub(crate) fn new(wire: Wire) -> Self {
        Self {
            node: wire.node,
            kernel: wire.kernel.clone(),
            wire,
            file: MemoryFile::default(),
            files: Vec::new(),
            process: None,
            thaw: [(); 2].map(|()| watch::Sender::new(Instant::now())),
            starts: 0,
            restart_at: Some(Instant::now()),
            older: false,
        }
    }

    fn name(&self) -> NodeName {
        node_name(self.node)
    }

    /// Starts the process if it is time for that.
    pub(crate) fn start_if_due(&mut self) {
        if self.restart_at.is_none_or(|at| at > Instant::now()) {
            return;
        }
        self.restart_at = None;
        self.starts += 1;
        let content = lock(&self.file).clone();
        let known = Cache::parse(content, &self.name()).ok();
        let position = known.map(|snapshot| (snapshot.position.epoch, snapshot.position.revision));
        lock(&self.wire.ledger).starts(self.node, position);
        let restore = CheckpointSettings {
            guard: CliffGuard {
                enabled: true,
                share_percent: u8::try_from(CLIFF.0).unwrap_or(100),
                minimum: CLIFF.1 as u64,
            },
            cache: Some(Cache::in_memory(self.file.clone(), self.name())),
            offline_start: Some(OfflineStartSettings::default()),
        };
        let (engine, work) = Engine::local(self.kernel.open(self.older), restore);
        let identity = Identity {
            node: self.name(),
            instance: self.starts,
            mode_unset: false,
        };
        let client = Client::new(self.wire.clone(), identity, engine.clone());
        tokio::spawn(follow(client.connection(), self.wire.clone()));
        let client = async move {
            client.run().await;
        };
        self.freeze(Duration::ZERO);
        self.process = Some(Process {
            reports: engine.reports(),
            engine,
            client: tokio::spawn(freezing(
                resting(client, self.wire.clone()),
                self.thaw[0].subscribe(),
            )),
            work: tokio::spawn(freezing(
                resting(work, self.wire.clone()),
                self.thaw[1].subscribe(),
            )),
        });
    }

    /// Stops the process for a time.
    pub(crate) fn freeze(&self, time: Duration) {
        for thaw in &self.thaw {
            thaw.send_replace(Instant::now() + time);
        }
    }

    /// Ends the process in order.
    pub(crate) async fn stop(&mut self) {
        self.freeze(Duration::ZERO);
        if let Some(process) = self.process.take() {
            process.client.abort();
            drop(process.engine);
            let ended = timeout(END, process.work).await;
            assert!(ended.is_ok(), "the engine ends when its handles are gone");
        }
        self.restart_at.get_or_insert(Instant::now());
    }

    /// Puts another version in the place of the process.
    pub(crate) async fn replace(&mut self, lacks: u64) {
        self.older = lacks != 0;
        lock(&self.wire.weather).lacks = lacks;
        self.stop().await;
    }

    /// Returns whether the version is not the newest one.
    pub(crate) fn is_older(&self) -> bool {
        self.older
    }

    /// Ends the process at once.
    pub(crate) async fn crash(&mut self, crash: Crash, time: Duration) {
        if crash == Crash::Machine {
            lock(&self.wire.weather).silence();
            self.kernel.reboot();
        }
        if let Some(process) = self.process.take() {
            process.client.abort();
            process.work.abort();
            let (_, _) = (process.client.await, process.work.await);
        }
        let mut file = lock(&self.file);
        match crash {
            Crash::Process | Crash::Machine => {}
            Crash::OldFile => *file = self.files.pop().unwrap_or_default(),
            Crash::TornFile => {
                let half = file.len() / 2;
                file.truncate(half);
            }
            Crash::NoFile => file.clear(),
        }
        drop(file);
        self.restart_at = Some(Instant::now() + time);
    }

    /// Remembers the cache file, if it is new.
    pub(crate) fn keep_file(&mut self) {
        let file = lock(&self.file);
        if !file.is_empty() && self.files.last() != Some(&*file) {
            self.files.push(file.clone());
        }
    }

    /// Returns whether the process died in the midst of a change.
    pub(crate) fn has_died(&self) -> bool {
        self.process.is_some() && self.kernel.has_died()
    }

    /// Checks what the kernel does with packets.
    pub(crate) fn judge(&self, claim: Claim) {
        if self.has_died() {
            return lock(&self.wire.ledger).died(self.node);
        }
        let packets = Arc::clone(lock(&self.wire.ledger).packets());
        let passing = self.kernel.passing_now(&packets);
        let transactions = self.kernel.transactions();
        lock(&self.wire.ledger).passes(self.node, passing, transactions, claim);
    }

    /// Returns the latest report of the engine.
    pub(crate) fn report(&self) -> Option<watch::Ref<'_, Report>> {
        Some(self.process.as_ref()?.reports.borrow())
    }

    /// Makes the engine read the kernel's notifications, as a real kernel does.
    pub(crate) fn alarm(&self) {
        if let Some(process) = &self.process {
            let engine = process.engine.clone();
            tokio::spawn(async move { drop(engine.inspect(ServiceName::new("", "")).await) });
        }
    }
}

/// Checks the reasons for which an agent loses its streams.
async fn follow(mut connection: watch::Receiver<Connection>, wire: Wire) {
    while connection.changed().await.is_ok() {
        let reason = connection.borrow_and_update().reason.clone();
        if reason.contains("digest") {
            let text = format!("n{}: {reason}", wire.node);
            lock(&wire.ledger).break_invariant(FITS, text);
        }
    }
}

/// Does work, and ends it when it goes on without a rest.
async fn resting(work: impl Future<Output = ()>, wire: Wire) {
    let mut work = std::pin::pin!(work);
    let (mut at, mut polls) = (Instant::now(), 0);
    let rested = std::future::poll_fn(|context| {
        let now = Instant::now();
        polls = if now == at { polls + 1 } else { 0 };
        at = now;
        if polls < POLLS {
            return work.as_mut().poll(context);
        }
        let text = format!("the agent of n{} works without end", wire.node);
        lock(&wire.ledger).break_invariant(RESTS, text);
        Poll::Ready(())
    });
    rested.await;
}

/// Does the work of a process, except while the process is stopped.
async fn freezing(work: impl Future<Output = ()>, mut thaw: watch::Receiver<Instant>) {
    let mut work = std::pin::pin!(work);
    loop {
        let at = *thaw.borrow_and_update();
        if at > Instant::now() {
            tokio::select! {
                biased;
                changed = thaw.changed() => if changed.is_err() { return },
                () = sleep_until(at) => {}
            }
            continue;
        }
        tokio::select! {
            biased;
            changed = thaw.changed() => if changed.is_err() { return },
            () = &mut work => return,
        }
    }
}
