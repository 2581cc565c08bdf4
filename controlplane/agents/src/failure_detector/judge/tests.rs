//! Verdicts, from signs and words.

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use super::*;

const LOOK: Time = Duration::from_millis(200);

fn name(node: usize) -> NodeName {
    format!("n{node}").into()
}

/// A cluster, of which each node has a stream, or not, and can be reached, or not.
struct Cluster {
    judge: Judge,
    now: Time,
    zones: usize,
    nodes: usize,
    /// Since when the stream of a node is quiet.
    quiet: BTreeMap<usize, Time>,
}

impl Cluster {
    fn new(nodes: usize, zones: usize) -> Self {
        let mut cluster = Self {
            judge: Judge::default(),
            now: Duration::from_secs(100),
            zones,
            nodes,
            quiet: BTreeMap::new(),
        };
        assert!(cluster.look().is_empty());
        cluster
    }

    fn zone(&self, node: usize) -> Option<ZoneName> {
        (self.zones > 0).then(|| format!("z{}", node % self.zones).into())
    }

    fn neighbours(&self) -> Vec<Neighbour> {
        (0..self.nodes)
            .filter(|node| !self.quiet.contains_key(node))
            .map(|node| Neighbour {
                node: name(node),
                zone: self.zone(node),
            })
            .collect()
    }

    fn fall_silent(&mut self, nodes: impl IntoIterator<Item = usize>) {
        self.quiet.extend(nodes.into_iter().map(|node| (node, self.now)));
    }

    /// Lets some time pass; returns the rounds that begin.
    fn look(&mut self) -> Vec<Round> {
        self.now += LOOK;
        let quiet = self.quiet.iter().map(|(node, since)| (name(*node), *since));
        let signs = StreamSigns {
            quiet: quiet.collect(),
            alive: self.nodes - self.quiet.len(),
        };
        let neighbours = self.neighbours();
        let due = self.judge.look(self.now, &signs).into_iter();
        let zones: BTreeMap<NodeName, _> =
            (0..self.nodes).map(|n| (name(n), self.zone(n))).collect();
        due.filter_map(|node| {
            let zone = zones[&node].clone();
            self.judge.ask(self.now, &node, zone.as_ref(), &neighbours)
        })
        .collect()
    }

    fn answer(&mut self, round: &Round, mut word: impl FnMut(&AskedNode) -> Option<Word>) {
        self.now += Duration::from_millis(1);
        for asked in &round.asked {
            if let Some(word) = word(asked) {
                self.judge.hear(self.now, round, &asked.node, word);
            }
        }
    }

    /// Lets time pass in which nobody reaches a quiet node.
    fn convict(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            for round in self.look() {
                self.answer(&round, missing);
            }
        }
    }

    fn suspected(&mut self) -> Vec<String> {
        let suspected = self.judge.suspected();
        suspected.keys().map(ToString::to_string).collect()
    }
}

/// The word of a node that does not reach the one in question.
fn missing(asked: &AskedNode) -> Option<Word> {
    Some(match asked.control {
        Some(_) => Word::Misses,
        None => Word::Present,
    })
}

#[test]
fn a_node_that_nobody_reaches_is_suspected_until_one_does() {
    let mut cluster = Cluster::new(6, 2);
    cluster.fall_silent([3]);
    let [round] = &*cluster.look() else {
        panic!("a round")
    };
    assert_eq!((&*round.about, round.asked.len()), ("n3", 5));
    cluster.answer(round, missing);
    assert_eq!(cluster.suspected(), ["n3"]);
    let reported = cluster.judge.suspected()["n3"].clone();
    assert_eq!((reported.missed, reported.asked), (5, 5));
    // It is asked again, and one neighbour is enough.
    let rounds: Vec<_> = (0..6).flat_map(|_| cluster.look()).collect();
    let [round] = &*rounds else {
        panic!("{rounds:?}")
    };
    assert_eq!(cluster.suspected(), ["n3"]);
    let last = round.asked[4].node.clone();
    cluster.answer(round, |asked| (asked.node == last).then_some(Word::Reaches));
    assert!(cluster.suspected().is_empty());
}

#[test]
fn the_stream_takes_it_back() {
    let mut cluster = Cluster::new(6, 0);
    cluster.fall_silent([3]);
    let rounds = cluster.look();
    cluster.answer(&rounds[0], missing);
    assert_eq!(cluster.suspected(), ["n3"]);
    cluster.quiet.clear();
    cluster.look();
    assert!(cluster.suspected().is_empty());
    // An answer of the old round is none.
    cluster.answer(&rounds[0], missing);
    assert!(cluster.suspected().is_empty());
}

