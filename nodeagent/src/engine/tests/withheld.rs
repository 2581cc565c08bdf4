//! Tests of what an old or hostile control plane sends and the node does not accept.

use std::net::IpAddr;

use kplane_model::{EndpointAddr, MAX_SERVICE_ELEMENTS, MAX_SERVICE_PLACES};

use super::*;
use kplane_dataplane::plan::Reserved;

fn ip(number: usize) -> IpAddr {
    let [.., a, b] = number.to_be_bytes();
    IpAddr::from([198, 18, a, b])
}

/// Returns one of the ports of a Service, with this number of external addresses and endpoints.
fn port(name: &str, port: u16, addresses: usize, endpoints: usize) -> DesiredObject {
    let DesiredObject::Service(mut program) = svc(name, &[]) else {
        panic!("no Service");
    };
    program.port.key.port_name = format!("p{port}").into();
    program.port.port = port;
    program.port.external_ips = (0..addresses).map(ip).collect();
    let endpoints = (0..endpoints).map(|n| EndpointAddr::new(ip(n), 80));
    program.endpoints = endpoints.collect();
    program.has_any = !program.endpoints.is_empty();
    DesiredObject::Service(program)
}

/// Places and elements that the kernel holds.
fn held(rig: &Rig) -> (usize, usize) {
    let script = rig.script.0.lock().unwrap();
    script
        .kernel
        .values()
        .flat_map(|plan| &plan.frontends)
        .map(|frontend| frontend.endpoints.len())
        .fold((0, 0), |(places, sum), n| (places + 1, sum + n))
}

fn reasons(rig: &Rig) -> Vec<(String, bool)> {
    rig.core
        .report()
        .failures
        .into_iter()
        .map(|failure| (failure.reason, failure.degraded))
        .collect()
}

#[test]
fn the_way_to_the_control_plane_is_withheld_and_given_back() {
    let mut rig = Rig::settled([port("hijacker", 7465, 1, 1), svc("web", &[]), node("z1")]);
    assert_eq!(held(&rig).0, 3);
    let peer = std::net::SocketAddr::new(ip(0), 7465);
    let settings = NodeSettings {
        reserved: Reserved {
            peers: std::collections::BTreeSet::from([peer]),
            ..Reserved::default()
        },
        ..NodeSettings::default()
    };
    rig.core.configure(settings, rig.now);
    assert_eq!(held(&rig).0, 2);
    let reported = reasons(&rig);
    assert_eq!(reported.len(), 1);
    assert!(
        reported[0]
            .0
            .starts_with("198.18.0.0:7465/TCP is where kplane's control plane listens")
    );
    assert!(reported[0].1, "its ClusterIP is served");
    // The reservation also applies to later Services, and ends with the settings.
    rig.put(&port("hijacker", 7465, 2, 1));
    assert_eq!((held(&rig).0, reasons(&rig).len()), (3, 1));
    rig.core.configure(NodeSettings::default(), rig.now);
    assert_eq!((held(&rig).0, reasons(&rig)), (4, vec![]));
}

#[test]
fn a_service_that_asks_for_too_much_is_cut_as_a_whole_and_the_others_are_served() {
    let first: Vec<_> = (1..=9).map(|n| port("big", n, 2_000, 1)).collect();
    let mut rig = Rig::settled(first.into_iter().chain([svc("web", &[]), node("z1")]));
    // 9 ports x 1,819 addresses; and `web`.
    let (places, _) = held(&rig);
    assert!(
        places <= MAX_SERVICE_PLACES + 1 && places > MAX_SERVICE_PLACES - 9,
        "{places}"
    );
    let reported = reasons(&rig);
    assert_eq!(reported.len(), 9);
    assert!(
        reported[0]
            .0
            .contains("served at 1819 of 2000 external addresses, with 1 of 1 endpoints")
    );
    assert!(reported.iter().all(|(_, degraded)| *degraded));
    // With one port less the Service fits, and ports that were not touched are planned again too.
    rig.plane.delete(&key_of_port("big", 9));
    rig.delta();
    assert_eq!((held(&rig).0, reasons(&rig)), (8 * 2_001 + 1, vec![]));
    // Endpoints count times places.
    rig.put(&port("big", 1, 2_000, 1_000));
    let (_, elements) = held(&rig);
    assert!(elements <= MAX_SERVICE_ELEMENTS, "{elements}");
    assert_eq!(reasons(&rig).len(), 8);
}

fn key_of_port(name: &str, port: u16) -> DesiredKey {
    let mut key = key_of(name, Family::V4);
    key.port_name = format!("p{port}").into();
    DesiredKey::Service(key)
}
