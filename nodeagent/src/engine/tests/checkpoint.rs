//! Tests of what survives a restart.

use std::time::Instant;

use kplane_proto::v1::Confidence;
use tempfile::TempDir;

use super::*;
use crate::cache::Cache;

pub(super) fn services(count: u8) -> Vec<DesiredObject> {
    let service = |number: u8| {
        let DesiredObject::Service(mut program) = svc(&format!("s{number}"), &["10.0.0.1:80"])
        else {
            panic!("a Service");
        };
        program.port.cluster_ip = [10, 96, 1, number].into();
        DesiredObject::Service(program)
    };
    (0..count).map(service).collect()
}

pub(super) fn at(folder: &TempDir) -> CheckpointSettings {
    CheckpointSettings {
        cache: Some(Cache::new(folder.path(), "n1".into())),
        offline_start: Some(OfflineStartSettings::default()),
        ..CheckpointSettings::default()
    }
}

impl Rig {
    /// Changes to another control plane, with these objects.
    pub(super) fn fail_over(&mut self, confidence: Confidence, objects: Vec<DesiredObject>) {
        let epoch = self.plane.epoch + 1;
        self.plane = Plane::new(objects);
        (self.plane.epoch, self.plane.confidence) = (epoch, confidence);
        self.snapshot();
    }

    fn snapshot_of(&mut self, cluster: &str) {
        let mut update = self.plane.snapshot_update();
        update.cluster = cluster.into();
        self.update(update);
    }

    pub(super) fn held(&self) -> Option<usize> {
        self.core.report().keeps.map(|held| held.services)
    }
}

/// Seen in practice: a restart on an empty folder, 1,000 Services became 0 within 68 ms.
#[test]
fn a_restart_beside_an_empty_source_keeps_everything() {
    let folder = TempDir::new().unwrap();
    let mut rig = Rig::new(services(40));
    rig.restart(at(&folder));
    rig.snapshot();
    rig.restart(at(&folder));
    let report = rig.core.report();
    assert_eq!(
        (report.held, report.counts.services, report.keeps),
        (None, 0, None)
    );
    rig.script.calls();
    rig.fail_over(Confidence::Unspecified, vec![node("z")]);
    assert_eq!((rig.script.kernel().len(), rig.held()), (40, Some(40)));
    assert_eq!(rig.core.report().counts.services, 40);
    assert_eq!(rig.revisions().0, 1, "applied all the same");

    // Held Services are remembered as well; an approved removal is final.
    rig.restart(at(&folder));
    rig.fail_over(Confidence::Unspecified, vec![node("z")]);
    assert_eq!((rig.script.kernel().len(), rig.held()), (40, Some(40)));
    rig.plane.confidence = Confidence::Confirmed;
    rig.delta();
    assert_eq!((rig.script.kernel().len(), rig.held()), (0, None));
    rig.restart(at(&folder));
    rig.fail_over(Confidence::Unspecified, vec![node("z")]);
    assert_eq!((rig.script.kernel().len(), rig.held()), (0, None));
}

/// A file of another cluster is no reason to keep anything, unless the kernel serves it.
#[test]
fn what_another_cluster_sent_is_kept_only_if_the_kernel_serves_it() {
    let folder = TempDir::new().unwrap();
    for (found, kept) in [(false, None), (true, Some(40))] {
        let mut rig = Rig::new(services(40));
        rig.restart(at(&folder));
        rig.snapshot_of("ours");
        rig.restart(at(&folder));
        rig.script.set(|script| {
            script.found = found;
            script.kernel.clear();
        });
        rig.plane = Plane::new(vec![svc("theirs", &[]), node("z")]);
        rig.plane.epoch = 7;
        rig.snapshot_of("theirs");
        assert_eq!(rig.held(), kept);
        let services = 1 + kept.unwrap_or_default();
        assert_eq!(rig.script.kernel().len(), services);
    }
}

/// The cache file is written after a short wait, every few seconds, and at once after a release.
#[test]
fn what_changes_is_written_down_every_few_seconds() {
    let folder = TempDir::new().unwrap();
    let (mut desired, mut checkpoint, _) = at(&folder).begin();
    desired.apply(Plane::new(services(3)).snapshot_update()).unwrap();
    let begin = Instant::now();
    let after = |tenths: u32| begin + SECOND * tenths / 10;
    checkpoint.changed(false, begin);
    assert_eq!(checkpoint.due(), None, "no kernel has served it");
    checkpoint.served = true;
    checkpoint.changed(false, after(5));
    assert_eq!(checkpoint.due(), Some(after(10)));
    checkpoint.hand_over(&desired, after(10));
    let refresh = after(10) + 3_600 * SECOND;
    assert_eq!(checkpoint.due(), Some(refresh));
    checkpoint.hand_over(&desired, refresh);
    assert_eq!(checkpoint.due(), Some(refresh + 3_600 * SECOND));
    checkpoint.changed(false, after(11));
    assert_eq!(checkpoint.due(), Some(after(60)));
    checkpoint.changed(true, after(12));
    assert_eq!(
        checkpoint.due(),
        Some(after(12)),
        "what was approved does not come back"
    );
    checkpoint.confirmation().set(12);
    checkpoint.close(&desired);
    let (remembered, checkpoint, _) = at(&folder).begin();
    assert_eq!(remembered.resume(), desired.resume());
    assert_eq!(checkpoint.confirmation().get(), 12);

    let (_, mut nowhere, _) = CheckpointSettings::default().begin();
    nowhere.changed(true, begin);
    assert_eq!(nowhere.due(), None);
}

#[test]
fn a_kernel_of_which_nothing_is_known_is_left_alone_until_the_picture_is_whole() {
    for (doubtful, objects) in [
        (Confidence::Partial, services(3)),
        (Confidence::Unspecified, vec![node("z")]),
    ] {
        let mut rig = Rig::new([]);
        rig.script.set(|script| script.found = true);
        rig.restart(CheckpointSettings::default());
        rig.fail_over(doubtful, objects);
        assert!(rig.script.calls().is_empty());
        rig.core.configure(NodeSettings::default(), rig.now);
        assert!(rig.script.calls().is_empty());
        let report = rig.core.report();
        assert!(report.keeps.unwrap().is_untouched());
        assert_eq!((report.applied, rig.core.due()), (None, None));
        rig.plane.confidence = Confidence::Confirmed;
        rig.delta();
        assert!(rig.script.calls()[0].starts_with("apply IPv4 complete"));
        assert_eq!(rig.core.report().keeps, None);
    }
    // The agent does not wait for a kernel without Services, or for one whose Services it
    // remembers.
    let folder = TempDir::new().unwrap();
    let mut rig = Rig::new([]);
    rig.restart(at(&folder));
    rig.fail_over(Confidence::Partial, services(3));
    assert_eq!(rig.script.kernel().len(), 3);
    rig.script.set(|script| script.found = true);
    rig.restart(at(&folder));
    rig.fail_over(Confidence::Partial, services(2));
    assert_eq!((rig.script.kernel().len(), rig.held()), (3, Some(1)));
}

/// The other folder's Services come, and none goes.
#[test]
fn failing_over_to_another_source_deletes_nothing() {
    let mut rig = Rig::settled(services(40));
    let mut others = services(50);
    others.drain(..45);
    rig.fail_over(Confidence::Unspecified, others);
    assert_eq!((rig.script.kernel().len(), rig.held()), (45, Some(40)));
    rig.fail_over(Confidence::Unspecified, services(40));
    assert_eq!(
        (rig.script.kernel().len(), rig.held()),
        (40, None),
        "and back"
    );
}
