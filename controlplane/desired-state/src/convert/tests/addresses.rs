use kplane_model::TrafficPolicy;

use super::service::{PORT, allowing, convert, ingress, only, reasons, texts, whole};
use crate::convert::{ConvertedService, ExternalIps, MAX_SOURCE_RANGES};

#[test]
fn a2_addresses_go_to_their_family() {
    let converted = whole(&format!(
        "metadata: {{name: web}}\n\
         spec: {{clusterIPs: [10.0.0.1, 'fd00::1'], ipFamilies: [IPv4, IPv6], {PORT},\n\
         \x20 externalIPs: ['2001:db8::1', 192.0.2.1]}}\n\
         status: {{loadBalancer: {{ingress: [{{ip: 192.0.2.2}}, {{ip: '2001:db8::2'}}]}}}}"
    ));
    assert!(converted.issues.is_empty());
    let [v4, v6] = &converted.ports[..] else {
        panic!()
    };
    assert_eq!(texts(&v4.external_ips), ["192.0.2.1"]);
    assert_eq!(texts(&v4.load_balancer_ips), ["192.0.2.2"]);
    assert_eq!(texts(&v6.external_ips), ["2001:db8::1"]);
    assert_eq!(texts(&v6.load_balancer_ips), ["2001:db8::2"]);
}

#[test]
fn a2_addresses_of_no_family_of_the_service_are_told() {
    let spec = format!("externalIPs: ['2001:db8::1', 192.0.2.1], {PORT}");
    assert_eq!(
        reasons(&spec),
        [
            "warning: spec.externalIPs: 2001:db8::1 is not served because the Service has no IPv6 \
             cluster address; make the Service dual-stack or remove it"
        ]
    );
}

#[test]
fn a4_leading_zeros_are_decimal() {
    let converted = convert(&format!(
        "clusterIP: 010.096.000.041, externalIPs: [192.0.2.007], {PORT}"
    ));
    assert_eq!(converted.ports[0].cluster_ip.to_string(), "10.96.0.41");
    assert_eq!(texts(&converted.ports[0].external_ips), ["192.0.2.7"]);
}

#[test]
fn a4_leading_zeros_are_decimal_in_load_balancers_and_ranges_too() {
    let converted = ingress(
        "{ip: 192.000.002.010}",
        ", loadBalancerSourceRanges: [010.008.0.0/16]",
    );
    assert!(converted.issues.is_empty(), "{:?}", converted.issues);
    assert_eq!(texts(&converted.ports[0].load_balancer_ips), ["192.0.2.10"]);
    assert_eq!(texts(&converted.ports[0].source_ranges), ["10.8.0.0/16"]);
}

/// Converts a dual-stack Service with these external addresses, under an operator's restriction.
fn with_external_ips(ips: &str, allowed: &ExternalIps) -> ConvertedService {
    let spec = format!(
        "clusterIPs: [10.0.0.1, 'fd00::1'], ipFamilies: [IPv4, IPv6], externalIPs: [{ips}], \
         externalTrafficPolicy: Local, {PORT}"
    );
    allowing(
        &format!("metadata: {{name: web}}\nspec: {{{spec}}}"),
        allowed,
    )
}

#[test]
fn a5_external_ips_outside_of_the_operators_ranges_are_refused() {
    let ranges = ["192.0.2.0/25", "2001:db8::/32"].map(|range| range.parse().unwrap());
    let allowed = ExternalIps::new(true, ranges.to_vec());
    let ips = "192.0.2.1, 192.0.2.128, 198.51.100.1, '2001:db8::1', '2001:db9::1', 192.0.2.002";
    let converted = with_external_ips(ips, &allowed);
    let [v4, v6] = &converted.ports[..] else {
        panic!()
    };
    assert_eq!(texts(&v4.external_ips), ["192.0.2.1", "192.0.2.2"]);
    assert_eq!(texts(&v6.external_ips), ["2001:db8::1"]);
    let reported: Vec<_> = converted.issues.iter().map(|i| i.reason.as_str()).collect();
    let refused = |ip: &str| {
        format!(
            "spec.externalIPs: {ip} is outside of the ranges that this cluster allows \
             (--external-ip-cidr) and is refused; use an address inside of them"
        )
    };
    let expected = ["192.0.2.128", "198.51.100.1", "2001:db9::1"].map(refused);
    assert_eq!(reported, expected);
    // No ranges = all of them.
    let converted = with_external_ips(ips, &ExternalIps::new(true, Vec::new()));
    assert!(converted.issues.is_empty(), "{:?}", converted.issues);
    assert_eq!(converted.ports[0].external_ips.len(), 4);
}

/// Settings that need external addresses are ignored without them; the rest is served.
#[test]
fn a5_a13_external_ips_that_are_switched_off_count_for_nothing() {
    let off = ExternalIps::new(false, vec!["0.0.0.0/0".parse().unwrap()]);
    let converted = with_external_ips("192.0.2.1, '2001:db8::1', rubbish", &off);
    assert_eq!(converted.ports.len(), 2);
    for port in &converted.ports {
        assert!(port.external_ips.is_empty() && !port.externally_accessible());
        assert_eq!(port.external_policy, TrafficPolicy::Cluster);
    }
    let [issue] = &converted.issues[..] else {
        panic!("{:?}", converted.issues)
    };
    assert_eq!(
        issue.reason,
        "spec.externalIPs are switched off in this cluster (--allow-external-ips) and are not \
         served; remove them"
    );
    let without = with_external_ips("", &off);
    assert!(without.issues.is_empty(), "{:?}", without.issues);
}

