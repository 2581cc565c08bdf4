//! Changes, restarts, faults and changes by other programs, on a kernel in memory.

use std::collections::BTreeSet;

use kplane_model::{IpvsScheduler, Protocol};
use proptest::prelude::*;

use super::super::sets::Entry;
use super::super::tests::kernel::{Fake, World};
use super::super::tests::{NODE_IP, Svc, all, at, ip, node, server};
use super::*;
use crate::backend::driver::Driver;
use crate::backend::iptables::FoundRules;
use crate::backend::{ApplyError, Side as _};
use crate::plan::ServicePlan;
use kplane_netlink::ipvs::{Command, ServerMode};

mod seen;

const V4: Family = Family::V4;
const TCP: Protocol = Protocol::Tcp;

fn side(kernel: &Fake, settings: backend::Settings) -> Driver<IpvsDataPath<Fake>> {
    Driver::new(IpvsDataPath::new(kernel.clone(), V4, settings))
}

fn change<K: Kernel>(
    side: &mut Driver<IpvsDataPath<K>>,
    services: &[(ServiceKey, Option<ServicePlan>)],
    complete: bool,
) -> Result<Applied, ApplyError> {
    side.apply(Change {
        family: V4,
        node: &node(),
        services,
        complete,
    })
}

/// Returns an agent that has just started and got everything.
fn started(kernel: &Fake, services: &[Svc]) -> Driver<IpvsDataPath<Fake>> {
    let mut side = side(kernel, backend::Settings::default());
    let applied = change(&mut side, &all(services), true).unwrap();
    assert_eq!(applied.failures, []);
    side
}

/// Returns the kernel's state after an agent programmed an empty kernel.
fn fresh(services: &[Svc]) -> World {
    let kernel = Fake::new();
    started(&kernel, services);
    kernel.world()
}

fn web() -> Svc {
    Svc::new("web", "10.96.0.1").endpoints(&["10.1.0.1:8080", "10.1.0.2:8080"])
}

fn everything() -> Vec<Svc> {
    vec![
        web().here(&["10.1.0.1:8080"]).node_port(30_080),
        Svc::new("lb", "10.96.0.2")
            .endpoints(&["10.1.0.3:80"])
            .load_balancer("203.0.113.1", &["10.9.0.0/16"])
            .external_ip("198.51.100.9")
            .health(30_000),
        Svc::new("dns", "10.96.0.3")
            .protocol(Protocol::Udp)
            .endpoints(&["10.1.0.4:53"])
            .node_port(30_053)
            .external_local(),
    ]
}

fn rr() -> ServerMode {
    ServerMode {
        scheduler: IpvsScheduler::ROUND_ROBIN,
        persistent_s: None,
    }
}

#[test]
fn a_second_agent_finds_nothing_to_do() {
    let kernel = Fake::new();
    let mut first = started(&kernel, &everything());
    assert_eq!(first.verify().unwrap(), Verification::Equal);
    let before = kernel.world();
    kernel.done();
    let mut second = side(&kernel, backend::Settings::default());
    let applied = change(&mut second, &all(&everything()), true).unwrap();
    assert_eq!((applied.operations, kernel.done()), (0, vec![]));
    assert_eq!(kernel.world(), before);
    assert_eq!(second.verify().unwrap(), Verification::Equal);
}

/// One changed endpoint is one or two messages, whatever the number of Services.
#[test]
fn an_endpoint_is_one_message() {
    let kernel = Fake::new();
    let mut side = started(&kernel, &[web(), everything()[1].clone()]);
    kernel.done();
    let key = server("10.96.0.1:80", TCP);
    let more = web().endpoints(&["10.1.0.1:8080", "10.1.0.2:8080", "10.1.0.9:8080"]);
    change(&mut side, &all(&[more]), false).unwrap();
    let add = Op::Ipvs(Command::AddReal(key, at("10.1.0.9:8080"), 1));
    assert_eq!(kernel.done(), [add]);
    change(&mut side, &all(&[web()]), false).unwrap();
    let drain = Op::Ipvs(Command::SetReal(key, at("10.1.0.9:8080"), 0));
    assert_eq!(kernel.done(), [drain]);
    change(&mut side, &all(&[web()]), false).unwrap();
    assert_eq!(kernel.done(), []);
}

