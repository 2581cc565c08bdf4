//! Tests of the scans after a commit, of the decision about stale flows, of the schedule, and of failures.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use kplane_model::{EndpointAddr, Family, KeyParts, Protocol, ServiceKey, ServiceName};
use proptest::prelude::*;

use super::flows::{Filter, MAX_QUESTIONS, Size, selections};
use super::*;
use crate::plan::{Frontend, FrontendAddr, NodePlan, Origin, ServicePlan};
use kplane_netlink::Messages;
use kplane_netlink::conntrack::{Flow, IPS_DST_NAT, IPS_SEEN_REPLY, Selection, Tuple};

const CLUSTER_IP: &str = "10.96.0.1:53";
const LB_IP: &str = "198.51.100.1:53";
const NODE: &str = "172.18.0.2:30053";
const CLIENT: &str = "10.244.1.9:40000";

/// Returns a client's flow, translated if the server is not its first destination.
fn flow(to: &str, server: &str) -> Flow {
    let at = |text: &str| text.parse::<SocketAddr>().unwrap();
    Flow {
        protocol: Protocol::Udp,
        original: Tuple {
            source: at(CLIENT),
            destination: at(to),
        },
        reply: Tuple {
            source: at(server),
            destination: at(CLIENT),
        },
        status: if to == server { 0 } else { IPS_DST_NAT },
        id: Some(1),
        zone: None,
        original_zone: None,
    }
}

fn key(name: &str, protocol: Protocol) -> ServiceKey {
    ServiceKey::from(KeyParts {
        service: ServiceName::new("test", name),
        port_name: "dns".into(),
        protocol,
        family: Family::V4,
    })
}

fn address(text: &str) -> FrontendAddr {
    let at: SocketAddr = text.parse().unwrap();
    FrontendAddr::Address {
        ip: at.ip(),
        protocol: Protocol::Udp,
        port: at.port(),
    }
}

const NODE_PORT: FrontendAddr = FrontendAddr::NodePort {
    protocol: Protocol::Udp,
    port: 30053,
};

fn endpoint(octet: u8) -> EndpointAddr {
    EndpointAddr::new([10, 244, 1, octet], 5353)
}

fn plan(
    name: &str,
    frontends: &[FrontendAddr],
    serving: &[u8],
) -> (ServiceKey, Option<ServicePlan>) {
    let key = key(name, Protocol::Udp);
    let frontend = |at: &FrontendAddr| Frontend {
        at: *at,
        origin: Origin::ClusterIp,
        endpoints: Vec::new(),
        policy: kplane_model::TrafficPolicy::Cluster,
        inside: None,
        masquerade: false,
        unserved: None,
        source_ranges: Vec::new(),
    };
    let plan = ServicePlan {
        frontends: frontends.iter().map(frontend).collect(),
        serving: serving.iter().map(|octet| endpoint(*octet)).collect(),
        ..ServicePlan::sample(key.clone(), IpAddr::from([10, 96, 0, 1]))
    };
    (key, Some(plan))
}

fn gone(name: &str) -> (ServiceKey, Option<ServicePlan>) {
    (key(name, Protocol::Udp), None)
}

struct Case {
    tracker: Tracker,
    node: NodePlan,
}

type Services<'a> = &'a [(ServiceKey, Option<ServicePlan>)];

impl Case {
    /// Returns the state after a first complete commit.
    fn of(services: Services<'_>) -> Self {
        let mut case = Self {
            tracker: Tracker::default(),
            node: NodePlan {
                nodeport_ips: vec!["172.18.0.0/16".parse().unwrap()],
                ..NodePlan::default()
            },
        };
        case.commit(services, true, &[]);
        case
    }

    fn commit(&mut self, services: Services<'_>, complete: bool, failures: &[Failure]) -> Work {
        let change = Change {
            family: Family::V4,
            node: &self.node,
            services,
            complete,
        };
        let work = self.tracker.commit(&change, failures);
        Work {
            came: HashSet::new(),
            ..work
        }
    }

    fn update(&mut self, services: Services<'_>) -> Work {
        self.commit(services, false, &[])
    }

    fn verdict(&self, work: &Work, to: &str, server: &str) -> Verdict {
        self.tracker.verdict(&flow(to, server), work)
    }
}

fn work(frontends: &[FrontendAddr], retired: &[u8]) -> Work {
    Work {
        frontends: frontends.iter().copied().collect(),
        retired: retired.iter().map(|octet| (Protocol::Udp, endpoint(*octet))).collect(),
        ..Work::default()
    }
}

#[test]
fn f1_only_what_stopped_serving_is_work() {
    let mut case = Case::of(&[plan("dns", &[address(CLUSTER_IP)], &[1, 2])]);
    let update = |case: &mut Case, serving: &[u8]| {
        case.update(&[plan("dns", &[address(CLUSTER_IP)], serving)])
    };
    assert!(update(&mut case, &[1, 2]).is_empty());
    assert!(update(&mut case, &[1, 2, 3]).is_empty());
    assert_eq!(update(&mut case, &[2, 4]), work(&[], &[1, 3]));
    assert_eq!(update(&mut case, &[]), work(&[], &[2, 4]));
    assert!(update(&mut case, &[5]).is_empty());
}

