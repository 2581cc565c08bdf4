//! What `kpctl why` is told: places of clients outside, owners of contested places, and all nodes.

use std::sync::Arc;

use kp_controlplane::app::Bound;
use kplane_proto::v1::status_service_server::StatusService as _;
use kplane_proto::v1::{self as pb, PacketSender};
use kplane_status_api::server::StatusServer;
use tonic::{Code, Request, Status};

use crate::support::control_plane;

/// Three nodes; Services with places outside, and younger ones that want places of these.
const SHOP: &str = "
{kind: Node, apiVersion: v1, metadata: {name: n1}, status: {addresses: [{type: InternalIP, address: 192.0.2.11}]}}
---
{kind: Node, apiVersion: v1, metadata: {name: n2}, status: {addresses: [{type: InternalIP, address: 192.0.2.12}]}}
---
{kind: Node, apiVersion: v1, metadata: {name: n3}, status: {addresses: [{type: InternalIP, address: 192.0.2.13}]}}
---
kind: Service
apiVersion: v1
metadata: {name: balanced, namespace: shop}
spec: {type: LoadBalancer, clusterIP: 10.96.0.1, internalTrafficPolicy: Local, ports: [{port: 80, nodePort: 30080}]}
status: {loadBalancer: {ingress: [{ip: 203.0.113.1}]}}
---
kind: EndpointSlice
apiVersion: discovery.k8s.io/v1
metadata: {name: balanced-1, namespace: shop, labels: {kubernetes.io/service-name: balanced}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.244.1.1], nodeName: n1}]
---
kind: Service
apiVersion: v1
metadata: {name: on-nodes, namespace: shop}
spec: {type: NodePort, clusterIP: 10.96.0.2, ports: [{port: 80, nodePort: 30081}]}
---
kind: Service
apiVersion: v1
metadata: {name: plain, namespace: shop}
spec: {clusterIP: 10.96.0.3, ports: [{port: 80}]}
---
kind: Service
apiVersion: v1
metadata: {name: z-port, namespace: shop}
spec: {type: NodePort, clusterIP: 10.96.0.4, ports: [{port: 80, nodePort: 30080}]}
---
kind: Service
apiVersion: v1
metadata: {name: z-twin, namespace: shop}
spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}
---
kind: Service
apiVersion: v1
metadata: {name: z-outside, namespace: shop}
spec: {clusterIP: 10.96.0.5, externalIPs: [203.0.113.1], ports: [{port: 80}]}
---
kind: Service
apiVersion: v1
metadata: {name: z-on-nodes, namespace: shop}
spec: {type: NodePort, clusterIP: 10.96.0.6, externalIPs: [203.0.113.1], ports: [{port: 80, nodePort: 30082}]}
";

/// Returns the fate of a packet on n2.
async fn fate(
    bound: &Bound,
    name: &str,
    sender: PacketSender,
    to: &str,
) -> Result<pb::Explanation, Status> {
    let request = pb::ExplainRequest {
        namespace: "shop".to_owned(),
        name: name.to_owned(),
        node: "n2".to_owned(),
        sender: sender.into(),
        to: to.to_owned(),
        ..pb::ExplainRequest::default()
    };
    let server = StatusServer::new(Arc::clone(bound.hub()));
    let reported = server.explain(Request::new(request)).await;
    reported.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn a_client_outside_goes_to_a_place_outside() {
    let (bound, _folder) = control_plane(SHOP).await;
    let to = async |name, sender| fate(&bound, name, sender, "").await.map(|reported| reported.to);
    for (name, place) in [
        ("balanced", "203.0.113.1:80"),
        ("on-nodes", "192.0.2.12:30081"),
    ] {
        assert_eq!(to(name, PacketSender::Outside).await.unwrap(), place);
    }
    assert_eq!(
        to("balanced", PacketSender::Pod).await.unwrap(),
        "10.96.0.1:80"
    );
    let nowhere = to("plain", PacketSender::Outside).await.unwrap_err();
    assert_eq!(nowhere.code(), Code::InvalidArgument);
    assert!(nowhere.message().contains("--to 10.96.0.3:80"), "{nowhere}");
}

#[tokio::test]
async fn a_place_that_another_service_has_names_its_owner() {
    let (bound, _folder) = control_plane(SHOP).await;
    let taken = fate(&bound, "z-port", PacketSender::Outside, "192.0.2.12:30080")
        .await
        .unwrap_err();
    assert_eq!(taken.code(), Code::NotFound);
    assert!(
        taken.message().contains("belongs to shop/balanced"),
        "{taken}"
    );
    let twin = fate(&bound, "z-twin", PacketSender::Pod, "").await.unwrap();
    assert!(
        twin.summary.starts_with("another Service gets the packet"),
        "{twin:?}"
    );
    assert!(
        twin.summary.contains("belongs to shop/balanced"),
        "{twin:?}"
    );
    assert_eq!(twin.findings[0].code, "AddressConflict");
}

/// The Service that lost a conflict is told who has its address, also if no destination is named.
#[tokio::test]
async fn an_address_outside_that_another_service_has_names_its_owner() {
    let (bound, _folder) = control_plane(SHOP).await;
    let why = async |name| fate(&bound, name, PacketSender::Outside, "").await;
    let owner = "address 203.0.113.1:80/TCP belongs to shop/balanced";
    let reported = why("balanced").await.unwrap();
    assert!(reported.findings.iter().all(|of| of.code != "AddressConflict"));
    let lost = why("z-outside").await.unwrap_err();
    assert!(lost.message().contains(owner), "{lost}");
    let reported = why("z-on-nodes").await.unwrap();
    assert_eq!(reported.to, "192.0.2.12:30082");
    assert_eq!(reported.findings[0].code, "AddressConflict");
    assert!(reported.findings[0].text.contains(owner), "{reported:?}");
}

#[tokio::test]
async fn counts_are_of_all_nodes_and_of_endpoints_that_exist() {
    let (bound, _folder) = control_plane(SHOP).await;
    let reported = fate(&bound, "balanced", PacketSender::Pod, "").await.unwrap();
    let text = &reported.findings[0].text;
    assert!(text.contains("2 of 3 nodes have no endpoint"), "{text}");
    let reported = fate(&bound, "plain", PacketSender::Pod, "").await.unwrap();
    let steps = reported.steps.join("\n");
    assert!(steps.contains("the port has no endpoints"), "{steps}");
    assert!(!steps.contains(" 0 endpoints"), "{steps}");
}
