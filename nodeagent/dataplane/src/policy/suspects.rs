//! Policies at which the process died: those at which it died twice are set aside until they change.
//!
//! A note outside of the process names the policy that is worked out. A process that finds a note at its start knows where
//! the one before it ended, whatever ended it.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use kplane_model::{Policy, PolicyName};

/// Deaths at which a policy is set aside.
const TOO_MANY: u32 = 2;

/// Most policies that are remembered.
const MOST: usize = 16;

/// Puts text in a place that outlives the process, in place of the text before. It does not block.
pub type Tell = Box<dyn FnMut(String) + Send>;

/// What is remembered. Without a place for notes, nothing is.
#[derive(Default)]
pub(super) struct Suspects {
    tell: Option<Tell>,
    deaths: BTreeMap<PolicyName, Deaths>,
    noted: bool,
    /// Policies that turned out to be innocent since the last note was taken back.
    innocent: Vec<PolicyName>,
}

/// Deaths at one version of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Deaths {
    hash: u64,
    count: u32,
}

impl fmt::Debug for Suspects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Suspects").field(&self.deaths).finish()
    }
}

impl Suspects {
    /// Reads the text that earlier processes left.
    pub(super) fn new(left: &str, tell: Tell) -> Self {
        let (note, rest) = left.split_once('\n').unwrap_or_default();
        let mut deaths: BTreeMap<_, _> = rest.lines().filter_map(parse).take(MOST).collect();
        if let Some((name, Deaths { hash, .. })) = parse(note) {
            let before = deaths.get(&name).filter(|before| before.hash == hash);
            let count = before.map_or(1, |before| before.count.saturating_add(1));
            tracing::warn!(
                policy = %name, count,
                "the agent's last process ended while it worked this policy out; after the second time the agent sets it \
                 aside until it changes"
            );
            let least = deaths
                .iter()
                .min_by_key(|(_, deaths)| deaths.count)
                .map(|(name, _)| name.clone());
            if deaths.len() >= MOST
                && let Some(least) = least
            {
                deaths.remove(&least);
            }
            deaths.insert(name, Deaths { hash, count });
        }
        let mut suspects = Self {
            tell: Some(tell),
            deaths,
            ..Self::default()
        };
        suspects.note(None);
        suspects
    }

    /// Notes that the process works on a policy now. Returns whether the policy is to be set aside instead.
    pub(super) fn works_on(&mut self, name: &PolicyName, policy: &Policy) -> bool {
        if self.tell.is_none() {
            return false;
        }
        let hash = hash(policy);
        if let Some(deaths) = self.deaths.get(name) {
            if deaths.hash == hash && deaths.count >= TOO_MANY {
                return true;
            }
            self.innocent.push(name.clone());
        }
        self.note(Some((name, hash)));
        self.noted = true;
        false
    }

    /// Takes the note back: the process lives.
    pub(super) fn is_done(&mut self) {
        for name in std::mem::take(&mut self.innocent) {
            self.deaths.remove(&name);
        }
        if std::mem::take(&mut self.noted) {
            self.note(None);
        }
    }

    fn note(&mut self, now: Option<(&PolicyName, u64)>) {
        let Some(tell) = &mut self.tell else { return };
        let now = now.map(|(name, hash)| line(name, Deaths { hash, count: 0 }));
        let deaths = self.deaths.iter();
        let deaths = deaths.map(|(name, deaths)| line(name, *deaths));
        let lines = std::iter::once(now.unwrap_or_default()).chain(deaths);
        let text: String = lines.map(|line| line + "\n").collect();
        let is_empty = text == "\n";
        tell(if is_empty { String::new() } else { text });
    }
}

fn line(name: &PolicyName, deaths: Deaths) -> String {
    let Deaths { hash, count } = deaths;
    format!("{}\t{}\t{hash:x}\t{count}", name.namespace, name.name)
}

fn parse(line: &str) -> Option<(PolicyName, Deaths)> {
    let mut fields = line.split('\t');
    let mut next = || fields.next();
    let name = PolicyName::new(next()?, next()?);
    let hash = u64::from_str_radix(next()?, 16).ok()?;
    let count = next()?.parse().ok()?;
    Some((name, Deaths { hash, count }))
}

/// Returns a hash of a policy. Another version of the agent may have another one, and gives each policy a new chance.
fn hash(policy: &Policy) -> u64 {
    let mut hasher = DefaultHasher::new();
    policy.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// What outlives processes.
    #[derive(Clone, Default)]
    struct Place(Arc<Mutex<String>>);

    impl Place {
        /// Starts the next process.
        fn next(&self) -> Suspects {
            let left = self.0.lock().unwrap().clone();
            let place = self.0.clone();
            Suspects::new(&left, Box::new(move |text| *place.lock().unwrap() = text))
        }

        /// A process that dies at a policy; returns whether it sets it aside instead.
        fn dies(&self, (name, policy): &(PolicyName, Policy)) -> bool {
            self.next().works_on(name, policy)
        }
    }

    fn policy(name: &str, ingress: bool) -> (PolicyName, Policy) {
        let name = PolicyName::new("bank", name);
        let policy = Policy {
            name: name.clone(),
            ingress: ingress.then(Vec::new),
            egress: None,
        };
        (name, policy)
    }

    #[test]
    fn a_policy_at_which_two_processes_died_is_set_aside_until_it_changes() {
        let (place, old, new) = (Place::default(), policy("x", true), policy("x", false));
        assert!(!place.dies(&old));
        assert!(!place.dies(&old));
        assert!(place.dies(&old));
        assert!(place.dies(&old), "it stays aside");
        let mut third = place.next();
        assert!(!third.works_on(&new.0, &new.1), "it has changed");
        third.is_done();
        assert!(!place.dies(&old), "the agent lived with another version");
    }

    #[test]
    fn a_policy_with_which_a_process_lives_is_innocent() {
        let (place, policy) = (Place::default(), policy("x", true));
        for _ in 0..5 {
            assert!(!place.dies(&policy));
            let mut next = place.next();
            assert!(!next.works_on(&policy.0, &policy.1));
            next.is_done();
        }
    }

    /// Whatever the text is, and however many policies there are, the agent starts.
    #[test]
    fn a_text_of_anything_is_read_and_stays_small() {
        let place = Place::default();
        *place.0.lock().unwrap() = "x\t\ty\n\t\n\n".repeat(9_999);
        for number in 0..100 {
            assert!(!place.dies(&policy(&number.to_string(), true)));
        }
        assert_eq!(place.next().deaths.len(), MOST);
        assert!(place.0.lock().unwrap().len() < 10_000);
    }
}
