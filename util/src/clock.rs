//! Two clocks: the process's own, which nobody sets, and the machine's, which says what time it is.
//!
//! Ages and waits are measured by the process's own clock ([`Instant`]), so a step of the machine's clock makes nothing
//! old, and keeps nothing young. The machine's clock is for times that messages show, that certificates and tokens name,
//! and that two machines compare.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

/// Returns milliseconds since 1970, 0 for times before.
pub fn millis(at: SystemTime) -> u64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Smallest difference that is a step of the machine's clock. Below it, the two clocks were read at two moments.
const STEP: Duration = Duration::from_millis(500);

/// A moment by both clocks.
#[derive(Clone, Copy, Debug)]
struct Anchor {
    own: Instant,
    wall: SystemTime,
}

impl Anchor {
    /// Returns what the machine's clock says, or would have said without its last step, at a time of the own clock.
    fn wall(self, at: Instant) -> SystemTime {
        let wall = match at.checked_duration_since(self.own) {
            Some(later) => self.wall.checked_add(later),
            None => self.wall.checked_sub(self.own.duration_since(at)),
        };
        wall.unwrap_or(UNIX_EPOCH)
    }

    /// Returns the anchor after both clocks were read: the same one, unless the machine's clock made a step. So a time
    /// that is shown twice is the same.
    fn after(self, now: Self) -> Self {
        let expected = self.wall(now.own);
        let off = expected.duration_since(now.wall).unwrap_or_else(|error| error.duration());
        if off < STEP { self } else { now }
    }
}

/// Returns a time of the process's own clock by the machine's clock, in milliseconds since 1970. It moves with each step
/// of the machine's clock, so a reader who subtracts it from `now_ms` of the same answer gets the age.
pub fn wall_ms(at: Instant) -> u64 {
    static ANCHOR: Mutex<Option<Anchor>> = Mutex::new(None);
    let now = Anchor {
        own: Instant::now(),
        wall: SystemTime::now(),
    };
    let mut anchor = ANCHOR.lock();
    let current = anchor.map_or(now, |anchor| anchor.after(now));
    *anchor = Some(current);
    millis(current.wall(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_stay_the_same_until_the_clock_makes_a_step_and_ages_always() {
        let (own, wall) = (Instant::now(), SystemTime::now());
        let [hour, ms] = [Duration::from_secs(3_600), Duration::from_millis(1)];
        let anchor = Anchor { own, wall };
        let looked = |anchor: Anchor, wall| {
            let own = own + hour;
            anchor.after(Anchor { own, wall })
        };
        assert_eq!(looked(anchor, wall + hour + 20 * ms).wall(own), wall);
        for stepped in [wall + 2 * hour, wall - 5 * hour] {
            let anchor = looked(anchor, stepped);
            let age = stepped.duration_since(anchor.wall(own));
            assert_eq!(age.unwrap(), hour, "to {stepped:?}");
        }
    }
}
