//! Questions to agents with virtual servers when a Service is described, through the real gRPC
//! stack, without TCP.

use std::sync::Arc;
use std::time::Duration;

use kp_controlplane::app::{Bound, Config, Origin};
use kplane_agents::suspects;
use kplane_desired_state::admission::{Admission, Enforce};
use kplane_proto::v1::status_service_server::StatusService as _;
use kplane_proto::v1::{self as pb, AgentMessage, Hello, agent_message, server_message};
use kplane_status_api::server::StatusServer;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};
use tonic::{Code, Request, Status, Streaming};

use crate::support::{DEADLINE, control_plane, hello, message, open, synced};

const WEB: &str = "
kind: Service
apiVersion: v1
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.1, ports: [{name: http, port: 80}]}
---
kind: EndpointSlice
apiVersion: discovery.k8s.io/v1
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [10.244.1.1], nodeName: n1}]
";

/// An agent's stream; the test reads the questions to the agent.
struct Agent {
    send: mpsc::Sender<AgentMessage>,
    questions: mpsc::UnboundedReceiver<pb::Inspect>,
    /// Status with which its stream ended.
    ended: watch::Receiver<Option<Code>>,
}

fn report(servers: Option<&pb::ServerStats>) -> pb::Report {
    let families = [pb::Family::Ipv4, pb::Family::Ipv6];
    pb::Report {
        families: families
            .map(|family| pb::FamilyStatus {
                family: family.into(),
                servers: servers.cloned(),
                ..Default::default()
            })
            .into(),
        ..Default::default()
    }
}

impl Agent {
    /// Connects an agent that has reported, with or without virtual servers.
    async fn connect(bound: &Bound, node: &str, servers: Option<pb::ServerStats>) -> Self {
        let hello = Hello {
            instance: 1,
            capabilities: bit(pb::Capability::Policies) | bit(pb::Capability::ClusterPolicies),
            ..hello(node)
        };
        let (send, receive) = open(bound, hello).await;
        let (asked, questions) = mpsc::unbounded_channel();
        let (end, ended) = watch::channel(None);
        tokio::spawn(listen(receive, send.clone(), asked, end));
        let agent = Self {
            send,
            questions,
            ended,
        };
        agent.say(agent_message::Kind::Report(report(servers.as_ref()))).await;
        let hub = bound.hub();
        let mut changes = hub.agents().changes();
        let has_reported = |_: &u64| {
            let records = hub.agents().records();
            records.get(node).is_some_and(|r| r.report.is_some())
        };
        let reported = changes.wait_for(has_reported);
        timeout(DEADLINE, reported).await.unwrap().unwrap();
        agent
    }

    async fn say(&self, kind: agent_message::Kind) {
        self.send.send(message(kind)).await.unwrap();
    }

    async fn question(&mut self) -> pb::Inspect {
        let question = timeout(DEADLINE, self.questions.recv()).await;
        question.unwrap().unwrap()
    }

    /// Answers a question.
    async fn reply(&self, asked: &pb::Inspect, answer: pb::Inspection) {
        let token = asked.token;
        let answer = pb::Inspection { token, ..answer };
        self.say(agent_message::Kind::Inspection(answer)).await;
    }

    async fn answer(&self, asked: &pb::Inspect, servers: Vec<pb::VirtualServer>) {
        let answer = pb::Inspection {
            servers,
            age_ms: 1_200,
            more: 3,
            ..pb::Inspection::default()
        };
        self.reply(asked, answer).await;
    }
}

async fn listen(
    mut stream: Streaming<pb::ServerMessage>,
    send: mpsc::Sender<AgentMessage>,
    asked: mpsc::UnboundedSender<pb::Inspect>,
    ended: watch::Sender<Option<Code>>,
) {
    loop {
        match stream.message().await {
            Ok(Some(said)) => match said.kind {
                Some(server_message::Kind::Ping(pb::Ping { token })) => {
                    let pong = agent_message::Kind::Pong(pb::Pong { token });
                    let _ = send.send(message(pong)).await;
                }
                Some(server_message::Kind::Inspect(inspect)) => {
                    let _ = asked.send(inspect);
                }
                _ => {}
            },
            Ok(None) => return,
            Err(status) => {
                let _ = ended.send(Some(status.code()));
                return;
            }
        }
    }
}

