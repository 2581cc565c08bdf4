//! The table in the kernel, compared with that of `nft`.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kplane_dataplane::backend::nftables::{
    Element, ElementOp, Key, Set, StructureState, TableSettings, push_delete_table, push_elements,
    push_structure, read_elements, read_structure,
};
use kplane_model::{Cidr, Family};
use kplane_netlink::NfSocket;

use crate::sample::{self, many_elements};
use crate::{SETTINGS, commit, socket_with_tables};
use kplane_rig::kernel::{in_netns, nft};

fn sorted(elements: impl IntoIterator<Item = Element>) -> BTreeSet<Element> {
    elements.into_iter().collect()
}

fn family_name(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    }
}

/// Returns the reason why the IPv4 table is not kplane's after `script`.
fn reason_after(socket: &mut NfSocket, script: &str) -> String {
    nft(&["-f", "-"], script);
    match read_structure(socket, Family::V4, SETTINGS).unwrap() {
        StructureState::Different(reason) => reason,
        state => panic!("{state:?} after {script}"),
    }
}

#[test]
fn structure_is_read_back_as_ours() {
    in_netns(|| {
        let mut socket = NfSocket::open().unwrap();
        for family in Family::ALL {
            let state = read_structure(&mut socket, family, SETTINGS).unwrap();
            assert_eq!(state, StructureState::Absent);
        }
        let mut socket = socket_with_tables();
        for family in Family::ALL {
            let state = read_structure(&mut socket, family, SETTINGS).unwrap();
            assert_eq!(state, StructureState::Ours(Vec::new()));
            let other_mark = TableSettings {
                masquerade_bit: 15,
                ..SETTINGS
            };
            let state = read_structure(&mut socket, family, other_mark).unwrap();
            assert!(matches!(state, StructureState::Different(_)), "{state:?}");
            // The table is replaced in one transaction, and deleted.
            commit(&mut socket, |batch| {
                push_delete_table(batch, family);
                push_structure(batch, family, other_mark);
            });
            let state = read_structure(&mut socket, family, other_mark).unwrap();
            assert_eq!(state, StructureState::Ours(Vec::new()));
            commit(&mut socket, |batch| push_delete_table(batch, family));
            commit(&mut socket, |batch| push_delete_table(batch, family));
            let state = read_structure(&mut socket, family, SETTINGS).unwrap();
            assert_eq!(state, StructureState::Absent);
        }
    });
}

