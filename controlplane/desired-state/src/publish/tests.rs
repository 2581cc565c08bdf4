//! The store against simulated agents that follow it.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use kplane_model::select::merge;
use kplane_model::{
    Cidr, DesiredKey, DesiredObject, Digest, Endpoint, EndpointAddr, KeyParts, LocalEndpoints,
    LocalPod, NodeFacts, ObjectHash, Peer, PeerId, PodName, Policy, PolicyKey, PolicyName,
    PolicyObject, Protocol, RangeDigests, Ranges, ServiceKey, ServicePort, ServiceProgram,
};
use kplane_policy::{OwnChange, PolicyChanges};
use kplane_proto::convert::decode_object;
use kplane_proto::v1 as pb;
use proptest::prelude::*;
use prost::Message as _;

use super::*;

const NODES: [&str; 4] = ["n0", "n1", "n2", "n3"];

fn key(n: usize) -> ServiceKey {
    ServiceKey::from(KeyParts {
        // UDP programs also list the other serving endpoints (F2).
        protocol: [Protocol::Udp, Protocol::Tcp][n % 2],
        ..KeyParts::clone(&ServiceKey::sample("shop", &format!("svc-{n}")))
    })
}

fn published(n: usize, endpoints: &[Endpoint]) -> Published {
    let endpoints = merge(endpoints.iter().cloned());
    Published::new(ServicePort::sample(key(n)), &endpoints)
}

fn endpoint(octet: u8) -> Endpoint {
    let ip = IpAddr::from([10, 0, 0, octet]);
    Endpoint::ready(EndpointAddr { ip, port: 8080 })
}

fn node(name: &str, zone: Option<&str>) -> NodeFacts {
    NodeFacts {
        zone: zone.map(Into::into),
        eligible: true,
        ..NodeFacts::sample(name)
    }
}

fn publication(
    services: Vec<(ServiceKey, Option<Published>)>,
    nodes: Vec<NodeFacts>,
) -> Publication {
    Publication {
        observed_at: SystemTime::UNIX_EPOCH,
        ..Publication::sample(services, nodes)
    }
}

/// An agent that follows the protocol.
struct Agent {
    node: &'static str,
    cursor: Cursor,
    /// Messages of a snapshot that other agents get as well.
    walk: Walk,
    objects: HashMap<DesiredKey, (DesiredObject, Bytes)>,
}

impl Agent {
    fn new(node: &'static str) -> Self {
        Self {
            node,
            cursor: Cursor::at(0),
            walk: Walk::default(),
            objects: HashMap::new(),
        }
    }

    /// Begins anew, with messages of one object each.
    fn restart(node: &'static str, store: &Store) -> Self {
        Self {
            walk: store.walk_in_messages(node, 1),
            ..Self::new(node)
        }
    }

    fn take(&mut self, objects: Vec<Bytes>) {
        for bytes in objects {
            let object = decode_object(bytes.clone()).unwrap().unwrap();
            self.objects.insert(object.key(), (object, bytes));
        }
    }

    /// Takes one piece; true when it was the last.
    fn step(&mut self, store: &Store) -> bool {
        if let Some(message) = self.walk.next(&mut self.cursor) {
            let message = pb::ServerMessage::decode(&message[5..]).unwrap();
            let Some(pb::server_message::Kind::Update(update)) = message.kind else {
                panic!("{message:?}");
            };
            assert_eq!(update.snapshot, self.objects.is_empty());
            self.take(update.objects);
            return false;
        }
        let mut cursor = self.cursor;
        let ready = store.take_common(self.node, &mut cursor, &store.freshness());
        let piece = store.collect(self.node, &mut self.cursor);
        if let Some(ready) = ready {
            assert_eq!(cursor, self.cursor);
            assert_same(&ready, &piece);
        }
        if piece.snapshot {
            self.objects.clear();
        }
        self.take(piece.objects);
        for key in &piece.deleted {
            self.objects.remove(key);
        }
        if let Some(end) = piece.end {
            assert_eq!(
                end.digest,
                self.digest(),
                "{} at {}",
                self.node,
                end.revision
            );
            assert_eq!(end.digest, store.digest(self.node));
            assert!(store.wanted(self.node) <= end.revision);
            return true;
        }
        false
    }

