//! Trust in a source's picture where objects are missing from it. Pure.
//!
//! Objects that the picture names always count. An object that it does not name is gone only if the
//! picture is complete. A start that reads half a file must not be taken for a cluster of half the
//! size. Each update carries the trust to agents.
//!
//! Doubts of sources, second lists and approvals of operators together make the trust.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::k8s::Kind;

/// Trust that an object which the picture does not name is gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// A part of the source has never been read completely since the start; with the human-readable
    /// reason.
    Partial(Arc<str>),
    /// The source has been read completely.
    #[default]
    Whole,
    /// A second read or the operator confirmed the picture.
    Confirmed,
}

impl Trust {
    /// Returns the reason why the picture is incomplete; empty otherwise.
    pub fn doubt(&self) -> &str {
        match self {
            Self::Partial(doubt) => doubt,
            Self::Whole | Self::Confirmed => "",
        }
    }

    /// Returns whether objects may be missing.
    pub fn is_partial(&self) -> bool {
        matches!(self, Self::Partial(_))
    }
}

/// Kinds whose second lists confirm the picture where no NetworkPolicies are enforced: if objects of
/// these kinds are missing, Services vanish.
pub const SERVICES: [Kind; 2] = [Kind::Service, Kind::EndpointSlice];

/// Kinds whose second lists confirm the picture where NetworkPolicies are enforced: if objects of
/// these kinds are missing, Pods are open or closed that should not be.
pub const WITH_POLICIES: [Kind; 6] = [
    Kind::Service,
    Kind::EndpointSlice,
    Kind::NetworkPolicy,
    Kind::Namespace,
    Kind::Pod,
    Kind::ClusterNetworkPolicy,
];

/// Maximum number of doubts that are named; the others are counted.
const DOUBTS_NAMED: usize = 3;

/// The statements of sources and of the operator about the picture.
#[derive(Clone, Debug)]
pub struct Completeness {
    /// Kinds whose second lists together confirm the picture.
    confirming: &'static [Kind],
    doubts: Vec<String>,
    /// Doubts that the operator has resolved. When one ends and comes again, it counts again.
    answered: BTreeSet<String>,
    listed_again: BTreeSet<Kind>,
    confirmed: bool,
}

impl Default for Completeness {
    fn default() -> Self {
        Self::confirmed_by(&SERVICES)
    }
}

impl Completeness {
    /// Creates the completeness of objects that second lists of these kinds together confirm.
    pub fn confirmed_by(confirming: &'static [Kind]) -> Self {
        Self {
            confirming,
            doubts: Vec::new(),
            answered: BTreeSet::new(),
            listed_again: BTreeSet::new(),
            confirmed: false,
        }
    }

    /// Replaces all current doubts, which are reasons why objects may be missing; none = the
    /// picture is complete.
    pub fn doubt(&mut self, doubts: Vec<String>) {
        self.answered.retain(|known| doubts.contains(known));
        self.doubts = doubts;
    }

    /// Records that a second, newer list of a kind has arrived.
    pub fn listed_again(&mut self, kind: Kind) {
        self.listed_again.insert(kind);
        self.confirmed |= self.confirming.iter().all(|kind| self.listed_again.contains(kind));
    }

    /// Records that the operator confirms the current picture.
    pub fn approve(&mut self) {
        self.answered = self.doubts.iter().cloned().collect();
        self.confirmed = true;
    }

    /// Returns the doubts that the operator has not resolved.
    pub fn open(&self) -> impl Iterator<Item = &str> {
        self.doubts
            .iter()
            .filter(|doubt| !self.answered.contains(*doubt))
            .map(String::as_str)
    }

    /// Returns the resulting trust.
    pub fn trust(&self) -> Trust {
        let open: Vec<&str> = self.open().collect();
        match open.len() {
            0 if self.confirmed => Trust::Confirmed,
            0 => Trust::Whole,
            n => Trust::Partial(explain(&open[..n.min(DOUBTS_NAMED)], n).into()),
        }
    }
}

fn explain(named: &[&str], all: usize) -> String {
    let more = match all - named.len() {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    format!(
        "{}{more}; fix that, or run `kpctl approve` if nothing is missing",
        named.join("; ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doubts(doubts: &[&str]) -> Vec<String> {
        doubts.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn doubts_that_are_gone_leave_it_whole() {
        let mut completeness = Completeness::default();
        assert_eq!(completeness.trust(), Trust::Whole);
        completeness.doubt(doubts(&["a is broken", "b is broken"]));
        assert_eq!(
            completeness.trust().doubt(),
            "a is broken; b is broken; fix that, or run `kpctl approve` if nothing is missing"
        );
        completeness.doubt(doubts(&["a", "b", "c", "d", "e"]));
        assert!(completeness.trust().doubt().starts_with("a; b; c; and 2 more; "));
        completeness.doubt(Vec::new());
        assert_eq!(completeness.trust(), Trust::Whole);
    }

    #[test]
    fn a_person_answers_the_doubts_of_the_moment_and_no_others() {
        let mut completeness = Completeness::default();
        completeness.doubt(doubts(&["a"]));
        completeness.approve();
        assert_eq!(completeness.trust(), Trust::Confirmed);
        completeness.doubt(doubts(&["a", "b"]));
        assert!(completeness.trust().doubt().starts_with("b; fix"));
        // The input was fixed and is broken again; the operator has not approved that.
        completeness.doubt(Vec::new());
        assert_eq!(completeness.trust(), Trust::Confirmed);
        completeness.doubt(doubts(&["a"]));
        assert!(completeness.trust().is_partial());
    }

    /// A list without NetworkPolicies opens Pods: second lists of Services alone do not confirm it.
    #[test]
    fn where_policies_are_enforced_their_kinds_are_looked_at_as_well() {
        let mut completeness = Completeness::confirmed_by(&WITH_POLICIES);
        for kind in WITH_POLICIES {
            assert_eq!(completeness.trust(), Trust::Whole, "before {kind}");
            completeness.listed_again(kind);
        }
        assert_eq!(completeness.trust(), Trust::Confirmed);
    }

    #[test]
    fn a_second_look_confirms_when_services_and_endpoints_were_looked_at() {
        let mut completeness = Completeness::default();
        completeness.listed_again(Kind::Node);
        completeness.listed_again(Kind::Service);
        assert_eq!(completeness.trust(), Trust::Whole);
        completeness.listed_again(Kind::EndpointSlice);
        assert_eq!(completeness.trust(), Trust::Confirmed);
        // Input that cannot be read stays missing, however often it is read.
        completeness.doubt(doubts(&["a"]));
        assert!(completeness.trust().is_partial());
    }
}
