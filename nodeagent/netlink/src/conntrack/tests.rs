//! Bytes as the kernel and `conntrack` write them, round trips, and hostile bytes.

use proptest::prelude::*;

use super::super::message::{self, HEADER_BYTES, Messages};
use super::*;

/// An entry as `strace conntrack -L` shows it: 10.0.0.1:40000 to 10.96.0.10:53, translated to
/// 10.244.1.5:5353.
fn listed(extra: impl FnOnce(&mut AttributeWriter<'_>)) -> Vec<u8> {
    let flow = flow("10.0.0.1:40000", "10.96.0.10:53", "10.244.1.5:5353");
    entry(flow, extra)
}

fn entry(flow: Flow, extra: impl FnOnce(&mut AttributeWriter<'_>)) -> Vec<u8> {
    let mut bytes = Vec::new();
    let family = nfproto(Family::of(flow.original.source.ip()));
    message::append(&mut bytes, ENTRY, 0, (family, 0), |w| {
        w.nest(CTA_TUPLE_ORIG, |w| {
            write_tuple(w, flow.original, flow.protocol);
            if let Some(zone) = flow.original_zone {
                w.bytes(CTA_TUPLE_ZONE, &zone.to_be_bytes());
            }
        });
        w.nest(CTA_TUPLE_REPLY, |w| {
            write_tuple(w, flow.reply, flow.protocol);
        });
        w.u32(CTA_STATUS, flow.status);
        if let Some(zone) = flow.zone {
            w.bytes(CTA_ZONE, &zone.to_be_bytes());
        }
        if let Some(id) = flow.id {
            w.u32(CTA_ID, id);
        }
        extra(w);
    });
    bytes
}

/// A flow in the default zone, translated if the server is not where it was sent to.
fn flow(client: &str, to: &str, server: &str) -> Flow {
    let at = |text: &str| text.parse::<SocketAddr>().unwrap();
    Flow {
        protocol: Protocol::Udp,
        original: Tuple {
            source: at(client),
            destination: at(to),
        },
        reply: Tuple {
            source: at(server),
            destination: at(client),
        },
        status: if to == server { 0 } else { IPS_DST_NAT },
        id: Some(0x0102_0304),
        zone: None,
        original_zone: None,
    }
}

fn parse(bytes: &[u8]) -> Option<Flow> {
    Messages(bytes).next().and_then(Flow::parse)
}

#[test]
fn an_entry_is_deleted_by_its_original_tuple_and_id() {
    let flow = flow("10.0.0.1:40000", "10.96.0.10:53", "10.244.1.5:5353");
    let request = flow.delete();
    assert_eq!(
        request.bytes[HEADER_BYTES..],
        [
            2, 0, 0, 0, // IPv4, version 0
            52, 0, 1, 0x80, // CTA_TUPLE_ORIG
            20, 0, 1, 0x80, 8, 0, 1, 0, 10, 0, 0, 1, 8, 0, 2, 0, 10, 96, 0, 10, // addresses
            28, 0, 2, 0x80, 5, 0, 1, 0, 17, 0, 0, 0, // UDP
            6, 0, 2, 0, 0x9c, 0x40, 0, 0, 6, 0, 3, 0, 0, 53, 0, 0, // ports
            8, 0, 12, 0, 1, 2, 3, 4, // CTA_ID
        ]
    );
    let kind = u16::from_ne_bytes([request.bytes[4], request.bytes[5]]);
    assert_eq!(kind, 0x0102);
}

#[test]
fn counters_and_stages_of_entries_are_read() {
    let tracked = |bytes: &[u8]| Messages(bytes).next().and_then(Tracked::parse);
    let counter = |w: &mut AttributeWriter<'_>, kind, packets: u64, bytes: u64| {
        w.nest(kind, |w| {
            w.bytes(1, &packets.to_be_bytes());
            w.bytes(2, &bytes.to_be_bytes());
        });
    };
    let plain = tracked(&listed(|_| {})).unwrap();
    assert_eq!((plain.stage, plain.traffic), (Stage::Unreplied, None));
    assert_eq!(plain.client, "10.0.0.1:40000".parse().unwrap());
    let replied = Flow {
        status: IPS_DST_NAT | 1 << 1,
        ..flow("10.0.0.1:40000", "10.96.0.10:53", "10.244.1.5:5353")
    };
    let counted = entry(replied, |w| {
        counter(w, 9, 3, 180);
        counter(w, 10, 2, 400);
    });
    let counted = tracked(&counted).unwrap();
    let traffic = |packets, bytes| Traffic { packets, bytes };
    assert_eq!(counted.stage, Stage::Established);
    assert_eq!(counted.traffic, Some([traffic(3, 180), traffic(2, 400)]));
    // One direction alone, and a counter that is too short.
    let half = entry(replied, |w| counter(w, 9, 3, 180));
    assert_eq!(tracked(&half).unwrap().traffic, None);
    let short = entry(replied, |w| {
        counter(w, 9, 3, 180);
        w.nest(10, |w| w.bytes(1, &[0; 4]));
    });
    assert_eq!(tracked(&short).unwrap().traffic, None);
}

/// A deletion must name a tuple, or the kernel would delete everything.
#[test]
fn a_deletion_always_names_a_tuple() {
    for zone in [None, Some(7)] {
        let flow = Flow {
            zone,
            original_zone: zone,
            ..flow("[fd00::1]:1", "[fd96::1]:53", "[fd44::1]:53")
        };
        let request = flow.delete();
        let message = Messages(&request.bytes).next().unwrap();
        let tuple = message.attributes().get(CTA_TUPLE_ORIG).unwrap();
        let tuple = parse_tuple(tuple).unwrap();
        assert_eq!(tuple, (Protocol::Udp, flow.original, zone));
        let found = message.attributes().get(CTA_ZONE).and_then(as_u16);
        assert_eq!(found, zone);
    }
}

#[test]
fn a_filter_names_the_parts_that_count() {
    let to = Selection::To(
        Some([10, 96, 0, 10].into()),
        Some((Protocol::Udp, Some(53))),
    );
    let request = to.request(Family::V4);
    assert_eq!(
        request.bytes[HEADER_BYTES..],
        [
            2, 0, 0, 0, // IPv4
            36, 0, 1, 0x80, // CTA_TUPLE_ORIG
            12, 0, 1, 0x80, 8, 0, 2, 0, 10, 96, 0, 10, // to
            20, 0, 2, 0x80, 5, 0, 1, 0, 17, 0, 0, 0, 6, 0, 3, 0, 0, 53, 0, 0, // UDP, port
            12, 0, 25, 0x80, 8, 0, 1, 0, 0b10_1010, 0, 0, 0, // CTA_FILTER, little endian here
        ]
    );
}

/// Kernels compare IPv6 addresses the wrong way round, so requests name only ports.
#[test]
fn ipv6_filters_leave_addresses_out() {
    let (ip, udp) = ("fd96::a".parse().unwrap(), Some((Protocol::Udp, Some(53))));
    for (selection, flags) in [
        (
            Selection::To(Some(ip), udp),
            FILTER_PROTO_NUM | FILTER_DST_PORT,
        ),
        (
            Selection::RepliesFrom(ip, udp),
            FILTER_PROTO_NUM | FILTER_SRC_PORT,
        ),
    ] {
        let request = selection.request(Family::V6);
        let message = Messages(&request.bytes).next().unwrap();
        let filter = message.attributes().get(CTA_FILTER).unwrap();
        let found = filter.children().next().unwrap().payload;
        assert_eq!(found, flags.to_ne_bytes());
        let tuple = message.attributes().next().unwrap();
        assert!(tuple.children().get(CTA_TUPLE_IP).is_none());
    }
    let alone = Selection::From(ip).request(Family::V6);
    let message = Messages(&alone.bytes).next().unwrap();
    assert_eq!(message.attributes().count(), 0);
}

#[test]
fn entries_of_other_protocols_and_halves_of_entries_are_none_of_ours() {
    let whole = listed(|_| {});
    assert!(parse(&whole).is_some());
    let mut tcp = whole.clone();
    let number = tcp.windows(5).position(|w| w == [5, 0, 1, 0, 17]).unwrap();
    tcp[number + 4] = 6;
    assert_eq!(parse(&tcp), None);
    let mut other = whole.clone();
    other[4] = 2;
    assert_eq!(parse(&other), None, "a message of another kind");
    for missing in [CTA_TUPLE_ORIG, CTA_TUPLE_REPLY] {
        let mut bytes = whole.clone();
        let header = [(missing | 0x8000).to_ne_bytes()[0], 0x80];
        let at = bytes.windows(2).position(|w| w == header).unwrap();
        bytes[at] = 77;
        assert_eq!(parse(&bytes), None, "without tuple {missing}");
    }
}

fn any_flow() -> impl Strategy<Value = Flow> {
    let v4 = any::<u32>().prop_map(|bits| IpAddr::V4(bits.into()));
    let v6 = any::<u128>().prop_map(|bits| IpAddr::V6(bits.into()));
    let four = |ip: BoxedStrategy<IpAddr>| prop::collection::vec((ip, any::<u16>()), 4);
    let ends = prop_oneof![four(v4.boxed()), four(v6.boxed())];
    let zone = || prop::option::of(any::<u16>());
    let rest = (any::<u32>(), prop::option::of(any::<u32>()), zone(), zone());
    let protocol = prop::sample::select(vec![Protocol::Tcp, Protocol::Udp, Protocol::Sctp]);
    (protocol, ends, rest).prop_map(|(protocol, ends, (status, id, zone, original_zone))| {
        let at = |n: usize| SocketAddr::new(ends[n].0, ends[n].1);
        Flow {
            protocol,
            original: Tuple {
                source: at(0),
                destination: at(1),
            },
            reply: Tuple {
                source: at(2),
                destination: at(3),
            },
            status,
            id,
            zone,
            original_zone,
        }
    })
}

proptest! {
    #[test]
    fn entries_are_read_as_written(flow in any_flow()) {
        let bytes = entry(flow, |w| w.str(30, "something new"));
        prop_assert_eq!(parse(&bytes), Some(flow));
    }

    #[test]
    fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        for message in Messages(&bytes) {
            let _ = (Flow::parse(message), Tracked::parse(message), Reported::parse(message));
        }
        let mut framed = Vec::new();
        message::append(&mut framed, ENTRY, 0, (2, 0), |w| w.with(CTA_TUPLE_ORIG, |b| b.extend(&bytes)));
        prop_assert_eq!(parse(&framed), None);
    }

    #[test]
    fn damaged_entries_are_read(at in any::<prop::sample::Index>(), byte: u8, cut in any::<prop::sample::Index>()) {
        let mut bytes = listed(|_| {});
        let position = at.index(bytes.len());
        bytes[position] = byte;
        bytes.truncate(cut.index(bytes.len() + 1));
        for message in Messages(&bytes) {
            let _ = Flow::parse(message);
        }
    }
}
