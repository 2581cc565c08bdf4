//! The cliff guard: limits on what a step may remove before the operator has to approve. Pure.

use std::time::{Duration, SystemTime};

use clap::ValueEnum;

/// Time over which deletions by name count together.
const WINDOW: Duration = Duration::from_secs(60);

/// Configuration of the guard that holds deletions back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CliffGuard {
    /// The guarded deletions.
    pub deletions: Guarded,
    /// Percentage of the Services that a step may remove, and of the Services with endpoints that
    /// it may leave without any: 0..=100.
    pub share: u8,
    /// Number of Services below which a step is never held back.
    pub minimum: usize,
}

/// The deletions that are guarded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Guarded {
    /// Objects that a list, a folder or a rewritten file no longer contains.
    #[default]
    Absence,
    /// These, and objects deleted by name (`kubectl delete`, `rm`) within a minute.
    All,
    /// No deletions.
    Off,
}

impl Default for CliffGuard {
    fn default() -> Self {
        Self {
            deletions: Guarded::default(),
            share: 30,
            minimum: 10,
        }
    }
}

/// The Services that a step removes or empties, and the Nodes that it removes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Loss {
    /// Number of Services that go, and of all Services.
    pub(super) services: usize,
    pub(super) of_services: usize,
    /// Number of Services that stay and lose their last endpoint, and of all Services with
    /// endpoints.
    pub(super) emptied: usize,
    pub(super) of_served: usize,
    /// Number of Nodes that go, and of all Nodes.
    pub(super) nodes: usize,
    pub(super) of_nodes: usize,
    /// Number of NetworkPolicies that go, and of all NetworkPolicies.
    pub(super) policies: usize,
    pub(super) of_policies: usize,
    /// Number of Namespaces that go, and of all Namespaces: policies select by their labels.
    pub(super) namespaces: usize,
    pub(super) of_namespaces: usize,
    /// Number of Pods that go, and of all Pods.
    pub(super) pods: usize,
    pub(super) of_pods: usize,
}

impl CliffGuard {
    /// Returns the reason why a step is a cliff, if it is one.
    pub(super) fn cliff(&self, loss: Loss) -> Option<String> {
        let removed = "would be removed";
        let losses = [
            (loss.services, loss.of_services, "Services", removed),
            (
                loss.emptied,
                loss.of_served,
                "Services",
                "would lose their last endpoint",
            ),
            (loss.nodes, loss.of_nodes, "Nodes", removed),
            (loss.policies, loss.of_policies, "NetworkPolicies", removed),
            (loss.namespaces, loss.of_namespaces, "Namespaces", removed),
            (loss.pods, loss.of_pods, "Pods", removed),
        ];
        let cliff = losses.into_iter().find(|(lost, of, ..)| self.exceeds(*lost, *of));
        cliff.map(|(lost, of, what, how)| format!("{lost} of {of} {what} {how}"))
    }

    /// Returns whether deletions by name are guarded, too.
    pub(super) fn guards_names(&self) -> bool {
        self.deletions == Guarded::All
    }

    /// Returns whether deletions by absence are guarded.
    pub(super) fn guards_absence(&self) -> bool {
        self.deletions != Guarded::Off
    }

    fn exceeds(&self, lost: usize, of: usize) -> bool {
        lost > 0 && lost >= self.minimum && lost * 100 > of * usize::from(self.share)
    }
}

/// Deletions by name within the window: `kubectl delete` sends them one by one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Recent {
    since: Option<SystemTime>,
    loss: Loss,
}

impl Recent {
    /// Returns the loss of the window including a step at `now`. Shares relate to the numbers at
    /// the window's start.
    pub(super) fn with(&self, step: Loss, now: SystemTime) -> Self {
        let age = self.since.map(|since| now.duration_since(since));
        // A clock that was set back does not open the guard.
        let fresh = age.is_some_and(|age| age.is_err() || age.is_ok_and(|age| age < WINDOW));
        if !fresh {
            return Self {
                since: Some(now),
                loss: step,
            };
        }
        let loss = Loss {
            services: self.loss.services + step.services,
            emptied: self.loss.emptied + step.emptied,
            nodes: self.loss.nodes + step.nodes,
            policies: self.loss.policies + step.policies,
            namespaces: self.loss.namespaces + step.namespaces,
            pods: self.loss.pods + step.pods,
            ..self.loss
        };
        Self { loss, ..*self }
    }

    pub(super) fn loss(&self) -> Loss {
        self.loss
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn services(services: usize, of_services: usize) -> Loss {
        Loss {
            services,
            of_services,
            ..Loss::default()
        }
    }

    #[test]
    fn a_cliff_is_more_than_the_share_and_at_least_the_minimum() {
        let guard = CliffGuard::default();
        let is_cliff = |lost, of| guard.cliff(services(lost, of)).is_some();
        assert!(!is_cliff(0, 0));
        assert!(!is_cliff(9, 9));
        assert!(is_cliff(10, 10));
        assert!(!is_cliff(30, 100));
        assert!(is_cliff(31, 100));
        assert!(!is_cliff(3_000, 10_000));
        let everything = CliffGuard {
            share: 0,
            minimum: 0,
            ..guard
        };
        assert_eq!(everything.cliff(services(0, 5)), None);
        assert!(everything.cliff(services(1, 1_000)).is_some());
        let nothing = CliffGuard {
            share: 100,
            ..guard
        };
        assert_eq!(nothing.cliff(services(1_000, 1_000)), None);
    }

    #[test]
    fn losing_the_last_endpoint_counts_as_much_as_going() {
        let guard = CliffGuard::default();
        let loss = Loss {
            services: 5,
            of_services: 100,
            emptied: 31,
            of_served: 100,
            ..Loss::default()
        };
        assert_eq!(
            guard.cliff(loss).unwrap(),
            "31 of 100 Services would lose their last endpoint"
        );
        assert_eq!(
            guard.cliff(services(991, 1_001)).unwrap(),
            "991 of 1001 Services would be removed"
        );
    }

    #[test]
    fn deletions_by_name_count_together_for_a_minute() {
        let guard = CliffGuard::default();
        let start = SystemTime::UNIX_EPOCH;
        let mut recent = Recent::default();
        let mut left = 100;
        let mut step = |recent: &mut Recent, seconds| {
            let now = start + Duration::from_secs(seconds);
            *recent = recent.with(services(10, left), now);
            left -= 10;
            guard.cliff(recent.loss()).is_some()
        };
        assert!(!step(&mut recent, 0));
        assert!(!step(&mut recent, 20));
        assert!(!step(&mut recent, 40));
        assert!(step(&mut recent, 59), "40 of 100");
        assert!(!step(&mut recent, 60), "10 of 60");
    }
}
