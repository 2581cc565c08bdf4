//! Connections that were open once and are denied now: one of their ends is handed to the sweeper.

use std::net::IpAddr;

use kplane_model::{Family, PolicyObject, Protocol};
use proptest::prelude::*;
use proptest::sample::select;

use super::{IPS, Step, World, ip, local_pod, name, object, ranges, whole, with_change};
use crate::backend::nftables::TableKind;
use crate::backend::nftables::memory::{Disturbance, MemoryKernel, PacketFate, TestPacket};
use crate::conntrack::Sweeper;
use crate::conntrack::tests::idle;
use crate::policy::{Enforcer, PolicyApplied};

const V4: Family = Family::V4;

/// Something that happens to a node.
#[derive(Clone, Debug)]
enum Event {
    /// Objects change, and the kernel gets the first part of that.
    Change(Vec<Step>),
    /// The kernel gets further parts, as many as there are or fewer.
    GoOn(usize),
    /// Another program removes one of so many elements.
    Thin(usize),
    /// The engine repairs what the kernel reported.
    Repair,
    /// The engine reads everything back.
    Verify,
}

fn any_event() -> impl Strategy<Value = Event> {
    let changes = prop::collection::vec(any_step(), 1..4).prop_map(Event::Change);
    prop_oneof![
        6 => changes,
        4 => (1_usize..9).prop_map(Event::GoOn),
        1 => (1_usize..4).prop_map(Event::Thin),
        1 => Just(Event::Repair),
        1 => Just(Event::Verify),
    ]
}

/// A change of something else than which addresses Pods have. Connections of an address that is nobody's wait for its return,
/// and classes are named as long as they have addresses.
fn any_step() -> impl Strategy<Value = Step> {
    (object(), prop::bool::weighted(0.75)).prop_map(|(object, there)| match object {
        PolicyObject::Pod(mut pod) => {
            let number = usize::from(pod.name != name(0));
            pod.name = name(number);
            pod.addresses = vec![ip(IPS[number])];
            (
                PolicyObject::Pod(pod.clone()).key(),
                Some(PolicyObject::Pod(pod)),
            )
        }
        PolicyObject::Peer(_) | PolicyObject::Class(_) => (object.key(), Some(object)),
        object => (object.key(), there.then_some(object)),
    })
}

struct Node {
    kernel: MemoryKernel,
    enforcer: Enforcer,
    sweeper: Sweeper,
    world: World,
    /// The change that the kernel gets now.
    applied: PolicyApplied,
    /// Packets that have passed since their connections were last judged.
    open: Vec<TestPacket>,
}

impl Node {
    fn new(part: usize) -> Self {
        let kernel = MemoryKernel::new([]);
        kernel.set_part(part);
        let mut enforcer = Enforcer::new(kernel.open().policies);
        let (sweeper, _) = idle();
        enforcer.cut_connections(sweeper.clone());
        Self {
            kernel,
            enforcer,
            sweeper,
            world: World::new(),
            applied: PolicyApplied::default(),
            open: Vec::new(),
        }
    }

    fn begin(&mut self, steps: &[Step], complete: bool) -> bool {
        let begun = with_change(steps, complete, &ranges(), |change| {
            self.enforcer.begin(V4, change)
        });
        begun.map(|applied| self.applied = applied).is_ok()
    }

    /// Begins a change, and everything anew if that fails.
    fn change(&mut self, steps: &[Step], complete: bool) {
        for (key, object) in steps {
            match object {
                Some(object) => self.world.insert(key.clone(), object.clone()),
                None => self.world.remove(key),
            };
        }
        if !self.begin(steps, complete) {
            self.change_all();
        }
    }

    fn change_all(&mut self) {
        assert!(self.begin(&whole(&self.world), true));
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Change(steps) => self.change(&steps, false),
            Event::GoOn(times) => {
                for _ in 0..times {
                    if self.applied.rest == 0 {
                        break;
                    }
                    if self.enforcer.go_on(V4, &mut self.applied).is_err() {
                        self.change_all();
                    }
                }
            }
            Event::Thin(of) => {
                self.kernel.disturb(0, Disturbance::Thin(TableKind::Policies, V4, of));
            }
            Event::Repair if !self.enforcer.drifted()[0] => {}
            Event::Repair => drop(self.enforcer.repair(V4).unwrap()),
            Event::Verify => drop(self.enforcer.verify(V4).unwrap()),
        }
    }

    fn passes(&self, packet: &TestPacket) -> bool {
        let fates = self.kernel.fates(packet);
        fates.iter().all(|fate| matches!(fate, PacketFate::Passes { .. }))
    }

    /// Notes which packets pass. Once the kernel has all of a change, returns one that does not pass any more, although the
    /// sweeper was not told of its connection.
    fn forgotten(&mut self) -> Option<TestPacket> {
        let passing: Vec<TestPacket> = packets().filter(|packet| self.passes(packet)).collect();
        let mut before = std::mem::replace(&mut self.open, passing);
        before.retain(|packet| !self.open.contains(packet));
        if self.applied.rest > 0 || self.enforcer.drifted()[0] {
            self.open.extend(before);
            return None;
        }
        let judged = self.sweeper.take_judged(V4);
        let is_judged = |ip: &IpAddr| judged.contains(ip);
        before
            .into_iter()
            .find(|of| !is_judged(&of.source) && !is_judged(&of.destination))
    }
}

/// Packets from and to the Pods of the node.
fn packets() -> impl Iterator<Item = TestPacket> {
    let ports = [(Protocol::Tcp, 80), (Protocol::Udp, 81)];
    let others = |pod: usize| (pod + 1..IPS.len()).map(move |other| (pod, other));
    (0..2)
        .flat_map(others)
        .flat_map(|(pod, other)| [(pod, other), (other, pod)])
        .flat_map(move |(from, to)| {
            ports.map(|port| TestPacket::new(ip(IPS[from]), ip(IPS[to]), Some(port)))
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever changes, in however many parts, and whatever another program does meanwhile.
    #[test]
    fn np13_connections_that_are_denied_now_are_judged(
        start in prop::collection::vec(any_step(), 0..20),
        events in prop::collection::vec(any_event(), 1..12),
        part in select(vec![1, 3, 4_096]),
    ) {
        let mut node = Node::new(part);
        let mut steps: Vec<Step> = [0, 1].map(|number| local_pod(number, &[])).map(|pod| (pod.key(), Some(pod))).into();
        steps.extend(start);
        node.change(&steps, true);
        let rest = [Event::Change(Vec::new()), Event::GoOn(usize::MAX), Event::Repair, Event::GoOn(1)];
        for event in events.into_iter().chain(rest) {
            let what = format!("{event:?}");
            node.happen(event);
            prop_assert_eq!(node.forgotten(), None, "after {}", what);
        }
    }
}
