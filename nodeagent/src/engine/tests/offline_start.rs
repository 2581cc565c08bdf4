//! Serving from the cache file while no control plane answers.

use kplane_proto::v1::Confidence;
use tempfile::TempDir;

use super::checkpoint::{at, services};
use super::*;

const EMPTY: Duration = Duration::from_millis(100);
const SERVING: Duration = Duration::from_secs(2);

impl Rig {
    /// Creates an agent that has just started with a cache file of these objects.
    fn remembering(folder: &TempDir, objects: Vec<DesiredObject>) -> Self {
        let mut rig = Self::new(objects);
        rig.restart(at(folder));
        rig.snapshot();
        rig.restart(at(folder));
        rig.script.calls();
        rig
    }

    /// The machine restarts: the kernel is empty.
    fn reboot(&mut self) {
        self.script.set(|script| script.kernel.clear());
    }

    /// Lets everything happen that is due within a time.
    fn wait(&mut self, time: Duration) {
        let end = self.now.instant + time;
        while let Some(due) = self.core.due().filter(|due| *due <= end) {
            self.now.instant = self.now.instant.max(due);
            self.core.tick(self.now);
        }
        self.now.instant = end;
    }

    fn stale(&self) -> Option<u64> {
        self.core.report().stale_since_ms
    }
}

#[test]
fn a_node_without_a_control_plane_is_served_from_the_file() {
    let folder = TempDir::new().unwrap();
    let mut rig = Rig::remembering(&folder, services(3));
    rig.reboot();
    let sent = rig.core.report().resume;
    assert!(sent.is_some(), "the first connection resumes");
    rig.wait(EMPTY - Duration::from_millis(50));
    assert!(rig.script.calls().is_empty());
    rig.wait(Duration::from_secs(1));
    assert_eq!(rig.script.kernel().len(), 3);
    let report = rig.core.report();
    assert_eq!((report.applied, report.counts.services), (report.held, 3));
    let stale = report.failures.first().unwrap();
    assert!(
        stale.degraded && stale.reason.contains("cache file"),
        "{stale:?}"
    );
    // The time of the last confirmation survives as many starts as it takes.
    let since = report.stale_since_ms.unwrap();
    assert_eq!(since, stale.since_ms);
    rig.now.ms = since - 7_200_000;
    rig.restart(at(&folder));
    rig.wait(Duration::from_secs(3));
    assert_eq!((rig.stale(), rig.core.report().resume), (Some(since), sent));

    rig.script.calls();
    rig.put(&services(4)[3]);
    assert_eq!(
        rig.script.calls(),
        ["apply IPv4 s3"],
        "a difference, no snapshot"
    );
    assert_eq!((rig.stale(), rig.core.report().failures.len()), (None, 0));
}

#[test]
fn a_control_plane_that_answers_in_time_wins() {
    for snapshot in [true, false] {
        // One of its own: the first agent may save its newer state late.
        let folder = TempDir::new().unwrap();
        let mut rig = Rig::remembering(&folder, services(3));
        rig.plane.put(&services(4)[3]);
        let update = if snapshot { rig.plane.snapshot_update() } else { rig.plane.delta_update() };
        rig.update(update);
        let calls = rig.script.calls();
        assert_eq!(calls[0], "apply IPv4 complete s0,s1,s2,s3", "in one step");
        assert_eq!(rig.stale(), None);
        rig.wait(3 * SERVING);
        let calls = rig.script.calls();
        assert!(
            !calls.iter().any(|call| call.starts_with("apply")),
            "{calls:?}"
        );
    }
}

/// At the very end of the wait, both orders lead to the same state.
#[test]
fn an_answer_at_the_end_of_the_wait_meets_the_file_in_the_kernel() {
    let folder = TempDir::new().unwrap();
    let mut rig = Rig::remembering(&folder, services(3));
    rig.reboot();
    let end = rig.core.due().unwrap();
    rig.plane.put(&services(4)[3]);
    let update = rig.plane.delta_update();
    rig.now.instant = end;
    rig.core.tick(rig.now);
    rig.update(update);
    assert_eq!((rig.script.kernel().len(), rig.stale()), (4, None));
    assert_eq!(rig.core.report().resume.unwrap().digest, rig.plane.digest());
}

