//! The invariants: what a kernel takes, and what an agent holds and reports, compared with what replicas published.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kplane_model::Family;
use kplane_proto::v1 as pb;
use tokio::time::Instant;

use super::{FROZEN, I1, I3, I4, I5, Ledger, Position, Published, Sides, names};
use crate::oracle::{Entry, Key, Side, hash, key};
use crate::source::{CLIFF, Trust, is_cliff};

/// The time for which all replicas must insist before an agent takes an older state.
const INSISTENCE: Duration = Duration::from_secs(60);

impl Ledger {
    /// Checks a change of a kernel. Entries in `failed` are not as planned, because the kernel refused them.
    pub(crate) fn applied(
        &mut self,
        node: u8,
        family: Family,
        (before, after): (&Side, &Side),
        failed: &BTreeSet<Key>,
    ) {
        let print = hash(after);
        self.note(("applied", node, family, print), || {
            format!("the kernel of n{node} takes {family}: {}", names(after))
        });
        self.keeps_serving(node, family, before, after, failed);
        let notes = &self.agents[usize::from(node)];
        let candidates = notes.delivered.iter().rev().filter_map(|(at, _)| self.published.get(at));
        let states: Vec<_> = candidates
            .map(|one| Arc::clone(&one.nodes[usize::from(node)][family as usize]))
            .collect();
        let held = states
            .iter()
            .find_map(|state| explains(state, &notes.had[family as usize], after, failed));
        // What an agent keeps may add up to what another replica published.
        let exact = || self.hashes.contains(&(node, family as usize, print));
        let held = held.or_else(|| exact().then_some(false));
        let notes = &mut self.agents[usize::from(node)];
        notes.since = 0;
        notes.applied = true;
        notes.knows(family, after);
        if let Some(held) = held {
            notes.holding[family as usize] = held;
            return;
        }
        let wanted = states.first().map(|state| (**state).clone()).unwrap_or_default();
        let differing = difference(&wanted, after);
        let invariant =
            if self.is_of_another_node(node, family, &differing, after) { I3 } else { I1 };
        let text = format!(
            "the kernel of n{node} holds a state of {family} that no replica published: it has {}, and the newest state that reached the agent \
             has {}; {}",
            names(after),
            names(&wanted),
            explain(&wanted, after)
        );
        self.break_invariant(invariant, text);
    }