#[test]
fn tampering_is_noticed() {
    in_netns(|| {
        let mut socket = socket_with_tables();
        let script_and_reason = [
            (
                "insert rule ip kplane services accept",
                "rule 1 of chain services",
            ),
            ("add rule ip kplane refuse drop", "chain refuse has 3 rules"),
            ("flush chain ip kplane services", "chain services has 0"),
            (
                "chain ip kplane forward { policy drop; }",
                "chain forward differs",
            ),
            (
                "add chain ip kplane mine { type filter hook input priority 5; policy drop; }",
                "chain mine is not kplane's",
            ),
            (
                "add set ip kplane mine { type ipv4_addr; }",
                "set mine is not kplane's",
            ),
            ("add counter ip kplane mine", "more than chains, sets and counters"),
            (
                "flush chain ip kplane firewall
                 add rule ip kplane firewall ip daddr . meta l4proto . th dport . ip saddr != @firewall-sources return
                 add rule ip kplane firewall drop",
                "rule 1 of chain firewall",
            ),
            (
                "delete table ip kplane
                 add table ip kplane { flags dormant; comment \"kplane nftables layout 5\"; }",
                "flags or comment",
            ),
            (
                "flush chain ip kplane firewall
                 flush chain ip kplane taken
                 delete set ip kplane firewall-sources",
                "set firewall-sources is missing",
            ),
        ];
        for (script, reason) in script_and_reason {
            let found = reason_after(&mut socket, script);
            assert!(found.contains(reason), "{found:?} after {script}");
            commit(&mut socket, |batch| {
                push_delete_table(batch, Family::V4);
                push_structure(batch, Family::V4, SETTINGS);
            });
            let state = read_structure(&mut socket, Family::V4, SETTINGS).unwrap();
            assert_eq!(state, StructureState::Ours(Vec::new()), "after {script}");
        }
    });
}

#[test]
fn elements_are_read_back() {
    in_netns(|| {
        let mut socket = socket_with_tables();
        for family in Family::ALL {
            let elements = sample::elements(family);
            commit(&mut socket, |batch| {
                push_elements(batch, family, ElementOp::Add, &elements);
            });
            let found = read_elements(&mut socket, family).unwrap();
            assert_eq!(sorted(found), sorted(elements.iter().copied()));

            // Every second element is deleted.
            let (gone, kept): (Vec<_>, Vec<_>) =
                (0..).zip(&elements).partition(|(position, _)| position % 2 == 0);
            commit(&mut socket, |batch| {
                let gone = gone.iter().map(|(_, element)| *element);
                push_elements(batch, family, ElementOp::Delete, gone);
            });
            let found = read_elements(&mut socket, family).unwrap();
            assert_eq!(sorted(found), sorted(kept.iter().map(|(_, e)| **e)));
        }
    });
}

#[test]
fn foreign_elements_are_noticed() {
    in_netns(|| {
        let scripts = [
            (
                "add element ip kplane pod-cidrs { 10.0.0.1-10.0.0.9 }",
                "pod-cidrs",
            ),
            (
                "add element ip kplane hairpin { 10.0.0.1 . 10.0.0.2 . tcp . 80 }",
                "hairpin",
            ),
            (
                "add element ip kplane places { 10.0.0.1 . 33 . 80 : 8000:1 }",
                "places",
            ),
        ];
        for (script, set) in scripts {
            let mut socket = NfSocket::open().unwrap();
            commit(&mut socket, |batch| {
                push_delete_table(batch, Family::V4);
                push_structure(batch, Family::V4, SETTINGS);
            });
            nft(&["-f", "-"], script);
            let error = read_elements(&mut socket, Family::V4).unwrap_err();
            let expected = format!("set {set} holds an element that kplane never writes");
            assert_eq!(error.to_string(), expected);
        }
    });
}

/// A host that saves `nft list ruleset` while kplane runs can load all of it at boot.
#[test]
fn what_nft_prints_loads_again() {
    let (mut dumps, mut loaded) = (Vec::new(), Vec::new());
    let text = |socket: &mut NfSocket| {
        for family in Family::ALL {
            let elements = sample::elements(family);
            commit(socket, |batch| {
                push_elements(batch, family, ElementOp::Add, &elements);
            });
        }
        nft(&["list", "ruleset"], "")
    };
    in_netns(|| {
        let mut socket = socket_with_tables();
        dumps.push(text(&mut socket));
        nft(&["-j", "list", "ruleset"], "");
    });
    let Some(dump) = dumps.pop() else { return };
    in_netns(|| {
        nft(&["-f", "-"], &dump);
        loaded.push(nft(&["list", "ruleset"], ""));
        let mut socket = NfSocket::open().unwrap();
        for family in Family::ALL {
            let found = read_elements(&mut socket, family).unwrap();
            assert_eq!(sorted(found), sorted(sample::elements(family)));
            // All rules but one are byte for byte kplane's. nft 1.0.6 swaps the bytes of the one-byte
            // protocol in front of a lookup in a concatenation of ranges, which changes nothing.
            let table = format!("{} kplane", family_name(family));
            let state = read_structure(&mut socket, family, SETTINGS).unwrap();
            let reason = "rule 1 of chain firewall differs".to_owned();
            assert_eq!(state, StructureState::Different(reason));
            nft(&["-f", "-"], &format!("flush chain {table} firewall"));
            let state = read_structure(&mut socket, family, SETTINGS).unwrap();
            let reason = "chain firewall has 0 rules, not 2".to_owned();
            assert_eq!(state, StructureState::Different(reason));
        }
    });
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<_>>();
    assert_eq!(lines(&loaded[0]), lines(&dump));
}

#[test]
fn sixty_thousand_elements() {
    in_netns(|| {
        let mut socket = socket_with_tables();
        for family in Family::ALL {
            let elements = many_elements(family, 12_000);
            assert_eq!(elements.len(), 60_000);
            commit(&mut socket, |batch| {
                push_elements(batch, family, ElementOp::Add, &elements);
            });
            let elements = sorted(elements);
            // The kernel enlarges sets in the background. Until it has done so, a list may lack elements.
            let start = Instant::now();
            while sorted(read_elements(&mut socket, family).unwrap()) != elements {
                assert!(start.elapsed() < Duration::from_secs(10), "{family}");
            }
        }
    });
}

/// A read within one generation returns no half transactions. The kernel itself reports changes only between
/// two chunks of a dump, not those within one. The set that changes is small, so that the kernel does not enlarge it: while it
/// does, it lists elements twice or not at all, in whatever generation.
#[test]
fn a_read_within_one_generation_is_not_torn() {
    in_netns(|| {
        let mut socket = socket_with_tables();
        let mut elements = many_elements(Family::V4, 500);
        let guests = Set::FirewallServices;
        let guest = |number: u32| Element {
            set: guests,
            key: Key::Service(sample::destination(Family::V4, 10_000 + number)),
            data: None,
        };
        elements.push(guest(0));
        commit(&mut socket, |batch| {
            push_elements(batch, Family::V4, ElementOp::Add, &elements);
        });
        // Sockets belong to the namespace in which they were opened.
        let mut writer = NfSocket::open().unwrap();
        let done = AtomicBool::new(false);
        let replace_guests = || {
            for number in (0_u32..).take_while(|_| !done.load(Ordering::Relaxed)) {
                commit(&mut writer, |batch| {
                    let (gone, new) = (guest(number), guest(number + 1));
                    push_elements(batch, Family::V4, ElementOp::Delete, [&gone]);
                    push_elements(batch, Family::V4, ElementOp::Add, [&new]);
                });
                // Some pauses are long enough for a whole read.
                let pause = if number % 16 == 0 { 100_000 } else { 200 };
                thread::sleep(Duration::from_micros(pause));
            }
        };
        let (mut quiet, mut disturbed) = (Vec::new(), 0);
        thread::scope(|scope| {
            scope.spawn(replace_guests);
            let until = Instant::now() + Duration::from_secs(2);
            while Instant::now() < until {
                let before = socket.generation().ok();
                let read = read_elements(&mut socket, Family::V4);
                if socket.generation().ok() == before {
                    let found = read.unwrap();
                    quiet.push(found.iter().filter(|found| found.set == guests).count());
                } else {
                    disturbed += 1;
                }
            }
            done.store(true, Ordering::Relaxed);
        });
        println!("{} quiet reads, {disturbed} disturbed", quiet.len());
        assert!(!quiet.is_empty() && disturbed > 0);
        assert!(quiet.iter().all(|guests| *guests == 1), "{quiet:?}");
    });
}

/// Pseudo-random small numbers, the same in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        u32::try_from(self.0 >> 33).unwrap() % sides
    }
}