/// Extension of D7: a Service has its own scheduler. Where the kernel lacks it, the node's is used until it
/// is loaded.
#[test]
fn d7_a_service_may_have_a_scheduler_of_its_own() {
    let kernel = Fake::new();
    let mut side = started(&kernel, &everything());
    let scheduler = |name: &str| kernel.world().servers[&server(name, TCP)].scheduler.as_str();
    let hashed = || web().node_port(30_080).scheduler("mh");
    kernel.done();
    change(&mut side, &all(&[hashed()]), false).unwrap();
    let set = |op: &Op| matches!(op, Op::Ipvs(Command::SetServer(..)));
    assert!(kernel.done().iter().filter(|op| set(op)).count() == 2);
    let both = ["10.96.0.1:80", "192.168.0.1:30080"].map(scheduler);
    assert_eq!((both, scheduler("10.96.0.2:80")), (["mh"; 2], "rr"));
    assert_eq!(side.verify().unwrap(), Verification::Equal);

    let sed = || Svc::new("sed", "10.96.0.9").endpoints(&["10.1.0.7:80"]).scheduler("sed");
    let own = IpvsScheduler::parse("sed").unwrap();
    kernel.inside().lacks.insert(own);
    let applied = change(&mut side, &all(&[sed()]), false).unwrap();
    let failure = &applied.failures[0];
    assert!(failure.degraded && failure.reason.contains("load the kernel module ip_vs_sed"));
    assert_eq!(scheduler("10.96.0.9:80"), "rr");
    assert_eq!(side.verify().unwrap(), Verification::Equal);

    kernel.inside().lacks.clear();
    let found = side.verify().unwrap();
    assert!(matches!(found, Verification::Outdated(_)), "{found:?}");
    let services: Vec<Svc> = [everything(), vec![hashed(), sed()]].concat().split_off(1);
    assert_eq!(
        change(&mut side, &all(&services), true).unwrap().failures,
        []
    );
    assert_eq!(scheduler("10.96.0.9:80"), "sed");
    assert_eq!(side.verify().unwrap(), Verification::Equal);
}

/// A15: packets keep their source only while all endpoints are on this node.
#[test]
fn a15_masquerading_ends_after_and_begins_before_others_serve() {
    let svc = || web().node_port(30_080).load_balancer("203.0.113.1", &[]);
    let local = || svc().external_local().here(&["10.1.0.1:8080"]);
    let kernel = Fake::new();
    let mut side = started(&kernel, &[svc()]);
    let mut order = |services: &[Svc]| {
        kernel.done();
        change(&mut side, &all(services), false).unwrap();
        let done = kernel.done();
        let position = |wanted: fn(&Op) -> bool| {
            let found: Vec<usize> =
                done.iter().enumerate().filter(|(_, op)| wanted(op)).map(|(at, _)| at).collect();
            (found.first().copied(), found.last().copied())
        };
        let exempts = position(|op| matches!(op, Op::Entry(set, ..) if set.is_exemption()));
        let serves = position(|op| matches!(op, Op::Ipvs(_)));
        (exempts, serves)
    };
    let (exempts, serves) = order(&[local()]);
    assert!(
        exempts.0 > serves.1 && serves.1.is_some(),
        "{exempts:?} {serves:?}"
    );
    let (exempts, serves) = order(&[svc()]);
    assert!(
        exempts.1 < serves.0 && exempts.1.is_some(),
        "{exempts:?} {serves:?}"
    );
}

