//! Events for given snapshots.

use std::sync::LazyLock;
use std::time::{Duration, Instant, SystemTime};

use kplane_model::{ObjectRef, ServiceName, Severity};
use kplane_proto::v1 as pb;

use super::announce::Announcer;
use super::limits::Queue;
use super::*;

const MINUTE: u64 = 60;

fn at(seconds: u64) -> Instant {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    *START + Duration::from_secs(seconds)
}

fn issue(kind: &str, name: &str, severity: Severity, reason: &str) -> Issue {
    Issue {
        severity,
        code: kplane_model::Reason::InvalidField,
        location: String::new(),
        object: ObjectRef::new(kind, "shop", name),
        reason: reason.into(),
    }
}

fn failure(name: &str, reason: &str, degraded: bool) -> pb::ObjectFailure {
    pb::ObjectFailure {
        key: Some(pb::ServiceKey {
            namespace: "shop".into(),
            name: name.into(),
            ..pb::ServiceKey::default()
        }),
        reason: reason.into(),
        degraded,
        ..pb::ObjectFailure::default()
    }
}

fn agent() -> AgentRecord {
    AgentRecord {
        connected: true,
        since: at(0),
        last_heard: at(0),
        sign: tokio::time::Instant::now(),
        beats: false,
        instance: 1,
        began_empty: false,
        peer: String::new(),
        version: "0.1.0".into(),
        backend: "nftables".into(),
        backend_deprecation: String::new(),
        mode_unset: false,
        report: Some(Arc::default()),
        clocks: None,
        applied_at: at(0),
        verified_at: at(0),
        competing_agent: None,
        latencies: crate::fleet::Latencies::default(),
        measured_to: 0,
    }
}

/// An announcer, and the snapshot that it gets.
struct Rig {
    announcer: Announcer,
    snapshot: Snapshot,
}

impl Rig {
    /// Creates a snapshot with agents on these nodes.
    fn new(nodes: &[&str]) -> Self {
        let mut rig = Self {
            announcer: Announcer::new(true),
            snapshot: Snapshot::default(),
        };
        for name in nodes {
            let node = NodeSnapshot {
                suspected: None,
                known: true,
                agent: Some(Arc::new(agent())),
            };
            rig.snapshot.nodes.insert((*name).into(), node);
        }
        rig
    }

    fn issues(&mut self, issues: &[Issue]) {
        self.snapshot.issues = Arc::new(issues.to_vec());
    }

    fn agent(&mut self, node: &str) -> &mut AgentRecord {
        let node = self.snapshot.nodes.get_mut(node).unwrap();
        Arc::make_mut(node.agent.as_mut().unwrap())
    }

    fn report(&mut self, node: &str) -> &mut pb::Report {
        Arc::make_mut(self.agent(node).report.as_mut().unwrap())
    }

    fn fails(&mut self, node: &str, failures: &[pb::ObjectFailure]) {
        self.report(node).failures = failures.to_vec();
    }

    /// Returns the events at this time in seconds, as `Warning Reason kind name: note`.
    fn step(&mut self, seconds: u64) -> Vec<String> {
        let events = self.announcer.step(&self.snapshot, at(seconds));
        let text = |event: &Event| {
            let severity = if event.reason.is_warning() { "Warning" } else { "Normal" };
            let Event {
                object,
                reason,
                note,
                ..
            } = event;
            let (reason, kind, name) = (reason.as_str(), object.kind, &object.name);
            format!("{severity} {reason} {kind} {name}: {note}")
        };
        events.iter().map(text).collect()
    }
}

const NOTHING: [&str; 0] = [];

#[test]
fn j1_an_agent_that_begins_is_announced_once_for_each_start() {
    let mut rig = Rig::new(&["n1"]);
    // The start of an agent that was there before the control plane is not announced.
    assert_eq!(rig.step(0), NOTHING);
    rig.agent("n1").instance = 2;
    rig.agent("n1").began_empty = true;
    let starting = ["Normal Starting Node n1: kplane agent 0.1.0 with nftables"];
    assert_eq!(rig.step(5), starting);
    assert_eq!(rig.step(10), NOTHING);
    // The same process reconnects and holds nothing.
    rig.agent("n1").since = at(12);
    assert_eq!(rig.step(15), NOTHING);
    rig.agent("n1").instance = 3;
    assert_eq!(rig.step(20), starting);
}

