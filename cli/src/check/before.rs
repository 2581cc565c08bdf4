//! Checks of a cluster before an installation.

use k8s_openapi::api::core::v1::Namespace;
use serde_json::Value;

use super::Finding;
use crate::migrate::snapshot::{Objects, Snapshot};
use crate::migrate::stage::Stage;

/// The oldest API server with which kplane is tested.
const OLDEST: u32 = 33;

/// The rights that an installation and a migration need: verb, group, resource.
pub(crate) const RIGHTS: [(&str, &str, &str); 11] = [
    ("create", "apps", "daemonsets"),
    ("patch", "apps", "daemonsets"),
    ("delete", "apps", "daemonsets"),
    ("create", "apps", "deployments"),
    ("create", "rbac.authorization.k8s.io", "clusterroles"),
    ("create", "", "namespaces"),
    ("create", "", "pods"),
    ("delete", "", "pods"),
    ("create", "", "configmaps"),
    ("patch", "", "configmaps"),
    ("patch", "", "nodes"),
];

/// The objects of the cluster that were read, besides those of a migration.
#[derive(Clone, Debug, Default)]
pub(crate) struct Facts {
    /// The answer of `/version`.
    pub(crate) version: Value,
    /// The namespace of kplane.
    pub(crate) namespace: Option<Namespace>,
    /// The rights that the user does not have.
    pub(crate) denied: Vec<String>,
}

pub(crate) fn findings(facts: &Facts, objects: &Objects, namespace: &str) -> Vec<Finding> {
    let snapshot = Snapshot::from(objects);
    vec![
        server(&facts.version),
        rights(&facts.denied),
        own_namespace(facts.namespace.as_ref(), namespace),
        kube_proxy(&snapshot),
        mode(&snapshot),
        nodes(&snapshot),
    ]
}

fn server(version: &Value) -> Finding {
    const CHECK: &str = "api-server";
    let text = version["gitVersion"].as_str().unwrap_or("unknown");
    let minor = version["minor"]
        .as_str()
        .unwrap_or_default()
        .trim_end_matches(|c: char| !c.is_ascii_digit())
        .parse::<u32>();
    match minor {
        Ok(minor) if minor >= OLDEST => Finding::ok(CHECK, format!("Kubernetes {text}")),
        Ok(_) => Finding::warning(
            CHECK,
            format!("Kubernetes {text} is older than 1.{OLDEST}, with which kplane is tested"),
            "kubectl version",
        ),
        Err(_) => Finding::unknown(CHECK, "the version is not known", "kubectl version"),
    }
}

fn rights(denied: &[String]) -> Finding {
    if denied.is_empty() {
        Finding::ok("rights", "you may install kplane and migrate nodes")
    } else {
        let text = format!("you lack {} rights", denied.len());
        Finding::bad("rights", text, "kubectl auth whoami").with(denied.to_vec())
    }
}

fn own_namespace(found: Option<&Namespace>, name: &str) -> Finding {
    const CHECK: &str = "namespace";
    const LABEL: &str = "pod-security.kubernetes.io/enforce";
    let Some(found) = found else {
        return Finding::ok(CHECK, format!("{name} does not exist, and helm creates it"));
    };
    let labels = found.metadata.labels.as_ref();
    match labels.and_then(|labels| labels.get(LABEL)).map(String::as_str) {
        None | Some("privileged") => Finding::ok(CHECK, format!("{name} exists")),
        Some(level) => Finding::bad(
            CHECK,
            format!("{name} enforces {LABEL}={level}, and agents are on the host's network"),
            &format!("kubectl label namespace {name} {LABEL}=privileged --overwrite"),
        ),
    }
}

fn kube_proxy(snapshot: &Snapshot) -> Finding {
    const CHECK: &str = "kube-proxy";
    match (&snapshot.kube_proxy, snapshot.saved) {
        (Some(set), _) if set.record.is_some() => Finding::warning(
            CHECK,
            "its DaemonSet is in the middle of a migration",
            "kpctl migrate status",
        ),
        (Some(_), _) => Finding::ok(CHECK, "its DaemonSet was found: kpctl migrate replaces it"),
        (None, true) => Finding::ok(CHECK, "a migration has deleted its DaemonSet"),
        // k3s and others have it inside another program.
        (None, false) => Finding::warning(
            CHECK,
            "it has no DaemonSet: either none runs, or it is a part of another program",
            "kpctl check --pre --local, on a node",
        ),
    }
}

fn mode(snapshot: &Snapshot) -> Finding {
    const CHECK: &str = "mode";
    let Some(mode) = snapshot.mode.as_deref() else {
        return Finding::skipped(CHECK, "kube-proxy's configuration was not found");
    };
    let text = format!("kube-proxy uses {mode}");
    match mode {
        "nftables" | "iptables" => Finding::ok(CHECK, text),
        "ipvs" => Finding::warning(
            CHECK,
            format!("{text}, which Kubernetes has deprecated"),
            "see docs/leaving-ipvs.md",
        ),
        _ => Finding::bad(CHECK, text, "see docs/kube-proxy-compat.md"),
    }
}

fn nodes(snapshot: &Snapshot) -> Finding {
    const CHECK: &str = "nodes";
    let stages = snapshot.nodes.iter().map(|node| (node, Stage::of(node)));
    let (outside, inside): (Vec<_>, Vec<_>) =
        stages.partition(|(_, stage)| matches!(stage, Stage::Outside(_)));
    let away: Vec<&str> = inside
        .iter()
        .filter(|(node, _)| !node.ready)
        .map(|(node, _)| node.name.as_str())
        .collect();
    let text = format!(
        "{} nodes, {} of them left out",
        snapshot.nodes.len(),
        outside.len()
    );
    let details = outside
        .iter()
        .take(super::NAMED)
        .map(|(node, stage)| format!("{}: {}", node.name, stage.reason()));
    if away.is_empty() {
        Finding::ok(CHECK, text).with(details.collect())
    } else {
        Finding::warning(
            CHECK,
            format!("{} nodes are not Ready", away.len()),
            "kubectl get nodes",
        )
        .with(vec![super::names(&away)])
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::check::Outcome;

    fn outcome(facts: &Facts, check: &str) -> Outcome {
        let all = findings(facts, &Objects::default(), "kplane");
        all.iter().find(|finding| finding.check == check).unwrap().outcome
    }

    #[test]
    fn versions_of_vendors_are_understood() {
        let of = |minor: &str| {
            let facts = Facts {
                version: json!({ "minor": minor, "gitVersion": "v1" }),
                ..Facts::default()
            };
            outcome(&facts, "api-server")
        };
        assert_eq!(of("36+"), Outcome::Ok);
        assert_eq!(of("29"), Outcome::Warning);
        assert_eq!(of(""), Outcome::Unknown);
    }

    #[test]
    fn a_namespace_that_refuses_agents_is_named() {
        let label = json!({ "pod-security.kubernetes.io/enforce": "restricted" });
        let namespace = json!({ "metadata": { "labels": label } });
        let facts = Facts {
            namespace: Some(serde_json::from_value(namespace).unwrap()),
            denied: vec!["patch nodes".to_owned()],
            ..Facts::default()
        };
        assert_eq!(outcome(&facts, "namespace"), Outcome::Bad);
        assert_eq!(outcome(&facts, "rights"), Outcome::Bad);
        assert_eq!(outcome(&Facts::default(), "namespace"), Outcome::Ok);
    }
}
