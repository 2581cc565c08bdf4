//! Bytes as `ip` sends them, and answers of any shape.

use proptest::prelude::*;

use super::*;

const DELIVERY: Delivery = Delivery {
    table: 27_504,
    priority: 100,
};

fn message(kind: u16, body: &[u8]) -> Message<'_> {
    Message {
        kind,
        flags: 0,
        sequence: 0,
        port: 0,
        body,
    }
}

#[test]
fn a_route_is_looked_up_and_read() {
    let request = route_to("fd00::1".parse().unwrap());
    let bytes = request.as_bytes();
    assert_eq!(bytes[4..8], [26, 0, 0x01, 0]);
    assert_eq!(bytes[16..28], [10, 128, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[28..32], [20, 0, 1, 0]);
    let answer = |kind, body| parse_exit(message(kind, body));
    let local = [10, 128, 0, 0, 255, 2, 0, 2, 0, 0, 0, 0];
    let unicast = [
        10, 128, 0, 0, 254, 2, 0, 1, 0, 0, 0, 0, 8, 0, 4, 0, 7, 0, 0, 0,
    ];
    assert_eq!(answer(RTM_NEWROUTE, &local), Some(Exit::Here));
    assert_eq!(answer(RTM_NEWROUTE, &unicast), Some(Exit::Link(7)));
    assert_eq!(answer(RTM_NEWRULE, &local), None);
    assert_eq!(answer(RTM_NEWROUTE, &local[..7]), None);
}

#[test]
fn u51_marked_packets_are_delivered_as_ip_says() {
    // `ip rule add fwmark 0x51 lookup 27504 priority 100` of iproute2 6.1, with the mask that ip leaves out.
    let add = rule(Family::V4, DELIVERY, 0x51);
    let bytes = add.as_bytes();
    assert_eq!(bytes[4..8], [32, 0, 0x01, 0x06]);
    assert_eq!(bytes[16..28], [2, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]);
    assert_eq!(bytes[28..36], [8, 0, 6, 0, 100, 0, 0, 0]);
    assert_eq!(bytes[36..44], [8, 0, 15, 0, 0x70, 0x6b, 0, 0]);
    assert_eq!(bytes[44..52], [8, 0, 10, 0, 0x51, 0, 0, 0]);
    let read = parse_table(message(RTM_NEWRULE, &bytes[16..]));
    assert_eq!(read, Some(27_504));
    // `ip route add local default dev lo table 27504`.
    let add = route(Family::V4, DELIVERY);
    assert_eq!(
        add.as_bytes()[16..28],
        [2, 0, 0, 0, 0, 4, 254, 2, 0, 0, 0, 0]
    );
}

proptest! {
    #[test]
    fn any_answer_is_read(kind in 20u16..40, bytes in prop::collection::vec(any::<u8>(), 0..60)) {
        let _ = parse_exit(message(kind, &bytes));
        let _ = parse_table(message(kind, &bytes));
    }
}
