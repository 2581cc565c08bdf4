//! Spread reports.

use super::*;

fn at(revision: u64) -> Report {
    let position = Some(Position { epoch: 1, revision });
    Report {
        held: position,
        applied: position,
        ..Report::default()
    }
}

const WITHIN_MS: u32 = 1_000;

async fn pass(ms: u64) {
    tokio::time::advance(Duration::from_millis(ms)).await;
}

#[tokio::test(start_paused = true)]
async fn a_small_fleet_reports_at_once() {
    let mut report_pacing = ReportPacing::default();
    assert!(report_pacing.observe(&at(1)));
    report_pacing.send(&at(1));
    assert!(report_pacing.observe(&at(2)));
    assert!(report_pacing.progress());
    assert_eq!(report_pacing.due(), None);
}

#[tokio::test(start_paused = true)]
async fn progress_of_a_large_fleet_is_spread_and_told_with_its_time() {
    let mut report_pacing = ReportPacing::default();
    report_pacing.spread_over(WITHIN_MS);
    assert!(
        report_pacing.observe(&at(1)),
        "the first report is not progress"
    );
    report_pacing.send(&at(1));
    let within = Duration::from_millis(WITHIN_MS.into());

    pass(5_000).await;
    assert!(!report_pacing.observe(&at(2)));
    let due = report_pacing.due().unwrap();
    assert!(due <= Instant::now() + within);
    pass(30).await;
    assert!(!report_pacing.observe(&at(5)));
    assert_eq!(
        report_pacing.due(),
        Some(due),
        "later progress does not put it off"
    );
    pass(20).await;
    let steps = report_pacing.send(&at(5));
    let step = |revision, ago_ms: u64| pb::Step {
        revision,
        ago_us: ago_ms * 1_000,
    };
    assert_eq!(steps, [step(2, 50), step(5, 20)]);
    assert_eq!(report_pacing.due(), None);

    // With changes all the time there is one report in that time.
    assert!(!report_pacing.progress());
    assert!(report_pacing.due().unwrap() >= Instant::now() + within);
    pass(10).await;
    assert_eq!(report_pacing.send(&at(5)), [], "each step is told once");
}

#[tokio::test(start_paused = true)]
async fn what_people_must_know_is_told_at_once() {
    let mut report_pacing = ReportPacing::default();
    report_pacing.spread_over(WITHIN_MS);
    report_pacing.send(&at(5));
    assert!(!report_pacing.observe(&at(6)));
    let back = Report {
        held: at(6).held,
        ..at(4)
    };
    let partial = Report {
        partial: true,
        ..at(6)
    };
    let mut elsewhere = at(6);
    elsewhere.held.as_mut().unwrap().epoch = 2;
    let mut broken = at(6);
    broken.families[0].repairs.count = 1;
    for news in [back, partial, elsewhere, broken] {
        assert!(report_pacing.observe(&news), "{news:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn steps_and_the_time_are_bounded() {
    let mut report_pacing = ReportPacing::default();
    report_pacing.spread_over(u32::MAX);
    report_pacing.send(&at(0));
    (1..=1_000).for_each(|revision| assert!(!report_pacing.observe(&at(revision))));
    assert!(report_pacing.due().unwrap() <= Instant::now() + MAX_WITHIN);
    let steps = report_pacing.send(&at(1_000));
    assert_eq!((steps.len(), steps[0].revision), (MAX_STEPS, 937));
}
