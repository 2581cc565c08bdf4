//! Packets that NetworkPolicies deny: counts of all Pods, and samples for those who follow them.
//!
//! Questions of the control plane bring a follower's name. The kernel logs packets only while there is a follower, and a
//! follower ends by itself when its questions stop: nobody has to take anything back. Nothing of this outlives the
//! process, and a new one removes what the kernel still has (`policy::Followed` is empty at its start).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kplane_dataplane::backend::nftables::denied_pods;
use kplane_dataplane::policy::{Followed, Logged, PacketLog, open_log};
use kplane_model::Direction;
use kplane_proto::v1 as pb;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// Most followers at a time.
const FOLLOWERS: usize = 8;
/// Most samples that wait for a follower, and for an answer.
const SAMPLES: usize = 256;
/// Most Pods in an answer.
const PODS: usize = 1_024;
/// Time after a follower's last question at which it ends.
const LEASE: Duration = Duration::from_secs(10);
/// Time after a follower's first question at which it ends.
const LONGEST: Duration = Duration::from_secs(3_600);
/// Pause between two reads of the log, and most datagrams that one takes.
const PAUSE: Duration = Duration::from_millis(200);
const AT_ONCE: usize = 1_024;
/// Longest name in a question, in bytes: that of a Pod.
const NAME: usize = 253;

/// The followers, and what the kernel logs for them.
#[derive(Clone, Debug, Default)]
pub struct Denials(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<Subscriptions>,
    /// What the engine has the kernel log.
    followed: watch::Sender<Followed>,
}

#[derive(Debug, Default)]
struct Subscriptions {
    followers: BTreeMap<u64, Subscriber>,
    /// The kernel's log, while there is a follower.
    log: Option<PacketLog>,
}

#[derive(Debug)]
struct Subscriber {
    /// Namespace and name of the Pods; empty = all.
    pods: (String, String),
    began: Instant,
    asked: Instant,
    samples: VecDeque<(Instant, Logged)>,
    lost: u64,
}

impl Denials {
    /// Returns the receiver of the Pods that are followed.
    pub(crate) fn followed(&self) -> watch::Receiver<Followed> {
        self.0.followed.subscribe()
    }

    /// Answers a question.
    pub async fn answer(&self, question: pb::DenialsQuestion) -> pb::Denials {
        let shared = Arc::clone(&self.0);
        let answered = match question.follower {
            0 => spawn_blocking(counts).await,
            _ => spawn_blocking(move || shared.answer(question)).await,
        };
        let answered = answered.unwrap_or_else(|_| Err("the agent could not ask".to_owned()));
        answered.unwrap_or_else(|error| pb::Denials {
            error,
            ..pb::Denials::default()
        })
    }
}

/// Reads the counts of all Pods.
fn counts() -> Result<pb::Denials, String> {
    let mut pods = denied_pods().map_err(|error| format!("cannot read the counts: {error}"))?;
    pods.sort_by_key(|pod| std::cmp::Reverse(pod.packets));
    let more = pods.len().saturating_sub(PODS) as u64;
    let pods = pods.iter().take(PODS).map(|pod| pb::DeniedPod {
        address: pod.address.to_string(),
        direction: wire(pod.direction).into(),
        packets: pod.packets,
    });
    Ok(pb::Denials {
        pods: pods.collect(),
        more,
        ..pb::Denials::default()
    })
}

/// Reads the log until nobody follows.
async fn collect(shared: Arc<Shared>) {
    let mut ticks = interval(PAUSE);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if !shared.collect(Instant::now()) {
            return;
        }
    }
}

impl Shared {
    /// Answers a follower. Blocks. The caller may go away meanwhile: the log is read all the same.
    fn answer(self: Arc<Self>, question: pb::DenialsQuestion) -> Result<pb::Denials, String> {
        let (now, mut state) = (Instant::now(), self.state.lock());
        let was_open = state.log.is_some();
        let answer = state.answer(question, now, open_log);
        self.followed.send_if_modified(|followed| state.follows(followed, now));
        if state.log.is_some() && !was_open {
            Handle::current().spawn(collect(Arc::clone(&self)));
        }
        answer
    }

