//! What users of other implementations reported, with the right answers.
//!
//! | report | test |
//! |---|---|
//! | kubernetes 126587: a namespace ends, its policies first | each case of the truth table checks that nothing is left |
//! | kubernetes, nodes that are lost; calico 4518, azure-container-networking 1066, AKS 2598: Pods that end | `np18_phases_and_deletion_leave_policies_in_force` |
//! | kube-ovn 1920, ovn-kubernetes 389: labels of namespaces change | `np17_labels_of_pods_and_namespaces_change` |
//! | network-policy-api 110: the same, with ClusterNetworkPolicies | `tiers_follow_labels_and_cut` |
//! | antrea 574: rules for egress without addresses; manifests without selectors, with empty lists, with the Internet alone | `np_reported_shapes_of_policies` |
//! | network-policy-api: ports of a rule, in both shapes | the same, and `tiers_come_before_and_behind_network_policies` |
//! | AdminNetworkPolicy: kinds that are not read are a warning | `document` of the control plane's manifests |
//! | calico 1683, kube-router 744: node ports and `ipBlock` | `np14_np15_services` |
//! | calico 1987, kube-router 332, tigera/operator 4739: other nodes are their addresses | `np11_np12_nodes` |
//! | kube-ovn 3347, weave 2756: Pods and the API server's node | `np11_egress_to_nodes` |
//! | virtual kubelets that write one address of two | `np19_an_address_that_the_status_lacks_is_closed` |
//! | new Pods, with `podCIDRs` | `np19_unknown_pods_are_cut_off` |
//! | host ports | `host_ports_of_other_programs_show_the_client` |
//! | kube-router 2059, aws-network-policy-agent: agents restart | `no_verdict_is_wrong_while_everything_changes` |
//! | the same, and the rules are flushed meanwhile | `connections_that_began_before_a_repair_are_cut` of the agent's dataplane |
//! | cilium 2697, 2700: the kernel forgets an allowed connection, or never knew it | `np13_a_connection_that_was_forgotten_ends_at_once` |
//! | the Node object goes while Pods run | `np19_the_last_known_pod_ranges_outlive_the_node_object` of the agent |
//! | folders: the same policy twice, policies within a List, a broken file | `catalog` and `document` of the control plane's manifests |
//! | multi-networkpolicy: a second address of an isolated Pod | none: a limit (docs/network-policy.md) |

use anyhow::{Context as _, Result, ensure};
use kplane_model::Family;
use kplane_tests::client::{Outcome, Probe};
use kplane_tests::support::nft::nft;
use kplane_tests::wait::DEADLINE;
use serde_json::json;

use super::changes::{CLIENTS, session};
use super::{PATIENCE, SILENCE, Stage, WEB, destination, play, pod, policy};

/// A port at which no host listens.
const NOBODY: u16 = 9;
/// A port of the node that another program leads to a Pod.
const HOST_PORT: u16 = 8443;

pub(crate) fn np_reported_shapes_of_policies() -> Result<()> {
    play("reported")
}

/// Nodes that are lost, Pods that wait and Pods that end keep their isolation and their rights, and their connections.
pub(crate) fn np18_phases_and_deletion_leave_policies_in_force() -> Result<()> {
    let mut stage = Stage::open()?;
    stage.apply(&policy("clients", CLIENTS))?;
    const LINES: &str = "here>a; there>a; b>a no; c>a no";
    for phase in ["Unknown", "Pending"] {
        let (mut a, mut here) = (pod("a")?, pod("here")?);
        a["status"]["phase"] = json!(phase);
        here["status"]["phase"] = json!(phase);
        stage.cluster.apply(&[a, here])?;
        stage.check(phase, LINES)?;
    }
    let mut held = Vec::new();
    for family in Family::ALL {
        held.push(session(&stage, "here", "a", family)?);
    }
    let (mut a, mut here) = (pod("a")?, pod("here")?);
    for ending in [&mut a, &mut here] {
        ending["metadata"]["deletionTimestamp"] = json!("2026-01-03T00:00:00Z");
        ending["metadata"]["deletionGracePeriodSeconds"] = json!(300);
    }
    stage.cluster.apply(&[a, here])?;
    stage.check("both are being deleted", LINES)?;
    held.iter_mut().try_for_each(|held| held(DEADLINE))
}

/// A Pod whose status names one address of two is closed at the other one as well.
pub(crate) fn np19_an_address_that_the_status_lacks_is_closed() -> Result<()> {
    let mut stage = Stage::open()?;
    stage.apply(&policy("clients", CLIENTS))?;
    let mut a = pod("a")?;
    a["status"]["podIPs"] = json!([{"ip": a["status"]["podIP"].clone()}]);
    stage.cluster.apply(&[a])?;
    stage.check(
        "IPv4 alone",
        "here>a/4; b>a/4 no; b>a/6 no; c>a/6 no; outside>a/6 no",
    )
}

/// A default deny leaves a Pod its own node, and takes the other ones away until a block allows them.
pub(crate) fn np11_egress_to_nodes() -> Result<()> {
    let mut stage = Stage::open()?;
    let reaches = |stage: &Stage, node: &str| {
        let probe = Probe::tcp(destination(node, NOBODY, Family::V4)?);
        match probe.timeout(PATIENCE.min(SILENCE * 3)).once(stage.ns("a")?)? {
            Outcome::Refused => Ok(true),
            Outcome::TimedOut => Ok(false),
            other => anyhow::bail!("{node}: {other}"),
        }
    };
    stage.apply(&policy(
        "deny",
        "in x: podSelector: {}, policyTypes: [Ingress, Egress]",
    ))?;
    ensure!(reaches(&stage, "node1")? && !reaches(&stage, "node2")?);
    stage.apply(&policy(
        "api",
        "in x: podSelector: {}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 172.30.1.2/32}}], ports: [{port: 9}]}]",
    ))?;
    ensure!(reaches(&stage, "node2")?, "a block allows the node");
    stage.check("nothing else", "a>b no; a>here no; here>a no; node1>a")
}

/// Other programs lead ports of nodes to Pods: ingress sees the client.
pub(crate) fn host_ports_of_other_programs_show_the_client() -> Result<()> {
    let mut stage = Stage::open()?;
    let to = destination("node1", HOST_PORT, Family::V4)?;
    let a = destination("a", WEB, Family::V4)?;
    let table = format!(
        "table ip portmap {{ chain pre {{ type nat hook prerouting priority dstnat; ip daddr {} tcp dport {} dnat to {a}; }}; }}",
        to.ip(),
        to.port()
    );
    nft(stage.ns("node1")?, &table)?;
    let asks = |stage: &Stage, from: &str, timeout| -> Result<bool> {
        let outcome = Probe::tcp(to).timeout(timeout).once(stage.ns(from)?)?;
        Ok(matches!(outcome, Outcome::Reply(_)))
    };
    let block = |cidr: &str| {
        let spec = format!(
            "in x: podSelector: {{}}, ingress: [{{from: [{{ipBlock: {{cidr: {cidr}}}}}], ports: [{{port: 8080}}]}}]"
        );
        policy("clients", &spec)
    };
    stage.apply(&block("172.30.0.3/32"))?;
    ensure!(
        asks(&stage, "outside", PATIENCE).context("allowed")?,
        "the client's address is allowed"
    );
    stage.apply(&block("172.30.0.4/32"))?;
    ensure!(
        !asks(&stage, "outside", SILENCE)?,
        "another address is allowed, and not the client's"
    );
    Ok(())
}
