//! The check of rolling updates: whether Pods of Deployments behind Services wait until no kernel leads to them.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::listed::{Metadata, Service};
use super::{Finding, cluster, names};
use crate::migrate::picture::{Objects, Picture};

/// The name of the check.
pub(crate) const CHECK: &str = "rolling-updates";

/// The path of hooks that agents answer.
const PATH: &str = "/gone";

/// The label of Pods that get the hook by a policy of the chart.
const LABEL: &str = "kplane.io/drain";

/// The type of Services that select no Pods by an address of their own.
const EXTERNAL: &str = "ExternalName";

/// The fields of a Deployment that matter here.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Deployment {
    metadata: Metadata,
    spec: DeploymentSpec,
}

#[derive(Clone, Debug, Deserialize)]
struct DeploymentSpec {
    template: PodTemplate,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct PodTemplate {
    #[serde(default)]
    metadata: Metadata,
    #[serde(default)]
    spec: PodSpec,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct PodSpec {
    #[serde(default)]
    containers: Vec<Container>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Container {
    #[serde(default)]
    lifecycle: Lifecycle,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Lifecycle {
    pre_stop: Option<Hook>,
}

/// A preStop hook. `sleep` and `exec` may take any time.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Hook {
    http_get: Option<HttpGet>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct HttpGet {
    #[serde(default)]
    path: String,
}

/// The end of a Deployment's Pods, as its template has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// They ask the agent of their node.
    Asks,
    /// They have another hook.
    Waits,
    /// They get SIGTERM at once.
    AtOnce,
}

impl Deployment {
    fn name(&self) -> String {
        format!("{}/{}", self.metadata.namespace, self.metadata.name)
    }

    fn ending(&self) -> Ending {
        let template = &self.spec.template;
        let containers = template.spec.containers.iter();
        let mut hooks = containers.filter_map(|container| container.lifecycle.pre_stop.as_ref());
        let asks = |hook: &Hook| {
            let path = hook.http_get.as_ref().map(|get| get.path.as_str());
            path.is_some_and(|path| path.split('?').next() == Some(PATH))
        };
        let by_policy = template
            .metadata
            .labels
            .get(LABEL)
            .is_some_and(|value| value == "true");
        match (hooks.clone().any(asks) || by_policy, hooks.next()) {
            (true, _) => Ending::Asks,
            (false, Some(_)) => Ending::Waits,
            (false, None) => Ending::AtOnce,
        }
    }
}

/// Returns the finding about the Deployments of a cluster.
pub(crate) fn finding(
    objects: &Objects,
    deployments: &[Deployment],
    services: &[Service],
) -> Finding {
    let picture = Picture::from(objects);
    let lacking = cluster::lacking(&picture);
    let lacking: Vec<&str> = lacking.iter().map(|node| node.name.as_str()).collect();
    let (mut asking, mut at_once, mut all) = (Vec::new(), Vec::new(), 0);
    let selectors = by_namespace(services);
    for deployment in deployments.iter().filter(|it| is_selected(it, &selectors)) {
        all += 1;
        match deployment.ending() {
            Ending::Asks => asking.push(deployment.name()),
            Ending::Waits => {}
            Ending::AtOnce => at_once.push(deployment.name()),
        }
    }
    if !asking.is_empty() && !lacking.is_empty() && picture.plane_error.is_none() {
        let text = format!(
            "{} Deployments have the hook {PATH}, which fails on {} nodes without an agent",
            asking.len(),
            lacking.len()
        );
        let details = vec![names_of(&asking), format!("nodes: {}", names(&lacking))];
        return Finding::warning(CHECK, text, "kpctl get nodes").with(details);
    }
    if all == 0 {
        return Finding::ok(CHECK, "no Deployment is behind a Service");
    }
    if at_once.is_empty() {
        return Finding::ok(
            CHECK,
            format!("Pods of all {all} Deployments behind Services wait before they end"),
        );
    }
    let text = format!(
        "Pods of {} of {all} Deployments behind Services end before all nodes know (-o wide names them)",
        at_once.len()
    );
    let advice =
        format!("a preStop hook with httpGet {PATH}, port 7447, lets them end without losses");
    Finding::ok(CHECK, text).with(vec![names_of(&at_once), advice])
}

fn names_of(owned: &[String]) -> String {
    let borrowed: Vec<&str> = owned.iter().map(String::as_str).collect();
    names(&borrowed)
}

type Selectors<'a> = BTreeMap<&'a str, Vec<&'a BTreeMap<String, String>>>;

/// Returns the selectors of Services, by namespace. An empty one selects nothing: such a Service has endpoints of its own.
fn by_namespace(services: &[Service]) -> Selectors<'_> {
    let mut selectors = Selectors::new();
    for Service { metadata, spec } in services {
        if !spec.selector.is_empty() && spec.kind != EXTERNAL {
            let of_namespace = selectors.entry(&metadata.namespace).or_default();
            of_namespace.push(&spec.selector);
        }
    }
    selectors
}

fn is_selected(deployment: &Deployment, selectors: &Selectors<'_>) -> bool {
    let labels = &deployment.spec.template.metadata.labels;
    let mut of_namespace = selectors
        .get(&*deployment.metadata.namespace)
        .into_iter()
        .flatten();
    of_namespace.any(|selector| {
        selector
            .iter()
            .all(|(key, value)| labels.get(key) == Some(value))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::check::Outcome;

    fn deployment(name: &str, labels: &Value, pre_stop: &Value) -> Deployment {
        let lifecycle = match pre_stop {
            Value::Null => json!({}),
            hook => json!({ "preStop": hook }),
        };
        let containers = json!([{ "name": "web", "lifecycle": lifecycle }, { "name": "log" }]);
        serde_json::from_value(json!({
            "metadata": { "namespace": "shop", "name": name },
            "spec": { "template": {
                "metadata": { "labels": labels }, "spec": { "containers": containers },
            } },
        }))
        .unwrap()
    }

    fn service(namespace: &str, selector: &Value) -> Service {
        let metadata = json!({ "namespace": namespace, "name": "web" });
        let spec = json!({ "selector": selector, "type": "ClusterIP" });
        serde_json::from_value(json!({ "metadata": metadata, "spec": spec })).unwrap()
    }

    fn gone(path: &str) -> Value {
        json!({ "httpGet": { "path": path, "port": 7447 } })
    }

    /// Returns the finding about Deployments with the label `app: web`, behind a Service.
    fn of(deployments: &[Deployment]) -> Finding {
        let services = [
            service("shop", &json!({ "app": "web" })),
            service("shop", &json!({})),
        ];
        finding(&Objects::default(), deployments, &services)
    }

    #[test]
    fn deployments_that_end_at_once_are_named() {
        let web = json!({ "app": "web" });
        let by_policy = json!({ "app": "web", "kplane.io/drain": "true" });
        let waiting = [
            deployment("asks", &web, &gone("/gone?within=25s")),
            deployment("sleeps", &web, &json!({ "sleep": { "seconds": 15 } })),
            deployment("policy", &by_policy, &Value::Null),
            deployment("without-service", &json!({ "app": "job" }), &Value::Null),
        ];
        let fine = of(&waiting);
        assert_eq!(fine.outcome, Outcome::Ok);
        assert!(
            fine.details.is_empty() && fine.summary.contains("all 3"),
            "{fine:?}"
        );
        let mut all = waiting.to_vec();
        all.push(deployment("hasty", &web, &Value::Null));
        let found = of(&all);
        assert_eq!(
            (found.outcome, &*found.details[0]),
            (Outcome::Ok, "shop/hasty")
        );
        assert!(found.summary.contains("1 of 4"), "{found:?}");
        let elsewhere = finding(&Objects::default(), &all, &[service("other", &web)]);
        assert!(elsewhere.details.is_empty(), "{elsewhere:?}");
    }

    #[test]
    fn a_hook_that_no_agent_answers_is_a_warning() {
        let node = json!({ "metadata": { "name": "node-7" } });
        let objects = Objects {
            nodes: vec![serde_json::from_value(node).unwrap()],
            fleet: Some(Ok(kplane_proto::v1::Fleet::default())),
            ..Objects::default()
        };
        let web = json!({ "app": "web" });
        let services = [service("shop", &web)];
        let of = |hook| finding(&objects, &[deployment("web", &web, &hook)], &services);
        let found = of(gone("/gone"));
        assert_eq!(found.outcome, Outcome::Warning);
        assert_eq!(found.details, ["shop/web", "nodes: node-7"]);
        assert_eq!(of(gone("/goner")).outcome, Outcome::Ok);
    }
}
