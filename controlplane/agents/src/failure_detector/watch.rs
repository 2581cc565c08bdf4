//! The task that follows streams, asks neighbours, and publishes who is suspected.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::FuturesUnordered;
use kplane_desired_state::index::{Suspicion, Suspicions};
use kplane_desired_state::recorder::NoticeKind;
use kplane_model::{Family, NodeFacts, NodeName};
use kplane_proto::v1 as pb;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tracing::{info, warn};

use super::choose::{AskedNode, Neighbour};
use super::dead::DeadNodes;
use super::judge::{Judge, OLD, ROUND, Round, StreamSigns, Time, Word, few};
use super::messages;
use crate::hub::Hub;
use crate::node_query::{Reply, Timeouts};
use crate::peers::Peers;
use crate::suspects::{Mode, SILENT, Words};

/// Interval between two checks of the streams.
const LOOK: Duration = Duration::from_millis(200);
/// Interval of messages to other replicas: what is suspected, and that this one is there.
const TELL: Duration = Duration::from_millis(500);
const THERE: Duration = Duration::from_secs(1);
/// Time for which an answer of other replicas about their agents counts.
const OTHERS: Duration = Duration::from_secs(3);
/// Time in which an agent whose stream ended may be back, here or elsewhere: until then it was not lost.
const BACK: Duration = Duration::from_secs(1);
/// Time for which another replica's word counts that it has an agent's stream. After half of it the replica is asked again.
const ELSEWHERE: Duration = Duration::from_secs(6);
/// Number of own agents for which those of other replicas are not needed.
const ENOUGH: usize = 5;

type FactsByNode = BTreeMap<NodeName, Arc<NodeFacts>>;

/// Something that was waited for.
enum WatchEvent {
    Reply(Arc<Round>, Vec<(NodeName, Word)>),
    /// The agents that are connected to other replicas.
    Others(BTreeMap<NodeName, SocketAddr>),
    /// Suspected and quiet nodes that have streams at other replicas.
    Alive(BTreeSet<NodeName>),
}

struct Watch {
    hub: Arc<Hub>,
    peers: Option<Arc<Peers>>,
    start: Instant,
    judge: Judge,
    events: FuturesUnordered<BoxFuture<'static, WatchEvent>>,
    others: BTreeMap<NodeName, SocketAddr>,
    /// Nodes whose streams here are quiet, and those of them that have streams at other replicas, by these replicas' last word.
    quiet: BTreeSet<NodeName>,
    elsewhere: BTreeMap<NodeName, Instant>,
    /// Time of the last question to other replicas, and of the last message.
    asked_at: Option<Instant>,
    reported_at: Option<Instant>,
    /// The nodes that this replica itself suspects.
    own: Suspicions,
    dead: DeadNodes,
}

/// Follows the streams of agents until the control plane ends.
pub async fn watch(hub: Arc<Hub>, peers: Option<Arc<Peers>>) {
    if hub.suspects().mode() == Mode::Off {
        return std::future::pending().await;
    }
    let mut watch = Watch {
        hub,
        peers,
        start: Instant::now(),
        judge: Judge::default(),
        events: FuturesUnordered::new(),
        others: BTreeMap::new(),
        quiet: BTreeSet::new(),
        elsewhere: BTreeMap::new(),
        asked_at: None,
        reported_at: None,
        own: Suspicions::default(),
        dead: DeadNodes::default(),
    };
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            Some(event) = watch.events.next() => watch.take(event),
            _ = look.tick() => watch.look(),
        }
        watch.publish().await;
    }
}

impl Watch {
    fn now(&self) -> Time {
        self.start.elapsed()
    }

    fn take(&mut self, event: WatchEvent) {
        let now = self.now();
        match event {
            WatchEvent::Reply(round, messages) => {
                for (of, word) in messages {
                    self.judge.hear(now, &round, &of, word);
                }
            }
            WatchEvent::Others(others) => self.others = others,
            WatchEvent::Alive(nodes) => {
                let at = Instant::now();
                self.elsewhere.extend(nodes.into_iter().map(|node| (node, at)));
            }
        }
    }

