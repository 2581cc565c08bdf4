//! Answers of a control plane, for kpctl's unit tests, and for those of the program.

#![allow(clippy::unwrap_used, reason = "for tests")]

use kplane_proto::v1 as pb;

/// 2026-11-21T06:15:00Z, in milliseconds since 1970.
pub const NOW_MS: u64 = 1_795_241_700_000;

/// Random in real life.
pub const EPOCH: u64 = 0x00c0_ffee_dead_beef;

/// So many seconds ago.
pub fn ago(seconds: u64) -> u64 {
    NOW_MS - seconds * 1_000
}

fn strings(items: &[&str]) -> Vec<String> {
    items.iter().map(|&item| item.to_owned()).collect()
}

/// The key of a TCP port; `service` is `namespace/name`.
pub fn key(service: &str, port: &str, family: pb::Family) -> pb::ServiceKey {
    let (namespace, name) = service.split_once('/').unwrap();
    pb::ServiceKey {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        port_name: port.to_owned(),
        protocol: pb::Protocol::Tcp.into(),
        family: family.into(),
    }
}

/// A control plane at revision 4711 that is as it should be.
pub fn control_plane() -> pb::ControlPlaneStatus {
    pb::ControlPlaneStatus {
        version: "0.1.0".to_owned(),
        epoch: EPOCH,
        revision: 4711,
        now_ms: NOW_MS,
        started_at_ms: ago(3 * 3600 + 300),
        revision_at_ms: ago(12),
        source: "manifests".to_owned(),
        synced: true,
        upstream_age_ms: 2_400,
        services: 10_000,
        endpoints: 20_000,
        issues: Vec::new(),
        ..Default::default()
    }
}

/// What an agent reports that has applied this revision.
pub fn report(applied: u64) -> pb::Report {
    pb::Report {
        epoch: EPOCH,
        received_revision: applied,
        applied_revision: applied,
        verified_revision: applied,
        last_sync: Some(pb::SyncStats {
            revision: applied,
            finished_at_ms: ago(12),
            total_us: 412,
            plan_us: 31,
            encode_us: 40,
            kernel_us: 341,
            operations: 2,
            bytes: 208,
            end_to_end_ms: 3,
        }),
        objects: Some(pb::ObjectCounts {
            services: 10_000,
            endpoints: 20_000,
        }),
        families: vec![pb::FamilyStatus {
            family: pb::Family::Ipv4.into(),
            programmed: true,
            verified_at_ms: ago(192),
            error: String::new(),
            error_since_ms: 0,
            ..Default::default()
        }],
        round_trip_us: 230,
        syncs_ok: 42,
        ..Default::default()
    }
}

/// A fleet whose control plane was started on a folder that is not whole, and holds most of what it had.
pub fn holding_fleet() -> pb::Fleet {
    let mut fleet = healthy_fleet();
    let plane = fleet.control_plane.as_mut().unwrap();
    plane.confidence = pb::Confidence::Partial.into();
    plane.doubt =
        "api.yaml is refused in document 2, line 14: is not valid YAML: unclosed bracket '['; fix \
         that, or run `kpctl approve` if nothing is missing"
            .to_owned();
    plane.held = Some(pb::Held {
        services: 991,
        without_endpoints: 3,
        reason: "they are missing from the source, and 991 of 1001 Services would be removed"
            .to_owned(),
        since_ms: ago(192),
        examples: strings(&["shop/api", "shop/cart", "shop/search", "shop/web"]),
        policies: 0,
    });
    fleet
}

/// A node that is as it should be.
pub fn node(name: &str) -> pb::NodeStatus {
    pb::NodeStatus {
        name: name.to_owned(),
        state: pb::NodeState::InSync.into(),
        since_ms: ago(3 * 3600),
        backend: "nftables".to_owned(),
        agent_version: "0.1.0".to_owned(),
        peer: "10.0.0.11:41234".to_owned(),
        last_heard_ms: ago(1),
        wanted_revision: 4711,
        report: Some(report(4711)),
        network_programming: Some(pb::NetworkProgramming {
            count: 64,
            last_ms: 12,
            p50_ms: 9,
            max_ms: 1_340,
            last_at_ms: ago(12),
        }),
        zone: "eu-west-1a".to_owned(),
        addresses: strings(&["10.0.0.11", "fd00::11"]),
        pod_cidrs: strings(&["10.244.1.0/24", "fd00:10:244:1::/64"]),
        ..Default::default()
    }
}

