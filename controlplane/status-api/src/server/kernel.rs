//! The fate of a packet, compared with what the node's kernel says when it is asked.
//!
//! The agent asks its backend (`lookup.rs`) on a thread of its own, so the data path does not wait.

use std::collections::BTreeSet;

use kplane_agents::fleet::label;
use kplane_model::fate::{Fate, Outcome, Place};
use kplane_model::{Family, NodeName, Reason, ServicePort, Severity};
use kplane_proto::v1 as pb;
use kplane_util::bounded::cut;

use crate::findings::Finding;

/// Maximum numbers of endpoints and of places in an answer, and maximum length of each text, in bytes.
const ENDPOINTS: usize = 256;
const PLACES: usize = 64;
const TEXT: usize = 256;

/// What the kernel must do with a packet.
#[derive(Clone, Debug)]
pub(super) struct Expected {
    pub(super) node: NodeName,
    /// The question to its agent.
    pub(super) destination: pb::Destination,
    outcome: Outcome,
    endpoints: BTreeSet<String>,
    /// A Local policy does not count for the sender.
    inside: bool,
    /// The node is known to lag behind.
    lags: bool,
}

impl Expected {
    /// Returns what a fate means for the kernel of a node.
    pub(super) fn new(
        node: NodeName,
        port: &ServicePort,
        place: Place,
        to: std::net::SocketAddr,
        fate: &Fate,
        lags: bool,
    ) -> Self {
        let address = match place {
            Place::NodePort => String::new(),
            _ => to.ip().to_string(),
        };
        Self {
            node,
            destination: pb::Destination {
                address,
                port: to.port().into(),
                protocol: pb::Protocol::from(port.key.protocol).into(),
                family: pb::Family::from(Family::of(to.ip())).into(),
            },
            outcome: fate.outcome,
            endpoints: fate.chosen.iter().map(ToString::to_string).collect(),
            inside: fate.short_cut || fate.fell_back,
            lags,
        }
    }

    pub(super) fn protocol(&self) -> pb::Protocol {
        self.destination.protocol()
    }

    /// Compares the kernel's state, and returns a finding if it differs although the node does not lag behind.
    pub(super) fn compare(
        &self,
        state: Result<&pb::KernelState, String>,
    ) -> (pb::KernelAnswer, Option<Finding>) {
        let state = match state {
            Ok(state) => bounded(state.clone()),
            Err(reason) => {
                let answer = pb::KernelAnswer {
                    summary: format!("not asked: {reason}"),
                    ..pb::KernelAnswer::default()
                };
                return (answer, None);
            }
        };
        let difference = self.difference(&state);
        let summary = difference
            .clone()
            .unwrap_or_else(|| format!("does the same: {}", self.expected()));
        let agreement = match difference {
            None => pb::KernelAgreement::Agrees,
            Some(_) => pb::KernelAgreement::Differs,
        };
        let finding = if self.lags {
            None
        } else {
            difference.map(|difference| self.finding(&difference))
        };
        let answer = pb::KernelAnswer {
            agreement: agreement.into(),
            summary,
            endpoints: self.listed(&state).to_vec(),
            places: state.places,
        };
        (answer, finding)
    }

    /// Returns the endpoints that the kernel has for this sender.
    fn listed<'s>(&self, state: &'s pb::KernelState) -> &'s [String] {
        if self.inside && state.inside_apart {
            &state.inside_endpoints
        } else {
            &state.endpoints
        }
    }

    fn expected(&self) -> String {
        match self.outcome {
            Outcome::Reaches => format!("it chooses one of {}", endpoints(self.endpoints.len())),
            Outcome::Refused => "it refuses the packet".to_owned(),
            Outcome::Dropped => "it drops the packet".to_owned(),
            Outcome::NotAdmitted => {
                "it admits some senders only; which ones is not compared".to_owned()
            }
        }
    }

    /// Returns by what the kernel differs, if it does.
    fn difference(&self, state: &pb::KernelState) -> Option<String> {
        let listed = self.listed(state);
        let wants = match self.outcome {
            // The kernel's endpoints do not matter: the packet ends before.
            Outcome::NotAdmitted => {
                let open = state.guarded == Some(false);
                return open.then(|| "admits every sender".to_owned());
            }
            Outcome::Reaches => !listed.is_empty(),
            Outcome::Refused => listed.is_empty() && state.refuses,
            Outcome::Dropped => listed.is_empty() && state.drops,
        };
        if !wants {
            let does = match (listed.len(), state.refuses, state.drops) {
                (0, true, _) => "refuses the packet".to_owned(),
                (0, false, true) => "drops the packet".to_owned(),
                (0, false, false) => "has nothing for this destination".to_owned(),
                (some, ..) => format!("chooses one of {}", endpoints(some)),
            };
            return Some(format!("{does}, and should not: {}", self.expected()));
        }
        if state.more > 0 {
            let held = (listed.len() as u64).saturating_add(state.more);
            return (held != self.endpoints.len() as u64).then(|| {
                format!(
                    "has {held} endpoints, and should have {}",
                    self.endpoints.len()
                )
            });
        }
        let held: BTreeSet<&str> = listed.iter().map(String::as_str).collect();
        let wanted: BTreeSet<&str> = self.endpoints.iter().map(String::as_str).collect();
        let lacks: Vec<&str> = wanted.difference(&held).copied().collect();
        let foreign: Vec<&str> = held.difference(&wanted).copied().collect();
        let mut parts = Vec::new();
        if !lacks.is_empty() {
            parts.push(format!("lacks {}", lacks.join(", ")));
        }
        if !foreign.is_empty() {
            parts.push(format!("has {} as well", foreign.join(", ")));
        }
        (!parts.is_empty()).then(|| parts.join(" and "))
    }

    fn finding(&self, difference: &str) -> Finding {
        let node = &self.node;
        let text = format!(
            "the kernel of {node} differs from what its agent has acknowledged: it {difference}. Another program has \
             changed the rules, or a newer state is on its way"
        );
        let fix = format!("ask again; if it stays: kpctl describe node {node}");
        Finding::new(Reason::KernelDiffers, Severity::Error, text, fix).on(vec![node.clone()])
    }
}

