//! Checks of every node, by a Pod on each that runs the agent's program: the Pod, and one finding for what all found.

use std::collections::BTreeMap;

use kplane_model::NodeName;
use serde_json::{Value, json};

use super::{Finding, Outcome, names};

/// Labels of the Pods, as a selector.
pub(crate) const SELECTOR: &str = "app.kubernetes.io/name=kplane,app.kubernetes.io/component=check";

/// Path of kube-proxy's configuration in the Pods.
const CONFIGURATION: &str = "/etc/kube-proxy";

/// Returns a Pod that checks a node. It runs in the namespace of kube-proxy, whose ConfigMap it reads if there is one.
///
/// It sees the node's processes and network, may make a network namespace, and changes nothing.
pub(crate) fn pod(name: &str, node: &str, image: &str, config_map: Option<&str>) -> Value {
    let mut args = vec!["--preflight".to_owned()];
    let (mut mounts, mut volumes) = (json!([]), json!([]));
    if let Some(config_map) = config_map {
        args.push(format!("--config={CONFIGURATION}/config.conf"));
        mounts = json!([{ "name": "config", "mountPath": CONFIGURATION }]);
        volumes = json!([{ "name": "config", "configMap": { "name": config_map } }]);
    }
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "labels": {
            "app.kubernetes.io/name": "kplane", "app.kubernetes.io/component": "check",
        } },
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "hostNetwork": true,
            "hostPID": true,
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "tolerations": [{ "operator": "Exists" }],
            "containers": [{
                "name": "check", "image": image, "args": args,
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": {
                    "runAsUser": 0, "readOnlyRootFilesystem": true, "allowPrivilegeEscalation": false,
                    "capabilities": { "drop": ["ALL"], "add": ["NET_ADMIN", "NET_RAW", "SYS_ADMIN"] },
                },
                "volumeMounts": mounts,
            }],
            "volumes": volumes,
        },
    })
}

/// Joins what the nodes found: one finding for each check. `failed` are nodes that could not be checked, with reasons.
pub(crate) fn joined(
    found: &BTreeMap<NodeName, Vec<Finding>>,
    failed: &BTreeMap<NodeName, String>,
) -> Vec<Finding> {
    let mut all = vec![summary(found, failed)];
    let mut checks: Vec<&str> = Vec::new();
    for finding in found.values().flatten() {
        if !checks.contains(&finding.check.as_str()) {
            checks.push(&finding.check);
        }
    }
    all.extend(checks.into_iter().map(|check| of_check(check, found)));
    all
}

fn summary(
    found: &BTreeMap<NodeName, Vec<Finding>>,
    failed: &BTreeMap<NodeName, String>,
) -> Finding {
    const CHECK: &str = "nodes";
    let all = found.len() + failed.len();
    if failed.is_empty() {
        return Finding::ok(CHECK, format!("{all} of {all} nodes were checked"));
    }
    let reasons = failed.iter().map(|(node, reason)| format!("{node}: {reason}"));
    let text = format!("{} of {all} nodes could not be checked", failed.len());
    let remedy = "kubectl get pods --all-namespaces -l app.kubernetes.io/component=check";
    Finding::unknown(CHECK, text, remedy).with(reasons.collect())
}

/// Joins one check of all nodes: the worst outcome, and nodes with the same answer in one line.
fn of_check(check: &str, found: &BTreeMap<NodeName, Vec<Finding>>) -> Finding {
    let answers = found.iter().filter_map(|(node, findings)| {
        let mut findings = findings.iter();
        Some((node, findings.find(|finding| finding.check == check)?))
    });
    let mut groups = BTreeMap::<(std::cmp::Reverse<Outcome>, &str), (Vec<&str>, &Finding)>::new();
    for (node, finding) in answers {
        let key = (std::cmp::Reverse(finding.outcome), finding.summary.as_str());
        groups.entry(key).or_insert((Vec::new(), finding)).0.push(node);
    }
    let Some((_, (nodes, worst))) = groups.first_key_value() else {
        return Finding::unknown(check, "no node has an answer", "");
    };
    let mut joined = Finding {
        summary: match groups.len() {
            1 => format!("{} (all {} nodes)", worst.summary, nodes.len()),
            _ => format!("{} ({})", worst.summary, names(nodes)),
        },
        details: worst.details.clone(),
        ..(*worst).clone()
    };
    let others = groups
        .iter()
        .skip(1)
        .map(|((_, summary), (nodes, _))| format!("{}: {summary}", names(nodes)));
    joined.details.extend(others);
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(nodes: &[(&str, Finding)]) -> BTreeMap<NodeName, Vec<Finding>> {
        nodes
            .iter()
            .map(|(node, finding)| ((*node).into(), vec![finding.clone()]))
            .collect()
    }

    #[test]
    fn nodes_with_the_same_answer_make_one_line() {
        let fine = || Finding::ok("kernel", "Linux 6.12");
        let old = Finding::bad(
            "kernel",
            "Linux 5.4 is older than 5.13",
            "update the node's kernel",
        );
        let all = joined(&found(&[("n1", fine()), ("n2", fine())]), &BTreeMap::new());
        let texts: Vec<_> = all.iter().map(|finding| finding.summary.as_str()).collect();
        assert_eq!(
            texts,
            ["2 of 2 nodes were checked", "Linux 6.12 (all 2 nodes)"]
        );
        let all = joined(
            &found(&[("n1", fine()), ("n2", old), ("n3", fine())]),
            &BTreeMap::new(),
        );
        assert_eq!(all[1].outcome, Outcome::Bad);
        assert_eq!(all[1].summary, "Linux 5.4 is older than 5.13 (n2)");
        assert_eq!(all[1].details, ["n1, n3: Linux 6.12"]);
        assert_eq!(all[1].remedy, "update the node's kernel");
    }

    #[test]
    fn a_node_that_cannot_be_checked_is_named() {
        let failed = BTreeMap::from([("n2".into(), "ErrImagePull".to_owned())]);
        let all = joined(
            &found(&[("n1", Finding::ok("kernel", "Linux 6.12"))]),
            &failed,
        );
        assert_eq!(all[0].outcome, Outcome::Unknown);
        assert_eq!(all[0].details, ["n2: ErrImagePull"]);
    }

    #[test]
    fn the_pod_reads_the_configuration_only_if_there_is_one() {
        let with = pod("p", "n1", "agent:1", Some("kube-proxy"));
        assert!(with.to_string().contains("--config=/etc/kube-proxy/config.conf"));
        assert!(!pod("p", "n1", "agent:1", None).to_string().contains("config"));
    }
}