/// What the previous process left is at least as new as the file, so the agent waits longer.
#[test]
fn a_kernel_that_serves_is_left_alone_for_longer() {
    let folder = TempDir::new().unwrap();
    let mut rig = Rig::remembering(&folder, services(3));
    rig.script.set(|script| script.found = true);
    rig.wait(SERVING - Duration::from_millis(100));
    assert!(rig.script.calls().is_empty());
    rig.wait(Duration::from_secs(1));
    assert!(rig.script.calls()[0].starts_with("apply IPv4 complete"));
    assert!(rig.stale().is_some());
}

#[test]
fn nothing_is_served_from_a_file_without_services_or_where_it_is_off() {
    let folder = TempDir::new().unwrap();
    let rig = Rig::remembering(&folder, vec![node("z")]);
    assert_eq!(rig.core.due(), None);
    let mut rig = Rig::remembering(&folder, services(3));
    rig.restart(CheckpointSettings {
        offline_start: None,
        ..at(&folder)
    });
    assert_eq!(rig.core.due(), None);
    rig.wait(3 * SERVING);
    assert!(rig.script.calls().is_empty());
}

/// What is held stays held, and is judged again by the first snapshot.
#[test]
fn what_was_held_is_served_and_held_again() {
    let folder = TempDir::new().unwrap();
    let mut rig = Rig::remembering(&folder, services(40));
    rig.fail_over(Confidence::Unspecified, services(2));
    assert_eq!(rig.held(), Some(38));
    rig.restart(at(&folder));
    rig.reboot();
    assert_eq!(rig.core.report().resume, None, "only a snapshot will do");
    rig.wait(Duration::from_secs(1));
    assert_eq!(rig.script.kernel().len(), 40);
    rig.fail_over(Confidence::Unspecified, services(2));
    assert_eq!((rig.script.kernel().len(), rig.held()), (40, Some(38)));
    rig.restart(at(&folder));
    rig.reboot();
    rig.wait(Duration::from_secs(1));
    rig.fail_over(Confidence::Confirmed, services(2));
    assert_eq!((rig.script.kernel().len(), rig.held()), (2, None));
}

/// A control plane with another epoch makes another token, so the file is written although nothing else changed.
#[test]
fn the_token_of_another_epoch_is_saved() {
    let folder = TempDir::new().unwrap();
    let mut rig = Rig::remembering(&folder, services(3));
    rig.snapshot();
    rig.wait(Duration::from_secs(120));
    let soon = |rig: &Rig| rig.core.due().unwrap() - rig.now.instant < Duration::from_secs(10);
    rig.delta();
    assert!(!soon(&rig));
    rig.plane.epoch += 1;
    rig.delta();
    assert!(soon(&rig));
}

/// A kernel that refuses is tried again, as after any update.
#[test]
fn a_kernel_that_refuses_the_file_is_tried_again() {
    let folder = TempDir::new().unwrap();
    let mut rig = Rig::remembering(&folder, services(3));
    rig.reboot();
    rig.script.set(|script| script.broken = Family::ALL.to_vec());
    rig.wait(Duration::from_secs(1));
    assert_eq!(
        (rig.script.kernel().len(), rig.core.report().applied),
        (0, None)
    );
    rig.script.set(|script| script.broken.clear());
    rig.wait(Duration::from_secs(60));
    assert_eq!(rig.script.kernel().len(), 3);
    assert!(rig.stale().is_some());
}

/// Found by the simulation: the report did not name Services that the process before kept.
#[test]
fn services_that_were_kept_are_still_reported_as_kept() {
    let folder = TempDir::new().unwrap();
    let mut rig = Rig::remembering(&folder, services(4));
    rig.fail_over(Confidence::Partial, services(1));
    assert_eq!(rig.held(), Some(3));
    rig.restart(at(&folder));
    assert_eq!(rig.held(), None, "the file is not in effect yet");
    rig.wait(3 * SERVING);
    assert_eq!((rig.script.kernel().len(), rig.held()), (4, Some(3)));
    assert!(rig.stale().is_some());
    rig.plane.confidence = Confidence::Confirmed;
    rig.snapshot();
    assert_eq!((rig.script.kernel().len(), rig.held()), (1, None));
}
