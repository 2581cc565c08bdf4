//! `cargo xtask bench policies`: NetworkPolicies in a real kernel. How long a node takes to load them and to follow a
//! change, and what they cost the first packet of a connection; and what the whole of a large cluster costs the control
//! plane is the ignored test `large_cluster` of the crate kplane-policy.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use kplane_dataplane::backend::{Kind, Settings};
use kplane_dataplane::policy::{Enforcer, PolicyApplied, PolicyChange};
use kplane_model::{
    Block, Family, GroupPart, LocalPod, Peer, PeerClass, PeerId, Peers, PodName, Policy, PolicyKey,
    PolicyObject, PolicyPort, PolicyRule, Protocol,
};
use kplane_tests::netns::NetNs;
use kplane_tests::topology::Topology;

use crate::goal;

const PEERS: u32 = 100_000;
const CLASSES: u32 = 1_000;
const NAMESPACES: u32 = 100;
/// Groups of Pods that a policy allows.
const GROUPS: u32 = 10;
const CHANGES: u32 = 2_000;
const PACKETS: u32 = 5_000;
const PORT: u16 = 8080;

pub(crate) fn main() {
    kplane_tests::userns::enter().unwrap();
    println!(
        "\nNetworkPolicies on one node, IPv4: {PEERS} Pods of the cluster, {GROUPS} groups a policy, a Pod a policy\n"
    );
    println!(
        "{:>8} | {:<44} | {:>10} {:>10} {:>10}",
        "policies", "what", "p50", "p99", "max"
    );
    for policies in [1_000, 10_000] {
        node(policies);
    }
    println!(
        "\nfirst packet of a connection between two Pods of a node (UDP, {PACKETS} each, sent in turn)\n"
    );
    println!(
        "{:>8} | {:<44} | {:>10} {:>10} {:>10}",
        "policies", "what", "p50", "p99", "max"
    );
    let without = packets(0, "no policy", None);
    let mut medians = Vec::new();
    for policies in [10, 10_000] {
        let named = |what: &'static str, peers| packets(policies, what, Some(peers));
        named("not isolated", Wanted::Other);
        medians.push(named("allowed by its labels", Wanted::Class));
        named("allowed as one of all Pods", Wanted::AllPods);
        named("allowed by a block", Wanted::Block);
    }
    for (median, policies) in medians.into_iter().zip(["10", "10,000"]) {
        let more = median.saturating_sub(without).as_secs_f64() * 1e6;
        let what = format!("the first packet with {policies} policies, p50 over none,");
        goal::print(&what, 1.5, more, "us");
    }
}

fn id(kind: u8, number: u32) -> PeerId {
    let mut id = [kind; 16];
    // The first byte is the part of a group.
    id[..4].copy_from_slice(&number.to_le_bytes());
    PeerId(id)
}

fn class(number: u32) -> PeerId {
    id(1, number % CLASSES)
}

fn address(first: u8, number: u32) -> IpAddr {
    let [_, a, b, c] = number.to_be_bytes();
    Ipv4Addr::new(10, first + a, b, c).into()
}

fn peer(address: IpAddr, number: u32) -> PolicyObject {
    let class = class(number);
    let tier = None;
    PolicyObject::Peer(Peer {
        address,
        class,
        tier,
    })
}

fn policy(number: u32) -> Policy {
    let groups = (0..GROUPS).map(|group| id(3, number * GROUPS + group)).collect();
    Policy {
        name: PodName::new("shop", &format!("policy-{number}")),
        ingress: Some(vec![PolicyRule {
            peers: Some(Peers {
                groups,
                blocks: Vec::new(),
            }),
            ports: Some(vec![PolicyPort::Range(Protocol::Udp, PORT, PORT)]),
        }]),
        egress: None,
    }
}

fn pod(number: u32, address: IpAddr) -> LocalPod {
    LocalPod {
        name: PodName::new("shop", &format!("pod-{number}")),
        addresses: vec![address],
        ports: Vec::new(),
        policies: vec![policy(number).name],
        tier: None,
    }
}

