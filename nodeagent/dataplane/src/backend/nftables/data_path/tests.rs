//! Tests of the differences and of the driver, against a kernel in memory.

mod machine;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::net::IpAddr;

use expect_test::expect;
use kplane_model::{EndpointAddr, Family, KeyParts, Protocol, ServiceKey, TrafficPolicy};
use proptest::prelude::*;

use super::super::access::{Guard, KernelTables as _};
use super::super::adopt::adopt;
use super::super::affinity::Group;
use super::super::affinity_id::GroupPart;
use super::super::clients::{Client, Remembered};
use super::super::element::{Data, Element};
use super::super::frontend::Ops;
use super::super::memory::{MemoryKernel, TableFaults};
use super::super::repair::Contents as _;
use super::super::schema::{Set, TableSettings};
use super::super::structure::GroupOp;
use super::super::table::Table;
use super::super::table_kind::TableKind;
use super::super::watch::OneTable;
use super::NftDataPath;
use crate::backend::driver::Driver;
use crate::backend::{Change, Side, Verification};
use crate::plan::{Frontend, FrontendAddr, NodePlan, Origin, ServicePlan, Unserved};

fn endpoint(octet: u8) -> EndpointAddr {
    EndpointAddr::new([10, 0, 0, octet], 8080)
}

fn key(n: u8) -> ServiceKey {
    ServiceKey::from(KeyParts {
        port_name: "".into(),
        ..KeyParts::clone(&ServiceKey::sample("shop", &format!("svc-{n}")))
    })
}

fn cluster_ip(n: u8) -> FrontendAddr {
    FrontendAddr::Address {
        ip: IpAddr::from([10, 96, 0, n]),
        protocol: Protocol::Tcp,
        port: 80,
    }
}

fn load_balancer(n: u8) -> FrontendAddr {
    FrontendAddr::Address {
        ip: IpAddr::from([198, 51, 100, n]),
        protocol: Protocol::Tcp,
        port: 80,
    }
}

fn node_port(n: u8) -> FrontendAddr {
    FrontendAddr::NodePort {
        protocol: Protocol::Tcp,
        port: 30_000 + u16::from(n),
    }
}

fn frontend(at: FrontendAddr, endpoints: &[u8]) -> Frontend {
    let mut endpoints: Vec<_> = endpoints.iter().map(|octet| endpoint(*octet)).collect();
    endpoints.sort();
    endpoints.dedup();
    let is_cluster_ip =
        matches!(at, FrontendAddr::Address { ip: IpAddr::V4(ip), .. } if ip.octets()[0] == 10);
    Frontend {
        at,
        origin: if is_cluster_ip { Origin::ClusterIp } else { Origin::LoadBalancer },
        unserved: endpoints.is_empty().then_some(Unserved::Reject),
        endpoints,
        policy: TrafficPolicy::Cluster,
        inside: None,
        masquerade: !is_cluster_ip,
        source_ranges: Vec::new(),
    }
}

fn plan(n: u8, frontends: Vec<Frontend>) -> ServicePlan {
    ServicePlan {
        frontends,
        ..ServicePlan::sample(key(n), IpAddr::from([10, 96, 0, n]))
    }
}

/// A ClusterIP Service.
fn service(n: u8, endpoints: &[u8]) -> ServicePlan {
    plan(n, vec![frontend(cluster_ip(n), endpoints)])
}

type Services = Vec<(ServiceKey, Option<ServicePlan>)>;

fn set(plans: impl IntoIterator<Item = ServicePlan>) -> Services {
    plans.into_iter().map(|plan| (plan.key.clone(), Some(plan))).collect()
}

fn change<'a>(services: &'a Services, node: &'a NodePlan, complete: bool) -> Change<'a> {
    Change {
        family: Family::V4,
        node,
        services,
        complete,
    }
}

const TABLE: OneTable = (TableKind::Services, Family::V4);

/// Starts a process.
fn on(memory: &MemoryKernel) -> Driver<NftDataPath> {
    let table = memory.start().table(Family::V4, TableSettings::default().into());
    Driver::new(NftDataPath::new(Family::V4, table))
}

fn elements_in(memory: &MemoryKernel) -> BTreeSet<Element> {
    memory.show(TABLE, |held| held.elements().collect())
}