async fn description(bound: &Bound) -> pb::ServiceDescription {
    let request = pb::DescribeServiceRequest {
        namespace: "shop".to_owned(),
        name: "web".to_owned(),
    };
    let described = server(bound).describe_service(Request::new(request)).await;
    described.unwrap().into_inner()
}

async fn describe(bound: &Bound) -> Vec<pb::NodeServiceStatus> {
    let described = description(bound).await;
    let summary = described.convergence.unwrap();
    let programmed = described.nodes.iter().filter(|node| node.programmed);
    assert_eq!(summary.programmed, programmed.count() as u64);
    assert_eq!(summary.nodes, described.nodes.len() as u64);
    described.nodes
}

fn server(bound: &Bound) -> StatusServer {
    StatusServer::new(Arc::clone(bound.hub()))
}

/// Asks what happens to a packet to shop/web on a node.
fn packet(node: &str, sender: pb::PacketSender) -> Request<pb::ExplainRequest> {
    Request::new(pb::ExplainRequest {
        namespace: "shop".to_owned(),
        name: "web".to_owned(),
        node: node.to_owned(),
        sender: sender.into(),
        ..pb::ExplainRequest::default()
    })
}

fn server_of(name: &str) -> pb::VirtualServer {
    pb::VirtualServer {
        key: Some(pb::ServiceKey {
            namespace: "shop".to_owned(),
            name: name.to_owned(),
            ..Default::default()
        }),
        address: "10.96.0.1:80".to_owned(),
        ..Default::default()
    }
}

fn some() -> Option<pb::ServerStats> {
    Some(pb::ServerStats::default())
}

#[tokio::test]
async fn who_has_virtual_servers_is_asked_and_answers() {
    let (bound, _folder) = control_plane(WEB).await;
    let mut with = Agent::connect(&bound, "n1", some()).await;
    let mut without = Agent::connect(&bound, "n2", None).await;
    let answer = async {
        let asked = with.question().await;
        assert_eq!((&*asked.namespace, &*asked.name), ("shop", "web"));
        // Virtual servers of other Services are not shown.
        let servers = vec![server_of("web"), server_of("other")];
        with.answer(&asked, servers).await;
    };
    let (nodes, ()) = tokio::join!(describe(&bound), answer);
    let servers = nodes[0].servers.as_ref().unwrap();
    assert_eq!(servers.servers, [server_of("web")]);
    assert_eq!((servers.age_ms, servers.more), (1_200, 3));
    assert_eq!(nodes[1].servers, None);
    assert!(without.questions.try_recv().is_err());
}

fn finding(code: &str, severity: pb::Severity) -> pb::Finding {
    pb::Finding {
        code: code.to_owned(),
        severity: severity.into(),
        text: "drops packets".to_owned(),
        ..pb::Finding::default()
    }
}

