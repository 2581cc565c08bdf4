//! The judgement on a step of a rollout, from the states of the nodes that it covers. Pure.

use std::time::Duration;

use kplane_proto::v1 as pb;

use crate::orders::Rollout;

/// Maximum number of nodes that are named.
const NAMED: usize = 16;
/// Number of nodes that the reason for the way back names.
const EXAMPLES: usize = 3;

/// The nodes that a step covers.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Covered {
    /// Number of nodes.
    pub(crate) nodes: u64,
    /// Number of nodes with the settings, which are healthy and whose kernel was read back.
    pub(crate) healthy: u64,
    /// Number of nodes without an agent, or frozen. They get the settings later, and nothing waits for them.
    pub(crate) later: u64,
    /// Some of the other nodes.
    pub(crate) lags: Vec<pb::RolloutLag>,
    /// A node that cannot take the settings.
    refusal: Option<pb::RolloutLag>,
    /// A replica did not answer, so that its nodes are unknown.
    unknown: bool,
}

/// What to do about a step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing yet.
    Wait,
    /// The step is over.
    Good,
    /// All nodes get the settings from before, for this reason.
    Back(String),
}

/// How one node is.
enum Condition {
    Healthy,
    Later,
    /// It cannot take the settings.
    Refuses(String),
    Lags(String),
}

impl Covered {
    /// Adds a node that the present step covers.
    pub(crate) fn add(&mut self, rollout: &Rollout, node: &pb::NodeStatus) {
        self.nodes += 1;
        let lag = |reason| pb::RolloutLag {
            node: node.name.clone(),
            reason,
        };
        let lag = match condition(rollout, node) {
            Condition::Healthy => {
                self.healthy += 1;
                return;
            }
            Condition::Later => {
                self.later += 1;
                return;
            }
            Condition::Refuses(reason) => {
                let lag = lag(reason);
                self.refusal.get_or_insert_with(|| lag.clone());
                lag
            }
            Condition::Lags(reason) => lag(reason),
        };
        if self.lags.len() < NAMED {
            self.lags.push(lag);
        }
    }

    /// Notes the replicas that did not answer.
    pub(crate) fn miss(&mut self, replicas: &[pb::MissingReplica]) {
        for replica in replicas.iter().take(NAMED) {
            self.unknown = true;
            self.lags.push(pb::RolloutLag {
                node: String::new(),
                reason: format!(
                    "the replica {} does not answer: {}",
                    replica.address, replica.reason
                ),
            });
        }
    }

    /// Returns whether all nodes that can be are healthy, and there is one.
    pub(crate) fn all_healthy(&self) -> bool {
        !self.unknown && self.healthy > 0 && self.healthy + self.later == self.nodes
    }

    fn examples(&self) -> String {
        let named = self
            .lags
            .iter()
            .take(EXAMPLES)
            .map(|lag| match lag.node.as_str() {
                "" => lag.reason.clone(),
                node => format!("{node}: {}", lag.reason),
            });
        named.collect::<Vec<_>>().join("; ")
    }
}

/// Judges a step whose nodes have been healthy for a time, and which has lasted for a time.
pub(crate) fn judge(
    rollout: &Rollout,
    covered: &Covered,
    healthy: Duration,
    lasted: Duration,
) -> Verdict {
    if let Some(refusal) = &covered.refusal {
        let pb::RolloutLag { node, reason } = refusal;
        return Verdict::Back(format!("{node}: {reason}"));
    }
    if covered.all_healthy() {
        return match healthy >= Duration::from_millis(rollout.healthy_ms) {
            true => Verdict::Good,
            false => Verdict::Wait,
        };
    }
    if lasted < Duration::from_millis(rollout.timeout_ms) {
        return Verdict::Wait;
    }
    let seconds = lasted.as_secs();
    let behind = covered.nodes - covered.healthy - covered.later;
    Verdict::Back(match behind {
        0 if !covered.unknown => {
            format!("no node had an agent to try the settings within {seconds} s")
        }
        _ => format!(
            "{behind} of {} nodes were not healthy with the settings after {seconds} s: {}",
            covered.nodes,
            covered.examples()
        ),
    })
}

fn condition(rollout: &Rollout, node: &pb::NodeStatus) -> Condition {
    if node.frozen.is_some() {
        return Condition::Later;
    }
    let wanted = pb::Settings::from(&rollout.settings);
    let has_them = node.settings.as_ref() == Some(&wanted);
    if let pb::NodeState::NoAgent | pb::NodeState::Disconnected | pb::NodeState::Unknown =
        node.state()
    {
        // An agent that went away after the step began may have gone because of the settings.
        return match node.since_ms < rollout.step_at_ms {
            true => Condition::Later,
            false => Condition::Lags("its agent has gone since the step began".to_owned()),
        };
    }
    let refusal = node.refused_settings.as_ref();
    if let Some(refusal) = refusal.filter(|refusal| refusal.settings.as_ref() == Some(&wanted)) {
        return Condition::Refuses(refusal.reason.clone());
    }
    if node.settings.is_none() {
        let why = "its agent does not take settings of a control plane; upgrade it";
        return Condition::Refuses(why.to_owned());
    }
    if !has_them {
        return Condition::Lags("it does not have the settings yet".to_owned());
    }
    let read_back = node
        .report
        .as_ref()
        .is_some_and(|report| report.verified_revision > 0);
    match node.state() {
        pb::NodeState::InSync | pb::NodeState::Syncing if read_back => Condition::Healthy,
        pb::NodeState::InSync | pb::NodeState::Syncing => {
            Condition::Lags("its kernel was not read back yet".to_owned())
        }
        _ => Condition::Lags(node.last_error.clone()),
    }
}

#[cfg(test)]
mod tests;
