//! The wire format of the last release: one message of each kind, as that release encoded it, with every
//! field that it knew. Today's code must read them all, and write the same bytes for them, because agents
//! and control planes of both versions work together during an upgrade or downgrade.
//!
//! A new field needs no change here. A new kind of message gets its file with the release after the one
//! that adds it: `KPLANE_WRITE_GOLDEN=1 cargo test -p kplane-proto golden` writes files that are
//! missing, and never replaces one.

use std::fmt::Debug;
use std::fs;
use std::path::Path;

use bytes::Bytes;
use prost::Message;

use crate::convert::{decode_object, encode_object};
use crate::v1::*;

fn check<M: Message + Default + PartialEq + Debug>(name: &str, message: &M) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let file = folder.join(format!("{name}.bin"));
    if !file.exists() && std::env::var_os("KPLANE_WRITE_GOLDEN").is_some() {
        fs::write(&file, message.encode_to_vec()).unwrap();
    }
    let golden = fs::read(&file).unwrap_or_default();
    assert!(!golden.is_empty(), "{} is missing", file.display());
    assert_eq!(
        M::decode(&*golden).unwrap(),
        *message,
        "{name} is read differently"
    );
    assert_eq!(
        message.encode_to_vec(),
        golden,
        "{name} is written differently"
    );
    // The last release skips what this version adds, and this version what the next one adds.
    let mut later = golden.clone();
    later.extend([0xfa, 0x3e, 2, b'o', b'k']);
    assert_eq!(
        M::decode(&*later).unwrap(),
        *message,
        "{name} with a field of later"
    );
    golden
}

fn key(name: &str) -> ServiceKey {
    ServiceKey {
        namespace: "shop".into(),
        name: name.into(),
        port_name: "http".into(),
        protocol: Protocol::Udp.into(),
        family: Family::Ipv4.into(),
    }
}

fn cidr(address: &'static [u8], prefix_len: u32) -> Cidr {
    Cidr {
        address: address.to_vec(),
        prefix_len,
    }
}

/// One object of each kind. They are hashed in their encoded form, so that form must never change.
fn objects() -> Vec<(&'static str, Object)> {
    let service = ServiceProgram {
        key: Some(key("web")),
        port: 80,
        cluster_ip: Bytes::from_static(&[10, 96, 0, 1]),
        external_ips: Bytes::from_static(&[198, 18, 0, 1]),
        load_balancer_ips: Bytes::from_static(&[198, 18, 0, 2, 198, 18, 0, 3]),
        node_port: 30_080,
        internal_policy: TrafficPolicy::Local.into(),
        external_policy: TrafficPolicy::Local.into(),
        affinity_timeout_s: 10_800,
        source_ranges: vec![cidr(&[192, 0, 2, 0], 24)],
        health_check_node_port: 31_000,
        endpoints: Bytes::from_static(&[10, 0, 0, 1, 0x1f, 0x90, 10, 0, 0, 2, 0x1f, 0x90]),
        has_any: true,
        serving_others: Bytes::from_static(&[10, 0, 0, 3, 0x1f, 0x90]),
        ipvs_scheduler: "lc".into(),
        proxied: None,
        dead: Bytes::new(),
    };
    let local = LocalEndpoints {
        key: Some(key("web")),
        ready: Bytes::from_static(&[10, 0, 0, 1, 0x1f, 0x90]),
        draining: Bytes::from_static(&[10, 0, 0, 2, 0x1f, 0x90]),
    };
    let node = NodeConfig {
        name: "n1".into(),
        zone: "z1".into(),
        addresses: vec![vec![192, 168, 0, 1]],
        pod_cidrs: vec![cidr(&[10, 244, 1, 0], 24)],
        service_cidrs: vec![cidr(&[10, 96, 0, 0], 16)],
        eligible: true,
        known: true,
        other_nodes: false,
    };
    let object = |kind| Object { kind: Some(kind) };
    vec![
        ("object-service", object(object::Kind::Service(service))),
        ("object-local", object(object::Kind::Local(local))),
        ("object-node", object(object::Kind::Node(node))),
    ]
}

#[test]
fn objects_are_as_in_the_last_release() {
    for (name, object) in objects() {
        let golden = check(name, &object);
        let decoded = decode_object(golden.clone().into()).unwrap().unwrap();
        assert_eq!(encode_object(&decoded), golden, "{name} has another hash");
    }
}

fn from_agent() -> Vec<(&'static str, agent_message::Kind)> {
    let hello = Hello {
        protocol_version: 1,
        capabilities: 1,
        node_name: "n1".into(),
        agent_version: "0.1.0".into(),
        instance: 2,
        resume: Some(ResumeToken {
            schema: 1,
            epoch: 3,
            revision: 4,
            digest: vec![5; 16],
        }),
        backend: "ipvs".into(),
        backend_deprecation: "use nftables".into(),
        ..Hello::default()
    };
    let inspection = Inspection {
        token: 1,
        servers: vec![VirtualServer {
            key: Some(key("web")),
            address: "10.96.0.1:80".into(),
            scheduler: "rr".into(),
            persistent_s: 2,
            real_servers: vec![RealServer {
                address: "10.0.0.1:8080".into(),
                weight: 3,
                active_connections: 4,
                inactive_connections: 5,
                draining: true,
            }],
        }],
        more: 6,
        age_ms: 7,
        error: "unknown".into(),
        ..Inspection::default()
    };
    vec![
        ("agent-hello", agent_message::Kind::Hello(hello)),
        ("agent-report", agent_message::Kind::Report(report())),
        ("agent-ping", agent_message::Kind::Ping(Ping { token: 1 })),
        ("agent-pong", agent_message::Kind::Pong(Pong { token: 1 })),
        (
            "agent-inspection",
            agent_message::Kind::Inspection(inspection),
        ),
    ]
}