/// D5: an endpoint gets weight 0 and is removed when idle, even after a restart. If it comes back, it serves
/// at once.
#[test]
fn d5_an_endpoint_that_goes_keeps_its_connections() {
    let kernel = Fake::new();
    let mut side = started(&kernel, &[web()]);
    let one = web().endpoints(&["10.1.0.1:8080"]);
    let real = (server("10.96.0.1:80", TCP), at("10.1.0.2:8080"));
    kernel.inside().world.reals.get_mut(&real).unwrap().1 = 3;
    change(&mut side, &all(std::slice::from_ref(&one)), false).unwrap();
    assert_eq!(kernel.world().reals[&real], (0, 3));
    assert_eq!(side.verify().unwrap(), Verification::Equal);
    assert_eq!(kernel.world().reals[&real], (0, 3));
    // A new agent starts, and knows nothing.
    let mut side = started(&kernel, std::slice::from_ref(&one));
    assert_eq!(side.verify().unwrap(), Verification::Equal);
    assert_eq!(kernel.world().reals[&real], (0, 3));
    // The endpoint comes back with its connections, and goes again.
    change(&mut side, &all(&[web()]), false).unwrap();
    assert_eq!(kernel.world().reals[&real], (1, 3));
    change(&mut side, &all(&[one]), false).unwrap();
    kernel.inside().world.reals.get_mut(&real).unwrap().1 = 0;
    assert_eq!(side.verify().unwrap(), Verification::Equal);
    assert!(!kernel.world().reals.contains_key(&real));
}

/// D5: connections of UDP and SCTP have no end to wait for.
#[test]
fn d5_endpoints_of_udp_and_sctp_go_at_once() {
    for protocol in [Protocol::Udp, Protocol::Sctp] {
        let kernel = Fake::new();
        let svc = web().protocol(protocol);
        let mut side = started(&kernel, std::slice::from_ref(&svc));
        kernel.done();
        change(&mut side, &all(&[svc.endpoints(&["10.1.0.1:8080"])]), false).unwrap();
        let key = server("10.96.0.1:80", protocol);
        let delete = Op::Ipvs(Command::DeleteReal(key, at("10.1.0.2:8080")));
        assert_eq!(kernel.done(), [delete]);
    }
}

/// D5: weights that an administrator, or kube-proxy, has set are repaired.
#[test]
fn d5_weights_are_reset() {
    let kernel = Fake::new();
    started(&kernel, &[web()]);
    let real = (server("10.96.0.1:80", TCP), at("10.1.0.2:8080"));
    for weight in [0, 7] {
        kernel.inside().world.reals.get_mut(&real).unwrap().0 = weight;
        started(&kernel, &[web()]);
        assert_eq!(kernel.world().reals[&real].0, 1);
    }
}

/// Every place that is served before and after a change is served at each moment (invariant: no-gap).
#[test]
fn no_step_leaves_a_service_without_endpoints() {
    fn nobody_is_lost(world: &World) {
        for (key, mode) in [("10.96.0.1:80", TCP), ("192.168.0.1:30080", TCP)] {
            let key = server(key, mode);
            let reached = world.reaches(key).unwrap_or_default();
            assert!(!reached.is_empty(), "{key}: {world:?}");
        }
    }
    let kernel = Fake::new();
    let svc = || web().node_port(30_080);
    let mut side = started(&kernel, &[svc()]);
    kernel.inside().watch = Some(nobody_is_lost);
    let other = svc().endpoints(&["10.1.0.7:1", "10.1.0.8:1"]);
    change(&mut side, &all(std::slice::from_ref(&other)), false).unwrap();
    let mut sticky = other;
    sticky.affinity = Some(60);
    change(
        &mut side,
        &all(&[sticky.external_local().here(&["10.1.0.7:1"])]),
        false,
    )
    .unwrap();
    change(&mut side, &all(&[svc()]), false).unwrap();
}

