use kplane_model::{Family, IpvsScheduler, ServicePort, TrafficPolicy};

use super::{lines, yaml};
use crate::convert::{
    ConvertedService, ExternalIps, MAX_ISSUES_PER_OBJECT, MAX_SERVICE_ADDRESSES, MAX_SERVICE_PORTS,
    SkipReason, service,
};

pub(super) const PORT: &str = "ports: [{port: 80}]";

/// A Service with this spec.
pub(super) fn convert(spec: &str) -> ConvertedService {
    whole(&format!(
        "metadata: {{name: web, namespace: shop}}\nspec: {{{spec}}}"
    ))
}

pub(super) fn whole(text: &str) -> ConvertedService {
    allowing(text, &ExternalIps::All)
}

/// Converts a Service with this spec, under an operator's restriction of external addresses.
pub(super) fn allowing(text: &str, allowed: &ExternalIps) -> ConvertedService {
    service(&yaml(text), "shop.yaml, document 1, line 1", allowed)
}

/// The only port of a Service with this spec and one cluster address, without issues.
pub(super) fn only(spec: &str) -> ServicePort {
    let converted = convert(&format!("clusterIP: 10.0.0.1, {PORT}, {spec}"));
    assert_eq!(lines(&converted.issues), [""; 0]);
    let [port] = <[ServicePort; 1]>::try_from(converted.ports).unwrap();
    port
}

/// The reasons of the issues of a Service with this spec and one cluster address.
pub(super) fn reasons(spec: &str) -> Vec<String> {
    let converted = convert(&format!("clusterIP: 10.0.0.1, {spec}"));
    converted
        .issues
        .iter()
        .map(|issue| format!("{}: {}", issue.severity, issue.reason))
        .collect()
}

pub(super) fn texts<T: ToString>(items: &[T]) -> Vec<String> {
    items.iter().map(ToString::to_string).collect()
}

/// A load-balancer Service with these ingress entries.
pub(super) fn ingress(entries: &str, more: &str) -> ConvertedService {
    whole(&format!(
        "metadata: {{name: web}}\n\
         spec: {{type: LoadBalancer, clusterIP: 10.0.0.1, {PORT}{more}}}\n\
         status: {{loadBalancer: {{ingress: [{entries}]}}}}"
    ))
}

#[test]
fn a1_not_ours_to_serve() {
    let of_spec = [
        ("clusterIP: None", SkipReason::Headless),
        ("clusterIPs: [None]", SkipReason::Headless),
        (
            "type: ExternalName, clusterIP: 10.0.0.1, externalName: db.example.org",
            SkipReason::ExternalName("db.example.org".into()),
        ),
        ("type: ExternalName", SkipReason::ExternalName("".into())),
    ];
    for (spec, reason) in of_spec {
        let converted = convert(&format!("{spec}, {PORT}"));
        assert_eq!(converted.skipped, Some(reason), "{spec}");
        assert!(
            converted.ports.is_empty() && converted.issues.is_empty(),
            "{spec}"
        );
    }
    let label = "service.kubernetes.io/service-proxy-name";
    for value in ["other", ""] {
        let converted = whole(&format!(
            "metadata: {{name: web, labels: {{{label}: '{value}'}}}}\n\
             spec: {{clusterIP: 10.0.0.1, {PORT}}}"
        ));
        assert_eq!(converted.skipped, Some(SkipReason::OtherProxy));
        assert!(converted.ports.is_empty() && converted.issues.is_empty());
    }
}

#[test]
fn a1_no_cluster_address_is_told() {
    for spec in ["", "clusterIP: ''", "clusterIPs: []"] {
        let converted = convert(spec);
        assert_eq!(converted.skipped, Some(SkipReason::NoClusterIp));
        assert_eq!(
            lines(&converted.issues),
            [
                "warning: shop.yaml, document 1, line 1: Service shop/web: spec.clusterIP is not \
                 set, so there is nothing to serve; the API server assigns one, in a manifest \
                 write it yourself, or `None` if the Service is headless"
            ]
        );
    }
}

#[test]
fn a2_z2_families_by_index_of_ip_families() {
    let converted = convert(&format!(
        "clusterIP: 'fd00::1', clusterIPs: ['fd00::1', 10.0.0.1], ipFamilies: [IPv6, IPv4], {PORT}"
    ));
    let found: Vec<_> = converted
        .ports
        .iter()
        .map(|p| (p.key.family, p.cluster_ip.to_string()))
        .collect();
    assert_eq!(
        found,
        [
            (Family::V6, "fd00::1".to_owned()),
            (Family::V4, "10.0.0.1".to_owned())
        ]
    );
    assert!(converted.issues.is_empty());
}

