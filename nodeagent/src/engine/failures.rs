//! Objects that the kernel does not hold as desired, and since when.

use std::collections::BTreeMap;
use std::fmt::Display;

use kplane_model::DesiredKey;

use super::now::Now;
use crate::report::{Failure, Subject};

/// The failures of one table, by object. An object that still fails keeps the time when it began to.
#[derive(Debug)]
pub(super) struct LastingFailures<K> {
    failures: BTreeMap<K, Failure>,
    /// Names an object as those of all tables are named.
    name: fn(K) -> DesiredKey,
}

/// An object that fails now.
#[derive(Debug)]
pub(super) struct Failing<K> {
    pub(super) key: K,
    pub(super) reason: String,
    pub(super) degraded: bool,
}

impl<K: Ord + Clone + Display> LastingFailures<K> {
    pub(super) fn new(name: fn(K) -> DesiredKey) -> Self {
        let failures = BTreeMap::new();
        Self { failures, name }
    }

    /// Takes the failures of a change in place of those that these objects had; `None` = of all objects.
    pub(super) fn settle<'a>(
        &mut self,
        of: Option<impl Iterator<Item = &'a K>>,
        failing: impl IntoIterator<Item = Failing<K>>,
        now: Now,
    ) where
        K: 'a,
    {
        let before = match of {
            None => std::mem::take(&mut self.failures),
            Some(keys) => keys.filter_map(|key| self.failures.remove_entry(key)).collect(),
        };
        let mut is_said = false;
        for Failing {
            key,
            reason,
            degraded,
        } in failing
        {
            let old = before.get(&key).or(self.failures.get(&key));
            if old.is_none() && !std::mem::replace(&mut is_said, true) {
                tracing::warn!(
                    object = %key,
                    reason,
                    degraded,
                    "the kernel does not hold an object as desired. The report lists all that fail"
                );
            }
            let failure = Failure {
                about: Subject::Object((self.name)(key.clone())),
                since_ms: old.map_or(now.ms, |old| old.since_ms),
                reason,
                degraded,
            };
            self.failures.insert(key, failure);
        }
    }

    pub(super) fn by_object(&self) -> &BTreeMap<K, Failure> {
        &self.failures
    }
}
