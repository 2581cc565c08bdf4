use kplane_model::{Endpoint, Family};

use super::{lines, yaml};
use crate::convert::{ConvertedSlice, MAX_HINTS, MAX_SLICE_ENDPOINTS, slice};

const LOCATION: &str = "shop.yaml, document 2, line 9";

fn whole(text: &str) -> ConvertedSlice {
    slice(&yaml(text), LOCATION)
}

/// An IPv4 slice of shop/web with these endpoints and ports.
fn convert(endpoints: &str, ports: &str) -> ConvertedSlice {
    whole(&format!(
        "metadata: {{name: web-1, namespace: shop, labels: {{kubernetes.io/service-name: web}}}}\n\
         addressType: IPv4\nendpoints: [{endpoints}]\nports: [{ports}]"
    ))
}

/// The only endpoint, without issues.
fn only(endpoint: &str) -> Endpoint {
    let converted = convert(&format!("{{{endpoint}}}"), "{name: http, port: 8080}");
    assert_eq!(lines(&converted.issues), [""; 0]);
    converted.ports[0].endpoints[0].clone()
}

fn reasons(converted: &ConvertedSlice) -> Vec<String> {
    converted
        .issues
        .iter()
        .map(|issue| format!("{}: {}", issue.severity, issue.reason))
        .collect()
}

#[test]
fn a27_conditions() {
    let conditions = |text: &str| {
        let endpoint = only(&format!("addresses: [10.0.0.1]{text}"));
        (endpoint.ready, endpoint.serving, endpoint.terminating)
    };
    assert_eq!(conditions(""), (true, true, false));
    assert_eq!(conditions(", conditions: {}"), (true, true, false));
    assert_eq!(
        conditions(", conditions: {ready: false}"),
        (false, true, false)
    );
    assert_eq!(
        conditions(", conditions: {serving: false}"),
        (true, false, false)
    );
    assert_eq!(
        conditions(", conditions: {ready: false, serving: true, terminating: true}"),
        (false, true, true)
    );
}

#[test]
fn a27_only_the_first_address_counts() {
    let endpoint = only("addresses: [10.0.0.1, 127.0.0.1, rubbish], nodeName: n1");
    assert_eq!(endpoint.addr.to_string(), "10.0.0.1:8080");
    assert_eq!(endpoint.node.as_deref(), Some("n1"));
}

#[test]
fn a27_ports_without_a_number_are_skipped_and_a_missing_name_is_empty() {
    let converted = convert(
        "{addresses: [10.0.0.1]}",
        "{port: 1}, {name: a}, {name: b, port: 0}, {name: c, port: 65536}, \
         {name: d, port: 1, protocol: ICMP}, {name: good, port: 80}, {name: good, port: 81}",
    );
    let names = converted.ports.iter().map(|port| &*port.port_name);
    assert_eq!(names.collect::<Vec<_>>(), ["", "good"]);
    assert_eq!(
        reasons(&converted),
        [
            "error: ports[1] has the port 0 and is not served; use 1..=65535",
            "error: ports[2] has the port 0 and is not served; use 1..=65535",
            "error: ports[3] has the port 65536 and is not served; use 1..=65535",
            "error: ports[4] is not served: unknown protocol \"ICMP\": use TCP, UDP or SCTP",
            "error: ports[6] has the name \"good\" and protocol TCP of an earlier port and is not \
             served; rename it",
        ]
    );
}

#[test]
fn a27_z1_slices_of_no_service_are_skipped() {
    let converted = whole("metadata: {name: x}\naddressType: IPv4");
    assert_eq!(converted.service, None);
    assert_eq!(
        lines(&converted.issues),
        [
            "warning: shop.yaml, document 2, line 9: EndpointSlice default/x: has no label \
             kubernetes.io/service-name and belongs to no Service; add the label with the \
             Service's name"
        ]
    );
    let headless = whole(
        "metadata: {name: x, labels: {kubernetes.io/service-name: web, \
         service.kubernetes.io/headless: ''}}\naddressType: IPv4",
    );
    assert_eq!(headless, ConvertedSlice::default());
}

#[test]
fn a28_ports_have_names_and_targets_of_their_own() {
    let converted = convert(
        "{addresses: [10.0.0.1]}, {addresses: [10.0.0.2]}",
        "{name: '', port: 80}, {name: dns, port: 53, protocol: UDP}",
    );
    assert_eq!(converted.service.unwrap().to_string(), "shop/web");
    let found: Vec<String> = converted
        .ports
        .iter()
        .map(|p| {
            let addrs: Vec<_> = p.endpoints.iter().map(|e| e.addr.to_string()).collect();
            format!("{:?}/{}: {}", p.port_name, p.protocol, addrs.join(" "))
        })
        .collect();
    assert_eq!(
        found,
        [
            "\"\"/TCP: 10.0.0.1:80 10.0.0.2:80",
            "\"dns\"/UDP: 10.0.0.1:53 10.0.0.2:53"
        ]
    );
}

#[test]
fn z2_family_is_the_address_type() {
    let of_type = |address_type: &str, address: &str| {
        whole(&format!(
            "metadata: {{name: x, labels: {{kubernetes.io/service-name: web}}}}\n\
             addressType: {address_type}\nendpoints: [{{addresses: ['{address}']}}]\n\
             ports: [{{name: a, port: 1}}]"
        ))
    };
    let converted = of_type("IPv6", "fd00::1");
    assert_eq!(converted.ports[0].family, Family::V6);
    assert!(converted.issues.is_empty());

    let fqdn = of_type("FQDN", "a.example");
    assert!(fqdn.ports.is_empty());
    assert_eq!(
        reasons(&fqdn),
        ["warning: addressType FQDN is not served; use IPv4 or IPv6 addresses"]
    );
    let unknown = of_type("IPX", "10.0.0.1");
    assert!(unknown.ports.is_empty());
    assert_eq!(
        reasons(&unknown),
        [
            "error: addressType \"IPX\" is unknown and nothing of the slice is served; use IPv4 or \
             IPv6"
        ]
    );
}