/// The Service is served as it was, and its description says why.
#[tokio::test]
async fn a_service_says_that_its_file_is_broken() {
    let (bound, folder) = control_plane(WEB).await;
    assert_eq!(description(&bound).await.issues, []);
    let broken = WEB.replace("clusterIP: 10.96.0.1", "clusterIP: [10.96.0.1");
    std::fs::write(folder.path().join("all.yaml"), broken).unwrap();
    let until = Instant::now() + DEADLINE;
    let shown = loop {
        let shown = description(&bound).await;
        if !shown.issues.is_empty() {
            break shown;
        }
        assert!(Instant::now() < until, "no issue");
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert_eq!(shown.ports.len(), 1);
    let reason = &shown.issues[0].reason;
    assert!(reason.contains("last good state"), "{reason}");
}

/// A node's connection to its own address would pass no chain that drops what comes from outside.
#[tokio::test]
async fn a_neighbour_tries_the_node_port_of_a_node() {
    let node_port = WEB.replace(
        "{clusterIP: 10.96.0.1, ports: [{name: http, port: 80}]}",
        "{type: NodePort, clusterIP: 10.96.0.1, ports: [{name: http, port: 80, nodePort: 30080}]}",
    );
    let node = "---
kind: Node
apiVersion: v1
metadata: {name: n1}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
";
    let (bound, _folder) = control_plane(&format!("{node_port}{node}")).await;
    let mut own = Agent::connect(&bound, "n1", None).await;
    let mut neighbour = Agent::connect(&bound, "n2", None).await;
    tokio::time::pause();
    let server = server(&bound);
    let asked = server.try_service(packet("n1", pb::PacketSender::Outside));
    let answers = async {
        assert_eq!(own.question().await.attempts, ["10.244.1.1:8080"]);
        let asked = neighbour.question().await;
        assert_eq!(asked.attempts, ["192.0.2.1:30080"]);
        let silent = pb::Attempt {
            outcome: pb::AttemptOutcome::Silent.into(),
            ..pb::Attempt::default()
        };
        let inspection = pb::Inspection {
            attempts: vec![silent],
            ..pb::Inspection::default()
        };
        neighbour.reply(&asked, inspection).await;
    };
    let (shown, ()) = tokio::join!(asked, answers);
    let shown = shown.unwrap().into_inner();
    let through = &shown.attempts[0];
    assert!(through.through_service && through.node == "n2", "{shown:?}");
    let outcome = through.attempt.as_ref().unwrap().outcome();
    assert_eq!(outcome, pb::AttemptOutcome::Silent);
}

/// A firewall between nodes would make a living node look dead.
#[tokio::test]
async fn nodes_try_the_ports_by_which_others_are_found_dead() {
    let node = |name: &str, ip: &str| {
        format!(
            "---\nkind: Node\napiVersion: v1\nmetadata: {{name: {name}}}\nstatus: {{addresses: [{{type: InternalIP, \
             address: {ip}}}]}}\n"
        )
    };
    let folder = tempfile::tempdir().unwrap();
    let nodes = node("n1", "192.0.2.1") + &node("n2", "192.0.2.2");
    std::fs::write(folder.path().join("nodes.yaml"), nodes).unwrap();
    let start = async |dead_node| {
        let config = Config {
            dead_node,
            ..Config::new(Origin::Manifests(folder.path().to_owned()))
        };
        synced(config).await
    };
    let ask = async |bound: &Bound| {
        let request = pb::ProbeRequest {
            neighbours: true,
            ..pb::ProbeRequest::default()
        };
        let report = server(bound).probe_nodes(Request::new(request)).await;
        report.unwrap().into_inner()
    };
    let off = start(suspects::Mode::Off).await;
    let report = ask(&off).await;
    assert!(report.neighbours && report.nodes.is_empty(), "{report:?}");

    let bound = start(suspects::Mode::Observe).await;
    let mut first = Agent::connect(&bound, "n1", None).await;
    let mut second = Agent::connect(&bound, "n2", None).await;
    let answers = async {
        for (agent, ip) in [(&mut first, "192.0.2.2"), (&mut second, "192.0.2.1")] {
            let asked = agent.question().await;
            let ports = [10250, 10256].map(|port| format!("{ip}:{port}"));
            assert_eq!(asked.attempts, ports);
            let silent = pb::AttemptOutcome::Silent;
            let outcomes = match ip {
                "192.0.2.1" => [pb::AttemptOutcome::Connected, silent],
                _ => [pb::AttemptOutcome::Refused; 2],
            };
            let attempts = outcomes.map(|outcome| pb::Attempt {
                outcome: outcome.into(),
                ..pb::Attempt::default()
            });
            let inspection = pb::Inspection {
                attempts: attempts.into(),
                ..pb::Inspection::default()
            };
            agent.reply(&asked, inspection).await;
        }
    };
    let (report, ()) = tokio::join!(ask(&bound), answers);
    let [works, fails] = &report.nodes[..] else {
        panic!("{report:?}");
    };
    assert_eq!(works.verdict(), pb::ProbeVerdict::Works);
    assert_eq!(fails.verdict(), pb::ProbeVerdict::NodePort);
    let [failed] = &fails.failed[..] else {
        panic!("{fails:?}");
    };
    let attempt = failed.attempt.as_ref().unwrap();
    assert_eq!(
        (&*failed.node, &*attempt.address),
        ("n1", "192.0.2.1:10256")
    );
}

/// n2 handles the packet, n1 has the endpoint, and n3 has nothing to do with it.
#[tokio::test]
async fn what_drops_packets_on_nodes_is_told_to_those_whose_packets_pass_there() {
    let (bound, _folder) = control_plane(WEB).await;
    let found = [
        ("n1", "ForwardingOff", pb::Severity::Error),
        ("n2", "ForwardPolicyDrop", pb::Severity::Warning),
        ("n2", "Firewalld", pb::Severity::Info),
        ("n3", "ConntrackFull", pb::Severity::Error),
    ];
    let mut agents = Vec::new();
    for node in ["n1", "n2", "n3"] {
        let agent = Agent::connect(&bound, node, None).await;
        let its = found.iter().filter(|(of, ..)| *of == node);
        let report = pb::Report {
            findings: its.map(|(_, code, severity)| finding(code, *severity)).collect(),
            ..report(None)
        };
        agent.say(agent_message::Kind::Report(report)).await;
        let fleet = bound.hub().agents();
        let has_told = |_: &u64| {
            let record = fleet.record(node);
            let report = record.and_then(|record| record.report.clone());
            report.is_some_and(|report| !report.findings.is_empty())
        };
        let mut changes = fleet.changes();
        timeout(DEADLINE, changes.wait_for(has_told)).await.unwrap().unwrap();
        agents.push(agent);
    }
    tokio::time::pause();
    let answer = server(&bound)
        .explain(packet("n2", pb::PacketSender::Pod))
        .await
        .unwrap()
        .into_inner();
    let shown: Vec<_> = answer.findings.iter().map(|of| (&*of.code, of.nodes.join(","))).collect();
    let of = |code, nodes: &str| (code, nodes.to_owned());
    assert_eq!(
        shown,
        [of("ForwardingOff", "n1"), of("ForwardPolicyDrop", "n2")]
    );
    // A description is about all nodes, and names what certainly drops packets.
    let answer = description(&bound).await;
    let drops = answer.findings.iter().filter(|of| of.text == "drops packets");
    let shown: Vec<_> = drops.map(|of| (&*of.code, of.nodes.join(","))).collect();
    assert_eq!(
        shown,
        [of("ConntrackFull", "n3"), of("ForwardingOff", "n1")]
    );
}

/// An older agent that does not know questions never answers.
#[tokio::test]
async fn an_agent_that_does_not_answer_costs_two_seconds() {
    let (bound, _folder) = control_plane(WEB).await;
    let mut agent = Agent::connect(&bound, "n1", some()).await;
    tokio::time::pause();
    let since = Instant::now();
    let nodes = describe(&bound).await;
    assert!(since.elapsed() < Duration::from_millis(2_100));
    let error = &nodes[0].servers.as_ref().unwrap().error;
    assert_eq!(error, "its agent is connected, and did not answer in time");
    // Its late answer belongs to an older question.
    let late = agent.question().await;
    let answer = async {
        let asked = agent.question().await;
        assert_ne!(asked.token, late.token);
        agent.answer(&late, Vec::new()).await;
        agent.answer(&asked, vec![server_of("web")]).await;
    };
    let (nodes, ()) = tokio::join!(describe(&bound), answer);
    let servers = nodes[0].servers.as_ref().unwrap();
    assert_eq!((servers.servers.len(), &*servers.error), (1, ""));
}

/// One agent is of an older version, one answers nothing, and one says that it cannot read: none of them has no connections.
#[tokio::test]
async fn an_agent_that_does_not_know_a_question_is_not_one_without_connections() {
    let (bound, _folder) = control_plane(WEB).await;
    let mut older = Agent::connect(&bound, "n1", None).await;
    let _silent = Agent::connect(&bound, "n2", None).await;
    let mut unable = Agent::connect(&bound, "n3", None).await;
    tokio::time::pause();
    let answers = async {
        let asked = older.question().await;
        older.answer(&asked, Vec::new()).await;
        let asked = unable.question().await;
        let inspection = pb::Inspection {
            connected: Some(pb::Connected {
                error: "too many".to_owned(),
                ..pb::Connected::default()
            }),
            ..pb::Inspection::default()
        };
        unable.reply(&asked, inspection).await;
    };
    let (status, ()) = tokio::join!(flows(&bound, ""), answers);
    let status = status.unwrap();
    let nodes = status.nodes.as_ref().unwrap();
    assert_eq!((nodes.asked, nodes.answered), (3, 0));
    assert!(status.flows.is_empty());
    let reasons: Vec<_> = nodes.silent.iter().map(|silent| silent.reason.as_str()).collect();
    assert_eq!(
        reasons,
        [
            "its agent of version test does not know this question: update it",
            "its agent is connected, and did not answer in time",
            "too many",
        ]
    );
}

async fn flows(bound: &Bound, from: &str) -> Result<pb::FlowsAnswer, Status> {
    let request = pb::FlowsRequest {
        namespace: "shop".to_owned(),
        name: "web".to_owned(),
        from: from.to_owned(),
        ..pb::FlowsRequest::default()
    };
    let answer = server(bound).get_flows(Request::new(request)).await;
    answer.map(tonic::Response::into_inner)
}

/// One agent is of an older version, and another lists more than it may: what it says is bounded, and gets names.
#[tokio::test]
async fn who_is_connected_is_asked_of_all_agents() {
    let (bound, _folder) = control_plane(WEB).await;
    let mut older = Agent::connect(&bound, "n1", None).await;
    let mut agent = Agent::connect(&bound, "n2", None).await;
    let group = |client: String, endpoint: &str, established| pb::ConnectedGroup {
        client,
        endpoint: endpoint.to_owned(),
        established,
        ..pb::ConnectedGroup::default()
    };
    let many = (0..2_000_u32).map(|n| {
        let client = std::net::Ipv4Addr::from(0x0a00_0000 + n);
        group(client.to_string(), "10.244.1.1:8080", 1)
    });
    let rubbish = group("rubbish".to_owned(), "10.244.1.1:8080", 9);
    let largest = group("192.0.2.7".to_owned(), "10.244.1.9:8080", 7);
    let connected = pb::Connected {
        groups: [rubbish, largest].into_iter().chain(many).collect(),
        more: 40,
        ..pb::Connected::default()
    };
    let answers = async {
        let asked = older.question().await;
        older.answer(&asked, Vec::new()).await;
        let asked = agent.question().await;
        let question = asked.connected.as_ref().unwrap();
        assert_eq!(question.ports[0].addresses, ["10.96.0.1"]);
        assert_eq!((question.most, question.clients.len()), (1_000, 0));
        let inspection = pb::Inspection {
            connected: Some(connected),
            ..pb::Inspection::default()
        };
        agent.reply(&asked, inspection).await;
    };
    let (answer, ()) = tokio::join!(flows(&bound, ""), answers);
    let answer = answer.unwrap();
    let nodes = answer.nodes.as_ref().unwrap();
    assert_eq!((nodes.asked, nodes.answered, answer.more), (2, 1, 40));
    assert!(nodes.silent[0].reason.contains("update it"), "{answer:?}");
    assert!(answer.has_endpoints && !answer.knows_pods);
    // The agent may name 1,000 groups, of which one is rubbish.
    assert_eq!(answer.flows.len(), 999);
    let first = answer.flows[0].group.as_ref().unwrap();
    assert_eq!((first.client.as_str(), first.established), ("192.0.2.7", 7));
    // The Service has no such endpoint any more.
    assert_eq!(answer.flows[0].endpoint_node, "");
    assert_eq!(answer.flows[1].endpoint_node, "n1");

    for wrong in ["web", "node/n9", "pod/shop/cart-1"] {
        assert!(flows(&bound, wrong).await.is_err(), "{wrong}");
    }
}

fn with_edges(edges: pb::Edges) -> pb::Inspection {
    pb::Inspection {
        edges: Some(edges),
        ..pb::Inspection::default()
    }
}

/// One agent does not count, and another says who talked to a Service: clients and endpoints get names.
#[tokio::test]
async fn who_talked_to_whom_is_asked_of_all_agents() {
    let (bound, _folder) = control_plane(WEB).await;
    let mut off = Agent::connect(&bound, "n1", None).await;
    let mut agent = Agent::connect(&bound, "n2", None).await;
    let edge = |client: &str, endpoint: &str, begun| pb::Edge {
        client: client.to_owned(),
        endpoint: endpoint.to_owned(),
        begun,
        ..pb::Edge::default()
    };
    let key = pb::ServiceKey {
        namespace: "shop".to_owned(),
        name: "web".to_owned(),
        port_name: "http".to_owned(),
        protocol: pb::Protocol::Tcp.into(),
        family: pb::Family::Ipv4.into(),
    };
    let edges = pb::Edges {
        ports: vec![key.clone()],
        edges: vec![
            edge("192.0.2.7", "10.244.1.1:8080", 5),
            edge("192.0.2.7", "10.244.1.9:8080", 9),
            edge("rubbish", "10.244.1.1:8080", 1),
        ],
        more: 40,
        covered_s: 300,
        ..pb::Edges::default()
    };
    let answers = async {
        let asked = off.question().await;
        let none = pb::Edges {
            error: "its agent does not count".to_owned(),
            ..pb::Edges::default()
        };
        off.reply(&asked, with_edges(none)).await;
        let asked = agent.question().await;
        let question = asked.edges.as_ref().unwrap();
        assert_eq!((question.since_s, question.most), (600, 1_000));
        assert_eq!(question.services, ["shop/web"]);
        agent.reply(&asked, with_edges(edges)).await;
    };
    let request = pb::GraphRequest {
        services: vec!["shop/web".to_owned()],
        since_s: 600,
        ..pb::GraphRequest::default()
    };
    let server = server(&bound);
    let (answer, ()) = tokio::join!(server.get_graph(Request::new(request)), answers);
    let answer = answer.unwrap().into_inner();
    let nodes = answer.nodes.as_ref().unwrap();
    assert_eq!((nodes.asked, nodes.answered, answer.more), (2, 1, 40));
    assert_eq!(nodes.silent[0].reason, "its agent does not count");
    assert_eq!(
        (&answer.partial[0].node[..], answer.partial[0].seconds),
        ("n2", 300)
    );
    assert_eq!((answer.clients.len(), answer.ports), (1, vec![key]));
    let nodes = answer.endpoints.iter().map(|of| of.node.as_str());
    assert_eq!(nodes.collect::<Vec<_>>(), ["", "n1"]);
    let edges = answer.edges.iter().map(|of| (of.client, of.endpoint, of.connections));
    assert_eq!(edges.collect::<Vec<_>>(), [(0, 0, 9), (0, 1, 5)]);
}

/// An agent has one question at a time, and only a limited number waits, whatever the number of
/// clients.
#[tokio::test]
async fn many_questions_wait_for_each_other_and_too_many_are_not_asked() {
    let (bound, _folder) = control_plane(WEB).await;
    let mut agent = Agent::connect(&bound, "n1", some()).await;
    tokio::time::pause();
    let answers = async {
        let mut answered = 0;
        while let Ok(question) = timeout(Duration::from_secs(1), agent.questions.recv()).await {
            let waiting = agent.questions.try_recv();
            assert!(waiting.is_err(), "a second question: {waiting:?}");
            agent.answer(&question.unwrap(), Vec::new()).await;
            answered += 1;
        }
        answered
    };
    let people = futures_util::future::join_all((0..50).map(|_| describe(&bound)));
    let (described, answered) = tokio::join!(people, answers);
    let errors = described.iter().map(|nodes| nodes[0].servers.as_ref().unwrap().error.clone());
    let refused: Vec<String> = errors.filter(|error| !error.is_empty()).collect();
    assert_eq!(refused.len() + answered, 50);
    assert!((1..50).contains(&answered), "{answered}");
    let why = "its agent disconnected, or has too many open questions";
    assert!(refused.iter().all(|error| error == why), "{refused:?}");
}

#[tokio::test]
async fn an_agent_gets_no_more_memory_than_honest_ones() {
    let (bound, _folder) = control_plane(WEB).await;
    let stats = pb::ServerStats {
        drains: vec![pb::DrainingServer::default(); 1_000],
        ..Default::default()
    };
    let mut agent = Agent::connect(&bound, "n1", Some(stats)).await;
    let records = bound.hub().agents().records();
    let families = &records["n1"].report.as_ref().unwrap().families;
    let drains = families[0].servers.as_ref().unwrap().drains.len();
    assert_eq!((families.len(), drains), (2, 16));

    let huge = pb::Report {
        failures: vec![pb::ObjectFailure {
            reason: "x".repeat(kplane_proto::MAX_MESSAGE_BYTES),
            ..Default::default()
        }],
        ..Default::default()
    };
    agent.say(agent_message::Kind::Report(huge)).await;
    let ended = agent.ended.wait_for(Option::is_some);
    let code = *timeout(DEADLINE, ended).await.unwrap().unwrap();
    assert_eq!(code, Some(Code::OutOfRange));
}

/// Nothing may come to the Pod shop/db-0 on n1; the Pod ops/job calls it.
const POLICIES: &str = "
kind: Node
apiVersion: v1
metadata: {name: n1}
---
kind: Node
apiVersion: v1
metadata: {name: n2}
---
kind: Pod
apiVersion: v1
metadata: {name: db-0, namespace: shop}
spec: {nodeName: n1}
status: {phase: Running, podIP: 10.244.1.1, podIPs: [{ip: 10.244.1.1}]}
---
kind: Pod
apiVersion: v1
metadata: {name: job, namespace: ops}
spec: {nodeName: n2}
status: {phase: Running, podIP: 10.244.2.1, podIPs: [{ip: 10.244.2.1}]}
---
kind: NetworkPolicy
apiVersion: networking.k8s.io/v1
metadata: {name: deny, namespace: shop}
spec: {podSelector: {}}
";

fn counted(packets: u64) -> pb::Denials {
    let direction = pb::PolicyDirection::Ingress.into();
    pb::Denials {
        pods: vec![pb::DeniedPod {
            address: "10.244.1.1".to_owned(),
            direction,
            packets,
        }],
        packets: vec![pb::DeniedPacket {
            direction,
            from: "10.244.2.1".to_owned(),
            to: "10.244.1.1".to_owned(),
            protocol: 6,
            to_port: 5432,
            ..pb::DeniedPacket::default()
        }],
        ..pb::Denials::default()
    }
}

/// Answers one question about denied packets, which is returned.
async fn deny(agent: &mut Agent, denials: Option<pb::Denials>) -> pb::DenialsQuestion {
    let asked = agent.question().await;
    let inspection = pb::Inspection {
        denials,
        ..pb::Inspection::default()
    };
    agent.reply(&asked, inspection).await;
    asked.denials.unwrap()
}

fn bit(capability: pb::Capability) -> u64 {
    1 << (capability as u64 - 1)
}

/// A control plane with these policies, and the agents of both nodes.
async fn enforcing() -> (StatusServer, [Agent; 2], (Bound, tempfile::TempDir)) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("all.yaml"), POLICIES).unwrap();
    let admission = Admission {
        network_policies: Some(Enforce::On),
        ..Admission::default()
    };
    let bound = synced(Config {
        admission,
        ..Config::new(Origin::Manifests(folder.path().to_owned()))
    })
    .await;
    let agents = [
        Agent::connect(&bound, "n1", None).await,
        Agent::connect(&bound, "n2", None).await,
    ];
    let server = server(&bound);
    (server, agents, (bound, folder))
}