    /// Continues from what it holds completely, by its digest or by the digests of its ranges.
    fn arrive(&mut self, store: &Store) {
        if self.cursor.base() == 0 {
            return;
        }
        // What a piece brought is not in effect before the end of the update.
        self.catch_up(store);
        if let Some(way) = store.resume(self.node, self.digest(), None) {
            self.cursor = way.cursor();
        }
        let mut digests = RangeDigests::new(store.ranges(self.node));
        for (key, (_, bytes)) in &self.objects {
            if is_shared(key) {
                digests.add(key, ObjectHash::of(bytes));
            }
        }
        let message = store.replace_ranges(self.node, &digests.to_bytes(), &mut self.cursor);
        let message = pb::ServerMessage::decode(&message.unwrap()[5..]).unwrap();
        let Some(pb::server_message::Kind::Update(update)) = message.kind else {
            panic!("{message:?}");
        };
        let ranges = Ranges::from_bytes(&update.ranges).unwrap();
        self.objects.retain(|key, _| match key {
            DesiredKey::Node => true,
            key => is_shared(key) && !ranges.contain(key),
        });
        self.take(update.objects);
    }

    fn catch_up(&mut self, store: &Store) {
        while !self.step(store) {}
    }

    fn digest(&self) -> Digest {
        let mut digest = Digest::default();
        for (_, bytes) in self.objects.values() {
            digest.add(ObjectHash::of(bytes));
        }
        digest
    }
}

/// Compares the update that an agent shares with others with what it lacks.
fn assert_same(shared: &Ready, piece: &Piece) {
    let rest = shared.rest.as_deref().unwrap_or_default();
    let message = [&shared.first[5..], rest].concat();
    let message = pb::ServerMessage::decode(&message[..]).unwrap();
    let Some(pb::server_message::Kind::Update(update)) = message.kind else {
        panic!("{message:?}");
    };
    let (end, expected) = (update.end.unwrap(), piece.end.as_ref().unwrap());
    assert_eq!(update.objects, piece.objects);
    let deleted: Vec<pb::ObjectKey> = piece.deleted.iter().map(Into::into).collect();
    assert_eq!(update.deleted, deleted);
    assert_eq!(end.revision, expected.revision);
    assert_eq!(end.digest, expected.digest.to_bytes());
}

/// A plain model of the cluster.
#[derive(Default)]
struct World {
    services: BTreeMap<usize, Published>,
    nodes: BTreeMap<&'static str, NodeFacts>,
    cidrs: Vec<Cidr>,
    /// Classes of peers, by the last byte of their addresses.
    peers: BTreeMap<u8, PeerId>,
    /// Pods of nodes, with the last byte of their addresses.
    pods: BTreeMap<&'static str, u8>,
    /// The nodes with the policy.
    policies: BTreeMap<&'static str, bool>,
}

impl World {
    fn expected(&self, name: &str) -> BTreeMap<DesiredKey, DesiredObject> {
        let zone = self.nodes.get(name).and_then(|n| n.zone.as_deref());
        let mut objects: Vec<DesiredObject> = Vec::new();
        for published in self.services.values() {
            let endpoints = published.variants.resolve(name, zone);
            objects.push(DesiredObject::Service(ServiceProgram {
                port: published.port.clone(),
                endpoints: endpoints.to_vec(),
                has_any: published.variants.has_any,
                serving_others: published.variants.serving_others(endpoints, 1),
                dead: Vec::new(),
            }));
            if let Some(endpoints) = published.local.get(name) {
                objects.push(DesiredObject::Local(LocalEndpoints {
                    key: published.port.key.clone(),
                    endpoints: endpoints.clone(),
                }));
            }
        }
        objects.extend(
            self.peers.iter().map(|(octet, class)| {
                DesiredObject::Policy(PolicyObject::Peer(peer(*octet, *class)))
            }),
        );
        let pod = self.pods.get(name);
        objects.extend(
            pod.map(|octet| DesiredObject::Policy(PolicyObject::Pod(pod_of(name, *octet)))),
        );
        let policy = self.policies.get(name);
        objects.extend(
            policy.map(|is_new| DesiredObject::Policy(PolicyObject::Policy(policy_of(*is_new)))),
        );
        let stranger = || NodeFacts {
            name: name.into(),
            eligible: true,
            other_nodes: !self.nodes.is_empty(),
            ..NodeFacts::default()
        };
        let mut node = self.nodes.get(name).cloned().unwrap_or_else(stranger);
        node.service_cidrs.clone_from(&self.cidrs);
        objects.push(DesiredObject::Node(node));
        objects.into_iter().map(|o| (o.key(), o)).collect()
    }
}