/// Everything that a node gets.
fn cluster(policies: u32) -> Vec<PolicyObject> {
    let mut objects: Vec<_> = (0..PEERS).map(|number| peer(address(64, number), number)).collect();
    objects.extend((0..CLASSES).map(|number| {
        PolicyObject::Class(PeerClass {
            id: class(number),
            parent: id(2, number % NAMESPACES),
            namespace: format!("ns-{}", number % NAMESPACES).into(),
            ports: Vec::new(),
        })
    }));
    for number in 0..policies {
        objects.push(PolicyObject::Policy(policy(number)));
        objects.push(PolicyObject::Pod(pod(number, address(0, number + 256))));
        objects.extend((0..GROUPS).map(|group| {
            let member = class(number * GROUPS + group);
            PolicyObject::Group(GroupPart {
                group: id(3, number * GROUPS + group),
                part: member.0[0],
                members: vec![member],
            })
        }));
    }
    objects
}

fn enforcer() -> Enforcer {
    Enforcer::new(Kind::Nftables.open(&Settings::default()).unwrap().policies)
}

fn apply(enforcer: &mut Enforcer, objects: &[PolicyObject], complete: bool) -> PolicyApplied {
    let named: Vec<_> = objects.iter().map(|object| (object.key(), Some(object))).collect();
    change(enforcer, &named, complete)
}

fn change(
    enforcer: &mut Enforcer,
    objects: &[(PolicyKey, Option<&PolicyObject>)],
    complete: bool,
) -> PolicyApplied {
    let change = PolicyChange {
        objects,
        complete,
        closed: false,
        pod_ranges: &[],
    };
    let applied = enforcer.apply(Family::V4, change).unwrap();
    assert_eq!(applied.failures, []);
    applied
}

/// Measures changes on a node with so many policies.
fn node(policies: u32) {
    let ns = NetNs::new("policies").unwrap();
    ns.run(|| {
        let objects = cluster(policies);
        let mut enforcer = enforcer();
        let started = Instant::now();
        let applied = apply(&mut enforcer, &objects, true);
        let took = started.elapsed();
        let counts = enforcer.counts(Family::V4);
        let what = format!(
            "all of it: {} elements, {} KiB",
            counts.elements,
            applied.bytes >> 10
        );
        print(policies, &what, &mut [took]);
        let mut added: Vec<Duration> = Vec::new();
        let mut moved = Vec::new();
        let mut removed = Vec::new();
        for number in 0..CHANGES {
            let at = address(96, number);
            added.push(timed(|| apply(&mut enforcer, &[peer(at, number)], false)));
            moved.push(timed(|| {
                apply(&mut enforcer, &[peer(at, number + 1)], false)
            }));
            let gone = [(PolicyKey::Peer(at), None)];
            removed.push(timed(|| change(&mut enforcer, &gone, false)));
        }
        print(policies, "a Pod of a known workload comes", &mut added);
        print(policies, "a Pod gets other labels", &mut moved);
        print(policies, "a Pod goes", &mut removed);
        let mut local = Vec::new();
        for number in 0..CHANGES / 4 {
            let other = pod(number % policies, address(0, 1 + number % 200));
            local.push(timed(|| {
                apply(&mut enforcer, &[PolicyObject::Pod(other.clone())], false)
            }));
        }
        print(
            policies,
            "a Pod of the node gets another address",
            &mut local,
        );
        added.sort_unstable();
        let p99 = added[added.len() * 99 / 100].as_secs_f64() * 1e6;
        goal::print("a Pod comes, received to kernel, p99", 100.0, p99, "us");
        goal::print("cold load", 300.0, took.as_secs_f64() * 1e3, "ms");
        Ok(())
    })
    .unwrap();
}