    /// Returns the nodes whose agents have no stream anywhere, and since when.
    fn lost(&mut self, mut quiet: Vec<(NodeName, Instant)>) -> BTreeMap<NodeName, Time> {
        let known = |node: &NodeName| self.hub.store().knows(node);
        let silent = self.hub.suspects().shared.silent().into_iter();
        quiet.extend(silent.filter(|(node, _)| !self.hub.agents().is_alive(node, SILENT)));
        quiet.retain(|(node, _)| known(node));
        let before = std::mem::take(&mut self.quiet);
        self.quiet = quiet.iter().map(|(node, _)| node.clone()).collect();
        if !self.quiet.is_subset(&before) {
            self.reported_at = None;
        }
        let is_quiet = |node: &NodeName| self.quiet.contains(node);
        self.elsewhere.retain(|node, at| is_quiet(node) && at.elapsed() < ELSEWHERE);
        quiet
            .into_iter()
            .filter(|(node, since)| since.elapsed() >= BACK && !self.elsewhere.contains_key(node))
            .map(|(node, since)| (node, since.saturating_duration_since(self.start)))
            .collect()
    }

    fn look(&mut self) {
        let signs = self.hub.agents().signs(SILENT);
        let quiet = self.lost(signs.quiet);
        if !quiet.is_empty() {
            self.ask_others(signs.alive);
        }
        let now = self.now();
        let alive = signs.alive + self.elsewhere.len();
        let due = self.judge.look(now, &StreamSigns { quiet, alive });
        if due.is_empty() {
            return;
        }
        let nodes = self.hub.store().nodes();
        let neighbours = self.neighbours(&nodes);
        for node in due {
            // Nobody can reach a node without an address.
            let facts = nodes.get(&node).filter(|facts| addresses(facts).next().is_some());
            let Some(zone) = facts.map(|facts| facts.zone.as_ref()) else {
                continue;
            };
            if let Some(round) = self.judge.ask(now, &node, zone, &neighbours) {
                self.begin(&Arc::new(round), &nodes);
            }
        }
    }

    /// Returns the nodes with agents that can be asked: this replica's, and those of others if these are few.
    fn neighbours(&self, nodes: &FactsByNode) -> Vec<Neighbour> {
        let mut names = self.hub.agents().askable(SILENT);
        if names.len() <= ENOUGH {
            let own: BTreeSet<_> = names.iter().cloned().collect();
            names.extend(self.others.keys().filter(|node| !own.contains(*node)).cloned());
        }
        names
            .into_iter()
            .filter_map(|node| {
                let zone = nodes.get(&node)?.zone.clone();
                Some(Neighbour { node, zone })
            })
            .collect()
    }

    /// Asks everybody of a round. Agents of other replicas are asked by one question to each replica.
    fn begin(&mut self, round: &Arc<Round>, nodes: &FactsByNode) {
        let mut there = BTreeMap::<SocketAddr, Vec<_>>::new();
        for asked in &round.asked {
            let question = Arc::new(question(asked, &round.about, nodes));
            let is_here = self.hub.agents().is_alive(&asked.node, SILENT);
            if !is_here && let Some(at) = self.others.get(&asked.node) {
                there.entry(*at).or_default().push((asked.node.clone(), question));
            } else {
                let answer = self.hub.agents().ask(&asked.node, question);
                let node = asked.node.clone();
                let answer = async move { answer.await.ok().map(|reported| (node, reported)) };
                self.wait(
                    round,
                    answer.map(|reported| reported.into_iter().collect()).boxed(),
                );
            }
        }
        for (at, questions) in there {
            let Some(peers) = self.peers.clone() else {
                break;
            };
            let asking = async move {
                let asked = BTreeMap::from([(at, questions)]);
                peers
                    .agents(asked, Timeouts::all(ROUND))
                    .await
                    .into_iter()
                    .filter_map(|Reply { node, outcome, .. }| Some((node, outcome.ok()?)))
                    .collect()
            };
            self.wait(round, asking.boxed());
        }
    }