fn peer(octet: u8, class: PeerId) -> Peer {
    let address = IpAddr::from([10, 0, 0, octet]);
    let tier = None;
    Peer {
        address,
        class,
        tier,
    }
}

fn pod_of(node: &str, octet: u8) -> LocalPod {
    LocalPod {
        name: PodName::new("shop", node),
        addresses: vec![IpAddr::from([10, 0, 0, octet])],
        ports: Vec::new(),
        policies: Vec::new(),
        tier: None,
    }
}

fn policy_of(is_new: bool) -> Policy {
    Policy {
        name: PolicyName::new("shop", "policy"),
        ingress: Some(Vec::new()),
        egress: is_new.then(Vec::new),
    }
}

impl World {
    /// Changes a part of the NetworkPolicies, and returns what a control plane publishes then.
    fn policies(&mut self, step: &Step) -> Publication {
        let mut changes = PolicyChanges::default();
        match step {
            Step::Peer(octet, Some(class)) => {
                let class = PeerId([*class; 16]);
                self.peers.insert(*octet, class);
                let peer = peer(*octet, class);
                let object = Some(PolicyObject::Peer(peer));
                changes.shared.push((PolicyKey::Peer(peer.address), object));
            }
            Step::Peer(octet, None) => {
                self.peers.remove(octet);
                let address = peer(*octet, PeerId::ALL_PODS).address;
                changes.shared.push((PolicyKey::Peer(address), None));
            }
            Step::Pod(node, octet) => {
                let node = NODES[*node];
                match octet {
                    Some(octet) => drop(self.pods.insert(node, *octet)),
                    None => drop(self.pods.remove(node)),
                }
                let pod = octet.map(|octet| PolicyObject::Pod(pod_of(node, octet)));
                changes.own.push(OwnChange {
                    key: PolicyKey::Pod(PodName::new("shop", node)),
                    object: pod,
                    nodes: vec![node.into()],
                });
            }
            Step::Policy(nodes, is_new) => {
                let policy = policy_of(*is_new);
                let mut change = |object, nodes: Vec<&'static str>| {
                    if !nodes.is_empty() {
                        let nodes = nodes.into_iter().map(Into::into).collect();
                        let key = PolicyKey::Policy(policy.name.clone());
                        changes.own.push(OwnChange { key, object, nodes });
                    }
                };
                let now: Vec<_> = nodes.iter().map(|node| NODES[*node]).collect();
                let had = std::mem::take(&mut self.policies);
                let left = had.keys().filter(|node| !now.contains(node));
                change(None, left.copied().collect());
                self.policies.extend(now.iter().map(|node| (*node, *is_new)));
                let now = self.policies.keys().copied().collect();
                change(Some(PolicyObject::Policy(policy.clone())), now);
            }
            _ => {}
        }
        Publication {
            policies: changes,
            ..publication(vec![], vec![])
        }
    }
}

/// Returns whether nodes share an object.
fn is_shared(key: &DesiredKey) -> bool {
    match key {
        DesiredKey::Service(_) => true,
        DesiredKey::Policy(key) => key.is_shared(),
        DesiredKey::Local(_) | DesiredKey::Node => false,
    }
}

