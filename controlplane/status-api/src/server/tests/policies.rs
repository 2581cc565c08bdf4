//! NetworkPolicies: lists, descriptions and verdicts.

use http::HeaderMap;
use kplane_agents::connection_limits::{ConnectionGuard, TransportIdentity};
use kplane_agents::identity::{ADMINS, AuthenticatorConfig, Port};
use kplane_desired_state::source::Located;
use kplane_rig::cluster::objects;
use kplane_tls::Subject;
use serde_json::{Value, json};

use super::*;

fn policy(name: &str, spec: &Value) -> Located {
    Located::sample(&json!({
        "kind": "NetworkPolicy",
        "metadata": {"namespace": "shop", "name": name}, "spec": spec,
    }))
}

fn pod(namespace: &str, name: &str, app: &str, ip: &str) -> Located {
    Located::sample(&json!({
        "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "labels": {"app": app}},
        "spec": {"nodeName": "n1"},
        "status": {"podIP": ip, "podIPs": [{"ip": ip}], "phase": "Running"},
    }))
}

fn namespace(name: &str, team: &str) -> Located {
    Located::sample(&json!({
        "kind": "Namespace",
        "metadata": {"name": name, "labels": {"team": team}},
    }))
}

fn cluster() -> Vec<Located> {
    let node = Located::sample(&json!({
        "kind": "Node",
        "metadata": {"name": "n1"},
        "spec": {"podCIDRs": ["10.0.0.64/26"]},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
    }));
    let db = json!({
        "podSelector": {"matchLabels": {"app": "db"}},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"ipBlock": {"cidr": "198.51.100.0/24", "except": ["198.51.100.9/32"]}}]},
            {
                "from": [
                    {"podSelector": {"matchLabels": {"app": "job"}}},
                    {
                        "podSelector": {"matchLabels": {"app": "web"}},
                        "namespaceSelector": {"matchLabels": {"team": "a"}},
                    },
                ],
                "ports": [{"port": 5432}, {"protocol": "UDP", "port": 53, "endPort": 60}],
            },
            {"from": [{"ipBlock": {"cidr": "10.0.0.0/33"}}]},
        ],
    });
    let nothing = json!({"policyTypes": ["Ingress", "Egress"]});
    vec![
        node,
        namespace("shop", "a"),
        namespace("other", "b"),
        pod("shop", "db-0", "db", "10.0.0.1"),
        pod("shop", "web-0", "web", "10.0.0.2"),
        pod("other", "web-0", "web", "10.0.0.3"),
        policy("db", &db),
        policy("default-deny", &nothing),
    ]
}

async fn server(enforce: bool) -> StatusServer {
    server_of(enforce, cluster()).await
}

async fn server_of(enforce: bool, objects: Vec<Located>) -> StatusServer {
    StatusServer::new(hub_of(enforce, objects).await)
}

async fn hub_of(enforce: bool, objects: Vec<Located>) -> Arc<Hub> {
    let admission = Admission {
        network_policies: enforce.then_some(kplane_desired_state::admission::Enforce::On),
        ..Admission::default()
    };
    let (hub, sink) = Hub::sample_with_index("test", admission);
    let kinds = if enforce { &Kind::WITH_POLICIES[..] } else { &Kind::ALL };
    sink.send(Batch::sample(kinds, objects)).await.unwrap();
    let mut head = hub.store().head();
    let synced = head.wait_for(|head| head.synced);
    timeout(DEADLINE, synced).await.unwrap().unwrap();
    hub
}