/// Returns a machine that refuses an endpoint.
fn poisoned() -> MemoryKernel {
    let memory = MemoryKernel::default();
    let faults = TableFaults {
        refused: Some(endpoint(66).ip),
        ..TableFaults::default()
    };
    memory.set_faults(TableKind::Services, Family::V4, faults);
    memory
}

fn table_with(plans: impl IntoIterator<Item = ServicePlan>) -> Table {
    let mut table = Table::default();
    let services = set(plans);
    let staged = table.stage(change(&services, &NodePlan::default(), true));
    assert_eq!(staged.failures, []);
    table.accept(staged);
    table
}

/// Returns the operations of a change from one Service to another, on one line.
fn operations(before: &ServicePlan, after: Option<&ServicePlan>) -> String {
    let table = table_with([before.clone()]);
    let services = vec![(before.key.clone(), after.cloned())];
    let staged = table.stage(change(&services, &NodePlan::default(), false));
    let mut counts = BTreeMap::<(bool, Set), usize>::new();
    for ops in &staged.groups {
        for (adds, elements) in [(false, &ops.delete), (true, &ops.add)] {
            for element in elements {
                *counts.entry((adds, element.set)).or_default() += 1;
            }
        }
    }
    let mut line = format!("{:>2}", staged.len());
    for op in staged.groups.iter().flat_map(|ops| &ops.groups) {
        line += match op {
            GroupOp::Make(_) => "  +group",
            GroupOp::Rewrite(_) => "  ~group",
            GroupOp::Drop(_) => "  -group",
        };
    }
    for ((adds, set), count) in counts {
        let sign = if adds { '+' } else { '-' };
        let times = if count > 1 { format!(" x{count}") } else { String::new() };
        write!(line, "  {sign}{}{times}", set.name()).unwrap();
    }
    line
}