#[test]
fn f4_places_that_come_go_and_change_hands_are_work() {
    let both = [address(CLUSTER_IP), address(LB_IP)];
    let mut case = Case::of(&[plan("one", &both[..1], &[1])]);
    let update = case.update(&[plan("one", &both, &[1])]);
    assert_eq!(update, work(&both[1..], &[]));
    let update = case.update(&[plan("one", &both[..1], &[1]), plan("two", &both[1..], &[2])]);
    assert_eq!(update, work(&both[1..], &[]));
    assert_eq!(
        case.verdict(&update, LB_IP, "10.244.1.1:5353"),
        Verdict::Stale
    );
    assert_eq!(
        case.verdict(&update, LB_IP, "10.244.1.2:5353"),
        Verdict::Keep
    );
    // The same changes in the other order.
    let update = case.update(&[plan("one", &both, &[1]), plan("two", &[], &[2])]);
    assert_eq!(update, work(&both[1..], &[]));
    assert_eq!(
        case.verdict(&update, LB_IP, "10.244.1.2:5353"),
        Verdict::Stale
    );
    assert_eq!(case.update(&[gone("one")]), work(&both, &[]));
    assert!(case.update(&[gone("one"), gone("two")]).is_empty());
}

/// Returns a plan of another protocol than UDP with these endpoints.
fn connecting(
    name: &str,
    protocol: Protocol,
    at: &str,
    octets: &[u8],
) -> (ServiceKey, Option<ServicePlan>) {
    let at: SocketAddr = at.parse().unwrap();
    let (ip, port) = (at.ip(), at.port());
    let (_, plan) = plan(name, &[FrontendAddr::Address { ip, protocol, port }], &[]);
    let (mut plan, key) = (plan.unwrap(), key(name, protocol));
    plan.key = key.clone();
    plan.frontends[0].endpoints = octets.iter().map(|octet| endpoint(*octet)).collect();
    (key, Some(plan))
}

fn retired(protocol: Protocol, octets: &[u8]) -> BTreeSet<(Protocol, EndpointAddr)> {
    octets.iter().map(|octet| (protocol, endpoint(*octet))).collect()
}

/// F5: what has a reply stays, whatever happens to its endpoint and its Service; what has none moves.
#[test]
fn f5_connections_without_a_reply_leave_an_endpoint_out_of_service() {
    for protocol in [Protocol::Tcp, Protocol::Sctp] {
        let web = |octets: &[u8]| connecting("web", protocol, CLUSTER_IP, octets);
        let mut case = Case::of(&[web(&[1, 2]), connecting("api", protocol, LB_IP, &[1])]);
        assert!(case.update(&[web(&[1, 2, 3])]).is_empty());
        let work = case.update(&[web(&[2, 3])]);
        assert_eq!(work.retired, retired(protocol, &[1]));
        assert!(work.frontends.is_empty());
        let verdict = |case: &Case, work: &Work, (to, server), status| {
            let flow = Flow {
                protocol,
                status: IPS_DST_NAT | status,
                ..flow(to, server)
            };
            case.tracker.verdict(&flow, work)
        };
        let (gone, stays) = ("10.244.1.1:5353", "10.244.1.2:5353");
        for (ends, status, want) in [
            ((CLUSTER_IP, gone), 0, Verdict::Stale),
            ((CLUSTER_IP, gone), IPS_SEEN_REPLY, Verdict::Keep),
            ((CLUSTER_IP, stays), 0, Verdict::Keep),
            // It still serves another Service.
            ((LB_IP, gone), 0, Verdict::Keep),
            // Another program's translation to the same Pod.
            (("172.18.0.2:8080", gone), 0, Verdict::Keep),
        ] {
            assert_eq!(
                verdict(&case, &work, ends, status),
                want,
                "{ends:?} {status}"
            );
        }
        // Without the news that an endpoint is out of service, nothing is stale.
        let other = Work::default();
        assert_eq!(verdict(&case, &other, (CLUSTER_IP, gone), 0), Verdict::Keep);
        // It is back before the scan.
        case.update(&[web(&[1, 2])]);
        assert_eq!(verdict(&case, &work, (CLUSTER_IP, gone), 0), Verdict::Keep);
        // The Service goes.
        let work = case.update(&[(key("web", protocol), None)]);
        assert_eq!(work.retired, retired(protocol, &[1, 2]));
        assert_eq!(verdict(&case, &work, (CLUSTER_IP, gone), 0), Verdict::Stale);
        assert_eq!(
            verdict(&case, &work, (CLUSTER_IP, gone), IPS_SEEN_REPLY),
            Verdict::Keep
        );
        assert_eq!(verdict(&case, &work, (LB_IP, gone), 0), Verdict::Keep);
        // A UDP flow with the same numbers is another matter.
        assert_eq!(case.verdict(&work, CLUSTER_IP, gone), Verdict::Keep);
    }
}