#[test]
fn a2_without_ip_families_the_cluster_ip_decides() {
    assert_eq!(only("sessionAffinity: None").key.family, Family::V4);
    let converted = convert(&format!("clusterIPs: ['fd00::1', 10.0.0.1], {PORT}"));
    assert_eq!(converted.ports.len(), 1);
    assert_eq!(converted.ports[0].key.family, Family::V6);
    assert_eq!(
        converted.issues[0].reason,
        "spec.clusterIPs 10.0.0.1 is not served because spec.ipFamilies does not name its family; \
         add IPv4 to spec.ipFamilies"
    );
}

#[test]
fn a2_one_bad_family_leaves_the_other() {
    for (spec, expected) in [
        (
            "clusterIPs: [10.0.0.1, 'fd00::g'], ipFamilies: [IPv4, IPv6]",
            "error: spec.clusterIPs: \"fd00::g\" is not an IP address; correct or remove it",
        ),
        (
            "clusterIPs: [10.0.0.1, 10.0.0.2], ipFamilies: [IPv4, IPv6]",
            "error: spec.clusterIPs 10.0.0.2 is an IPv4 address but spec.ipFamilies[1] is \
             \"IPv6\"; make the two agree",
        ),
        (
            "clusterIPs: [10.0.0.1, 10.0.0.2], ipFamilies: [IPv4, IPv4]",
            "error: spec.clusterIPs 10.0.0.2 is not served because the Service has another IPv4 \
             address; a Service has one address a family",
        ),
        (
            "clusterIPs: [10.0.0.1], ipFamilies: [IPv4, IPv6]",
            "warning: spec.ipFamilies names \"IPv6\" but spec.clusterIPs has no address for it; \
             add one",
        ),
        (
            "clusterIPs: [10.0.0.1, '::1'], ipFamilies: [IPv4, IPv6]",
            "error: spec.clusterIPs: ::1 is a loopback address and is refused; use an address \
             that is not special",
        ),
    ] {
        let converted = convert(&format!("{spec}, {PORT}"));
        assert_eq!(converted.ports.len(), 1, "{spec}");
        let issue = &converted.issues[0];
        assert_eq!(format!("{}: {}", issue.severity, issue.reason), expected);
    }
}

/// Extension of D7.
#[test]
fn d7_a_service_may_name_its_scheduler() {
    let named = |name: &str| {
        whole(&format!(
            "metadata: {{name: web, annotations: {{kplane.io/ipvs-scheduler: {name}, other: text}}}}\n\
             spec: {{clusterIP: 10.0.0.1, {PORT}}}"
        ))
    };
    let converted = named("mh");
    let scheduler = converted.ports[0].ipvs_scheduler;
    assert_eq!(scheduler.map(IpvsScheduler::as_str), Some("mh"));
    assert_eq!(lines(&converted.issues), [""; 0]);
    let converted = named("random");
    assert_eq!(converted.ports[0].ipvs_scheduler, None);
    let reason = &converted.issues[0].reason;
    assert!(reason.contains("use one of rr, wrr, lc"), "{reason}");
}

#[test]
fn a11_affinity() {
    assert_eq!(only("sessionAffinity: None").affinity_timeout_s, None);
    assert_eq!(
        only("sessionAffinity: ClientIP").affinity_timeout_s,
        Some(10_800)
    );
    let config = |seconds: i64| {
        format!(
            "sessionAffinity: ClientIP, \
             sessionAffinityConfig: {{clientIP: {{timeoutSeconds: {seconds}}}}}"
        )
    };
    assert_eq!(only(&config(1)).affinity_timeout_s, Some(1));
    assert_eq!(only(&config(86_400)).affinity_timeout_s, Some(86_400));
    for seconds in [0, -5, 86_401, i64::MAX] {
        let spec = format!("clusterIP: 10.0.0.1, {PORT}, {}", config(seconds));
        let converted = convert(&spec);
        assert_eq!(converted.ports[0].affinity_timeout_s, Some(10_800));
        assert_eq!(
            converted.issues[0].reason,
            format!(
                "spec.sessionAffinityConfig.clientIP.timeoutSeconds {seconds} is not in \
                 1..=86400; 10800 is used"
            )
        );
    }
    assert_eq!(
        reasons(&format!("sessionAffinity: Cookie, {PORT}")),
        [
            "error: spec.sessionAffinity \"Cookie\" is unknown and counts as None; use ClientIP or \
             None"
        ]
    );
}