#[test]
fn a_word_counts_only_if_another_node_is_reached_and_if_nearly_all_answer() {
    let reported = |nodes, word: fn(usize, &AskedNode) -> Option<Word>| {
        let mut cluster = Cluster::new(nodes, 0);
        cluster.fall_silent([0]);
        let rounds = cluster.look();
        let places: BTreeMap<NodeName, usize> = rounds[0]
            .asked
            .iter()
            .enumerate()
            .map(|(at, of)| (of.node.clone(), at))
            .collect();
        cluster.answer(&rounds[0], |asked| word(places[&asked.node], asked));
        // The time for answers passes.
        (0..5).for_each(|_| drop(cluster.look()));
        let suspects = !cluster.suspected().is_empty();
        assert_eq!(cluster.judge.holds.is_none(), suspects, "it says why");
        suspects
    };
    assert!(reported(6, |_, asked| missing(asked)));
    assert!(reported(6, |at, asked| if at < 2 {
        Some(Word::Present)
    } else {
        missing(asked)
    }));
    assert!(!reported(6, |at, asked| if at < 3 {
        Some(Word::Present)
    } else {
        missing(asked)
    }));
    assert!(
        !reported(6, |at, asked| if at > 0 { missing(asked) } else { None }),
        "one of five is silent"
    );
    assert!(
        reported(40, |at, asked| if at > 1 { missing(asked) } else { None }),
        "two of sixteen are"
    );
    assert!(
        !reported(40, |at, asked| if at < 13 { missing(asked) } else { None }),
        "three of sixteen are"
    );
    // Two others are the fewest.
    assert!(reported(3, |_, asked| missing(asked)));
    assert!(!reported(3, |at, asked| if at == 0 {
        Some(Word::Present)
    } else {
        missing(asked)
    }));
}

#[test]
fn without_two_other_nodes_nobody_is_asked() {
    let mut cluster = Cluster::new(2, 0);
    cluster.fall_silent([0]);
    assert!((0..20).all(|_| cluster.look().is_empty()));
}

#[test]
fn words_come_from_more_than_one_zone() {
    let mut cluster = Cluster::new(12, 2);
    cluster.fall_silent([0]);
    let rounds = cluster.look();
    let zones: BTreeSet<_> = rounds[0].asked.iter().take(5).map(|of| of.zone.clone()).collect();
    assert_eq!(zones.len(), 2);
    // All of zone 0 miss it, and those of zone 1 know nothing.
    cluster.answer(&rounds[0], |asked| match asked.zone.as_deref() {
        Some("z0") => missing(asked),
        _ => Some(Word::Present),
    });
    assert!(cluster.suspected().is_empty());
}

#[test]
fn nobody_is_suspected_when_many_streams_are_lost_or_this_process_was_stopped() {
    let mut cluster = Cluster::new(10, 0);
    cluster.fall_silent([0]);
    let rounds = cluster.look();
    cluster.answer(&rounds[0], missing);
    assert_eq!(cluster.suspected(), ["n0"]);
    cluster.fall_silent(1..4);
    assert!(cluster.look().is_empty());
    assert!(cluster.suspected().is_empty(), "four of ten");
    assert!(cluster.judge.holds.is_some());

    let mut cluster = Cluster::new(10, 0);
    cluster.fall_silent([0]);
    let rounds = cluster.look();
    cluster.now += Duration::from_secs(2);
    assert!(cluster.look().is_empty());
    cluster.answer(&rounds[0], missing);
    assert!(cluster.suspected().is_empty());
}

#[test]
fn nobody_of_a_zone_is_suspected_when_many_of_it_are() {
    let mut cluster = Cluster::new(30, 10);
    // Two of the three nodes of zone 4, one after the other, and one of another zone.
    for node in [4, 14, 5] {
        cluster.fall_silent([node]);
        let mut rounds = cluster.look();
        rounds.retain(|round| *round.about == *name(node));
        cluster.answer(&rounds[0], missing);
        for _ in 0..51 {
            for round in cluster.look() {
                cluster.answer(&round, missing);
            }
        }
    }
    assert_eq!(cluster.suspected(), ["n5"]);
    assert_eq!(
        cluster.judge.holds,
        Some("too many nodes of a zone do not answer")
    );
}