/// An endpoint at another port of an address is the Pod that was there.
#[test]
fn an_address_comes_when_a_service_port_had_none_of_its_endpoints() {
    let web = |ends: &[(u8, u16)]| {
        let (key, mut plan) = connecting("web", Protocol::Tcp, CLUSTER_IP, &[]);
        let ends = ends.iter().map(|(octet, port)| EndpointAddr {
            port: *port,
            ..endpoint(*octet)
        });
        plan.as_mut().unwrap().frontends[0].endpoints = ends.collect();
        [(key, plan)]
    };
    let mut case = Case::of(&web(&[(1, 80), (2, 80)]));
    for (ends, came) in [
        (&[(1, 81), (2, 80)][..], &[][..]),
        (&[(1, 81), (1, 80), (3, 1)], &[3]),
        (&[(2, u16::MAX), (3, 1)], &[2]),
    ] {
        let change = Change {
            family: Family::V4,
            node: &case.node,
            services: &web(ends),
            complete: false,
        };
        let came: HashSet<_> = came.iter().map(|octet| endpoint(*octet).ip).collect();
        assert_eq!(case.tracker.commit(&change, &[]).came, came, "{ends:?}");
    }
}

/// What the endpoint has answered ends as well, if it is dead now, and nothing else does.
#[test]
fn connections_to_dead_endpoints_end() {
    for protocol in [Protocol::Tcp, Protocol::Sctp] {
        let web = |octets: &[u8], dead: &[u8]| {
            let (key, mut plan) = connecting("web", protocol, CLUSTER_IP, octets);
            plan.as_mut().unwrap().dead = dead.iter().map(|octet| endpoint(*octet)).collect();
            (key, plan)
        };
        let api = connecting("api", protocol, LB_IP, &[1, 2]);
        let (dead, living) = ("10.244.1.1:5353", "10.244.1.2:5353");
        let flow = |(to, server)| Flow {
            protocol,
            status: IPS_DST_NAT | IPS_SEEN_REPLY,
            ..flow(to, server)
        };
        let ends = |case: &Case, work: &Work, ends| {
            assert_eq!(
                case.tracker.verdict(&flow(ends), &Work::default()),
                Verdict::Keep
            );
            case.tracker.verdict(&flow(ends), work) == Verdict::Stale
        };
        let mut case = Case::of(&[web(&[1, 2], &[]), api]);
        // As long as a place leads to it, a new connection would reach it again.
        assert!(case.update(&[web(&[1, 2], &[1])]).dead.is_empty());
        case.update(&[web(&[2], &[])]);
        let work = case.update(&[web(&[2], &[1])]);
        assert_eq!(work.dead, retired(protocol, &[1]));
        assert!(work.retired.is_empty());
        assert!(ends(&case, &work, (CLUSTER_IP, dead)));
        assert!(!ends(&case, &work, (CLUSTER_IP, living)));
        // It serves another Service, which knows nothing of its death.
        assert!(!ends(&case, &work, (LB_IP, dead)));
        // Once only.
        assert!(case.update(&[web(&[2, 3], &[1])]).dead.is_empty());
        assert!(case.commit(&[web(&[2, 3], &[1])], true, &[]).dead.is_empty());
        // The node was reached again before the scan, whether the endpoint is ready or not.
        for octets in [&[2][..], &[1, 2]] {
            case.update(&[web(octets, &[])]);
            assert!(!ends(&case, &work, (CLUSTER_IP, dead)));
        }
        // Who starts with such news does not know how old they are.
        assert!(Case::of(&[]).update(&[web(&[2], &[1])]).dead.is_empty());
    }
    let (key, mut udp) = plan("dns", &[address(CLUSTER_IP)], &[1]);
    udp.as_mut().unwrap().dead = vec![endpoint(2)];
    let mut case = Case::of(&[plan("dns", &[address(CLUSTER_IP)], &[1, 2])]);
    assert!(case.update(&[(key, udp)]).dead.is_empty());
}

/// A local list may have endpoints that the cluster's has not.
#[test]
fn an_endpoint_is_out_of_service_if_no_place_has_it() {
    let web = |outside: &[u8], inside: &[u8]| {
        let (key, mut plan) = connecting("web", Protocol::Tcp, CLUSTER_IP, outside);
        let inside = inside.iter().map(|octet| endpoint(*octet)).collect();
        plan.as_mut().unwrap().frontends[0].inside = Some(inside);
        (key, plan)
    };
    let mut case = Case::of(&[web(&[1], &[1, 2])]);
    assert!(case.update(&[web(&[2], &[1, 2])]).is_empty());
    assert_eq!(
        case.update(&[web(&[2], &[2])]).retired,
        retired(Protocol::Tcp, &[1])
    );
}

#[test]
fn a_complete_change_is_about_everything() {
    let one = plan("one", &[address(CLUSTER_IP)], &[1]);
    let two = plan("two", &[address(LB_IP)], &[1]);
    let mut case = Case::of(&[one.clone(), two]);
    let everything = case.commit(&[one], true, &[]);
    assert!(everything.everything && everything.retired.is_empty());
    // A frontend that is gone is still named.
    assert_eq!(everything.frontends, [address(LB_IP)].into());
    assert_eq!(
        case.verdict(&everything, LB_IP, "10.244.1.1:5353"),
        Verdict::Stale
    );
    let nothing_left = case.commit(&[], true, &[]);
    assert!(nothing_left.everything);
    assert!(
        case.commit(&[], true, &[]).is_empty(),
        "no UDP Service at all"
    );
}

