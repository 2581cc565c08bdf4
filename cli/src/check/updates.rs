//! The check of rolling updates: whether Pods of Deployments behind Services wait until no kernel leads to them.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::hooks::{self, Hook, PATH, PodSpec};
use super::listed::{Metadata, Service, ServiceSpec};
use super::{Finding, NAMED, cluster, names};
use crate::migrate::snapshot::{Objects, Snapshot};

/// The name of the check.
pub(crate) const CHECK: &str = "rolling-updates";

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

    /// Returns the end of the Pods, if agents answer hooks at a port; 0 = they answer none.
    fn ending(&self, port: u16) -> Ending {
        let template = &self.spec.template;
        let mut hooks = template
            .spec
            .containers
            .iter()
            .filter_map(|container| container.lifecycle.pre_stop.as_ref());
        let by_policy = template
            .metadata
            .labels
            .get(LABEL)
            .is_some_and(|value| value == "true" && port > 0);
        match (hooks.clone().any(Hook::asks) || by_policy, hooks.next()) {
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
    let snapshot = Snapshot::from(objects);
    let lacking: Vec<&str> =
        cluster::lacking(&snapshot).iter().map(|node| node.name.as_str()).collect();
    let (mut asking, mut at_once, mut all) = (Vec::new(), Vec::new(), 0);
    let (port, mut faulty) = (hooks_port(objects), Vec::new());
    let selectors = by_namespace(services);
    for deployment in deployments {
        let mut services = selecting(deployment, &selectors).peekable();
        if services.peek().is_none() {
            continue;
        }
        all += 1;
        let mut faults = deployment.spec.template.spec.faults(port);
        let ending = deployment.ending(port);
        if ending == Ending::Asks && services.any(|spec| spec.publish_not_ready_addresses) {
            faults.push("a Service with publishNotReadyAddresses leads to Pods until they are gone: the hook takes its whole time".to_owned());
        }
        if !faults.is_empty() {
            faulty.push(format!("{}: {}", deployment.name(), faults.join("; ")));
        }
        match ending {
            Ending::Asks => asking.push(deployment.name()),
            Ending::Waits => {}
            Ending::AtOnce => at_once.push(deployment.name()),
        }
    }
    if !asking.is_empty() && !lacking.is_empty() && snapshot.plane_error.is_none() {
        let text = format!(
            "{} Deployments have the hook {PATH}, which fails on {} nodes without an agent",
            asking.len(),
            lacking.len()
        );
        let details = vec![names_of(&asking), format!("nodes: {}", names(&lacking))];
        return Finding::warning(CHECK, text, "kpctl get nodes").with(details);
    }
    if !faulty.is_empty() {
        let text = format!(
            "hooks of {} Deployments do not do what they are for",
            faulty.len()
        );
        faulty.truncate(NAMED);
        let remedy = "correct these Pod templates (docs/rolling-updates.md)";
        return Finding::warning(CHECK, text, remedy).with(faulty);
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
        format!("a preStop hook with httpGet {PATH}, port {port}, lets them end without losses");
    Finding::ok(CHECK, text).with(vec![names_of(&at_once), advice])
}

fn names_of(owned: &[String]) -> String {
    let borrowed: Vec<&str> = owned.iter().map(String::as_str).collect();
    names(&borrowed)
}

type Selectors<'a> = BTreeMap<&'a str, Vec<&'a ServiceSpec>>;

/// Returns the selectors of Services, by namespace. An empty one selects nothing: such a Service has endpoints of its own.
fn by_namespace(services: &[Service]) -> Selectors<'_> {
    let mut selectors = Selectors::new();
    for Service { metadata, spec, .. } in services {
        if !spec.selector.is_empty() && spec.kind != EXTERNAL {
            let of_namespace = selectors.entry(&metadata.namespace).or_default();
            of_namespace.push(spec);
        }
    }
    selectors
}

/// Returns the Services that select the Pods of a Deployment.
fn selecting<'a>(
    deployment: &'a Deployment,
    selectors: &'a Selectors<'a>,
) -> impl Iterator<Item = &'a ServiceSpec> {
    let labels = &deployment.spec.template.metadata.labels;
    let of_namespace = selectors.get(&*deployment.metadata.namespace);
    let is_selected = move |spec: &&ServiceSpec| {
        spec.selector.iter().all(|(key, value)| labels.get(key) == Some(value))
    };
    of_namespace.into_iter().flatten().copied().filter(is_selected)
}

/// Returns the port at which agents answer hooks, by their DaemonSet; 0 = they answer none.
fn hooks_port(objects: &Objects) -> u16 {
    let Some(agents) = &objects.agents else {
        return hooks::PORT;
    };
    let pod = agents.spec.template.spec.iter();
    let containers = pod.flat_map(|pod| &pod.containers);
    let mut args = containers.flat_map(|container| container.args.iter().flatten());
    let port = args.find_map(|arg| arg.strip_prefix(hooks::FLAG));
    port.and_then(|port| port.parse().ok()).unwrap_or(0)
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
        json!({ "httpGet": { "path": path, "port": 7468 } })
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
        assert_eq!(
            of(gone("/goner")).details,
            ["shop/web: path /goner: agents answer /gone"]
        );
    }

    #[test]
    fn a_hook_that_does_not_do_what_it_is_for_is_a_warning() {
        let web = json!({ "app": "web" });
        let all = [deployment(
            "web",
            &web,
            &json!({ "httpGet": { "path": "/gone", "port": 7448 } }),
        )];
        let found = of(&all);
        assert_eq!(found.outcome, Outcome::Warning);
        assert_eq!(
            found.details,
            ["shop/web: port 7448: agents answer at 7468"]
        );
        let args = |args: &Value| {
            let containers = json!([{ "name": "agent", "args": args }]);
            let agents = json!({ "spec": {
                "selector": {}, "template": { "spec": { "containers": containers } },
            } });
            let objects = Objects {
                agents: Some(serde_json::from_value(agents).unwrap()),
                ..Objects::default()
            };
            finding(&objects, &all, &[service("shop", &web)])
        };
        assert_eq!(args(&json!(["--pre-stop-port=7448"])).outcome, Outcome::Ok);
        let off = args(&json!(["--own-mark=1"]));
        assert!(off.details[0].contains("answer no hooks"), "{off:?}");
        // By the policy of the chart.
        let by_policy = json!({ "app": "web", "kplane.io/drain": "true" });
        let all = [deployment("web", &by_policy, &Value::Null)];
        let mut unready = service("shop", &web);
        assert_eq!(of(&all).outcome, Outcome::Ok);
        unready.spec.publish_not_ready_addresses = true;
        let found = finding(&Objects::default(), &all, &[unready]);
        assert!(
            found.details[0].contains("publishNotReadyAddresses"),
            "{found:?}"
        );
    }
}