#[test]
fn d1_mode_ipvs_is_announced_as_deprecated() {
    let mut rig = Rig::new(&["n1"]);
    rig.agent("n1").backend_deprecation = "mode ipvs is deprecated".into();
    rig.agent("n1").began_empty = true;
    rig.agent("n1").instance = 2;
    let events = rig.step(5);
    assert_eq!(events.len(), 2);
    assert!(events[1].starts_with("Warning IPVSDeprecation Node n1: mode ipvs"));
    assert_eq!(rig.step(10), NOTHING);
}

#[test]
fn k21_a_mode_that_nobody_chose_is_announced() {
    let mut rig = Rig::new(&["n1"]);
    rig.agent("n1").mode_unset = true;
    rig.agent("n1").began_empty = true;
    rig.agent("n1").instance = 2;
    let events = rig.step(5);
    assert_eq!(events.len(), 2);
    let begin = "Warning KubeProxyDefaultMode Node n1: kube-proxy's file names no mode, so kplane uses nftables";
    assert!(events[1].starts_with(begin), "{events:?}");
    assert_eq!(rig.step(10), NOTHING);
}

#[test]
fn refused_input_is_announced_by_problem_and_its_end_by_object() {
    let mut rig = Rig::new(&[]);
    let conflict = "address 203.0.113.1:80/TCP belongs to shop/old";
    let issues = [
        issue("Service", "web", Severity::Error, "port 99999 is none"),
        Issue {
            code: kplane_model::Reason::AddressConflict,
            ..issue("Service", "web", Severity::Error, conflict)
        },
        issue("Service", "api", Severity::Warning, "served all the same"),
        issue("EndpointSlice", "web-1", Severity::Error, "no such type"),
        issue("Gateway", "x", Severity::Error, "not a kind of ours"),
    ];
    rig.issues(&issues);
    let said = [
        format!("Warning AddressConflict Service web: {conflict}"),
        "Warning InvalidField Service web: port 99999 is none".to_owned(),
        "Warning InvalidField EndpointSlice web-1: no such type".to_owned(),
    ];
    assert_eq!(rig.step(0), said);
    assert_eq!(rig.step(5), NOTHING);
    // One of two problems is fixed: the object still has the other one.
    rig.issues(&issues[1..2]);
    assert_eq!(rig.step(10), NOTHING);
    rig.issues(&[]);
    let accepted = "Normal ServiceAccepted Service web: the problems of the Service are resolved";
    assert_eq!(rig.step(15), [accepted]);
    assert_eq!(rig.step(20), NOTHING);
}

#[test]
fn a_policy_that_cannot_be_enforced_as_written_is_announced_until_it_can() {
    let mut rig = Rig::new(&[]);
    let too_large = Issue {
        code: kplane_model::Reason::TooLarge,
        ..issue("NetworkPolicy", "db", Severity::Error, "split it")
    };
    let invalid = Issue {
        code: kplane_model::Reason::InvalidPolicy,
        ..issue("NetworkPolicy", "web", Severity::Error, "no CIDR")
    };
    rig.issues(&[too_large, invalid.clone()]);
    let said = [
        "Warning TooLarge NetworkPolicy db: split it",
        "Warning InvalidPolicy NetworkPolicy web: no CIDR",
    ];
    assert_eq!(rig.step(0), said);
    assert_eq!(rig.step(5), NOTHING);
    rig.issues(&[invalid]);
    let accepted =
        "Normal PolicyAccepted NetworkPolicy db: the problems of the NetworkPolicy are resolved";
    assert_eq!(rig.step(10), [accepted]);
}

