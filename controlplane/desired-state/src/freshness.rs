//! How much of its source a state contains, by kind: for agents that compare replicas.

use std::collections::BTreeMap;

use kplane_proto::v1 as pb;

use crate::k8s::Kind;

/// The versions of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// All changes up to this version are known.
    pub seen: u64,
    /// Version of the newest change that is known.
    pub changed: u64,
}

/// The versions of all kinds; empty for a source without versions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Freshness(BTreeMap<Kind, Versions>);

impl Freshness {
    /// Sets the versions of a kind.
    pub fn set(&mut self, kind: Kind, versions: Versions) {
        self.0.insert(kind, versions);
    }

    /// Returns the versions of a kind; `None` if it has none.
    pub fn of(&self, kind: Kind) -> Option<Versions> {
        self.0.get(&kind).copied()
    }

    /// Returns the kinds that differ from what a stream has sent, for the wire.
    pub fn news(&self, reported: &Self) -> Vec<pb::KindVersion> {
        self.0
            .iter()
            .filter(|(kind, versions)| reported.0.get(kind) != Some(versions))
            .map(|(kind, versions)| pb::KindVersion {
                kind: kind.as_str().to_owned(),
                version: versions.seen.to_string(),
                changed: if versions.changed == versions.seen {
                    String::new()
                } else {
                    // Agents cannot compare 0, the version of a kind without objects, and would take `seen` instead.
                    versions.changed.max(1).to_string()
                },
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_stream_was_not_told_travels() {
        let mut freshness = Freshness::default();
        let versions = |seen, changed| Versions { seen, changed };
        freshness.set(Kind::Service, versions(7, 5));
        freshness.set(Kind::EndpointSlice, versions(9, 9));
        let all = freshness.news(&Freshness::default());
        let reported =
            |one: &pb::KindVersion| (one.kind.clone(), one.version.clone(), one.changed.clone());
        let text = |a: &str, b: &str, c: &str| (a.to_owned(), b.to_owned(), c.to_owned());
        assert_eq!(
            all.iter().map(reported).collect::<Vec<_>>(),
            [text("Service", "7", "5"), text("EndpointSlice", "9", "")]
        );
        freshness.set(Kind::Node, versions(20, 0));
        let empty = freshness.news(&Freshness::default()).pop();
        let wanted = text("Node", "20", "1");
        assert_eq!(
            empty.as_ref().map(reported),
            Some(wanted),
            "no objects, no change"
        );
        let before = freshness.clone();
        assert_eq!(freshness.news(&before), []);
        freshness.set(Kind::Service, versions(10, 10));
        assert_eq!(freshness.news(&before).len(), 1);
    }
}
