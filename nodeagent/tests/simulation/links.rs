//! The links between machines, and whether a replica suspects a node that others reach.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::FutureExt as _;
use kp_nodeagent::peer_probe::PeerProbe;
use kplane_agents::hub::Hub;
use kplane_proto::v1 as pb;
use tokio::time::{Instant, sleep};

use crate::ledger::{Shared, lock};
use crate::truth::{node_address, node_name};

pub(crate) const SUSPECTS: &str = "no node is suspected that its neighbours reach";

/// Time in which a node that is reached again may be suspected: its stream, or a neighbour, takes it back in a round,
/// and without answers the verdict lapses.
const LAPSES: Duration = Duration::from_secs(20);
/// Time before a verdict in which the node was out of reach: a round.
const ROUND: Duration = Duration::from_millis(1_000);
/// Time that an agent waits for a node.
const PATIENCE: Duration = Duration::from_millis(500);

/// Until when nodes are cut off, and how.
#[derive(Debug)]
pub(crate) struct Links {
    /// From everybody.
    dark: Vec<Instant>,
    /// From control planes only.
    apart: Vec<Instant>,
    /// These nodes, by their bits, from control planes and from all other nodes.
    split: (u8, Instant),
    /// Until when a node was out of its neighbours' reach.
    out_of_reach: Vec<Instant>,
}

impl Links {
    pub(crate) fn new(nodes: u8) -> Self {
        let now = vec![Instant::now(); nodes.into()];
        Self {
            dark: now.clone(),
            apart: now.clone(),
            split: (0, Instant::now()),
            out_of_reach: now,
        }
    }

    /// Cuts a node off, or turns its machine off.
    pub(crate) fn darken(&mut self, node: u8, time: Duration) {
        let until = Instant::now() + time;
        let node = usize::from(node);
        self.dark[node] = self.dark[node].max(until);
        self.out_of_reach[node] = self.out_of_reach[node].max(until);
    }

    pub(crate) fn set_apart(&mut self, mask: u8, time: Duration) {
        let until = Instant::now() + time;
        let apart = (0_u8..).zip(&mut self.apart).filter(|(node, _)| mask >> node & 1 == 1);
        apart.for_each(|(_, apart)| *apart = (*apart).max(until));
    }

    pub(crate) fn set_split(&mut self, mask: u8, time: Duration) {
        let until = Instant::now() + time;
        self.split = (mask, until);
        let split = (0_u8..).zip(&mut self.out_of_reach).filter(|(node, _)| mask >> node & 1 == 1);
        split.for_each(|(_, out)| *out = (*out).max(until));
    }

    pub(crate) fn heal(&mut self) {
        let now = Instant::now();
        let all = self.dark.iter_mut().chain(&mut self.apart).chain(&mut self.out_of_reach);
        all.for_each(|until| *until = now.min(*until));
        self.split.1 = now;
    }

    fn is_split_off(&self, node: u8) -> bool {
        self.split.1 > Instant::now() && self.split.0 >> node & 1 == 1
    }

    /// Returns until when a node reaches no control plane.
    pub(crate) fn cut_until(&self, node: u8) -> Instant {
        let at = usize::from(node);
        let split = if self.is_split_off(node) { self.split.1 } else { Instant::now() };
        self.dark[at].max(self.apart[at]).max(split)
    }

    fn reaches(&self, from: u8, to: u8) -> bool {
        let is_dark = |node: u8| self.dark[usize::from(node)] > Instant::now();
        !is_dark(from) && !is_dark(to) && self.is_split_off(from) == self.is_split_off(to)
    }
}

pub(crate) type SharedLinks = Arc<std::sync::Mutex<Links>>;

/// Returns how a node's agent finds out which nodes it reaches.
pub(crate) fn peer_probe(links: &SharedLinks, from: u8) -> PeerProbe {
    let links = Arc::clone(links);
    Arc::new(move |question: pb::ReachQuestion| {
        let links = Arc::clone(&links);
        async move {
            let reaches = |target: &pb::ReachTarget| {
                let links = lock(&links);
                let nodes = 0..u8::try_from(links.dark.len()).unwrap();
                let is_it = |node: &u8| target.addresses.contains(&node_address(*node).to_string());
                nodes.clone().find(is_it).is_some_and(|to| links.reaches(from, to))
            };
            let nodes: Vec<bool> = question.nodes.iter().map(reaches).collect();
            if nodes.contains(&false) {
                sleep(PATIENCE).await;
            }
            pb::Reached { nodes }
        }
        .boxed()
    })
}

/// Checks whom a replica suspects, each time that it changes.
pub(crate) async fn check(hub: Arc<Hub>, links: SharedLinks, nodes: u8, ledger: Shared) {
    let mut changes = hub.suspects().changes();
    let mut before = Arc::default();
    loop {
        let now = Arc::clone(&changes.borrow_and_update());
        let most = (usize::from(nodes) * 3 / 10).max(1);
        if now.nodes.len() > most {
            let text = format!("{} of {nodes} nodes", now.nodes.len());
            lock(&ledger).break_invariant(SUSPECTS, text);
        }
        for node in 0..nodes {
            let name = node_name(node);
            let out = lock(&links).out_of_reach[usize::from(node)];
            if now.nodes.contains_key(&name) {
                let is_new = !Arc::<kplane_desired_state::index::Suspicions>::clone(&before)
                    .nodes
                    .contains_key(&name);
                let may = if is_new { ROUND } else { LAPSES };
                lock(&ledger).note("suspect", || format!("a replica suspects {name}"));
                if out + may < Instant::now() {
                    let text = format!("{name} could be reached for {may:?}");
                    lock(&ledger).break_invariant(SUSPECTS, text);
                }
            }
        }
        before = now;
        tokio::select! {
            biased;
            () = hub.shutdown().cancelled() => return,
            changed = changes.changed() => if changed.is_err() { return },
            // What lasts is looked at again.
            () = sleep(LAPSES), if !before.nodes.is_empty() => {}
        }
    }
}
