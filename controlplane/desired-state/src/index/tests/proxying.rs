//! Services that ask for the userspace proxy.

use kplane_model::{ProxyEndpoints, ProxyNamespaces, Reason};

use super::*;

/// A node with a pod range.
fn node() -> Value {
    json!({"kind": "Node", "metadata": {"name": "n1"}, "spec": {"podCIDRs": ["10.244.1.0/24"]},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]}})
}

fn asking(name: &str, ip: &str) -> Value {
    let mut service = service(name, ip);
    service["metadata"]["annotations"] = json!({"kplane.io/data-path": "userspace"});
    service["spec"]["ports"][0]["nodePort"] = json!(30_080);
    service
}

/// A slice of Service `web` with an endpoint that names an object.
fn pod(ip: &str, port: u16, target: &Value) -> Value {
    let mut slice = slice("web-1", "web", &[ip]);
    slice["endpoints"][0]["targetRef"] = target.clone();
    slice["ports"][0]["port"] = json!(port);
    slice
}

/// Returns whether Service `web` gets the proxy, and why not.
fn outcome(proxying: &Proxying, objects: &[Value]) -> Result<(), String> {
    let mut index = Index::new(Admission {
        proxying: proxying.clone(),
        ..Admission::default()
    });
    let publication = index.apply(lists(objects)).publication.unwrap();
    is_given(&index, &publication)
}

fn is_given(index: &Index, publication: &Publication) -> Result<(), String> {
    let web = publication.services.iter().find(|(key, _)| &*key.service.name == "web");
    let has_proxy = web.is_some_and(|(_, web)| web.as_ref().unwrap().port.proxied.is_some());
    let issues = index.issues();
    let mut issues = issues.iter().filter(|issue| issue.object.name == "web");
    let refusal = issues.find(|issue| issue.code == Reason::ProxyRefused);
    assert_eq!(has_proxy, refusal.is_none());
    match refusal {
        Some(issue) => Err(issue.reason.clone()),
        None => Ok(()),
    }
}

fn proxying(services: &str, endpoints: &str) -> Proxying {
    Proxying {
        services: services.parse().unwrap(),
        endpoints: endpoints.parse().unwrap(),
    }
}

#[test]
fn only_pods_of_allowed_namespaces_get_the_proxy() {
    let a_pod = json!({"kind": "Pod", "namespace": "shop", "name": "web-0"});
    let good = pod("10.244.1.5", 8080, &a_pod);
    let of = |slice: &Value| vec![node(), asking("web", "10.96.0.1"), slice.clone()];
    let default = Proxying::default();
    assert_eq!(default.services, ProxyNamespaces::None);
    assert_eq!(default.endpoints, ProxyEndpoints::Pods);
    let refusal = outcome(&default, &of(&good)).unwrap_err();
    assert!(refusal.contains("--userspace-services"), "{refusal}");
    assert!(outcome(&proxying("games", "pods"), &of(&good)).is_err());
    let shop = proxying("games,shop", "pods");
    assert_eq!(outcome(&shop, &of(&good)), Ok(()));
    let foreign = json!({"kind": "Pod", "namespace": "games", "name": "chess-0"});
    for (slice, why) in [
        (pod("10.244.1.5", 8080, &json!(null)), "not a Pod"),
        (
            pod("10.244.1.5", 8080, &json!({"kind": "Node", "name": "n1"})),
            "not a Pod",
        ),
        (pod("10.244.1.5", 8080, &foreign), "not a Pod"),
        (pod("192.0.2.1", 22, &a_pod), "a node's address"),
        (pod("192.0.2.9", 22, &a_pod), "no Node's pod range"),
        // Two nodes would pass a connection on to each other.
        (pod("192.0.2.1", 30_080, &a_pod), "is a place of shop/web"),
    ] {
        let refusal = outcome(&shop, &of(&slice)).unwrap_err();
        assert!(refusal.contains(why), "{refusal}");
    }
    let ranges = proxying("all", "192.0.2.0/24");
    assert!(outcome(&ranges, &of(&pod("192.0.2.1", 22, &a_pod))).is_err());
    assert_eq!(outcome(&ranges, &of(&pod("192.0.2.9", 22, &a_pod))), Ok(()));
    let any = proxying("all", "any");
    assert_eq!(
        outcome(&any, &of(&pod("192.0.2.1", 22, &json!(null)))),
        Ok(())
    );
    assert!(outcome(&any, &of(&pod("192.0.2.1", 30_080, &a_pod))).is_err());
    assert!(outcome(&any, &of(&pod("10.96.0.1", 80, &a_pod))).is_err());
}

#[test]
fn a_service_is_looked_at_again_when_a_node_comes() {
    let a_pod = json!({"kind": "Pod", "name": "web-0"});
    let mut index = Index::new(Admission {
        proxying: proxying("shop", "pods"),
        ..Admission::default()
    });
    let objects = [asking("web", "10.96.0.1"), pod("10.244.1.5", 8080, &a_pod)];
    let publication = index.apply(lists(&objects)).publication.unwrap();
    assert!(is_given(&index, &publication).is_err());
    let publication = apply(&mut index, &node());
    assert_eq!(is_given(&index, &publication), Ok(()));
}
