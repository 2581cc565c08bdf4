//! The engine on its thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesOrdered;

use super::*;
use kplane_dataplane::backend::ServerCounts;

#[tokio::test]
async fn the_thread_takes_applies_and_reports() {
    let engine = Engine::spawn(|| Ok(noop::open()), NodeSettings::default()).await.unwrap();
    assert_eq!(engine.backend().name, "noop");
    let mut plane = Plane::new([svc("a", &[])]);
    engine.submit(plane.snapshot_update()).await.unwrap().unwrap();
    let mut reports = engine.reports();
    let verified = Some(Position {
        epoch: EPOCH,
        revision: 1,
    });
    reports.wait_for(|report| report.verified == verified).await.unwrap();
    let mut bad = plane.delta_update();
    bad.digest = Default::default();
    let refusal = engine.submit(bad).await.unwrap().unwrap_err();
    assert!(matches!(refusal, Refusal::Digest { .. }));
    // The last handle stops it.
    drop(engine);
    while reports.changed().await.is_ok() {}
}

#[tokio::test]
async fn a_backend_that_cannot_open_is_the_callers_error() {
    let open = || {
        Err(OpenError {
            backend: "scripted",
            reason: "no nf_tables in this kernel".into(),
        })
    };
    let error = Engine::spawn(open, NodeSettings::default()).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "backend scripted: no nf_tables in this kernel"
    );
}

/// Updates that arrive while the kernel is busy are taken together afterwards, and their sum is programmed once.
#[tokio::test(start_paused = true)]
async fn what_waits_for_a_busy_kernel_is_programmed_at_once() {
    struct Stuck(std::sync::mpsc::Receiver<()>, Arc<AtomicU64>);
    impl Side for Stuck {
        fn apply(&mut self, _: Change<'_>) -> Result<Applied, ApplyError> {
            self.1.fetch_add(1, Ordering::Relaxed);
            let _ = self.0.recv();
            Ok(Applied::default())
        }
        fn verify(&mut self) -> Result<Verification, ApplyError> {
            Ok(Verification::Equal)
        }
    }
    let (release, authenticator) = std::sync::mpsc::channel();
    let mut authenticator = Some(authenticator);
    let applied = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&applied);
    let side = move |_| match authenticator.take() {
        Some(authenticator) => Box::new(Stuck(authenticator, Arc::clone(&count))) as Box<dyn Side>,
        None => Box::new(Noop::default()),
    };
    let open = move || Ok(noop::open_with(side));
    let engine = Engine::spawn(open, NodeSettings::default()).await.unwrap();
    let mut plane = Plane::new([svc("a", &[])]);
    let snapshot = plane.snapshot_update();
    engine.submit(snapshot).await.unwrap().unwrap();
    let begin = Instant::now();
    while applied.load(Ordering::Relaxed) == 0 {
        assert!(
            begin.elapsed() < Duration::from_secs(30),
            "not in the kernel"
        );
        std::thread::yield_now();
    }
    // The pulse shows how long the engine has been busy.
    assert!(engine.pulse().busy_for(Instant::now()).is_some());
    let mut answers = Vec::new();
    for name in ["b", "c", "d"] {
        plane.put(&svc(name, &[]));
        let (waits, answer) = command(plane.delta_update());
        engine.place().await.unwrap().send(waits);
        answers.push(answer);
    }
    // The stream that brought this one is gone.
    let (orphan, _) = command(plane.delta_update());
    engine.place().await.unwrap().send(orphan);
    drop(release);
    for answer in answers {
        answer.await.unwrap().unwrap();
    }
    let mut reports = engine.reports();
    let done =
        reports.wait_for(|report| report.applied.is_some_and(|at| at.revision == plane.revision));
    let counts = done.await.unwrap().counts;
    assert_eq!(counts.services, 4);
    assert_eq!(applied.load(Ordering::Relaxed), 2);
    while engine.pulse().busy_for(Instant::now()).is_some() {
        assert!(begin.elapsed() < Duration::from_secs(60), "busy for ever");
        std::thread::yield_now();
    }
}

/// Changes arrive faster than the kernel takes them. The engine still reads back in between.
#[tokio::test]
async fn a_kernel_that_is_slow_is_read_back_while_changes_wait() {
    const UPDATES: u64 = 200;
    let looks = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&looks);
    // Time enough for the next change to arrive.
    let takes = Duration::from_millis(2);
    let side = move |_| {
        let looks = Arc::clone(&counter);
        Box::new(Busy { looks, takes }) as Box<dyn Side>
    };
    let engine = Engine::spawn(|| Ok(noop::open_with(side)), NodeSettings::default())
        .await
        .unwrap();
    let mut plane = Plane::new([svc("a", &[])]);
    let first = plane.snapshot_update();
    engine.submit(first).await.unwrap().unwrap();
    let mut waiting = FuturesOrdered::new();
    let mut seen = Vec::new();
    for number in 0..UPDATES {
        let endpoints: &[&str] = if number % 2 == 0 { &["10.244.0.1:80"] } else { &[] };
        plane.put(&svc("a", endpoints));
        waiting.push_back(engine.submit(plane.delta_update()));
        // There is always a change that waits.
        if waiting.len() > 3 {
            waiting.next().await.unwrap().unwrap().unwrap();
            seen.push(looks.load(Ordering::Relaxed));
        }
    }
    let read_back = seen.last().unwrap() - seen[0];
    assert!(read_back > UPDATES / 10, "{read_back} times");
}

/// A kernel that is read back a thousand times a second; each time there is one connection more.
struct Busy {
    looks: Arc<AtomicU64>,
    /// Time that a change takes.
    takes: Duration,
}

impl Side for Busy {
    fn apply(&mut self, _: Change<'_>) -> Result<Applied, ApplyError> {
        std::thread::sleep(self.takes);
        Ok(Applied::default())
    }

    fn verify(&mut self) -> Result<Verification, ApplyError> {
        self.looks.fetch_add(1, Ordering::Relaxed);
        Ok(Verification::Equal)
    }

    fn probe_interval(&self) -> Option<Duration> {
        Some(Duration::from_millis(1))
    }

    fn servers(&self) -> Option<ServerCounts> {
        let mut counts = ServerCounts::default();
        counts.connections.active = self.looks.load(Ordering::Relaxed);
        Some(counts)
    }
}

/// A read-back that finds only other connections wakes no receiver. The latest counts are there for
/// later readers.
#[tokio::test]
async fn a_look_that_finds_only_other_connections_wakes_nobody() {
    let looks = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&looks);
    let side = move |_| {
        let (looks, takes) = (Arc::clone(&counter), Duration::ZERO);
        Box::new(Busy { looks, takes }) as Box<dyn Side>
    };
    let engine = Engine::spawn(|| Ok(noop::open_with(side)), NodeSettings::default())
        .await
        .unwrap();
    let mut reports = engine.reports();
    let update = Plane::new([svc("a", &[])]).snapshot_update();
    engine.submit(update).await.unwrap().unwrap();
    let verified = reports.wait_for(|report| report.verified.is_some());
    verified.await.unwrap();
    let seen = looks.load(Ordering::Relaxed);
    while looks.load(Ordering::Relaxed) < seen + 50 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(!reports.has_changed().unwrap());
    let servers = reports.borrow().servers.clone();
    let active = servers.map(|counts| counts.unwrap().connections.active);
    assert!(
        active.iter().all(|active| *active > seen + 40),
        "{active:?}"
    );
}
