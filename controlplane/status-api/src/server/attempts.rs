//! Connections that a node's agent tries for `kpctl why --try`: which, and what their outcomes mean.

use kplane_agents::fleet::label;
use kplane_agents::node_query::Reply;
use kplane_model::{NodeName, Reason, Severity};
use kplane_proto::v1 as pb;

use crate::findings::Finding;

/// Maximum number of endpoints to try.
const ENDPOINTS: usize = 16;
/// Maximum length of an agent's text, in bytes.
const TEXT: usize = 256;

/// What to try.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// Reason why nothing is tried; `None` = the connections are, or nobody wanted that.
    refused: Option<&'static str>,
    /// The Service itself comes first.
    connections: Vec<PlannedConnection>,
    /// The Service, if another node connects to it.
    from_neighbour: Option<PlannedConnection>,
}

#[derive(Debug)]
struct PlannedConnection {
    through_service: bool,
    address: String,
    node: String,
}

/// Returns the connections that an agent has tried.
pub(super) fn of(heard: &Reply) -> Result<&[pb::Attempt], String> {
    heard.part(
        |reported| Some(&*reported.attempts).filter(|tried| !tried.is_empty()),
        |_| "",
    )
}

/// Returns the answer for a Service without rules of a proxy.
pub(super) fn not_proxied(explanation: pb::Explanation) -> pb::TryResponse {
    pb::TryResponse {
        explanation: Some(explanation),
        attempts: Vec::new(),
        error: "nothing was tried: the Service is not proxied".to_owned(),
    }
}

impl Plan {
    /// Returns the connections for a packet: through the Service, and to its endpoints, those first that it may reach.
    pub(super) fn new(explanation: &pb::Explanation, protocol: pb::Protocol, tries: bool) -> Self {
        if !tries {
            return Self::default();
        }
        if protocol != pb::Protocol::Tcp {
            return Self {
                refused: Some("only TCP connections can be tried"),
                ..Self::default()
            };
        }
        let service = PlannedConnection {
            through_service: true,
            address: explanation.to.clone(),
            node: String::new(),
        };
        let endpoints =
            explanation
                .candidates
                .iter()
                .take(ENDPOINTS)
                .map(|candidate| PlannedConnection {
                    through_service: false,
                    address: candidate.address.clone(),
                    node: candidate.node.clone(),
                });
        Self {
            connections: std::iter::once(service).chain(endpoints).collect(),
            ..Self::default()
        }
    }

    /// Lets a neighbour connect to the Service, at an address of the node itself. The node's own packets would not leave it,
    /// and would pass none of the chains that packets from outside pass.
    pub(super) fn connect_from(&mut self, neighbour: Option<NodeName>) {
        if !self.connections.is_empty() {
            let service = self.connections.remove(0);
            self.from_neighbour = neighbour.map(|node| PlannedConnection {
                node: node.to_string(),
                ..service
            });
        }
    }

    /// Returns the neighbour that connects, and the address for its agent.
    pub(super) fn neighbour(&self) -> Option<(&str, &str)> {
        let connection = self.from_neighbour.as_ref();
        connection.map(|of| (of.node.as_str(), of.address.as_str()))
    }

    /// Leaves the connections out, for a reason.
    pub(super) fn refuse(&mut self, reason: &'static str) {
        if !self.connections.is_empty() {
            self.refused = Some(reason);
            self.connections.clear();
            self.from_neighbour = None;
        }
    }

    /// Returns the addresses for the agent.
    pub(super) fn addresses(&self) -> Vec<String> {
        self.connections.iter().map(|connection| connection.address.clone()).collect()
    }

    /// Returns the answer, with a finding for each endpoint that does not work. `by_neighbour` is what a neighbour has tried.
    pub(super) fn result(
        self,
        mut explanation: pb::Explanation,
        tried: Result<&[pb::Attempt], String>,
        by_neighbour: Result<&[pb::Attempt], String>,
    ) -> pb::TryResponse {
        let error = match (self.refused, &tried) {
            (Some(refused), _) => refused.to_owned(),
            (None, Err(reason)) if !self.connections.is_empty() => reason.clone(),
            (None, _) => String::new(),
        };
        let tried = tried.unwrap_or_default();
        let node = explanation.node.clone();
        let attempt = match by_neighbour {
            Ok(tried) => tried.first().cloned().unwrap_or_default(),
            Err(error) => pb::Attempt {
                error,
                ..pb::Attempt::default()
            },
        };
        let neighbour = self.from_neighbour.into_iter().map(|of| of.tried(&attempt));
        let own = self
            .connections
            .into_iter()
            .zip(tried)
            .map(|(connection, attempt)| connection.tried(attempt));
        let attempts: Vec<_> = neighbour.chain(own).collect();
        let found = attempts.iter().filter_map(|tried| finding(tried, &node));
        explanation.findings.extend(found.map(|finding| finding.to_wire()));
        pb::TryResponse {
            explanation: Some(explanation),
            attempts,
            error,
        }
    }
}

impl PlannedConnection {
    fn tried(self, attempt: &pb::Attempt) -> pb::TriedConnection {
        pb::TriedConnection {
            through_service: self.through_service,
            node: self.node,
            attempt: Some(pb::Attempt {
                error: label(&attempt.error, TEXT),
                address: self.address,
                outcome: attempt.outcome,
                took_us: attempt.took_us,
            }),
        }
    }
}