async fn list(server: &StatusServer, namespace: &str) -> Vec<String> {
    let mut request = pb::ListPoliciesRequest {
        namespace: namespace.to_owned(),
        page_size: 1,
        page_token: String::new(),
    };
    let mut lines = Vec::new();
    loop {
        let page = server.list_policies(Request::new(request.clone())).await.unwrap().into_inner();
        assert!(page.policies.len() <= 1);
        lines.extend(page.policies.iter().map(|of| {
            let pb::PolicySummary {
                namespace,
                name,
                ingress,
                egress,
                pods,
                tier,
                priority,
            } = of;
            let mut line = format!("{namespace}/{name} {ingress} {egress} {pods}");
            if !tier.is_empty() {
                line.push_str(&format!(" {tier} {priority}"));
            }
            line
        }));
        request.page_token = page.next_page_token;
        if request.page_token.is_empty() {
            return lines;
        }
    }
}

/// Describes a policy with this name behind its namespace, which may be empty.
async fn describe(server: &StatusServer, policy: &str) -> Result<pb::PolicyDescription, Status> {
    let (namespace, name) = policy.split_once('/').unwrap();
    let request = pb::DescribePolicyRequest {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    };
    let described = server.describe_policy(Request::new(request)).await?;
    Ok(described.into_inner())
}

/// Asks what policies make of a connection.
async fn judged(
    server: &StatusServer,
    from: &str,
    to: &str,
    port: u32,
) -> Result<pb::ConnectionJudgement, Status> {
    let request = pb::JudgeConnectionRequest {
        from: from.to_owned(),
        to: to.to_owned(),
        port,
        ..pb::JudgeConnectionRequest::default()
    };
    let judged = server.judge_connection(Request::new(request)).await?;
    Ok(judged.into_inner())
}

#[tokio::test]
async fn policies_come_in_pages_and_by_namespace() {
    let server = server(true).await;
    let all = ["shop/db true false 1", "shop/default-deny true true 2"];
    assert_eq!(list(&server, "").await, all);
    assert_eq!(list(&server, "shop").await, all);
    assert_eq!(list(&server, "other").await, [""; 0]);
    let wrong = pb::ListPoliciesRequest {
        page_token: "shop".to_owned(),
        ..pb::ListPoliciesRequest::default()
    };
    let wrong = server.list_policies(Request::new(wrong)).await;
    assert_eq!(wrong.unwrap_err().code(), Code::InvalidArgument);
    let fleet = server.get_fleet(Request::new(pb::GetFleetRequest::default())).await.unwrap();
    let plane = fleet.into_inner().control_plane.unwrap();
    assert_eq!(plane.policies, 2);
}

#[tokio::test]
async fn a_policy_has_its_rules_in_words_and_its_problems() {
    let server = server(true).await;
    let db = describe(&server, "shop/db").await.unwrap();
    assert_eq!(db.selector, "app=db");
    assert_eq!(
        db.ingress,
        [
            "from 198.51.100.0/24 except 198.51.100.9/32, to all ports",
            "from Pods app=job, and Pods app=web in namespaces team=a, to ports TCP 5432, UDP 53-60",
            "from no peer, to no port",
        ]
    );
    assert_eq!((db.egress.len(), db.more_rules), (0, 0));
    assert_eq!(db.pods, ["db-0"]);
    let codes = db.issues.iter().map(|issue| issue.code.as_str());
    assert_eq!(codes.collect::<Vec<_>>(), ["InvalidPolicy"]);
    let deny = describe(&server, "shop/default-deny").await.unwrap();
    assert_eq!(deny.pods, ["db-0", "web-0"]);
    let codes = deny.issues.iter().map(|issue| issue.code.as_str());
    assert_eq!(codes.collect::<Vec<_>>(), ["EgressWithoutDns"]);
    let none = describe(&server, "shop/x").await.unwrap_err();
    assert_eq!(none.code(), Code::NotFound);
    assert!(none.message().contains("no NetworkPolicy shop/x"), "{none}");
}