#[derive(Clone, Debug)]
enum Step {
    Set(usize, Vec<Endpoint>),
    Delete(usize),
    Node(usize, Option<&'static str>),
    Cidrs(u8),
    Peer(u8, Option<u8>),
    Pod(usize, Option<u8>),
    /// A policy has Pods on these nodes, and is new or old.
    Policy(Vec<usize>, bool),
    Follow(usize),
    FollowOnePiece(usize),
    Restart(usize),
    /// The agent was at another replica: its revision means nothing here.
    Arrive(usize),
}

fn any_endpoint() -> impl Strategy<Value = Endpoint> {
    let hints = |names: Vec<&'static str>| {
        prop::collection::vec(prop::sample::select(names).prop_map(Into::into), 0..2)
    };
    let node = prop::option::of(prop::sample::select(NODES.to_vec()).prop_map(Into::into));
    (
        1_u8..6,
        node,
        any::<bool>(),
        hints(vec!["x", "y"]),
        hints(NODES.to_vec()),
    )
        .prop_map(|(octet, node, ready, zone_hints, node_hints)| Endpoint {
            node,
            ready,
            terminating: !ready,
            zone_hints,
            node_hints,
            ..endpoint(octet)
        })
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0_usize..5, prop::collection::vec(any_endpoint(), 0..4)).prop_map(|(n, e)| Step::Set(n, e)),
        2 => (0_usize..5).prop_map(Step::Delete),
        2 => (0_usize..4, prop::sample::select(vec![None, Some("x"), Some("y")])).prop_map(|(n, z)| Step::Node(n, z)),
        1 => any::<u8>().prop_map(Step::Cidrs),
        2 => (0_u8..4, prop::option::of(0_u8..3)).prop_map(|(octet, class)| Step::Peer(octet, class)),
        2 => (0_usize..4, prop::option::of(0_u8..4)).prop_map(|(node, octet)| Step::Pod(node, octet)),
        2 => (prop::collection::btree_set(0_usize..4, 0..4), any::<bool>())
            .prop_map(|(nodes, is_new)| Step::Policy(nodes.into_iter().collect(), is_new)),
        3 => (0_usize..4).prop_map(Step::Follow),
        3 => (0_usize..4).prop_map(Step::FollowOnePiece),
        1 => (0_usize..4).prop_map(Step::Restart),
        2 => (0_usize..4).prop_map(Step::Arrive),
    ]
}

proptest! {
    /// After any sequence of events, an agent that follows holds exactly what its node must have,
    /// and both sides agree on the digest.
    #[test]
    fn followers_hold_what_their_node_must_have(steps in prop::collection::vec(any_step(), 1..60)) {
        let store = Store::new(7);
        store.remember_deletions(0);
        let mut world = World::default();
        for node in NODES {
            store.attend(&node.into());
        }
        let mut agents = NODES.map(Agent::new);
        for step in steps {
            match step {
                Step::Set(n, endpoints) => {
                    let published = published(n, &endpoints);
                    store.publish(publication(vec![(key(n), Some(published.clone()))], vec![]));
                    world.services.insert(n, published);
                }
                Step::Delete(n) => {
                    store.publish(publication(vec![(key(n), None)], vec![]));
                    world.services.remove(&n);
                }
                Step::Node(n, zone) => {
                    let node = node(NODES[n], zone);
                    store.publish(publication(vec![], vec![node.clone()]));
                    world.nodes.insert(NODES[n], node);
                }
                Step::Cidrs(octet) => {
                    world.cidrs = vec![Cidr::single(IpAddr::from([10, 96, octet, 0]))];
                    let mut publication = publication(vec![], vec![]);
                    publication.service_cidrs = Some(world.cidrs.clone());
                    store.publish(publication);
                }
                step @ (Step::Peer(..) | Step::Pod(..) | Step::Policy(..)) => {
                    store.publish(world.policies(&step));
                }
                Step::Follow(n) => agents[n].catch_up(&store),
                Step::FollowOnePiece(n) => {
                    agents[n].step(&store);
                }
                Step::Restart(n) => {
                    store.leave(&NODES[n].into());
                    store.attend(&NODES[n].into());
                    agents[n] = Agent::restart(NODES[n], &store);
                }
                Step::Arrive(n) => agents[n].arrive(&store),
            }
        }
        for mut agent in agents {
            agent.catch_up(&store);
            let held: BTreeMap<_, _> =
                agent.objects.into_iter().map(|(key, (object, _))| (key, object)).collect();
            prop_assert_eq!(held, world.expected(agent.node));
        }
    }
}