fn endpoints(number: usize) -> String {
    match number {
        1 => "1 endpoint".to_owned(),
        number => format!("{number} endpoints"),
    }
}

/// Returns a node's answer with lists and texts of bounded length.
fn bounded(mut state: pb::KernelState) -> pb::KernelState {
    let lists = [
        (&mut state.places, PLACES),
        (&mut state.endpoints, ENDPOINTS),
        (&mut state.inside_endpoints, ENDPOINTS),
    ];
    for (list, most) in lists {
        cut(list, most);
        for text in list {
            *text = label(text, TEXT);
        }
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expected(outcome: Outcome, endpoints: &[&str], inside: bool) -> Expected {
        Expected {
            node: "n1".into(),
            destination: pb::Destination::default(),
            outcome,
            endpoints: endpoints.iter().map(ToString::to_string).collect(),
            inside,
            lags: false,
        }
    }

    fn state(endpoints: &[&str]) -> pb::KernelState {
        pb::KernelState {
            endpoints: endpoints.iter().map(ToString::to_string).collect(),
            ..pb::KernelState::default()
        }
    }

    #[test]
    fn differences_are_named() {
        let reaches = expected(Outcome::Reaches, &["a:1", "b:1"], false);
        let difference = |state: &pb::KernelState| reaches.difference(state).unwrap_or_default();
        assert_eq!(difference(&state(&["b:1", "a:1"])), "");
        assert_eq!(
            difference(&state(&["a:1", "c:1"])),
            "lacks b:1 and has c:1 as well"
        );
        let nothing =
            "has nothing for this destination, and should not: it chooses one of 2 endpoints";
        assert_eq!(difference(&state(&[])), nothing);
        let more = pb::KernelState {
            more: 1,
            ..state(&["a:1", "b:1"])
        };
        assert_eq!(difference(&more), "has 3 endpoints, and should have 2");
        let refuses = pb::KernelState {
            refuses: true,
            ..state(&[])
        };
        assert_eq!(
            expected(Outcome::Refused, &[], false).difference(&refuses),
            None
        );
        assert!(difference(&refuses).starts_with("refuses the packet"));
        assert!(expected(Outcome::Dropped, &[], false).difference(&refuses).is_some());
    }

    #[test]
    fn a_guard_that_is_missing_is_a_difference() {
        let guarded = pb::KernelState {
            guarded: Some(true),
            ..state(&["a:1"])
        };
        let wanted = expected(Outcome::NotAdmitted, &[], false);
        assert_eq!(wanted.difference(&guarded), None);
        let open = pb::KernelState {
            guarded: Some(false),
            ..state(&["a:1"])
        };
        assert!(wanted.difference(&open).is_some());
        // An older agent does not say it.
        assert_eq!(wanted.difference(&state(&["a:1"])), None);
    }

    #[test]
    fn senders_inside_have_endpoints_of_their_own() {
        let both = pb::KernelState {
            inside_apart: true,
            inside_endpoints: vec!["a:1".to_owned(), "b:1".to_owned()],
            ..state(&["a:1"])
        };
        assert_eq!(
            expected(Outcome::Reaches, &["a:1", "b:1"], true).difference(&both),
            None
        );
        assert_eq!(
            expected(Outcome::Reaches, &["a:1"], false).difference(&both),
            None
        );
    }

    #[test]
    fn a_node_that_lags_is_no_finding_and_an_error_no_difference() {
        let mut wanted = expected(Outcome::Reaches, &["a:1"], false);
        let (answer, finding) = wanted.compare(Ok(&state(&[])));
        assert_eq!(answer.agreement(), pb::KernelAgreement::Differs);
        assert_eq!(finding.unwrap().code, Reason::KernelDiffers);
        wanted.lags = true;
        assert!(wanted.compare(Ok(&state(&[]))).1.is_none());
        let (answer, finding) = wanted.compare(Err("gone".to_owned()));
        assert_eq!(answer.agreement(), pb::KernelAgreement::Unspecified);
        assert!(finding.is_none() && answer.summary.contains("gone"));
    }
}