#[test]
fn a12_internal_policy() {
    assert_eq!(
        only("internalTrafficPolicy: Cluster").internal_policy,
        TrafficPolicy::Cluster
    );
    assert_eq!(
        only("internalTrafficPolicy: Local").internal_policy,
        TrafficPolicy::Local
    );
    assert_eq!(
        reasons(&format!("internalTrafficPolicy: Nearby, {PORT}")),
        [
            "error: spec.internalTrafficPolicy \"Nearby\" is unknown and counts as Cluster; use \
             Cluster or Local"
        ]
    );
}

#[test]
fn a13_external_policy_counts_where_accessible() {
    let policy =
        |spec: &str| only(&format!("externalTrafficPolicy: Local, {spec}")).external_policy;
    assert_eq!(policy("type: ClusterIP"), TrafficPolicy::Cluster);
    assert_eq!(policy("externalIPs: []"), TrafficPolicy::Cluster);
    assert_eq!(policy("externalIPs: [192.0.2.1]"), TrafficPolicy::Local);
    assert_eq!(policy("type: NodePort"), TrafficPolicy::Local);
    assert_eq!(
        policy("type: LoadBalancer, healthCheckNodePort: 1"),
        TrafficPolicy::Local
    );
    assert_eq!(
        only("type: NodePort").external_policy,
        TrafficPolicy::Cluster
    );
}

#[test]
fn a14_externally_accessible() {
    let node_port = |port: u16| {
        let ports = format!("type: NodePort, ports: [{{port: 80, nodePort: {port}}}]");
        convert(&format!("clusterIP: 10.0.0.1, {ports}")).ports[0].externally_accessible()
    };
    assert!(node_port(30_000) && !node_port(0));
    assert!(!only("internalTrafficPolicy: Cluster").externally_accessible());
    assert!(only("externalIPs: [192.0.2.1]").externally_accessible());
    assert!(ingress("{ip: 192.0.2.1}", "").ports[0].externally_accessible());
    assert!(!ingress("{ip: 192.0.2.1, ipMode: Proxy}", "").ports[0].externally_accessible());
}

#[test]
fn a22_health_check_node_port() {
    let local = "externalTrafficPolicy: Local, healthCheckNodePort: 31000";
    let port = |spec: &str| only(spec).health_check_node_port;
    assert_eq!(port(&format!("type: LoadBalancer, {local}")), Some(31_000));
    assert_eq!(port(&format!("type: NodePort, {local}")), None);
    assert_eq!(port("type: LoadBalancer, healthCheckNodePort: 31000"), None);
    let spec = format!("type: LoadBalancer, externalTrafficPolicy: Local, {PORT}");
    assert_eq!(
        reasons(&spec),
        [
            "warning: spec.healthCheckNodePort is 0, so load balancers cannot ask which nodes have \
             endpoints; set it to 1..=65535"
        ]
    );
}

#[test]
fn unknown_type_counts_as_cluster_ip() {
    assert_eq!(
        reasons(&format!("type: Fancy, {PORT}")),
        [
            "error: spec.type \"Fancy\" is unknown and counts as ClusterIP; use ClusterIP, \
             NodePort, LoadBalancer or ExternalName"
        ]
    );
}

#[test]
fn absurd_sizes_are_cut_and_told() {
    let ports: String = (1..=MAX_SERVICE_PORTS + 1)
        .map(|n| format!("{{name: p{n}, port: {n}}}, "))
        .collect();
    let converted = convert(&format!("clusterIP: 10.0.0.1, ports: [{ports}]"));
    assert_eq!(converted.ports.len(), MAX_SERVICE_PORTS);
    assert_eq!(
        converted.issues[0].reason,
        "spec.ports has 1001 entries; only the first 1000 are served, split the Service"
    );

    let ips: String = (0..=MAX_SERVICE_ADDRESSES)
        .map(|n| format!("192.1.{}.{}, ", n / 250, n % 250))
        .collect();
    let converted = convert(&format!(
        "clusterIP: 10.0.0.1, externalIPs: [{ips}], {PORT}"
    ));
    assert_eq!(converted.ports[0].external_ips.len(), MAX_SERVICE_ADDRESSES);
    assert_eq!(converted.issues.len(), 1);

    let bad = "{port: 0}, ".repeat(100);
    let converted = convert(&format!("clusterIP: 10.0.0.1, ports: [{bad}]"));
    assert_eq!(converted.issues.len(), MAX_ISSUES_PER_OBJECT + 1);
    assert_eq!(
        converted.issues.last().unwrap().reason,
        "has 80 further problems that are not listed; fix the listed ones first"
    );
}