#[test]
fn equal_state_is_not_published_again() {
    let store = Store::new(7);
    let services = || vec![(key(1), Some(published(1, &[endpoint(1)])))];
    let first = store.publish(publication(services(), vec![node("n0", None)]));
    let again = store.publish(publication(services(), vec![node("n0", None)]));
    assert_eq!(first, again);
    let mut head = store.head();
    head.mark_unchanged();
    store.publish(publication(services(), vec![]));
    assert!(!head.has_changed().unwrap());
}

/// Returns endpoints on this number of nodes, with hints for other nodes and for zones.
fn on_nodes(names: std::ops::Range<usize>) -> Published {
    let endpoints: Vec<Endpoint> = names
        .map(|n| Endpoint {
            node: Some(format!("local-{n}").into()),
            node_hints: vec![format!("hinted-{n}").into()],
            zone_hints: vec![format!("zone-{n}").into()],
            ..endpoint(u8::try_from(n % 250).unwrap())
        })
        .collect();
    published(1, &endpoints)
}

#[test]
fn nodes_that_nothing_mentions_any_more_are_forgotten() {
    let store = Store::new(7);
    let sizes = |store: &Store| {
        let state = store.read();
        (state.views.len(), state.zone_digests.len())
    };
    store.publish(publication(vec![(key(1), Some(on_nodes(0..1)))], vec![]));
    let one = sizes(&store);
    assert!(one.0 >= 1);
    for round in 0..20 {
        let names = round * 200..round * 200 + 200;
        store.publish(publication(vec![(key(1), Some(on_nodes(names)))], vec![]));
        assert!(sizes(&store).0 >= 200);
    }
    assert!(store.read().views.len() <= 2 * 200, "{:?}", sizes(&store));
    store.publish(publication(vec![(key(1), Some(on_nodes(0..1)))], vec![]));
    assert_eq!(sizes(&store), one);
    assert!(store.read().views.capacity() < 200, "memory is given back");
    store.publish(publication(vec![(key(1), None)], vec![]));
    assert_eq!(sizes(&store), (0, 0));
    // A Node that was there, without an agent.
    store.publish(publication(vec![], vec![node("n1", Some("z"))]));
    assert_eq!(store.read().views.len(), 1);
    let gone = NodeFacts {
        known: false,
        ..node("n1", None)
    };
    store.publish(publication(vec![], vec![gone]));
    assert_eq!(sizes(&store), (0, 0));
}

#[test]
fn a_node_with_an_agent_is_remembered_until_it_leaves() {
    let store = Store::new(7);
    let name = "local-0".into();
    let gone = NodeFacts {
        known: false,
        ..node("local-0", None)
    };
    store.attend(&name);
    store.publish(publication(
        vec![(key(1), Some(on_nodes(0..1)))],
        vec![node("local-0", None)],
    ));
    let held = (store.digest("local-0"), store.head().borrow().revision);
    store.publish(publication(vec![(key(1), None)], vec![gone]));
    assert_eq!(store.read().views.len(), 1);
    // While deletions are remembered, an agent that was away gets them by name.
    assert!(store.resume("local-0", held.0, Some(held.1)).is_some());
    store.leave(&name);
    assert_eq!(store.read().views.len(), 0);
    // Later the agent needs a snapshot.
    store.attend(&name);
    assert_eq!(store.resume("local-0", held.0, Some(held.1)), None);
    store.leave(&name);
    assert_eq!(store.read().views.len(), 0);
}