/// A node that is three revisions behind.
pub fn syncing(name: &str) -> pb::NodeStatus {
    let mut report = report(4698);
    report.received_revision = 4711;
    report.last_sync.as_mut().unwrap().total_us = 3_140;
    pb::NodeStatus {
        state: pb::NodeState::Syncing.into(),
        since_ms: ago(4),
        report: Some(report),
        ..node(name)
    }
}

/// A failure to apply a Service.
pub fn failure(service: &str, reason: &str) -> pb::ObjectFailure {
    pb::ObjectFailure {
        key: Some(key(service, "http", pb::Family::Ipv4)),
        reason: reason.to_owned(),
        since_ms: ago(192),
        degraded: false,
        policies: false,
    }
}

/// A node that cannot apply some Services.
pub fn failing(name: &str) -> pb::NodeStatus {
    let reason = "node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy); stop \
                  it or choose another port";
    let mut degraded = failure(
        "shop/api",
        "the kernel has no nft_fib: martian sources pass",
    );
    degraded.degraded = true;
    let mut report = report(4711);
    report.failures = vec![
        failure("shop/web", reason),
        degraded,
        failure("shop/cart", reason),
        failure("shop/search", reason),
        failure("shop/login", reason),
    ];
    pb::NodeStatus {
        state: pb::NodeState::Failing.into(),
        since_ms: ago(192),
        report: Some(report),
        last_error: "5 objects are not applied as desired".to_owned(),
        ..node(name)
    }
}

/// A node that was heard of last a while ago.
pub fn disconnected(name: &str) -> pb::NodeStatus {
    pb::NodeStatus {
        state: pb::NodeState::Disconnected.into(),
        since_ms: ago(840),
        last_heard_ms: ago(851),
        peer: String::new(),
        report: Some(report(4650)),
        last_error: "connection reset by peer".to_owned(),
        ..node(name)
    }
}

/// A Node object that no agent has come for.
pub fn no_agent(name: &str) -> pb::NodeStatus {
    pb::NodeStatus {
        name: name.to_owned(),
        state: pb::NodeState::NoAgent.into(),
        since_ms: ago(3 * 86_400 + 4 * 3_600),
        wanted_revision: 4711,
        addresses: strings(&["10.0.0.15"]),
        ..Default::default()
    }
}

/// A warning and an error.
pub fn issues() -> Vec<pb::InputIssue> {
    vec![
        pb::InputIssue {
            severity: pb::Severity::Warning.into(),
            location: "shop.yaml, document 7, line 91".to_owned(),
            kind: "EndpointSlice".to_owned(),
            namespace: "shop".to_owned(),
            name: "api-7xk2p".to_owned(),
            reason: "endpoint 127.0.0.1 is a loopback address and is left out".to_owned(),
            alike: 0,
            code: "InvalidAddress".to_owned(),
        },
        pb::InputIssue {
            severity: pb::Severity::Error.into(),
            location: "shop.yaml, document 2, line 14".to_owned(),
            kind: "Service".to_owned(),
            namespace: "shop".to_owned(),
            name: "checkout".to_owned(),
            reason:
                "port 99999 is not between 1 and 65535; the Service is served as it was before \
                     this change"
                    .to_owned(),
            alike: 0,
            code: "InvalidPort".to_owned(),
        },
    ]
}

/// These nodes, and a control plane that is as it should be.
pub fn fleet(nodes: Vec<pb::NodeStatus>) -> pb::Fleet {
    pb::Fleet {
        control_plane: Some(control_plane()),
        nodes,
        ..Default::default()
    }
}

/// Everything in sync.
pub fn healthy_fleet() -> pb::Fleet {
    fleet(["node-a", "node-b", "node-c"].map(node).into())
}