#[test]
fn a5_external_ips_are_unique() {
    let port = only("externalIPs: [192.0.2.1, 192.0.2.2, 192.0.2.001]");
    assert_eq!(texts(&port.external_ips), ["192.0.2.1", "192.0.2.2"]);
}

#[test]
fn special_addresses_are_refused() {
    for (ip, why) in [
        ("127.0.0.1", "is a loopback address"),
        ("0.0.0.0", "is in 0.0.0.0/8 (this host)"),
        ("224.0.0.1", "is a multicast address"),
        ("169.254.169.254", "is a link-local address"),
    ] {
        let reasons = reasons(&format!("externalIPs: ['{ip}'], {PORT}"));
        assert_eq!(
            reasons,
            [format!(
                "error: spec.externalIPs: {ip} {why} and is refused; use an address that is not \
                 special"
            )]
        );
        assert!(convert(&format!("clusterIP: '{ip}', {PORT}")).ports.is_empty());
    }
}

#[test]
fn a7_without_node_ports_a_load_balancer_is_served_at_its_addresses() {
    let converted = ingress("{ip: 192.0.2.1}", ", allocateLoadBalancerNodePorts: false");
    assert!(converted.issues.is_empty(), "{:?}", converted.issues);
    assert_eq!(converted.ports[0].node_port, None);
    assert_eq!(texts(&converted.ports[0].load_balancer_ips), ["192.0.2.1"]);
}

#[test]
fn a6_ingress_modes() {
    let converted = ingress(
        "{hostname: a.example}, {ip: 192.0.2.1}, {ip: 192.0.2.2, ipMode: VIP}, \
         {ip: 192.0.2.3, ipMode: Proxy}, {ip: 192.0.2.4, ipMode: Magic}",
        "",
    );
    assert_eq!(
        texts(&converted.ports[0].load_balancer_ips),
        ["192.0.2.1", "192.0.2.2"]
    );
    assert_eq!(
        converted.issues[0].reason,
        "status.loadBalancer.ingress: \"192.0.2.4\" has the unknown ipMode \"Magic\" and is not \
         captured; use VIP or Proxy"
    );
}

#[test]
fn a8_source_ranges() {
    let ranges = |ranges: &str| {
        let more = format!(", loadBalancerSourceRanges: [{ranges}]");
        let converted = ingress("{ip: 192.0.2.1}", &more);
        assert!(converted.issues.is_empty(), "{:?}", converted.issues);
        texts(&converted.ports[0].source_ranges)
    };
    assert_eq!(
        ranges("' 10.1.2.3/8 ', 10.0.0.0/8, 192.0.2.0/24"),
        ["10.0.0.0/8", "192.0.2.0/24"]
    );
    assert_eq!(ranges("10.0.0.0/8, 0.0.0.0/0"), [""; 0]);
    // The other family's ranges do not count, as in kube-proxy.
    assert_eq!(ranges("'fd00::/8'"), [""; 0]);
    assert_eq!(ranges("10.0.0.0/8, '::/0'"), ["10.0.0.0/8"]);
}

#[test]
fn a8_bad_source_ranges_fail_closed() {
    let served = |ranges: &str| {
        let more = format!(", loadBalancerSourceRanges: [{ranges}]");
        let converted = ingress("{ip: 192.0.2.1}", &more);
        let port = &converted.ports[0];
        (
            texts(&port.load_balancer_ips),
            texts(&port.source_ranges),
            converted.issues.iter().map(|i| i.reason.clone()).collect::<Vec<_>>(),
        )
    };
    let (ips, ranges, reasons) = served("10.0.0.0/33, 10.0.0.0/8");
    assert_eq!(
        (ips, ranges),
        (vec!["192.0.2.1".to_owned()], vec!["10.0.0.0/8".to_owned()])
    );
    assert_eq!(
        reasons,
        [
            "spec.loadBalancerSourceRanges: \"10.0.0.0/33\" is not an address prefix such as \
             10.0.0.0/8 or fd00::/8; this range admits no client, correct it"
        ]
    );
    for bad in ["10.0.0.0/33", "rubbish", "'rubbish', 'fd00::/8'", "''"] {
        let (ips, ranges, reasons) = served(bad);
        assert!(ips.is_empty() && ranges.is_empty(), "{bad}");
        assert_eq!(
            reasons.last().unwrap(),
            "no IPv4 range of spec.loadBalancerSourceRanges can be used, so the IPv4 \
             load-balancer addresses are not served at all; correct the ranges"
        );
    }
    let many = "10.0.0.0/8, ".repeat(MAX_SOURCE_RANGES + 1);
    let (ips, _, reasons) = served(&many);
    assert!(ips.is_empty());
    assert_eq!(
        reasons[0],
        "spec.loadBalancerSourceRanges has 1001 entries, more than 1000; merge or remove some"
    );
}

#[test]
fn a8_a_bad_range_of_the_other_family_does_not_matter() {
    let converted = ingress(
        "{ip: 192.0.2.1}",
        ", loadBalancerSourceRanges: ['fd00::/129', 10.0.0.0/8]",
    );
    assert_eq!(texts(&converted.ports[0].load_balancer_ips), ["192.0.2.1"]);
    let converted = ingress(
        "{ip: 192.0.2.1}",
        ", loadBalancerSourceRanges: ['fd00::/129']",
    );
    assert_eq!(texts(&converted.ports[0].load_balancer_ips), ["192.0.2.1"]);
    assert_eq!(converted.issues.len(), 1);
}