/// The owner of each place, by number, and the endpoints that serve each ServicePort.
type Owners = ([Option<usize>; 4], [Vec<u8>; 3]);

fn any_owners() -> impl Strategy<Value = Owners> {
    let owner = || prop_oneof![1 => Just(None), 3 => (0_usize..3).prop_map(Some)];
    let serving = || prop::sample::subsequence(vec![1, 2, 3], 0..=3);
    (
        prop::array::uniform4(owner()),
        prop::array::uniform3(serving()),
    )
}

const SERVICES: [&str; 3] = ["a", "b", "c"];
/// Where clients send packets to each place.
const PLACES: [&str; 4] = [CLUSTER_IP, LB_IP, "198.51.100.2:53", NODE];

/// Returns the ServicePorts with a place, and `None` for the others.
fn planned((owners, serving): &Owners) -> Vec<(ServiceKey, Option<ServicePlan>)> {
    let places = PLACES.map(|at| if at == NODE { NODE_PORT } else { address(at) });
    let of = |number: usize| {
        let is_own = |at: usize| owners[at] == Some(number);
        let own: Vec<_> = (0..places.len()).filter(|at| is_own(*at)).map(|at| places[at]).collect();
        let name = SERVICES[number];
        if own.is_empty() { gone(name) } else { plan(name, &own, &serving[number]) }
    };
    (0..SERVICES.len()).map(of).collect()
}

proptest! {
    /// Whatever places and endpoints went through, and in whatever order a change names ServicePorts, flows are scanned for
    /// that become stale, and the same flows are stale as after a start with everything.
    #[test]
    fn f1_f4_what_becomes_stale_is_work_whatever_was_before(
        history in prop::collection::vec((any_owners(), any::<u8>(), prop::bool::weighted(0.1)), 1..8),
    ) {
        let mut case = Case::of(&[]);
        let mut before: Owners = Default::default();
        for (owners, turn, complete) in history {
            let mut changes = planned(&owners);
            let held: BTreeMap<_, _> = planned(&before).into_iter().collect();
            changes.retain(|(key, plan)| complete || held[key] != *plan);
            changes.retain(|(_, plan)| !complete || plan.is_some());
            let count = changes.len().max(1);
            changes.rotate_left(usize::from(turn) % count);
            if turn >= 128 {
                changes.reverse();
            }
            let work = case.commit(&changes, complete, &[]);
            let fresh = Case::of(&planned(&owners));
            for (place, to) in PLACES.into_iter().enumerate() {
                for octet in 1..4 {
                    let leads = |(owners, serving): &Owners| {
                        owners[place].is_some_and(|owner| serving[owner].contains(&octet))
                    };
                    let server = endpoint(octet);
                    let from = format!("{}:{}", server.ip, server.port);
                    let verdict = case.verdict(&work, to, &from);
                    let is_stale = leads(&before) && !leads(&owners);
                    prop_assert!(!is_stale || verdict != Verdict::Keep, "{to} {from} is kept");
                    prop_assert!(!leads(&owners) || verdict == Verdict::Keep, "{to} {from} is {verdict:?}");
                    let at = if to == NODE { NODE_PORT } else { address(to) };
                    let is_sought = work.everything || work.frontends.contains(&at) || work.retired.contains(&(Protocol::Udp, server));
                    prop_assert!(!is_stale || is_sought, "{to} {from} is in no {work:?}");
                    let none = Work::default();
                    prop_assert_eq!(case.verdict(&none, to, &from), fresh.verdict(&none, to, &from));
                }
            }
            before = owners;
        }
    }
}

/// The kernel still does for a failed ServicePort what it did before.
#[test]
fn what_failed_stays_as_it_was() {
    let mut case = Case::of(&[plan("dns", &[address(CLUSTER_IP)], &[1])]);
    let failure = |degraded| Failure {
        key: key("dns", Protocol::Udp),
        reason: "too many".to_owned(),
        degraded,
    };
    let next = [plan("dns", &[address(CLUSTER_IP)], &[2])];
    assert!(case.commit(&next, false, &[failure(false)]).is_empty());
    let complete = case.commit(&[], true, &[failure(false)]);
    assert_eq!(
        case.verdict(&complete, CLUSTER_IP, "10.244.1.1:5353"),
        Verdict::Keep
    );
    assert_eq!(case.commit(&next, false, &[failure(true)]), work(&[], &[1]));
}

/// The kernel may also do for a failed ServicePort what the change wanted: the answer to an earlier one was lost.
#[test]
fn what_failed_may_serve_all_the_same() {
    let mut case = Case::of(&[plan("dns", &[address(CLUSTER_IP)], &[1])]);
    let work = case.update(&[gone("dns")]);
    let to_it = |case: &Case, work| case.verdict(work, CLUSTER_IP, "10.244.1.1:5353");
    assert_eq!(to_it(&case, &work), Verdict::Stale);
    let failure = Failure {
        key: key("dns", Protocol::Udp),
        reason: "too many".to_owned(),
        degraded: false,
    };
    let again = [plan("dns", &[address(CLUSTER_IP)], &[1])];
    case.commit(&again, true, &[failure]);
    assert_eq!(to_it(&case, &work), Verdict::Keep);
    case.commit(&[], true, &[]);
    assert_eq!(to_it(&case, &work), Verdict::Stale);
}