/// Some of the Services that the control plane holds are announced, once a second list had time to arrive.
#[test]
fn services_that_are_held_are_announced_when_it_lasts() {
    let mut rig = Rig::new(&[]);
    rig.snapshot.held = Some(Arc::new(Held {
        services: 991,
        without_endpoints: 0,
        policies: 0,
        reason: "991 of 1001 Services would be removed".into(),
        since: SystemTime::now(),
        examples: vec![ServiceName::new("shop", "web")],
    }));
    assert_eq!(rig.step(0), [""; 0]);
    assert_eq!(rig.step(9), [""; 0]);
    let reported = rig.step(10);
    assert_eq!(reported.len(), 1);
    assert!(
        reported[0]
            .starts_with("Warning ServiceHeld Service web: 991 Services are kept: 991 of 1001"),
        "{reported:?}"
    );
    assert_eq!(rig.step(20), [""; 0]);
    // A standalone agent does not announce problems that every agent sees.
    let mut announcer = Announcer::new(false);
    assert!(announcer.step(&rig.snapshot, at(20)).is_empty());
}

#[test]
fn what_lasts_is_said_again_before_it_is_forgotten() {
    let mut rig = Rig::new(&[]);
    rig.issues(&[issue("Service", "web", Severity::Error, "wrong")]);
    assert_eq!(rig.step(0).len(), 1);
    assert_eq!(rig.step(29 * MINUTE), NOTHING);
    assert_eq!(rig.step(30 * MINUTE).len(), 1);
    assert_eq!(rig.step(31 * MINUTE), NOTHING);
}

#[test]
fn a_node_without_its_agent_is_stale_after_a_minute() {
    let mut rig = Rig::new(&["n1", "n2"]);
    rig.agent("n1").connected = false;
    rig.agent("n1").since = at(100);
    assert_eq!(rig.step(159), NOTHING);
    let said = rig.step(160);
    assert_eq!(said.len(), 1);
    assert!(
        said[0].starts_with("Warning ProxyStale Node n1: no agent"),
        "{said:?}"
    );
    assert_eq!(rig.step(170), NOTHING);
    rig.agent("n1").connected = true;
    let back =
        "Normal ProxyConnected Node n1: the node's agent is connected to the control plane again";
    assert_eq!(rig.step(180), [back]);
    // A short absence is not announced, nor is the absence of a node that is gone.
    rig.agent("n1").connected = false;
    rig.agent("n1").since = at(200);
    assert_eq!(rig.step(230), NOTHING);
    rig.agent("n1").connected = true;
    assert_eq!(rig.step(240), NOTHING);
    rig.agent("n2").connected = false;
    rig.snapshot.nodes.get_mut("n2").unwrap().known = false;
    assert_eq!(rig.step(1_000), NOTHING);
}

#[test]
fn a_family_that_fails_is_announced_when_it_lasts() {
    let mut rig = Rig::new(&["n1"]);
    let family = |error: &str| pb::FamilyStatus {
        family: pb::Family::Ipv6.into(),
        error: error.into(),
        ..pb::FamilyStatus::default()
    };
    let set = |rig: &mut Rig, error| {
        rig.report("n1").families = vec![family(error)];
    };
    set(&mut rig, "no buffer space");
    assert_eq!(rig.step(0), NOTHING);
    set(&mut rig, "");
    assert_eq!(rig.step(5), NOTHING, "healed by the next attempt");
    set(&mut rig, "no buffer space");
    assert_eq!(rig.step(10), NOTHING);
    let failing = "Warning SyncFailing Node n1: IPv6: no buffer space";
    assert_eq!(rig.step(20), [failing]);
    set(&mut rig, "");
    let recovered = "Normal SyncRecovered Node n1: the node's kernel holds the desired state again";
    assert_eq!(rig.step(25), [recovered]);
}