fn timed<T>(work: impl FnOnce() -> T) -> Duration {
    let started = Instant::now();
    let result = work();
    let took = started.elapsed();
    drop(result);
    took
}

/// What lets the packets of a measurement through.
#[derive(Clone, Copy)]
enum Wanted {
    Class,
    AllPods,
    Block,
    /// The Pod is not isolated.
    Other,
}

/// Measures first packets on a node with so many policies; returns the median.
fn packets(policies: u32, what: &str, wanted: Option<Wanted>) -> Duration {
    let mut topology = Topology::standard(1).unwrap();
    let ips = [[10, 244, 1, 1], [10, 244, 1, 2]].map(IpAddr::from);
    for (name, ip) in ["a", "b"].into_iter().zip(ips) {
        topology.add_pod("node-1", name, &[ip]).unwrap();
    }
    let [source, destination] = ips;
    let sink = topology
        .pod("b")
        .unwrap()
        .ns()
        .run(|| Ok(UdpSocket::bind((destination, PORT))?));
    let _sink = sink.unwrap();
    let node = topology.node("node-1").unwrap().ns();
    let enforcer = wanted.map(|wanted| {
        node.run(|| {
            let mut enforcer = enforcer();
            let mut objects = cluster(policies);
            objects.extend(ends(wanted, source, destination));
            apply(&mut enforcer, &objects, true);
            Ok(enforcer)
        })
        .unwrap()
    });
    let from = topology.pod("a").unwrap().ns();
    let mut took = from
        .run(|| {
            let to = SocketAddr::new(destination, PORT);
            let send = |_| {
                let socket = UdpSocket::bind((source, 0)).unwrap();
                timed(|| socket.send_to(b"first", to).unwrap())
            };
            Ok((0..PACKETS).map(send).collect::<Vec<_>>())
        })
        .unwrap();
    drop(enforcer);
    print(policies, what, &mut took);
    took[took.len() / 2]
}

/// The two Pods, and the policy of the second one.
fn ends(wanted: Wanted, source: IpAddr, destination: IpAddr) -> Vec<PolicyObject> {
    let group = id(4, 0);
    let member = match wanted {
        Wanted::AllPods => PeerId::ALL_PODS,
        Wanted::Class | Wanted::Block | Wanted::Other => class(7),
    };
    let peers = match wanted {
        Wanted::Block => Peers {
            groups: Vec::new(),
            blocks: vec![Block {
                range: "10.244.0.0/16".parse().unwrap(),
                except: vec!["10.244.9.0/24".parse().unwrap()],
            }],
        },
        _ => Peers {
            groups: vec![group],
            blocks: Vec::new(),
        },
    };
    let name = PodName::new("shop", "measured");
    let local = |pod: &str, address, policies| {
        PolicyObject::Pod(LocalPod {
            name: PodName::new("shop", pod),
            addresses: vec![address],
            ports: Vec::new(),
            policies,
            tier: None,
        })
    };
    let of_destination = match wanted {
        Wanted::Other => Vec::new(),
        _ => vec![name.clone()],
    };
    vec![
        peer(source, 7),
        peer(destination, 8),
        PolicyObject::Group(GroupPart {
            group,
            part: member.0[0],
            members: vec![member],
        }),
        PolicyObject::Policy(Policy {
            name,
            ingress: Some(vec![PolicyRule {
                peers: Some(peers),
                ports: Some(vec![PolicyPort::Range(Protocol::Udp, PORT, PORT)]),
            }]),
            egress: None,
        }),
        local("a", source, Vec::new()),
        local("b", destination, of_destination),
    ]
}

/// Prints a row; sorts the times.
fn print(policies: u32, what: &str, took: &mut [Duration]) {
    took.sort_unstable();
    let at = |share: usize| took[(took.len() * share / 100).min(took.len() - 1)];
    println!(
        "{policies:>8} | {what:<44} | {:>10.1?} {:>10.1?} {:>10.1?}",
        at(50),
        at(99),
        at(100)
    );
}
