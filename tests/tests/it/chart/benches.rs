//! What the benchmarks of fleets count.

use anyhow::Result;
use kplane_tests::fleet::{STAMP_BITS, stamp_of};

pub(in crate::chart) fn an_endpoint_says_which_change_made_it() -> Result<()> {
    let stamp = |text: &str| Ok::<_, anyhow::Error>(stamp_of(text.parse()?));
    assert_eq!(stamp("10.64.0.1")?, 1);
    assert_eq!(stamp("10.127.255.255")?, (1 << STAMP_BITS) - 1);
    assert_eq!(stamp("10.245.0.1")?, 0);
    assert_eq!(stamp("10.246.255.255")?, 0);
    Ok(())
}
