//! Tests of the codec without a kernel. They compare kplane's bytes with those of `nft`, check the form of
//! whole batches, and decode everything that kplane encodes.

mod golden;
mod layout;
mod well_formed;

use std::net::IpAddr;

use kplane_model::{Cidr, EndpointAddr, Family, Protocol};
use proptest::prelude::*;

use super::affinity_id::AffinityId;
use super::decode::Decoder;
use super::policy_schema::PolicySet;
use super::table_kind::TableKind;
use super::uapi::{NFTA_SET_ELEM_LIST_ELEMENTS, NFTA_SET_ELEM_LIST_SET};
use super::word::DRAWS;
use super::{Carries, Data, Destination, Element, ElementOp, Key, NodePort, Set, push_elements};
use kplane_netlink::{Attributes, Batch, Messages};

fn ips(family: Family) -> BoxedStrategy<IpAddr> {
    match family {
        Family::V4 => any::<[u8; 4]>().prop_map(IpAddr::from).boxed(),
        Family::V6 => any::<[u8; 16]>().prop_map(IpAddr::from).boxed(),
    }
}

fn cidrs(family: Family) -> impl Strategy<Value = Cidr> {
    let bits = u8::try_from(family.address_len() * 8).unwrap();
    (ips(family), 0..=bits).prop_map(|(ip, len)| Cidr::new(ip, len).unwrap())
}

/// An element of any set but the plain sets of ranges, where elements depend on one another.
fn elements(family: Family) -> impl Strategy<Value = Element> {
    let sets: Vec<Set> = all_sets().into_iter().filter(|set| !is_plain_ranges(*set)).collect();
    let parts = (
        proptest::sample::select(sets),
        (ips(family), ips(family), cidrs(family)),
        proptest::sample::select(&Protocol::ALL[..]),
        (any::<u16>(), any::<u16>(), any::<u32>()),
    );
    parts.prop_map(
        |(set, (ip, other, range), protocol, (port, target, index))| {
            let destination = Destination { ip, protocol, port };
            let node_port = NodePort { protocol, port };
            let keys = [
                Key::Service(destination),
                Key::NodePort(node_port),
                Key::Ip(ip),
                Key::Hairpin(destination),
                Key::FirewallSource(destination, range),
                Key::ServiceSlot(destination, index),
                Key::NodePortSlot(node_port, index),
                Key::Number(index),
                Key::Loop(ip),
                Key::Grant(ip, index),
                Key::GrantPort(ip, index, protocol, port),
                Key::GrantPorts(ip, index, protocol, port.min(target), port.max(target)),
                Key::Row(index, protocol, port.min(target), port.max(target)),
            ];
            let endpoint = EndpointAddr::new(other, target);
            let id = AffinityId::from_bits(u64::from(index) << 30);
            Element {
                set,
                key: keys.into_iter().find(|key| key.fits(set)).unwrap(),
                data: match (set.carries(), set) {
                    (Carries::Nothing, _) => None,
                    (Carries::Number, _) => Some(Data::Number(index)),
                    (Carries::Endpoint, _) => Some(Data::Endpoint(endpoint)),
                    (Carries::Chain, Set::Sticky(_)) => Some(Data::Pick(id)),
                    (Carries::Chain, Set::Classes | Set::InsideClasses) => {
                        DRAWS.first().unwrap().data
                    }
                    (Carries::Chain, _) if index % 2 == 0 => Some(Data::Keep(id)),
                    (Carries::Chain, _) => Some(Data::Split(id)),
                },
            }
        },
    )
}

fn all_sets() -> Vec<Set> {
    TableKind::ALL.into_iter().flat_map(Set::all_of).collect()
}

fn is_plain_ranges(set: Set) -> bool {
    set.is_interval() && set.fields().len() == 1
}

/// Returns the elements that the kernel would return for an encoded batch.
fn decoded(family: Family, batch: &Batch) -> Vec<Element> {
    let mut elements = Vec::new();
    for set in all_sets() {
        let mut decoder = Decoder::new(family, set);
        for message in Messages(batch.as_bytes()) {
            let attributes = message.attributes();
            let name = attributes.get(NFTA_SET_ELEM_LIST_SET).unwrap();
            if name.as_str() == Some(set.name()) {
                let list = attributes.get(NFTA_SET_ELEM_LIST_ELEMENTS).unwrap();
                decoder.take(list.children()).unwrap();
            }
        }
        elements.extend(decoder.finish().unwrap());
    }
    elements
}

