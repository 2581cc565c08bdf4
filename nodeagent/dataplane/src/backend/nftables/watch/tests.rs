//! Messages in the kernel's format, written by kplane's own encoder.

use kplane_model::Protocol;

use super::super::element::{Destination, ElementOp, push_elements};
use super::super::schema::TABLE;
use super::TableKind::Services;
use super::*;
use kplane_netlink::{AttributeWriter, Batch, Label, Messages, Operation};

const OWN: u32 = 77;
const OTHER: u32 = 4_711;
/// `NFT_MSG_NEWGEN`, and its attributes (linux/netfilter/nf_tables.h).
const NEWGEN: u16 = 10 << 8 | 15;

/// Returns the messages of a batch as if they came from the socket with this port.
fn from(port: u32, fill: impl FnOnce(&mut Batch)) -> Vec<u8> {
    let mut batch = Batch::new();
    fill(&mut batch);
    let sealed = batch.seal(None);
    let mut bytes = Vec::new();
    for message in Messages(sealed.as_bytes()).filter(|m| m.kind >> 8 == 10) {
        let start = bytes.len();
        let len = u32::try_from(16 + message.body.len()).unwrap();
        bytes.extend_from_slice(&len.to_ne_bytes());
        bytes.extend_from_slice(&message.kind.to_ne_bytes());
        bytes.extend_from_slice(&[0; 6]);
        bytes.extend_from_slice(&port.to_ne_bytes());
        bytes.extend_from_slice(message.body);
        bytes.resize(start + (16 + message.body.len()).next_multiple_of(4), 0);
    }
    bytes
}

