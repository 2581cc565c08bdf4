//! Watches of more than one node: what they have, resolved for each node, is what the node must have.

use kplane_model::ServiceName;

use super::*;
use crate::publish::{LayerCursor, LayerPiece};

/// The ServicePort of a program.
fn program_of(bytes: &Bytes) -> ServiceProgram {
    match decode_object(bytes.clone()).unwrap() {
        Some(DesiredObject::Service(program)) => program,
        other => panic!("{other:?}"),
    }
}

/// A client that keeps the rules of `desired.proto`.
struct Client {
    cursor: LayerCursor,
    programs: HashMap<ServiceKey, (ServiceProgram, HashMap<String, ServiceProgram>)>,
    own: HashMap<(String, DesiredKey), DesiredObject>,
    snapshots: usize,
    serves: bool,
}

impl Client {
    fn new(store: &Store, only: Option<ServiceName>) -> Self {
        store.attend_all();
        Self {
            cursor: LayerCursor::new(only),
            programs: HashMap::new(),
            own: HashMap::new(),
            snapshots: 0,
            serves: false,
        }
    }

    /// Takes one piece of about so many bytes; true when it was the last.
    fn step(&mut self, store: &Store, bytes: usize) -> bool {
        let piece = store.read().collect_layers(&mut self.cursor, bytes);
        self.take(&piece);
        if let Some(end) = &piece.end {
            self.serves = end.serves;
        }
        piece.end.is_some()
    }

    fn take(&mut self, piece: &LayerPiece) {
        if piece.snapshot {
            self.snapshots += 1;
            self.programs.clear();
            self.own.clear();
        }
        for (default, zones) in &piece.programs {
            let default = program_of(default);
            let zones = zones
                .iter()
                .map(|(z, bytes)| (z.to_string(), program_of(bytes)));
            self.programs
                .insert(default.port.key.clone(), (default, zones.collect()));
        }
        for key in &piece.deleted {
            self.programs.remove(key);
        }
        for (node, bytes) in &piece.node_objects {
            let object = decode_object(bytes.clone()).unwrap().unwrap();
            self.own.insert((node.to_string(), object.key()), object);
        }
        for (node, key) in &piece.deleted_node_objects {
            self.own.remove(&(node.to_string(), key.clone()));
        }
    }

    /// Returns what a node must have by the three rules of `LayeredState`.
    fn resolve(&self, node: &str, zone: Option<&str>) -> BTreeMap<DesiredKey, DesiredObject> {
        let shared = self.programs.iter().map(|(key, (default, zones))| {
            let program = zone.and_then(|zone| zones.get(zone)).unwrap_or(default);
            let object = DesiredObject::Service(program.clone());
            (DesiredKey::Service(key.clone()), object)
        });
        let own = self.own.iter().filter(|((of, _), _)| of == node);
        let own = own.map(|((_, key), object)| (key.clone(), object.clone()));
        shared.collect::<Vec<_>>().into_iter().chain(own).collect()
    }
}