    /// Takes what the kernel has logged. Returns false when nobody follows any more.
    fn collect(&self, now: Instant) -> bool {
        let mut state = self.state.lock();
        let (mut logged, mut whole) = (Vec::new(), true);
        if let Some(log) = &mut state.log {
            whole = log.read(AT_ONCE, |packet| logged.push(packet));
        }
        let goes_on = state.take(&logged, whole, now);
        self.followed.send_if_modified(|followed| state.follows(followed, now));
        goes_on
    }
}

impl Subscriptions {
    /// Answers a follower; opens the log for the first one.
    fn answer(
        &mut self,
        question: pb::DenialsQuestion,
        now: Instant,
        open: impl FnOnce() -> Result<PacketLog, String>,
    ) -> Result<pb::Denials, String> {
        let pods = (question.namespace, question.pod);
        if pods.0.len() > NAME || pods.1.len() > NAME {
            return Err("the name of a Pod is too long".to_owned());
        }
        let is_new = !self.followers.contains_key(&question.follower);
        if is_new && self.followers.len() >= FOLLOWERS {
            return Err(format!(
                "{FOLLOWERS} follow already: one ends {} s after its last question",
                LEASE.as_secs()
            ));
        }
        if self.log.is_none() {
            self.log = Some(open()?);
        }
        let follower =
            self.followers.entry(question.follower).or_insert_with(|| Subscriber::new(now));
        follower.asked = now;
        follower.pods = pods;
        if !follower.is_served(now) {
            return Err("samples end after an hour: begin again".to_owned());
        }
        Ok(follower.answer(now))
    }

    /// Hands samples to all followers, and forgets those that ask no more. Returns false when none is left.
    fn take(&mut self, logged: &[Logged], whole: bool, now: Instant) -> bool {
        self.followers.retain(|_, follower| now.duration_since(follower.asked) < LEASE);
        for follower in self.followers.values_mut() {
            follower.take(logged, whole, now);
        }
        if self.followers.is_empty() {
            self.log = None;
        }
        self.log.is_some()
    }

    /// Writes down whom the kernel has to log; returns whether that is new.
    fn follows(&self, followed: &mut Followed, now: Instant) -> bool {
        let served = self.followers.values().filter(|follower| follower.is_served(now));
        let mut pods: Vec<_> = served.map(|follower| follower.pods.clone()).collect();
        pods.sort_unstable();
        pods.dedup();
        let is_new = followed.0 != pods;
        followed.0 = pods;
        is_new
    }
}

impl Subscriber {
    fn new(now: Instant) -> Self {
        Self {
            pods: Default::default(),
            began: now,
            asked: now,
            samples: VecDeque::new(),
            lost: 0,
        }
    }

    fn is_served(&self, now: Instant) -> bool {
        now.duration_since(self.began) < LONGEST
    }

    fn take(&mut self, logged: &[Logged], whole: bool, now: Instant) {
        self.lost += u64::from(!whole);
        for packet in logged {
            if self.samples.len() == SAMPLES {
                self.lost += 1;
                self.samples.pop_front();
            }
            self.samples.push_back((now, *packet));
        }
    }

    fn answer(&mut self, now: Instant) -> pb::Denials {
        let samples = std::mem::take(&mut self.samples);
        let packets = samples.into_iter().map(|(at, packet)| {
            let age = now.duration_since(at).as_millis();
            let (from_port, to_port) = packet.ports.unwrap_or_default();
            pb::DeniedPacket {
                age_ms: u64::try_from(age).unwrap_or(u64::MAX),
                direction: wire(packet.direction).into(),
                from: packet.source.to_string(),
                to: packet.destination.to_string(),
                protocol: packet.protocol.into(),
                from_port: from_port.into(),
                to_port: to_port.into(),
            }
        });
        pb::Denials {
            packets: packets.collect(),
            lost: std::mem::take(&mut self.lost),
            ..pb::Denials::default()
        }
    }
}

