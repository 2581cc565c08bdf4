//! ClusterNetworkPolicies at a real API server, whose definition comes after the control plane.

use std::time::Duration;

use anyhow::{Result, ensure};
use kplane_tests::wait::eventually;
use serde_json::json;

use crate::cluster::support::kpctl::kpctl;
use crate::cluster::support::with_world;
use crate::cluster::support::world::{DEADLINE, World};

/// The replica, and the port of its status API.
const REPLICA: (u16, u16) = (17, 7636);
/// The control plane looks for the definition once a minute.
const NOTICED: Duration = Duration::from_secs(100);

pub(crate) fn cluster_policies_come_with_their_definition() -> Result<()> {
    with_world(|world| {
        let api = world.api();
        let kubeconfig = world.cluster.kubeconfig();
        let _plane = world.plane_with(REPLICA.0, &kubeconfig, &["--network-policy".to_owned()])?;
        // It serves without the definition.
        lists(world, DEADLINE, &["No NetworkPolicies"])?;
        api.apply(&json!({
            "kind": "CustomResourceDefinition",
            "metadata": {"name": "clusternetworkpolicies.policy.networking.k8s.io",
                "annotations": {"api-approved.kubernetes.io": "unapproved, a test"}},
            "spec": {
                "group": "policy.networking.k8s.io", "scope": "Cluster",
                "names": {"kind": "ClusterNetworkPolicy", "plural": "clusternetworkpolicies"},
                "versions": [{"name": "v1alpha2", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                    "type": "object", "x-kubernetes-preserve-unknown-fields": true}}}],
            },
        }))?;
        let policy = json!({
            "kind": "ClusterNetworkPolicy", "metadata": {"name": "deny-egress"},
            "spec": {"tier": "Admin", "priority": 10, "subject": {"namespaces": {}},
                "egress": [{"action": "Deny", "to": [{"networks": ["192.0.2.0/24"]}]}]},
        });
        eventually(DEADLINE, "the server has the definition", || {
            api.apply(&policy)
        })?;
        lists(world, NOTICED, &["deny-egress", "Admin 10"])?;
        api.delete("ClusterNetworkPolicy", "deny-egress")?;
        lists(world, DEADLINE, &["No NetworkPolicies"])?;
        let definition = "clusternetworkpolicies.policy.networking.k8s.io";
        api.delete("CustomResourceDefinition", definition)
    })
}

/// Waits until the list of policies says all of these texts.
fn lists(world: &World, within: Duration, parts: &[&str]) -> Result<()> {
    eventually(within, &format!("policies are {parts:?}"), || {
        let (code, text, _) = kpctl(world, REPLICA.1, &["get", "policies"])?;
        let all = parts.iter().all(|part| text.contains(part));
        ensure!(code == Some(0) && all, "{code:?}:\n{text}");
        anyhow::Ok(())
    })
}
