use kplane_model::{Balance, EndpointAddr, Proxied, ProxyHeader};

use super::lines;
use super::service::whole;
use crate::convert::ConvertedService;

const PORTS: &str = "{port: 80}";

/// A Service with these annotations and ports.
fn annotated(annotations: &str, ports: &str) -> ConvertedService {
    whole(&format!(
        "metadata: {{name: web, annotations: {{{annotations}}}}}\n\
         spec: {{clusterIP: 10.0.0.1, ports: [{ports}]}}"
    ))
}

/// What a Service with these annotations asks, without issues.
fn asked(annotations: &str) -> Option<Proxied> {
    let converted = annotated(annotations, PORTS);
    assert_eq!(lines(&converted.issues), [""; 0], "{annotations}");
    converted.ports[0].proxied.as_deref().cloned()
}

#[test]
fn each_annotation_asks_for_the_proxy() {
    assert_eq!(asked("other: text"), None);
    let default = Proxied::default();
    for (annotations, expected) in [
        ("kplane.io/data-path: userspace", default.clone()),
        (
            "kplane.io/balance: least-connections",
            Proxied {
                balance: Balance::LeastConnections,
                ..default.clone()
            },
        ),
        (
            "kplane.io/proxy-protocol: v2",
            Proxied {
                header: Some(ProxyHeader::V2),
                ..default.clone()
            },
        ),
        ("kplane.io/connect-retry: 'true'", default.clone()),
        (
            "kplane.io/connect-retry: 'false'",
            Proxied {
                retry: false,
                ..default
            },
        ),
    ] {
        assert_eq!(asked(annotations), Some(expected), "{annotations}");
    }
}

/// U54.
#[test]
fn weights_belong_to_ranges_of_addresses() {
    let proxied = asked("kplane.io/weights: '10.244.1.0/24=3, 10.244.2.7=20'").unwrap();
    assert_eq!(proxied.balance, Balance::Weighted);
    for (ip, expected) in [("10.244.1.9", 3), ("10.244.2.7", 20), ("10.244.2.8", 1)] {
        let ip = ip.parse().unwrap();
        assert_eq!(proxied.weight(EndpointAddr { ip, port: 80 }), expected);
    }
    let both = "kplane.io/balance: source-hash, kplane.io/weights: 10.244.2.7=2";
    assert_eq!(asked(both).unwrap().balance, Balance::SourceHash);
}

#[test]
fn what_is_not_understood_is_reported_and_counts_as_missing() {
    for (annotation, expected) in [
        ("kplane.io/data-path: kernel", "must be userspace"),
        ("kplane.io/balance: random", "must be round-robin, "),
        ("kplane.io/proxy-protocol: v3", "must be v1 or v2"),
        ("kplane.io/connect-retry: '3'", "must be true or false"),
        ("kplane.io/weights: 10.244.2.7=0", "weights of 1..=65535"),
        ("kplane.io/weights: 10.244.2.7", "weights of 1..=65535"),
        ("kplane.io/weights: all=1", "weights of 1..=65535"),
    ] {
        let converted = annotated(annotation, PORTS);
        assert_eq!(converted.ports[0].proxied, None, "{annotation}");
        let line = &lines(&converted.issues)[0];
        assert!(line.contains(expected), "{annotation}: {line}");
    }
    let many = ["10.0.0.1=2"; Proxied::MAX_WEIGHTS + 1].join(",");
    let converted = annotated(&format!("kplane.io/weights: '{many}'"), PORTS);
    assert_eq!(converted.issues.len(), 1);
}

#[test]
fn ports_that_cannot_be_served_as_asked_are_named() {
    let ports = "{port: 80, name: a}, {port: 80, name: b, protocol: UDP}, {port: 80, name: c, protocol: SCTP}";
    let converted = annotated("kplane.io/proxy-protocol: v1", ports);
    let lines = lines(&converted.issues).join("\n");
    assert!(lines.contains("SCTP ports stay with the kernel"), "{lines}");
    assert!(lines.contains("applies to TCP ports"), "{lines}");
}