#[tokio::test]
async fn denied_packets_are_asked_of_all_nodes_and_get_the_names_of_pods() {
    let (server, [mut first, mut second], _plane) = enforcing().await;
    let request = pb::DropsRequest::default();
    let (drops, asked, _) = tokio::join!(
        server.get_drops(Request::new(request)),
        deny(&mut first, Some(counted(7))),
        // An agent of an earlier version.
        deny(&mut second, None),
    );
    assert_eq!(asked.follower, 0);
    let drops = drops.unwrap().into_inner();
    let pod = &drops.pods[0];
    assert_eq!((&*pod.pod, &*pod.node, pod.packets), ("shop/db-0", "n1", 7));
    let nodes = drops.nodes.as_ref().unwrap();
    assert_eq!((nodes.asked, nodes.answered), (2, 1));
    assert!(
        nodes.silent[0].reason.contains("update it"),
        "{:?}",
        nodes.silent
    );

    // `why` says how often it has happened.
    let judged = pb::JudgeConnectionRequest {
        from: "ops/job".to_owned(),
        to: "shop/db-0".to_owned(),
        port: 5432,
        ..pb::JudgeConnectionRequest::default()
    };
    let (judged, _) = tokio::join!(
        server.judge_connection(Request::new(judged)),
        deny(&mut first, Some(counted(7))),
    );
    let notes = judged.unwrap().into_inner().notes;
    let shown = "n1 has dropped 7 packets of new connections to Pod shop/db-0;";
    assert!(notes[0].starts_with(shown), "{notes:?}");
}

