//! The output of `kubectl get services,endpointslices,nodes,servicecidrs -A` from a real cluster is
//! valid input, as YAML and as JSON.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use kplane_desired_state::convert::{self, ExternalIps, SkipReason};
use kplane_desired_state::k8s::Object;
use kplane_desired_state::source::manifests::{Loaded, load};
use kplane_model::{Family, Protocol, TrafficPolicy};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data").join(name)
}

fn dump() -> Loaded {
    load(&data("cluster-dump.yaml")).unwrap()
}

#[test]
fn the_dump_loads_without_an_issue() {
    let loaded = dump();
    assert_eq!(loaded.issues, []);
    let mut counts = BTreeMap::new();
    for located in &loaded.objects {
        *counts.entry(located.object.kind().as_str()).or_insert(0) += 1;
    }
    let expected = [
        ("EndpointSlice", 23),
        ("Node", 6),
        ("Service", 22),
        ("ServiceCIDR", 1),
    ];
    assert_eq!(counts, BTreeMap::from(expected));
}

#[test]
fn places_are_those_of_the_file() {
    let text = fs::read_to_string(data("cluster-dump.yaml")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    for located in dump().objects {
        let (_, line) = located.location.rsplit_once("line ").unwrap();
        let line: usize = line.parse().unwrap();
        assert!(lines[line - 1].starts_with("- "), "{}", located.location);
        let kind = format!("  kind: {}", located.object.kind());
        assert!(
            lines[line..].iter().take(1_000).any(|l| *l == kind),
            "{}",
            located.location
        );
    }
}

#[test]
fn json_with_managed_fields_says_the_same() {
    let yaml = dump();
    let json = load(&data("cluster-dump-managed-fields.json")).unwrap();
    assert_eq!(json.issues, []);
    let ids = |loaded: &Loaded| loaded.objects.iter().map(|o| o.object.id()).collect::<Vec<_>>();
    assert_eq!(ids(&json), ids(&yaml));
    let specs = |loaded: &Loaded| {
        loaded
            .objects
            .iter()
            .filter_map(|o| match &o.object {
                Object::Service(service) => Some((service.spec.clone(), service.status.clone())),
                _ => None,
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(specs(&json), specs(&yaml));
}

#[test]
fn everything_in_the_dump_converts_without_an_issue() {
    let mut issues = Vec::new();
    let mut skipped = BTreeMap::new();
    let mut endpoints = 0;
    for located in dump().objects {
        issues.extend(match &located.object {
            Object::Service(service) => {
                let converted = convert::service(service, &located.location, &ExternalIps::All);
                assert_eq!(converted.ports.is_empty(), converted.skipped.is_some());
                if let Some(reason) = converted.skipped {
                    skipped.insert(service.metadata.name.to_string(), reason);
                }
                converted.issues
            }
            Object::EndpointSlice(slice) => {
                let converted = convert::slice(slice, &located.location);
                endpoints += converted.ports.iter().map(|p| p.endpoints.len()).sum::<usize>();
                converted.issues
            }
            Object::Node(node) => {
                let (facts, issues) = convert::node(node, &located.location);
                assert!(facts.zone.is_some() && !facts.addresses.is_empty());
                issues
            }
            Object::ServiceCidr(cidr) => {
                let (cidrs, issues) = convert::service_cidr(cidr, &located.location);
                assert_eq!(cidrs.len(), 2);
                issues
            }
            other => panic!("unexpected {:?}", other.id()),
        });
    }
    assert_eq!(issues, []);
    assert!(
        skipped.values().any(|reason| *reason == SkipReason::Headless),
        "{skipped:?}"
    );
    assert!(endpoints > 50, "{endpoints}");
}

#[test]
fn the_gateway_of_the_dump() {
    let objects = dump().objects;
    let gateway = objects.iter().find_map(|located| match &located.object {
        Object::Service(service) if &*service.metadata.name == "gateway" => Some(service),
        _ => None,
    });
    let ports = convert::service(gateway.unwrap(), "", &ExternalIps::All).ports;
    let keys: Vec<String> = ports.iter().map(|port| port.key.to_string()).collect();
    assert_eq!(
        keys,
        [
            "ingress/gateway:http/TCP (IPv4)",
            "ingress/gateway:https/TCP (IPv4)",
            "ingress/gateway:http/TCP (IPv6)",
            "ingress/gateway:https/TCP (IPv6)",
        ]
    );
    let https = &ports[3];
    assert_eq!(
        (https.key.family, https.key.protocol),
        (Family::V6, Protocol::Tcp)
    );
    assert_eq!(https.cluster_ip.to_string(), "fd00:10:96::ff7c");
    assert_eq!(https.load_balancer_ips[0].to_string(), "2001:db8:51::21");
    assert_eq!((https.port, https.node_port), (443, Some(32_569)));
    assert_eq!(https.external_policy, TrafficPolicy::Local);
    assert_eq!(https.health_check_node_port, Some(30_810));
}

#[test]
fn a_folder_with_bad_files_loads_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(data("cluster-dump.yaml"), dir.path().join("cluster.yaml")).unwrap();
    fs::create_dir(dir.path().join("more")).unwrap();
    fs::write(
        dir.path().join("more/bad.yaml"),
        "kind: [\n---\nkind: Job\n",
    )
    .unwrap();
    fs::write(dir.path().join("twice.yml"), service("kubernetes")).unwrap();
    fs::write(dir.path().join("binary.json"), b"\xff\xfe").unwrap();
    let loaded = load(dir.path()).unwrap();
    assert_eq!(loaded.objects.len(), 52);
    let issues: Vec<String> = loaded.issues.iter().map(ToString::to_string).collect();
    assert_eq!(
        issues,
        [
            "binary.json: file: is not UTF-8 text (line 1); convert it",
            "more/bad.yaml, document 1, line 1: document: is not valid YAML: unclosed bracket '['",
            "more/bad.yaml, document 2, line 3: Job: is ignored; kplane reads Services, EndpointSlices, \
             Nodes, ServiceCIDRs, NetworkPolicies, ClusterNetworkPolicies, Namespaces and Pods",
            "twice.yml, document 1, line 1: Service default/kubernetes: is refused because \
             cluster.yaml, document 1, item 1, line 3 has the same object; remove one of the two",
        ]
    );
}

fn service(name: &str) -> String {
    format!("apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n")
}