    fn is_of_another_node(&self, node: u8, family: Family, keys: &[Key], side: &Side) -> bool {
        let others = |one: &Published, key: &Key| {
            one.nodes
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != usize::from(node))
                .into_iter()
                .any(|(_, sides)| sides[family as usize].get(key) == side.get(key))
        };
        let own = |one: &Published, key: &Key| {
            one.nodes[usize::from(node)][family as usize].get(key) == side.get(key)
        };
        keys.iter().filter(|key| side.contains_key(*key)).any(|key| {
            let mut all = self.published.values();
            let other = self.published.values().any(|one| others(one, key));
            other && !all.any(|one| own(one, key))
        })
    }

    /// Checks that a snapshot does not take many Services that exist out of the kernel at once.
    fn keeps_serving(
        &mut self,
        node: u8,
        family: Family,
        before: &Side,
        after: &Side,
        failed: &BTreeSet<Key>,
    ) {
        let notes = &self.agents[usize::from(node)];
        let Some(((at, true), 1)) = notes.delivered.back().copied().map(|last| (last, notes.since))
        else {
            return;
        };
        let Some(published) = self.published.get(&at) else {
            return;
        };
        let state = &published.nodes[usize::from(node)];
        let remembered = notes
            .remembers
            .and_then(|at| self.published.get(&at))
            .map(|one| &*one.nodes[usize::from(node)][family as usize]);
        let serves = |side: &Side, service: u8| {
            side.iter().any(|((of, _), entry)| *of == service && entry.serves())
        };
        // An agent that has just started knows what its file says, which may be older than the kernel.
        let known = |service| notes.applied || remembered.is_some_and(|side| serves(side, service));
        // Others may be known too, such as those that the kernel refused.
        let earlier = notes
            .delivered
            .iter()
            .rev()
            .nth(1)
            .and_then(|(at, _)| self.published.get(at))
            .map(|one| &*one.nodes[usize::from(node)][family as usize]);
        let others = remembered.into_iter().chain(earlier).flat_map(Side::keys);
        let names = before.keys().chain(failed).chain(others);
        let all: BTreeSet<u8> = names.map(|(service, _)| *service).collect();
        let lost = all.iter().copied().filter(|service| {
            // The agent's guard counts Services, in both families together.
            let named = state.iter().any(|side| serves(side, *service));
            let gone = serves(before, *service) && !serves(after, *service) && !named;
            gone && known(*service) && published.missing.contains(service)
        });
        let (gone, bare): (Vec<u8>, Vec<u8>) = lost
            .partition(|service| state.iter().all(|side| side.keys().all(|(of, _)| of != service)));
        let lost = gone.len() + bare.len();
        let too_many = match published.trust {
            Trust::Partial => lost > 0,
            Trust::Whole => {
                [gone.len(), bare.len()].iter().any(|lost| is_cliff(CLIFF, *lost, all.len()))
            }
            Trust::Confirmed => false,
        };
        if too_many {
            let text = format!(
                "a snapshot of epoch {}, revision {} takes {lost} of {} Services out of {family} of n{node} although they exist: {gone:?} {bare:?}",
                at.0,
                at.1,
                all.len()
            );
            self.break_invariant(I4, text);
        }
    }

    /// Checks that an agent that took a state did not go back, and that it is not from after the node was frozen.
    pub(crate) fn holds(&mut self, node: u8, at: Option<Position>, frozen: Option<Instant>) {
        let notes = &mut self.agents[usize::from(node)];
        if notes.at == at {
            return;
        }
        let had = std::mem::replace(&mut notes.at, at);
        let Some((at, published)) = at.and_then(|at| Some((at, self.published.get(&at)?))) else {
            return;
        };
        let keeps = had.is_some() && notes.resumes;
        if keeps && frozen.is_some_and(|frozen| frozen < published.at) {
            let text = format!("n{node} was frozen at {had:?} and takes {at:?}");
            return self.break_invariant(FROZEN, text);
        }
        let long = notes.moved_at.is_none_or(|moved| moved.elapsed() >= INSISTENCE);
        notes.moved_at = Some(Instant::now());
        let back = published
            .latest
            .iter()
            // A state may be taken before its replica has listed NetworkPolicies.
            .filter(|(kind, _)| published.versions.contains_key(kind))
            .find(|(kind, versions)| {
                notes.floor.get(kind).is_some_and(|floor| versions.seen < *floor)
            })
            .map(|(kind, versions)| {
                format!(
                    "n{node} goes back from version {:?} of {kind} to {} of epoch {}",
                    notes.floor.get(kind),
                    versions.seen,
                    at.0
                )
            });
        for (kind, versions) in &published.versions {
            let floor = notes.floor.entry(*kind).or_default();
            *floor = (*floor).max(versions.changed);
        }
        notes.floors.insert(at, notes.floor.clone());
        if !long && let Some(text) = back {
            self.break_invariant(I1, text);
        }
    }

    /// Checks that an agent whose kernel has more than the control plane named says so.
    pub(crate) fn admits(&mut self, node: u8, keeps: bool, kernel: &Sides) {
        let holding = self.agents[usize::from(node)].holding;
        let mut sides = holding.iter().zip(kernel).enumerate();
        // The control plane may name them by now.
        let keeps_more = sides.any(|(family, (holding, (side, failed)))| {
            *holding && failed.is_empty() && !self.hashes.contains(&(node, family, hash(side)))
        });
        if keeps_more && !keeps {
            let text = format!(
                "n{node} keeps Services that the control plane does not name, and does not report it"
            );
            self.break_invariant(I5, text);
        }
    }

    /// Checks a report that an agent sends.
    pub(crate) fn reported(&mut self, node: u8, report: &pb::Report, kernel: &Sides) {
        let applied = report.applied_revision;
        let (epoch, verified) = (report.epoch, report.verified_revision);
        self.note(("report", node, epoch, report.received_revision, applied, verified), || {
            format!("n{node} reports epoch {epoch}: received {}, applied {applied}, verified {verified}", report.received_revision)
        });
        if verified > applied || applied > report.received_revision {
            let text = format!(
                "n{node} reports verified {verified}, applied {applied}, received {}",
                report.received_revision
            );
            return self.break_invariant(I5, text);
        }
        if applied == 0 {
            return;
        }
        let failed: BTreeSet<Key> = report
            .failures
            .iter()
            .filter_map(|f| f.key.clone())
            .filter_map(|name| Some(key(&name.try_into().ok()?)))
            .collect();
        let notes = &mut self.agents[usize::from(node)];
        if report.held.is_some() {
            notes.kept_at = Some((epoch, applied));
        }
        // The kernel may still have what the agent does not want to keep any more.
        let held = notes.kept_at == Some((epoch, applied));
        for (family, (side, failing)) in Family::ALL.into_iter().zip(kernel) {
            let mut states = self.published.range((epoch, applied)..=(epoch, u64::MAX));
            let ours = |one: &Published| Arc::clone(&one.nodes[usize::from(node)][family as usize]);
            let status = report.families.get(family as usize);
            let unused =
                self.published.get(&(epoch, applied)).is_some_and(|one| ours(one).is_empty());
            if unused && status.is_some_and(|status| !status.programmed) {
                // The report says that the family cannot be programmed. No Service needs it.
                continue;
            }
            // The kernel may be ahead of the report. What it refused of that, and what it has more, is reported later.
            let later: BTreeSet<Key> = failed.union(failing).copied().collect();
            let holding = held || self.agents[usize::from(node)].holding[family as usize];
            let explained = |(at, one): (&Position, &Published)| {
                if at.1 == applied {
                    may_report(&ours(one), side, &failed, held)
                } else {
                    may_report(&ours(one), side, &later, holding)
                }
            };
            if !states.any(explained) {
                let wanted = self.published.get(&(epoch, applied)).map(ours).unwrap_or_default();
                let text = format!(
                    "n{node} reports revision {applied} of epoch {epoch}, and its kernel has {family} {}; that revision has {}; {}",
                    names(side),
                    names(&wanted),
                    explain(&wanted, side)
                );
                return self.break_invariant(I5, text);
            }
        }
    }
}