#[test]
fn a_service_that_nodes_refuse_is_one_event_of_the_service() {
    let names = [
        "n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9", "na", "nb", "nc",
    ];
    let mut rig = Rig::new(&names);
    for name in names {
        rig.fails(
            name,
            &[failure("web", "taken", false), failure("api", "odd", true)],
        );
    }
    assert_eq!(rig.step(0), NOTHING);
    let said = rig.step(10);
    let web = "Warning ServiceNotProgrammed Service web: on n1, n2, n3, n4, n5, n6, n7, n8, n9, na and 2 more: taken";
    let of_services: Vec<_> = said.iter().filter(|s| s.contains(" Service ")).collect();
    assert_eq!(of_services, [web]);
    let node = "Warning SyncFailing Node n1: 1 objects are not in the kernel as desired, the first of shop/web: taken";
    assert!(said.contains(&node.to_owned()), "{said:?}");
    assert_eq!(said.len(), 1 + names.len());
    // A smaller number of nodes is not announced; an agent that goes away is no recovery.
    for name in &names[1..] {
        rig.fails(name, &[]);
    }
    rig.agent("n1").connected = false;
    rig.agent("n1").since = at(11);
    assert!(rig.step(15).iter().all(|s| s.starts_with("Normal SyncRecovered")));
    rig.fails("n1", &[]);
    let again =
        "Normal ServiceProgrammed Service web: the kernels of all nodes hold the Service again";
    assert!(rig.step(20).contains(&again.to_owned()));
}

#[test]
fn j1_a_health_check_port_that_cannot_be_opened_is_an_event_of_the_service() {
    let mut rig = Rig::new(&["n1"]);
    let text = format!("{}32000: in use", kplane_proto::HEALTH_CHECK_PORT);
    rig.fails("n1", &[failure("web", &text, true)]);
    rig.step(0);
    let said = format!("Warning FailedToStartServiceHealthcheck Service web: on n1: {text}");
    assert_eq!(rig.step(10), [said]);
    rig.fails("n1", &[]);
    let open = "Normal StartedServiceHealthcheck Service web: the health check node port is open on all nodes";
    assert_eq!(rig.step(15), [open]);
}

#[test]
fn a_standalone_agent_leaves_the_input_to_others() {
    let mut rig = Rig::new(&["n1"]);
    rig.announcer = Announcer::new(false);
    rig.issues(&[issue("Service", "web", Severity::Error, "wrong")]);
    rig.agent("n1").began_empty = true;
    assert_eq!(rig.step(0).len(), 1);
}

fn event(name: &str) -> Event {
    let object = Object {
        kind: Kind::Service,
        namespace: "shop".into(),
        name: name.into(),
    };
    Event::new(
        object,
        Reason::Refused(kplane_model::Reason::InvalidField),
        "wrong",
    )
}

#[test]
fn one_object_cannot_fill_the_server_with_events() {
    let mut queue = Queue::default();
    let now = Instant::now();
    for _ in 0..30 {
        queue.push(event("web"), now);
    }
    assert_eq!(queue.dropped, 5);
    queue.push(event("api"), now);
    assert_eq!(queue.dropped, 5, "others go on");
    let later = now + Duration::from_secs(300);
    queue.push(event("web"), later);
    queue.push(event("web"), later);
    assert_eq!(queue.dropped, 6, "one more in five minutes");
}

#[test]
fn what_waits_is_bounded() {
    let mut queue = Queue::default();
    let now = Instant::now();
    for n in 0..10_000 {
        queue.push(event(&format!("web-{n}")), now);
    }
    assert_eq!(queue.dropped, 9_000);
    let first = queue.pop().unwrap();
    assert_eq!(&*first.object.name, "web-0");
    queue.put_back(first);
    assert_eq!(std::iter::from_fn(|| queue.pop()).count(), 1_000);
}

#[test]
fn notes_fit_the_api_and_are_cut_between_characters() {
    let object = event("web").object;
    let long = Event::new(
        object,
        Reason::Refused(kplane_model::Reason::InvalidField),
        &"ä".repeat(2_000),
    );
    assert!(long.note.len() <= 1_024 && long.note.len() > 1_000);
    assert!(long.note.ends_with("ä..."));
}

#[test]
fn names_say_what_an_event_says() {
    let uid = Uid::parse("01234567-89ab-cdef-0123-456789abcdef");
    let name = |event: &Event, uid: Option<Uid>| event.api_name(uid.as_ref());
    let one = name(&event("web"), uid);
    assert!(one.starts_with("web.") && one.len() == "web.".len() + 16);
    assert_eq!(one, name(&event("web"), uid));
    let long = name(
        &event(&format!("{}-{}", "a".repeat(229), "b".repeat(23))),
        uid,
    );
    assert!(long.len() <= 253 && long.contains("aa."), "{long}");
    // Another object of the same name, or another start of an agent, is another event.
    assert_ne!(one, name(&event("web"), None));
    let mut other = event("web");
    other.instance = 7;
    assert_ne!(one, name(&other, uid));
}