/// One of each kind of trouble.
pub fn troubled_fleet() -> pb::Fleet {
    let mut fleet = fleet(vec![
        node("node-a"),
        syncing("node-b"),
        failing("node-c"),
        disconnected("node-d"),
        no_agent("node-e"),
    ]);
    fleet.control_plane.as_mut().unwrap().issues = issues();
    fleet
}

/// An endpoint; its state says whether it is ready, serving, terminating.
pub fn endpoint(address: &str, node: &str, state: [bool; 3]) -> pb::EndpointView {
    let [ready, serving, terminating] = state;
    pb::EndpointView {
        address: address.to_owned(),
        node: node.to_owned(),
        ready,
        serving,
        terminating,
        ..Default::default()
    }
}

/// `shop/web`, port http, IPv4: three endpoints, two of them ready.
pub fn web() -> pb::ServiceView {
    let mut endpoints = vec![
        endpoint("10.244.1.12:8080", "node-a", [true, true, false]),
        endpoint("10.244.2.7:8080", "node-b", [true, true, false]),
        endpoint("10.244.3.9:8080", "node-c", [false, true, true]),
    ];
    endpoints[0].zone_hints = strings(&["eu-west-1a"]);
    endpoints[1].zone_hints = strings(&["eu-west-1b", "eu-west-1c"]);
    pb::ServiceView {
        key: Some(key("shop/web", "http", pb::Family::Ipv4)),
        port: 80,
        cluster_ip: "10.96.0.10".to_owned(),
        load_balancer_ips: strings(&["203.0.113.7"]),
        node_port: 30080,
        external_policy: pb::TrafficPolicy::Local.into(),
        affinity_timeout_s: 10_800,
        ipvs_scheduler: "mh".to_owned(),
        proxied: Some(pb::Proxied { no_retry: true }),
        source_ranges: strings(&["198.51.100.0/24", "192.0.2.0/24"]),
        health_check_node_port: 32_000,
        endpoints,
        revision: 4711,
        ..Default::default()
    }
}

/// `shop/web`, port http, IPv6.
pub fn web_v6() -> pb::ServiceView {
    pb::ServiceView {
        key: Some(key("shop/web", "http", pb::Family::Ipv6)),
        cluster_ip: "fd00:10:96::a".to_owned(),
        load_balancer_ips: Vec::new(),
        node_port: 30080,
        endpoints: vec![endpoint(
            "[fd00:10:244:1::c]:8080",
            "node-a",
            [true, true, false],
        )],
        ..web()
    }
}

/// Services of two namespaces; sorted as the control plane does.
pub fn services() -> Vec<pb::ServiceView> {
    let dns = |port: &str, protocol: pb::Protocol| pb::ServiceView {
        key: Some(pb::ServiceKey {
            protocol: protocol.into(),
            ..key("kube-system/kube-dns", port, pb::Family::Ipv4)
        }),
        port: 53,
        cluster_ip: "10.96.0.2".to_owned(),
        endpoints: vec![
            endpoint("10.244.1.2:53", "node-a", [true, true, false]),
            endpoint("10.244.2.2:53", "node-b", [true, true, false]),
        ],
        revision: 3,
        ..Default::default()
    };
    let database = pb::ServiceView {
        key: Some(key("shop/database", "", pb::Family::Ipv4)),
        port: 5432,
        cluster_ip: "10.96.0.11".to_owned(),
        endpoints: vec![endpoint("10.244.2.8:5432", "node-b", [false, false, false])],
        revision: 4700,
        ..Default::default()
    };
    vec![
        dns("dns", pb::Protocol::Udp),
        dns("dns-tcp", pb::Protocol::Tcp),
        database,
        web(),
        web_v6(),
    ]
}

fn held(node: &str, local: &[&str]) -> pb::NodeServiceStatus {
    let v6 = strings(&["[fd00:10:244:1::c]:8080"]);
    pb::NodeServiceStatus {
        node: node.to_owned(),
        programmed: true,
        reason: String::new(),
        wanted_revision: 4711,
        applied_revision: 4711,
        endpoints: vec![
            pb::NodeEndpoints {
                key: Some(key("shop/web", "http", pb::Family::Ipv4)),
                cluster: strings(&["10.244.1.12:8080", "10.244.2.7:8080"]),
                local: strings(local),
            },
            pb::NodeEndpoints {
                key: Some(key("shop/web", "http", pb::Family::Ipv6)),
                cluster: v6,
                local: Vec::new(),
            },
        ],
        last_change: Some(pb::ProgrammedChange {
            latency_ms: 12,
            at_ms: ago(192),
        }),
        servers: None,
    }
}

