//! The invariants of NetworkPolicies: what a kernel does with packets, compared with what the states say in which it may be.
//!
//! A kernel may be in the state that its agent reported last, or in one that reached the agent since: both what passes and
//! what is dropped must follow from one of them. A state is what a replica's source said, not what the API server has, so
//! that lag is no excuse for a kernel.

use std::collections::VecDeque;
use std::sync::Arc;

use kplane_desired_state::admission::Enforce;
use kplane_model::Family;

use super::{Ledger, N1, N2, Position};
use crate::reference::{Answers, Cluster, Packet};
use crate::source::View;

/// What the nodes may do with the sample of packets in one state.
pub(super) type Verdicts = Arc<Vec<Answers>>;

/// What an agent says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Claim {
    pub(crate) applied: Option<Position>,
    /// It keeps parts of NetworkPolicies that the control plane does not name.
    pub(crate) keeps: bool,
}

/// The states in which a kernel may be, oldest first.
#[derive(Debug)]
pub(super) struct States {
    states: VecDeque<(Option<Position>, Answers)>,
    /// The agent keeps more than it was sent, until it reports another position without that.
    keeping: bool,
    /// The agent was sent NetworkPolicies since: what it keeps may be beside others.
    named: bool,
    /// What the kernel passed, and the agent said, when they were checked last.
    checked: Option<(u64, Claim)>,
    /// Another program changes a family's table after so many changes of the agent, and the agent has not repaired that.
    disturbed: [Option<u64>; 2],
    /// The agent died in the midst of a change. Of changes that have nothing to do with each other, the kernel may have
    /// some.
    midway: bool,
    /// The kernel refused elements of a family: its agent cuts Pods off until they or their policies change.
    refused: [bool; 2],
    /// The position that the agent reported last, and the number of its changes then. A change that fails between two
    /// transactions leaves a kernel with a part of it, of which the agent reports nothing.
    settled: (Option<Position>, u64),
}

impl Default for States {
    /// A kernel without policies.
    fn default() -> Self {
        Self {
            states: [(None, Answers::OPEN)].into(),
            keeping: false,
            named: false,
            checked: None,
            disturbed: [None; 2],
            midway: false,
            refused: [false; 2],
            settled: (None, 0),
        }
    }
}

impl States {
    fn add(&mut self, at: Option<Position>, answers: Answers) {
        if self.states.back() != Some(&(at, answers)) {
            self.states.push_back((at, answers));
        }
    }

    /// The agent reports that the kernel is in the state of a position, or a later one.
    fn confirm(&mut self, at: Position) {
        if let Some(place) = self.states.iter().rposition(|(known, _)| *known == Some(at)) {
            self.states.drain(..place);
            (self.keeping, self.named, self.midway) = (false, false, false);
        }
    }

    /// Returns whether an end of a packet may be cut off.
    fn is_cut_off(&self, packet: &Packet) -> bool {
        self.refused[Family::of(packet.from) as usize]
    }

    fn all(&self) -> Answers {
        self.states.iter().fold(Answers::default(), |all, (_, one)| all | *one)
    }
}

impl Ledger {
    /// Returns what the nodes may do with packets in a replica's state; `None` = it has not read the policies.
    pub(super) fn verdicts(&mut self, epoch: u64, view: &View) -> Option<Verdicts> {
        if view.policies() == Some(Enforce::Off) {
            return Some(Arc::new(vec![Answers::OPEN; self.agents.len()]));
        }
        if !view.has_policies() {
            return None;
        }
        let known = self.judged.get(&epoch).filter(|(change, _)| *change == view.policy_change);
        if let Some((_, verdicts)) = known {
            return Some(Arc::clone(verdicts));
        }
        let cluster = Cluster::of(&view.objects);
        let nodes = u8::try_from(self.agents.len()).unwrap_or(0);
        let verdicts = (0..nodes).map(|node| cluster.answers(node, &self.packets)).collect();
        let verdicts = Arc::new(verdicts);
        self.judged.insert(epoch, (view.policy_change, Arc::clone(&verdicts)));
        Some(verdicts)
    }

    /// Returns what the nodes do with packets that know no NetworkPolicies, if the replica has not read these yet: all but
    /// Pods of their ranges are open.
    pub(super) fn unread(&self, view: &View) -> Option<Verdicts> {
        let is_unread = view.policies() == Some(Enforce::On) && !view.has_policies();
        let cluster = is_unread.then(|| Cluster::of(&view.objects).unread())?;
        let nodes = u8::try_from(self.agents.len()).unwrap_or(0);
        let answers = (0..nodes).map(|node| cluster.answers(node, &self.packets));
        Some(Arc::new(answers.collect()))
    }