fn report() -> Report {
    Report {
        epoch: 1,
        received_revision: 2,
        applied_revision: 3,
        verified_revision: 4,
        failures: vec![ObjectFailure {
            key: Some(key("bad")),
            reason: "refused".into(),
            since_ms: 5,
            degraded: true,
            policies: false,
        }],
        last_sync: Some(SyncStats {
            revision: 6,
            finished_at_ms: 7,
            total_us: 8,
            plan_us: 9,
            encode_us: 10,
            kernel_us: 11,
            operations: 12,
            bytes: 13,
            end_to_end_ms: 14,
        }),
        objects: Some(ObjectCounts {
            services: 15,
            endpoints: 16,
        }),
        families: vec![family()],
        unknown_kinds: 17,
        round_trip_us: 18,
        syncs_ok: 19,
        syncs_failed: 20,
        triggers_programmed: vec![TriggerProgrammed {
            id: 21,
            latency_ms: 22,
        }],
        held: Some(Held {
            services: 23,
            without_endpoints: 24,
            reason: "too many".into(),
            since_ms: 25,
            examples: vec!["shop/web".into()],
            // Younger than the golden bytes.
            policies: 0,
        }),
        ..Report::default()
    }
}

fn family() -> FamilyStatus {
    FamilyStatus {
        family: Family::Ipv6.into(),
        programmed: true,
        error: "no".into(),
        error_since_ms: 1,
        rules: Some(RuleStats {
            rules: 2,
            lookups: 3,
            lookups_in_one_list: 4,
        }),
        servers: Some(ServerStats {
            virtual_servers: 5,
            real_servers: 6,
            draining: 7,
            active_connections: 8,
            inactive_connections: 9,
            drains: vec![DrainingServer {
                key: Some(key("web")),
                virtual_server: "10.96.0.1:80".into(),
                address: "10.0.0.1:8080".into(),
                active_connections: 10,
                inactive_connections: 11,
            }],
        }),
        verified_at_ms: 12,
        repairs: 13,
        last_repair_ms: 14,
        last_repair: "a set".into(),
        // Younger than the golden bytes.
        masquerade: None,
        local_rule: 0,
        verification_overdue: true,
    }
}

#[test]
fn messages_of_agents_are_as_in_the_last_release() {
    for (name, kind) in from_agent() {
        check(name, &AgentMessage { kind: Some(kind) });
    }
}

fn from_server() -> Vec<(&'static str, server_message::Kind)> {
    let welcome = Welcome {
        protocol_version: 1,
        capabilities: 1,
        server_version: "0.1.0".into(),
        epoch: 2,
        heartbeat_interval_ms: 5_000,
        ..Welcome::default()
    };
    let object = |(_, object): (_, Object)| object.encode_to_vec().into();
    let names = [
        object_key::Kind::Service(key("old")),
        object_key::Kind::Local(key("old")),
        object_key::Kind::Node(true),
    ];
    let update = Update {
        objects: objects().into_iter().map(object).collect(),
        deleted: names.map(|kind| ObjectKey { kind: Some(kind) }).to_vec(),
        snapshot: true,
        end: Some(UpdateEnd {
            revision: 1,
            digest: vec![2; 16],
            changed_at_ms: 3,
            triggers: vec![Trigger {
                id: 4,
                family: Family::Ipv4.into(),
                at_ms: 5,
            }],
            confidence: Confidence::Confirmed.into(),
            doubt: "a file is missing".into(),
            freshness: Vec::new(),
            enforcement: 0,
        }),
        ..Update::default()
    };
    vec![
        ("server-welcome", server_message::Kind::Welcome(welcome)),
        (
            "server-come-back-later",
            server_message::Kind::ComeBackLater(ComeBackLater {
                after_ms: 1,
                reason: "busy".into(),
                ..ComeBackLater::default()
            }),
        ),
        ("server-update", server_message::Kind::Update(update)),
        (
            "server-heartbeat",
            server_message::Kind::Heartbeat(Heartbeat {
                revision: 1,
                upstream_age_ms: 2,
                ..Heartbeat::default()
            }),
        ),
        ("server-ping", server_message::Kind::Ping(Ping { token: 1 })),
        ("server-pong", server_message::Kind::Pong(Pong { token: 1 })),
        (
            "server-inspect",
            server_message::Kind::Inspect(Inspect {
                token: 1,
                namespace: "shop".into(),
                name: "web".into(),
                ..Inspect::default()
            }),
        ),
    ]
}

#[test]
fn messages_of_control_planes_are_as_in_the_last_release() {
    for (name, kind) in from_server() {
        check(name, &ServerMessage { kind: Some(kind) });
    }
}