/// `shop/web` on three nodes, one of which does not hold it.
pub fn description() -> pb::ServiceDescription {
    let failing = pb::NodeServiceStatus {
        programmed: false,
        reason: "node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy); stop \
                 it or choose another port"
            .to_owned(),
        applied_revision: 4650,
        last_change: Some(pb::ProgrammedChange {
            latency_ms: 1_250,
            at_ms: ago(840),
        }),
        ..held("node-c", &["10.244.3.9:8080"])
    };
    pb::ServiceDescription {
        ports: vec![web(), web_v6()],
        nodes: vec![
            held("node-a", &["10.244.1.12:8080"]),
            held("node-b", &["10.244.2.7:8080"]),
            failing,
        ],
        issues: issues().split_off(1),
        findings: findings(),
        now_ms: NOW_MS,
        convergence: Some(lagging()),
    }
}

/// A packet from outside that node-b handles: one endpoint is chosen of two.
pub fn explanation() -> pb::Explanation {
    let candidate = |address: &str, node: &str, chosen, reason: &str| pb::Candidate {
        address: address.to_owned(),
        node: node.to_owned(),
        chosen,
        reason: reason.to_owned(),
    };
    pb::Explanation {
        key: web().key,
        to: "203.0.113.1:80".to_owned(),
        node: "node-b".to_owned(),
        outcome: pb::PacketOutcome::Reaches.into(),
        summary: "10.244.2.7:8080 gets the packet".to_owned(),
        steps: vec![
            "203.0.113.1:80/TCP is an address of the load balancer of shop/web, port http"
                .to_owned(),
            "externalTrafficPolicy is Local: only endpoints on node-b may be chosen".to_owned(),
            "1 of 2 endpoints are chosen: those that are ready".to_owned(),
            "the endpoint sees the sender's address".to_owned(),
        ],
        candidates: vec![
            candidate("10.244.2.7:8080", "node-b", true, "ready"),
            candidate(
                "10.244.1.12:8080",
                "node-a",
                false,
                "on another node, and the policy is Local",
            ),
        ],
        programmed: true,
        verified: false,
        lag: String::new(),
        findings: findings().split_off(1),
        kernel: Some(pb::KernelAnswer {
            agreement: pb::KernelAgreement::Agrees.into(),
            summary: "does the same: it chooses one of 1 endpoint".to_owned(),
            places: vec!["places".to_owned()],
            endpoints: vec!["10.244.2.7:8080".to_owned()],
        }),
    }
}

/// An error on one node, and something worth knowing about many.
pub fn findings() -> Vec<pb::Finding> {
    vec![
        pb::Finding {
            severity: pb::Severity::Error.into(),
            code: "NotProgrammed".to_owned(),
            text: "node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy)"
                .to_owned(),
            fix: "kpctl status, then the agent's log".to_owned(),
            nodes: vec!["node-c".to_owned()],
            nodes_omitted: 0,
        },
        pb::Finding {
            severity: pb::Severity::Info.into(),
            code: "ExternalPolicyLocal".to_owned(),
            text: "externalTrafficPolicy is Local, and 90 of 100 nodes have no endpoint".to_owned(),
            fix: String::new(),
            nodes: (10..20).map(|n| format!("node-{n}")).collect(),
            nodes_omitted: 80,
        },
    ]
}

