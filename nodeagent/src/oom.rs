//! The priority with which the kernel ends this process when memory runs out (`oomScoreAdj`).

use std::io;

const FILE: &str = "/proc/self/oom_score_adj";

/// Sets this process's score, -1000..=1000.
///
/// # Errors
/// Lowering it needs CAP_SYS_RESOURCE.
pub fn set_score(score: i32) -> io::Result<()> {
    let now = std::fs::read_to_string(FILE)?;
    if now.trim() == score.to_string() {
        return Ok(());
    }
    std::fs::write(FILE, score.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Raising the score needs no privilege, and raising it by 0 changes nothing for other tests.
    #[test]
    fn the_score_of_this_process_can_be_set() {
        let now: i32 = std::fs::read_to_string(FILE)
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        set_score(now).unwrap();
        assert!(set_score(1001).is_err(), "the kernel accepts 1000 at most");
    }
}
