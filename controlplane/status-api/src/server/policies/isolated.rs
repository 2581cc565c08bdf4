//! The Pods behind a Service that NetworkPolicies isolate, as a finding about the Service.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use kplane_desired_state::index::ServiceDetail;
use kplane_model::{Direction, NodeName, PodName, PolicyName, Reason, ServiceName, Severity};
use kplane_policy::Policies;
use tonic::Status;

use super::super::drops::{self, Denied, of_new_connections};
use super::super::node_query::Agents;
use super::super::policy_index::ask_if_enforced;
use super::{NAMED, words};
use crate::findings::Finding;

/// Maximum number of endpoints that are examined.
const ENDPOINTS: usize = 1_000;

/// The isolated Pods.
#[derive(Debug, Default)]
struct Isolated {
    pods: BTreeMap<PodName, NodeName>,
    /// Number of all Pods that were examined.
    all: usize,
    policies: BTreeSet<PolicyName>,
}

/// Returns a finding if policies isolate Pods behind a Service, with the packets that their nodes denied.
pub(in super::super) async fn isolated(
    agents: Agents<'_>,
    service: &ServiceName,
    detail: &ServiceDetail,
) -> Result<Option<Finding>, Status> {
    let endpoints = detail.ports.iter().flat_map(|view| &view.endpoints);
    let addresses: BTreeSet<_> = endpoints.take(ENDPOINTS).map(|of| of.addr.ip).collect();
    let found = ask_if_enforced(agents.hub.index(), move |policies, _| {
        Isolated::of(policies, &addresses)
    });
    let Some(found) = found.await?.filter(|found| !found.pods.is_empty()) else {
        return Ok(None);
    };
    let denied = drops::denied(agents, &found.pods, Direction::Ingress).await;
    Ok(Some(found.finding(service, &denied)))
}

impl Isolated {
    fn of(policies: &Policies, addresses: &BTreeSet<IpAddr>) -> Self {
        let mut found = Self::default();
        let pods = addresses.iter().filter_map(|ip| policies.pod_at(*ip));
        for pod in pods.collect::<BTreeSet<_>>() {
            found.all += 1;
            let isolating = policies.isolating(pod, Direction::Ingress);
            if !isolating.is_empty()
                && let Some(node) = policies.node_of(pod)
            {
                found.pods.insert(pod.clone(), node.clone());
                found.policies.extend(isolating);
            }
        }
        found
    }

    fn finding(&self, service: &ServiceName, denied: &Denied) -> Finding {
        let policies: Vec<_> = self.policies.iter().collect();
        let (isolated, all) = (self.pods.len(), self.all);
        let mut text = format!(
            "{isolated} of {all} Pods are isolated for connections to them by {}: only what a rule allows arrives",
            words::some(&policies, NAMED)
        );
        if denied.packets > 0 {
            let least = if denied.is_all { "" } else { "at least " };
            text.push_str(&format!(
                "; nodes denied {least}{} to them since then",
                of_new_connections(denied.packets)
            ));
        }
        let fix = format!(
            "kpctl why {service} --from pod/NAMESPACE/NAME says whether a Pod reaches it; kpctl get drops -n {} shows what was \
             denied",
            service.namespace
        );
        Finding::new(Reason::EndpointsIsolated, Severity::Info, text, fix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_packet_is_of_one_connection() {
        assert_eq!(of_new_connections(1), "1 packet of a new connection");
        assert_eq!(of_new_connections(7), "7 packets of new connections");
    }
}