#[tokio::test]
async fn verdicts_name_what_decided() {
    use pb::PolicyVerdict::{Allowed, Denied, Itself, NotIsolated};

    let server = server(true).await;
    let judge = async |from: &str, to: &str, port| {
        let judged = judged(&server, from, to, port).await?;
        let (egress, ingress) = (judged.egress.unwrap(), judged.ingress.unwrap());
        let verdicts = (egress.verdict(), ingress.verdict());
        assert_eq!(
            judged.allowed,
            egress.verdict() != Denied && ingress.verdict() != Denied
        );
        Ok::<_, Status>((verdicts, egress.reason, ingress, judged.notes))
    };
    // The sender is isolated, and the receiver's policy allows it.
    let (verdicts, reason, ingress, notes) = judge("shop/web-0", "shop/db-0", 5432).await.unwrap();
    assert_eq!(verdicts, (Denied, Allowed));
    assert_eq!(
        reason,
        "no rule of shop/default-deny allows connections to Pod shop/db-0, TCP 5432; Pod shop/web-0 is isolated for \
         connections from it"
    );
    assert_eq!(ingress.reason, "shop/db allows it by spec.ingress[1]");
    assert_eq!(
        ingress.rule,
        "from Pods app=job, and Pods app=web in namespaces team=a, to ports TCP 5432, UDP 53-60"
    );
    assert_eq!(ingress.peer, "Pods app=web in namespaces team=a");
    assert!(notes.is_empty());
    // A namespace that the peer does not mean, and an address of a Pod.
    let (verdicts, _, ingress, _) = judge("10.0.0.3", "10.0.0.1", 5432).await.unwrap();
    assert_eq!(verdicts, (NotIsolated, Denied));
    assert_eq!(ingress.isolating, ["shop/db", "shop/default-deny"]);
    let (verdicts, _, ingress, _) = judge("198.51.100.7", "shop/db-0", 1).await.unwrap();
    assert_eq!(verdicts, (NotIsolated, Allowed));
    assert_eq!(ingress.peer, "198.51.100.0/24 except 198.51.100.9/32");
    let (verdicts, ..) = judge("shop/db-0", "10.0.0.1", 1).await.unwrap();
    assert_eq!(verdicts, (Itself, Itself));
    // A node and its own Pods always reach each other.
    for (from, to) in [("192.0.2.1", "shop/db-0"), ("10.0.0.1", "192.0.2.1")] {
        let (verdicts, reason, _, notes) = judge(from, to, 5432).await.unwrap();
        assert_eq!(verdicts, (NotIsolated, NotIsolated), "{from}");
        assert!(reason.starts_with("n1 is the node of Pod shop/db-0: "));
        assert!(notes.is_empty(), "{notes:?}");
    }
    let (verdicts, _, _, notes) = judge("192.0.2.1", "10.1.0.1", 5432).await.unwrap();
    assert_eq!(verdicts, (NotIsolated, NotIsolated));
    assert!(
        notes[0].starts_with("192.0.2.1 is an address of n1: "),
        "{notes:?}"
    );
    for (from, to, port, code) in [
        ("shop/x", "shop/db-0", 1, Code::NotFound),
        ("shop/db-0", "x", 1, Code::InvalidArgument),
        ("shop/db-0", "10.0.0.2", 0, Code::InvalidArgument),
        ("fd00::1", "10.0.0.2", 1, Code::InvalidArgument),
        // No Pod has it, and one may.
        ("10.0.0.77", "shop/db-0", 1, Code::NotFound),
        ("shop/db-0", "10.0.0.77", 1, Code::NotFound),
    ] {
        let refused = judge(from, to, port).await.unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
    }
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one cluster, all its answers")]
async fn cluster_policies_are_listed_described_and_named_in_verdicts() {
    let tier = |name: &str, spec: Value| {
        let kind = "ClusterNetworkPolicy";
        Located::sample(&json!({"kind": kind, "metadata": {"name": name}, "spec": spec}))
    };
    let mut objects = cluster();
    objects.push(tier(
        "deny-web",
        json!({
            "tier": "Admin", "priority": 10, "subject": {"namespaces": {}},
            "ingress": [
                {"action": "Accept", "from": [{"domainNames": ["a.example"]}]},
                {"action": "Accept", "from": [{"namespaces": {"matchLabels": {"team": "a"}}}]},
            ],
        }),
    ));
    objects.push(tier(
        "last",
        json!({
            "tier": "Baseline", "priority": 0, "subject": {"pods": {
                "namespaceSelector": {"matchLabels": {"team": "b"}}, "podSelector": {"matchLabels": {"app": "web"}}}},
            "egress": [{"action": "Deny", "to": [{"networks": ["10.0.0.0/8"]}],
                "protocols": [{"tcp": {"destinationPort": {"number": 80}}}]}],
        }),
    ));
    let server = server_of(true, objects).await;
    assert_eq!(
        list(&server, "").await,
        [
            "/deny-web true false 3 Admin 10",
            "/last false true 1 Baseline 0",
            "shop/db true false 1",
            "shop/default-deny true true 2",
        ]
    );
    assert_eq!(list(&server, "shop").await.len(), 2);
    let last = describe(&server, "/last").await.unwrap();
    assert_eq!(last.selector, "Pods app=web in namespaces team=b");
    assert_eq!(last.egress, ["Deny: to 10.0.0.0/8, on ports TCP 80"]);
    assert_eq!(
        (last.pods, last.issues.len()),
        (vec!["other/web-0".to_owned()], 0)
    );
    let first = describe(&server, "/deny-web").await.unwrap();
    assert_eq!(first.ingress[0], "Accept: from no peer, to no port");
    assert_eq!(first.issues.len(), 1);
    let none = describe(&server, "/db").await.unwrap_err();
    assert!(
        none.message().contains("no NetworkPolicy default/db"),
        "{none}"
    );

    // NetworkPolicy default-deny would deny it.
    let accepted = judged(&server, "10.0.0.2", "shop/db-0", 80).await.unwrap();
    let ingress = accepted.ingress.unwrap();
    assert_eq!(ingress.verdict(), pb::PolicyVerdict::TierAccepted);
    assert_eq!(
        ingress.reason,
        "ClusterNetworkPolicy deny-web, spec.ingress[1] (Admin, priority 10) accepts it"
    );
    assert_eq!(
        ingress.rule,
        "Accept: from all Pods in namespaces team=a, to all ports"
    );
    let denied = judged(&server, "other/web-0", "10.0.0.9", 80).await.unwrap();
    let egress = denied.egress.unwrap();
    assert_eq!(
        (denied.allowed, egress.verdict()),
        (false, pb::PolicyVerdict::TierDenied)
    );
    assert_eq!(
        egress.reason,
        "ClusterNetworkPolicy last, spec.egress[0] (Baseline, priority 0) denies it; no NetworkPolicy isolates the Pod"
    );
}

#[tokio::test]
async fn a_control_plane_without_policies_says_how_to_get_them() {
    let server = server(false).await;
    let refused = server
        .list_policies(Request::new(pb::ListPoliciesRequest::default()))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("--network-policy"), "{refused}");
}