/// `shop/web` in the kernel of 4,987 of 5,000 nodes; three of the others are listed, and one that is not verified.
pub fn lagging() -> pb::Convergence {
    let laggard = |node: &str, state: pb::LagState, seconds, reason: &str| pb::Laggard {
        node: node.to_owned(),
        state: state.into(),
        since_ms: ago(seconds),
        reason: reason.to_owned(),
        revision: 4650,
        wanted_revision: 4711,
    };
    let failing = "node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy); stop it \
                   or choose another port";
    let away = "applied revision 4650 of 4711; the agent is not connected";
    let mut unverified = laggard(
        "node-g",
        pb::LagState::Unverified,
        0,
        "read back at revision 4650 of 4711",
    );
    (unverified.since_ms, unverified.revision) = (0, 4711);
    let mut absent = laggard(
        "node-e",
        pb::LagState::NoAgent,
        30,
        "no agent has connected for this node",
    );
    absent.revision = 0;
    pb::Convergence {
        state: pb::ServiceState::Served.into(),
        wanted_revision: 4711,
        changed_at_ms: ago(192),
        programmed: 4_987,
        verified: 4_900,
        laggards: vec![
            laggard("node-c", pb::LagState::Failing, 840, failing),
            laggard("node-d", pb::LagState::Disconnected, 60, away),
            absent,
            unverified,
        ],
        laggards_omitted: 96,
        ..converged()
    }
}

/// `shop/web` in the kernel of all nodes, and read back.
pub fn converged() -> pb::Convergence {
    pb::Convergence {
        namespace: "shop".to_owned(),
        name: "web".to_owned(),
        state: pb::ServiceState::Served.into(),
        wanted_revision: 4711,
        changed_at_ms: ago(192),
        nodes: 5_000,
        programmed: 5_000,
        verified: 5_000,
        durations: Some(pb::ChangeDurations {
            nodes: 4_987,
            p50_ms: 9,
            p99_ms: 40,
            max_ms: 1_340,
        }),
        now_ms: NOW_MS,
        ..Default::default()
    }
}

fn real_server(address: &str, [active, inactive]: [u64; 2], draining: bool) -> pb::RealServer {
    pb::RealServer {
        address: address.to_owned(),
        weight: u32::from(!draining),
        active_connections: active,
        inactive_connections: inactive,
        draining,
    }
}

/// What nodes with IPVS have of `shop/web`.
pub fn service_servers() -> pb::ServiceServers {
    let server = |address: &str, persistent_s, real_servers| pb::VirtualServer {
        key: Some(key("shop/web", "http", pb::Family::Ipv4)),
        address: address.to_owned(),
        scheduler: "rr".to_owned(),
        persistent_s,
        real_servers,
    };
    let inside = vec![
        real_server("10.244.1.12:8080", [12, 3], false),
        real_server("10.244.2.7:8080", [0, 0], false),
        real_server("10.244.3.9:8080", [1, 0], true),
    ];
    let outside = vec![real_server("10.244.2.7:8080", [4, 1], false)];
    pb::ServiceServers {
        servers: vec![
            server("10.96.0.10:80", 10_800, inside),
            server("203.0.113.7:80", 0, outside),
        ],
        age_ms: 1_200,
        ..Default::default()
    }
}

/// `shop/web` on two nodes with IPVS, one of which says nothing, and one without.
pub fn ipvs_description() -> pb::ServiceDescription {
    let mut description = description();
    description.nodes[0].servers = Some(service_servers());
    description.nodes[1].servers = Some(pb::ServiceServers {
        error: "the agent did not answer within 2 s".to_owned(),
        ..Default::default()
    });
    description
}

/// A node that serves by IPVS, with one endpoint on its way out.
pub fn ipvs_node(name: &str) -> pb::NodeStatus {
    let mut node = node(name);
    node.backend = "ipvs".to_owned();
    let stats = pb::ServerStats {
        virtual_servers: 10_000,
        real_servers: 20_001,
        draining: 1,
        active_connections: 13,
        inactive_connections: 3,
        drains: vec![pb::DrainingServer {
            key: Some(key("shop/web", "http", pb::Family::Ipv4)),
            virtual_server: "10.96.0.10:80".to_owned(),
            address: "10.244.3.9:8080".to_owned(),
            active_connections: 1,
            inactive_connections: 0,
        }],
    };
    let families = &mut node.report.as_mut().unwrap().families;
    families[0].servers = Some(stats);
    families.push(pb::FamilyStatus {
        family: pb::Family::Ipv6.into(),
        programmed: true,
        servers: Some(pb::ServerStats::default()),
        ..Default::default()
    });
    node
}

