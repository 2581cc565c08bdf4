//! Large fleets: healthy nodes are counted, and nodes with the same problem share a row.

use expect_test::expect;
use kpctl_samples as samples;
use kplane_proto::v1 as pb;

use super::super::View;
use super::super::describe::DescriptionView;
use super::super::fleet::FleetView;
use super::super::testing::{canvas, has, plain, table, wide};
use crate::style::Canvas;

const DOMAIN: &str = "eu-west-1.compute.internal";

/// Returns a fleet of 200 nodes: 5 have one problem, 1 another, 2 a third.
fn large() -> pb::Fleet {
    let name = |n: usize| format!("ip-10-0-{}-{}.{DOMAIN}", n / 50, n % 50);
    let nodes = (0..200).map(|n| match n {
        20..25 => {
            let mut node = samples::disconnected(&name(n));
            node.since_ms = samples::ago(60 * n as u64);
            node.last_heard_ms = node.since_ms;
            node
        }
        30 => samples::failing(&name(n)),
        40 | 41 => samples::no_agent(&name(n)),
        n => samples::node(&name(n)),
    });
    samples::fleet(nodes.collect())
}

#[test]
fn a_large_fleet_at_80_columns() {
    let view = FleetView::from(large());
    expect![[r#"
        Control plane   0.1.0, up 3h5m
        Source          manifests, last contact 2s ago
        Revision        4711, 12s ago, 10000 services, 20000 endpoints
        Nodes           192/200 in sync, 1 failing, 5 disconnected, 2 without an agent

        NODE          STATE         SINCE  APPLIED    VERIFIED   LAG  SYNC   OBJECTS
        ip-10-0-0-30  Failing       3m12s  4711       3m12s ago  -    412us  10000/20000
          5 objects are not applied as desired
          shop/web:http/TCP (IPv4): node port 30080 is in use by another program (pid
            4242, /usr/bin/haproxy); stop it or choose another port (for 3m12s)
          shop/cart:http/TCP (IPv4): node port 30080 is in use by another program (pid
            4242, /usr/bin/haproxy); stop it or choose another port (for 3m12s)
          shop/search:http/TCP (IPv4): node port 30080 is in use by another program (pid
            4242, /usr/bin/haproxy); stop it or choose another port (for 3m12s)
          and 1 object more: -o wide
        5 nodes       Disconnected  24m    4650/4711  3m12s ago  61   412us  10000/20000
          ip-10-0-0-20.eu-west-1.compute.internal,
            ip-10-0-0-21.eu-west-1.compute.internal,
            ip-10-0-0-22.eu-west-1.compute.internal,
            ip-10-0-0-23.eu-west-1.compute.internal,
            ip-10-0-0-24.eu-west-1.compute.internal
          connection reset by peer
          last contact 24m ago; the node's kernel keeps its rules
        ip-10-0-0-40  NoAgent       3d4h   -          -          -    -      -
        ip-10-0-0-41  NoAgent       3d4h   -          -          -    -      -
        All names in NODE end in .eu-west-1.compute.internal
        192 nodes in sync: kpctl status --all lists them

        DEGRADED                  NODES
        shop/api:http/TCP (IPv4)  1
          the kernel has no nft_fib: martian sources pass

        Next
          check that kp-nodeagent runs on ip-10-0-0-20.eu-west-1.compute.internal and 4
            more and reaches the control plane
          start kp-nodeagent on ip-10-0-0-40.eu-west-1.compute.internal and 1 more
          kpctl describe service shop/web
    "#]]
    .assert_eq(&table(&view));
    let canvas = Canvas {
        all: true,
        ..canvas()
    };
    let all = plain(&view.text(&canvas));
    assert_eq!(all.matches("\nip-10-0-").count(), 200, "{all}");
    assert_eq!(wide(&view).matches("\nip-10-0-").count(), 200);
}

#[test]
fn a_large_fleet_in_a_pipe() {
    let canvas = Canvas {
        columns: usize::MAX,
        ..canvas()
    };
    expect![[r#"
        Control plane   0.1.0, up 3h5m
        Source          manifests, last contact 2s ago
        Revision        4711, 12s ago, 10000 services, 20000 endpoints
        Nodes           192/200 in sync, 1 failing, 5 disconnected, 2 without an agent

        NODE                                     STATE         SINCE  APPLIED    VERIFIED   LAG  SYNC   OBJECTS      BACKEND
        ip-10-0-0-30.eu-west-1.compute.internal  Failing       3m12s  4711       3m12s ago  -    412us  10000/20000  nftables
          5 objects are not applied as desired
          shop/web:http/TCP (IPv4): node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy); stop it or choose another port (for 3m12s)
          shop/cart:http/TCP (IPv4): node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy); stop it or choose another port (for 3m12s)
          shop/search:http/TCP (IPv4): node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy); stop it or choose another port (for 3m12s)
          and 1 object more: -o wide
        5 nodes                                  Disconnected  24m    4650/4711  3m12s ago  61   412us  10000/20000  nftables
          ip-10-0-0-20.eu-west-1.compute.internal, ip-10-0-0-21.eu-west-1.compute.internal, ip-10-0-0-22.eu-west-1.compute.internal, ip-10-0-0-23.eu-west-1.compute.internal, ip-10-0-0-24.eu-west-1.compute.internal
          connection reset by peer
          last contact 24m ago; the node's kernel keeps its rules
        ip-10-0-0-40.eu-west-1.compute.internal  NoAgent       3d4h   -          -          -    -      -            -
        ip-10-0-0-41.eu-west-1.compute.internal  NoAgent       3d4h   -          -          -    -      -            -
        192 nodes in sync: kpctl status --all lists them

        DEGRADED                  NODES
        shop/api:http/TCP (IPv4)  1
          the kernel has no nft_fib: martian sources pass

        Next
          check that kp-nodeagent runs on ip-10-0-0-20.eu-west-1.compute.internal and 4 more and reaches the control plane
          start kp-nodeagent on ip-10-0-0-40.eu-west-1.compute.internal and 1 more
          kpctl describe service shop/web
    "#]]
    .assert_eq(&plain(&FleetView::from(large()).text(&canvas)));
}

#[test]
fn a_large_fleet_without_problems() {
    let nodes = (0..5_000).map(|n| samples::node(&format!("node-{n}")));
    let fleet = samples::fleet(nodes.collect());
    expect![[r#"
        Control plane   0.1.0, up 3h5m
        Source          manifests, last contact 2s ago
        Revision        4711, 12s ago, 10000 services, 20000 endpoints
        Nodes           5000/5000 in sync

        5,000 nodes in sync: kpctl status --all lists them
    "#]]
    .assert_eq(&table(&FleetView::from(fleet)));
}

#[test]
fn the_worst_rows_of_many_different_problems() {
    let nodes = (0..120).map(|n| {
        let mut node = samples::failing(&format!("node-{n}"));
        node.last_error = format!("problem {n}");
        node.report.as_mut().unwrap().failures.clear();
        node
    });
    let text = table(&FleetView::from(samples::fleet(nodes.collect())));
    assert_eq!(text.matches("Failing").count(), 50, "{text}");
    has(&text, "\n70 nodes more: kpctl status --all\n");
}

#[test]
fn a_service_on_a_large_fleet() {
    let mut description = samples::description();
    let node = |n: usize, template: &pb::NodeServiceStatus| pb::NodeServiceStatus {
        node: format!("node-{n}.{DOMAIN}"),
        ..template.clone()
    };
    let [held, missing] = [0, 2].map(|at| description.nodes[at].clone());
    description.issues.clear();
    assert!(held.programmed && !missing.programmed);
    description.nodes = (0..5_000)
        .map(|n| match n {
            7..20 => {
                let mut node = node(n, &missing);
                node.reason = format!("applied revision {} of 4711", 4_600 + n);
                node
            }
            n => node(n, &held),
        })
        .collect();
    let view = DescriptionView::new("shop", "web", description);
    let text = table(&view);
    let (_, nodes) = text.split_once("\nNODE ").unwrap();
    expect![[r#"
        NODE      PROGRAMMED  APPLIED    CLUSTER  LOCAL  LATENCY  CHANGED
        13 nodes  No          4650/4711  3        1      1.2s     14m ago
          node-10.eu-west-1.compute.internal, node-11.eu-west-1.compute.internal,
            node-12.eu-west-1.compute.internal, node-13.eu-west-1.compute.internal,
            node-14.eu-west-1.compute.internal, node-15.eu-west-1.compute.internal,
            node-16.eu-west-1.compute.internal, node-17.eu-west-1.compute.internal and 5
            more
          applied revision 4607 of 4711
        4,987 nodes hold it: kpctl describe service shop/web --all lists them

        Next
          kpctl status
    "#]]
    .assert_eq(&format!("NODE {nodes}"));
    assert!(text.len() < 10_000, "{}", text.len());
}
