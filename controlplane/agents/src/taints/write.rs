//! The request that changes the taints of a Node.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, NodeSpec, Taint};
use kplane_desired_state::kubernetes::{Api, Asked, Failure, Unanswered};
use kplane_desired_state::tainted::TAINT;
use kplane_model::NodeName;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

/// Maximum time for an answer.
const PATIENCE: Duration = Duration::from_secs(5);

const GET: Asked = Asked::new("get", "nodes", "");
const PATCH: Asked = Asked::new("patch", "nodes", "");

/// Gives a Node the taint, or takes it away. Returns false if there was nothing to do, or another writer changed the Node
/// at the same time.
///
/// # Errors
/// [`Unanswered`].
pub(super) async fn write(api: &Api, node: &NodeName, wanted: bool) -> Result<bool, Unanswered> {
    let nodes: kube::Api<Node> = kube::Api::all(api.client());
    let current = match api.ask(GET, PATIENCE, nodes.get(node)).await {
        Err(Unanswered {
            failure: Failure::NotServed,
            ..
        }) => return Ok(false),
        current => current?,
    };
    let Some(patch) = patch(&current, wanted) else {
        return Ok(false);
    };
    let (params, patch) = (PatchParams::default(), Patch::<Value>::Merge(patch));
    match api.ask(PATCH, PATIENCE, nodes.patch(node, &params, &patch)).await {
        Err(unanswered) if unanswered.is_conflict() => Ok(false),
        written => written.map(|_| true),
    }
}

/// Returns the change of a Node; `None` if there is nothing to do. The API server refuses it if the Node has changed.
fn patch(node: &Node, wanted: bool) -> Option<Value> {
    let spec = node.spec.as_ref();
    let mut taints = spec.and_then(|spec: &NodeSpec| spec.taints.clone()).unwrap_or_default();
    if taints.iter().any(|taint| taint.key == TAINT) == wanted {
        return None;
    }
    taints.retain(|taint| taint.key != TAINT);
    if wanted {
        taints.push(Taint {
            key: TAINT.to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        });
    }
    let version = &node.metadata.resource_version;
    Some(json!({"metadata": {"resourceVersion": version}, "spec": {"taints": taints}}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_taints_stay() {
        let taint = |key: &str| json!({"key": key, "effect": "NoSchedule"});
        let node = |taints: Value| -> Node {
            let metadata = json!({"name": "n1", "resourceVersion": "7"});
            serde_json::from_value(json!({"metadata": metadata, "spec": {"taints": taints}}))
                .unwrap()
        };
        let both = node(json!([taint("other"), taint(TAINT)]));
        let one = node(json!([taint("other")]));
        let taints = |patch: Option<Value>| patch.unwrap()["spec"]["taints"].clone();
        assert_eq!(taints(patch(&both, false)), json!([taint("other")]));
        assert_eq!(
            taints(patch(&one, true)),
            json!([taint("other"), taint(TAINT)])
        );
        assert_eq!((patch(&both, true), patch(&one, false)), (None, None));
        assert_eq!(
            patch(&both, false).unwrap()["metadata"]["resourceVersion"],
            "7"
        );
    }
}