/// The machine stops after any step. Another agent finds that state and completes it.
#[test]
fn every_crash_point_is_recovered_from() {
    let (before, after) = (everything(), {
        let mut after = everything();
        after[0] = web().endpoints(&["10.1.0.9:8080"]).external_local();
        after[1] = Svc::new("lb", "10.96.0.2")
            .endpoints(&["10.1.0.3:80"])
            .load_balancer("203.0.113.2", &[]);
        after.pop();
        after
    });
    let wanted = fresh(&after);
    let mut stopped = 0;
    for steps in 0.. {
        let kernel = Fake::new();
        kernel.inside().steps_left = Some(steps);
        let mut first = side(&kernel, backend::Settings::default());
        let done = change(&mut first, &all(&before), true)
            .and_then(|_| change(&mut first, &all(&after), true))
            .is_ok();
        kernel.inside().steps_left = None;
        let world = kernel.world();
        for key in world.servers.keys() {
            let reached = world.reaches(*key);
            assert!(
                reached.is_none_or(|reals| !reals.is_empty()) || !world.addresses.contains(&key.ip),
                "after {steps} steps {key} goes nowhere"
            );
        }
        started(&kernel, &after);
        assert_eq!(kernel.world().settled(), wanted, "after {steps} steps");
        if done {
            break;
        }
        stopped += 1;
    }
    assert!(stopped > 50, "{stopped}");
}

/// The effects of `ipvsadm -C`, `ipset flush`, `ip addr flush`, `iptables -F` are noticed, named and
/// repaired.
#[test]
fn what_others_remove_is_put_back() {
    let faults: [fn(&mut World); 6] = [
        |world| {
            world.servers.clear();
            world.reals.clear();
        },
        |world| {
            world.reals.pop_first();
        },
        |world| world.entries.clear(),
        |world| world.addresses.clear(),
        |world| world.rules = FoundRules::default(),
        |world| {
            let entry = Entry::IpPort(ip("10.96.0.77"), TCP, 1);
            world.entries.insert((SetId::ClusterIp, entry));
        },
    ];
    let wanted = fresh(&everything());
    for fault in faults {
        let kernel = Fake::new();
        let mut side = started(&kernel, &everything());
        fault(&mut kernel.inside().world);
        let found = side.verify().unwrap();
        assert!(matches!(found, Verification::Drifted(_)), "{found:?}");
        change(&mut side, &all(&everything()), true).unwrap();
        assert_eq!(kernel.world(), wanted, "{found:?}");
        assert_eq!(side.verify().unwrap(), Verification::Equal);
    }
}

/// A virtual server of another program on one of kplane's addresses is reported and left alone; so are those
/// elsewhere. kube-proxy's own virtual servers, whose frontends are in its sets, are removed.
#[test]
fn d8_virtual_servers_of_others_stay() {
    let kernel = Fake::new();
    let foreign = [
        server("10.96.0.1:9999", TCP),
        server("172.16.0.1:80", TCP),
        server("192.168.0.1:7777", TCP),
    ];
    started(&kernel, &everything());
    for key in foreign {
        kernel.inside().world.servers.insert(key, rr());
    }
    let mut side = started(&kernel, &[web()]);
    assert_eq!(side.path.foreign, [foreign[0]]);
    assert_eq!(side.verify().unwrap(), Verification::Equal);
    let keys: BTreeSet<ServerKey> = kernel.world().servers.into_keys().collect();
    let ours = server("10.96.0.1:80", TCP);
    assert_eq!(keys, foreign.into_iter().chain([ours]).collect());
}

/// D8.
#[test]
fn d8_virtual_servers_in_excluded_ranges_are_never_removed() {
    let kernel = Fake::new();
    started(&kernel, &everything());
    let mut settings = backend::Settings::default();
    settings.ipvs.exclude_cidrs = vec!["10.96.0.2/32".parse().unwrap()];
    let mut side = side(&kernel, settings);
    change(&mut side, &all(&[web()]), true).unwrap();
    let keys: Vec<ServerKey> = kernel.world().servers.into_keys().collect();
    let expected = [server("10.96.0.1:80", TCP), server("10.96.0.2:80", TCP)];
    assert_eq!(keys, expected);
}