/// Returns whether a kernel is in a state except for what the kernel refused and what the agent keeps of what it had, and
/// whether it keeps something.
fn explains(
    state: &Side,
    had: &BTreeMap<Key, Vec<Entry>>,
    after: &Side,
    failed: &BTreeSet<Key>,
) -> Option<bool> {
    let mut held = false;
    for key in state.keys().chain(after.keys()) {
        let (wanted, has) = (state.get(key), after.get(key));
        if wanted == has || failed.contains(key) {
            continue;
        }
        let mut had = had.get(key).into_iter().flatten();
        let kept = match (wanted, has) {
            (None, Some(has)) => had.any(|had| had == has),
            (Some(wanted), Some(has)) => {
                !wanted.serves() && had.any(|had| has.keeps_endpoints(had))
            }
            (_, None) => false,
        };
        if !kept {
            return None;
        }
        held = true;
    }
    Some(held)
}

/// Returns whether an agent may report a state.
fn may_report(state: &Side, kernel: &Side, failed: &BTreeSet<Key>, held: bool) -> bool {
    state.keys().chain(kernel.keys()).all(|key| {
        let (wanted, has) = (state.get(key), kernel.get(key));
        let kept = match (wanted, has) {
            (None, Some(_)) => true,
            (Some(wanted), Some(_)) => !wanted.serves(),
            _ => false,
        };
        wanted == has || failed.contains(key) || held && kept
    })
}

fn difference(one: &Side, other: &Side) -> Vec<Key> {
    let keys: BTreeSet<&Key> = one.keys().chain(other.keys()).collect();
    keys.into_iter().filter(|key| one.get(key) != other.get(key)).copied().collect()
}

/// Returns the first difference between what a kernel must have and has.
fn explain(wanted: &Side, has: &Side) -> String {
    let key = difference(wanted, has).into_iter().next();
    key.map_or_else(String::new, |key| {
        format!(
            "{key:?} must be {:?} and is {:?}",
            wanted.get(&key),
            has.get(&key)
        )
    })
}