#[tokio::test]
async fn a_pods_denied_packets_are_followed_on_its_node_alone() {
    let (server, [mut first, mut second], _plane) = enforcing().await;
    let request = pb::DropsRequest {
        namespace: "shop".to_owned(),
        pod: "db-0".to_owned(),
        follower: 9,
        ..pb::DropsRequest::default()
    };
    let (followed, asked) = tokio::join!(
        server.follow_drops(Request::new(request.clone())),
        deny(&mut first, Some(counted(7))),
    );
    assert_eq!(
        (asked.follower, &*asked.namespace, &*asked.pod),
        (9, "shop", "db-0")
    );
    let followed = followed.unwrap().into_inner();
    let packet = &followed.packets[0];
    assert_eq!(
        (&*packet.from_pod, &*packet.to_pod),
        ("ops/job", "shop/db-0")
    );
    assert_eq!(packet.isolating, ["shop/deny"]);
    assert!(second.questions.try_recv().is_err());

    // A node that cannot says why, and is no node without denied packets.
    let forbidden = pb::Denials {
        error: "another program reads the log".to_owned(),
        ..pb::Denials::default()
    };
    let (followed, _) = tokio::join!(
        server.follow_drops(Request::new(request.clone())),
        deny(&mut first, Some(forbidden)),
    );
    let followed = followed.unwrap().into_inner();
    assert_eq!(
        followed.nodes.as_ref().unwrap().silent[0].reason,
        "another program reads the log"
    );

    for (pod, follower, code) in [("x", 9, Code::NotFound), ("db-0", 0, Code::InvalidArgument)] {
        let request = pb::DropsRequest {
            pod: pod.to_owned(),
            follower,
            ..request.clone()
        };
        let refused = server.follow_drops(Request::new(request)).await;
        assert_eq!(refused.unwrap_err().code(), code);
    }
}
