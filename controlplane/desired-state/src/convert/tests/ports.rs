use super::service::{convert, reasons};

#[test]
fn a3_a7_z7_ports() {
    let converted = convert(
        "clusterIP: 10.0.0.1, ports: [{name: dns, port: 53, protocol: UDP}, \
         {name: dns, port: 53, nodePort: 30053}, {name: sctp, port: 53, protocol: SCTP, \
         nodePort: 0}]",
    );
    let keys: Vec<String> = converted.ports.iter().map(|port| port.key.to_string()).collect();
    assert_eq!(
        keys,
        [
            "shop/web:dns/UDP (IPv4)",
            "shop/web:dns/TCP (IPv4)",
            "shop/web:sctp/SCTP (IPv4)"
        ]
    );
    let node_ports: Vec<_> = converted.ports.iter().map(|port| port.node_port).collect();
    assert_eq!(node_ports, [None, Some(30053), None]);
    assert!(converted.issues.is_empty());
}

#[test]
fn bad_ports_leave_the_others() {
    for (port, expected) in [
        (
            "port: 0",
            "error: spec.ports[0] has the port 0 and is not served; use 1..=65535",
        ),
        (
            "port: -1",
            "error: spec.ports[0] has the port -1 and is not served; use 1..=65535",
        ),
        (
            "port: 65536",
            "error: spec.ports[0] has the port 65536 and is not served; use 1..=65535",
        ),
        (
            "port: 1, protocol: ICMP",
            "error: spec.ports[0] is not served: unknown protocol \"ICMP\": use TCP, UDP or SCTP",
        ),
        (
            "port: 1, name: 'a\"; drop'",
            "error: spec.ports[0] has the name \"a\\\"; drop\" and is not served; use up to 63 \
             lower-case letters, digits and -",
        ),
    ] {
        let spec = format!("ports: [{{{port}}}, {{name: good, port: 80}}]");
        assert_eq!(reasons(&spec), [expected]);
        let converted = convert(&format!("clusterIP: 10.0.0.1, {spec}"));
        assert_eq!(converted.ports.len(), 1);
        assert_eq!(&*converted.ports[0].key.port_name, "good");
    }
    assert_eq!(
        reasons("ports: [{port: 80, nodePort: 70000}]"),
        ["error: spec.ports[0].nodePort 70000 is not served; use 1..=65535, or 0 for none"]
    );
}

#[test]
fn z7_duplicate_ports_are_refused() {
    assert_eq!(
        reasons("ports: [{name: a, port: 80}, {name: a, port: 81}, {name: b, port: 80}]"),
        [
            "error: spec.ports[1] has the name \"a\" and protocol TCP of an earlier port and is \
             not served; rename it",
            "error: spec.ports[2] is 80/TCP as an earlier port and is not served; remove it",
        ]
    );
}