#[test]
fn node_ports_on_other_addresses_are_work_for_all() {
    let mut case = Case::of(&[plan("dns", &[NODE_PORT], &[1])]);
    assert!(case.update(&[]).is_empty());
    case.node.nodeport_ips = vec!["172.19.0.0/16".parse().unwrap()];
    assert!(case.update(&[]).everything);
    let mut case = Case::of(&[plan("dns", &[address(CLUSTER_IP)], &[1])]);
    case.node.nodeport_ips.clear();
    assert!(case.update(&[]).is_empty());
}

/// F2, F3, F4: stale flows, by destination and the source of replies.
#[test]
fn f2_f3_f4_verdicts() {
    let frontends = [address(CLUSTER_IP), NODE_PORT];
    let mut case = Case::of(&[
        plan("dns", &frontends, &[1]),
        plan("empty", &[address(LB_IP)], &[]),
    ]);
    let cases = [
        (CLUSTER_IP, "10.244.1.1:5353", Verdict::Keep),
        (CLUSTER_IP, "10.244.1.2:5353", Verdict::Stale),
        // The port counts too.
        (CLUSTER_IP, "10.244.1.1:53", Verdict::Stale),
        // F3: a flow from before the rules.
        (CLUSTER_IP, CLUSTER_IP, Verdict::Stale),
        // F4: no endpoint serves.
        (LB_IP, "10.244.1.1:5353", Verdict::Stale),
        (NODE, "10.244.1.1:5353", Verdict::Keep),
        (NODE, "10.244.1.2:5353", Verdict::StaleIfLocal),
        (NODE, NODE, Verdict::StaleIfLocal),
        // Node ports are not served on this address, so the port number alone means nothing.
        ("172.19.0.1:30053", "172.19.0.1:30053", Verdict::Keep),
        ("127.0.0.1:30053", "127.0.0.1:30053", Verdict::Keep),
        // Another port of a Service's address, a pod, the outside.
        ("10.96.0.1:54", "10.96.0.1:54", Verdict::Keep),
        ("10.244.1.2:5353", "10.244.1.2:5353", Verdict::Keep),
        ("8.8.8.8:53", "8.8.8.8:53", Verdict::Keep),
    ];
    for (to, server, want) in cases {
        assert_eq!(
            case.verdict(&Work::default(), to, server),
            want,
            "{to} {server}"
        );
    }
    let gone = case.update(&[gone("dns")]);
    let cases = [
        (CLUSTER_IP, "10.244.1.1:5353", Verdict::Stale),
        (NODE, "10.244.1.1:5353", Verdict::StaleIfLocal),
        // Where no Service is any more, an untranslated flow belongs to another program.
        (CLUSTER_IP, CLUSTER_IP, Verdict::Keep),
        (NODE, NODE, Verdict::Keep),
    ];
    for (to, server, want) in cases {
        assert_eq!(case.verdict(&gone, to, server), want, "gone: {to} {server}");
    }
}

/// Flows in the zone of a virtual switch have not met kplane's rules.
#[test]
fn zones_of_switches_are_left_alone() {
    let case = Case::of(&[plan("dns", &[address(CLUSTER_IP)], &[1])]);
    let verdict = |server| {
        let flow = Flow {
            zone: Some(7),
            ..flow(CLUSTER_IP, server)
        };
        case.tracker.verdict(&flow, &Work::default())
    };
    assert_eq!(verdict(CLUSTER_IP), Verdict::Keep);
    assert_eq!(verdict("10.244.1.2:5353"), Verdict::Stale);
}

#[test]
fn few_questions_are_asked_one_by_one_and_many_at_once() {
    let most = u8::try_from(MAX_QUESTIONS).unwrap();
    let asked = |frontends: &[FrontendAddr], retired, filter| {
        let retired: Vec<u8> = (1..=retired).collect();
        selections(&work(frontends, &retired), filter, None)
    };
    let udp = |port| Some((Protocol::Udp, Some(port)));
    let to = Selection::To(Some([10, 96, 0, 1].into()), udp(53));
    let to_port = Selection::To(None, udp(30053));
    let from = Selection::RepliesFrom([10, 244, 1, 1].into(), udp(5353));
    for (frontends, retired, filter, expected) in [
        (&[address(CLUSTER_IP)][..], 0, Filter::Both, to),
        (&[address(CLUSTER_IP)], 0, Filter::Destinations, to),
        (&[address(CLUSTER_IP)], 0, Filter::Nothing, Selection::UDP),
        (&[], 1, Filter::Both, from),
        (&[], 1, Filter::Destinations, Selection::UDP),
        (&[NODE_PORT], 0, Filter::Both, to_port),
        (&[], most + 1, Filter::Both, Selection::UDP),
    ] {
        assert_eq!(asked(frontends, retired, filter), [expected]);
    }
    assert_eq!(asked(&[], most, Filter::Both).len(), MAX_QUESTIONS);
    let half_open = |octets: &[u8], filter| {
        let work = Work {
            retired: retired(Protocol::Tcp, octets),
            // A place of TCP is no question: its endpoints are.
            frontends: [FrontendAddr::NodePort {
                protocol: Protocol::Tcp,
                port: 30080,
            }]
            .into(),
            ..Work::default()
        };
        selections(&work, filter, None)
    };
    let tcp = Some((Protocol::Tcp, Some(5353)));
    let from = Selection::RepliesFrom([10, 244, 1, 1].into(), tcp);
    assert_eq!(half_open(&[1], Filter::Both), [from]);
    let all = [Selection::all_of(Protocol::Tcp)];
    assert_eq!(half_open(&[1], Filter::Destinations), all);
    assert_eq!(half_open(&[1, 2, 3, 4], Filter::Both), all);
}