/// An agent of an unknown node is served, and costs other agents nothing.
#[test]
fn a_name_that_is_no_node_takes_no_revision() {
    let store = Store::new(7);
    let services = vec![(key(1), Some(published(1, &[endpoint(1)])))];
    let revision = store.publish(publication(services, vec![node("n0", None)]));
    let mut head = store.head();
    head.mark_unchanged();
    for name in ["n1", "n2", "n3"] {
        let mut agent = Agent::new(name);
        agent.catch_up(&store);
        assert_eq!(
            (agent.objects.len(), agent.cursor),
            (2, Cursor::at(revision))
        );
        assert!(!store.knows(name));
    }
    assert!(!head.has_changed().unwrap());
    assert!(store.knows("n0") && store.nodes().len() == 1);

    // The agent still gets news about its own node: it becomes a Node.
    let mut agent = Agent::new("n1");
    agent.catch_up(&store);
    store.publish(publication(vec![], vec![node("n1", Some("x"))]));
    agent.catch_up(&store);
    let (DesiredObject::Node(facts), _) = &agent.objects[&DesiredKey::Node] else {
        panic!("{:?}", agent.objects);
    };
    assert!(facts.known && facts.zone.as_deref() == Some("x"));
}

/// A node without a Node object learns whether others have one, also when the last one goes.
#[test]
fn a_stranger_knows_whether_there_are_nodes() {
    let store = Store::new(7);
    let mut agents = ["n1", "n2"].map(Agent::new);
    agents.iter().for_each(|agent| store.attend(&agent.node.into()));
    let gone = |name| NodeFacts {
        known: false,
        ..node(name, None)
    };
    let steps = [
        (vec![], [false, false]),
        (vec![node("n0", None)], [true, true]),
        // It had one itself.
        (vec![node("n1", None)], [false, true]),
        (vec![gone("n1")], [true, true]),
        (vec![gone("n0")], [false, false]),
        (vec![node("n2", None)], [true, false]),
    ];
    for (nodes, expected) in steps {
        store.publish(publication(vec![], nodes.clone()));
        for (agent, expected) in agents.iter_mut().zip(expected) {
            agent.catch_up(&store);
            let (DesiredObject::Node(facts), _) = &agent.objects[&DesiredKey::Node] else {
                panic!("{:?}", agent.objects);
            };
            assert_eq!(
                facts.other_nodes, expected,
                "{} after {nodes:?}",
                agent.node
            );
            assert_eq!(agent.digest(), store.digest(agent.node));
        }
    }
}

#[test]
fn an_object_of_some_nodes_is_encoded_once_for_them() {
    let store = Store::new(7);
    store.publish(World::default().policies(&Step::Policy(vec![0, 1], true)));
    let of = |node: &str| {
        let objects = store.collect(node, &mut Cursor::at(0)).objects;
        let is_it = |bytes: &Bytes| {
            let object = decode_object(bytes.clone()).unwrap();
            matches!(object, Some(DesiredObject::Policy(PolicyObject::Policy(_))))
        };
        objects.into_iter().find(is_it)
    };
    let [first, second] = ["n0", "n1"].map(|node| of(node).unwrap());
    assert_eq!(first.as_ptr(), second.as_ptr());
    assert_eq!(of("n2"), None);
}

#[test]
fn a_variant_is_encoded_once_for_all_agents() {
    let store = Store::new(7);
    store.publish(publication(
        vec![(key(1), Some(published(1, &[endpoint(1)])))],
        vec![],
    ));
    // The node's own configuration comes first.
    let of = |node| store.collect(node, &mut Cursor::at(0)).objects.remove(1);
    assert_eq!(of("n0").as_ptr(), of("n1").as_ptr());
}