/// Returns what an endpoint's outcome means, if it does not work.
fn finding(tried: &pb::TriedConnection, from: &str) -> Option<Finding> {
    if tried.through_service {
        return None;
    }
    let attempt = tried.attempt.as_ref()?;
    let (address, node) = (&attempt.address, &tried.node);
    let on = match node.as_str() {
        "" => String::new(),
        node => format!(" on {node}"),
    };
    match attempt.outcome() {
        pb::AttemptOutcome::Refused => Some(Finding::new(
            Reason::NobodyListens,
            Severity::Error,
            format!(
                "no program listens at the endpoint {address}{on}: it refused a connection of {from}"
            ),
            "compare targetPort with the port at which the Pod's program listens, on all of its addresses",
        )),
        pb::AttemptOutcome::Silent => Some(Finding::new(
            Reason::EndpointSilent,
            Severity::Error,
            format!("the endpoint {address}{on} did not answer {from} within a second"),
            match node.as_str() {
                // From its own node, which policies always allow, no way between nodes is left.
                node if node == from => {
                    "check whether the Pod's program answers: kubectl logs".to_owned()
                }
                "" => format!("check the firewall of the endpoint, and the way from {from}"),
                node => format!(
                    "check the NetworkPolicies of the Pod: kpctl why {address} --from ADDRESS, with an address of {from}; \
                     and the firewalls between {from} and {node}"
                ),
            },
        )),
        pb::AttemptOutcome::Connected | pb::AttemptOutcome::Unspecified => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explanation() -> pb::Explanation {
        let candidate = |address: &str| pb::Candidate {
            address: address.to_owned(),
            node: "n2".to_owned(),
            ..pb::Candidate::default()
        };
        pb::Explanation {
            to: "10.96.0.1:80".to_owned(),
            node: "n1".to_owned(),
            candidates: vec![candidate("10.0.0.1:8080"), candidate("10.0.0.2:8080")],
            ..pb::Explanation::default()
        }
    }

    fn attempt(outcome: pb::AttemptOutcome) -> pb::Attempt {
        pb::Attempt {
            outcome: outcome.into(),
            ..pb::Attempt::default()
        }
    }

    #[test]
    fn the_service_comes_first_and_bad_endpoints_are_findings() {
        let plan = Plan::new(&explanation(), pb::Protocol::Tcp, true);
        assert_eq!(
            plan.addresses(),
            ["10.96.0.1:80", "10.0.0.1:8080", "10.0.0.2:8080"]
        );
        let outcomes = [
            pb::AttemptOutcome::Connected,
            pb::AttemptOutcome::Refused,
            pb::AttemptOutcome::Silent,
        ];
        let reported = plan.result(explanation(), Ok(&outcomes.map(attempt)), Ok(&[]));
        assert_eq!((reported.error.as_str(), reported.attempts.len()), ("", 3));
        let findings = reported.explanation.unwrap().findings;
        let codes: Vec<_> = findings.iter().map(|finding| finding.code.as_str()).collect();
        assert_eq!(codes, ["NobodyListens", "EndpointSilent"]);
    }

    #[test]
    fn a_neighbour_connects_to_the_nodes_own_address() {
        let mut plan = Plan::new(&explanation(), pb::Protocol::Tcp, true);
        plan.connect_from(Some("n3".into()));
        assert_eq!(plan.addresses(), ["10.0.0.1:8080", "10.0.0.2:8080"]);
        assert_eq!(plan.neighbour(), Some(("n3", "10.96.0.1:80")));
        let connected = [attempt(pb::AttemptOutcome::Connected)];
        let silent = [attempt(pb::AttemptOutcome::Silent)];
        let answer = plan.result(explanation(), Ok(&connected), Ok(&silent));
        let reported = answer.attempts.iter().map(|of| {
            let outcome = of.attempt.as_ref().unwrap().outcome();
            (of.through_service, of.node.as_str(), outcome)
        });
        assert_eq!(
            reported.collect::<Vec<_>>(),
            [
                (true, "n3", pb::AttemptOutcome::Silent),
                (false, "n2", pb::AttemptOutcome::Connected)
            ]
        );
        // A node without a neighbour has nobody who connects from outside.
        let mut alone = Plan::new(&explanation(), pb::Protocol::Tcp, true);
        alone.connect_from(None);
        assert_eq!((alone.addresses().len(), alone.neighbour()), (2, None));
    }

    #[test]
    fn nothing_is_tried_without_a_reason() {
        let error = |protocol| {
            let plan = Plan::new(&explanation(), protocol, true);
            plan.result(explanation(), Err("gone".to_owned()), Ok(&[])).error
        };
        let silent = Reply {
            node: "n1".into(),
            version: String::new(),
            outcome: Ok(pb::Inspection::default()),
        };
        assert!(of(&silent).unwrap_err().contains("older version"));
        assert!(error(pb::Protocol::Udp).contains("only TCP"));
        assert_eq!(error(pb::Protocol::Tcp), "gone");
        let unasked = Plan::new(&explanation(), pb::Protocol::Tcp, false);
        assert!(unasked.addresses().is_empty());
        assert_eq!(
            unasked.result(explanation(), Err("gone".to_owned()), Ok(&[])).error,
            ""
        );
    }
}
