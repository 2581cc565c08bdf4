use kplane_model::Proxied;

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
    converted.ports[0].proxied
}

#[test]
fn each_annotation_asks_for_the_proxy() {
    assert_eq!(asked("other: text"), None);
    let default = Proxied::default();
    for (annotations, expected) in [
        ("kplane.io/data-path: userspace", default),
        ("kplane.io/connect-retry: 'true'", default),
        ("kplane.io/connect-retry: 'false'", Proxied { retry: false }),
    ] {
        assert_eq!(asked(annotations), Some(expected), "{annotations}");
    }
}

#[test]
fn what_is_not_understood_is_reported_and_counts_as_missing() {
    for (annotation, expected) in [
        ("kplane.io/data-path: kernel", "must be userspace"),
        ("kplane.io/connect-retry: '3'", "must be true or false"),
    ] {
        let converted = annotated(annotation, PORTS);
        assert_eq!(converted.ports[0].proxied, None, "{annotation}");
        let line = &lines(&converted.issues)[0];
        assert!(line.contains(expected), "{annotation}: {line}");
    }
}

#[test]
fn ports_that_cannot_be_served_as_asked_are_named() {
    let ports = "{port: 80, name: a}, {port: 80, name: b, protocol: SCTP}";
    let converted = annotated("kplane.io/data-path: userspace", ports);
    let lines = lines(&converted.issues).join("\n");
    assert!(lines.contains("SCTP ports stay with the kernel"), "{lines}");
}