#[test]
fn uids_are_read_and_written_alike() {
    let text = "01234567-89ab-cdef-0123-456789abcdef";
    let uid = Uid::parse(text).unwrap();
    assert_eq!((uid.to_string(), size_of_val(&uid)), (text.to_owned(), 16));
    for odd in [
        "",
        "node-1",
        "01234567-89ab-cdef-0123-456789abcdeg",
        "01234567-89AB-cdef-0123-456789abcdef",
    ] {
        assert_eq!(Uid::parse(odd), None, "{odd}");
    }
}

#[test]
fn repairs_of_a_nodes_rules_are_told_now_and_then() {
    let mut rig = Rig::new(&["n1"]);
    let repaired = |rig: &mut Rig, repairs| {
        let report = rig.agent("n1").report.as_mut().unwrap();
        Arc::make_mut(report).families = vec![pb::FamilyStatus {
            repairs,
            last_repair: "the table is gone, by nft (process 7)".into(),
            ..pb::FamilyStatus::default()
        }];
    };
    let reported = |count| {
        format!(
            "Warning RulesRepaired Node n1: another program changed the node's rules, and the \
             agent repaired them ({count} times since it started), last: the table is gone, by \
             nft (process 7)"
        )
    };
    repaired(&mut rig, 2);
    assert_eq!(rig.step(0), NOTHING, "before the control plane was there");
    repaired(&mut rig, 3);
    assert_eq!(rig.step(1), [reported(3)]);
    for (second, repairs) in [(2, 3), (3, 4), (299, 9)] {
        repaired(&mut rig, repairs);
        assert_eq!(rig.step(second), NOTHING);
    }
    assert_eq!(rig.step(301), [reported(9)]);
    // A new process counts from 0.
    rig.agent("n1").instance = 2;
    repaired(&mut rig, 1);
    assert_eq!(rig.step(700), [reported(1)]);
}

/// The event waits, because a second list or the operator usually resolves the state first.
#[test]
fn a_node_that_keeps_what_nobody_names_is_announced_until_it_does_not() {
    let mut rig = Rig::new(&["n1"]);
    let held = pb::Held {
        services: 40,
        reason: "40 of 40 Services would be removed at once".into(),
        ..pb::Held::default()
    };
    Arc::make_mut(rig.agent("n1").report.as_mut().unwrap()).held = Some(held);
    assert_eq!(rig.step(0), NOTHING);
    let kept = "Warning HoldingServices Node n1: the node keeps 40 Services missing from the \
                source, because 40 of 40 Services would be removed at once: fix the source, or \
                run `kpctl approve`";
    assert_eq!(rig.step(10), [kept]);
    assert_eq!(rig.step(20), NOTHING);
    Arc::make_mut(rig.agent("n1").report.as_mut().unwrap()).held = None;
    let ended = "Normal HoldingEnded Node n1: the node no longer serves objects that are missing \
                 from the source";
    assert_eq!(rig.step(30), [ended]);
}

#[test]
fn a_pod_that_ended_early_gets_one_event() {
    let mut rig = Rig::new(&[]);
    let departure = |pod: &str, reason: &str| {
        Arc::new(Departure {
            namespace: "shop".into(),
            pod: pod.into(),
            reason: reason.into(),
            waited_ms: 10_040,
            ..Departure::default()
        })
    };
    rig.snapshot.departures = vec![
        (1, departure("web-1", "")),
        (2, departure("web-2", "node-7 did not confirm")),
        (3, departure("", "node-7 did not confirm")),
    ];
    let events = rig.step(0);
    assert_eq!(
        events,
        ["Warning EndedEarly Pod web-2: ended after 10 s: node-7 did not confirm"]
    );
    assert_eq!(rig.step(5), [] as [String; 0]);
    rig.snapshot.departures.push((4, departure("web-4", "why")));
    assert_eq!(rig.step(10).len(), 1);
}
