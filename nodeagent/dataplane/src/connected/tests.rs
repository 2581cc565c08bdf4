//! Entries of tables, put into groups.

use kplane_model::ServiceKey;

use super::*;

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn port(address: &str, node_port: Option<u16>) -> AffinityPort {
    let place = at(address);
    AffinityPort {
        key: ServiceKey::sample("shop", "web"),
        addresses: vec![place.ip()],
        port: place.port(),
        node_port,
        endpoints: Vec::new(),
    }
}

fn question(ports: &[AffinityPort]) -> ConnectedQuestion {
    ConnectedQuestion {
        ports: ports.to_vec(),
        most: 10,
        ..ConnectedQuestion::default()
    }
}

fn flow(client: &str, to: &str, endpoint: &str) -> Tracked {
    Tracked {
        protocol: Protocol::Tcp,
        client: at(client),
        to: at(to),
        endpoint: at(endpoint),
        stage: Stage::Established,
        traffic: None,
        began_ns: Some(1_000_000_000),
    }
}

fn groups(reader: ConnectionReader<'_>) -> Vec<(String, String, u64)> {
    let (groups, _) = reader.groups.largest(10);
    groups
        .iter()
        .map(|(key, sums)| {
            let (client, endpoint) = (key.client.to_string(), key.endpoint.to_string());
            (client, endpoint, sums.connections())
        })
        .collect()
}

#[test]
fn connections_through_the_service_are_grouped_and_others_are_not() {
    let question = question(&[port("10.96.0.1:80", Some(30_080))]);
    let mut reader = ConnectionReader::new(&question, ConnectionGroups::default());
    reader.own = [at("172.18.0.2:0").ip()].into();
    reader.now_ns = 3_000_000_000;
    let closed = Tracked {
        stage: Stage::Closed,
        ..flow("10.0.0.9:1", "10.96.0.1:80", "10.0.0.5:80")
    };
    let udp = Tracked {
        protocol: Protocol::Udp,
        ..closed
    };
    for flow in [
        flow("10.0.0.9:1", "10.96.0.1:80", "10.0.0.5:80"),
        flow("10.0.0.9:2", "10.96.0.1:80", "10.0.0.5:80"),
        flow("10.0.0.9:3", "172.18.0.2:30080", "10.0.0.6:80"),
        // Another node's port, another port, no Service, and the proxy.
        flow("10.0.0.9:4", "172.18.0.3:30080", "10.0.0.6:80"),
        flow("10.0.0.9:5", "10.96.0.1:81", "10.0.0.5:80"),
        flow("10.0.0.9:6", "10.96.0.1:80", "10.96.0.1:80"),
        flow("10.0.0.9:7", "10.96.0.1:80", "169.254.107.112:4000"),
        closed,
        udp,
    ] {
        reader.tracked(&flow);
    }
    let expected = [
        ("10.0.0.9".to_owned(), "10.0.0.5:80".to_owned(), 2),
        ("10.0.0.9".to_owned(), "10.0.0.6:80".to_owned(), 1),
    ];
    assert_eq!(groups(reader), expected);
}

#[test]
fn a_question_may_name_clients_and_endpoints() {
    let ports = [port("10.96.0.1:80", None)];
    let entries = [
        flow("10.0.0.8:1", "10.96.0.1:80", "10.0.0.5:80"),
        flow("10.0.0.9:1", "10.96.0.1:80", "10.0.0.6:80"),
    ];
    let asked = |clients: &[&str], endpoints: &[&str]| {
        let set = |all: &[&str]| all.iter().map(|ip| ip.parse().unwrap()).collect();
        let question = ConnectedQuestion {
            clients: set(clients),
            endpoints: set(endpoints),
            ..question(&ports)
        };
        let mut reader = ConnectionReader::new(&question, ConnectionGroups::default());
        entries.iter().for_each(|flow| reader.tracked(flow));
        groups(reader).len()
    };
    assert_eq!(asked(&[], &[]), 2);
    assert_eq!(asked(&["10.0.0.8"], &[]), 1);
    assert_eq!(asked(&[], &["10.0.0.6"]), 1);
    assert_eq!(asked(&["10.0.0.8"], &["10.0.0.6"]), 0);
}

#[test]
fn connections_of_ipvs_are_grouped_and_templates_are_not() {
    let question = question(&[port("10.96.0.1:80", None)]);
    let mut reader = ConnectionReader::new(&question, ConnectionGroups::default());
    let connection = Connection {
        protocol: Some(Protocol::Tcp),
        client: at("10.0.0.9:1"),
        server: at("10.96.0.1:80"),
        endpoint: at("10.0.0.5:80"),
        stage: Stage::Handshake,
        expires_s: 60,
    };
    let template = Connection {
        client: at("10.0.0.9:0"),
        ..connection
    };
    let other = Connection {
        server: at("10.96.0.2:80"),
        ..connection
    };
    for connection in [connection, template, other] {
        reader.connection(&connection);
    }
    let (groups, _) = reader.groups.largest(10);
    let [(key, sums)] = groups.as_slice() else {
        panic!("{groups:?}");
    };
    assert_eq!(key.table, ConnectionTable::Ipvs);
    assert_eq!((sums.handshake, sums.bytes), (1, None));
}

#[test]
fn the_time_of_the_proxy_counts() {
    let slow = || {
        std::thread::sleep(Duration::from_millis(2));
        Ok(ConnectionGroups::default())
    };
    // Without ServicePorts there is nothing to read.
    let of_proxy = |within| list(Kind::Userspace.describe(), slow, &question(&[]), within);
    let late = of_proxy(Duration::from_millis(1));
    assert!(matches!(late, Err(ListError::Late(_))), "{late:?}");
    assert_eq!(
        of_proxy(Duration::from_secs(60)).unwrap(),
        Connected::default()
    );
}

#[test]
fn the_kernel_selects_where_it_can() {
    let to = |ip: &str, port| Selection::To(Some(ip.parse().unwrap()), port);
    let selected = |question: &ConnectedQuestion, family, filter| {
        ConnectionReader::new(question, ConnectionGroups::default()).selection(family, filter)
    };
    let one = question(&[port("10.96.0.1:80", None)]);
    let tcp = Some((Protocol::Tcp, Some(80)));
    let found = selected(&one, Family::V4, Filter::Destinations);
    assert_eq!(found, to("10.96.0.1", tcp));
    assert_eq!(selected(&one, Family::V4, Filter::Nothing), Selection::Any);
    let two = question(&[port("10.96.0.1:80", None), port("10.96.0.1:443", None)]);
    let found = selected(&two, Family::V4, Filter::Both);
    assert_eq!(found, to("10.96.0.1", None));
    let node_port = question(&[port("10.96.0.1:80", Some(30_080))]);
    assert_eq!(
        selected(&node_port, Family::V4, Filter::Both),
        Selection::Any
    );
    let endpoint = ConnectedQuestion {
        endpoints: ["10.0.0.5".parse().unwrap()].into(),
        ..node_port
    };
    let found = selected(&endpoint, Family::V4, Filter::Both);
    assert!(matches!(found, Selection::RepliesFrom(..)), "{found:?}");
}
