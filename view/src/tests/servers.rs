//! Virtual and real servers of nodes with IPVS.

use expect_test::expect;
use kplane_proto::v1 as pb;

use super::super::describe::DescriptionView;
use super::super::fleet::FleetView;
use super::super::testing::{has, table, wide};
use kpctl_samples::{self as samples, fleet};

fn described(description: pb::ServiceDescription) -> DescriptionView {
    DescriptionView::new("shop", "web", description)
}

fn ipvs_fleet() -> FleetView {
    FleetView::from(fleet(vec![
        samples::ipvs_node("node-a"),
        samples::node("node-b"),
    ]))
}

/// Returns the text from the first line that begins with `begin`.
fn from<'a>(text: &'a str, begin: &str) -> &'a str {
    let at = text.find(&format!("\n{begin}")).unwrap();
    &text[at + 1..]
}

#[test]
fn status_counts_what_drains() {
    expect![[r#"
        NODE    STATE   SINCE  APPLIED  VERIFIED   LAG  SYNC   OBJECTS      BACKEND
        node-a  InSync  3h     4711     3m12s ago  -    412us  10000/20000  ipvs
        node-b  InSync  3h     4711     3m12s ago  -    412us  10000/20000  nftables
    "#]]
    .assert_eq(from(&table(&ipvs_fleet()), "NODE "));
}

#[test]
fn wide_status_names_what_drains() {
    expect![[r#"
        NODE    STATE   SINCE  RECEIVED  APPLIED  VERIFIED-REV  VERIFIED   LAG  SYNC   KERNEL  CHANGE-P50  CHANGE-MAX  OBJECTS      BACKEND   ACTIVE  INACTIVE  DRAINING
        node-a  InSync  3h     4711      4711     4711          3m12s ago  -    412us  341us   9ms         1.3s        10000/20000  ipvs      13      3         1
          IPv4: 10000 virtual servers, 20001 real servers, 1 draining; 13 active connections, 3 inactive
          draining: 10.244.3.9:8080 of shop/web:http/TCP (IPv4) at 10.96.0.10:80: 1 active connection, 0 inactive
        node-b  InSync  3h     4711      4711     4711          3m12s ago  -    412us  341us   9ms         1.3s        10000/20000  nftables  -       -         -
    "#]].assert_eq(from(&wide(&ipvs_fleet()), "NODE "));
}

#[test]
fn wide_status_says_how_many_more_drain() {
    let mut node = samples::ipvs_node("node-a");
    let family = &mut node.report.as_mut().unwrap().families[0];
    family.servers.as_mut().unwrap().draining = 40;
    let text = wide(&FleetView::from(fleet(vec![node])));
    has(&text, "\n  and 39 more draining\n");
}

#[test]
fn without_ipvs_there_is_nothing_of_it() {
    let view = FleetView::from(samples::healthy_fleet());
    for text in [table(&view), wide(&view)] {
        assert!(
            !text.contains("DRAINING") && !text.contains("virtual"),
            "{text}"
        );
    }
    let view = described(samples::description());
    for text in [table(&view), wide(&view)] {
        assert!(
            !text.contains("\nIPVS  ") && !text.contains("REAL"),
            "{text}"
        );
    }
}

#[test]
fn describe_shows_real_servers_those_that_drain_first() {
    let mut description = samples::ipvs_description();
    description.findings.clear();
    description.ports.clear();
    let text = table(&described(description));
    expect![[r#"
        IPVS            2 nodes, 17 active connections, 4 inactive,
                        1 real server draining

        NODE    PROGRAMMED  APPLIED    CLUSTER  LOCAL  LATENCY  CHANGED
        node-a  Yes         4711       3        1      12ms     3m12s ago
        node-b  Yes         4711       3        1      12ms     3m12s ago
          real servers: the agent did not answer within 2 s
        node-c  No          4650/4711  3        1      1.2s     14m ago
          node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy);
            stop it or choose another port

        REAL SERVER       WEIGHT  ACTIVE  INACTIVE  STATE     VIRTUAL SERVER      NODE
        10.244.3.9:8080   0       1       0         Draining  10.96.0.10:80/TCP   node-a
        10.244.1.12:8080  1       12      3         Serving   10.96.0.10:80/TCP   node-a
        10.244.2.7:8080   1       4       1         Serving   203.0.113.7:80/TCP  node-a
        10.244.2.7:8080   1       0       0         Serving   10.96.0.10:80/TCP   node-a

        ISSUE  OBJECT                 LOCATION
        Error  Service shop/checkout  shop.yaml, document 2, line 14
          InvalidPort: port 99999 is not between 1 and 65535; the Service is served as
            it was before this change

        Next
          kpctl status
          fix Service shop/checkout in shop.yaml, document 2, line 14
    "#]]
    .assert_eq(from(&text, "IPVS "));
}

#[test]
fn wide_describe_shows_how_virtual_servers_work() {
    let mut description = samples::ipvs_description();
    description.issues.clear();
    let text = wide(&described(description));
    expect![[r#"
        REAL SERVER       WEIGHT  ACTIVE  INACTIVE  STATE     VIRTUAL SERVER      SCHEDULER  PERSISTENCE  NODE    COUNTED
        10.244.3.9:8080   0       1       0         Draining  10.96.0.10:80/TCP   rr         3h           node-a  1s ago
        10.244.1.12:8080  1       12      3         Serving   10.96.0.10:80/TCP   rr         3h           node-a  1s ago
        10.244.2.7:8080   1       4       1         Serving   203.0.113.7:80/TCP  rr         -            node-a  1s ago
        10.244.2.7:8080   1       0       0         Serving   10.96.0.10:80/TCP   rr         3h           node-a  1s ago

        Next
          kpctl status
    "#]].assert_eq(from(&text, "REAL SERVER"));
}

#[test]
fn describe_shows_so_many_real_servers_and_what_was_left_out() {
    let mut description = samples::ipvs_description();
    let servers = description.nodes[0].servers.as_mut().unwrap();
    let reals = &mut servers.servers[0].real_servers;
    *reals = vec![reals[0].clone(); 30];
    servers.more = 500;
    let view = described(description);
    let text = table(&view);
    let rows = text.lines().filter(|line| line.contains("  Serving  "));
    assert_eq!(rows.count(), 20, "{text}");
    has(&text, "\n11 real servers more: -o wide\n");
    let left = "\n  500 real servers more, not listed by the agent\n";
    has(&text, left);
    let text = wide(&view);
    let rows = text.lines().filter(|line| line.contains("  Serving  "));
    assert_eq!(rows.count(), 31, "{text}");
}

#[test]
fn long_addresses_and_names_fit() {
    let mut description = samples::ipvs_description();
    description.nodes[0].node = "ip-10-0-12-34.eu-west-1.compute.internal".to_owned();
    let servers = description.nodes[0].servers.as_mut().unwrap();
    let server = &mut servers.servers[0];
    server.address = "[fd00:1234:5678:9abc:def0:1234:5678:9abc]:65535".to_owned();
    server.real_servers[0].address.clone_from(&server.address);
    server.real_servers[0].active_connections = 1_234_567;
    table(&described(description));
}
