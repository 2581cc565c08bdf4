//! Bytes as `ipvsadm` sends them, and answers of any shape.

use proptest::prelude::*;

use super::*;
use crate::Errno;

/// The bytes that an `ipvsadm` 1.31 sends behind the netlink header (shown by `strace` on Linux
/// 6.1).
const NEW_SERVICE: &str = "010100005400018006000100020000000600020006000000140003000a000001000000000000\
    000000000000060004000050000007000600727200000c00070000000000ffffffff080008000000000008000900ffffffff";
const SET_SERVICE: &str = "020100005400018006000100020000000600020006000000140003000a000001000000000000\
    0000000000000600040000500000070006006d6800000c00070011000000ffffffff080008002c01000008000900ffffffff";
const NEW_SERVICE_V6: &str = "0101000054000180060001000a000000060002001100000014000300fd00000000000000\
    0000000000000001060004000035000008000600776c63000c00070000000000ffffffff08000800000000000800090080000000";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn key(ip: &str, protocol: Protocol, port: u16) -> ServerKey {
    let ip = ip.parse().unwrap();
    ServerKey { ip, protocol, port }
}

fn mode(scheduler: &str, persistent_s: Option<u32>) -> ServerMode {
    let scheduler = IpvsScheduler::parse(scheduler).unwrap();
    ServerMode {
        scheduler,
        persistent_s,
    }
}

fn real(text: &str, port: u16) -> EndpointAddr {
    let ip = text.parse().unwrap();
    EndpointAddr { ip, port }
}

/// Returns the bytes of a command behind the netlink header.
fn sent(command: Command) -> String {
    hex(&command.request(40).as_bytes()[16..])
}

/// The attribute of a kind.
fn only(kind: u16, attributes: &[u8]) -> Option<String> {
    Attributes(attributes).get(kind).map(|a| hex(a.payload))
}

#[test]
fn virtual_servers_are_asked_for_as_ipvsadm_does() {
    let v4 = key("10.0.0.1", Protocol::Tcp, 80);
    assert_eq!(sent(Command::AddServer(v4, mode("rr", None))), NEW_SERVICE);
    let persistent = mode("mh", Some(300));
    assert_eq!(sent(Command::SetServer(v4, persistent)), SET_SERVICE);
    let v6 = key("fd00::1", Protocol::Udp, 53);
    let add = Command::AddServer(v6, mode("wlc", None));
    assert_eq!(sent(add), NEW_SERVICE_V6);
    // The request contains only the attributes that identify the server.
    let reported = &NEW_SERVICE[16..16 + 2 * 44];
    let expected = format!("0301000030000180{reported}");
    assert_eq!(sent(Command::DeleteServer(v4)), expected);
}

/// `ipvsadm` also sends attributes of tunnels, which kplane leaves out.
#[test]
fn real_servers_are_asked_for_as_ipvsadm_does() {
    const NEW_DEST: &str = "06000b0002000000140001000a010001000000000000000000000000060002001f900000\
        0800030000000000080004000100000008000500000000000800060000000000";
    let server = key("10.0.0.1", Protocol::Tcp, 80);
    let at = real("10.1.0.1", 8080);
    let add = Command::AddReal(server, at, 1).request(40);
    let body = &add.as_bytes()[16..];
    assert_eq!(body[..4], [5, 1, 0, 0]);
    let parts: Vec<_> = Attributes(&body[4..]).collect();
    assert_eq!((parts[0].kind, parts[1].kind), (ATTR_SERVICE, ATTR_DEST));
    let bytes = NEW_DEST.as_bytes().chunks(2);
    let byte = |two: &[u8]| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap();
    let expected: Vec<u8> = bytes.map(byte).collect();
    for kind in 1..=11 {
        assert_eq!(
            only(kind, parts[1].payload),
            only(kind, &expected),
            "attribute {kind}"
        );
    }
    let commands = [
        (Command::AddReal(server, at, 1), 5),
        (Command::SetReal(server, at, 0), 6),
        (Command::DeleteReal(server, at), 7),
    ];
    for (command, number) in commands {
        assert_eq!(command.request(40).as_bytes()[16], number);
    }
}

/// The kernel's list has a flag that the kernel sets itself, and otherwise the form of kplane's
/// requests.
#[test]
fn what_is_listed_is_read() {
    let listed = |command: Command, flags: u8| {
        let mut bytes = command.request(40).as_bytes().to_vec();
        let at = bytes.windows(4).position(|w| w == [12, 0, 7, 0]).unwrap();
        bytes[at + 4] |= flags;
        bytes[at + 8..at + 12].fill(0);
        Messages(&bytes).next().and_then(Server::parse)
    };
    for (server, mode) in [
        (key("10.0.0.1", Protocol::Tcp, 80), mode("rr", None)),
        (key("fd00::1", Protocol::Sctp, 9), mode("mh", Some(7))),
    ] {
        let add = Command::AddServer(server, mode);
        let (key, hashed) = (server, u8::try_from(FLAG_HASHED).unwrap());
        let expected = Server {
            key,
            mode: Some(mode),
        };
        assert_eq!(listed(add, hashed), Some(expected));
        // One-packet scheduling is a mode that kplane never requests.
        let other = Server { key, mode: None };
        assert_eq!(listed(add, hashed | 4), Some(other));
    }
}