/// Ranges are replaced by ranges inside or around them, adjacent ones included, in one transaction.
#[test]
fn ranges_are_replaced_in_one_transaction() {
    in_netns(|| {
        let mut socket = socket_with_tables();
        for family in Family::ALL {
            let mut dice = Dice(7);
            let mut there = BTreeSet::new();
            for round in 0..150 {
                let gone: BTreeSet<Element> =
                    there.iter().filter(|_| dice.roll(3) == 0).copied().collect();
                there.retain(|element| !gone.contains(element));
                let mut new = BTreeSet::new();
                for _ in 0..dice.roll(12) {
                    let element = random_range(family, &mut dice);
                    if !there.iter().chain(&new).any(|other| overlap(other, &element)) {
                        new.insert(element);
                    }
                }
                commit(&mut socket, |batch| {
                    push_elements(batch, family, ElementOp::Delete, &gone);
                    push_elements(batch, family, ElementOp::Add, &new);
                });
                there.append(&mut new);
                let found = read_elements(&mut socket, family).unwrap();
                assert_eq!(sorted(found), there, "{family} round {round}");
            }
        }
    });
}

/// The addresses are few, so that ranges meet often.
fn random_range(family: Family, dice: &mut Dice) -> Element {
    let bits = family.address_len() * 8;
    let len = bits - [0, 0, 1, 2, 4, 28][dice.roll(6) as usize];
    let low = [0, 0xffff_ffe0, 0x0a00_0000][dice.roll(3) as usize] + dice.roll(32);
    let range = Cidr::new(sample::ip(family, low), u8::try_from(len).unwrap()).unwrap();
    let destination = sample::destination(family, dice.roll(2));
    let data = None;
    match dice.roll(2) {
        0 => Element {
            set: Set::PodCidrs,
            key: Key::Range(range),
            data,
        },
        _ => Element {
            set: Set::FirewallSources,
            key: Key::FirewallSource(destination, range),
            data,
        },
    }
}

fn overlap(one: &Element, other: &Element) -> bool {
    let meet = |a: Cidr, b: Cidr| a.covers(b) || b.covers(a);
    match (one.key, other.key) {
        (Key::Range(a), Key::Range(b)) => meet(a, b),
        (Key::FirewallSource(x, a), Key::FirewallSource(y, b)) => x == y && meet(a, b),
        _ => false,
    }
}
