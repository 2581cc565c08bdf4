//! What is doubtful about a NetworkPolicy, as warnings.

use kplane_agents::hub::IndexHandle;
use kplane_desired_state::index::Selection;
use kplane_desired_state::k8s::Kind;
use kplane_model::{
    Direction, Issue, ObjectRef, PolicyName, Reason, ServicePort, Severity, TrafficPolicy,
};
use kplane_policy::{Doubt, NetworkPolicy, PeerSpec};
use tonic::Status;

use super::super::policy_index::ask;
use super::{rules, words};

/// Maximum number of doubts of a policy, and of a Service's endpoints that are compared with the policy's Pods.
const DOUBTS: usize = 50;
const ENDPOINTS: usize = 16;

/// Returns what is doubtful about a policy as it is written.
pub(super) fn issues(policy: &NetworkPolicy, doubts: &[Doubt]) -> Vec<Issue> {
    doubts.iter().take(DOUBTS).map(|doubt| of_doubt(policy, doubt)).collect()
}

fn of_doubt(policy: &NetworkPolicy, doubt: &Doubt) -> Issue {
    let (code, text) = match doubt {
        Doubt::NoNamespace {
            direction,
            rule,
            peer,
        } => {
            let of = rules(policy, *direction).get(*rule);
            let peer = of.and_then(|of| of.peers.as_ref()?.get(*peer));
            let peer = peer.map(words::peer).unwrap_or_default();
            let field = words::field(*direction);
            (
                Reason::SelectsNoNamespace,
                format!(
                    "spec.{field}[{rule}] allows {peer}, and there is no such namespace: kubectl get namespaces \
                     --show-labels lists their labels"
                ),
            )
        }
        Doubt::NoPort(name, protocol) => (
            Reason::NoSuchPortName,
            format!(
                "a rule allows connections to port {protocol} {name}, and no Pod that the policy selects has a container \
                 port of this name: name it in the Pods' spec.containers[].ports, or write its number"
            ),
        ),
        Doubt::NoDns(pod) => (
            Reason::EgressWithoutDns,
            format!(
                "Pod {pod} is isolated for connections from it, and no policy allows it any to port 53: it cannot look up \
                 names; if it should, allow UDP 53 and TCP 53 to the Pods of the cluster's DNS"
            ),
        ),
    };
    warning(&policy.name, code, text)
}

fn warning(policy: &PolicyName, code: Reason, reason: String) -> Issue {
    let (kind, name) = (Kind::NetworkPolicy.as_str(), &policy.name);
    Issue {
        severity: Severity::Warning,
        ..Issue::error(code, ObjectRef::new(kind, &policy.namespace, name), reason)
    }
}

/// Returns a warning if a rule names addresses of clients, and a Service leads clients from outside to the policy's Pods
/// with the addresses of nodes.
pub(super) async fn masqueraded(
    index: &IndexHandle,
    policy: &NetworkPolicy,
) -> Result<Option<Issue>, Status> {
    let Some((rule, peer)) = first_block(policy) else {
        return Ok(None);
    };
    let selection = Selection {
        namespace: policy.name.namespace.to_string(),
        ..Selection::default()
    };
    let page = index.look(move |index| index.ports(&selection)).await?;
    let name = policy.name.clone();
    let is_masqueraded = |port: &ServicePort| {
        port.externally_accessible() && port.external_policy == TrafficPolicy::Cluster
    };
    let service = ask(index, move |policies, _| {
        page.ports
            .iter()
            .filter(|view| is_masqueraded(&view.port))
            .find(|view| {
                view.endpoints
                    .iter()
                    .take(ENDPOINTS)
                    .filter_map(|of| policies.pod_at(of.addr.ip))
                    .any(|pod| {
                        let its = policies.policies_of(pod);
                        its.is_some_and(|its| its.contains(&name))
                    })
            })
            .map(|view| view.port.key.service.clone())
    });
    Ok(service.await?.map(|service| {
        warning(
            &policy.name,
            Reason::ClientsMasqueraded,
            format!(
                "spec.ingress[{rule}] allows {peer}, and Service {service} leads clients from outside to Pods of the policy \
                 with externalTrafficPolicy Cluster: where the Pod is on another node than the client reaches, it sees that \
                 node's address, which counts; set externalTrafficPolicy to Local"
            ),
        )
    }))
}

/// Returns the first peer for connections to Pods that is a range of addresses, and the index of its rule.
fn first_block(policy: &NetworkPolicy) -> Option<(usize, String)> {
    rules(policy, Direction::Ingress)
        .iter()
        .enumerate()
        .flat_map(|(at, rule)| rule.peers.iter().flatten().map(move |peer| (at, peer)))
        .find_map(|(at, peer)| match peer {
            PeerSpec::Block(block) if block.range.prefix_len() > 0 => Some((at, words::peer(peer))),
            _ => None,
        })
}
