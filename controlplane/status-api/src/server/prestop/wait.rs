//! What is missing until no kernel leads to a Pod. Pure.

use std::collections::{BTreeMap, BTreeSet};

use kplane_model::select::Lead;
use kplane_model::{NodeName, ServiceName};
use kplane_proto::v1::LeavingOutcome;

/// Maximum number of nodes that a reason names.
const NAMED: usize = 5;

/// A Pod that waits to end.
#[derive(Debug, Default)]
pub(super) struct Wait(BTreeMap<ServiceName, Stage>);

/// How far a Service has come.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    /// The rules of some node lead to the Pod as soon as the node has them.
    Led(Lead),
    /// No node's rules do from this revision on. These nodes have not confirmed that their kernels hold it; `None` = no node
    /// has been asked yet.
    From(u64, Option<BTreeSet<NodeName>>),
}

impl Wait {
    /// Begins with the Services of the Pod.
    pub(super) fn new(services: impl IntoIterator<Item = ServiceName>) -> Self {
        let services = services.into_iter();
        Self(services.map(|name| (name, Stage::Led(Lead::Ready))).collect())
    }

    /// Notes why nodes that hold a revision lead to the Pod, if they do. A Pod that is chosen again begins anew.
    pub(super) fn led(&mut self, service: &ServiceName, lead: Option<Lead>, revision: u64) {
        let Some(stage) = self.0.get_mut(service) else {
            return;
        };
        match (lead, &*stage) {
            (Some(lead), _) => *stage = Stage::Led(lead),
            (None, Stage::Led(_)) => *stage = Stage::From(revision, None),
            (None, Stage::From(..)) => {}
        }
    }

    /// Returns the Services that no node's rules lead to the Pod for, and that nodes have to confirm.
    pub(super) fn open(&self) -> Vec<ServiceName> {
        self.0
            .iter()
            .filter(|(_, stage)| match stage {
                Stage::Led(_) => false,
                Stage::From(_, nodes) => nodes.as_ref().is_none_or(|nodes| !nodes.is_empty()),
            })
            .map(|(name, _)| name.clone())
            .collect()
    }

    /// Asks nodes about a Service: at first those in reach, and then those that have not confirmed. What a node has
    /// confirmed stays confirmed.
    pub(super) fn ask(
        &mut self,
        service: &ServiceName,
        in_reach: impl FnOnce() -> BTreeSet<NodeName>,
        is_confirmed: impl Fn(&NodeName, u64) -> bool,
    ) {
        if let Some(Stage::From(revision, nodes)) = self.0.get_mut(service) {
            let nodes = nodes.get_or_insert_with(in_reach);
            nodes.retain(|node| !is_confirmed(node, *revision));
        }
    }

    /// Returns whether nothing is missing.
    pub(super) fn is_over(&self) -> bool {
        let confirmed =
            |stage: &Stage| matches!(stage, Stage::From(_, Some(nodes)) if nodes.is_empty());
        self.0.values().all(confirmed)
    }

    /// Returns the outcome when the time is over, and what is missing.
    pub(super) fn ends(&self) -> (LeavingOutcome, String) {
        let led = |wanted| {
            self.0
                .iter()
                .filter(move |(_, stage)| **stage == Stage::Led(wanted))
                .map(|(name, _)| name.to_string())
                .collect::<Vec<_>>()
        };
        let ready = led(Lead::Ready);
        if !ready.is_empty() {
            let reason = format!(
                "the Pod still counted as ready for {}, by its EndpointSlices",
                some_of(&ready)
            );
            return (LeavingOutcome::Bound, reason);
        }
        let last = led(Lead::Last);
        if !last.is_empty() {
            let reason = format!("the Pod was the last endpoint of {}", some_of(&last));
            return (LeavingOutcome::Last, reason);
        }
        let asked = self.0.values().filter_map(|stage| match stage {
            Stage::From(_, nodes) => nodes.as_ref(),
            Stage::Led(_) => None,
        });
        let nodes: BTreeSet<&NodeName> = asked.flatten().collect();
        if nodes.is_empty() {
            (LeavingOutcome::Gone, String::new())
        } else {
            let nodes: Vec<_> = nodes.into_iter().map(ToString::to_string).collect();
            let reason = format!("{} did not confirm", some_of(&nodes));
            (LeavingOutcome::Bound, reason)
        }
    }
}

/// Names some of these.
fn some_of(names: &[String]) -> String {
    let named = names.iter().take(NAMED).map(|name| &**name).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(NAMED) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn web() -> ServiceName {
        ServiceName::new("shop", "web")
    }

    fn nodes(names: &[&str]) -> BTreeSet<NodeName> {
        names.iter().map(|name| (*name).into()).collect()
    }

    #[test]
    fn a_pod_is_gone_when_each_node_has_confirmed_once() {
        let mut wait = Wait::new([web()]);
        assert!(!wait.is_over() && wait.open().is_empty());
        wait.ask(&web(), || nodes(&["a"]), |_, _| true);
        assert!(!wait.is_over(), "it is still led to");
        wait.led(&web(), None, 7);
        assert_eq!(wait.open(), [web()]);
        assert!(!wait.is_over(), "no node has been asked");
        wait.ask(
            &web(),
            || nodes(&["a", "b"]),
            |node, revision| {
                assert_eq!(revision, 7);
                &**node == "a"
            },
        );
        assert!(!wait.is_over());
        // Later changes of the Service do not move the revision, and node a may be behind again.
        wait.led(&web(), None, 9);
        wait.ask(
            &web(),
            || unreachable!(),
            |node, revision| {
                assert_eq!((&**node, revision), ("b", 7));
                true
            },
        );
        assert!(wait.is_over() && wait.open().is_empty());
        assert_eq!(wait.ends().0, LeavingOutcome::Gone);
    }

    #[test]
    fn a_pod_that_is_chosen_again_begins_anew() {
        let mut wait = Wait::new([web()]);
        wait.led(&web(), None, 7);
        wait.ask(&web(), || nodes(&["a"]), |_, _| true);
        assert!(wait.is_over());
        wait.led(&web(), Some(Lead::Last), 8);
        assert!(!wait.is_over());
        wait.led(&web(), None, 9);
        wait.ask(&web(), || nodes(&["a"]), |_, revision| revision < 9);
        assert!(!wait.is_over());
    }

    #[test]
    fn the_reason_names_what_is_missing() {
        let other = ServiceName::new("shop", "api");
        let mut wait = Wait::new([web(), other.clone()]);
        assert_eq!(
            wait.ends(),
            (
                LeavingOutcome::Bound,
                "the Pod still counted as ready for shop/api, shop/web, by its EndpointSlices"
                    .into()
            )
        );
        wait.led(&other, Some(Lead::Last), 1);
        wait.led(&web(), None, 1);
        assert_eq!(
            wait.ends(),
            (
                LeavingOutcome::Last,
                "the Pod was the last endpoint of shop/api".into()
            )
        );
        wait.led(&other, None, 2);
        let all: Vec<_> = (1..=7).map(|n| format!("n{n}")).collect();
        let all: Vec<_> = all.iter().map(String::as_str).collect();
        wait.ask(&other, || nodes(&all), |_, _| false);
        wait.ask(&web(), || nodes(&["n1", "n9"]), |_, _| false);
        let reason = "n1, n2, n3, n4, n5 and 3 more did not confirm";
        assert_eq!(wait.ends(), (LeavingOutcome::Bound, reason.into()));
    }

    #[test]
    fn a_pod_without_services_has_nothing_to_wait_for() {
        assert!(Wait::new([]).is_over());
    }
}