/// A21, D2: node ports follow the node's addresses.
#[test]
fn d2_node_ports_follow_the_nodes_addresses() {
    let kernel = Fake::new();
    let svc = || web().node_port(30_080);
    let mut side = started(&kernel, &[svc()]);
    for other in ["192.168.0.2", "127.0.0.1"] {
        kernel.inside().world.node_ips.insert(ip(other));
    }
    let found = side.verify().unwrap();
    assert!(matches!(found, Verification::Outdated(_)), "{found:?}");
    change(&mut side, &all(&[svc()]), true).unwrap();
    let world = kernel.world();
    assert!(world.servers.contains_key(&server("192.168.0.2:30080", TCP)));
    assert!(!world.servers.contains_key(&server("127.0.0.1:30080", TCP)));
    assert_eq!(side.verify().unwrap(), Verification::Equal);
}

/// One bad object stops no other (invariant: isolation). A refused operation is not mistaken for a change by another program.
#[test]
fn what_the_kernel_refuses_stops_nobody_else() {
    let kernel = Fake::new();
    let key = server("10.96.0.1:80", TCP);
    let add = Op::Ipvs(Command::AddReal(key, at("10.1.0.2:8080"), 1));
    kernel.inside().refuse.insert(add);
    let mut side = side(&kernel, backend::Settings::default());
    let applied = change(&mut side, &all(&everything()), true).unwrap();
    let failed: Vec<_> = applied.failures.iter().map(|f| f.key.clone()).collect();
    assert_eq!(failed, [web().key()]);
    assert!(applied.failures[0].reason.contains("10.1.0.2:8080 of 10.96.0.1:80/TCP"));
    assert_eq!(side.verify().unwrap(), Verification::Equal);
    // The same holds after a change to another Service.
    change(&mut side, &all(&everything()[1..]), false).unwrap();
    assert_eq!(side.verify().unwrap(), Verification::Equal);
    side.path.refused_at = Some(Instant::now() - REFUSED_FOR);
    kernel.inside().refuse.clear();
    let found = side.verify().unwrap();
    assert!(matches!(found, Verification::Outdated(_)), "{found:?}");
    change(&mut side, &all(&everything()), true).unwrap();
    assert_eq!(kernel.world(), fresh(&everything()));
}

/// D3: nothing is lost when there are more entries than kube-proxy's sets can hold.
#[test]
fn d3_a_full_set_grows() {
    let kernel = Fake::new();
    let mut side = started(&kernel, &[web()]);
    kernel.inside().world.capacities.insert(SetId::ClusterIp, 2);
    side.path.capacities.insert(SetId::ClusterIp, 2);
    let applied = change(&mut side, &all(&everything()), true).unwrap();
    assert_eq!(applied.failures, []);
    let world = kernel.world();
    assert!(world.capacities[&SetId::ClusterIp] > 3);
    assert_eq!(world.entries, fresh(&everything()).entries);
}

/// Only one ServicePort can have an address and port.
#[test]
fn a_place_that_is_taken_is_told() {
    let kernel = Fake::new();
    let mut side = side(&kernel, backend::Settings::default());
    let other = Svc::new("other", "10.96.0.1").endpoints(&["10.1.0.5:1"]);
    let applied = change(&mut side, &all(&[web(), other]), true).unwrap();
    assert_eq!(applied.failures.len(), 1);
    assert!(
        applied.failures[0]
            .reason
            .contains("10.96.0.1:80/TCP: is already programmed for ns/web")
    );
}