#[derive(Clone, Debug)]
enum Change {
    Set(usize, Vec<Endpoint>),
    Delete(usize),
    Node(usize, Option<&'static str>),
    NodeGone(usize),
    Cidrs(u8),
    /// A client reads everything, or one small piece.
    Read(usize, bool),
    Restart(usize),
}

fn any_change() -> impl Strategy<Value = Change> {
    let zone = prop::sample::select(vec![None, Some("x"), Some("y")]);
    prop_oneof![
        6 => (0_usize..5, prop::collection::vec(any_endpoint(), 0..4)).prop_map(|(n, e)| Change::Set(n, e)),
        2 => (0_usize..5).prop_map(Change::Delete),
        2 => (0_usize..4, zone).prop_map(|(n, z)| Change::Node(n, z)),
        1 => (0_usize..4).prop_map(Change::NodeGone),
        1 => any::<u8>().prop_map(Change::Cidrs),
        4 => (0_usize..2, any::<bool>()).prop_map(|(n, all)| Change::Read(n, all)),
        1 => (0_usize..2).prop_map(Change::Restart),
    ]
}

/// Makes a change in the store and in the model.
fn make(change: &Change, store: &Store, world: &mut World) {
    match change {
        Change::Set(n, endpoints) => {
            let published = published(*n, endpoints);
            store.publish(publication(
                vec![(key(*n), Some(published.clone()))],
                vec![],
            ));
            world.services.insert(*n, published);
        }
        Change::Delete(n) => {
            store.publish(publication(vec![(key(*n), None)], vec![]));
            world.services.remove(n);
        }
        Change::Node(n, zone) => {
            let node = node(NODES[*n], *zone);
            store.publish(publication(vec![], vec![node.clone()]));
            world.nodes.insert(NODES[*n], node);
        }
        Change::NodeGone(n) => {
            let gone = NodeFacts {
                known: false,
                ..node(NODES[*n], None)
            };
            store.publish(publication(vec![], vec![gone]));
            world.nodes.remove(NODES[*n]);
        }
        Change::Cidrs(octet) => {
            world.cidrs = vec![Cidr::single(IpAddr::from([10, 96, *octet, 0]))];
            let mut publication = publication(vec![], vec![]);
            publication.service_cidrs = Some(world.cidrs.clone());
            store.publish(publication);
        }
        Change::Read(..) | Change::Restart(_) => {}
    }
}

proptest! {
    /// After any sequence of events, a watch of all nodes and a watch of one Service have what each node must have.
    #[test]
    fn layers_resolve_to_what_each_node_must_have(changes in prop::collection::vec(any_change(), 1..60)) {
        let store = Store::new(7);
        let mut world = World::default();
        let only = [None, Some(key(0).service.clone())];
        let mut clients = only.clone().map(|only| Client::new(&store, only));
        for change in changes {
            make(&change, &store, &mut world);
            match change {
                Change::Read(n, true) => while !clients[n].step(&store, 1) {},
                Change::Read(n, false) => drop(clients[n].step(&store, 1)),
                Change::Restart(n) => {
                    store.leave_all();
                    clients[n] = Client::new(&store, only[n].clone());
                }
                _ => {}
            }
        }
        for (client, only) in clients.iter_mut().zip(only) {
            while !client.step(&store, 1) {}
            prop_assert_eq!(client.snapshots, 1);
            prop_assert_eq!(client.serves, world.services.contains_key(&0) && only.is_some());
            for node in NODES {
                let facts = world.nodes.get(node);
                let mut expected = world.expected(node);
                expected.retain(|key, _| match key {
                    DesiredKey::Node => facts.is_some() && only.is_none(),
                    DesiredKey::Service(key) | DesiredKey::Local(key) => {
                        only.as_ref().is_none_or(|only| *only == key.service)
                    }
                    DesiredKey::Policy(_) => false,
                });
                let zone = facts.and_then(|facts| facts.zone.as_deref());
                prop_assert_eq!(client.resolve(node, zone), expected, "{}", node);
            }
        }
    }
}

/// The log of all nodes' objects costs nothing without a watch.
#[test]
fn nothing_is_logged_without_a_watch() {
    let store = Store::new(7);
    let logged = |store: &Store| store.read().overlays.log.after(0).count();
    store.publish(publication(vec![(key(1), Some(on_nodes(0..50)))], vec![]));
    assert_eq!(logged(&store), 0);
    store.attend_all();
    store.attend_all();
    // Local endpoints of 50 nodes, and programs of 50.
    assert_eq!(logged(&store), 100);
    store.leave_all();
    assert_eq!(logged(&store), 100);
    store.leave_all();
    assert_eq!(logged(&store), 0);
}

/// A change of one endpoint is one object for the watch, however many nodes and Services there are.
#[test]
fn a_change_is_read_alone() {
    let store = Store::new(7);
    let all = (0..200).map(|n| (key(n), Some(on_node(n, 1))));
    store.publish(publication(all.collect(), vec![]));
    let mut client = Client::new(&store, None);
    while !client.step(&store, 1) {}
    store.publish(publication(vec![(key(7), Some(on_node(7, 2)))], vec![]));
    let piece = store.collect_layers(&mut client.cursor);
    assert_eq!((piece.programs.len(), piece.node_objects.len()), (1, 1));
    assert!(piece.deleted_node_objects.is_empty() && piece.end.is_some());
    let again = store.collect_layers(&mut client.cursor);
    assert!(again.is_empty() && again.end.is_some());
}

/// Returns Service `n` with one endpoint on a node of its own.
fn on_node(n: usize, octet: u8) -> Published {
    let node = Some(format!("node-{n}").into());
    let endpoint = Endpoint {
        node,
        ..endpoint(octet)
    };
    published(n, &[endpoint])
}

/// A client that sleeps through more deletions than are remembered begins anew, and costs nothing meanwhile.
#[test]
fn a_watch_that_misses_too_many_deletions_begins_anew() {
    const MANY: usize = 16_400;
    let store = Store::new(7);
    let mut client = Client::new(&store, None);
    let all = (0..MANY).map(|n| (key(n), Some(on_node(n, 1))));
    store.publish(publication(all.collect(), vec![]));
    while !client.step(&store, 1 << 20) {}
    assert_eq!((client.programs.len(), client.own.len()), (MANY, MANY));
    let none = (1..MANY).map(|n| (key(n), None));
    store.publish(publication(none.collect(), vec![]));
    let sizes = store.read().overlays.log.after(0).count();
    assert!(sizes <= 16_384 + 1, "{sizes}");
    while !client.step(&store, 1 << 20) {}
    assert_eq!((client.programs.len(), client.own.len()), (1, 1));
    assert_eq!(client.snapshots, 2);
}