/// Returns a history of two publications.
pub fn history() -> pb::History {
    let point = |revision, at_ms, changes| pb::HistoryPoint {
        revision,
        at_ms,
        changes,
    };
    pb::History {
        points: vec![point(17, 1_000, 2), point(19, 61_000, 1)],
        now_ms: 121_000,
        ..pb::History::default()
    }
}

fn policy(namespace: &str, name: &str, types: [bool; 2], pods: u64) -> pb::PolicySummary {
    let [ingress, egress] = types;
    pb::PolicySummary {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        ingress,
        egress,
        pods,
        ..pb::PolicySummary::default()
    }
}

/// Returns three NetworkPolicies.
pub fn policies() -> Vec<pb::PolicySummary> {
    vec![
        policy("kube-system", "dns", [true, false], 2),
        policy("shop", "default-deny", [true, true], 41),
        policy("shop", "web", [true, false], 0),
    ]
}

/// Returns `shop/db`.
pub fn policy_description() -> pb::PolicyDescription {
    let rules = [
        "from Pods app=web in namespaces team=a, and 10.0.0.0/8 except 10.1.0.0/16, to ports TCP 5432",
        "from all Pods of the namespace, to ports TCP metrics",
    ];
    pb::PolicyDescription {
        summary: Some(policy("shop", "db", [true, false], 102)),
        selector: "app=db,tier in (a,b)".to_owned(),
        ingress: strings(&rules),
        pods: (0..100).map(|n| format!("db-{n}")).collect(),
        issues: vec![pb::InputIssue {
            severity: pb::Severity::Error.into(),
            kind: "NetworkPolicy".to_owned(),
            namespace: "shop".to_owned(),
            name: "db".to_owned(),
            reason: "spec.ingress[2].from[0]: has no address; the rule allows nothing".to_owned(),
            code: "InvalidPolicy".to_owned(),
            ..Default::default()
        }],
        ..Default::default()
    }
}

/// Returns the verdict on a connection that the sender may open, and the receiver does not take.
pub fn judgement() -> pb::ConnectionJudgement {
    let allowed = pb::DirectionJudgement {
        verdict: pb::PolicyVerdict::Allowed.into(),
        reason: "shop/web allows it by spec.egress[1]".to_owned(),
        policy: "shop/web".to_owned(),
        rule: "to Pods app=db, on ports TCP 5432, TCP 9187".to_owned(),
        peer: "Pods app=db".to_owned(),
        isolating: Vec::new(),
    };
    let denied = pb::DirectionJudgement {
        verdict: pb::PolicyVerdict::Denied.into(),
        reason: "no rule of shop/db, shop/default-deny allows connections from Pod shop/web-1, TCP 9187; Pod shop/db-0 \
                 is isolated for connections to it"
            .to_owned(),
        isolating: strings(&["shop/db", "shop/default-deny"]),
        ..Default::default()
    };
    pb::ConnectionJudgement {
        allowed: false,
        egress: Some(allowed),
        ingress: Some(denied),
        notes: Vec::new(),
    }
}

/// Returns who was asked: so many nodes, of which so many answered.
pub fn asked(asked: u64, answered: u64) -> pb::NodesAsked {
    pb::NodesAsked {
        asked,
        answered,
        ..pb::NodesAsked::default()
    }
}

/// The third of three nodes is silent for a reason.
fn two_of_three(reason: &str) -> pb::NodesAsked {
    pb::NodesAsked {
        silent: vec![pb::SilentNode {
            node: "node-3".to_owned(),
            reason: reason.to_owned(),
        }],
        ..asked(3, 2)
    }
}