fn round_trip(family: Family, mut elements: Vec<Element>) {
    let mut batch = Batch::new();
    push_elements(&mut batch, family, ElementOp::Add, &elements);
    let mut decoded = decoded(family, &batch);
    elements.sort_unstable();
    decoded.sort_unstable();
    assert_eq!(decoded, elements);
}

proptest! {
    #[test]
    fn elements_survive_a_round_trip_v4(elements in prop::collection::vec(elements(Family::V4), 0..40)) {
        round_trip(Family::V4, elements);
    }

    #[test]
    fn elements_survive_a_round_trip_v6(elements in prop::collection::vec(elements(Family::V6), 0..40)) {
        round_trip(Family::V6, elements);
    }

    /// Ranges that do not overlap, adjacent ones included.
    #[test]
    fn ranges_survive_a_round_trip(candidates in prop::collection::vec(cidrs(Family::V4), 0..20)) {
        let mut ranges = Vec::<Cidr>::new();
        for range in candidates {
            if !ranges.iter().any(|other| other.covers(range) || range.covers(*other)) {
                ranges.push(range);
            }
        }
        let element = |range| Element { set: Set::PodCidrs, key: Key::Range(range), data: None };
        round_trip(Family::V4, ranges.into_iter().map(element).collect());
    }

    #[test]
    fn decoders_take_any_bytes(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        set in any::<prop::sample::Index>(),
        v6 in any::<bool>(),
    ) {
        let family = if v6 { Family::V6 } else { Family::V4 };
        let mut decoder = Decoder::new(family, all_sets()[set.index(all_sets().len())]);
        let _ = decoder.take(Attributes(&bytes));
        let _ = decoder.finish();
    }

    /// Random bytes rarely get past the first header, so the test damages a correct answer.
    #[test]
    fn decoders_take_damaged_answers(
        elements in prop::collection::vec(elements(Family::V6), 1..8),
        position in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut batch = Batch::new();
        push_elements(&mut batch, Family::V6, ElementOp::Add, &elements);
        let mut bytes = batch.as_bytes().to_vec();
        let position = position.index(bytes.len());
        bytes[position] = byte;
        for set in Set::all() {
            let mut decoder = Decoder::new(Family::V6, set);
            for message in Messages(&bytes) {
                let list = message.attributes().get(NFTA_SET_ELEM_LIST_ELEMENTS);
                let _ = list.map(|list| decoder.take(list.children()));
            }
            let _ = decoder.finish();
        }
    }
}

#[test]
fn the_ranges_of_everything_and_of_the_last_address() {
    for (family, ranges) in [
        (Family::V4, ["0.0.0.0/0", "255.255.255.255/32"]),
        (Family::V6, ["::/0", "ff00::/8"]),
    ] {
        for range in ranges {
            let range: Cidr = range.parse().unwrap();
            let span = Key::Span(range.first(), range.last());
            for (set, key, data) in [
                (Set::NodeportIps, Key::Range(range), None),
                (Set::Policy(PolicySet::Blocks), span, Some(Data::Number(7))),
                (
                    Set::Policy(PolicySet::TierBlocks),
                    span,
                    Some(Data::Number(7)),
                ),
            ] {
                round_trip(family, vec![Element { set, key, data }]);
            }
        }
    }
}

#[test]
fn padding_and_lengths_of_keys_are_checked() {
    use kplane_netlink::AttributeWriter;
    let decoded = |port: &[u8]| {
        let key = &[&[10, 0, 0, 1], port].concat();
        let mut list = Vec::new();
        AttributeWriter::new(&mut list).nest(1, |w| w.nest(1, |w| w.bytes(1, key)));
        let mut decoder = Decoder::new(Family::V4, Set::FirewallServices);
        decoder.take(Attributes(&list)).is_ok()
    };
    assert!(decoded(&[6, 0, 0, 0, 0, 80, 0, 0]));
    assert!(!decoded(&[6, 1, 0, 0, 0, 80, 0, 0]));
    assert!(!decoded(&[6, 0, 0, 0, 0, 80, 0, 1]));
    assert!(!decoded(&[7, 0, 0, 0, 0, 80, 0, 0]));
    assert!(!decoded(&[6, 0, 0, 0, 0, 80]));
    assert!(!decoded(&[6, 0, 0, 0, 0, 80, 0, 0, 0, 0, 0, 0]));
}