/// Adds a Service of both databases, one of which runs on a node of its own.
fn with_service(mut objects: Vec<Located>) -> Vec<Located> {
    let node = json!({
        "kind": "Node",
        "metadata": {"name": "n2"},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.2"}]},
    });
    let second = json!({
        "kind": "Pod",
        "metadata": {"namespace": "shop", "name": "db-1", "labels": {"app": "db"}},
        "spec": {"nodeName": "n2"},
        "status": {"podIP": "10.0.1.1", "podIPs": [{"ip": "10.0.1.1"}], "phase": "Running"},
    });
    let service = json!({
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": "db"},
        "spec": {"type": "NodePort", "clusterIP": "10.96.0.1", "ports": [{"port": 5432, "nodePort": 30432}]},
    });
    let slice = json!({
        "kind": "EndpointSlice",
        "metadata": {"namespace": "shop", "name": "db-1", "labels": {"kubernetes.io/service-name": "db"}},
        "addressType": "IPv4",
        "ports": [{"port": 5432}],
        "endpoints": [
            {"addresses": ["10.0.0.1"], "nodeName": "n1"},
            {"addresses": ["10.0.1.1"], "nodeName": "n2"},
        ],
    });
    objects.extend([
        Located::sample(&node),
        Located::sample(&second),
        Located::sample(&service),
        Located::sample(&slice),
    ]);
    objects
}

