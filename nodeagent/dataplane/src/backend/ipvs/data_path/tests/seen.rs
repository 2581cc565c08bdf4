//! Tests of the human-readable views of real servers.

use std::slice::from_ref;

use kplane_model::EndpointAddr;

use super::*;
use crate::backend::{Connections, Inspection, RealServer};

const PLACE: &str = "10.96.0.1:80";

fn busy(kernel: &Fake, place: &str, real: &str, active: u64) {
    let real = (server(place, TCP), at(real));
    kernel.inside().world.reals.get_mut(&real).unwrap().1 = active;
}

fn inspect(driver: &Driver<IpvsDataPath<Fake>>, name: &str) -> Inspection {
    driver.inspect(&ServiceName::new("ns", name)).unwrap()
}

fn active(active: u64) -> Connections {
    Connections {
        active,
        inactive: 0,
    }
}

/// D5: a removed endpoint is reported as draining, with its connections, until they have ended.
#[test]
fn d5_what_drains_is_told() {
    let kernel = Fake::new();
    let mut side = started(&kernel, &[web(), everything()[1].clone()]);
    busy(&kernel, PLACE, "10.1.0.1:8080", 5);
    busy(&kernel, PLACE, "10.1.0.2:8080", 3);
    let one = web().endpoints(&["10.1.0.1:8080"]);
    change(&mut side, &all(from_ref(&one)), false).unwrap();
    let counts = side.path.seen.counts.clone().unwrap();
    assert_eq!(
        (counts.draining, counts.connections),
        (0, active(0)),
        "nobody has looked"
    );

    assert_eq!(side.verify().unwrap(), Verification::Equal);
    let counts = side.path.seen.counts.clone().unwrap();
    // web's address, and three of the load balancer.
    assert_eq!((counts.virtual_servers, counts.real_servers), (4, 5));
    assert_eq!((counts.draining, counts.connections), (1, active(8)));
    let drain = &counts.drains[0];
    assert_eq!((drain.server, drain.at), (at(PLACE), at("10.1.0.2:8080")));
    assert_eq!((&drain.key, drain.connections), (&web().key(), active(3)));

    assert_eq!(side.servers(), Some(counts));
    let described = inspect(&side, "web");
    let [server] = &described.servers[..] else {
        panic!("{described:?}");
    };
    assert_eq!((&server.key, server.at), (&web().key(), at(PLACE)));
    assert_eq!((server.scheduler, server.persistent_s), ("rr", None));
    let real = |text, weight, connections| RealServer {
        at: at(text),
        weight,
        connections: active(connections),
        draining: weight == 0,
    };
    let reals = [real("10.1.0.1:8080", 1, 5), real("10.1.0.2:8080", 0, 3)];
    assert_eq!(server.reals, reals);

    busy(&kernel, PLACE, "10.1.0.2:8080", 0);
    side.verify().unwrap();
    let counts = side.servers().unwrap();
    assert_eq!((counts.draining, counts.real_servers), (0, 4));
    assert_eq!(inspect(&side, "web").servers[0].reals, reals[..1]);
}

/// Weights are current, connections are those of the last read. An endpoint that comes back has both.
#[test]
fn an_endpoint_that_comes_back_keeps_its_connections() {
    let kernel = Fake::new();
    let mut side = started(&kernel, &[web()]);
    busy(&kernel, PLACE, "10.1.0.2:8080", 3);
    let one = web().endpoints(&["10.1.0.1:8080"]);
    change(&mut side, &all(&[one]), false).unwrap();
    side.verify().unwrap();
    change(&mut side, &all(&[web()]), false).unwrap();
    let real = inspect(&side, "web").servers[0].reals[1];
    assert_eq!((real.weight, real.draining), (1, false));
    assert_eq!(real.connections, active(3));
}

#[test]
fn a_service_is_told_with_all_its_places_and_no_others() {
    let kernel = Fake::new();
    let driver = started(&kernel, &everything());
    let described = inspect(&driver, "lb").servers;
    let frontends: Vec<EndpointAddr> = described.iter().map(|server| server.at).collect();
    let wanted = ["10.96.0.2:80", "198.51.100.9:80", "203.0.113.1:80"].map(at);
    assert_eq!(frontends, wanted);
    let web = inspect(&driver, "web").servers;
    assert_eq!(web[1].at, at("192.168.0.1:30080"));
    let nobody = inspect(&driver, "nobody");
    assert_eq!((nobody.servers, nobody.error), (Vec::new(), String::new()));
}

/// Virtual servers of other programs are neither counted nor reported.
#[test]
fn foreign_servers_are_not_counted() {
    let kernel = Fake::new();
    let mut side = started(&kernel, &[web()]);
    let foreign = server("10.96.0.1:99", TCP);
    kernel.inside().world.servers.insert(foreign, rr());
    let real = (foreign, at("10.1.0.9:80"));
    kernel.inside().world.reals.insert(real, (0, 7));
    side.verify().unwrap();
    let counts = side.path.seen.counts.clone().unwrap();
    assert_eq!((counts.virtual_servers, counts.draining), (1, 0));
    assert_eq!(counts.connections, active(0));
    assert_eq!(inspect(&side, "web").servers.len(), 1);
}

#[test]
fn the_busiest_are_named() {
    let kernel = Fake::new();
    let ips: Vec<String> = (1..=40).map(|n| format!("10.1.0.{n}:80")).collect();
    let ips: Vec<&str> = ips.iter().map(String::as_str).collect();
    let mut side = started(&kernel, &[web().endpoints(&ips)]);
    for (n, ip) in (1..).zip(&ips) {
        busy(&kernel, PLACE, ip, n);
    }
    change(&mut side, &all(&[web().endpoints(&ips[..1])]), false).unwrap();
    side.verify().unwrap();
    let counts = side.path.seen.counts.unwrap();
    let named: Vec<u64> = counts.drains.iter().map(|d| d.connections.active).collect();
    assert_eq!(counts.draining, 39);
    assert_eq!(named, (25..=40).rev().collect::<Vec<_>>());
}

/// Nothing is reported of a kernel that may hold half a change (invariant: acknowledged).
#[test]
fn what_is_not_known_is_not_told() {
    let kernel = Fake::new();
    let mut side = started(&kernel, &[web()]);
    kernel.inside().steps_left = Some(0);
    let one = web().endpoints(&["10.1.0.1:8080"]);
    change(&mut side, &all(&[one]), false).unwrap_err();
    let described = inspect(&side, "web");
    assert_eq!(described.servers, []);
    assert_eq!(
        described.error,
        "the agent does not know what the kernel holds of IPv4 at the moment"
    );
}

/// A change of weights by another program is drift, not draining.
#[test]
fn only_what_nobody_wants_and_gets_nothing_drains() {
    let kernel = Fake::new();
    let mut side = started(&kernel, &[web()]);
    let key = server(PLACE, TCP);
    {
        let reals = &mut kernel.inside().world.reals;
        reals.get_mut(&(key, at("10.1.0.1:8080"))).unwrap().0 = 0;
        reals.insert((key, at("10.1.0.9:8080")), (1, 2));
    }
    let drifted = side.verify().unwrap();
    assert!(matches!(drifted, Verification::Drifted(_)), "{drifted:?}");
    let counts = side.path.seen.counts.clone().unwrap();
    assert_eq!((counts.real_servers, counts.draining), (3, 0));
    let described = inspect(&side, "web");
    assert!(described.servers[0].reals.iter().all(|real| !real.draining));
}