    /// Waits for answers in a round; without them the round ends on its own.
    fn wait(
        &mut self,
        round: &Arc<Round>,
        answers: BoxFuture<'static, Vec<(NodeName, pb::Inspection)>>,
    ) {
        let round = Arc::clone(round);
        let waiting = timeout(ROUND, answers).map(move |reported| {
            let reported = reported.unwrap_or_default().into_iter();
            let messages = reported.filter_map(|(node, reported)| {
                let asked = round.asked.iter().find(|asked| asked.node == node)?;
                Some((node, word(asked, &reported)))
            });
            WatchEvent::Reply(Arc::clone(&round), messages.collect())
        });
        self.events.push(waiting.boxed());
    }

    /// Asks other replicas for their agents, at times.
    fn ask_others(&mut self, own: usize) {
        let is_due = self.asked_at.is_none_or(|at| at.elapsed() >= OTHERS);
        if !(is_due && own <= ENOUGH) {
            return;
        }
        let Some(peers) = self.peers.clone() else {
            return;
        };
        self.asked_at = Some(Instant::now());
        let asking = async move {
            let answers = peers.everything().await.answers;
            let agents = answers.iter().flat_map(|answer| {
                answer
                    .agents
                    .iter()
                    .filter(|(_, agent)| agent.connected)
                    .map(|(node, _)| (node.clone(), answer.address))
            });
            WatchEvent::Others(agents.collect())
        };
        self.events.push(asking.boxed());
    }

    /// Sends to other replicas that this one is there, and what it suspects.
    fn tell_others(&mut self) {
        let suspected = &self.own.nodes;
        let pause = if suspected.is_empty() { THERE } else { TELL };
        let is_due = self.reported_at.is_none_or(|at| at.elapsed() >= pause);
        if !is_due {
            return;
        }
        let Some(peers) = self.peers.clone() else {
            return;
        };
        self.reported_at = Some(Instant::now());
        let is_known = |node: &&NodeName| {
            let at = self.elsewhere.get(*node);
            at.is_some_and(|at| at.elapsed() < ELSEWHERE / 2) || suspected.contains_key(*node)
        };
        let quiet = self
            .quiet
            .iter()
            .filter(|node| !is_known(node))
            .take(messages::NODES)
            .map(ToString::to_string)
            .collect();
        let (own, from) = (self.own.clone(), self.hub.store().epoch());
        let on_node = self.hub.replica().own_node.get().cloned();
        let announcing = async move {
            WatchEvent::Alive(messages::send(&peers, from, on_node, &own, quiet).await)
        };
        self.events.push(announcing.boxed());
    }

    /// Publishes who is suspected, if that has changed.
    async fn publish(&mut self) {
        let suspects = self.hub.suspects();
        let act = suspects.mode() == Mode::Act;
        let before = suspects.now();
        let now = SystemTime::now();
        let convicted = self.judge.suspected();
        let own = convicted.into_iter().map(|(node, of)| {
            let known = before.nodes.get(&node).map(|known| known.since);
            let suspicion = Suspicion {
                since: known.unwrap_or(now),
                missed: of.missed,
                asked: of.asked,
            };
            (node, suspicion)
        });
        let own = Suspicions {
            nodes: own.collect(),
            act,
            dead: BTreeSet::new(),
        };
        let mut all = own.clone();
        let others = suspects
            .shared
            .all()
            .into_iter()
            .filter(|(node, _)| !self.hub.agents().is_alive(node, SILENT))
            .filter(|(node, _)| self.hub.store().knows(node))
            .filter(|(node, _)| !all.nodes.contains_key(node));
        // Each message of another replica has the age anew, and with it another time.
        let others: Vec<_> = others
            .map(|(node, of)| {
                let known = before.nodes.get(&node);
                let since = known.map_or(of.since, |known| known.since);
                (node, Suspicion { since, ..of })
            })
            .collect();
        let is_new = |of: &&Suspicion| of.since.elapsed().is_ok_and(|age| age < OLD);
        let both = all.nodes.values().chain(others.iter().map(|(_, of)| of));
        if !others.is_empty() && both.filter(is_new).count() <= self.most() {
            all.nodes.extend(others);
        }
        if self.hub.suspects().ends_connections() {
            let most = if all.nodes.is_empty() { 0 } else { self.most() };
            all.dead = self.dead.look(self.now(), all.nodes.keys(), most);
        }
        *self.hub.suspects().lock_holds() = self.judge.holds;
        let moved = own.nodes.keys().ne(self.own.nodes.keys());
        self.own = own;
        if moved {
            self.reported_at = None;
        }
        self.tell_others();
        if *before == all {
            return;
        }
        self.note(&before, &all);
        self.hub.suspects().replace(all.clone());
        self.hub.agents().changed();
        // It fails when the control plane ends.
        let _ = self.hub.index().suspect(all).await;
    }

