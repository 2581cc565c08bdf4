//! The form of whole batches: lengths, alignment, nesting, sequence numbers.

use kplane_model::Family;

use super::super::{
    Destination, Element, ElementOp, Key, Set, TableSettings, push_delete_table, push_elements,
    push_structure,
};
use kplane_netlink::Batch;

/// `sizeof(struct nlmsghdr) + sizeof(struct nfgenmsg)`.
const HEADERS_BYTES: usize = 20;
const SETTINGS: TableSettings = TableSettings {
    masquerade_bit: 31,
    own_mark: 0x50,
    pod_interface: None,
    refuse_loopback: true,
};
const NLA_F_NESTED: u16 = 0x8000;

fn u16_at(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_ne_bytes([bytes[at], bytes[at + 1]]))
}

fn u32_at(bytes: &[u8], at: usize) -> usize {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

/// Walks attributes: they fill `bytes` exactly, padding is zero, nested ones are checked too.
/// Returns how many there are in all.
fn walk(bytes: &[u8]) -> usize {
    let (mut at, mut count) = (0, 0);
    while at < bytes.len() {
        let len = u16_at(bytes, at);
        let kind = u16::try_from(u16_at(bytes, at + 2)).unwrap();
        let padded = len.next_multiple_of(4);
        assert!(
            len >= 4 && at + padded <= bytes.len(),
            "length {len} at {at}"
        );
        assert!(bytes[at + len..at + padded].iter().all(|byte| *byte == 0));
        assert!((1..32).contains(&(kind & !NLA_F_NESTED)), "type {kind}");
        if kind & NLA_F_NESTED != 0 {
            assert_eq!(len % 4, 0, "a nest is padded inside");
            count += walk(&bytes[at + 4..at + len]);
        }
        at += padded;
        count += 1;
    }
    assert_eq!(at, bytes.len());
    count
}

/// Walks a sealed batch and returns type, flags and number of attributes of each message.
fn messages(batch: Batch, generation: Option<u32>) -> Vec<(usize, usize, usize)> {
    let sealed = batch.seal(generation);
    let mut bytes = sealed.as_bytes();
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let len = u32_at(bytes, 0);
        assert_eq!(len % 4, 0);
        assert_eq!(u16_at(bytes, 6) & 1, 1, "NLM_F_REQUEST");
        assert_eq!(bytes[17], 0, "NFNETLINK_V0");
        let attributes = walk(&bytes[HEADERS_BYTES..len]);
        found.push((u16_at(bytes, 4), u16_at(bytes, 6), attributes));
        bytes = &bytes[len..];
    }
    assert_eq!(found.len(), sealed.len() + 2);
    found
}

#[test]
fn the_structure_is_well_formed() {
    for family in Family::ALL {
        for generation in [None, Some(7)] {
            let mut batch = Batch::new();
            push_delete_table(&mut batch, family);
            push_structure(&mut batch, family, SETTINGS);
            let count = batch.len();
            let found = messages(batch, generation);
            // NFNL_MSG_BATCH_BEGIN with the generation, NFNL_MSG_BATCH_END.
            assert_eq!(found[0], (0x10, 1, generation.iter().count()));
            assert_eq!(found[count + 1], (0x11, 1, 0));
            // NLM_F_ACK on the last operation only.
            let acknowledged = |(_, flags, _): &(usize, usize, usize)| flags & 4 != 0;
            assert!(acknowledged(&found[count]));
            assert_eq!(found.iter().filter(|m| acknowledged(m)).count(), 1);
        }
    }
}

#[test]
fn long_lists_of_elements_are_cut() {
    for family in Family::ALL {
        let everything = kplane_model::Cidr::everything(family);
        let mut elements = Vec::new();
        for port in 0..5_000 {
            let destination = Destination {
                ip: everything.first(),
                protocol: kplane_model::Protocol::Sctp,
                port,
            };
            let mut push = |set, key| {
                let data = None;
                elements.push(Element { set, key, data });
            };
            push(Set::FirewallServices, Key::Service(destination));
            push(
                Set::FirewallSources,
                Key::FirewallSource(destination, everything),
            );
        }
        for op in [ElementOp::Add, ElementOp::Delete] {
            let mut batch = Batch::new();
            push_elements(&mut batch, family, op, &elements);
            let operations = batch.len();
            assert!(operations > 4, "{operations} operations");
            let found = messages(batch, None);
            assert_eq!(found.len(), operations + 2);
            // Table, set and list of each operation, and per element: entry, key and value; in the
            // set of ranges end of key and value, too.
            let attributes: usize = found.iter().map(|(.., attributes)| attributes).sum();
            assert_eq!(attributes, 3 * operations + 5_000 * 3 + 5_000 * 5);
        }
    }
}

#[test]
fn an_empty_batch_has_no_operation() {
    let mut batch = Batch::new();
    push_elements(&mut batch, Family::V4, ElementOp::Add, &[]);
    assert!(batch.is_empty());
    assert_eq!(messages(batch, None).len(), 2);
}
