//! The result of `wait`.

use std::collections::BTreeMap;
use std::time::Duration;

use kplane_proto::v1::ServiceState;
use serde::Serialize;

use super::convergence::ConvergenceView;
use super::replicas::missing_text;
use super::{API_VERSION, View, next_steps_text};

use crate::goal::{Goal, Threshold};
use crate::style::{Canvas, Tone};
use crate::text::{Span, grouped, paragraph};
use crate::time::human;

/// One Service at the end of the wait.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitedView {
    /// Whether enough nodes have reached the goal.
    reached: bool,
    #[serde(flatten)]
    convergence: ConvergenceView,
}

/// The view of `kpctl wait`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitView {
    api_version: &'static str,
    kind: &'static str,
    goal: &'static str,
    threshold_percent: f64,
    /// Whether all Services have reached the goal.
    pub reached: bool,
    services: Vec<WaitedView>,
    #[serde(skip)]
    wanted: (Goal, Threshold),
    #[serde(skip)]
    limit: Duration,
}

impl WaitView {
    /// Creates the view of a wait that has ended.
    pub fn new(
        goal: Goal,
        threshold: Threshold,
        limit: Duration,
        services: Vec<ConvergenceView>,
    ) -> Self {
        let services: Vec<_> = services
            .into_iter()
            .map(|convergence| WaitedView {
                reached: convergence.has_reached(goal, threshold),
                convergence,
            })
            .collect();
        Self {
            api_version: API_VERSION,
            kind: "Wait",
            goal: name(goal),
            threshold_percent: threshold.percent(),
            reached: services.iter().all(|service| service.reached),
            services,
            wanted: (goal, threshold),
            limit,
        }
    }

    /// Returns the steps for the Services that have not reached the goal, at most one of each kind.
    fn next_steps(&self, program: &str) -> Vec<String> {
        let missing = self.services.iter().filter(|service| !service.reached);
        let mut steps: Vec<_> = missing
            .map(|service| {
                let of = &service.convergence;
                match of.state {
                    _ if of.is_held() => (0, format!("{program} approve")),
                    _ if of.nodes_incomplete => (3, format!("{program} status")),
                    ServiceState::Served => (
                        1,
                        format!("{program} describe service {}/{}", of.namespace, of.name),
                    ),
                    ServiceState::Unknown if self.wanted.0 != Goal::Deleted => {
                        (2, format!("{program} get services -n {}", of.namespace))
                    }
                    _ => (3, format!("{program} status")),
                }
            })
            .collect();
        steps.sort_by_key(|(kind, _)| *kind);
        steps.dedup_by_key(|(kind, _)| *kind);
        steps.into_iter().map(|(_, step)| step).collect()
    }
}

impl WaitView {
    /// Returns the replicas that any answer lacks.
    fn missing_text(&self, canvas: &Canvas) -> String {
        let missing: BTreeMap<_, _> = self
            .services
            .iter()
            .flat_map(|service| &service.convergence.missing_replicas)
            .map(|one| (&one.address, one))
            .collect();
        missing_text(missing.into_values(), canvas)
    }
}

impl View for WaitView {
    fn text(&self, canvas: &Canvas) -> String {
        let (goal, threshold) = self.wanted;
        let services: Vec<String> = self
            .services
            .iter()
            .map(|service| {
                let convergence = &service.convergence;
                let mut line = convergence.line();
                if goal == Goal::Verified && convergence.state == ServiceState::Served {
                    let verified = grouped(convergence.verified);
                    line.push_str(&format!("; verified on {verified}"));
                }
                if service.reached {
                    return paragraph(&Span::new(line, Tone::Good), canvas, 0);
                }
                let share = match threshold.percent() {
                    100.0 => String::new(),
                    percent => format!(" on {percent}% of the nodes"),
                };
                let late = format!(
                    "not {}{share} within {}: {line}",
                    self.goal,
                    human(self.limit)
                );
                let late = paragraph(&Span::new(late, Tone::Bad), canvas, 0);
                late + &convergence.laggards_text(goal, canvas)
            })
            .collect();
        let gap = if self.reached { "" } else { "\n" };
        let steps = next_steps_text(&self.next_steps(canvas.program), canvas);
        let services = services.join(gap);
        format!("{services}{}{steps}", self.missing_text(canvas))
    }
}

/// Returns the goal as the user writes it.
fn name(goal: Goal) -> &'static str {
    match goal {
        Goal::Programmed => "programmed",
        Goal::Verified => "verified",
        Goal::Deleted => "deleted",
    }
}
