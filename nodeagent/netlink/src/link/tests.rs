//! Bytes as `ip` sends them, and answers of any shape.

use proptest::prelude::*;

use super::*;
use crate::Messages;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn d2_a_dummy_device_is_made_as_ip_does() {
    // `ip link add d0 type dummy` of iproute2 6.1.
    let request = add_dummy("d0");
    let bytes = request.as_bytes();
    assert_eq!(bytes[4..8], [16, 0, 0x01, 0x06]);
    assert_eq!(bytes[16..32], [0; 16]);
    let name = [7, 0, 3, 0, b'd', b'0', 0, 0];
    assert_eq!(bytes[32..40], name);
    // iproute2 leaves out the zero at the end of the kind, which the kernel takes either way.
    assert_eq!(bytes[40..44], [16, 0, 18, 0x80]);
    assert_eq!(bytes[44..53], *b"\x0a\0\x01\0dummy");
}

#[test]
fn d2_addresses_are_sent_and_read() {
    for (text, prefix, family) in [("10.96.0.1", 32, 2), ("fd00::1", 128, 10)] {
        let add = address(7, ip(text), RT_SCOPE_UNIVERSE, true);
        let bytes = add.as_bytes();
        assert_eq!(bytes[4..8], [20, 0, 0x01, 0x06]);
        let nodad = if family == 10 { 2 } else { 0 };
        assert_eq!(bytes[16..24], [family, prefix, nodad, 0, 7, 0, 0, 0]);
        let expected = LinkAddress {
            link: 7,
            ip: ip(text),
            is_of_host: false,
        };
        let read = Messages(bytes).next().and_then(parse_address);
        assert_eq!(read, Some(expected));
        let delete = address(7, ip(text), RT_SCOPE_UNIVERSE, false);
        assert_eq!(delete.as_bytes()[4..8], [21, 0, 0x01, 0x00]);
    }
}

proptest! {
    #[test]
    fn any_answer_is_read(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
        let message = Message { kind: RTM_NEWADDR, flags: 0, sequence: 0, port: 0, body: &bytes };
        let _ = parse_address(message);
    }
}