/// A change is a handful of element operations, whatever the number of Services. docs/nftables.md quotes this
/// table.
#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn operations_of_each_kind_of_change() {
    let three = service(1, &[1, 2, 3]);
    let external = |endpoints: &[u8]| {
        plan(
            1,
            vec![
                frontend(cluster_ip(1), endpoints),
                frontend(load_balancer(1), endpoints),
                frontend(node_port(1), endpoints),
            ],
        )
    };
    let local = |outside: &[u8], inside: &[u8]| {
        let mut plan = external(inside);
        for f in plan.frontends.iter_mut().skip(1) {
            let mut outside = frontend(f.at, outside);
            outside.masquerade = false;
            outside.policy = TrafficPolicy::Local;
            outside.inside = Some(std::mem::take(&mut f.endpoints)).filter(|e| !e.is_empty());
            outside.unserved = outside.endpoints.is_empty().then_some(Unserved::Drop);
            *f = outside;
        }
        plan
    };
    let restricted = |ranges: &[&str]| {
        let mut plan = external(&[1, 2]);
        plan.frontends[1].source_ranges = ranges.iter().map(|r| r.parse().unwrap()).collect();
        plan
    };
    let hairpin = |octets: &[u8]| {
        let local = octets.iter().map(|octet| endpoint(*octet)).collect();
        ServicePlan {
            local,
            ..service(1, &[1, 2])
        }
    };
    let empty = ServicePlan {
        frontends: Vec::new(),
        ..service(1, &[])
    };
    let sticky = |endpoints: &[u8]| ServicePlan {
        affinity_timeout_s: Some(10_800),
        ..service(1, endpoints)
    };
    let cases: [(&str, &ServicePlan, Option<&ServicePlan>); 20] = [
        (
            "new ClusterIP Service, 2 endpoints (its ClusterIP apart)",
            &empty,
            Some(&service(1, &[1, 2])),
        ),
        ("Service deleted, 2 endpoints", &service(1, &[1, 2]), None),
        (
            "endpoint added, same class (3 to 4 is a new class, 5 to 6 is not)",
            &service(1, &[1, 2, 3, 4, 5]),
            Some(&service(1, &[1, 2, 3, 4, 5, 6])),
        ),
        (
            "endpoint added, next class",
            &three,
            Some(&service(1, &[1, 2, 3, 4])),
        ),
        ("endpoint replaced", &three, Some(&service(1, &[1, 3, 4]))),
        (
            "last endpoint by index removed, same class",
            &service(1, &[1, 2, 3, 4, 5, 6]),
            Some(&service(1, &[1, 2, 3, 4, 5])),
        ),
        (
            "first endpoint by index removed, same class",
            &service(1, &[1, 2, 3, 4, 5, 6]),
            Some(&service(1, &[2, 3, 4, 5, 6])),
        ),
        (
            "first endpoint by index removed, previous class",
            &three,
            Some(&service(1, &[2, 3])),
        ),
        (
            "no endpoint left",
            &service(1, &[1]),
            Some(&service(1, &[])),
        ),
        ("first endpoint", &service(1, &[]), Some(&service(1, &[1]))),
        (
            "load-balancer address and node port added, 2 endpoints",
            &service(1, &[1, 2]),
            Some(&external(&[1, 2])),
        ),
        (
            "endpoint replaced, with load-balancer address and node port",
            &external(&[1, 2]),
            Some(&external(&[1, 3])),
        ),
        (
            "external policy Cluster to Local, 1 of 2 endpoints here",
            &external(&[1, 2]),
            Some(&local(&[1], &[1, 2])),
        ),
        (
            "policy Local: the endpoint here goes away, 1 elsewhere",
            &local(&[1], &[1, 2]),
            Some(&local(&[], &[2])),
        ),
        (
            "source ranges set, 2 of them",
            &external(&[1, 2]),
            Some(&restricted(&["192.0.2.0/24", "203.0.113.0/24"])),
        ),
        (
            "one source range replaced",
            &restricted(&["192.0.2.0/24", "203.0.113.0/24"]),
            Some(&restricted(&["192.0.2.0/24", "198.18.0.0/24"])),
        ),
        (
            "session affinity on",
            &service(1, &[1, 2]),
            Some(&sticky(&[1, 2])),
        ),
        (
            "endpoint replaced, with session affinity",
            &sticky(&[1, 2]),
            Some(&sticky(&[1, 3])),
        ),
        (
            "endpoint now lives on this node",
            &hairpin(&[]),
            Some(&hairpin(&[1])),
        ),
        ("nothing", &external(&[1, 2]), Some(&external(&[1, 2]))),
    ];
    let mut table = String::new();
    for (name, before, after) in cases {
        writeln!(table, "{name}\n  {}", operations(before, after)).unwrap();
    }
    expect![[r#"
        new ClusterIP Service, 2 endpoints (its ClusterIP apart)
           3  +service-endpoints x2  +places
        Service deleted, 2 endpoints
           5  -cluster-ips  -service-cidrs  -service-endpoints x2  -places
        endpoint added, same class (3 to 4 is a new class, 5 to 6 is not)
           1  +service-endpoints
        endpoint added, next class
           3  -places  +service-endpoints  +places
        endpoint replaced
           2  -service-endpoints  +service-endpoints
        last endpoint by index removed, same class
           1  -service-endpoints
        first endpoint by index removed, same class
           3  -service-endpoints x2  +service-endpoints
        first endpoint by index removed, previous class
           5  -service-endpoints x2  -places  +service-endpoints  +places
        no endpoint left
           3  -service-endpoints  -places  +places
        first endpoint
           3  -places  +service-endpoints  +places
        load-balancer address and node port added, 2 endpoints
           6  +service-endpoints x2  +nodeport-endpoints x2  +places  +nodeports
        endpoint replaced, with load-balancer address and node port
           6  -service-endpoints x2  -nodeport-endpoints  +service-endpoints x2  +nodeport-endpoints
        external policy Cluster to Local, 1 of 2 endpoints here
          10  -service-endpoints  -nodeport-endpoints  -places  -nodeports  +inside-service-endpoints x2  +inside-nodeport-endpoints x2  +places  +nodeports
        policy Local: the endpoint here goes away, 1 elsewhere
          17  -service-endpoints x3  -nodeport-endpoints  -inside-service-endpoints x2  -inside-nodeport-endpoints x2  -places x2  -nodeports  +service-endpoints  +inside-service-endpoints  +inside-nodeport-endpoints  +places x2  +nodeports
        source ranges set, 2 of them
           3  +firewall-services  +firewall-sources x2
        one source range replaced
           2  -firewall-sources  +firewall-sources
        session affinity on
           5  +group  -places  +sticky-services  +remember-services  +places
        endpoint replaced, with session affinity
           2  -service-endpoints  +service-endpoints
        endpoint now lives on this node
           1  +hairpin
        nothing
           0
    "#]].assert_eq(&table);
}

#[test]
fn a_table_that_is_found_again_needs_no_operation() {
    let mut external = plan(
        1,
        vec![
            frontend(cluster_ip(1), &[1, 2, 3]),
            frontend(node_port(1), &[1]),
        ],
    );
    external.frontends[1].policy = TrafficPolicy::Local;
    external.frontends[1].inside = Some(vec![endpoint(1), endpoint(2)]);
    let sticky = |n, timeout_s| ServicePlan {
        affinity_timeout_s: Some(timeout_s),
        ..service(n, &[1, 2])
    };
    external.affinity_timeout_s = Some(10_800);
    let plans = [
        external,
        service(2, &[]),
        service(3, &[5, 4, 3, 2, 1]),
        sticky(4, 1),
    ];
    let table = table_with(plans.clone());
    let found: Vec<Element> = table.elements().into_iter().collect();
    let groups: Vec<Group> = table.groups().into_iter().collect();
    assert_eq!(groups.len(), 3);
    let again = adopt(&groups, &found);
    assert_eq!(again.strays, []);
    assert_eq!(again.elements(), table.elements());
    assert_eq!(
        again.stage(change(&set(plans), &NodePlan::default(), true)).len(),
        0
    );
}

#[test]
fn elements_that_make_no_sense_go_away() {
    let mut found: Vec<Element> =
        table_with([service(1, &[1, 2, 3])]).elements().into_iter().collect();
    // This makes a gap in the middle, although the class promises three endpoints.
    found.retain(|element| element.data != Some(Data::Endpoint(endpoint(2))));
    let table = adopt(&[], &found);
    assert!(!table.strays.is_empty());
    let memory = MemoryKernel::default();
    let ops = Ops {
        add: found,
        ..Ops::default()
    };
    let mut before = memory.start().table(Family::V4, TableSettings::default().into());
    before.commit(true, Guard::None, &[ops]).unwrap();
    let services = set([service(1, &[1, 2, 3])]);
    on(&memory).apply(change(&services, &NodePlan::default(), true)).unwrap();
    assert_eq!(
        elements_in(&memory),
        table_with([service(1, &[1, 2, 3])]).elements()
    );
}

#[test]
fn only_the_service_that_the_kernel_refuses_is_left_out() {
    for complete in [true, false] {
        let memory = poisoned();
        let mut driver = on(&memory);
        let node = NodePlan::default();
        driver.apply(change(&set([service(100, &[1])]), &node, true)).unwrap();
        let plans = (0..20).map(
            |n| {
                if n == 13 { service(n, &[66]) } else { service(n, &[n + 1]) }
            },
        );
        let mut services = set(plans.clone());
        if !complete {
            // A deletion in the same change as the refused addition is applied.
            services.push((key(100), None));
        }
        let applied = driver.apply(change(&services, &node, complete)).unwrap();
        assert_eq!(
            applied.failures.iter().map(|f| &f.key).collect::<Vec<_>>(),
            [&key(13)]
        );
        assert_eq!(verify(&mut driver), Verification::Equal);
        let expected: Vec<_> = plans.filter(|p| p.key != key(13)).collect();
        drop(driver);
        assert_eq!(elements_in(&memory), table_with(expected).elements());
    }
}

/// A new table is filled in several transactions. The kernel has taken some when it refuses a later one.
#[test]
fn a_service_that_is_refused_while_a_new_table_is_filled_is_left_out_by_the_next_attempt() {
    let memory = poisoned();
    memory.set_capacity(7);
    let mut driver = on(&memory);
    let node = NodePlan::default();
    let plans = (0..20).map(|n| service(n, &[if n == 13 { 66 } else { n + 1 }]));
    let services = set(plans.clone());
    let interrupted = driver.apply(change(&services, &node, true));
    assert!(interrupted.is_err());
    // Only a new table is filled step by step.
    memory.set_capacity(usize::MAX);
    let applied = driver.apply(change(&services, &node, true)).unwrap();
    let refused: Vec<_> = applied.failures.iter().map(|f| &f.key).collect();
    assert_eq!(refused, [&key(13)]);
    assert_eq!(verify(&mut driver), Verification::Equal);
    drop(driver);
    let expected: Vec<_> = plans.filter(|p| p.key != key(13)).collect();
    assert_eq!(elements_in(&memory), table_with(expected).elements());
}

/// Takes one element away, and nobody reports it.
fn steal(memory: &MemoryKernel) {
    let gone = memory.show(TABLE, |held| held.remove(|at, _| at == 0));
    assert_eq!(gone.len(), 1);
}

#[test]
fn changes_of_others_do_not_matter_but_changes_of_our_table_do() {
    let node = NodePlan::default();
    let memory = MemoryKernel::default();
    let contended = |contended| TableFaults {
        contended,
        ..TableFaults::default()
    };
    on(&memory).apply(change(&set([service(1, &[1])]), &node, true)).unwrap();
    for others in [1, 100] {
        memory.set_faults(TableKind::Services, Family::V4, contended(others));
        let mut driver = on(&memory);
        driver.apply(change(&set([service(1, &[1, 2])]), &node, true)).unwrap();
        driver.apply(change(&set([service(1, &[3])]), &node, false)).unwrap();
        memory.set_faults(TableKind::Services, Family::V4, contended(0));
        assert_eq!(
            elements_in(&memory),
            table_with([service(1, &[3])]).elements()
        );
    }
    steal(&memory);
    let mut driver = on(&memory);
    driver.apply(change(&set([service(1, &[1])]), &node, true)).unwrap();
    assert_eq!(verify(&mut driver), Verification::Equal);
}

#[test]
fn drift_is_found_and_repaired() {
    let node = NodePlan::default();
    let memory = MemoryKernel::default();
    let mut driver = on(&memory);
    let services = set([service(1, &[1]), service(2, &[2])]);
    driver.apply(change(&services, &node, true)).unwrap();
    steal(&memory);
    let Verification::Repaired(what) = verify(&mut driver) else {
        panic!("not noticed");
    };
    assert!(
        what.starts_with("1 elements were missing and 0 were another program"),
        "{what}"
    );
    assert_eq!(verify(&mut driver), Verification::Equal);
}

fn any_plan() -> impl Strategy<Value = ServicePlan> {
    let octets = || prop::collection::vec(1_u8..12, 0..9);
    let affinity = prop::option::of(1_u32..3);
    let options = (
        any::<[bool; 4]>(),
        affinity,
        prop::sample::subsequence(vec!["192.0.2.0/24", "10.0.0.0/8", "10.1.0.0/16"], 0..=3),
    );
    (0_u8..5, 0_u8..5, octets(), octets(), octets(), options).prop_map(
        |(
            n,
            place,
            endpoints,
            inside,
            local,
            ([external, node, short, masquerade], affinity, ranges),
        )| {
            let mut frontends = vec![frontend(cluster_ip(n), &endpoints)];
            if external {
                frontends.push(frontend(load_balancer(place), &endpoints));
                frontends[1].source_ranges = ranges.iter().map(|r| r.parse().unwrap()).collect();
            }
            if node {
                frontends.push(frontend(node_port(place), &endpoints));
            }
            for f in frontends.iter_mut().skip(1) {
                f.masquerade = masquerade;
                f.inside = short.then(|| frontend(f.at, &inside).endpoints);
                if short {
                    f.policy = TrafficPolicy::Local;
                }
            }
            let local = frontend(cluster_ip(n), &local).endpoints;
            ServicePlan {
                local,
                affinity_timeout_s: affinity,
                ..plan(n, frontends)
            }
        },
    )
}

/// Elements without the indices of endpoints, which depend on history.
fn without_indices(elements: &BTreeSet<Element>) -> BTreeSet<String> {
    let text = |element: &Element| match element.key {
        super::super::element::Key::ServiceSlot(at, _) => {
            format!("{:?} {at:?} {:?}", element.set, element.data)
        }
        super::super::element::Key::NodePortSlot(at, _) => {
            format!("{:?} {at:?} {:?}", element.set, element.data)
        }
        _ => format!("{element:?}"),
    };
    elements.iter().map(text).collect()
}

/// A11: clients of a removed endpoint are forgotten, even if the agent was down meanwhile; other clients
/// stay.
#[test]
fn a11_clients_of_a_gone_endpoint_are_forgotten() {
    let sticky = |endpoints: &[u8]| ServicePlan {
        affinity_timeout_s: Some(60),
        ..service(1, endpoints)
    };
    let client = |octet: u8, endpoint| Client {
        ip: IpAddr::from([192, 0, 2, octet]),
        endpoint,
    };
    let whole = |octet, at| client(octet, Remembered::Whole(endpoint(at)));
    let node = NodePlan::default();
    let memory = MemoryKernel::default();
    let mut driver = on(&memory);
    driver.apply(change(&set([sticky(&[1, 2, 3])]), &node, true)).unwrap();
    let id = memory.show(TABLE, |held| held.groups().next().unwrap().id);
    let clients = vec![
        whole(1, 1),
        whole(2, 2),
        whole(3, 3),
        client(4, Remembered::Part(GroupPart::Ports)),
    ];
    memory.show(TABLE, |held| held.clients.insert(id, clients));
    let clients = || memory.show(TABLE, |held| held.clients(id).unwrap());
    driver.apply(change(&set([sticky(&[1, 3, 4])]), &node, false)).unwrap();
    assert_eq!(clients(), [whole(1, 1), whole(3, 3)]);
    // No endpoint was removed, so no clients are read.
    memory.show(TABLE, |held| held.clients.insert(id, vec![whole(1, 9)]));
    driver.apply(change(&set([sticky(&[1, 3, 4, 5])]), &node, false)).unwrap();
    assert_eq!(clients(), [whole(1, 9)]);
    assert_eq!(verify(&mut driver), Verification::Equal);
    assert_eq!(clients(), []);
    drop(driver);
    memory.show(TABLE, |held| {
        held.clients.insert(id, vec![whole(1, 1), whole(3, 3)]);
    });
    let mut driver = on(&memory);
    driver.apply(change(&set([sticky(&[3])]), &node, true)).unwrap();
    assert_eq!(clients(), [whole(3, 3)]);
}

/// A11: another timeout replaces the rules and keeps the clients.
#[test]
fn a11_clients_stay_when_the_timeout_changes() {
    let sticky = |timeout_s| ServicePlan {
        affinity_timeout_s: Some(timeout_s),
        ..service(1, &[1])
    };
    let table = table_with([sticky(60)]);
    let staged = table.stage(change(&set([sticky(90)]), &NodePlan::default(), false));
    let [Ops { groups, .. }] = &staged.groups[..] else {
        panic!("{:?}", staged.groups);
    };
    assert!(matches!(
        groups[..],
        [GroupOp::Rewrite(Group { timeout_s: 90, .. })]
    ));
}

proptest! {
    /// From any state and after any change, the kernel ends up with what the change asks for. That is the
    /// same as from an empty kernel, and a restart in between (adoption) makes no difference.
    #[test]
    fn any_walk_ends_where_a_fresh_start_does(
        steps in prop::collection::vec((prop::collection::vec(any_plan(), 0..4), any::<[bool; 2]>(), 0_u8..5), 1..15),
    ) {
        let node = NodePlan::default();
        let memory = MemoryKernel::default();
        let mut wanted: HashMap<ServiceKey, ServicePlan> = HashMap::new();
        let mut driver = on(&memory);
        driver.apply(change(&Vec::new(), &node, true)).unwrap();
        for (plans, [complete, restart], gone) in steps {
            if complete {
                wanted.clear();
            }
            let mut services: HashMap<ServiceKey, Option<ServicePlan>> = HashMap::new();
            if !complete {
                services.insert(key(gone), None);
                wanted.remove(&key(gone));
            }
            for plan in plans {
                // The control plane gives a frontend to one Service only.
                let taken = |f: &Frontend| wanted.values().any(|w| w.key != plan.key && w.frontends.iter().any(|g| g.at == f.at));
                if !plan.frontends.iter().any(taken) {
                    wanted.insert(plan.key.clone(), plan.clone());
                    services.insert(plan.key.clone(), Some(plan));
                }
            }
            let services: Services = services.into_iter().collect();
            let applied = driver.apply(change(&services, &node, complete)).unwrap();
            prop_assert_eq!(applied.failures, vec![]);
            if restart {
                driver = on(&memory);
                let all = set(wanted.values().cloned());
                let adopted = driver.apply(change(&all, &node, true)).unwrap();
                prop_assert_eq!(adopted.operations, 0);
            }
        }
        drop(driver);
        let fresh = table_with(wanted.into_values());
        prop_assert_eq!(memory.show(TABLE, |held| held.groups().collect::<BTreeSet<_>>()), fresh.groups());
        let fresh = fresh.elements();
        prop_assert_eq!(without_indices(&elements_in(&memory)), without_indices(&fresh));
    }
}

/// Reads everything back.
fn verify(driver: &mut impl Side) -> Verification {
    Verification::of_all(|| driver.verify()).unwrap()
}
