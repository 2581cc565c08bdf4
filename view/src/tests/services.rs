//! Services and endpoints at 80 columns.

use expect_test::expect;
use kplane_proto::v1 as pb;

use super::super::describe::DescriptionView;
use super::super::endpoints::EndpointListView;
use super::super::services::ServiceListView;
use super::super::testing::{only_wide, table, wide};
use kpctl_samples as samples;

fn long_service() -> pb::ServiceView {
    let name = format!("{}/{}", "namespace-".repeat(6), "service-".repeat(7));
    pb::ServiceView {
        key: Some(samples::key(&name, &"port-".repeat(3), pb::Family::Ipv6)),
        cluster_ip: "2001:db8:1234:5678:9abc:def0:1234:5678".to_owned(),
        endpoints: vec![samples::endpoint(
            "[2001:db8:1234:5678:9abc:def0:1234:5678]:8080",
            "ip-10-0-12-34.eu-west-1.compute.internal",
            [true, true, false],
        )],
        ..samples::web_v6()
    }
}

#[test]
fn get_services() {
    let view = ServiceListView::new(samples::services(), None);
    expect![[r#"
        NAMESPACE    NAME      CLUSTER-IP     EXTERNAL-IP  PORTS          READY
        kube-system  kube-dns  10.96.0.2      -            53/UDP,53/TCP  2/2
        shop         database  10.96.0.11     -            5432/TCP       0/1
        shop         web       10.96.0.10     203.0.113.7  80:30080/TCP   2/3
        shop         web       fd00:10:96::a  203.0.113.7  80:30080/TCP   1/1
    "#]]
    .assert_eq(&table(&view));
    expect![[r#"
        NAMESPACE    NAME      CLUSTER-IP     EXTERNAL-IP  PORTS          READY  INTERNAL  EXTERNAL  AFFINITY  SOURCES                       REVISION
        kube-system  kube-dns  10.96.0.2      -            53/UDP,53/TCP  2/2    Cluster   Cluster   -         -                             3
        shop         database  10.96.0.11     -            5432/TCP       0/1    Cluster   Cluster   -         -                             4700
        shop         web       10.96.0.10     203.0.113.7  80:30080/TCP   2/3    Cluster   Local     3h        198.51.100.0/24,192.0.2.0/24  4711
        shop         web       fd00:10:96::a  203.0.113.7  80:30080/TCP   1/1    Cluster   Local     3h        198.51.100.0/24,192.0.2.0/24  4711
    "#]].assert_eq(&wide(&view));
}

#[test]
fn get_services_of_a_namespace() {
    let shop = samples::services().split_off(2);
    expect![[r#"
        NAME      CLUSTER-IP     EXTERNAL-IP  PORTS         READY
        database  10.96.0.11     -            5432/TCP      0/1
        web       10.96.0.10     203.0.113.7  80:30080/TCP  2/3
        web       fd00:10:96::a  203.0.113.7  80:30080/TCP  1/1
    "#]]
    .assert_eq(&table(&ServiceListView::new(shop, Some("shop"))));
    expect![[r#"
        No Services in namespace shop.
    "#]]
    .assert_eq(&table(&ServiceListView::new(Vec::new(), Some("shop"))));
}

#[test]
fn get_services_with_long_names() {
    let view = ServiceListView::new(vec![samples::web(), long_service()], None);
    expect![[r#"
        NAMESPACE           NAME                  CLUSTER-IP         PORTS         READY
        shop                web                   10.96.0.10         80:30080/TCP  2/3
        namespace-..space-  service-ser..ervice-  2001:db8:..4:5678  80:30080/TCP  1/1
    "#]]
    .assert_eq(&table(&view));
}

#[test]
fn get_endpoints() {
    let view = EndpointListView::new(samples::services(), None);
    expect![[r#"
        NAMESPACE    SERVICE   PORT     ADDRESS                  NODE    STATE
        kube-system  kube-dns  dns      10.244.1.2:53            node-a  Ready
        kube-system  kube-dns  dns      10.244.2.2:53            node-b  Ready
        kube-system  kube-dns  dns-tcp  10.244.1.2:53            node-a  Ready
        kube-system  kube-dns  dns-tcp  10.244.2.2:53            node-b  Ready
        shop         database  TCP      10.244.2.8:5432          node-b  NotReady
        shop         web       http     10.244.1.12:8080         node-a  Ready
        shop         web       http     10.244.2.7:8080          node-b  Ready
        shop         web       http     10.244.3.9:8080          node-c  Draining
        shop         web       http     [fd00:10:244:1::c]:8080  node-a  Ready
    "#]]
    .assert_eq(&table(&view));
    expect![[r#"
        NAMESPACE    SERVICE   PORT     ADDRESS                  NODE    STATE     HINTS
        kube-system  kube-dns  dns      10.244.1.2:53            node-a  Ready     -
        kube-system  kube-dns  dns      10.244.2.2:53            node-b  Ready     -
        kube-system  kube-dns  dns-tcp  10.244.1.2:53            node-a  Ready     -
        kube-system  kube-dns  dns-tcp  10.244.2.2:53            node-b  Ready     -
        shop         database  TCP      10.244.2.8:5432          node-b  NotReady  -
        shop         web       http     10.244.1.12:8080         node-a  Ready     zone=eu-west-1a
        shop         web       http     10.244.2.7:8080          node-b  Ready     zone=eu-west-1b,eu-west-1c
        shop         web       http     10.244.3.9:8080          node-c  Draining  -
        shop         web       http     [fd00:10:244:1::c]:8080  node-a  Ready     -
    "#]].assert_eq(&wide(&view));
    expect![[r#"
        No endpoints.
    "#]]
    .assert_eq(&table(&EndpointListView::new(Vec::new(), None)));
}

#[test]
fn get_endpoints_with_long_names() {
    let view = EndpointListView::new(vec![long_service()], None);
    expect![[r#"
        NAMESPACE   SERVICE         ADDRESS                                        STATE
        names..ce-  service-..ice-  [2001:db8:1234:5678:9abc:def0:1234:5678]:8080  Ready
    "#]]
    .assert_eq(&table(&view));
}

#[test]
fn describe_service() {
    let view = DescriptionView::new("shop", "web", samples::description());
    expect![[r#"
        Service         shop/web
        Cluster IP      10.96.0.10, fd00:10:96::a
        Load balancer   203.0.113.7
        Sources         198.51.100.0/24, 192.0.2.0/24
        Policy          internal Cluster, external Local
        Affinity        by client address for 3h
        Health port     32000
        IPVS scheduler  mh
        Data path       userspace, one attempt
        Nodes           in the kernel of 4,987 of 5,000 nodes; p50 9ms, p99 40ms, max
                        1.3s
        Lagging         node-c: Failing for 14m: node port 30080 is in use by another
                        program (pid 4242, /usr/bin/haproxy); stop it or choose another
                        port
                        node-d: Disconnected for 1m: applied revision 4650 of 4711; the
                        agent is not connected
                        node-e: NoAgent for 30s: no agent has connected for this node
                        and 10 more
        Not checked     whether programs listen at the endpoints; kpctl why shop/web
                        --from node/node-a --try connects

        FINDING  REASON
        Error    NotProgrammed
          node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy)
          on node-c
          fix: kpctl status, then the agent's log
        Info     ExternalPolicyLocal
          externalTrafficPolicy is Local, and 90 of 100 nodes have no endpoint
          on node-10, node-11, node-12, node-13, node-14, node-15, node-16, node-17 and
            82 more

        Port http 80/TCP (IPv4), node port 30080, revision 4711
          ENDPOINT          NODE    STATE     NODES  HINTS
          10.244.1.12:8080  node-a  Ready     3/3    zone=eu-west-1a
          10.244.2.7:8080   node-b  Ready     3/3    zone=eu-west-1b,eu-west-1c
          10.244.3.9:8080   node-c  Draining  1/3    -

        Port http 80/TCP (IPv6), node port 30080, revision 4711
          ENDPOINT                 NODE    STATE  NODES  HINTS
          [fd00:10:244:1::c]:8080  node-a  Ready  3/3    -

        NODE    PROGRAMMED  APPLIED    CLUSTER  LOCAL  LATENCY  CHANGED
        node-a  Yes         4711       3        1      12ms     3m12s ago
        node-b  Yes         4711       3        1      12ms     3m12s ago
        node-c  No          4650/4711  3        1      1.2s     14m ago
          node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy);
            stop it or choose another port

        ISSUE  OBJECT                 LOCATION
        Error  Service shop/checkout  shop.yaml, document 2, line 14
          InvalidPort: port 99999 is not between 1 and 65535; the Service is served as
            it was before this change

        Next
          kpctl status
          fix Service shop/checkout in shop.yaml, document 2, line 14
    "#]]
    .assert_eq(&table(&view));
}

#[test]
fn describe_service_in_full() {
    let view = DescriptionView::new("shop", "web", samples::description());
    expect![[r#"
        Nodes           in the kernel of 4,987 of 5,000 nodes; p50 9ms, p99 40ms, max 1.3s
        Lagging         node-c: Failing for 14m: node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy); stop it or choose another port
                        node-d: Disconnected for 1m: applied revision 4650 of 4711; the agent is not connected
        Not checked     whether programs listen at the endpoints; kpctl why shop/web --from node/node-a --try connects
          on node-10, node-11, node-12, node-13, node-14, node-15, node-16, node-17, node-18, node-19 and 80 more
          shop/web:http/TCP (IPv4): cluster 10.244.1.12:8080 10.244.2.7:8080; local 10.244.1.12:8080
          shop/web:http/TCP (IPv6): cluster [fd00:10:244:1::c]:8080; local none
          shop/web:http/TCP (IPv4): cluster 10.244.1.12:8080 10.244.2.7:8080; local 10.244.2.7:8080
          shop/web:http/TCP (IPv6): cluster [fd00:10:244:1::c]:8080; local none
          node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy); stop it or choose another port
          shop/web:http/TCP (IPv4): cluster 10.244.1.12:8080 10.244.2.7:8080; local 10.244.3.9:8080
          shop/web:http/TCP (IPv6): cluster [fd00:10:244:1::c]:8080; local none
          InvalidPort: port 99999 is not between 1 and 65535; the Service is served as it was before this change
    "#]].assert_eq(&only_wide(&view));
}

#[test]
fn describe_service_as_it_should_be() {
    let mut description = samples::description();
    description.ports.truncate(1);
    description.nodes.truncate(2);
    description.issues.clear();
    description.findings.clear();
    description.convergence = Some(samples::converged());
    expect![[r#"
        Service         shop/web
        Cluster IP      10.96.0.10
        Load balancer   203.0.113.7
        Sources         198.51.100.0/24, 192.0.2.0/24
        Policy          internal Cluster, external Local
        Affinity        by client address for 3h
        Health port     32000
        IPVS scheduler  mh
        Data path       userspace, one attempt
        Nodes           in the kernel of 5,000 of 5,000 nodes; p50 9ms, p99 40ms, max
                        1.3s
        Not checked     whether programs listen at the endpoints; kpctl why shop/web
                        --from node/node-a --try connects

        Port http 80/TCP (IPv4), node port 30080, revision 4711
          ENDPOINT          NODE    STATE     NODES  HINTS
          10.244.1.12:8080  node-a  Ready     2/2    zone=eu-west-1a
          10.244.2.7:8080   node-b  Ready     2/2    zone=eu-west-1b,eu-west-1c
          10.244.3.9:8080   node-c  Draining  0/2    -

        NODE    PROGRAMMED  APPLIED  CLUSTER  LOCAL  LATENCY  CHANGED
        node-a  Yes         4711     3        1      12ms     3m12s ago
        node-b  Yes         4711     3        1      12ms     3m12s ago
    "#]]
    .assert_eq(&table(&DescriptionView::new("shop", "web", description)));
}

#[test]
fn describe_service_of_which_nothing_is_served() {
    let description = pb::ServiceDescription {
        ports: Vec::new(),
        nodes: Vec::new(),
        findings: Vec::new(),
        issues: samples::issues().split_off(1),
        now_ms: 0,
        convergence: None,
    };
    expect![[r#"
        Service         shop/checkout
        Ports           none is served
        Nodes           0/0 hold the newest state

        ISSUE  OBJECT                 LOCATION
        Error  Service shop/checkout  shop.yaml, document 2, line 14
          InvalidPort: port 99999 is not between 1 and 65535; the Service is served as
            it was before this change

        Next
          fix Service shop/checkout in shop.yaml, document 2, line 14
    "#]]
    .assert_eq(&table(&DescriptionView::new(
        "shop",
        "checkout",
        description,
    )));
}

#[test]
fn describe_service_without_ready_endpoints() {
    let draining = pb::ServiceView {
        endpoints: samples::web().endpoints.split_off(2),
        ..samples::web()
    };
    let nothing = pb::ServiceView {
        endpoints: Vec::new(),
        ..samples::web_v6()
    };
    let description = pb::ServiceDescription {
        ports: vec![draining, nothing],
        ..Default::default()
    };
    expect![[r#"
        Service         shop/web
        Cluster IP      10.96.0.10, fd00:10:96::a
        Load balancer   203.0.113.7
        Sources         198.51.100.0/24, 192.0.2.0/24
        Policy          internal Cluster, external Local
        Affinity        by client address for 3h
        Health port     32000
        IPVS scheduler  mh
        Data path       userspace, one attempt
        Nodes           0/0 hold the newest state

        Port http 80/TCP (IPv4), node port 30080, revision 4711
          ENDPOINT         NODE    STATE     NODES  HINTS
          10.244.3.9:8080  node-c  Draining  0/0    -
          all endpoints are about to end: draining ones are still used

        Port http 80/TCP (IPv6), node port 30080, revision 4711
          no endpoint is ready: connections fail
    "#]]
    .assert_eq(&table(&DescriptionView::new("shop", "web", description)));
}

#[test]
fn describe_service_with_long_names() {
    let (namespace, name) = ("namespace-".repeat(6), "service-".repeat(7));
    let mut description = samples::description();
    description.ports = vec![long_service()];
    description.convergence = None;
    description.findings.clear();
    description.nodes.truncate(1);
    description.nodes[0].node = "ip-10-0-12-34.eu-west-1.compute.internal".to_owned();
    description.issues.truncate(1);
    description.issues[0].namespace.clone_from(&namespace);
    description.issues[0].name.clone_from(&name);
    let view = DescriptionView::new(&namespace, &name, description);
    expect![[r#"
        Service         namespace-namespace-namespace-namespa..service-service-service-
        Cluster IP      2001:db8:1234:5678:9abc:def0:1234:5678
        Sources         198.51.100.0/24, 192.0.2.0/24
        Policy          internal Cluster, external Local
        Affinity        by client address for 3h
        Health port     32000
        IPVS scheduler  mh
        Data path       userspace, one attempt
        Nodes           1/1 hold the newest state
        Not checked     whether programs listen at the endpoints; kpctl why
                        namespace-namespace-namespace-namespace-namespace-namespace-/ser
                        vice-service-service-service-service-service-service- --from
                        node/ip-10-0-12-34.eu-west-1.compute.internal --try connects

        Port port-port-port- 80/TCP (IPv6), node port 30080, revision 4711
          ENDPOINT                                       NODE               STATE  NODES
          [2001:db8:1234:5678:9abc:def0:1234:5678]:8080  ip-10-0-1..ternal  Ready  0/1

        NODE                     PROGRAMMED  APPLIED  CLUSTER  LOCAL  LATENCY  CHANGED
        ip-10-0-12-34..internal  Yes         4711     3        1      12ms     3m12s ago

        ISSUE  OBJECT                                     LOCATION
        Error  Service namespace-namesp..ervice-service-  shop.yaml, document 2, line 14
          InvalidPort: port 99999 is not between 1 and 65535; the Service is served as
            it was before this change

        Next
          fix Service
            namespace-namespace-namespace-namespace-namespace-namespace-/service-service
            -service-service-service-service-service- in shop.yaml, document 2, line 14
    "#]]
    .assert_eq(&table(&view));
    let text = wide(&view);
    let title = format!("Service         {namespace}/{name}\n");
    assert!(text.starts_with(&title), "{text}");
    for whole in [
        "port-port-port-",
        "[2001:db8:1234:5678:9abc:def0:1234:5678]:8080",
        "ip-10-0-12-34.eu-west-1.compute.internal",
        &format!("{namespace}/{name}  "),
    ] {
        assert!(text.contains(whole), "{whole} in {text}");
    }
}