#[test]
fn real_servers_are_read_from_the_kernels_list() {
    // The text is as Linux 6.1 prints it.
    let text = "IP Virtual Server version 1.2.1 (size=4096)\n\
        Prot LocalAddress:Port IpvsScheduler Flags\n  \
          -> RemoteAddress:Port Forward Weight ActiveConn InActConn\n\
        TCP  0A000001:0050 mh  persistent 75000 FFFFFFFF\n  \
          -> 0A010001:1F90      Masq    1      3          4         \n  \
          -> 0A010002:1F90      Route   0      0          0         \n\
        FWM  00000001 wlc \n  \
          -> 0A010003:0000      Masq    1      0          0         \n\
        UDP  [fd00:0000:0000:0000:0000:0000:0000:0001]:0035 wlc \n  \
          -> [fd01:0000:0000:0000:0000:0000:0000:0001]:14E9      Masq    1      0          0         \n";
    let tcp = Real {
        server: key("10.0.0.1", Protocol::Tcp, 80),
        at: real("10.1.0.1", 8080),
        translated: true,
        weight: 1,
        active: 3,
        inactive: 4,
    };
    let routed = Real {
        at: real("10.1.0.2", 8080),
        translated: false,
        weight: 0,
        active: 0,
        inactive: 0,
        ..tcp
    };
    let listing = Listing::parse(text, Family::V4);
    assert_eq!(listing.reals, [tcp, routed]);
    assert_eq!(listing.servers, [tcp.server].into());
    let udp = Real {
        server: key("fd00::1", Protocol::Udp, 53),
        at: real("fd01::1", 5353),
        translated: true,
        weight: 1,
        active: 0,
        inactive: 0,
    };
    assert_eq!(Listing::parse(text, Family::V6).reals, [udp]);
}

#[test]
fn real_servers_are_read_from_an_answer() {
    let (server, at) = (key("fd00::1", Protocol::Tcp, 80), real("fd01::1", 8080));
    let numbers = [
        (dest::FWD_METHOD, 0x100_u32),
        (dest::WEIGHT, 3),
        (dest::ACTIVE_CONNS, 5),
        (dest::INACT_CONNS, 6),
    ];
    let answer = Request::with_header("answer", 40, &genl_header(cmd::NEW_DEST), |w| {
        w.nest(ATTR_DEST, |w| {
            w.bytes(dest::ADDR, &address_union(at.ip));
            w.bytes(dest::PORT, &at.port.to_be_bytes());
            for (kind, number) in numbers {
                w.bytes(kind, &number.to_ne_bytes());
            }
        });
    });
    let bytes = answer.as_bytes();
    let message = Messages(bytes).next().unwrap();
    let expected = Real {
        server,
        at,
        translated: true,
        weight: 3,
        active: 5,
        inactive: 6,
    };
    assert_eq!(Real::parse(server, message), Some(expected));
}

proptest! {
    #[test]
    fn any_answer_is_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        for message in Messages(&bytes) {
            let _ = (Server::parse(message), Real::parse(key("10.0.0.1", Protocol::Tcp, 80), message));
        }
        let message = Message { kind: 40, flags: 0, sequence: 0, port: 0, body: &bytes };
        let _ = Server::parse(message);
    }

    #[test]
    fn damaged_answers_are_read(position in 20_usize..104, byte in any::<u8>(), cut in 0_usize..90) {
        let server = key("10.0.0.1", Protocol::Tcp, 80);
        let add = Command::AddServer(server, mode("rr", Some(5)));
        let mut bytes = add.request(40).as_bytes().to_vec();
        let position = position % bytes.len();
        bytes[position] = byte;
        bytes.truncate(bytes.len() - cut % bytes.len());
        for message in Messages(&bytes) {
            let _ = Server::parse(message);
        }
    }

    #[test]
    fn any_list_is_read(text in "((TCP|UDP|FWM|  ->)  ?[0-9A-F\\[\\]:]{0,20} ?(Masq|rr)? [0-9]{0,22} ?[0-9]* [0-9]*\n)*") {
        let _ = Family::ALL.map(|family| Listing::parse(&text, family));
    }
}

/// Needs no privilege and changes nothing.
#[test]
fn families_are_found_by_name() {
    let mut socket = NfSocket::open_for(NETLINK_GENERIC).unwrap();
    assert_eq!(family_id(&mut socket, "nlctrl").unwrap(), GENL_ID_CTRL);
    let error = family_id(&mut socket, "no-such").unwrap_err();
    assert_eq!(error.errno(), Some(Errno::ENOENT));
}