/// A scan costs what the kernel walks and what it hands over: two walks of an empty table cost twice the time.
#[test]
fn f1_questions_are_as_many_as_cost_less_than_one_list() {
    let asked = |retired, entries| {
        let retired: Vec<u8> = (1..=retired).collect();
        let size = Size {
            buckets: 262_144,
            entries,
        };
        selections(&work(&[], &retired), Filter::Both, Some(size))
    };
    assert_ne!(asked(1, 0), [Selection::UDP]);
    assert_eq!(asked(2, 1_000), [Selection::UDP]);
    assert_eq!(asked(10, 250_000).len(), 10);
    assert_eq!(asked(50, 250_000), [Selection::UDP]);
}

/// The list of all flows, which policies may need, shows the flows of Services too. Few addresses are asked for one by one.
#[test]
fn np13_one_list_serves_services_and_policies() {
    let lists = |everything, retired: &[u8], judged, filter| {
        let work = Work {
            everything,
            judged: (1..=judged).map(|octet| endpoint(octet).ip).collect(),
            ..work(&[], retired)
        };
        let selections = selections(&work, filter, None);
        (selections.contains(&Selection::Any), selections.len())
    };
    for (filter, most) in [(Filter::Both, 2), (Filter::Nothing, 1)] {
        assert_eq!(lists(false, &[], 2, filter), (true, 1));
        assert_eq!(lists(true, &[], 2, filter), (true, 1));
        assert_eq!(lists(false, &[1], 2, filter), (true, most));
    }
    assert_eq!(lists(false, &[1], 1, Filter::Both), (false, 3));
    assert_eq!(lists(true, &[], 1, Filter::Both), (false, 3));
}

mod schedule {
    use super::super::schedule::{Budget, Schedule};
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn retired(octet: u8) -> Work {
        work(&[], &[octet])
    }

    /// Takes the work that is due, and finishes it.
    fn look(schedule: &mut Schedule, now: Instant) -> Work {
        let job = schedule.take(now);
        let work = job.work.clone();
        schedule.done(job, now);
        work
    }

    #[test]
    fn everything_is_looked_at_at_once_and_a_second_later() {
        let mut schedule = Schedule::default();
        let start = Instant::now();
        assert_eq!(schedule.due(start), None);
        schedule.add(retired(1), start);
        assert_eq!(look(&mut schedule, start), retired(1));
        let second = schedule.due(start).unwrap();
        assert!(second >= start + 500 * MS && second <= start + 2_000 * MS);
        assert!(look(&mut schedule, second - MS).is_empty());
        assert_eq!(look(&mut schedule, second), retired(1));
        assert_eq!(schedule.due(second), None);
    }

    /// Changes that go on and on neither delay the second scan nor bring it forward, for Services and for policies.
    #[test]
    fn second_looks_keep_their_distance_under_load() {
        let mut schedule = Schedule::default();
        let start = Instant::now();
        let mut first = vec![None; 200];
        let mut second = vec![None; 200];
        for step in 0_u32..300 {
            let now = start + step * 20 * MS;
            if let Some(octet) = u8::try_from(step).ok().filter(|n| *n < 200) {
                schedule.add(
                    Work {
                        judged: [endpoint(octet).ip].into(),
                        ..retired(octet)
                    },
                    now,
                );
            }
            let looked = look(&mut schedule, now);
            for (_, at) in looked.retired {
                let IpAddr::V4(ip) = at.ip else { continue };
                assert!(looked.judged.contains(&at.ip));
                let n = usize::from(ip.octets()[3]);
                let slot = if first[n].is_none() { &mut first[n] } else { &mut second[n] };
                assert!(slot.replace(now).is_none(), "{n} looked at three times");
            }
        }
        for (n, (first, second)) in first.into_iter().zip(second).enumerate() {
            let distance = second.unwrap() - first.unwrap();
            assert!(
                distance >= 1_000 * MS && distance <= 2_100 * MS,
                "{n}: {distance:?}"
            );
        }
        assert_eq!(schedule.due(start), None);
    }

    /// Ten changes a second whose scans take 9 ms of processor time each, as with an empty table of the usual size.
    #[test]
    fn f1_changes_that_follow_each_other_do_not_wait() {
        let (mut budget, mut now) = (Budget::default(), Instant::now());
        for _ in 0..1_000 {
            assert_eq!(budget.next_at(now), now);
            budget.spend(now + 9 * MS, 9 * MS);
            now += 100 * MS;
        }
    }

