//! The check of external addresses before an installation: kube-proxy serves Services at any port of a node's address, and
//! kplane refuses the ports at which programs of nodes listen, unless the operator allows them.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Node;
use kplane_model::{Protocol, usual_holder};

use super::listed::Service;
use super::{Finding, names};

/// The name of the check.
pub(crate) const CHECK: &str = "external-ips";

/// Returns the finding: each Service at an address of a node that would lose ports there.
pub(crate) fn finding(services: &[Service], nodes: &[Node]) -> Finding {
    let status = nodes.iter().filter_map(|node| node.status.as_ref());
    let all = status
        .flat_map(|status| status.addresses.iter().flatten())
        .filter(|address| matches!(&*address.type_, "InternalIP" | "ExternalIP"));
    let of_nodes: BTreeSet<IpAddr> = all.filter_map(|it| it.address.parse().ok()).collect();
    let (mut details, mut allow, mut by_name) = (Vec::new(), BTreeSet::new(), false);
    for service in services {
        let ports = service.spec.ports.iter();
        let refused = ports.filter(|port| {
            let protocol = port.protocol.parse().unwrap_or(Protocol::Tcp);
            usual_holder(protocol, port.port).is_some()
        });
        let ports: BTreeSet<u16> = refused.map(|port| port.port).collect();
        let [named, balanced] = service.external().map(|ips| {
            ips.into_iter()
                .filter(|ip| of_nodes.contains(ip))
                .map(|ip| ip.to_string())
                .collect::<BTreeSet<_>>()
        });
        let at: Vec<&str> = named.union(&balanced).map(String::as_str).collect();
        if ports.is_empty() || at.is_empty() {
            continue;
        }
        by_name |= !named.is_empty();
        let meta = &service.metadata;
        details.push(format!(
            "{}/{}: port {} at {}",
            meta.namespace,
            meta.name,
            listed(&ports, ", "),
            names(&at)
        ));
        allow.extend(ports);
    }
    if details.is_empty() {
        return Finding::ok(CHECK, "no Service would lose a port of a node's address");
    }
    let text = format!(
        "{} Services have ports of nodes' addresses that kplane leaves to programs of the nodes",
        details.len()
    );
    let remedy = format!(
        "helm install ... --set-string controlPlane.allowExternalIPs='{}', or --allow-external-ips {} of kp-controlplane",
        listed(&allow, "\\,"),
        listed(&allow, ",")
    );
    // A load balancer at addresses of nodes, such as that of k3s, listens there itself.
    let made = if by_name { Finding::bad } else { Finding::warning };
    made(CHECK, text, &remedy).with(details)
}

fn listed(ports: &BTreeSet<u16>, between: &str) -> String {
    let texts: Vec<String> = ports.iter().map(u16::to_string).collect();
    texts.join(between)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::check::Outcome;

    fn check(service: &Value) -> Finding {
        let node = json!({ "metadata": { "name": "n1" }, "status": { "addresses": [
            { "type": "InternalIP", "address": "192.0.2.1" }, { "type": "Hostname", "address": "n1" },
        ] } });
        let service = serde_json::from_value(service.clone()).unwrap();
        finding(&[service], &[serde_json::from_value(node).unwrap()])
    }

    #[test]
    fn a_service_that_loses_ports_of_a_node_is_named_with_the_option_that_keeps_them() {
        let service = |ip: &str| {
            json!({ "metadata": { "namespace": "shop", "name": "web" }, "spec": {
                "externalIPs": [ip],
                "ports": [
                    { "port": 80, "protocol": "TCP" }, { "port": 443, "protocol": "TCP" },
                    { "port": 8080, "protocol": "TCP" }, { "port": 4789, "protocol": "TCP" },
                ],
            } })
        };
        let lost = check(&service("192.0.2.1"));
        assert_eq!(lost.outcome, Outcome::Bad);
        assert_eq!(lost.details, ["shop/web: port 80, 443 at 192.0.2.1"]);
        assert!(
            lost.remedy.contains("allowExternalIPs='80\\,443'"),
            "{}",
            lost.remedy
        );
        assert!(
            lost.remedy.contains("--allow-external-ips 80,443"),
            "{}",
            lost.remedy
        );
        assert_eq!(check(&service("198.51.100.1")).outcome, Outcome::Ok);
        let mut high = service("192.0.2.1");
        high["spec"]["ports"] = json!([{ "port": 4789, "protocol": "TCP" }]);
        assert_eq!(check(&high).outcome, Outcome::Ok, "a tunnel is UDP");
        high["spec"]["ports"] = json!([{ "port": 4789, "protocol": "UDP" }]);
        assert_eq!(check(&high).outcome, Outcome::Bad);
    }

    #[test]
    fn an_address_of_a_load_balancer_is_a_warning() {
        let service = |mode: &str| {
            json!({ "metadata": { "namespace": "shop", "name": "web" },
                "spec": { "ports": [{ "port": 80 }] },
                "status": { "loadBalancer": { "ingress": [{ "ip": "192.0.2.1", "ipMode": mode }] } } })
        };
        assert_eq!(check(&service("VIP")).outcome, Outcome::Warning);
        assert_eq!(check(&service("Proxy")).outcome, Outcome::Ok);
    }
}
