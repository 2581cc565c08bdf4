//! The priority with which the kernel ends this process when memory runs out (`oomScoreAdj`).

use std::io;

const FILE: &str = "/proc/self/oom_score_adj";

/// Difference that does not matter: the kubelet gives critical Pods -997, and kube-proxy's default is -999.
const NEAR: u32 = 10;

/// Sets this process's score, -1000..=1000.
///
/// # Errors
/// Lowering it needs CAP_SYS_RESOURCE, which a Pod does not have. That is no error if the kubelet set about the same.
pub fn set_score(score: i32) -> io::Result<()> {
    let now = std::fs::read_to_string(FILE)?;
    if now.trim() == score.to_string() {
        return Ok(());
    }
    std::fs::write(FILE, score.to_string()).or_else(|error| {
        if is_near(&now, score) { Ok(()) } else { Err(error) }
    })
}

fn is_near(now: &str, score: i32) -> bool {
    let now = now.trim().parse::<i32>();
    now.is_ok_and(|now| now.abs_diff(score) <= NEAR)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Raising the score needs no privilege, and raising it by 0 changes nothing for other tests.
    #[test]
    fn the_score_of_this_process_can_be_set() {
        let now: i32 = std::fs::read_to_string(FILE).unwrap().trim().parse().unwrap();
        set_score(now).unwrap();
        assert!(set_score(2000).is_err(), "the kernel accepts 1000 at most");
    }

    #[test]
    fn the_score_that_the_kubelet_gives_critical_pods_is_near_the_default() {
        assert!(is_near("-997\n", -999));
        assert!(!is_near("0\n", -999) && !is_near("", -999));
    }
}