    /// Scans that cost more than their share: at once after a quiet time, then at a tenth of a processor.
    #[test]
    fn f1_a_burst_of_scans_is_paid_for_later() {
        let start = Instant::now();
        let (mut budget, mut now, mut scans) = (Budget::default(), start, 0);
        while now < start + 60_000 * MS {
            now = budget.next_at(now);
            if scans < 40 {
                assert!(
                    now <= start + scans * 20 * MS,
                    "scan {scans} of the burst waited"
                );
            }
            now += 20 * MS;
            budget.spend(now, 20 * MS);
            scans += 1;
        }
        let most = (60_000 + 10_000) / 200 + 1;
        assert!(
            (most - 5..=most).contains(&scans),
            "{scans} scans in a minute"
        );
    }

    /// However expensive scans are, clients do not wait for longer than 200 ms for the next one.
    #[test]
    fn f1_the_longest_rest_is_short() {
        let (mut budget, mut now) = (Budget::default(), Instant::now());
        for _ in 0..100 {
            now += 1_000 * MS;
            budget.spend(now, 1_000 * MS);
            assert!(budget.next_at(now) <= now + 200 * MS);
            now = budget.next_at(now);
        }
        assert_eq!(budget.next_at(now + 200 * MS), now + 200 * MS);
    }

    fn half_open(octets: &[u8]) -> Work {
        Work {
            retired: super::retired(Protocol::Tcp, octets),
            ..Work::default()
        }
    }

    /// A reply may be on its way.
    #[test]
    fn connections_without_a_reply_are_looked_at_a_second_later_only() {
        let mut schedule = Schedule::default();
        let start = Instant::now();
        assert!(schedule.add(half_open(&[1]), start));
        assert!(look(&mut schedule, start).is_empty());
        let due = schedule.due(start).unwrap();
        assert!(due >= start + 1_000 * MS && due <= start + 2_000 * MS);
        // Another change does not bring it forward.
        schedule.add(retired(2), start + 500 * MS);
        assert_eq!(look(&mut schedule, start + 500 * MS), retired(2));
        assert_eq!(
            look(&mut schedule, due).retired,
            super::retired(Protocol::Tcp, &[1])
        );
        assert_eq!(look(&mut schedule, due + 1_000 * MS), retired(2));
        assert_eq!(schedule.due(due), None);
    }

    /// Who has answered since the first scan is not dead.
    #[test]
    fn connections_to_dead_endpoints_are_looked_at_once() {
        let dead = || Work {
            dead: super::retired(Protocol::Tcp, &[1]),
            ..Work::default()
        };
        let mut schedule = Schedule::default();
        let start = Instant::now();
        assert!(schedule.add(dead(), start));
        let job = schedule.take(start);
        assert_eq!(job.work, dead());
        let wait = schedule.failed(job, start);
        assert_eq!(look(&mut schedule, start + wait), dead());
        assert_eq!(schedule.due(start), None);
    }

    /// No reply comes from a Pod whose address is another's.
    #[test]
    fn connections_to_an_address_that_came_back_are_looked_at_at_once() {
        let came = |octet| Work {
            came: [endpoint(octet).ip].into(),
            ..Work::default()
        };
        let mut schedule = Schedule::default();
        let start = Instant::now();
        schedule.add(half_open(&[1, 2]), start);
        schedule.add(half_open(&[3]), start + MS);
        schedule.add(came(9), start + 2 * MS);
        assert!(look(&mut schedule, start + 2 * MS).is_empty());
        for octet in [1, 3] {
            assert!(schedule.add(came(octet), start + 3 * MS));
            assert_eq!(look(&mut schedule, start + 3 * MS), half_open(&[octet]));
        }
        // In one change.
        let moved = Work {
            came: [endpoint(4).ip].into(),
            ..half_open(&[4])
        };
        schedule.add(moved, start + 4 * MS);
        assert_eq!(look(&mut schedule, start + 4 * MS), half_open(&[4]));
    }

    #[test]
    fn a_failed_look_is_tried_again_later_and_later() {
        let mut schedule = Schedule::default();
        let mut now = Instant::now();
        let mut longest = Duration::ZERO;
        schedule.add(retired(1), now);
        for _ in 0..20 {
            let job = schedule.take(now);
            let wait = schedule.failed(job, now);
            longest = longest.max(wait);
            schedule.add(retired(2), now);
            assert!(schedule.take(now + wait - MS).work.is_empty());
            now = schedule.due(now).unwrap();
        }
        assert!(longest > Duration::from_secs(10) && longest <= Duration::from_secs(30));
        assert_eq!(look(&mut schedule, now), work(&[], &[1, 2]));
        assert!(schedule.due(now).is_some(), "the second look");
    }
}

#[test]
fn work_is_bounded() {
    let mut sum = Work::default();
    let at = |port| (0..4).map(move |ip| SocketAddr::from(([10, 96, 0, ip], port)));
    let places = (0..=u16::MAX).flat_map(at);
    sum.frontends.extend(places.map(|at| address(&at.to_string())));
    sum.merge(work(&[], &[1]));
    assert!(sum.everything && sum.retired.is_empty());
    assert!(sum.frontends.len() <= 1 << 17);
}

