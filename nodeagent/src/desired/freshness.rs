//! How much of its source a state contains: decides which of two replicas shows an older one. Pure.
//!
//! A control plane reports for each kind up to which version it has seen all changes, and the version of
//! the newest change among them. The agent remembers the latter of the state that it holds. A replica
//! that has not seen that change shows an older state.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use kplane_proto::v1 as pb;

/// Most kinds that are remembered; control planes have four.
const MAX_KINDS: usize = 16;

/// Longest kind and version, in bytes. Versions of API servers have fewer than 20 digits.
const MAX_TEXT: usize = 128;

/// A version of a kind of objects: a decimal number of any length, without leading zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Version(Arc<str>);

/// The newest change of each kind that a state contains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Freshness(BTreeMap<Arc<str>, Version>);

/// The versions that a control plane shows on a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offer(BTreeMap<Arc<str>, Offered>);

/// The versions of one kind that a control plane shows.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Offered {
    /// The control plane has seen all changes up to this version.
    seen: Version,
    /// The version of the newest change among them.
    changed: Version,
}

/// The difference by which a replica shows an older state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the control plane has seen versions of {kind} up to {theirs}, and this node holds version {ours}: the control plane \
     shows an older state of the cluster, of which nothing is applied"
)]
pub struct Lag {
    kind: Arc<str>,
    theirs: Version,
    ours: Version,
}

impl Version {
    /// Reads a version; `None` if it cannot be compared with others.
    fn parse(text: &str) -> Option<Self> {
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
        let comparable = is_number && !text.starts_with('0') && !text.is_empty();
        (comparable && text.len() <= MAX_TEXT).then(|| Self(text.into()))
    }
}

impl Ord for Version {
    fn cmp(&self, other: &Self) -> Ordering {
        let (one, two) = (&self.0, &other.0);
        one.len().cmp(&two.len()).then_with(|| one.cmp(two))
    }
}

impl PartialOrd for Version {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Freshness {
    /// Creates the freshness of a state from kinds and versions, as a file has them. Leaves out what
    /// cannot be compared.
    pub fn of<'a>(kinds: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        let kinds =
            kinds.filter_map(|(kind, version)| Some((Arc::from(kind), Version::parse(version)?)));
        Self(kinds.take(MAX_KINDS).collect())
    }

    /// Returns all kinds and versions.
    pub fn kinds(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.0.iter().map(|(kind, version)| (&**kind, &*version.0))
    }

    /// Takes in the newest changes of a state that a control plane shows. This state is not older, so
    /// it contains the changes of the state before.
    pub fn join(&mut self, offer: &Offer) {
        for (kind, offered) in &offer.0 {
            let held = self.0.entry(kind.clone()).or_insert_with(|| offered.changed.clone());
            if *held < offered.changed {
                *held = offered.changed.clone();
            }
        }
    }

    /// Replaces the freshness by that of a state that a control plane shows.
    pub fn replace(&mut self, offer: &Offer) {
        self.0.clear();
        self.join(offer);
    }
}

impl Offer {
    /// Takes in a message of the stream. Kinds that it does not name stay as they were.
    pub fn hear(&mut self, reported: &[pb::KindVersion]) {
        for one in reported {
            let Some(seen) = Version::parse(&one.version) else {
                continue;
            };
            let changed = Version::parse(&one.changed).filter(|changed| *changed < seen);
            let known = self.0.contains_key(&*one.kind);
            if known || self.0.len() < MAX_KINDS && one.kind.len() <= MAX_TEXT {
                let changed = changed.unwrap_or_else(|| seen.clone());
                self.0.insert(one.kind.as_str().into(), Offered { seen, changed });
            }
        }
    }

    /// Returns a kind of which this control plane lacks a change that a state contains, if there is one.
    pub fn lag(&self, held: &Freshness) -> Option<Lag> {
        let lags = |(kind, ours): (&Arc<str>, &Version)| {
            let theirs = &self.0.get(kind)?.seen;
            (theirs < ours).then(|| Lag {
                kind: kind.clone(),
                theirs: theirs.clone(),
                ours: ours.clone(),
            })
        };
        held.0.iter().find_map(lags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reported(kind: &str, version: &str, changed: &str) -> pb::KindVersion {
        pb::KindVersion {
            kind: kind.into(),
            version: version.into(),
            changed: changed.into(),
        }
    }

    fn offer(reported: &[pb::KindVersion]) -> Offer {
        let mut offer = Offer::default();
        offer.hear(reported);
        offer
    }

    #[test]
    fn versions_are_numbers_of_any_length() {
        let order = [
            "1",
            "9",
            "10",
            "99999999999999999999999999",
            "100000000000000000000000000",
        ];
        let versions = order.map(|text| Version::parse(text).unwrap());
        assert!(versions.is_sorted());
        let long = "9".repeat(MAX_TEXT + 1);
        for text in [
            "", "0", "007", "-1", "+1", "1e3", "abc", " 1", "1.0", "٣", &long,
        ] {
            assert_eq!(Version::parse(text), None, "{text:?}");
        }
    }

    /// Watches are at different points after the same last change, so `seen` alone would tell two equal
    /// replicas apart.
    #[test]
    fn a_replica_is_older_if_it_has_not_seen_the_newest_change() {
        let mut held = Freshness::default();
        held.join(&offer(&[
            reported("Service", "200", "150"),
            reported("Node", "300", ""),
        ]));
        for (service, node, lags) in [
            ("150", "300", None),
            ("199", "1000", None),
            ("149", "300", Some("Service")),
            ("99", "300", Some("Service")),
            ("150", "299", Some("Node")),
            ("", "300", None),
            ("v150", "300", None),
        ] {
            let offer = offer(&[
                reported("Service", service, ""),
                reported("Node", node, "7"),
            ]);
            let lag = offer.lag(&held).map(|lag| lag.kind.to_string());
            assert_eq!(lag.as_deref(), lags, "{service} {node}");
        }
        assert_eq!(
            Offer::default().lag(&held),
            None,
            "a folder has no versions"
        );
    }

    #[test]
    fn a_state_keeps_the_newest_change_that_it_contains() {
        let mut held = Freshness::default();
        held.join(&offer(&[
            reported("Service", "200", "150"),
            reported("Node", "30", ""),
        ]));
        // This replica has just listed, so it does not know of the deletion at 150.
        held.join(&offer(&[reported("Service", "210", "120")]));
        let kinds: Vec<_> = held.kinds().collect();
        assert_eq!(kinds, [("Node", "30"), ("Service", "150")]);
        held.replace(&offer(&[reported("Service", "100", "90")]));
        assert_eq!(held.kinds().collect::<Vec<_>>(), [("Service", "90")]);
        let again = Freshness::of(held.kinds());
        assert_eq!(again, held);
    }

    #[test]
    fn a_hostile_control_plane_fills_no_memory() {
        let many: Vec<_> =
            (0..1_000).map(|kind| reported(&format!("kind-{kind}"), "1", "")).collect();
        let mut offer = offer(&many);
        assert_eq!(offer.0.len(), MAX_KINDS);
        offer.hear(&[
            reported(&"k".repeat(MAX_TEXT + 1), "1", ""),
            reported("kind-0", "2", ""),
        ]);
        assert_eq!(offer.0.len(), MAX_KINDS);
        assert_eq!(&*offer.0["kind-0"].seen.0, "2");
    }
}