/// Returns the codes of what is wrong with a policy, and all texts.
async fn problems(objects: Vec<Located>, policy: &str) -> (Vec<String>, String) {
    let server = server_of(true, objects).await;
    let issues = describe(&server, policy).await.unwrap().issues;
    let warned = issues.iter().filter(|of| of.severity() == pb::Severity::Warning);
    let codes = warned.map(|issue| issue.code.clone());
    let texts = issues.iter().map(|issue| issue.reason.as_str());
    (codes.collect(), texts.collect::<Vec<_>>().join("\n"))
}

#[tokio::test]
async fn what_a_policy_hardly_means_is_a_warning() {
    let peer = |team: &str| {
        json!({
            "podSelector": {"matchLabels": {"app": "web"}},
            "namespaceSelector": {"matchLabels": {"team": team}},
        })
    };
    let with = |spec: Value| [cluster(), vec![policy("p", &spec)]].concat();
    let ingress = |peers: &[Value], port: Value| {
        let rule = json!({"from": peers, "ports": [{"port": port}]});
        json!({"policyTypes": ["Ingress"], "ingress": [rule]})
    };
    let (codes, text) = problems(
        with(ingress(&[peer("a"), peer("none")], json!(80))),
        "shop/p",
    )
    .await;
    assert_eq!(codes, ["SelectsNoNamespace"]);
    assert!(
        text.contains("spec.ingress[0] allows Pods app=web in namespaces team=none,"),
        "{text}"
    );
    let (codes, text) = problems(with(ingress(&[peer("a")], json!("http"))), "shop/p").await;
    assert_eq!(codes, ["NoSuchPortName"]);
    assert!(text.contains("port TCP http"), "{text}");
    let (codes, _) = problems(with(ingress(&[peer("a")], json!(80))), "shop/p").await;
    assert_eq!(codes, [""; 0]);

    // DNS is allowed if any policy of the Pod allows it.
    let egress = |port: u16| json!({"policyTypes": ["Egress"], "egress": [{"ports": [{"protocol": "UDP", "port": port}]}]});
    let (codes, text) = problems(with(egress(54)), "shop/p").await;
    assert_eq!(codes, ["EgressWithoutDns"]);
    assert!(text.contains("Pod shop/db-0"), "{text}");
    for policy in ["shop/p", "shop/default-deny"] {
        let (codes, _) = problems(with(egress(53)), policy).await;
        assert_eq!(codes, [""; 0], "{policy}");
    }

    // The Service's clients come with the address of the node that they reach.
    let (codes, text) = problems(with_service(cluster()), "shop/db").await;
    assert_eq!(codes, ["ClientsMasqueraded"]);
    assert!(text.contains("Service shop/db"), "{text}");
    let (codes, _) = problems(cluster(), "shop/db").await;
    assert_eq!(codes, [""; 0]);
}

/// A question about the Service, and who sends the packet.
fn sent(sender: pb::PacketSender, address: &str, node: &str) -> pb::ExplainRequest {
    pb::ExplainRequest {
        namespace: "shop".to_owned(),
        name: "db".to_owned(),
        sender: sender.into(),
        sender_address: address.to_owned(),
        node: node.to_owned(),
        ..pb::ExplainRequest::default()
    }
}

/// The same of a Pod with this name.
fn sent_by(pod: &str, node: &str) -> pb::ExplainRequest {
    pb::ExplainRequest {
        sender_pod: pod.to_owned(),
        ..sent(pb::PacketSender::Pod, "", node)
    }
}

async fn fate(
    server: &StatusServer,
    request: pb::ExplainRequest,
) -> Result<pb::Explanation, Status> {
    let reported = server.explain(Request::new(request)).await;
    reported.map(tonic::Response::into_inner)
}

