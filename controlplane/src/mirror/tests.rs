use std::sync::Arc;
use std::time::Duration;

use kplane_model::ObjectHash;

use super::*;
use crate::publish::{Program, Store};

fn key(n: usize) -> ServiceKey {
    ServiceKey::sample("shop", &format!("s{n:02}"))
}

/// Returns the whole state of a ServicePort, with or without an endpoint, or its deletion.
fn port(n: usize, has_any: Option<bool>) -> (ServiceKey, Option<PortChange>) {
    let change = has_any.map(|has_any| {
        let bytes = format!("{n} {has_any}").into_bytes();
        let hash = ObjectHash::of(&bytes);
        let program = Program {
            default: (bytes.into(), hash),
            by_zone: BTreeMap::new(),
            endpoints: usize::from(has_any),
            has_any,
        };
        PortChange {
            program: Some(program),
            ..PortChange::default()
        }
    });
    (key(n), change)
}

fn whole(ports: impl IntoIterator<Item = (ServiceKey, Option<PortChange>)>, trust: Trust) -> Heard {
    let mut heard = changes(ports, trust);
    heard.snapshot = true;
    for change in heard.ports.values_mut().flatten() {
        change.whole = true;
    }
    heard
}

fn changes(
    ports: impl IntoIterator<Item = (ServiceKey, Option<PortChange>)>,
    trust: Trust,
) -> Heard {
    Heard {
        snapshot: false,
        ports: ports.into_iter().collect(),
        nodes: BTreeMap::new(),
        unread_nodes: BTreeSet::new(),
        service_cidrs: Vec::new(),
        changed_at: SystemTime::UNIX_EPOCH,
        triggers: Vec::new(),
        trust,
        freshness: Freshness::default(),
        current_at: Instant::now(),
    }
}

/// A mirror, and the store that it writes.
struct World {
    mirror: Mirror,
    store: Store,
}

impl World {
    /// Begins with so many Services that have an endpoint.
    fn of(services: usize) -> Self {
        let mut world = Self {
            mirror: Mirror::new(CliffGuard::default()),
            store: Store::new(7),
        };
        let ports = (0..services).map(|n| port(n, Some(true)));
        world.hear(whole(ports, Trust::Whole));
        world
    }

    fn hear(&mut self, heard: Heard) -> Reflection {
        let mut reflection = self.mirror.apply(Batch {
            events: vec![Event::Relayed(Box::new(heard))],
            observed_at: SystemTime::UNIX_EPOCH,
        });
        self.publish(&mut reflection);
        reflection
    }

    fn approve(&mut self) -> Option<Held> {
        let (held, mut reflection) = self.mirror.approve(SystemTime::UNIX_EPOCH);
        self.publish(&mut reflection);
        held
    }

    fn publish(&mut self, reflection: &mut Reflection) {
        if let Some(relayed) = reflection.publication.take() {
            self.store.stage_relayed(relayed, self.mirror.freshness());
        }
    }

    /// Returns the numbers of the Services that are published, and of those with an endpoint.
    fn published(&self) -> (usize, usize) {
        let texts = (0..100).filter_map(|n| self.store.layers(&key(n)));
        let texts: Vec<_> = texts.map(|layers| layers.default).collect();
        let served = texts.iter().filter(|text| text.ends_with(b"true")).count();
        assert_eq!(self.mirror.totals().services, texts.len());
        assert_eq!(self.mirror.totals().endpoints, served);
        (texts.len(), served)
    }

    fn held(&self) -> Option<(usize, usize)> {
        let held = self.mirror.held()?;
        Some((held.services, held.without_endpoints))
    }
}

fn doubt() -> Trust {
    Trust::Partial(Arc::from("a file is broken"))
}

