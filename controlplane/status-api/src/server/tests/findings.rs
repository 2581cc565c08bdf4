//! What is broken, the worst first, and the worst finding of each Service.

use std::ops::Deref;

use kplane_desired_state::source::Located;
use kplane_rig::cluster::objects;
use serde_json::json;

use super::services::{MANY, names, service, slice};
use super::*;

/// A control plane, with agents that have reported.
struct Plane {
    server: StatusServer,
    sessions: Vec<Session>,
    hub: Arc<Hub>,
}

impl Deref for Plane {
    type Target = StatusServer;

    fn deref(&self) -> &StatusServer {
        &self.server
    }
}

impl Plane {
    async fn with(objects: Vec<Located>) -> Self {
        let (hub, batches) = Hub::sample_with_index("test", Admission::default());
        batches.send(Batch::sample(&Kind::ALL, objects)).await.unwrap();
        let mut head = hub.store().head();
        let synced = head.wait_for(|head| head.synced);
        timeout(DEADLINE, synced).await.unwrap().unwrap();
        Self {
            server: StatusServer::new(Arc::clone(&hub)),
            sessions: Vec::new(),
            hub,
        }
    }

    /// Takes the report of a node that holds everything.
    fn report(&mut self, node: &str, report: pb::Report) {
        let session = Session::sample(&self.hub, node);
        session.report(pb::Report {
            epoch: self.hub.store().epoch(),
            applied_revision: u64::MAX,
            ..report
        });
        self.sessions.push(session);
    }

    async fn answer(&self, namespace: &str, node: &str) -> pb::FindingsAnswer {
        let request = pb::ListFindingsRequest {
            namespace: namespace.to_owned(),
            node: node.to_owned(),
        };
        self.list_findings(Request::new(request)).await.unwrap().into_inner()
    }

    /// Returns the objects, codes and numbers of nodes of all findings.
    async fn found(&self, namespace: &str, node: &str) -> Vec<String> {
        let answer = self.answer(namespace, node).await;
        assert_eq!(answer.more, 0);
        let line = |of: &pb::ObjectFinding| format!("{} {} {}", of.object, of.code, of.nodes);
        answer.findings.iter().map(line).collect()
    }

    async fn services(&self, request: pb::ListServicesRequest) -> pb::ListServicesResponse {
        self.list_services(Request::new(request)).await.unwrap().into_inner()
    }
}

/// A Service that works, one without endpoints, and one that does not get its address.
fn cluster() -> Vec<Located> {
    let mut late = objects::service(
        "shop",
        "late",
        json!({"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"], "ports": [{"name": "http", "port": 80}]}),
    );
    late["metadata"]["creationTimestamp"] = json!("2026-01-02T00:00:00Z");
    let mut early = objects::service(
        "shop",
        "web",
        json!({"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"], "ports": [{"name": "http", "port": 80}]}),
    );
    early["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
    vec![
        Located::sample(&early),
        slice("shop", "web", &[("10.1.0.1", "n1", true)]),
        Located::sample(&late),
        service("stage", "web", 3),
    ]
}

fn failure(reason: &str) -> pb::ObjectFailure {
    pb::ObjectFailure {
        key: Some(pb::ServiceKey {
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            ..pb::ServiceKey::default()
        }),
        reason: reason.to_owned(),
        since_ms: 5_000,
        ..pb::ObjectFailure::default()
    }
}

/// A cluster in which the input, Services and nodes are broken.
async fn broken() -> Plane {
    let mut plane = Plane::with(cluster()).await;
    let obstructed = |severity: pb::Severity| pb::Report {
        findings: vec![pb::Finding {
            code: "ForwardingOff".to_owned(),
            severity: severity.into(),
            text: "forwards nothing".to_owned(),
            ..pb::Finding::default()
        }],
        ..pb::Report::default()
    };
    for node in ["n1", "n2", "n3"] {
        plane.report(node, obstructed(pb::Severity::Error));
    }
    plane.report("n4", obstructed(pb::Severity::Info));
    for node in ["n5", "n6"] {
        let failures = vec![failure("no memory")];
        let report = pb::Report {
            failures,
            ..pb::Report::default()
        };
        plane.report(node, report);
    }
    plane.report("n7", pb::Report::default());
    drop(plane.sessions.pop());
    plane
}