/// Returns the addresses of the endpoints to which policies deny the way.
fn denied(reported: &pb::Explanation) -> Vec<&str> {
    reported
        .candidates
        .iter()
        .filter(|of| of.reason.contains("NetworkPolicies deny"))
        .map(|of| of.address.as_str())
        .collect()
}

#[tokio::test]
async fn a_packet_that_policies_deny_does_not_arrive_and_the_nearest_rule_says_what_it_lacks() {
    let server = server_of(true, with_service(cluster())).await;
    let reported = fate(&server, sent_by("other/web-0", "")).await.unwrap();
    assert_eq!(reported.outcome(), pb::PacketOutcome::Denied);
    assert_eq!(reported.node, "n1");
    assert_eq!(
        reported.summary,
        "the packet is dropped: NetworkPolicies deny the way to each of 2 endpoints"
    );
    let finding = &reported.findings[0];
    assert_eq!(
        (finding.code.as_str(), finding.severity()),
        ("PolicyDenies", pb::Severity::Error)
    );
    assert_eq!(
        finding.text,
        "NetworkPolicies deny the way to each of 2 endpoints: no rule of shop/db, shop/default-deny allows connections \
         from Pod other/web-0, TCP 5432; Pod shop/db-0 (10.0.0.1) is isolated for connections to it; spec.ingress[1] of \
         shop/db comes nearest: it allows connections from Pods app=job, and Pods app=web in namespaces team=a, to ports \
         TCP 5432, UDP 53-60, and Pod other/web-0 is none of its peers"
    );
    assert!(finding.fix.contains("kpctl describe policy shop/db"));
    // What the node would try tells nothing.
    let tried = server
        .try_service(Request::new(sent_by("other/web-0", "n1")))
        .await
        .unwrap()
        .into_inner();
    assert!(tried.error.contains("kubectl exec"), "{}", tried.error);
    // The sender's own policies.
    let reported = fate(&server, sent_by("shop/web-0", "")).await.unwrap();
    let text = &reported.findings[0].text;
    assert_eq!(reported.outcome(), pb::PacketOutcome::Denied);
    assert!(
        text.contains("no rule of shop/default-deny allows connections to"),
        "{text}"
    );
    // The right peer, and the wrong port.
    let judged = judged(&server, "shop/web-0", "shop/db-0", 80).await.unwrap();
    let reason = judged.ingress.unwrap().reason;
    assert!(
        reason.ends_with("and TCP 80 is none of its ports"),
        "{reason}"
    );
}

/// A caller who may not read who may reach whom learns it from no answer.
#[tokio::test]
async fn a_caller_without_the_right_learns_nothing_of_policies_from_the_fate_of_a_packet() {
    let hub = hub_of(true, with_service(cluster())).await;
    let server = StatusServer::new(Arc::clone(&hub));
    let authenticator = Authenticator::open(&AuthenticatorConfig::default(), hub, None).unwrap();
    for (group, may) in [("people", false), (ADMINS, true)] {
        let subject = Subject {
            name: "anna".to_owned(),
            groups: vec![group.to_owned()],
        };
        let connection = ConnectionGuard::of(TransportIdentity::Certificate(subject, None));
        let headers = HeaderMap::new();
        let caller = authenticator.authenticate(Port::Status, &connection, &headers).await;
        let mut request = Request::new(sent_by("other/web-0", ""));
        request.extensions_mut().insert(caller.unwrap());
        let reported = server.explain(request).await.unwrap().into_inner();
        assert_eq!(reported.outcome() == pb::PacketOutcome::Denied, may);
        assert_eq!(format!("{reported:?}").contains("shop/db-0"), may);
        assert_eq!(
            reported.summary.ends_with("if NetworkPolicies allow it"),
            !may
        );
    }
}