#[test]
fn a_change_of_one_zone_leaves_other_zones_alone() {
    let store = Store::new(7);
    let zoned = |octet, zone: &str| Endpoint {
        zone_hints: vec![zone.into()],
        ..endpoint(octet)
    };
    let nodes = vec![node("n0", Some("x")), node("n1", Some("y"))];
    let before = published(1, &[zoned(1, "x"), zoned(2, "y")]);
    store.publish(publication(vec![(key(1), Some(before))], nodes));
    let [mut x, mut y] = ["n0", "n1"].map(Agent::new);
    x.catch_up(&store);
    y.catch_up(&store);
    let (x_wanted, y_wanted) = (store.wanted("n0"), store.wanted("n1"));
    let after = published(1, &[zoned(1, "x"), zoned(2, "y"), zoned(3, "y")]);
    store.publish(publication(vec![(key(1), Some(after))], vec![]));
    assert_eq!(store.wanted("n0"), x_wanted);
    assert!(store.wanted("n1") > y_wanted);
    assert!(store.collect("n0", &mut x.cursor).objects.is_empty());
    assert_eq!(store.collect("n1", &mut y.cursor).objects.len(), 1);
}

#[test]
fn a_slow_agent_gets_each_key_once_in_bounded_messages() {
    let store = Store::new(7);
    for round in 0..50_u8 {
        let services = (0..2_000).map(|n| (key(n), Some(published(n, &[endpoint(round % 5 + 1)]))));
        store.publish(publication(services.collect(), vec![]));
    }
    let mut agent = Agent::new("n0");
    let (mut pieces, mut objects) = (0, 0);
    loop {
        let piece = store.collect("n0", &mut agent.cursor);
        let bytes: usize = piece.objects.iter().map(Bytes::len).sum();
        assert!(bytes < kplane_proto::MAX_MESSAGE_BYTES);
        pieces += 1;
        objects += piece.objects.len();
        if piece.end.is_some() {
            break;
        }
    }
    // And the node's configuration.
    assert_eq!(objects, 2_001);
    assert!(pieces > 1);
}

#[test]
fn old_deletions_are_forgotten_and_then_a_snapshot_is_needed() {
    let store = Store::new(7);
    let first = store.publish(publication(vec![(key(0), Some(published(0, &[])))], vec![]));
    let other = Digest::from_bytes([1; 16]);
    let resume = |revision| store.resume("n0", other, Some(revision));
    assert!(resume(first).is_some() && resume(first + 1).is_none() && resume(0).is_none());
    assert!(store.resume("n0", store.digest("n0"), None).is_some());
    for n in 0..20_000 {
        store.publish(publication(vec![(key(n), Some(published(n, &[])))], vec![]));
        store.publish(publication(vec![(key(n), None)], vec![]));
    }
    assert!(resume(first).is_none());
    assert_eq!(store.collect("n0", &mut Cursor::at(0)).deleted, []);
}

#[test]
fn a_node_in_sync_or_ahead_lacks_nothing() {
    let store = Store::new(1);
    let (zone, on_it) = (Some("z0"), published(0, &[endpoint(1)]));
    store.publish(publication(
        vec![(key(0), Some(on_it))],
        vec![node("n0", zone)],
    ));
    let newest = store.publish(publication(
        vec![(key(1), Some(on_nodes(0..1)))],
        Vec::new(),
    ));
    let pending = |node, after| {
        let pending = store.pending(node, after, 10);
        pending
            .into_iter()
            .map(|(service, _)| service.name.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(pending("n0", newest - 1), ["svc-1"]);
    // What an agent says it has is any number.
    for after in [newest, newest + 1, u64::MAX] {
        assert_eq!(pending("n0", after), [""; 0], "after {after}");
        assert_eq!(pending("unknown", after), [""; 0], "after {after}");
    }
}

#[test]
fn the_age_of_the_oldest_missing_change_is_known() {
    let store = Store::new(7);
    let before = Instant::now();
    let mut revisions = vec![0];
    for n in 0..3 {
        let services = vec![
            (key(2 * n), Some(published(2 * n, &[]))),
            (key(2 * n + 1), Some(published(n, &[]))),
        ];
        revisions.push(store.publish(publication(services, vec![])));
    }
    let [first, second] = [0, revisions[1]].map(|after| store.changed_after(after).unwrap());
    assert!(before <= first && first < second);
    assert_eq!(store.changed_after(revisions[1] + 1), Some(second));
    assert_eq!(store.changed_after(revisions[3]), None);
}
