//! The fleet at 80 columns.

use expect_test::expect;
use kplane_proto::v1 as pb;

use super::super::approve::ApprovalView;
use super::super::fleet::FleetView;
use super::super::nodes::NodeListView;
use super::super::testing::{canvas, has, only_wide, plain, table, wide};
use super::super::{View, issues_text};
use crate::style::Canvas;
use kpctl_samples::{self as samples, fleet};

fn status(fleet: pb::Fleet) -> String {
    table(&FleetView::from(fleet))
}

/// Returns what `status` shows below the control plane.
fn without_plane(fleet: pb::Fleet) -> String {
    let text = status(fleet);
    text[text.find("\nNodes ").unwrap() + 1..].to_owned()
}

#[test]
fn in_sync() {
    expect![[r#"
        Control plane   0.1.0, up 3h5m
        Source          manifests, last contact 2s ago
        Revision        4711, 12s ago, 10000 services, 20000 endpoints
        Nodes           3/3 in sync

        NODE    STATE   SINCE  APPLIED  VERIFIED   LAG  SYNC   OBJECTS      BACKEND
        node-a  InSync  3h     4711     3m12s ago  -    412us  10000/20000  nftables
        node-b  InSync  3h     4711     3m12s ago  -    412us  10000/20000  nftables
        node-c  InSync  3h     4711     3m12s ago  -    412us  10000/20000  nftables
    "#]]
    .assert_eq(&status(samples::healthy_fleet()));
}

#[test]
fn a_control_plane_that_holds() {
    expect![[r#"
        Control plane   0.1.0, up 3h5m
        Source          manifests, last contact 2s ago
        Data            incomplete: api.yaml is refused in document 2, line 14: is not
                        valid YAML: unclosed bracket '['; fix that, or run `kpctl
                        approve` if nothing is missing
        Held            991 services, the last endpoints of 3 services, for 3m12s
                        they are missing from the source, and 991 of 1001 Services would
                        be removed
                        shop/api, shop/cart, shop/search, shop/web and 990 more
        Revision        4711, 12s ago, 10000 services, 20000 endpoints
        Nodes           3/3 in sync

        NODE    STATE   SINCE  APPLIED  VERIFIED   LAG  SYNC   OBJECTS      BACKEND
        node-a  InSync  3h     4711     3m12s ago  -    412us  10000/20000  nftables
        node-b  InSync  3h     4711     3m12s ago  -    412us  10000/20000  nftables
        node-c  InSync  3h     4711     3m12s ago  -    412us  10000/20000  nftables

        Next
          kpctl approve, if the source is complete
    "#]]
    .assert_eq(&status(samples::holding_fleet()));
}

#[test]
fn a_control_plane_in_plain_text() {
    let mut fleet = samples::healthy_fleet();
    fleet.nodes.clear();
    let ports = ["agents on 0.0.0.0:7465", "the status API on 0.0.0.0:7466"];
    let status_of_plane = fleet.control_plane.as_mut().unwrap();
    status_of_plane.plain_text_ports = ports.map(str::to_owned).to_vec();
    expect![[r#"
        Control plane   0.1.0, up 3h5m
        Plain text      agents on 0.0.0.0:7465, the status API on 0.0.0.0:7466: any
                        machine that reaches these ports can pose as any node or user
                        (--insecure)
        Source          manifests, last contact 2s ago
        Revision        4711, 12s ago, 10000 services, 20000 endpoints
        Nodes           none

        Next
          no agent has connected yet: start kp-nodeagent on every node
    "#]]
    .assert_eq(&status(fleet));
}

#[test]
fn what_there_is_to_approve() {
    let mut fleet = samples::holding_fleet();
    let report = fleet.nodes[1].report.as_mut().unwrap();
    report.held = fleet.control_plane.as_ref().unwrap().held.clone();
    let pending = ApprovalView::from(fleet);
    expect![[r#"
        Held            991 services, the last endpoints of 3 services, for 3m12s
                        they are missing from the source, and 991 of 1001 Services would
                        be removed
                        shop/api, shop/cart, shop/search, shop/web and 990 more
        Incomplete      api.yaml is refused in document 2, line 14: is not valid YAML:
                        unclosed bracket '['; fix that, or run `kpctl approve` if
                        nothing is missing
        Held by nodes   node-b
    "#]]
    .assert_eq(&table(&pending));
    let done = ApprovalView::from(pb::ApproveResponse {
        released: samples::holding_fleet().control_plane.unwrap().held,
        nodes: (0..9).map(|n| format!("node-{n}")).collect(),
        revision: 4712,
        ..Default::default()
    });
    expect![[r#"
        Approved: objects that are missing from the source are removed.
        Removed         991 services, the last endpoints of 3 services
                        they are missing from the source, and 991 of 1001 Services would
                        be removed
                        shop/api, shop/cart, shop/search, shop/web and 990 more
        On nodes        node-0, node-1, node-2, node-3, node-4, 4 more
    "#]]
    .assert_eq(&table(&done));
    let nothing = ApprovalView::from(samples::healthy_fleet());
    expect![[r#"
        Nothing waits for approval.
    "#]]
    .assert_eq(&table(&nothing));
}

#[test]
fn trouble_of_every_kind() {
    expect![[r#"
        Nodes           1/5 in sync, 1 syncing, 1 failing, 1 disconnected,
                        1 without an agent

        NODE    STATE         SINCE  APPLIED    VERIFIED   LAG  SYNC   OBJECTS
        node-a  InSync        3h     4711       3m12s ago  -    412us  10000/20000
        node-b  Syncing       4s     4698/4711  3m12s ago  13   3.1ms  10000/20000
        node-c  Failing       3m12s  4711       3m12s ago  -    412us  10000/20000
          5 objects are not applied as desired
          shop/web:http/TCP (IPv4): node port 30080 is in use by another program (pid
            4242, /usr/bin/haproxy); stop it or choose another port (for 3m12s)
          shop/cart:http/TCP (IPv4): node port 30080 is in use by another program (pid
            4242, /usr/bin/haproxy); stop it or choose another port (for 3m12s)
          shop/search:http/TCP (IPv4): node port 30080 is in use by another program (pid
            4242, /usr/bin/haproxy); stop it or choose another port (for 3m12s)
          and 1 object more: -o wide
        node-d  Disconnected  14m    4650/4711  3m12s ago  61   412us  10000/20000
          connection reset by peer
          last contact 14m ago; the node's kernel keeps its rules
        node-e  NoAgent       3d4h   -          -          -    -      -

        DEGRADED                  NODES
        shop/api:http/TCP (IPv4)  1
          the kernel has no nft_fib: martian sources pass

        ISSUE    OBJECT                        LOCATION
        Error    Service shop/checkout         shop.yaml, document 2, line 14
          InvalidPort: port 99999 is not between 1 and 65535; the Service is served as
            it was before this change
        Warning  EndpointSlice shop/api-7xk2p  shop.yaml, document 7, line 91
          InvalidAddress: endpoint 127.0.0.1 is a loopback address and is left out

        Next
          kpctl describe service shop/web
          fix Service shop/checkout in shop.yaml, document 2, line 14
          check that kp-nodeagent runs on node-d and reaches the control plane
          start kp-nodeagent on node-e
    "#]]
    .assert_eq(&without_plane(samples::troubled_fleet()));
}

#[test]
fn wide_shows_everything() {
    expect![[r#"
        Nodes           1/5 in sync, 1 syncing, 1 failing, 1 disconnected, 1 without an agent
        NODE    STATE         SINCE  RECEIVED  APPLIED    VERIFIED-REV  VERIFIED   LAG  SYNC   KERNEL  CHANGE-P50  CHANGE-MAX  OBJECTS      BACKEND
        node-a  InSync        3h     4711      4711       4711          3m12s ago  -    412us  341us   9ms         1.3s        10000/20000  nftables
        node-b  Syncing       4s     4711      4698/4711  4698          3m12s ago  13   3.1ms  341us   9ms         1.3s        10000/20000  nftables
        node-c  Failing       3m12s  4711      4711       4711          3m12s ago  -    412us  341us   9ms         1.3s        10000/20000  nftables
          shop/web:http/TCP (IPv4): node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy); stop it or choose another port (for 3m12s)
          shop/api:http/TCP (IPv4): degraded: the kernel has no nft_fib: martian sources pass (for 3m12s)
          shop/cart:http/TCP (IPv4): node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy); stop it or choose another port (for 3m12s)
          shop/search:http/TCP (IPv4): node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy); stop it or choose another port (for 3m12s)
          shop/login:http/TCP (IPv4): node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy); stop it or choose another port (for 3m12s)
        node-d  Disconnected  14m    4650      4650/4711  4650          3m12s ago  61   412us  341us   9ms         1.3s        10000/20000  nftables
        node-e  NoAgent       3d4h   -         -          -             -          -    -      -       -           -           -            -
          InvalidPort: port 99999 is not between 1 and 65535; the Service is served as it was before this change
    "#]].assert_eq(&only_wide(&FleetView::from(samples::troubled_fleet())));
}

#[test]
fn a_node_that_keeps_what_nobody_names() {
    let mut node = samples::node("node-a");
    node.set_state(pb::NodeState::Holding);
    node.last_error =
        "keeps 991 Services missing from the source, because 991 of 1001 Services would be removed \
         at once: fix the source, or run `kpctl approve`"
            .to_owned();
    node.report.as_mut().unwrap().held = Some(pb::Held {
        services: 991,
        examples: vec!["shop/a".into(), "shop/b".into()],
        ..pb::Held::default()
    });
    let nodes = vec![node, samples::node("node-b")];
    expect![[r#"
        Nodes           1/2 in sync, 1 holding vanished objects

        NODE    STATE    SINCE  APPLIED  VERIFIED   LAG  SYNC   OBJECTS      BACKEND
        node-a  Holding  3h     4711     3m12s ago  -    412us  10000/20000  nftables
          keeps 991 Services missing from the source, because 991 of 1001 Services would
            be removed at once: fix the source, or run `kpctl approve`
        node-b  InSync   3h     4711     3m12s ago  -    412us  10000/20000  nftables

        Next
          kpctl approve, if the objects held by node-a are really gone
    "#]]
    .assert_eq(&without_plane(fleet(nodes.clone())));
    let wide = wide(&FleetView::from(fleet(nodes)));
    has(&wide, "  kept: shop/a, shop/b and 989 more\n");
}

#[test]
fn empty_fleet_before_the_source_is_complete() {
    let mut fleet = fleet(Vec::new());
    let plane = fleet.control_plane.as_mut().unwrap();
    plane.synced = false;
    plane.upstream_age_ms = 200_000;
    expect![[r#"
        Control plane   0.1.0, up 3h5m
        Source          manifests, last contact 3m20s ago, not complete yet
        Revision        4711, 12s ago, 10000 services, 20000 endpoints
        Nodes           none

        Next
          no agent has connected yet: start kp-nodeagent on every node
    "#]]
    .assert_eq(&status(fleet));
}

#[test]
fn an_answer_without_anything_is_shown() {
    expect![[r#"
        Control plane   -
        Source          -, last contact 0s ago, not complete yet
        Revision        0, 0 services, 0 endpoints
        Nodes           none

        Next
          no agent has connected yet: start kp-nodeagent on every node
    "#]]
    .assert_eq(&status(pb::Fleet::default()));
}

#[test]
fn long_names_and_large_numbers_fit() {
    let name = "ip-10-0-12-34.eu-west-1.compute.internal.a-rather-long-name.";
    let mut node = samples::failing(name);
    let report = node.report.as_mut().unwrap();
    report.applied_revision = 123_456_789;
    report.objects = Some(pb::ObjectCounts {
        services: 100_000,
        endpoints: 1_250_000,
    });
    node.wanted_revision = 123_999_999;
    node.backend = "userspace".to_owned();
    let long = "x".repeat(60);
    report.failures.truncate(1);
    report.failures[0].key = Some(samples::key(
        &format!("{long}/{long}"),
        &long,
        pb::Family::Ipv6,
    ));
    expect![[r#"
        Nodes           1/2 in sync, 1 failing

        NODE                      STATE    SINCE  APPLIED              VERIFIED   LAG
        ip-10-0-12-34...ng-name.  Failing  3m12s  123456789/123999999  3m12s ago  543210
          5 objects are not applied as desired
          xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx/xxxxxxxxxxxxxxxxx
            xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx:xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
            xxxxxxxxxxxxxxxxxxxxxxxxxxxx/TCP (IPv6): node port 30080 is in use by
            another program (pid 4242, /usr/bin/haproxy); stop it or choose another port
            (for 3m12s)
        node-b                    InSync   3h     4711                 3m12s ago  -

        Next
          kpctl describe service
            xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx/xxxxxxxxxxxxxxx
            xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
    "#]]
    .assert_eq(&without_plane(fleet(vec![node, samples::node("node-b")])));
}

#[test]
fn revisions_of_an_earlier_start_do_not_compare() {
    let mut node = samples::syncing("node-a");
    node.report.as_mut().unwrap().epoch += 1;
    let view = FleetView::from(fleet(vec![node]));
    let revisions = &view.nodes[0].revisions;
    assert_eq!((revisions.applied, revisions.lag), (None, None));
    expect![[r#"
        Control plane   0.1.0, up 3h5m
        Source          manifests, last contact 2s ago
        Revision        4711, 12s ago, 10000 services, 20000 endpoints
        Nodes           0/1 in sync, 1 syncing

        NODE    STATE    SINCE  APPLIED  VERIFIED   LAG  SYNC   OBJECTS      BACKEND
        node-a  Syncing  4s     -        3m12s ago  -    3.1ms  10000/20000  nftables
          no report since the control plane started
    "#]]
    .assert_eq(&table(&view));
}

#[test]
fn a_failed_family_is_named() {
    let mut node = samples::failing("node-a");
    let report = node.report.as_mut().unwrap();
    report.failures.clear();
    report.families[0].error = "no such table: ip kplane".to_owned();
    let text = status(fleet(vec![node]));
    has(&text, "\n  IPv4: no such table: ip kplane\n");
    has(&text, "\n  read the log of kp-nodeagent on node-a\n");
}

#[test]
fn wide_tells_what_became_of_the_list_of_all_services() {
    let mut node = samples::node("node-a");
    let family = &mut node.report.as_mut().unwrap().families[0];
    family.rules = Some(pb::RuleStats {
        rules: 80_123,
        lookups: 38,
        lookups_in_one_list: 10_000,
    });
    let fleet = FleetView::from(fleet(vec![node]));
    let line = "IPv4: 80123 rules; a new connection passes at most 38 to its Service, 10000 in one \
                list like kube-proxy's";
    assert!(
        wide(&fleet).contains(&format!("\n  {line}\n")),
        "{}",
        wide(&fleet)
    );
    assert!(!table(&fleet).contains(line));
}

#[test]
fn only_the_first_issues_are_shown() {
    let view = FleetView::from(samples::troubled_fleet());
    let mut many = vec![view.issues[0].clone(); 12];
    for (n, issue) in many.iter_mut().enumerate() {
        issue.reason = format!("port 99999 is wrong {n}");
    }
    let text = plain(&issues_text(&many, 7, &canvas()));
    assert_eq!(text.matches("port 99999").count(), 10);
    let end = "2 issues more: -o wide\n7 issues more are not listed: fix these first\n";
    assert!(text.ends_with(end), "{text}");
}

/// One mistake in a template must not fill the screen.
#[test]
fn objects_with_the_same_issue_are_told_together() {
    let view = FleetView::from(samples::troubled_fleet());
    let mut alike = vec![view.issues[0].clone(); 6];
    for (n, issue) in alike.iter_mut().enumerate() {
        issue.name = format!("shop-{n}");
    }
    alike[5].alike = 2_994;
    let text = plain(&issues_text(&alike, 0, &canvas()));
    assert_eq!(text.matches("port 99999").count(), 1, "{text}");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let others = "the same problem with 2999 other objects, such as Service shop/shop-1, Service \
                  shop/shop-2, Service shop/shop-3";
    assert!(words.contains(others), "{words}");
    let in_full = Canvas {
        wide: true,
        ..canvas()
    };
    let text = plain(&issues_text(&alike, 0, &in_full));
    assert_eq!(text.matches("port 99999").count(), 6, "{text}");
    has(&text, "the same problem with 2994 other objects\n");
}

#[test]
fn get_nodes() {
    let view = NodeListView::from(samples::troubled_fleet());
    expect![[r#"
        NODE    STATE         ZONE        BACKEND   VERSION  HEARD  ADDRESS
        node-a  InSync        eu-west-1a  nftables  0.1.0    1s     10.0.0.11
        node-b  Syncing       eu-west-1a  nftables  0.1.0    1s     10.0.0.11
        node-c  Failing       eu-west-1a  nftables  0.1.0    1s     10.0.0.11
        node-d  Disconnected  eu-west-1a  nftables  0.1.0    14m    10.0.0.11
        node-e  NoAgent       -           -         -        -      10.0.0.15
    "#]]
    .assert_eq(&table(&view));
    expect![[r#"
        NODE    STATE         ZONE        BACKEND   VERSION  HEARD  ADDRESS    OTHER-ADDRESSES  POD-CIDRS                         PEER             RTT
        node-a  InSync        eu-west-1a  nftables  0.1.0    1s     10.0.0.11  fd00::11         10.244.1.0/24,fd00:10:244:1::/64  10.0.0.11:41234  230us
        node-b  Syncing       eu-west-1a  nftables  0.1.0    1s     10.0.0.11  fd00::11         10.244.1.0/24,fd00:10:244:1::/64  10.0.0.11:41234  230us
        node-c  Failing       eu-west-1a  nftables  0.1.0    1s     10.0.0.11  fd00::11         10.244.1.0/24,fd00:10:244:1::/64  10.0.0.11:41234  230us
        node-d  Disconnected  eu-west-1a  nftables  0.1.0    14m    10.0.0.11  fd00::11         10.244.1.0/24,fd00:10:244:1::/64  -                230us
        node-e  NoAgent       -           -         -        -      10.0.0.15  -                -                                 -                -
    "#]].assert_eq(&wide(&view));
}

#[test]
fn get_nodes_of_an_empty_fleet() {
    expect![[r#"
        No nodes.

        Next
          no agent has connected yet: start kp-nodeagent on every node
    "#]]
    .assert_eq(&table(&NodeListView::from(fleet(Vec::new()))));
}

#[test]
fn healthy_means_that_nothing_is_left_to_do() {
    let healthy = |fleet: pb::Fleet| FleetView::from(fleet).summary.healthy;
    assert!(healthy(samples::healthy_fleet()));
    assert!(!healthy(fleet(Vec::new())), "no nodes");
    for bad in [
        samples::syncing("n"),
        samples::failing("n"),
        samples::disconnected("n"),
        samples::no_agent("n"),
    ] {
        assert!(!healthy(fleet(vec![samples::node("a"), bad])));
    }
    let with = |change: fn(&mut pb::ControlPlaneStatus)| {
        let mut fleet = samples::healthy_fleet();
        change(fleet.control_plane.as_mut().unwrap());
        healthy(fleet)
    };
    assert!(!with(|plane| plane.synced = false));
    assert!(!with(|plane| plane.issues = samples::issues()));
    assert!(
        with(|plane| plane.issues = samples::issues()[..1].into()),
        "a warning"
    );
}

#[test]
fn colours_are_in_the_text_and_foreign_escapes_are_not() {
    let mut node = samples::failing("evil\u{1b}]0;title\u{7}");
    node.last_error = "\u{1b}[2Jgone".to_owned();
    let text = FleetView::from(fleet(vec![node])).text(&canvas());
    assert!(text.contains("\u{1b}[31m"), "red");
    assert!(!text.contains("\u{1b}[2J") && !text.contains("\u{1b}]"));
}