fn push(batch: &mut Batch, kind: u16, family: Family, fill: impl FnOnce(&mut AttributeWriter<'_>)) {
    let label = Label {
        action: "test",
        object: "message",
    };
    let family = nfproto(family);
    let operation = Operation {
        label,
        kind,
        flags: 0,
        family,
    };
    batch.push(operation, fill);
}

/// Returns the message for the end of a transaction.
fn end(port: u32, number: u32) -> Vec<u8> {
    from(port, |batch| {
        push(batch, NEWGEN, Family::V4, |w| {
            w.u32(1, number);
            w.u32(2, 123);
            w.str(3, "nft");
        });
    })
}

fn table(kind: u16, family: Family, name: &str) -> Vec<u8> {
    from(OTHER, |batch| {
        push(batch, kind, family, |w| w.str(NFTA_TABLE_NAME, name));
    })
}

fn element(octet: u8) -> Element {
    Element {
        set: Set::FirewallServices,
        key: Key::Service(Destination {
            ip: [10, 96, 0, octet].into(),
            protocol: Protocol::Tcp,
            port: 80,
        }),
        data: None,
    }
}

fn elements(port: u32, op: ElementOp, octets: &[u8]) -> Vec<u8> {
    let elements: Vec<_> = octets.iter().copied().map(element).collect();
    from(port, |batch| {
        push_elements(batch, Family::V4, op, &elements);
    })
}

fn ledger(parts: &[Vec<u8>]) -> Ledger {
    let mut ledger = Ledger::default();
    ledger.restart(10);
    hear(&mut ledger, parts);
    ledger
}

fn hear(ledger: &mut Ledger, parts: &[Vec<u8>]) {
    for message in parts.iter().flat_map(|bytes| Messages(bytes)) {
        ledger.take(message, OWN);
    }
}

fn by_nft() -> Option<(u32, String)> {
    Some((123, "nft".to_owned()))
}

#[test]
fn transactions_of_other_tables_only_move_the_generation() {
    let parts = [
        table(msg::NEWTABLE, Family::V4, "foreign"),
        end(OTHER, 11),
        table(msg::DELTABLE, Family::V6, "kplane-too"),
        end(OTHER, 12),
    ];
    let ledger = ledger(&parts);
    assert_eq!(ledger.head(), Some(12));
    assert!(Family::ALL.iter().all(|family| !ledger.has_drifted((Services, *family))));
}

#[test]
fn elements_of_ours_are_told_one_by_one_the_last_word_counts() {
    let mut ledger = ledger(&[
        elements(OTHER, ElementOp::Delete, &[1, 2]),
        end(OTHER, 11),
        elements(OTHER, ElementOp::Add, &[2, 3]),
        end(OTHER, 12),
    ]);
    assert!(!ledger.has_drifted((Services, Family::V6)));
    let key = |octet| (Set::FirewallServices, element(octet).key);
    let expected = BTreeMap::from([
        (key(1), None),
        (key(2), Some(element(2))),
        (key(3), Some(element(3))),
    ]);
    let drift = ledger.take_drift((Services, Family::V4)).unwrap();
    assert_eq!(drift.changed, Changed::Elements(expected));
    assert_eq!(drift.by, by_nft());
    assert_eq!(drift.to_string(), "by nft (process 123)");
    assert!(ledger.take_drift((Services, Family::V4)).is_none());
}

#[test]
fn our_own_transactions_are_no_meddling_and_may_come_late() {
    let mut ledger = ledger(&[elements(OWN, ElementOp::Add, &[1]), end(OWN, 11)]);
    assert_eq!(ledger.head(), Some(11));
    ledger.committed(11);
    assert_eq!(ledger.head(), Some(12));
    hear(
        &mut ledger,
        &[
            end(OWN, 12),
            table(msg::NEWTABLE, Family::V4, "x"),
            end(OTHER, 13),
        ],
    );
    assert_eq!(ledger.head(), Some(13));
    assert!(!ledger.has_drifted((Services, Family::V4)));
}

/// A transaction counts only when it has ended. Before, kplane cannot build on its generation.
#[test]
fn a_transaction_counts_when_its_end_is_heard() {
    let mut ledger = ledger(&[table(msg::DELTABLE, Family::V6, TABLE)]);
    assert!(!ledger.has_drifted((Services, Family::V6)));
    hear(&mut ledger, &[end(OTHER, 11)]);
    let drift = ledger.take_drift((Services, Family::V6)).unwrap();
    assert_eq!(drift.changed, Changed::Anything);
    assert!(!ledger.has_drifted((Services, Family::V4)));
}

#[test]
fn a_gap_means_that_anything_may_have_happened() {
    let mut ledger = ledger(&[end(OTHER, 11), end(OTHER, 13)]);
    assert_eq!(ledger.head(), None);
    for family in Family::ALL {
        let drift = ledger.take_drift((Services, family)).unwrap();
        assert_eq!(drift, Drift::anything_by(None));
    }
    // The ledger continues from the generation that the kernel names. Ends of older transactions add nothing.
    ledger.restart(20);
    let old = [table(msg::DELTABLE, Family::V4, TABLE), end(OTHER, 19)];
    hear(&mut ledger, &[&old[..], &[end(OTHER, 21)]].concat());
    assert_eq!(ledger.head(), Some(21));
    assert!(!ledger.has_drifted((Services, Family::V4)));
}

#[test]
fn generations_go_on_behind_the_last_number() {
    let mut ledger = Ledger::default();
    ledger.restart(u32::MAX);
    // The kernel never uses generation 0.
    hear(&mut ledger, &[end(OTHER, 1)]);
    assert_eq!(ledger.head(), Some(1));
}

/// Ranges come in two halves, and too many elements are not followed one by one.
#[test]
fn what_cannot_be_followed_by_elements_is_anything() {
    let range = Element {
        set: Set::PodCidrs,
        key: Key::Range("10.0.0.0/8".parse().unwrap()),
        data: None,
    };
    let ranges = from(OTHER, |batch| {
        push_elements(batch, Family::V4, ElementOp::Add, [&range]);
    });
    let many: Vec<Vec<u8>> = (0..=MAX_ELEMENTS / 200)
        .map(|n| {
            let port = |port: usize| Element {
                key: Key::Service(Destination {
                    ip: [10, 96, 0, 1].into(),
                    protocol: Protocol::Tcp,
                    port: u16::try_from(n * 200 + port).unwrap(),
                }),
                ..element(1)
            };
            let elements: Vec<_> = (0..200).map(port).collect();
            from(OTHER, |batch| {
                push_elements(batch, Family::V4, ElementOp::Delete, &elements);
            })
        })
        .collect();
    for parts in [vec![ranges], many] {
        let mut ledger = ledger(&[parts, vec![end(OTHER, 11)]].concat());
        let drift = ledger.take_drift((Services, Family::V4)).unwrap();
        assert_eq!(drift.changed, Changed::Anything);
        assert_eq!(drift.by, by_nft());
    }
}
