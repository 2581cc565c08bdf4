//! Places, and senders of whom little is known. All else is compared with a model by the packet tests.

use super::*;
use crate::key::ServiceKey;

const SETUP: Setup = Setup {
    masquerade: Masquerade {
        pods_known: true,
        all: false,
    },
    local: LocalRule::BySender,
};

fn port() -> ServicePort {
    ServicePort {
        node_port: Some(30080),
        load_balancer_ips: vec![IpAddr::from([203, 0, 113, 1])],
        external_ips: vec![IpAddr::from([203, 0, 113, 2])],
        source_ranges: vec!["192.0.2.0/24".parse().unwrap()],
        ..ServicePort::sample(ServiceKey::sample("shop", "web"))
    }
}

#[test]
fn a_place_is_an_address_and_a_port() {
    let port = port();
    let find = |ip: [u8; 4], number, own| Place::find(&port, IpAddr::from(ip), number, own);
    let balancer = Place::LoadBalancer(IpAddr::from([203, 0, 113, 1]));
    assert_eq!(find([10, 96, 0, 1], 80, false), Some(Place::ClusterIp));
    assert_eq!(find([10, 96, 0, 1], 81, false), None);
    assert_eq!(find([203, 0, 113, 1], 80, false), Some(balancer));
    assert_eq!(find([203, 0, 113, 3], 80, false), None);
    assert_eq!(find([172, 18, 0, 2], 30080, true), Some(Place::NodePort));
    assert_eq!(find([172, 18, 0, 2], 30080, false), None);
    assert_eq!(find([172, 18, 0, 2], 80, true), None);
}

#[test]
fn a8_without_an_address_it_is_open_whether_a_sender_is_admitted() {
    let endpoint = Endpoint::ready(EndpointAddr::new([10, 0, 0, 1], 8080));
    let place = Place::LoadBalancer(IpAddr::from([203, 0, 113, 1]));
    let reported = |ip| {
        let packet = (place, Sender::Outside(ip));
        let node = NodeFacts::default();
        fate(
            &port(),
            std::slice::from_ref(&endpoint),
            &node,
            SETUP,
            packet,
        )
    };
    let from = |ip: [u8; 4]| reported(Some(IpAddr::from(ip)));
    assert_eq!(reported(None).admitted, None);
    assert_eq!(reported(None).outcome, Outcome::Reaches);
    assert_eq!(from([192, 0, 2, 7]).outcome, Outcome::Reaches);
    assert_eq!(from([198, 51, 100, 7]).outcome, Outcome::NotAdmitted);
}

#[test]
fn a29_without_a_local_endpoint_ipvs_falls_back_unless_it_is_strict() {
    let mut port = port();
    port.external_policy = TrafficPolicy::Local;
    port.source_ranges.clear();
    let endpoint = Endpoint {
        node: Some("elsewhere".into()),
        ..Endpoint::ready(EndpointAddr::new([10, 0, 0, 1], 8080))
    };
    let external = Place::ExternalIp(IpAddr::from([203, 0, 113, 2]));
    let outcome = |local, place, sender| {
        let setup = Setup { local, ..SETUP };
        let fate = fate(
            &port,
            std::slice::from_ref(&endpoint),
            &NodeFacts::default(),
            setup,
            (place, sender),
        );
        (fate.outcome, fate.fell_back)
    };
    let (outside, node) = (Sender::Outside(None), Sender::Node(None));
    let by_sender = LocalRule::BySender;
    assert_eq!(
        outcome(by_sender, external, outside),
        (Outcome::Dropped, false)
    );
    assert_eq!(
        outcome(by_sender, external, node),
        (Outcome::Reaches, false)
    );
    let back = LocalRule::FallsBack;
    assert_eq!(outcome(back, external, outside), (Outcome::Reaches, true));
    assert_eq!(
        outcome(back, Place::NodePort, outside),
        (Outcome::Reaches, true)
    );
    let strict = LocalRule::Strict;
    assert_eq!(
        outcome(strict, external, outside),
        (Outcome::Refused, false)
    );
    assert_eq!(outcome(strict, external, node), (Outcome::Reaches, true));
    assert_eq!(
        outcome(strict, Place::NodePort, node),
        (Outcome::Refused, false)
    );
}