    /// Returns how many nodes may be suspected at a time by all replicas together.
    fn most(&self) -> usize {
        let nodes = self.hub.store().nodes();
        few(nodes.values().filter(|facts| facts.known).count())
    }

    /// Logs and records what is new.
    fn note(&self, before: &Suspicions, now: &Suspicions) {
        let recorder = &self.hub.notices().recorder;
        let object = |node: &NodeName| format!("Node/{node}");
        for (node, of) in now.nodes.iter().filter(|(node, _)| !before.nodes.contains_key(*node)) {
            let messages = Words(of, now, node).to_string();
            warn!(%node, "the node has been {messages}");
            self.hub.suspects().begun.fetch_add(1, Ordering::Relaxed);
            recorder.notice(NoticeKind::NodeSuspected, object(node), messages);
        }
        for node in now.dead.difference(&before.dead) {
            if let Some(of) = now.nodes.get(node) {
                warn!(%node, "the node counts as dead: connections to its endpoints end");
                let words = Words(of, now, node).to_string();
                recorder.notice(NoticeKind::NodeDead, object(node), words);
            }
        }
        for node in before.nodes.keys().filter(|node| !now.nodes.contains_key(*node)) {
            let why = if self.hub.agents().is_alive(node, SILENT) {
                "its agent has a stream"
            } else if self.elsewhere.contains_key(node) {
                "its agent has a stream to another replica"
            } else {
                let none = self.judge.holds;
                none.unwrap_or("a neighbour reaches it, or no longer enough miss it")
            };
            info!(%node, why, "the node is suspected no more");
            recorder.notice(NoticeKind::NodeReached, object(node), why.to_owned());
        }
    }
}

/// Returns where a node is tried.
fn addresses(facts: &NodeFacts) -> impl Iterator<Item = IpAddr> {
    let of = |family| facts.primary_address(family);
    Family::ALL.into_iter().filter_map(of)
}

/// Returns the question for a node: about the quiet one and the control, or none for a witness.
fn question(asked: &AskedNode, about: &NodeName, nodes: &FactsByNode) -> pb::Inspect {
    let target = |node: &NodeName| {
        let addresses = nodes
            .get(node)
            .into_iter()
            .flat_map(|facts| addresses(facts))
            .map(|ip| ip.to_string())
            .collect();
        pb::ReachTarget { addresses }
    };
    let nodes = asked.control.as_ref().map(|control| vec![target(about), target(control)]);
    pb::Inspect {
        reach: nodes.map(|nodes| pb::ReachQuestion { nodes }),
        urgent: true,
        ..pb::Inspect::default()
    }
}

/// Returns what an answer means.
fn word(asked: &AskedNode, reported: &pb::Inspection) -> Word {
    let reached = if asked.control.is_some() { reported.reached.as_ref() } else { None };
    match reached.map(|reached| &*reached.nodes) {
        Some([true, ..]) => Word::Reaches,
        Some([false, true, ..]) => Word::Misses,
        _ => Word::Present,
    }
}