#[test]
fn durations_fall_into_kube_proxys_buckets() {
    let bounds: Vec<_> = (0..BUCKETS).map(bucket_bound).collect();
    assert_eq!(bounds[0], Some(Duration::from_millis(1)));
    assert_eq!(bounds[14], Some(Duration::from_millis(16_384)));
    assert_eq!(bounds[15], None);
    let mut totals = ConntrackTotals::default();
    for (ms, failed) in [(1, false), (2, false), (3, true), (100_000, false)] {
        let error = failed.then(|| "no".to_owned());
        totals.count(ms, error, Duration::from_millis(ms));
    }
    assert_eq!(totals.durations[..4], [1, 1, 1, 0]);
    assert_eq!((totals.durations[15], totals.failures), (1, 1));
    assert_eq!((totals.deleted, totals.looks()), (100_006, 4));
    assert_eq!(totals.problem, None, "the last scan succeeded");
    for error in ["one", "two"] {
        totals.count(0, Some(error.to_owned()), Duration::ZERO);
    }
    let problem = totals.problem.unwrap();
    assert_eq!((&*problem.reason, problem.times), ("two", 2));
}

/// A failure loses nothing: what was due is due again, and flows that were to be cut are judged again.
#[test]
fn np13_a_pass_that_fails_is_repeated() {
    let (mut state, now) = (FamilyState::default(), Instant::now());
    let mut due = Work {
        judged: [endpoint(1).ip].into(),
        ..work(&[address(CLUSTER_IP)], &[1])
    };
    state.schedule.add(due.clone(), now);
    let job = state.schedule.take(now);
    state.denied.push(pinged());
    assert_eq!(state.due(now, now + IDLE), Some(now), "cuts do not wait");
    state.finish(Family::V4, job, Err(SweepError::NoEnd), now);
    let retry = state.due(now, now).unwrap();
    assert!(state.denied.is_empty() && retry > now);
    due.judged.extend([2, 3].map(|octet| endpoint(octet).ip));
    assert_eq!(state.schedule.take(retry).work, due);
}

/// A flow of pings from one Pod to another.
fn pinged() -> AnyFlow {
    let icmp = [
        68, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, // an entry of IPv4
        24, 0, 1, 0, 20, 0, 1, 0, 8, 0, 1, 0, 10, 244, 1, 2, 8, 0, 2, 0, 10, 244, 1,
        3, // from, to
        24, 0, 2, 0, 20, 0, 1, 0, 8, 0, 1, 0, 10, 244, 1, 3, 8, 0, 2, 0, 10, 244, 1,
        2, // replies
    ];
    AnyFlow::parse(Messages(&icmp).next().unwrap()).unwrap()
}

/// A sweeper without a thread, and the calls that a thread would get.
pub(crate) fn idle() -> (Sweeper, Receiver<()>) {
    let (wake, woken) = sync_channel(1);
    let families = Arc::default();
    (Sweeper { families, wake }, woken)
}

impl Sweeper {
    /// Takes the addresses of a family whose flows are to be judged.
    pub(crate) fn take_judged(&self, family: Family) -> HashSet<IpAddr> {
        let mut state = self.families[family as usize].lock();
        std::mem::take(&mut state.schedule).take(Instant::now()).work.judged
    }
}

/// The thread is woken for all that is due at once, and for nothing else.
#[test]
fn what_is_due_wakes_the_thread() {
    let commit = |sweeper: &Sweeper, services: Services<'_>| {
        let change = Change {
            family: Family::V4,
            node: &NodePlan::default(),
            services,
            complete: false,
        };
        sweeper.committed(&change, &[]);
    };
    let calls: [&dyn Fn(&Sweeper); 7] = [
        &|sweeper| commit(sweeper, &[plan("dns", &[address(CLUSTER_IP)], &[1])]),
        &|sweeper| commit(sweeper, &[(key("web", Protocol::Tcp), None)]),
        &|sweeper| sweeper.doubt(Family::V6),
        &|sweeper| sweeper.judge(Family::V4, [endpoint(1).ip].into()),
        &|sweeper| sweeper.judge(Family::V4, HashSet::new()),
        &|sweeper| sweeper.cut(Family::V6, vec![pinged()]),
        &|sweeper| sweeper.cut(Family::V4, Vec::new()),
    ];
    for (number, call) in calls.into_iter().enumerate() {
        let (sweeper, woken) = idle();
        call(&sweeper);
        let now = Instant::now();
        let mut due = sweeper.families.iter().filter_map(|family| family.lock().due(now, now));
        assert_eq!(
            woken.try_recv().is_ok(),
            due.any(|due| due <= now),
            "call {number}"
        );
    }
}

/// The thread ends with its handles. Without privilege or work, it asks the kernel nothing.
#[test]
fn the_thread_ends_with_its_handles() {
    let (counts, (held, ended)) = (ConntrackCounts::default(), std::sync::mpsc::channel());
    let hand = Box::new(move |flows| held.send(flows).unwrap());
    let sweeper = Sweeper::start(counts.clone(), hand).unwrap();
    let node = NodePlan::default();
    let change = Change {
        family: Family::V6,
        node: &node,
        services: &[],
        complete: true,
    };
    sweeper.clone().committed(&change, &[]);
    sweeper.judge(Family::V6, HashSet::new());
    drop(sweeper);
    assert!(ended.recv().is_err());
    assert_eq!(counts.totals(), <[ConntrackTotals; 2]>::default());
}
