//! The settings of the fleet, and how far the last rollout is.

use kplane_proto::v1 as pb;
use serde::Serialize;

use super::{API_VERSION, View};
use crate::style::{Canvas, Tone};
use crate::text::{Span, field, long_field, paragraph};
use crate::time::Time;

/// The view of `kpctl rollout`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutView {
    api_version: &'static str,
    kind: &'static str,
    /// Settings of nodes that the rollout does not cover; `null` if nobody has ever chosen any.
    base: Option<SettingsView>,
    /// The last rollout; `null` if there was none.
    rollout: Option<OneView>,
}

/// Settings; `null` = as the agents have them themselves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SettingsView {
    backend: Option<String>,
    iptables_layout: Option<String>,
    masquerade_bit: Option<u32>,
}

/// One rollout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct OneView {
    settings: SettingsView,
    /// `Running`, `Done` or `Back`.
    stage: &'static str,
    /// Why all nodes have the settings from before again.
    reason_back: Option<String>,
    /// Percentages of the nodes, one for each step.
    percentages: Vec<u32>,
    /// The present step, from 1.
    step: u32,
    by: Option<String>,
    reason: Option<String>,
    began_at: Option<Time>,
    step_began_at: Option<Time>,
    healthy_for_ms: u64,
    step_timeout_ms: u64,
    /// Number of nodes of the step, of healthy ones, and of those without an agent or frozen.
    covered: u64,
    healthy: u64,
    later: u64,
    /// Some of the others.
    lags: Vec<LagView>,
}

/// A node that does not have the settings yet, or is not healthy with them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct LagView {
    /// The node; `null` for all nodes of a replica that does not answer.
    node: Option<String>,
    reason: String,
}

fn some(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

impl From<pb::Settings> for SettingsView {
    fn from(settings: pb::Settings) -> Self {
        Self {
            backend: some(settings.backend),
            iptables_layout: some(settings.iptables_layout),
            masquerade_bit: settings.masquerade_bit,
        }
    }
}

impl SettingsView {
    /// Returns the settings as flags are named.
    fn spans(&self) -> Vec<Span> {
        let named = |name: &str, value: &Option<String>| {
            value
                .as_ref()
                .map(|value| Span::plain(format!("{name} {value}")))
        };
        let bit = self.masquerade_bit;
        let all = [
            named("backend", &self.backend),
            named("iptables layout", &self.iptables_layout),
            bit.map(|bit| Span::plain(format!("masquerade bit {bit}"))),
        ];
        let all: Vec<Span> = all.into_iter().flatten().collect();
        match all.is_empty() {
            true => vec![Span::plain("as the agents have them themselves")],
            false => all,
        }
    }
}

impl From<pb::Rollout> for RolloutView {
    fn from(rollout: pb::Rollout) -> Self {
        let base = rollout.base.clone().map(SettingsView::from);
        let known = rollout.number > 0;
        Self {
            api_version: API_VERSION,
            kind: "Rollout",
            base,
            rollout: known.then(|| OneView::from(rollout)),
        }
    }
}

impl From<pb::Rollout> for OneView {
    fn from(rollout: pb::Rollout) -> Self {
        let stage = match rollout.stage() {
            pb::RolloutStage::Unspecified => "Unknown",
            pb::RolloutStage::Running => "Running",
            pb::RolloutStage::Done => "Done",
            pb::RolloutStage::Back => "Back",
        };
        let lags = rollout.lags.into_iter().map(|lag| LagView {
            node: some(lag.node),
            reason: lag.reason,
        });
        Self {
            settings: rollout.settings.unwrap_or_default().into(),
            stage,
            reason_back: some(rollout.reason_back),
            percentages: rollout.percentages,
            step: rollout.step.saturating_add(1),
            by: some(rollout.by),
            reason: some(rollout.reason),
            began_at: Time::from_wire(rollout.began_ms),
            step_began_at: Time::from_wire(rollout.step_ms),
            healthy_for_ms: rollout.healthy_ms,
            step_timeout_ms: rollout.timeout_ms,
            covered: rollout.covered,
            healthy: rollout.healthy,
            later: rollout.later,
            lags: lags.collect(),
        }
    }
}

impl OneView {
    fn tone(&self) -> Tone {
        match self.stage {
            "Done" => Tone::Good,
            "Back" => Tone::Bad,
            _ => Tone::Warn,
        }
    }

    fn text(&self, canvas: &Canvas) -> String {
        let steps = self
            .percentages
            .iter()
            .map(|percent| Span::plain(format!("{percent} %")));
        let stage = match self.stage {
            "Running" => {
                let steps = self.percentages.len();
                format!("step {} of {steps}", self.step)
            }
            "Done" => "done: all nodes have the settings".to_owned(),
            "Back" => "back: all nodes get the settings from before".to_owned(),
            other => other.to_owned(),
        };
        let mut text = field("Settings:", &self.settings.spans(), canvas);
        text += &field("Steps:", &Vec::from_iter(steps), canvas);
        text += &field("Stage:", &[Span::new(stage, self.tone())], canvas);
        if let Some(why) = &self.reason_back {
            text += &long_field("Because:", &Span::new(why, Tone::Bad), canvas);
        }
        let who: Vec<Span> = [&self.by, &self.reason]
            .into_iter()
            .flatten()
            .map(Span::plain)
            .collect();
        text += &field("Begun by:", &who, canvas);
        if self.stage != "Back" {
            let mut nodes = vec![format!("{} of {} healthy", self.healthy, self.covered)];
            if self.later > 0 {
                nodes.push(format!("{} without an agent, or frozen", self.later));
            }
            let nodes: Vec<Span> = nodes.iter().map(Span::plain).collect();
            text += &field("Nodes:", &nodes, canvas);
            for lag in &self.lags {
                let reason = match &lag.node {
                    Some(node) => format!("{node}: {}", lag.reason),
                    None => lag.reason.clone(),
                };
                text += &paragraph(&Span::new(&reason, Tone::Warn), canvas, 2);
            }
        }
        text
    }
}

impl View for RolloutView {
    fn text(&self, canvas: &Canvas) -> String {
        let Some(rollout) = &self.rollout else {
            let none = "No settings have been rolled out: all nodes have those of their agents.";
            return paragraph(&Span::plain(none), canvas, 0);
        };
        let base = self.base.as_ref().filter(|_| rollout.stage != "Done");
        let base = base.map(SettingsView::spans).unwrap_or_default();
        rollout.text(canvas) + &field("Otherwise:", &base, canvas)
    }
}