/// Connects an agent that has counted these denied packets.
fn counting_agent(
    hub: &Arc<Hub>,
    node: &str,
    reported: &'static [(&str, pb::PolicyDirection, u64)],
) -> Session {
    let begun = Session::begin(hub.agents(), &node.into(), &hello(node), String::new());
    let (session, _, mut questions) = begun.unwrap();
    tokio::spawn(async move {
        while let Some(asked) = questions[1].recv().await {
            let pods = reported.iter().map(|(address, direction, packets)| pb::DeniedPod {
                address: (*address).to_owned(),
                direction: (*direction).into(),
                packets: *packets,
            });
            let denials = asked.inspect.denials.as_ref().map(|_| pb::Denials {
                pods: pods.collect(),
                ..pb::Denials::default()
            });
            let answer = pb::Inspection {
                denials,
                ..pb::Inspection::default()
            };
            let _ = asked.answer.send(answer);
        }
    });
    session
}

#[tokio::test]
async fn a_service_says_who_isolates_its_pods_and_how_many_packets_were_denied() {
    use pb::PolicyDirection::{Egress, Ingress};

    let hub = hub_of(true, with_service(cluster())).await;
    let _first = counting_agent(
        &hub,
        "n1",
        &[
            ("10.0.0.1", Ingress, 5),
            ("10.0.0.1", Egress, 30),
            ("10.0.0.2", Ingress, 50),
        ],
    );
    let describe = async || {
        let request = pb::DescribeServiceRequest {
            namespace: "shop".to_owned(),
            name: "db".to_owned(),
        };
        let server = StatusServer::new(Arc::clone(&hub));
        let reported = server.describe_service(Request::new(request)).await;
        reported
            .unwrap()
            .into_inner()
            .findings
            .into_iter()
            .find(|of| of.code == "EndpointsIsolated")
            .unwrap()
    };
    let isolated = "2 of 2 Pods are isolated for connections to them by shop/db, shop/default-deny: only what a rule allows \
                    arrives";
    // Nobody knows what the other node has denied.
    let reported = describe().await;
    assert_eq!(
        reported.text,
        format!(
            "{isolated}; nodes denied at least 5 packets of new connections to them since then"
        )
    );
    assert_eq!(reported.severity(), pb::Severity::Info);
    let _second = counting_agent(&hub, "n2", &[("10.0.1.1", Ingress, 7)]);
    assert_eq!(
        describe().await.text,
        format!("{isolated}; nodes denied 12 packets of new connections to them since then")
    );
}

#[tokio::test]
async fn policies_judge_the_address_that_a_masqueraded_packet_has() {
    use pb::PacketSender::{Node, Outside, Pod};

    let server = server_of(true, with_service(cluster())).await;
    // The node reaches its own Pod, and is an address like others elsewhere (NP11).
    let reported = fate(&server, sent(Node, "", "n1")).await.unwrap();
    assert_eq!(denied(&reported), ["10.0.1.1:5432"]);
    assert_eq!(reported.outcome(), pb::PacketOutcome::Reaches);
    assert_eq!(
        reported.summary,
        "one of 2 endpoints gets the packet; NetworkPolicies deny the way to 1 of 2 endpoints"
    );
    assert_eq!(reported.findings[0].severity(), pb::Severity::Warning);
    // A rule allows the client, and only the endpoint on the node that was asked sees it (NP14).
    let by_node_port = |address: &str| pb::ExplainRequest {
        to: "192.0.2.1:30432".to_owned(),
        ..sent(Outside, address, "n1")
    };
    let reported = fate(&server, by_node_port("198.51.100.7")).await.unwrap();
    assert_eq!(denied(&reported), ["10.0.1.1:5432"]);
    let reported = fate(&server, by_node_port("198.51.100.9")).await.unwrap();
    assert_eq!(denied(&reported).len(), 2);
    // Nothing is claimed without the address that decides.
    let reported = fate(&server, sent(Pod, "", "n1")).await.unwrap();
    assert!(
        reported.summary.ends_with(", if NetworkPolicies allow its sender"),
        "{}",
        reported.summary
    );
    let steps = reported.steps.join("\n");
    assert!(
        steps.contains("isolate 2 of 2 endpoints, and the sender's address is not given"),
        "{steps}"
    );
}