/// What stands in a description, in the status of a node or in that of the input stands in one list.
#[tokio::test]
async fn what_is_broken_is_one_list_worst_first() {
    let plane = broken().await;
    let wanted = [
        "service/shop/late AddressConflict 0",
        "service/stage/web NoEndpointSlice 0",
        "node/n1 ForwardingOff 3",
        "service/shop/web NotProgrammed 2",
        "node/n7 AgentDisconnected 1",
    ];
    assert_eq!(plane.found("", "").await, wanted);
    assert_eq!(plane.found("stage", "").await, wanted[1..2]);
    assert_eq!(plane.found("shop", "").await, [wanted[0], wanted[3]]);
    assert_eq!(plane.found("", "n2").await, ["node/n2 ForwardingOff 1"]);
    assert_eq!(
        plane.found("", "n6").await,
        ["service/shop/web NotProgrammed 1"]
    );
    assert_eq!(plane.found("", "n4").await, [""; 0]);
    let unknown = pb::ListFindingsRequest {
        node: "nobody".to_owned(),
        ..pb::ListFindingsRequest::default()
    };
    let refused = plane.list_findings(Request::new(unknown)).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);

    let all = plane.answer("", "").await.findings;
    let since: Vec<_> = all.iter().map(|of| of.since_ms > 0).collect();
    assert_eq!(since, [false, false, false, true, true]);
    // Words are those of the other answers.
    let request = pb::DescribeServiceRequest {
        namespace: "stage".to_owned(),
        name: "web".to_owned(),
    };
    let described = plane.describe_service(Request::new(request)).await.unwrap().into_inner();
    let is_it = |of: &&pb::Finding| of.code == "NoEndpointSlice";
    let described = described.findings.iter().find(is_it).unwrap();
    assert_eq!(
        (&all[1].cause, &all[1].fix),
        (&described.text, &described.fix)
    );
    let issues = plane.hub.issues();
    assert_eq!(all[0].cause, issues[0].reason);
    assert!(
        all[0].fix.ends_with("kpctl describe service shop/late"),
        "{}",
        all[0].fix
    );
}

/// A node that lacks a change has a finding once that lasts.
#[tokio::test]
async fn a_change_that_is_on_its_way_is_no_finding() {
    let mut plane = Plane::with(Vec::new()).await;
    plane.report("n1", pb::Report::default());
    let session = &plane.sessions[0];
    session.report(pb::Report {
        epoch: plane.hub.store().epoch(),
        ..pb::Report::default()
    });
    publish_node(&plane.hub, "n1");
    assert_eq!(plane.found("", "").await, [""; 0]);
}

#[tokio::test]
async fn services_have_their_worst_finding_if_it_is_asked_for() {
    let plane = broken().await;
    let found = |page: &pb::ListServicesResponse| {
        let code = |port: &pb::ServiceView| {
            port.finding.as_ref().map_or_else(String::new, |finding| finding.code.clone())
        };
        let codes = page.services.iter().map(code);
        names(&page.services).into_iter().zip(codes).collect::<Vec<_>>()
    };
    let lines = |lines: &[(&str, &str)]| {
        lines
            .iter()
            .map(|(a, b)| ((*a).to_owned(), (*b).to_owned()))
            .collect::<Vec<_>>()
    };
    let plain = plane.services(pb::ListServicesRequest::default()).await;
    assert!(plain.services.iter().all(|port| port.finding.is_none()));
    let all = pb::ListServicesRequest {
        findings: true,
        ..pb::ListServicesRequest::default()
    };
    let with = plane.services(all).await;
    let wanted = lines(&[
        ("shop/web:http", "NotProgrammed"),
        ("stage/web:http", "NoEndpointSlice"),
        ("stage/web:https", "NoEndpointSlice"),
    ]);
    assert_eq!(found(&with), wanted);
    let finding = with.services[0].finding.as_ref().unwrap();
    assert_eq!(
        (&finding.nodes[..], finding.nodes_omitted),
        (&["n5".to_owned()][..], 1)
    );

    let mut request = pb::ListServicesRequest {
        bad: true,
        page_size: 1,
        ..pb::ListServicesRequest::default()
    };
    let mut bad = Vec::new();
    loop {
        let page = plane.services(request.clone()).await;
        bad.extend(found(&page));
        request.page_token = page.next_page_token;
        if request.page_token.is_empty() {
            break;
        }
    }
    assert_eq!(bad, wanted);
    let healthy = Plane::with(cluster()).await;
    let request = pb::ListServicesRequest {
        bad: true,
        namespace: "shop".to_owned(),
        ..pb::ListServicesRequest::default()
    };
    assert_eq!(found(&healthy.services(request).await), []);
}

/// The worst that a large cluster can be: no Service has an endpoint, and no node an agent. Any client takes the answers.
#[tokio::test]
async fn where_all_is_broken_the_answers_are_bounded() {
    let services =
        (0..MANY).map(|n| service("shop", &format!("a-service-of-usual-length-{n:05}"), n));
    let other = [service("stage", "web", MANY)];
    let nodes = (0..5_000).map(|n| Located::sample(&objects::node(&format!("n{n:04}"), &[], "a")));
    let plane = Plane::with(services.chain(other).chain(nodes).collect()).await;
    let answer = plane.answer("", "").await;
    assert_eq!(
        (answer.findings.len(), answer.more),
        (1_000, MANY as u64 + 2 - 1_000)
    );
    assert!(
        answer.encoded_len() < USUAL_LIMIT,
        "{}",
        answer.encoded_len()
    );
    let of = |object: &str| answer.findings.iter().find(|of| of.object == object);
    assert_eq!(of("node/n0000").unwrap().nodes, 5_000);
    assert!(
        of("service/stage/web").is_some(),
        "the other namespace has its turn"
    );

    let mut request = pb::ListServicesRequest {
        findings: true,
        ..pb::ListServicesRequest::default()
    };
    let mut count = 0;
    loop {
        let page = plane.services(request.clone()).await;
        assert!(page.encoded_len() < USUAL_LIMIT, "{}", page.encoded_len());
        assert!(page.services.iter().all(|port| port.finding.is_some()));
        count += page.services.len();
        request.page_token = page.next_page_token;
        if request.page_token.is_empty() {
            break;
        }
    }
    assert_eq!(count, 2 * (MANY + 1));
}