/// Whatever happens, a node is suspected only if its stream is quiet, nobody that was asked last reached it, and somebody
/// has said so within some pauses; and never too many are.
#[test]
fn only_nodes_that_nobody_reaches_are_suspected() {
    for seed in 0..500 {
        let mut dice = SmallRng::seed_from_u64(seed);
        let nodes = dice.random_range(2..25);
        let mut cluster = Cluster::new(nodes, dice.random_range(0..4));
        let (mut dead, mut reached) = (BTreeSet::new(), BTreeMap::new());
        // Times of the last answers about a node, and since when its stream is quiet without an interruption.
        let (mut answered, mut quiet_since) = (BTreeMap::new(), BTreeMap::new());
        let mut is_anybody_there = true;
        for _ in 0..100 {
            let node = dice.random_range(0..nodes);
            match dice.random_range(0..18) {
                0 => drop(dead.insert(node)),
                1 => drop(dead.remove(&node)),
                2 => cluster.fall_silent([node]),
                3 => drop(cluster.quiet.remove(&node)),
                4 => cluster.now += Duration::from_secs(dice.random_range(0..3)),
                5 => is_anybody_there ^= true,
                _ => {}
            }
            for node in &dead {
                cluster.quiet.entry(*node).or_insert(cluster.now);
            }
            quiet_since.retain(|node, _| cluster.quiet.contains_key(node));
            for (node, since) in &cluster.quiet {
                quiet_since.entry(*node).or_insert(*since);
            }
            for round in cluster.look() {
                if !is_anybody_there {
                    continue;
                }
                answered.insert(round.about.to_string(), cluster.now);
                let about_dead = dead.iter().any(|node| *name(*node) == *round.about);
                let silent = dice.random_range(0..3);
                let mut left: usize = round.asked.len();
                if left > silent {
                    reached.insert(round.about.to_string(), !about_dead);
                }
                cluster.answer(&round, |asked| {
                    if left <= silent {
                        return None;
                    }
                    left = left.saturating_sub(1);
                    match (asked.control.is_some(), about_dead) {
                        (true, true) => Some(Word::Misses),
                        (true, false) => Some(Word::Reaches),
                        (false, _) => Some(Word::Present),
                    }
                });
            }
            let suspected = cluster.suspected();
            assert!(suspected.len() <= few(nodes), "seed {seed}: {suspected:?}");
            for node in suspected {
                let number: usize = node[1..].parse().unwrap();
                assert!(
                    cluster.quiet.contains_key(&number),
                    "seed {seed}: {node} has a stream"
                );
                assert!(!reached[&node], "seed {seed}: {node} was reached");
                let patience = ROUND + LASTS * pause(cluster.now - quiet_since[&number]);
                assert!(
                    cluster.now <= answered[&node] + patience + LOOK,
                    "seed {seed}: nobody has spoken of {node}"
                );
            }
        }
    }
}

#[test]
fn one_of_too_many_is_suspected_after_another_round_only() {
    let mut cluster = Cluster::new(6, 0);
    cluster.fall_silent([3]);
    cluster.convict(AT_ONCE + LOOK);
    assert_eq!(cluster.suspected(), ["n3"]);
    cluster.fall_silent([4]);
    cluster.convict(2 * ROUND);
    assert!(cluster.suspected().is_empty(), "two of six are too many");
    // The other one is back. What was found before says nothing about now.
    cluster.quiet.remove(&4);
    cluster.look();
    assert!(cluster.suspected().is_empty());
    cluster.convict(3 * ROUND);
    assert_eq!(cluster.suspected(), ["n3"]);
}

/// A machine that is off for good uses up nothing, and stays out when others die.
#[test]
fn an_old_suspicion_leaves_room_for_a_new_one() {
    let mut cluster = Cluster::new(6, 0);
    cluster.fall_silent([3]);
    cluster.convict(OLD + ROUND);
    cluster.fall_silent([4]);
    cluster.convict(2 * ROUND);
    assert_eq!(cluster.suspected(), ["n3", "n4"]);
    cluster.convict(AT_ONCE);
    cluster.fall_silent([5]);
    cluster.convict(2 * ROUND);
    assert_eq!(
        cluster.suspected(),
        ["n3"],
        "two new ones of six are too many"
    );
}
