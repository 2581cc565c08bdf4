//! How far the picture that a source gives is believed where it lacks something. Pure.
//!
//! What the picture names always counts. What it does not name is gone only if the picture is whole:
//! a start that reads half a file must not look like a cluster of half the size. An agent hears of it
//! with every update.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::k8s::Kind;

/// How far the absence of an object means that it is gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// A part of the source was never seen whole since the start; why, for people.
    Partial(Arc<str>),
    /// All of it was seen.
    #[default]
    Whole,
    /// A second look or a person agreed with it.
    Confirmed,
}

impl Trust {
    /// Why the picture is not whole; empty otherwise.
    #[must_use]
    pub fn doubt(&self) -> &str {
        match self {
            Self::Partial(doubt) => doubt,
            Self::Whole | Self::Confirmed => "",
        }
    }

    /// Whether something may be missing.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        matches!(self, Self::Partial(_))
    }
}

/// Kinds whose second list confirms the picture: those that make Services vanish.
pub const CONFIRMING: [Kind; 2] = [Kind::Service, Kind::EndpointSlice];

/// Doubts that are named; the rest is counted.
const DOUBTS_NAMED: usize = 3;

/// What sources and people said of the picture.
#[derive(Clone, Debug, Default)]
pub struct Belief {
    doubts: Vec<String>,
    /// Doubts that a person has answered; a new one counts again.
    answered: BTreeSet<String>,
    looked_again: BTreeSet<Kind>,
    confirmed: bool,
}

impl Belief {
    /// These are all reasons, at the moment, why something may be missing; none = it is whole.
    pub fn doubt(&mut self, doubts: Vec<String>) {
        self.answered.retain(|known| doubts.contains(known));
        self.doubts = doubts;
    }

    /// A second, newer look at a kind has been told.
    pub fn looked_again(&mut self, kind: Kind) {
        self.looked_again.insert(kind);
        self.confirmed |= CONFIRMING
            .iter()
            .all(|kind| self.looked_again.contains(kind));
    }

    /// A person agrees with the picture as it is.
    pub fn approve(&mut self) {
        self.answered = self.doubts.iter().cloned().collect();
        self.confirmed = true;
    }

    /// What follows.
    #[must_use]
    pub fn trust(&self) -> Trust {
        let open: Vec<&str> = self
            .doubts
            .iter()
            .filter(|doubt| !self.answered.contains(*doubt))
            .map(String::as_str)
            .collect();
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
        "{}{more}; mend that, or run `kpctl approve` if nothing is missing",
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
        let mut belief = Belief::default();
        assert_eq!(belief.trust(), Trust::Whole);
        belief.doubt(doubts(&["a is broken", "b is broken"]));
        assert_eq!(
            belief.trust().doubt(),
            "a is broken; b is broken; mend that, or run `kpctl approve` if nothing is missing"
        );
        belief.doubt(doubts(&["a", "b", "c", "d", "e"]));
        assert!(belief.trust().doubt().starts_with("a; b; c; and 2 more; "));
        belief.doubt(Vec::new());
        assert_eq!(belief.trust(), Trust::Whole);
    }

    #[test]
    fn a_person_answers_the_doubts_of_the_moment_and_no_others() {
        let mut belief = Belief::default();
        belief.doubt(doubts(&["a"]));
        belief.approve();
        assert_eq!(belief.trust(), Trust::Confirmed);
        belief.doubt(doubts(&["a", "b"]));
        assert!(belief.trust().doubt().starts_with("b; mend"));
        // It was mended and is broken again: nobody has agreed to that.
        belief.doubt(Vec::new());
        assert_eq!(belief.trust(), Trust::Confirmed);
        belief.doubt(doubts(&["a"]));
        assert!(belief.trust().is_partial());
    }

    #[test]
    fn a_second_look_confirms_when_services_and_endpoints_were_looked_at() {
        let mut belief = Belief::default();
        belief.looked_again(Kind::Node);
        belief.looked_again(Kind::Service);
        assert_eq!(belief.trust(), Trust::Whole);
        belief.looked_again(Kind::EndpointSlice);
        assert_eq!(belief.trust(), Trust::Confirmed);
        // What cannot be read is not there however often it is looked at.
        belief.doubt(doubts(&["a"]));
        assert!(belief.trust().is_partial());
    }
}
