//! Messages survive the way there and back, and nothing else is a message.

use proptest::prelude::*;

use super::*;

fn text() -> impl Strategy<Value = String> {
    "[a-z0-9.-]{0,253}"
}

fn protocol() -> impl Strategy<Value = Protocol> {
    prop::sample::select(vec![Protocol::Tcp, Protocol::Udp, Protocol::Sctp])
}

fn endpoint() -> impl Strategy<Value = EndpointAddr> {
    (any::<IpAddr>(), any::<u16>()).prop_map(|(ip, port)| EndpointAddr { ip, port })
}

fn socket() -> impl Strategy<Value = SocketAddr> {
    (any::<IpAddr>(), any::<u16>(), any::<u32>()).prop_map(|(ip, port, scope)| {
        let mut at = SocketAddr::new(ip, port);
        if let SocketAddr::V6(at) = &mut at {
            at.set_scope_id(scope);
        }
        at
    })
}

fn key() -> impl Strategy<Value = ServiceKey> {
    let family = prop::sample::select(Family::ALL.to_vec());
    (text(), text(), text(), protocol(), family).prop_map(
        |(namespace, name, port_name, protocol, family)| {
            ServiceKey::from(KeyParts {
                service: ServiceName::new(&namespace, &name),
                port_name: port_name.into(),
                protocol,
                family,
            })
        },
    )
}

fn role() -> impl Strategy<Value = Role> {
    let address = (any::<IpAddr>(), protocol(), any::<u16>())
        .prop_map(|(ip, protocol, port)| Role::Place(FrontendAddr::Address { ip, protocol, port }));
    let node_port = (protocol(), any::<u16>())
        .prop_map(|(protocol, port)| Role::Place(FrontendAddr::NodePort { protocol, port }));
    prop_oneof![Just(Role::Captured), address, node_port]
}

fn way() -> impl Strategy<Value = EncodedWay> {
    let bytes = prop::collection::vec(any::<u8>(), 1..3000);
    let unsent = prop_oneof![
        Just(EncodedUnsent::None),
        bytes.prop_map(EncodedUnsent::Bytes),
        (1..u64::MAX).prop_map(EncodedUnsent::Pipe)
    ];
    (any::<bool>(), any::<bool>(), unsent).prop_map(|(has_ended, is_plain, unsent)| EncodedWay {
        has_ended,
        is_plain,
        unsent,
    })
}

fn message() -> impl Strategy<Value = Message> {
    let id = || any::<u64>().prop_map(ListenerId);
    prop_oneof![
        any::<(u16, u64)>().prop_map(|(version, namespace)| Message::Hello { version, namespace }),
        text().prop_map(Message::Refused),
        (id(), role(), socket(), protocol()).prop_map(|(id, role, at, protocol)| {
            Message::Listener {
                id,
                role,
                at,
                protocol,
            }
        }),
        (key(), endpoint(), [way(), way()]).prop_map(|(key, endpoint, ways)| {
            Message::Connection {
                key,
                endpoint,
                ways,
            }
        }),
        (id(), socket()).prop_map(|(listener, address)| Message::Client { listener, address }),
        (
            id(),
            any::<u32>(),
            key(),
            endpoint(),
            (socket(), any::<Option<IpAddr>>())
        )
            .prop_map(|(listener, number, key, endpoint, client)| Message::Flow {
                listener,
                number,
                key,
                endpoint,
                client
            }),
        any::<u64>().prop_map(Message::End),
        any::<u64>().prop_map(Message::Taken),
    ]
}

proptest! {
    #[test]
    fn a_message_arrives_as_it_was_sent(message in message()) {
        let bytes = encode(&message);
        prop_assert!(bytes.len() <= LARGEST);
        prop_assert_eq!(decode(&bytes), Some(message));
    }

    #[test]
    fn what_is_decoded_is_what_would_be_sent(
        message in message(),
        cut in any::<prop::sample::Index>(),
        changed in any::<u8>(),
        added in prop::collection::vec(any::<u8>(), 0..3),
    ) {
        let mut bytes = encode(&message);
        let place = cut.index(bytes.len());
        prop_assert_eq!(decode(&bytes[..place]), None);
        bytes[place] = changed;
        bytes.extend(added);
        if let Some(other) = decode(&bytes) {
            prop_assert_eq!(encode(&other), bytes);
        }
    }
}

#[test]
fn the_longest_message_has_room() {
    let way = || EncodedWay {
        has_ended: true,
        is_plain: true,
        unsent: EncodedUnsent::Bytes(vec![7; MOST_UNSENT]),
    };
    let name = "x".repeat(MOST_NAME);
    let message = Message::Connection {
        key: ServiceKey::from(KeyParts {
            service: ServiceName::new(&name, &name),
            port_name: name.as_str().into(),
            protocol: Protocol::Tcp,
            family: Family::V6,
        }),
        endpoint: EndpointAddr::new([0; 16], 1),
        ways: [way(), way()],
    };
    let bytes = encode(&message);
    assert!(bytes.len() <= LARGEST, "{}", bytes.len());
    assert_eq!(decode(&bytes), Some(message));
}