#[test]
fn cve_2021_25737_addresses_of_the_node_are_refused() {
    for (address, expected) in [
        (
            "127.0.0.1",
            "the address 127.0.0.1 is a loopback address and is refused; traffic must never be sent there",
        ),
        (
            "127.000.000.001",
            "the address 127.0.0.1 is a loopback address and is refused; traffic must never be sent there",
        ),
        (
            "169.254.169.254",
            "the address 169.254.169.254 is a link-local address and is refused; traffic must never be sent there",
        ),
        (
            "224.0.0.1",
            "the address 224.0.0.1 is a multicast address and is refused; traffic must never be sent there",
        ),
        (
            "0.0.0.0",
            "the address 0.0.0.0 is in 0.0.0.0/8 (this host) and is refused; traffic must never be sent there",
        ),
        (
            "::1",
            "the address ::1 is a loopback address and is refused; traffic must never be sent there",
        ),
        (
            "::ffff:10.0.0.1",
            "the address ::ffff:10.0.0.1 is an IPv4-mapped address and is refused; write 10.0.0.1 in a slice with addressType IPv4",
        ),
        (
            "::ffff:7f00:1",
            "the address ::ffff:7f00:1 is an IPv4-mapped address and is refused; write 127.0.0.1 in a slice with addressType IPv4",
        ),
        (
            "fd00::1",
            "the address fd00::1 is not IPv4 as addressType says and is not served; move it to a slice of its family",
        ),
        (
            "10.0.0.256",
            "\"10.0.0.256\" is not an IP address and is not served; correct it",
        ),
        ("", "has no address and is not served; give it one"),
    ] {
        let endpoints = format!("{{addresses: ['{address}']}}, {{addresses: [10.0.0.2]}}");
        let converted = convert(&endpoints, "{name: http, port: 8080}");
        assert_eq!(
            lines(&converted.issues),
            [format!(
                "error: {LOCATION}: EndpointSlice shop/web-1: endpoints[0]: {expected}"
            )]
        );
        assert_eq!(converted.ports[0].endpoints.len(), 1, "{address}");
    }
}

#[test]
fn cve_2021_25737_addresses_of_the_node_are_refused_in_ipv6_too() {
    for (address, why) in [
        ("::", "is the unspecified address"),
        ("::1", "is a loopback address"),
        ("fe80::1", "is a link-local address"),
        ("febf:ffff::1", "is a link-local address"),
        ("ff02::1", "is a multicast address"),
    ] {
        let converted = whole(&format!(
            "metadata: {{name: x, labels: {{kubernetes.io/service-name: web}}}}\n\
             addressType: IPv6\n\
             endpoints: [{{addresses: ['{address}']}}, {{addresses: ['fd00::2']}}]\n\
             ports: [{{name: a, port: 1}}]"
        ));
        assert_eq!(
            reasons(&converted),
            [format!(
                "error: endpoints[0]: the address {address} {why} and is refused; traffic must \
                 never be sent there"
            )]
        );
        assert_eq!(converted.ports[0].endpoints.len(), 1, "{address}");
    }
}

#[test]
fn a4_leading_zeros_of_endpoints_are_decimal() {
    let endpoint = only("addresses: [010.000.0.012]");
    assert_eq!(endpoint.addr.to_string(), "10.0.0.12:8080");
}

#[test]
fn b2_hints() {
    let endpoint = only(
        "addresses: [10.0.0.1], hints: {forZones: [{name: a}, {name: b}], forNodes: [{name: n}]}",
    );
    assert_eq!(endpoint.zone_hints, ["a".into(), "b".into()]);
    assert_eq!(endpoint.node_hints, ["n".into()]);
    let many = "{name: z}, ".repeat(MAX_HINTS + 1);
    let converted = convert(
        &format!("{{addresses: [10.0.0.1], hints: {{forZones: [{many}]}}}}"),
        "{name: http, port: 80}",
    );
    assert!(converted.ports[0].endpoints[0].zone_hints.is_empty());
    assert_eq!(
        reasons(&converted),
        ["warning: endpoints[0] has 65 topology hints, more than 64; they are not used"]
    );
}

#[test]
fn a_port_without_endpoints_is_there_all_the_same() {
    let converted = convert("", "{name: http, port: 80}");
    assert_eq!(converted.ports.len(), 1);
    assert!(converted.ports[0].endpoints.is_empty());
}

#[test]
fn absurd_sizes_are_cut_and_told() {
    let endpoint = |n: usize| format!("{{addresses: [10.0.{}.{}]}}, ", n / 250, n % 250);
    let endpoints: String = (0..=MAX_SLICE_ENDPOINTS).map(endpoint).collect();
    let ports: String = (1..=30).map(|n| format!("{{name: p{n}, port: {n}}}, ")).collect();
    let converted = convert(&endpoints, &ports);
    assert_eq!(converted.ports.len(), 25);
    assert_eq!(converted.ports[0].endpoints.len(), MAX_SLICE_ENDPOINTS);
    assert_eq!(
        reasons(&converted),
        [
            "error: has 10001 endpoints; only the first 10000 are served, split the slice",
            "error: 10000 endpoints x 30 ports are more than 250000; only the first 25 ports are \
             served, split the Service",
        ]
    );
}
