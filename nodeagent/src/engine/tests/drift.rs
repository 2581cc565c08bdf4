//! Tests of other programs' changes, as the kernel reports them.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

impl Rig {
    /// Simulates another program's change, and lets the engine receive the notification.
    fn meddle(&mut self, family: Family) {
        self.script.set(|script| script.drifted.push((family, "the table is gone")));
        self.core.listen(self.now);
    }

    fn repairs(&self) -> [u64; 2] {
        self.core.report().families.map(|family| family.repairs.count)
    }
}

#[test]
fn what_others_do_is_put_right_at_once_and_looked_at_again_a_second_later() {
    let mut rig = Rig::settled([svc("a", &[])]);
    rig.meddle(Family::V4);
    assert_eq!(
        rig.revisions(),
        (0, 0),
        "not claimed while it is known to be wrong"
    );
    assert_eq!(rig.programmed(), [false, true]);
    assert_eq!(rig.next(), Duration::ZERO);
    assert_eq!(rig.script.calls(), ["mend IPv4"]);
    assert_eq!(rig.revisions(), (1, 1));
    let repairs = &rig.core.report().families[0].repairs;
    assert_eq!((repairs.count, &*repairs.last), (1, "the table is gone"));
    assert_eq!(repairs.last_ms, rig.now.ms);
    // There may be more that the kernel did not report.
    assert_eq!(rig.next(), SECOND);
    rig.idle();
    assert_eq!(rig.script.calls(), ["verify IPv4"]);
    assert_eq!(rig.repairs(), [1, 0]);
}

#[test]
fn somebody_who_keeps_on_meddling_is_answered_with_pauses() {
    let mut rig = Rig::settled([svc("a", &[])]);
    let started = rig.now.instant;
    let mut waits = Vec::new();
    for _ in 0..10 {
        rig.meddle(Family::V4);
        let mut waited = Duration::ZERO;
        let before = rig.repairs()[0];
        while rig.repairs()[0] == before {
            assert_eq!(rig.revisions(), (0, 0));
            waited += rig.next();
            // The check after the last repair finds nothing. The backoff stays all the same, because
            // the repair has just been undone.
            rig.core.listen(rig.now);
        }
        waits.push(waited);
    }
    assert_eq!(rig.repairs(), [10, 0]);
    assert_eq!(waits[0], Duration::ZERO);
    assert!(waits.iter().all(|wait| *wait <= 2 * SECOND), "{waits:?}");
    assert!(rig.now.instant - started > SECOND, "{waits:?}");
}

/// Everything is about to be applied, so there is nothing to repair before.
#[test]
fn what_is_not_known_is_not_put_right() {
    let mut rig = Rig::new([svc("a", &[])]);
    rig.meddle(Family::V4);
    assert_eq!(rig.core.due(), None);
    rig.snapshot();
    rig.idle();
    assert_eq!(rig.repairs(), [0, 0]);
}