/// Any Service out of a few shapes.
fn any_svc(name: usize) -> impl Strategy<Value = Option<Svc>> {
    let shape = (
        0..3_usize,
        0..16_u8,
        0..16_u8,
        any::<bool>(),
        any::<bool>(),
        0..16_u8,
    );
    (prop::bool::weighted(0.8), shape).prop_map(move |(there, shape)| {
        let (protocol, endpoints, here, external, internal, frontends) = shape;
        let protocols = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];
        let of = |bits: u8| {
            (0..4_u8)
                .filter(move |bit| bits & (1 << bit) != 0)
                .map(|bit| format!("10.1.0.{bit}:80"))
                .collect::<Vec<_>>()
        };
        let (endpoints, here) = (of(endpoints), of(endpoints & here));
        let refs = |list: &[String]| {
            list.iter().map(String::as_str).map(str::to_owned).collect::<Vec<_>>()
        };
        let (endpoints, here) = (refs(&endpoints), refs(&here));
        let endpoints: Vec<&str> = endpoints.iter().map(String::as_str).collect();
        let here: Vec<&str> = here.iter().map(String::as_str).collect();
        let mut svc = Svc::new(&format!("s{name}"), &format!("10.96.0.{name}"))
            .protocol(protocols[protocol])
            .endpoints(&endpoints)
            .here(&here);
        if external {
            svc = svc.external_local();
        }
        if internal {
            svc = svc.internal_local();
        }
        if frontends & 1 != 0 {
            let port = 30_000 + u16::try_from(name).unwrap();
            svc = svc.node_port(port).external_ip(&format!("198.51.100.{name}"));
        }
        // Two places with one virtual server.
        match frontends & 12 {
            4 => svc = svc.node_port(80),
            8 => svc = svc.external_ip(NODE_IP),
            _ => {}
        }
        if frontends & 2 != 0 {
            let ranges: &[&str] = if frontends & 1 != 0 { &["10.9.0.0/16"] } else { &[] };
            svc = svc.load_balancer(&format!("203.0.113.{name}"), ranges).health(31_000);
        }
        there.then_some(svc)
    })
}

fn any_services() -> impl Strategy<Value = Vec<Option<Svc>>> {
    (any_svc(0), any_svc(1), any_svc(2), any_svc(3)).prop_map(|(a, b, c, d)| vec![a, b, c, d])
}

fn there(services: &[Option<Svc>]) -> Vec<Svc> {
    services.iter().flatten().cloned().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the sequence of changes, the kernel holds what a new agent would write that gets Services in the order in
    /// which they got their places.
    #[test]
    fn changes_lead_to_what_is_wanted(steps in prop::collection::vec(any_services(), 1..8)) {
        let kernel = Fake::new();
        let mut side = started(&kernel, &[]);
        // The ServicePorts that are not served everywhere.
        let failures = |applied: Result<Applied, _>| -> BTreeSet<ServiceKey> {
            applied.unwrap().failures.into_iter().map(|failure| failure.key).collect()
        };
        let (mut order, mut failed) = (Vec::<Svc>::new(), BTreeSet::new());
        for after in steps {
            let after = there(&after);
            let (stay, go): (Vec<_>, Vec<_>) = order.into_iter().partition(|svc| after.contains(svc));
            let new: Vec<Svc> = after.into_iter().filter(|svc| !stay.contains(svc)).collect();
            let is_named = |key: &ServiceKey| new.iter().any(|svc| svc.key() == *key);
            let gone = go.iter().map(Svc::key).filter(|key| !is_named(key)).map(|key| (key, None));
            let changes: Vec<_> = gone.chain(all(&new)).collect();
            failed.retain(|key| changes.iter().all(|(changed, _)| changed != key));
            failed.extend(failures(change(&mut side, &changes, false)));
            // The engine tries again what failed: others may have left the place.
            let all_now = stay.into_iter().chain(new);
            let (again, served): (Vec<_>, Vec<_>) =
                all_now.partition(|svc| failed.contains(&svc.key()));
            failed = failures(change(&mut side, &all(&again), false));
            order = [served, again].concat();
            let afresh = Fake::new();
            let mut new_side = self::side(&afresh, backend::Settings::default());
            change(&mut new_side, &all(&order), true).unwrap();
            prop_assert_eq!(kernel.world().settled(), afresh.world());
            prop_assert_eq!(side.verify().unwrap(), Verification::Equal);
        }
    }
}
