//! Lists and watches of Services: pages, filters and changes.

use kplane_desired_state::k8s::ObjectId;
use kplane_desired_state::source::Located;
use kplane_rig::cluster::objects;
use serde_json::{Value, json};

use super::*;

/// Number of Services of a cluster that needs pages.
pub(super) const MANY: usize = 17_000;

/// A cluster whose objects the test supplies.
struct Cluster {
    hub: Arc<Hub>,
    batches: mpsc::Sender<Batch>,
    client: StatusServiceClient<Channel>,
}

impl Cluster {
    /// Creates a cluster with these objects.
    async fn with(objects: Vec<Located>) -> Self {
        let (hub, batches) = Hub::sample_with_index("test", Admission::default());
        let client = StatusServiceClient::new(serve(&hub).await);
        let cluster = Self {
            hub,
            batches,
            client,
        };
        let lists = Batch::sample(&Kind::ALL, objects);
        cluster.send(lists.events).await;
        let mut head = cluster.hub.store().head();
        let synced = head.wait_for(|head| head.synced);
        timeout(DEADLINE, synced).await.unwrap().unwrap();
        cluster
    }

    async fn send(&self, events: Vec<Event>) {
        let observed_at = SystemTime::now();
        let batch = Batch {
            events,
            observed_at,
        };
        self.batches.send(batch).await.unwrap();
    }

    /// Returns the pages that a request gets.
    async fn list(
        &mut self,
        mut request: pb::ListServicesRequest,
    ) -> Vec<pb::ListServicesResponse> {
        let mut pages = Vec::new();
        loop {
            let page = self.client.list_services(request.clone()).await.unwrap().into_inner();
            request.page_token.clone_from(&page.next_page_token);
            pages.push(page);
            if request.page_token.is_empty() {
                return pages;
            }
        }
    }
}

fn apply(object: Located) -> Event {
    Event::Apply(Box::new(object))
}

pub(super) fn service(namespace: &str, name: &str, number: usize) -> Located {
    let ip = format!(
        "10.{}.{}.{}",
        96 + (number >> 16),
        number >> 8 & 255,
        number & 255
    );
    let spec = json!({
        "clusterIP": ip, "clusterIPs": [ip],
        "ports": [{"name": "http", "port": 80}, {"name": "https", "port": 443}],
    });
    Located::sample(&objects::service(namespace, name, spec))
}