#[test]
fn what_a_whole_picture_lacks_is_gone_unless_it_is_much() {
    let mut world = World::of(40);
    world.hear(whole((5..40).map(|n| port(n, Some(true))), Trust::Whole));
    assert_eq!((world.published(), world.held()), ((35, 35), None));
    let reflection = world.hear(whole((25..40).map(|n| port(n, Some(true))), Trust::Whole));
    assert!(reflection.held_more && reflection.issues_changed);
    assert_eq!((world.published(), world.held()), ((35, 35), Some((20, 0))));
    let issues = world.mirror.issues();
    assert!(issues[0].reason.contains("20 of 35 Services"), "{issues:?}");
    // The same picture confirms nothing.
    assert!(!world.hear(changes([], Trust::Whole)).held_more);
    assert_eq!(world.held(), Some((20, 0)));
    // One is back, one is deleted by name, and then the source was read a second time.
    world.hear(changes([port(5, Some(true)), port(6, None)], Trust::Whole));
    assert_eq!((world.published(), world.held()), ((34, 34), Some((18, 0))));
    world.hear(changes([], Trust::Confirmed));
    assert_eq!((world.published(), world.held()), ((16, 16), None));
    assert!(world.mirror.issues().is_empty());
}

#[test]
fn services_keep_their_endpoints_if_many_would_lose_the_last_one() {
    let mut world = World::of(20);
    let bare = |trust| {
        let ports = (0..20).map(|n| port(n, Some(n >= 15)));
        whole(ports, trust)
    };
    world.hear(bare(Trust::Whole));
    assert_eq!((world.published(), world.held()), ((20, 20), Some((0, 15))));
    // A change of a Service that still has no endpoints shows nothing; one with an endpoint takes effect.
    world.hear(changes(
        [port(3, Some(false)), port(4, Some(true))],
        Trust::Whole,
    ));
    assert_eq!((world.published(), world.held()), ((20, 20), Some((0, 14))));
    let held = world.approve().unwrap();
    assert_eq!((held.services, held.without_endpoints), (0, 14));
    assert_eq!((world.published(), world.held()), ((20, 6), None));
    assert_eq!(world.mirror.trust(), Trust::Confirmed);
    // An approval is about what the operator saw.
    world.hear(whole([port(0, Some(true))], Trust::Whole));
    assert_eq!((world.published(), world.held()), ((20, 7), Some((19, 0))));
}

#[test]
fn nothing_goes_while_the_source_was_not_read_completely() {
    let mut world = World::of(3);
    let node = NodeFacts {
        name: "a".into(),
        known: true,
        ..NodeFacts::default()
    };
    let mut heard = changes([], Trust::Whole);
    heard.nodes.insert("a".into(), Some(node));
    world.hear(heard);
    world.hear(whole([port(0, Some(false)), port(1, Some(true))], doubt()));
    assert_eq!((world.published(), world.held()), ((3, 3), Some((1, 1))));
    assert!(world.store.knows("a"));
    assert_eq!(world.mirror.trust(), doubt());
    // Objects that it names go on to change.
    world.hear(changes(
        [port(1, Some(false)), port(9, Some(true))],
        doubt(),
    ));
    assert_eq!(world.published(), (4, 3));
    world.hear(changes([], Trust::Whole));
    assert_eq!((world.published(), world.held()), ((3, 1), None));
    assert!(!world.store.knows("a"));
}

#[test]
fn a_relay_that_has_heard_nothing_grows_old() {
    let mut mirror = Mirror::new(CliffGuard::default());
    let begun = mirror.current_at();
    let problem = Issue::of_source(
        Reason::UpstreamFailing,
        "the control plane does not answer".to_owned(),
    );
    let reflection = mirror.apply(Batch {
        events: vec![Event::Issues(vec![problem.clone()])],
        observed_at: SystemTime::UNIX_EPOCH,
    });
    assert!(reflection.issues_changed && reflection.publication.is_none());
    assert_eq!(mirror.issues(), [problem]);
    assert!(!mirror.is_synced() && mirror.current_at() == begun);
    let mut heard = whole([], Trust::Whole);
    heard.current_at = begun + Duration::from_secs(3);
    mirror.apply(Batch {
        events: vec![Event::Relayed(Box::new(heard))],
        observed_at: SystemTime::UNIX_EPOCH,
    });
    assert!(mirror.is_synced());
    assert_eq!(mirror.current_at(), begun + Duration::from_secs(3));
}
