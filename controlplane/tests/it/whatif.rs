//! Questions about changes that might be made: what they say, and what they refuse.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kp_controlplane::app::Bound;
use kp_controlplane::server::StatusServer;
use kplane_proto::v1 as pb;
use kplane_proto::v1::status_service_server::StatusService as _;
use tokio::sync::Mutex;
use tonic::{Code, Request, Status};

use crate::support::control_plane;

const WEB: &str = "
kind: Service
apiVersion: v1
metadata: {name: web, namespace: shop}
spec: {type: NodePort, clusterIP: 10.96.0.1, ports: [{name: http, port: 80, nodePort: 30080}]}
---
kind: EndpointSlice
apiVersion: discovery.k8s.io/v1
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [10.244.1.1], nodeName: n1}]
---
kind: Node
apiVersion: v1
metadata: {name: n1}
";

async fn what_if(bound: &Bound, manifests: &str) -> Result<pb::WhatIfAnswer, Status> {
    /// A process answers one question at a time, and refuses the others.
    static TURN: Mutex<()> = Mutex::const_new(());
    let _turn = TURN.lock().await;
    let request = pb::WhatIfRequest {
        manifests: manifests.as_bytes().to_vec(),
    };
    let server = StatusServer::new(Arc::clone(bound.hub()));
    let answer = server.what_if(Request::new(request)).await?;
    Ok(answer.into_inner())
}

fn codes(issues: &[pb::InputIssue]) -> Vec<(&str, &str)> {
    let issues = issues.iter();
    issues.map(|of| (&*of.name, &*of.code)).collect()
}

#[tokio::test]
async fn a_change_is_worked_out_and_not_made() {
    let (bound, _folder) = control_plane(WEB).await;
    let before = bound.hub().store.head().borrow().revision;
    // What the manifest leaves out stays: the addresses, and the node port.
    let same = "{kind: Service, apiVersion: v1, metadata: {name: web, namespace: shop},
        spec: {type: NodePort, ports: [{name: http, port: 80}]}}";
    let answer = what_if(&bound, same).await.unwrap();
    assert_eq!((answer.objects, answer.ports.len()), (1, 0), "{answer:?}");
    let local = same.replace(
        "type: NodePort",
        "type: NodePort, externalTrafficPolicy: Local",
    );
    let answer = what_if(&bound, &local).await.unwrap();
    assert_eq!(answer.ports[0].change(), pb::WhatIfChange::Changed);
    let class = &answer.classes[0];
    assert_eq!((class.nodes, &*class.node), (1, "n1"));
    assert!(class.error.contains("no agent"), "{class:?}");

    let new = "{kind: Service, apiVersion: v1, metadata: {name: api, namespace: shop},
        spec: {ports: [{port: 80}], externalIPs: [192.0.2.1]}}
---
kind: Deployment
metadata: {name: api}";
    let answer = what_if(&bound, new).await.unwrap();
    assert_eq!(answer.ports[0].change(), pb::WhatIfChange::New);
    assert_eq!(answer.unassigned, ["shop/api"]);
    assert!(answer.new_issues.is_empty(), "{:?}", answer.new_issues);
    assert_eq!(bound.hub().store.head().borrow().revision, before);
}

#[tokio::test]
async fn conflicts_are_named_before_they_come() {
    let (bound, _folder) = control_plane(WEB).await;
    let rival = |name: &str| {
        format!(
            "{{kind: Service, apiVersion: v1, metadata: {{name: {name}, namespace: shop}},
        spec: {{type: NodePort, clusterIP: 10.96.0.1, ports: [{{port: 80, nodePort: 30080}}]}}}}"
        )
    };
    let of_web = |answer: &pb::WhatIfAnswer| {
        let ports = answer.ports.iter().cloned();
        let mut of_web = ports.filter(|port| port.key.as_ref().unwrap().name == "web");
        of_web.next().map(|port| port.change())
    };
    let answer = what_if(&bound, &rival("z")).await.unwrap();
    let found = codes(&answer.new_issues);
    assert!(found.contains(&("z", "AddressConflict")), "{found:?}");
    assert_eq!(of_web(&answer), None, "{:?}", answer.ports);
    // Without times of creation names decide, so this one would take the addresses of the other.
    let answer = what_if(&bound, &rival("a")).await.unwrap();
    let found = codes(&answer.new_issues);
    assert!(found.contains(&("web", "AddressConflict")), "{found:?}");
    assert_eq!(of_web(&answer), Some(pb::WhatIfChange::Gone));
}

#[tokio::test]
async fn hostile_manifests_are_refused_and_harm_nothing() {
    let (bound, _folder) = control_plane(WEB).await;
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let aliases = "a: &a [x, x, x, x, x, x, x, x, x]
b: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]
c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b]
d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c]
e: [*d, *d, *d, *d, *d, *d, *d, *d, *d]";
    for hostile in [
        deep.as_str(),
        aliases,
        "\u{0}\u{1}",
        "kind: Service\nmetadata: [",
    ] {
        let answer = what_if(&bound, hostile).await.unwrap();
        assert_eq!((answer.objects, answer.ports.len()), (0, 0));
        assert!(
            !answer.refused.is_empty(),
            "{}",
            &hostile[..20.min(hostile.len())]
        );
    }
    let long = "#".repeat((1 << 20) + 1);
    let refused = what_if(&bound, &long).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("ask for a part"), "{refused}");
    let nothing = what_if(&bound, "").await.unwrap();
    assert_eq!((nothing.objects, nothing.ports.len()), (0, 0));
}

/// A copy of a large index is made and dropped.
#[tokio::test]
async fn a_large_cluster_is_answered_for_in_time() {
    const SERVICES: usize = 10_000;
    let mut manifests = String::new();
    for n in 0..SERVICES {
        let (a, b) = (n / 200, n % 200 + 1);
        manifests.push_str(&format!(
            "---
{{kind: Service, apiVersion: v1, metadata: {{name: s{n}, namespace: shop}}, spec: {{clusterIP: 10.96.{a}.{b}, ports: [{{port: 80}}]}}}}
---
{{kind: EndpointSlice, apiVersion: discovery.k8s.io/v1, metadata: {{name: s{n}-1, namespace: shop, labels: {{kubernetes.io/service-name: s{n}}}}}, addressType: IPv4, ports: [{{name: '', port: 8080}}], endpoints: [{{addresses: [10.244.{a}.{b}]}}]}}
"
        ));
    }
    let (bound, _folder) = control_plane(&manifests).await;
    let start = Instant::now();
    drop(
        bound
            .hub()
            .detail(kplane_model::ServiceName::new("shop", "s1"))
            .await,
    );
    let detail = start.elapsed();
    let start = Instant::now();
    let change = "{kind: Service, apiVersion: v1, metadata: {name: s7, namespace: shop},
        spec: {ports: [{port: 81}]}}";
    let answer = what_if(&bound, change).await.unwrap();
    let took = start.elapsed();
    assert_eq!(answer.ports.len(), 1, "{:?}", answer.ports);
    println!("{SERVICES} Services: what if took {took:?}, a description {detail:?}");
    assert!(took < Duration::from_secs(5), "{took:?}");
}
