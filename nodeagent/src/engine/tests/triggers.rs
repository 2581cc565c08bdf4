//! Tests of the time from a change in the cluster until the kernel holds its result (section (h)).

use kplane_proto::v1 as pb;

use super::*;

const HOUR: Duration = Duration::from_secs(3_600);

fn trigger(id: u64, family: Family, at_ms: u64) -> pb::Trigger {
    pb::Trigger {
        id,
        family: pb::Family::from(family).into(),
        at_ms,
    }
}

/// Creates a rig whose clock is ahead of the machine's, so that the test's own time is not
/// measured.
fn rig() -> Rig {
    let mut rig = Rig::settled([svc("a", &[]), svc6("a", &[])]);
    rig.after(HOUR);
    rig.idle();
    rig
}

impl Rig {
    /// Sends an update that these changes led to.
    fn triggered(&mut self, objects: &[DesiredObject], triggers: &[pb::Trigger]) {
        objects.iter().for_each(|object| self.plane.put(object));
        self.plane.triggers = triggers.to_vec();
        self.delta();
        self.plane.triggers.clear();
    }

    /// Returns the sum in seconds and the number of observations.
    fn observed(&self, family: Family) -> (f64, u64) {
        let (sum, counts) = self.counters.family(family).programming.read();
        (sum, counts.iter().map(|(_, count)| count).sum())
    }

    /// Returns `number: id after milliseconds` of the report.
    fn reported(&self) -> Vec<String> {
        let triggers = self.core.report().triggers;
        let text = |one: &crate::report::TriggerProgrammed| {
            assert_eq!(one.epoch, EPOCH);
            format!("{}: {} after {}", one.number, one.id, one.latency_ms)
        };
        triggers.iter().map(text).collect()
    }
}

#[test]
fn h_latency_is_from_the_trigger_to_the_acknowledgement() {
    let mut rig = rig();
    let now = rig.now.ms;
    let first = [
        trigger(7, Family::V4, now - 1_500),
        trigger(8, Family::V4, now - 500),
    ];
    rig.triggered(&[svc("a", &["10.0.0.1:80"])], &first);
    assert_eq!(rig.observed(Family::V4), (2.0, 2));
    assert_eq!(rig.observed(Family::V6), (0.0, 0));
    assert_eq!(rig.reported(), ["1: 7 after 1500", "2: 8 after 500"]);
    // Each trigger counts once, and no time is negative.
    rig.put(&svc("a", &[]));
    rig.triggered(&[svc6("a", &[])], &[trigger(9, Family::V6, now + 2_000)]);
    assert_eq!(rig.observed(Family::V4), (2.0, 2));
    assert_eq!(rig.observed(Family::V6), (0.0, 1));
    assert_eq!(rig.reported()[2..], ["3: 9 after 0"]);
}

#[test]
fn h_a_family_that_fails_observes_nothing_until_it_succeeds() {
    let mut rig = rig();
    rig.script.set(|script| script.broken.push(Family::V6));
    let now = rig.now.ms;
    rig.triggered(
        &[svc("a", &["10.0.0.1:80"]), svc6("a", &["[fd00::2]:80"])],
        &[
            trigger(1, Family::V4, now - 100),
            trigger(2, Family::V6, now - 100),
        ],
    );
    assert_eq!(
        rig.reported(),
        ["1: 1 after 100"],
        "the other family goes on"
    );
    // Another change while it waits, and then the kernel takes everything.
    rig.triggered(
        &[svc6("a", &["[fd00::3]:80"])],
        &[trigger(3, Family::V6, now - 40)],
    );
    assert_eq!(rig.observed(Family::V6).1, 0);
    rig.script.set(|script| script.broken.clear());
    let waited = u64::try_from(rig.next().as_millis()).unwrap();
    assert!(waited > 0);
    let expected = [
        format!("2: 2 after {}", waited + 100),
        format!("3: 3 after {}", waited + 40),
    ];
    assert_eq!(rig.reported()[1..], expected);
    assert_eq!(rig.observed(Family::V6).1, 2);
}

#[test]
fn what_waits_and_what_is_remembered_is_bounded() {
    let mut rig = rig();
    rig.script.set(|script| script.broken.push(Family::V4));
    let now = rig.now.ms;
    for round in 0..20 {
        let triggers: Vec<_> =
            (0..200).map(|n| trigger(round * 200 + n, Family::V4, now)).collect();
        let endpoint = format!("10.0.0.{round}:80");
        rig.triggered(&[svc("a", &[&endpoint])], &triggers);
    }
    rig.script.set(|script| script.broken.clear());
    rig.next();
    assert_eq!(rig.observed(Family::V4).1, 1_024, "the newest of 4,000");
    let reported = rig.reported();
    assert_eq!(reported.len(), 64);
    assert!(
        reported[63].starts_with("1024: 3999 after "),
        "{}",
        reported[63]
    );
}

/// An update that is not taken is not measured.
#[test]
fn h_a_refused_update_is_not_measured() {
    let mut rig = rig();
    rig.plane.triggers = vec![trigger(1, Family::V4, rig.now.ms)];
    rig.plane.put(&svc("a", &["10.0.0.1:80"]));
    let mut update = rig.plane.delta_update();
    update.changes = Default::default();
    assert!(rig.core.take(update).is_err());
    rig.plane.triggers.clear();
    rig.snapshot();
    assert_eq!(rig.observed(Family::V4).1, 0);
}
