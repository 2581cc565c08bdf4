//! What the benchmarks of fleets count.

use anyhow::Result;
use kplane_tests::fleet::{STAMP_BITS, stamp_of};
use kplane_tests::rivals::watches::Events;

pub(in crate::chart) fn events_end_wherever_their_bytes_are_cut() -> Result<()> {
    let stream = [0, 0, 0, 2, 7, 7, 0, 0, 0, 1, 7];
    for cut in 0..stream.len() {
        let mut events = Events::default();
        let (first, second) = stream.split_at(cut);
        assert_eq!(events.ends(first), usize::from(cut >= 6), "{cut}");
        assert_eq!(events.ends(second), 2 - usize::from(cut >= 6), "{cut}");
    }
    Ok(())
}

pub(in crate::chart) fn an_endpoint_says_which_change_made_it() -> Result<()> {
    let stamp = |text: &str| Ok::<_, anyhow::Error>(stamp_of(text.parse()?));
    assert_eq!(stamp("10.64.0.1")?, 1);
    assert_eq!(stamp("10.127.255.255")?, (1 << STAMP_BITS) - 1);
    assert_eq!(stamp("10.245.0.1")?, 0);
    assert_eq!(stamp("10.246.255.255")?, 0);
    Ok(())
}