/// The endpoints of a Service: address, node, and whether it is ready.
pub(super) fn slice(namespace: &str, service: &str, endpoints: &[(&str, &str, bool)]) -> Located {
    let endpoints = endpoints.iter().map(|(address, node, ready)| {
        json!({
            "addresses": [address], "nodeName": node,
            "conditions": {"ready": ready, "serving": ready, "terminating": false},
        })
    });
    Located::sample(&json!({
        "kind": "EndpointSlice",
        "metadata": {
            "namespace": namespace, "name": format!("{service}-1"),
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": "IPv4",
        "ports": [
            {"name": "http", "port": 8080, "protocol": "TCP"},
            {"name": "https", "port": 8443, "protocol": "TCP"},
        ],
        "endpoints": endpoints.collect::<Vec<Value>>(),
    }))
}

pub(super) fn names(ports: &[pb::ServiceView]) -> Vec<String> {
    ports
        .iter()
        .map(|port| port.key.as_ref().unwrap())
        .map(|key| format!("{}/{}:{}", key.namespace, key.name, key.port_name))
        .collect()
}

#[tokio::test]
async fn many_services_come_in_pages_that_any_client_takes() {
    let objects = (0..MANY).flat_map(|n| {
        let name = format!("a-service-with-a-name-of-usual-length-{n:05}");
        let address = format!("10.{}.{}.{}", 200 + (n >> 16), n >> 8 & 255, n & 255);
        let node = "ip-10-0-0-1.eu-west-1.compute.internal";
        [
            slice("shop", &name, &[(&address, node, true)]),
            service("shop", &name, n),
        ]
    });
    let mut cluster = Cluster::with(objects.collect()).await;
    // The client has gRPC's usual limit: it would refuse more than 4 MiB.
    let pages = cluster.list(pb::ListServicesRequest::default()).await;
    assert!(pages.len() > 1);
    let sizes: Vec<usize> = pages.iter().map(prost::Message::encoded_len).collect();
    assert!(sizes.iter().all(|size| *size < USUAL_LIMIT), "{sizes:?}");
    assert!(
        sizes[0] > USUAL_LIMIT / 4,
        "pages are as large as they may be: {sizes:?}"
    );
    let all: Vec<String> = pages.iter().flat_map(|page| names(&page.services)).collect();
    assert_eq!(all.len(), 2 * MANY);
    assert!(all.is_sorted(), "each once, in order");
    assert!(all.windows(2).all(|pair| pair[0] != pair[1]));

    let request = pb::ListServicesRequest {
        page_size: 3,
        page_token: pages[0].next_page_token.clone(),
        ..Default::default()
    };
    let page = cluster.client.list_services(request).await.unwrap();
    assert_eq!(
        names(&page.into_inner().services),
        all[pages[0].services.len()..][..3]
    );
    let wrong = pb::ListServicesRequest {
        page_token: "7".to_owned(),
        ..Default::default()
    };
    let refused = cluster.client.list_services(wrong).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}

fn shop() -> Vec<Located> {
    vec![
        service("shop", "web", 1),
        slice(
            "shop",
            "web",
            &[("10.1.0.1", "n1", true), ("10.1.0.2", "n2", false)],
        ),
        service("shop", "api", 2),
        slice("shop", "api", &[("10.1.0.3", "n2", true)]),
        service("stage", "web", 3),
    ]
}

#[tokio::test]
async fn filters_of_lists() {
    let mut cluster = Cluster::with(shop()).await;
    for (namespace, name, node, expected) in [
        ("", "", "", &["shop/api", "shop/web", "stage/web"][..]),
        ("shop", "", "", &["shop/api", "shop/web"]),
        ("", "web", "", &["shop/web", "stage/web"]),
        ("shop", "web", "", &["shop/web"]),
        ("", "", "n1", &["shop/web"]),
        ("", "", "n2", &["shop/api", "shop/web"]),
        ("", "api", "n1", &[]),
        ("nowhere", "", "", &[]),
    ] {
        let request = pb::ListServicesRequest {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            node: node.to_owned(),
            page_size: 1,
            ..Default::default()
        };
        let pages = cluster.list(request).await;
        let found: Vec<String> = pages.iter().flat_map(|page| names(&page.services)).collect();
        let expected = expected.iter().flat_map(|of| [format!("{of}:http"), format!("{of}:https")]);
        assert_eq!(
            found,
            expected.collect::<Vec<_>>(),
            "{namespace} {name} {node}"
        );
    }
}

#[tokio::test]
async fn a_watch_of_services_sends_what_changes() {
    let mut cluster = Cluster::with(shop()).await;
    let request = pb::WatchServicesRequest {
        namespace: "shop".to_owned(),
        ..Default::default()
    };
    let mut watch = cluster.client.watch_services(request).await.unwrap().into_inner();
    // The next message with news; heartbeats have none.
    let mut next = async || loop {
        let message = timeout(DEADLINE, watch.message()).await.unwrap().unwrap().unwrap();
        assert!(message.complete, "all of it fits into one message");
        if message.snapshot || !message.replaced.is_empty() {
            let replaced =
                message.replaced.iter().map(|id| format!("{}/{}", id.namespace, id.name));
            return (
                message.snapshot,
                replaced.collect::<Vec<_>>(),
                names(&message.services),
            );
        }
    };
    let of = |ports: &[&str]| ports.iter().map(|&port| port.to_owned()).collect::<Vec<_>>();
    let all = of(&[
        "shop/api:http",
        "shop/api:https",
        "shop/web:http",
        "shop/web:https",
    ]);
    assert_eq!(next().await, (true, Vec::new(), all));

    // An endpoint that is not ready changes nothing on nodes, and is seen here all the same.
    let more = [("10.1.0.3", "n2", true), ("10.1.0.4", "n1", false)];
    cluster.send(vec![apply(slice("shop", "api", &more))]).await;
    let api = of(&["shop/api:http", "shop/api:https"]);
    assert_eq!(next().await, (false, of(&["shop/api"]), api));

    // Other namespaces are none of its business.
    let id = |namespace: &str| ObjectId {
        kind: Kind::Service,
        namespace: namespace.into(),
        name: "web".into(),
    };
    cluster.send(vec![Event::Delete(id("stage"))]).await;
    cluster.send(vec![Event::Delete(id("shop"))]).await;
    assert_eq!(next().await, (false, of(&["shop/web"]), Vec::new()));
}
