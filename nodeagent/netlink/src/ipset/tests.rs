//! Bytes as `ipset` sends them, and answers of any shape.

use proptest::prelude::*;

use super::*;

/// The attribute at the end of each entry that `ipset` 7.17 sends: `IPSET_ATTR_LINENO` of a file,
/// for its messages.
const LINE_NUMBER: &str = "0800094000000000";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn entries() -> [(SetType, Entry, &'static str); 5] {
    [
        (
            SetType::Ip,
            Entry::Ip(ip("10.0.0.1")),
            "0c000180080001400a000001",
        ),
        (
            SetType::IpPort,
            Entry::IpPort(ip("10.0.0.1"), Protocol::Tcp, 80),
            "0c000180080001400a0000010600044000500000050007000600000008000940000000 00",
        ),
        (
            SetType::IpPortIp,
            Entry::IpPortIp(ip("10.0.0.1"), Protocol::Sctp, 80, ip("10.0.0.2")),
            "0c000180080001400a000001060004400050000005000700840000000c001480080001400a000002",
        ),
        (
            SetType::IpPortNet,
            Entry::IpPortNet(
                ip("fd00::1"),
                Protocol::Udp,
                53,
                "fd01::/64".parse().unwrap(),
            ),
            "1800018014000240fd000000000000000000000000000001060004400035000005000700110000001800148014\
             000240fd0100000000000000000000000000000500150040000000",
        ),
        (SetType::Port, Entry::Port(30_000), "0600044075300000"),
    ]
}

/// The set's name and the rest of a request, behind the headers and the version.
fn body(request: &Request) -> Vec<u8> {
    let bytes = request.as_bytes();
    assert_eq!(bytes[16..20], [2, 0, 0, 0], "nfgenmsg");
    assert_eq!(bytes[20..28], [5, 0, 1, 0, 6, 0, 0, 0], "version");
    bytes[28..].to_vec()
}

#[test]
fn d3_entries_are_sent_as_ipset_does() {
    for (_, entry, expected) in entries() {
        let expected = expected.replace(' ', "").replace(LINE_NUMBER, "");
        let add = request(SetCommand::Add("A", entry), 0);
        assert_eq!(add.as_bytes()[4..6], [9, 6]);
        let body = body(&add);
        let attributes: Vec<_> = Attributes(&body).collect();
        assert_eq!(attributes[0].as_str(), Some("A"));
        assert!(attributes[1].kind == attr::DATA && attributes[1].nested);
        assert_eq!(hex(attributes[1].payload), expected, "{entry}");
        let delete = request(SetCommand::Delete("A", entry), 0);
        assert_eq!(delete.as_bytes()[4..6], [10, 6]);
        assert_eq!(self::body(&delete), body);
    }
}

#[test]
fn d3_sets_are_made_as_ipset_does() {
    let create = |name, kind, family, revision| {
        let capacity = 65_536;
        let command = SetCommand::Create {
            name,
            kind,
            family,
            capacity,
        };
        let request = request(command, revision);
        // NLM_F_REQUEST | NLM_F_CREATE | NLM_F_EXCL
        assert_eq!(request.as_bytes()[4..8], [2, 6, 0x01, 0x06]);
        hex(&body(&request))
    };
    let hash = "060002004100000011000300686173683a69702c706f7274000000000500040007000000050005000200\
        00001400078008001240000004000800134000010000";
    assert_eq!(create("A", SetType::IpPort, Family::V4, 7), hash);
    let bitmap = "0600020043000000100003006269746d61703a706f72740005000400030000000500050000000000\
        14000780060004400000000006000540ffff0000";
    assert_eq!(create("C", SetType::Port, Family::V6, 3), bitmap);
}

#[test]
fn d3_sets_are_exchanged_and_removed_as_ipset_does() {
    let swap = request(SetCommand::Swap("A", "A2"), 0);
    assert_eq!(swap.as_bytes()[4..6], [6, 6]);
    assert_eq!(
        hex(&body(&swap)),
        "0600020041000000070003004132 0000".replace(' ', "")
    );
    let destroy = request(SetCommand::Destroy("C"), 0);
    assert_eq!(destroy.as_bytes()[4..6], [3, 6]);
    assert_eq!(hex(&body(&destroy)), "0600020043000000");
}

/// A message of a list, with entries as they are sent.
fn listed(kind: SetType, family: u8, entries: &[Entry]) -> Vec<u8> {
    let request = message("list", cmd::LIST, |w| {
        w.str(attr::SETNAME, "A");
        w.str(attr::TYPENAME, kind.as_str());
        w.u8(attr::FAMILY, family);
        w.nest(attr::DATA, |w| w.u32(data::MAXELEM | NETWORK_ORDER, 9));
        w.nest(attr::ADT, |w| {
            for entry in entries {
                w.nest(attr::DATA, |w| entry.write(w));
            }
        });
    });
    request.as_bytes().to_vec()
}

fn read(bytes: &[u8]) -> Option<Found> {
    Found::parse(Messages(bytes))
}

/// Only the kernel's first message describes the set.
#[test]
fn d3_a_long_list_is_read_whole() {
    let [(kind, entry, _), ..] = entries();
    let mut bytes = listed(kind, 2, &[entry]);
    let rest = message("list", cmd::LIST, |w| {
        w.str(attr::SETNAME, "A");
        w.nest(attr::ADT, |w| {
            w.nest(attr::DATA, |w| Entry::Ip(ip("10.0.0.2")).write(w));
        });
    });
    bytes.extend_from_slice(rest.as_bytes());
    let found = read(&bytes).unwrap();
    assert_eq!(found.entries, [entry, Entry::Ip(ip("10.0.0.2"))]);
}

#[test]
fn d3_what_is_listed_is_read() {
    for (kind, entry, _) in entries() {
        let bytes = listed(kind, 2, &[entry, entry]);
        let found = read(&bytes).unwrap();
        assert!(found.is(kind, Family::V4), "{found:?}");
        assert_eq!(found.entries, [entry, entry]);
        assert_eq!((found.capacity, found.strange), (9, 0));
        let [other, ..] = entries().map(|(_, entry, _)| entry);
        if other != entry && kind != SetType::Ip {
            let bytes = listed(kind, 10, &[other]);
            let found = read(&bytes).unwrap();
            assert_eq!((found.entries.len(), found.strange), (0, 1), "{kind:?}");
            assert_eq!(found.is(kind, Family::V4), kind == SetType::Port);
        }
    }
}

proptest! {
    #[test]
    fn any_answer_is_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let message = Message { kind: IPSET | cmd::LIST, flags: 0, sequence: 0, port: 0, body: &bytes };
        collect(message, &mut None);
        let header = Found { kind: "hash:ip".to_owned(), family: None, capacity: 0, entries: Vec::new(), strange: 0 };
        collect(message, &mut Some(header));
    }

    #[test]
    fn damaged_answers_are_read(which in 0_usize..5, position in 0_usize..200, byte in any::<u8>(), cut in 0_usize..200) {
        let (kind, entry, _) = entries()[which];
        let mut bytes = listed(kind, 2, &[entry, entry]);
        let position = position % bytes.len();
        bytes[position] = byte;
        bytes.truncate(bytes.len() - cut % bytes.len());
        let _ = read(&bytes);
    }
}