    /// Notes that a state reached an agent.
    pub(super) fn may_be_in(&mut self, node: u8, at: Position) {
        let (node, Some(published)) = (usize::from(node), self.published.get(&at)) else {
            return;
        };
        let notes = &mut self.agents[node];
        let states = &mut notes.states;
        if let Some(verdicts) = &published.verdicts {
            (notes.knows_policies, notes.has_policies, states.named) = (true, true, true);
            return states.add(Some(at), verdicts[node]);
        }
        // The replica does not know NetworkPolicies, or not yet.
        if let Some(unread) = &published.unread
            && !notes.knows_policies
        {
            states.add(Some(at), unread[node]);
        }
        if notes.has_policies {
            let kept = notes.kept.entry(at).or_default();
            *kept = (kept.0 | states.all(), kept.1 || states.keeping);
        }
    }

    /// Notes that an agent starts with what it had at a position.
    pub(super) fn remembers(&mut self, node: u8, at: Position) {
        let notes = &mut self.agents[usize::from(node)];
        notes.knows_policies = true;
        match notes.kept.get(&at) {
            Some((answers, keeping)) => {
                notes.has_policies = true;
                notes.states.add(Some(at), *answers);
                notes.states.named |= keeping;
            }
            None => self.may_be_in(node, at),
        }
    }

    /// Notes that a kernel has lost everything.
    pub(crate) fn rebooted(&mut self, node: u8) {
        let states = &mut self.agents[usize::from(node)].states;
        *states = States {
            refused: states.refused,
            ..States::default()
        };
    }

    /// Notes that another program changes a family's table after so many changes of the agent.
    pub(crate) fn disturbed(&mut self, node: u8, family: Family, after: u64) {
        let states = &mut self.agents[usize::from(node)].states;
        let disturbed = &mut states.disturbed[family as usize];
        *disturbed = (*disturbed).max(Some(after));
    }

    /// Notes that a kernel refuses elements of a family.
    pub(crate) fn refused(&mut self, node: u8, family: Family) {
        self.agents[usize::from(node)].states.refused[family as usize] = true;
    }

    /// Returns whether a node may have cut an end of a packet off.
    pub(crate) fn is_cut_off(&self, node: u8, packet: &Packet) -> bool {
        self.agents[usize::from(node)].states.is_cut_off(packet)
    }

    /// Notes that an agent died in the midst of a change.
    pub(crate) fn died(&mut self, node: u8) {
        self.agents[usize::from(node)].states.midway = true;
    }

    /// Checks what a kernel does with the sample, of which these packets pass, after so many changes.
    pub(crate) fn passes(&mut self, node: u8, passing: u64, changes: u64, claim: Claim) {
        let checked = &mut self.agents[usize::from(node)].states.checked;
        if checked.replace((passing, claim)) == Some((passing, claim)) {
            return;
        }
        self.note(("passes", node, passing, claim), || {
            format!("n{node} lets {passing:x} pass; {claim:?}")
        });
        let notes = &mut self.agents[usize::from(node)];
        // What a process remembers without a word of a control plane may leave the kernel as it is.
        let is_told = notes.is_told || !notes.knows_policies;
        let states = &mut notes.states;
        let is_state = |at: &Position| states.states.iter().any(|(known, _)| *known == Some(*at));
        let confirmed = claim.applied.filter(|at| is_told && is_state(at));
        states.keeping |= claim.keeps && states.named;
        if claim.applied.is_none() {
            states.settled.0 = None;
        }
        if let Some(at) = confirmed
            && states.settled.0 != Some(at)
        {
            states.settled = (Some(at), changes);
            if !claim.keeps {
                states.confirm(at);
            }
        }
        if states.keeping {
            return;
        }
        let (all, packets) = (states.all(), &self.packets);
        let [v4, v6] = Family::ALL.map(|family| Answers::either(family, packets));
        for (disturbed, other) in states.disturbed.iter_mut().zip([v6, v4]) {
            if (all | other).wrong(passing, packets).is_none() {
                disturbed.take_if(|after| changes > *after);
            }
        }
        let damaged = states.disturbed.iter().zip([v4, v6]).filter(|(known, _)| known.is_some());
        let all = damaged
            .fold(all, |all, (_, either)| all | either)
            .or_dropped(packets, |packet| states.is_cut_off(packet));
        let Some((packet, passes)) = all.wrong(passing, packets) else {
            return;
        };
        let has_part = states.states.len() > 1 && changes > states.settled.1;
        // Of changes of several objects, a packet may see one without the others.
        let number = |at: Position| self.published.get(&at).map(|one| (at.0, one.policy_change));
        let (first, last) = (states.states.front(), states.states.back());
        let [first, last] = [first, last].map(|state| number(state?.0?));
        let is_one = last.is_some_and(|(of, last)| first == Some((of, last.saturating_sub(1))));
        let excused = has_part && !(is_one && passes) || states.midway && !passes;
        if excused {
            return;
        }
        let states: Vec<_> = states.states.iter().map(|(at, _)| *at).collect();
        let (invariant, does) = if passes { (N1, "passes") } else { (N2, "drops") };
        let text =
            format!("n{node} {does} {packet}; the states it may be in: {states:?}; {claim:?}");
        self.break_invariant(invariant, text);
    }

    pub(crate) fn packets(&self) -> &Arc<[Packet]> {
        &self.packets
    }
}
