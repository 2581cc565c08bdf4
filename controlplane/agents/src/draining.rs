//! The end of a control plane that is asked to stop: its agents leave in waves, and then it ends.

use std::time::Duration;

use kplane_model::chance;
use kplane_proto::v1 as pb;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

/// Time that agents of one control plane take to leave, for each of them: 500 a second, so that the
/// other replicas are not overrun.
const EACH: Duration = Duration::from_millis(2);

/// Share of the whole time in which agents are asked to leave, in percent. The rest is for messages on
/// their way.
const ANNOUNCING: u32 = 80;

/// Time for the last messages to reach their agents.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// A time of which each stream has a random share.
const WHOLE: Duration = Duration::from_secs(1);

/// Time from the end of this process until agents without another replica try again.
const RESTART: Duration = Duration::from_secs(1);

/// The time in which agents leave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    from: Instant,
    until: Instant,
}

/// Whether the control plane is about to end. Every stream follows it.
#[derive(Debug, Default)]
pub struct Draining(watch::Sender<Option<Window>>);

impl Draining {
    /// Asks all agents to leave, and new ones to stay away; returns when they have left, or after
    /// this time.
    pub async fn begin(&self, time: Duration) {
        let agents = u32::try_from(self.0.receiver_count()).unwrap_or(u32::MAX);
        let from = Instant::now();
        let announcing = (EACH.saturating_mul(agents)).min(time * ANNOUNCING / 100);
        let until = from + announcing;
        self.0.send_replace(Some(Window { from, until }));
        let all_left = async {
            self.0.closed().await;
            sleep(LAST_WORDS.min(time)).await;
        };
        tokio::select! {
            biased;
            () = all_left => {}
            () = sleep_until(from + time) => {}
        }
    }

    /// Returns whether agents are asked to leave.
    pub fn is_on(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// Returns a receiver for a stream. The stream holds it until its agent has been asked to leave.
    pub(crate) fn follow(&self) -> watch::Receiver<Option<Window>> {
        self.0.subscribe()
    }

    /// Returns the message that sends an agent away, to one of these replicas.
    pub fn farewell(&self, replicas: Vec<String>) -> pb::ComeBackLater {
        let until = self.0.borrow().map(|window| window.until);
        let rest = until.map(|until| until.saturating_duration_since(Instant::now()));
        let after = rest.unwrap_or_default() + RESTART;
        pb::ComeBackLater {
            after_ms: u32::try_from(after.as_millis()).unwrap_or(u32::MAX),
            reason: "this control plane is about to stop".to_owned(),
            replicas,
        }
    }
}

/// Waits until it is a stream's turn to leave; each stream has a random one.
pub(crate) async fn turn(window: &mut watch::Receiver<Option<Window>>) {
    let share = chance::between(Duration::ZERO, WHOLE).div_duration_f64(WHOLE);
    let window = window.wait_for(Option::is_some).await.ok().and_then(|w| *w);
    let Some(Window { from, until }) = window else {
        return std::future::pending().await;
    };
    let wait = until.saturating_duration_since(from);
    sleep_until(from + wait.mul_f64(share)).await;
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Returns when each of some agents is asked to leave, and when the control plane ends.
    async fn drain(agents: usize, time: Duration) -> (Vec<Duration>, Duration) {
        let draining = Arc::<Draining>::default();
        let start = Instant::now();
        let leaving: Vec<_> = (0..agents)
            .map(|_| {
                let mut window = draining.follow();
                tokio::spawn(async move {
                    turn(&mut window).await;
                    start.elapsed()
                })
            })
            .collect();
        draining.begin(time).await;
        let ended = start.elapsed();
        let mut left = Vec::new();
        for agent in leaving {
            left.push(agent.await.unwrap());
        }
        left.sort();
        (left, ended)
    }

    #[tokio::test(start_paused = true)]
    async fn many_agents_leave_in_waves_and_few_at_once() {
        let time = Duration::from_secs(5);
        let (left, ended) = drain(10_000, time).await;
        for (tenth, second) in [(1, 400), (5, 2_000), (9, 3_600)] {
            let at = left[tenth * 1_000].as_millis();
            assert!((second - 100..second + 100).contains(&at), "{at}");
        }
        assert!(left[9_999] <= Duration::from_secs(4) && ended <= time);
        let (_, ended) = drain(2, time).await;
        assert!(ended <= Duration::from_millis(210), "{ended:?}");
        assert!(drain(0, time).await.1 <= LAST_WORDS * 2);
    }

    /// An agent that does not take the message delays the end, but not for longer than asked.
    #[tokio::test(start_paused = true)]
    async fn the_end_comes_in_any_case() {
        let draining = Draining::default();
        let _stays = draining.follow();
        let start = Instant::now();
        assert!(!draining.is_on());
        draining.begin(Duration::from_secs(5)).await;
        assert!(draining.is_on());
        assert_eq!(start.elapsed(), Duration::from_secs(5));
    }
}