/// The connections of a Pod and of a client outside, on two nodes of three.
pub fn flows() -> pb::FlowsAnswer {
    let flow = |node: &str, kind: pb::ClientKind, name: &str, group| pb::NodeFlow {
        node: node.to_owned(),
        key: Some(key("shop/web", "http", pb::Family::Ipv4)),
        client_kind: kind.into(),
        client_name: name.to_owned(),
        endpoint_pod: "shop/web-1".to_owned(),
        endpoint_node: "node-2".to_owned(),
        group: Some(group),
    };
    let endpoint = "10.244.2.7:8080".to_owned();
    let counted = pb::ConnectedGroup {
        client: "10.244.1.9".to_owned(),
        endpoint: endpoint.clone(),
        table: pb::ConnectionTable::Conntrack.into(),
        established: 1_204,
        closing: 2,
        newest_s: Some(3),
        oldest_s: Some(3_700),
        bytes_to_endpoint: Some(52_000),
        bytes_to_client: Some(7_340_032),
        packets_to_endpoint: Some(900),
        packets_to_client: Some(5_100),
        ..pb::ConnectedGroup::default()
    };
    let unreplied = pb::ConnectedGroup {
        client: "192.0.2.7".to_owned(),
        endpoint,
        table: pb::ConnectionTable::Conntrack.into(),
        unreplied: 1,
        ..pb::ConnectedGroup::default()
    };
    pb::FlowsAnswer {
        flows: vec![
            flow("node-1", pb::ClientKind::Pod, "shop/cart-1", counted),
            flow("node-2", pb::ClientKind::Outside, "", unreplied),
        ],
        nodes: Some(two_of_three("its agent is not connected")),
        has_endpoints: true,
        knows_pods: true,
        ..pb::FlowsAnswer::default()
    }
}

/// The answer of two nodes of three about who talked to whom in an hour. One Pod's name is hostile.
pub fn graph() -> pb::GraphAnswer {
    let client = |kind: pb::ClientKind, address: &str, name: &str| pb::GraphClient {
        address: address.to_owned(),
        kind: kind.into(),
        name: name.to_owned(),
    };
    let endpoint = |address: &str, pod: &str| pb::GraphEndpoint {
        address: address.to_owned(),
        pod: pod.to_owned(),
        node: "node-2".to_owned(),
        proxy: false,
    };
    let edge = |client, endpoint, connections, failed| pb::GraphEdge {
        client,
        endpoint,
        connections,
        failed,
        bytes_to_endpoint: 52_000 * connections,
        bytes_to_client: 70_000 * connections,
        seconds: 3_600,
        per_million_s: connections * 1_000_000 / 3_600,
        ..pb::GraphEdge::default()
    };
    pb::GraphAnswer {
        clients: vec![
            client(pb::ClientKind::Pod, "10.244.1.9", "shop/cart-1"),
            client(pb::ClientKind::Outside, "192.0.2.7", ""),
        ],
        ports: vec![key("shop/web", "http", pb::Family::Ipv4)],
        endpoints: vec![
            endpoint("10.244.2.7:8080", "shop/web-1"),
            endpoint("10.244.2.8:8080", "shop/\"];\\"),
        ],
        edges: vec![
            edge(0, 0, 7_200, 0),
            edge(0, 1, 6_900, 345),
            edge(1, 0, 36, 0),
        ],
        nodes: Some(two_of_three("its agent does not count connections")),
        knows_pods: true,
        ..pb::GraphAnswer::default()
    }
}

/// Denied packets of two nodes: counts, and a sample.
pub fn drops() -> pb::DropsAnswer {
    let pod = |pod: &str, direction: pb::PolicyDirection, packets| pb::DroppedPod {
        pod: pod.to_owned(),
        address: "10.244.1.7".to_owned(),
        node: "node-1".to_owned(),
        direction: direction.into(),
        packets,
    };
    pb::DropsAnswer {
        pods: vec![
            pod("shop/db-0", pb::PolicyDirection::Ingress, 12_345),
            pod("shop/web-1", pb::PolicyDirection::Egress, 3),
        ],
        packets: vec![pb::DroppedPacket {
            node: "node-1".to_owned(),
            packet: Some(pb::DeniedPacket {
                direction: pb::PolicyDirection::Ingress.into(),
                from: "10.244.2.9".to_owned(),
                to: "10.244.1.7".to_owned(),
                protocol: 6,
                from_port: 40_332,
                to_port: 5_432,
                ..pb::DeniedPacket::default()
            }),
            from_pod: "shop/web-1".to_owned(),
            to_pod: "shop/db-0".to_owned(),
            isolating: vec!["shop/db".to_owned()],
            at_ms: 1_700_000_000_000,
        }],
        nodes: Some(asked(2, 2)),
        ..pb::DropsAnswer::default()
    }
}
