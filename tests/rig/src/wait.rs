//! Waiting for a condition, with a deadline and the last thing seen.

use std::fmt::Display;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;

/// First pause between two calls; it doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(1);
/// Longest pause between two calls: short compared with any deadline in use (>= 100 ms).
const PAUSE_MAX: Duration = Duration::from_millis(20);

/// What never takes longer unless it fails, on a busy machine that may be emulated: dozens of programs may have to run.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Calls the closure until it returns `Ok`, and returns that value.
///
/// # Errors
/// `within` has passed; the error names `what` and the last `Err`'s text.
pub fn eventually<T, E: Display>(
    within: Duration,
    what: &str,
    mut look: impl FnMut() -> Result<T, E>,
) -> anyhow::Result<T> {
    let start = Instant::now();
    let mut pause = PAUSE_MIN;
    loop {
        let late = start.elapsed() >= within;
        match look() {
            Ok(value) => return Ok(value),
            Err(seen) if late => bail!("not within {within:?}: {what}; last seen: {seen:#}"),
            Err(_) => thread::sleep(pause),
        }
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_the_first_success() {
        let mut looks = 0;
        let value = eventually(Duration::from_secs(5), "three", || {
            looks += 1;
            (looks == 3).then_some(looks).ok_or_else(String::new)
        });
        assert_eq!(value.unwrap(), 3);
    }

    #[test]
    fn names_what_was_last_seen() {
        let result = eventually(Duration::from_millis(5), "rain", || {
            Err::<(), _>("sun".to_owned())
        });
        let text = result.unwrap_err().to_string();
        assert_eq!(text, "not within 5ms: rain; last seen: sun");
    }
}