/// A Service whose only endpoint is a program of a node, such as the API server.
fn with_program(node: &str) -> Vec<Located> {
    let service = json!({
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": "db"},
        "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 443}]},
    });
    let slice = json!({
        "kind": "EndpointSlice",
        "metadata": {"namespace": "shop", "name": "db-1", "labels": {"kubernetes.io/service-name": "db"}},
        "addressType": "IPv4",
        "ports": [{"port": 6443}],
        "endpoints": [{"addresses": [node]}],
    });
    let mut objects = cluster();
    objects.extend([Located::sample(&service), Located::sample(&slice)]);
    objects
}

#[tokio::test]
async fn an_isolated_pod_reaches_programs_of_its_own_node() {
    for (address, outcome) in [
        ("192.0.2.1", pb::PacketOutcome::Reaches),
        ("192.0.2.2", pb::PacketOutcome::Denied),
    ] {
        let server = server_of(true, with_program(address)).await;
        let reported = fate(&server, sent_by("shop/web-0", "")).await.unwrap();
        assert_eq!(reported.outcome(), outcome, "{}", reported.summary);
    }
}

#[tokio::test]
async fn a_sender_is_found_by_its_name() {
    let server = server_of(true, with_service(cluster())).await;
    for (request, code, hint) in [
        (
            sent_by("shop/x", ""),
            Code::NotFound,
            "kubectl get pods -n shop",
        ),
        (
            sent_by("shop/x", "n1"),
            Code::NotFound,
            "kubectl get pods -n shop",
        ),
        (sent_by("shop", ""), Code::InvalidArgument, "NAMESPACE/NAME"),
        (
            sent_by("shop/web-0", "n2"),
            Code::InvalidArgument,
            "is on node n1",
        ),
    ] {
        let refused = fate(&server, request).await.unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
        assert!(refused.message().contains(hint), "{refused}");
    }
    let server = server_of(false, with_service(cluster())).await;
    let refused = fate(&server, sent_by("shop/web-0", "")).await.unwrap_err();
    assert!(refused.message().contains("--via NODE"), "{refused}");
    let reported = fate(&server, sent_by("shop/web-0", "n1")).await.unwrap();
    assert_eq!(reported.outcome(), pb::PacketOutcome::Reaches);
}

/// What is broken says of policies what the status says, and not who may reach whom: that takes a right of its own.
#[tokio::test]
async fn findings_say_no_more_of_policies_than_the_status() {
    let mut objects = cluster();
    objects.push(Located::sample(&objects::service(
        "shop",
        "db",
        json!({"clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9"]}),
    )));
    objects.push(Located::sample(&objects::slice(
        "shop",
        "db-1",
        "db",
        [objects::endpoint("10.0.0.1", "n1")],
    )));
    let server = server_of(true, objects).await;
    let request = Request::new(pb::ListFindingsRequest::default());
    let found = server.list_findings(request).await.unwrap().into_inner().findings;
    let request = Request::new(pb::GetFleetRequest::default());
    let fleet = server.get_fleet(request).await.unwrap().into_inner();
    let issues = fleet.control_plane.unwrap().issues;
    let of_policies: Vec<_> =
        found.iter().filter(|of| of.object.starts_with("networkpolicy/")).collect();
    assert_eq!(of_policies.len(), 1, "{found:?}");
    assert_eq!(of_policies[0].object, "networkpolicy/shop/db");
    assert!(
        issues.iter().any(|issue| issue.reason == of_policies[0].cause),
        "{issues:?}"
    );
    // The Service's Pod is isolated by these.
    for policy in ["default-deny", "shop/db by"] {
        assert!(
            found.iter().all(|of| !of.cause.contains(policy)),
            "{found:?}"
        );
    }
}