fn wire(direction: Direction) -> pb::PolicyDirection {
    match direction {
        Direction::Ingress => pb::PolicyDirection::Ingress,
        Direction::Egress => pb::PolicyDirection::Egress,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(follower: u64, pod: &str) -> pb::DenialsQuestion {
        pb::DenialsQuestion {
            follower,
            namespace: "shop".to_owned(),
            pod: pod.to_owned(),
        }
    }

    fn packet(port: u16) -> Logged {
        Logged {
            direction: Direction::Ingress,
            source: [10, 0, 0, 1].into(),
            destination: [10, 0, 0, 2].into(),
            protocol: 6,
            ports: Some((port, 80)),
        }
    }

    /// A state with followers, which needs no log.
    fn followed_by(followers: &[u64], now: Instant) -> Subscriptions {
        let followers = followers.iter().map(|id| (*id, Subscriber::new(now)));
        Subscriptions {
            followers: followers.collect(),
            log: None,
        }
    }

    fn ports(answer: &pb::Denials) -> Vec<u32> {
        answer.packets.iter().map(|packet| packet.from_port).collect()
    }

    #[test]
    fn each_follower_gets_every_sample_once() {
        let now = Instant::now();
        let mut state = followed_by(&[1, 2], now);
        state.take(&[packet(1), packet(2)], true, now);
        let mut answer = |id: u64| state.followers.get_mut(&id).unwrap().answer(now);
        assert_eq!(ports(&answer(1)), [1, 2]);
        assert_eq!(ports(&answer(1)), [] as [u32; 0]);
        assert_eq!(ports(&answer(2)), [1, 2]);
    }

    #[test]
    fn samples_that_nobody_fetches_are_bounded_and_the_loss_is_said() {
        let now = Instant::now();
        let mut state = followed_by(&[1], now);
        let many: Vec<Logged> = (0..300).map(packet).collect();
        state.take(&many, true, now);
        state.take(&[], false, now);
        let answer = state.followers.get_mut(&1).unwrap().answer(now);
        assert_eq!(answer.packets.len(), SAMPLES);
        assert_eq!((answer.packets[0].from_port, answer.lost), (44, 45));
    }

    #[test]
    fn a_follower_ends_without_questions_and_after_an_hour_with_them() {
        let start = Instant::now();
        let mut state = followed_by(&[1, 2], start);
        let mut followed = Followed::default();
        assert!(state.follows(&mut followed, start), "all Pods");
        let later = start + LEASE - PAUSE;
        state.followers.get_mut(&2).unwrap().asked = later;
        state.take(&[], true, start + LEASE);
        assert_eq!(state.followers.keys().collect::<Vec<_>>(), [&2]);
        assert!(!state.follows(&mut followed, start + LEASE), "as before");
        let end = start + LONGEST;
        state.followers.get_mut(&2).unwrap().asked = end;
        assert!(state.follows(&mut followed, end) && followed.0.is_empty());
        state.take(&[], true, end + LEASE);
        assert!(state.followers.is_empty());
    }

    #[test]
    fn there_is_room_for_so_many_followers_and_a_log_that_cannot_be_had_is_said() {
        let now = Instant::now();
        let mut state = followed_by(&[1, 2, 3, 4, 5, 6, 7, 8], now);
        let busy = || Err("another program has it".to_owned());
        let error = state.answer(question(9, "db-0"), now, busy).unwrap_err();
        assert!(error.contains("8 follow already"), "{error}");
        let error = state.answer(question(8, "db-0"), now, busy).unwrap_err();
        assert_eq!(error, "another program has it");
        let mut nobody = Subscriptions::default();
        assert!(nobody.answer(question(1, "db-0"), now, busy).is_err());
        assert!(nobody.followers.is_empty());
        let long = question(8, &"x".repeat(NAME + 1));
        assert!(state.answer(long, now, busy).unwrap_err().contains("too long"));
    }
}
