//! New settings while the engine runs (I3), and pod ranges that come late (I6).

use kplane_model::{
    Cidr, DesiredObject, LocalPod, NodeFacts, PodName, Policy, PolicyName, PolicyObject, Reason,
    Severity,
};

use super::*;

/// Longest that the thread may take on a busy machine.
const DEADLINE: Duration = Duration::from_secs(30);

fn cidrs(texts: &[&str]) -> Vec<Cidr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn with_pods(texts: &[&str]) -> NodeSettings {
    NodeSettings {
        cluster_cidrs: cidrs(texts),
        ..NodeSettings::default()
    }
}

pub(super) fn node_with_pods(texts: &[&str]) -> DesiredObject {
    let DesiredObject::Node(facts) = node("z1") else {
        panic!("no node");
    };
    DesiredObject::Node(NodeFacts {
        pod_cidrs: cidrs(texts),
        ..facts
    })
}

#[test]
fn i3_new_settings_replan_everything_of_both_families() {
    let mut rig = Rig::settled([svc("a", &[]), svc("b", &[]), svc6("c", &[]), node("z1")]);
    let before = rig.revisions();
    rig.core.configure(with_pods(&["10.0.0.0/8", "fd00::/8"]), rig.now);
    assert_eq!(rig.script.calls(), ["apply IPv4 a,b", "apply IPv6 c"]);
    assert_eq!(rig.script.pod_sources(Family::V4), cidrs(&["10.0.0.0/8"]));
    assert_eq!(rig.script.pod_sources(Family::V6), cidrs(&["fd00::/8"]));
    assert_eq!(rig.revisions(), before, "it is the same desired state");
}

#[test]
fn i3_settings_before_the_first_snapshot_wait_for_it() {
    let mut rig = Rig::new([svc("a", &[])]);
    rig.core.configure(with_pods(&["10.0.0.0/8"]), rig.now);
    assert_eq!(rig.script.calls(), [""; 0]);
    rig.snapshot();
    assert_eq!(rig.script.pod_sources(Family::V4), cidrs(&["10.0.0.0/8"]));
}

/// A kernel that refuses gets everything again, with the new settings.
#[test]
fn i3_settings_that_the_kernel_refuses_are_tried_again() {
    let mut rig = Rig::settled([svc("a", &[])]);
    rig.script.set(|script| script.broken = vec![Family::V4]);
    rig.core.configure(with_pods(&["10.0.0.0/8"]), rig.now);
    rig.script.set(|script| script.broken.clear());
    rig.script.calls();
    rig.next();
    assert_eq!(rig.script.calls()[0], "apply IPv4 complete a");
    assert_eq!(rig.script.pod_sources(Family::V4), cidrs(&["10.0.0.0/8"]));
}

#[test]
fn i6_pod_ranges_of_the_node_may_come_and_change_at_any_time() {
    let mut rig = Rig::settled([svc("a", &[]), node("z1")]);
    let by_node = NodeSettings {
        node_cidr: true,
        ..NodeSettings::default()
    };
    rig.core.configure(by_node, rig.now);
    assert_eq!(rig.script.pod_sources(Family::V4), []);
    for range in ["10.1.0.0/24", "10.2.0.0/24"] {
        rig.put(&node_with_pods(&[range, "fd00::/64"]));
        assert_eq!(rig.script.pod_sources(Family::V4), cidrs(&[range]));
        assert_eq!(rig.script.pod_sources(Family::V6), cidrs(&["fd00::/64"]));
    }
}

#[tokio::test]
async fn i3_the_thread_takes_the_latest_settings() {
    let script = Scripted::default();
    let backend = script.backend();
    let open = || Ok(backend);
    let engine = Engine::spawn(open, NodeSettings::default()).await.unwrap();
    let mut plane = Plane::new([svc("a", &[])]);
    let snapshot = plane.snapshot_update();
    engine.submit(snapshot).await.unwrap().unwrap();
    let latest = with_pods(&["11.0.0.0/8", "fd00::/8"]);
    engine.configure(with_pods(&["10.0.0.0/8"]));
    engine.configure(latest.clone());
    let mut reports = engine.reports();
    let taken = async {
        // IPv6 is programmed last.
        while script.pod_sources(Family::V6) != cidrs(&["fd00::/8"]) {
            reports.changed().await.unwrap();
        }
    };
    tokio::time::timeout(DEADLINE, taken).await.unwrap();
    assert_eq!(script.pod_sources(Family::V4), cidrs(&["11.0.0.0/8"]));
    // Settings that are the same are no work; the handle's end still ends the engine.
    engine.configure(latest);
    script.calls();
    drop(engine);
    while reports.changed().await.is_ok() {}
    let applied = script.calls();
    assert!(
        !applied.iter().any(|call| call.starts_with("apply")),
        "{applied:?}"
    );
}

/// The Node object goes, and node ports stay where they were, also with new settings.
#[test]
fn a21_node_ports_stay_on_the_last_known_address() {
    let mut rig = Rig::settled([svc("a", &[]), node("z1")]);
    let at = |rig: &Rig| {
        let ips = rig.script.lock().nodes[&Family::V4].nodeport_ips.clone();
        let reported = rig.core.report().findings;
        (
            ips,
            reported.into_iter().map(|finding| finding.severity).collect::<Vec<_>>(),
        )
    };
    let own = cidrs(&["192.168.0.1/32"]);
    assert_eq!(at(&rig), (own.clone(), vec![]));
    rig.put(&DesiredObject::Node(NodeFacts {
        name: "n1".into(),
        ..NodeFacts::default()
    }));
    assert_eq!(at(&rig), (own.clone(), vec![Severity::Warning]));
    rig.core.configure(with_pods(&["10.0.0.0/8"]), rig.now);
    assert_eq!(at(&rig), (own.clone(), vec![Severity::Warning]));
    rig.put(&node("z1"));
    assert_eq!(at(&rig), (own, vec![]));
}

/// While policies are enforced, a node whose ranges are not known, or are not where its Pods are, is told.
#[test]
fn np19_pods_outside_of_known_ranges_are_found() {
    let policy = DesiredObject::Policy(PolicyObject::Policy(Policy {
        name: PolicyName::new("shop", "web"),
        ingress: Some(Vec::new()),
        egress: None,
    }));
    let pod = |ip: &str| {
        DesiredObject::Policy(PolicyObject::Pod(LocalPod {
            name: PodName::new("shop", "web-0"),
            addresses: vec![ip.parse().unwrap()],
            ports: Vec::new(),
            policies: Vec::new(),
            tier: None,
        }))
    };
    let mut rig = Rig::settled([
        svc("a", &[]),
        node_with_pods(&["10.0.1.0/24"]),
        pod("10.9.0.1"),
    ]);
    let found = |rig: &Rig| {
        rig.core
            .report()
            .findings
            .into_iter()
            .filter(|finding| finding.code == Reason::PodRangeUnknown)
            .map(|finding| finding.text)
            .collect::<Vec<_>>()
    };
    assert_eq!(found(&rig), [""; 0], "there is no policy");
    rig.put(&policy);
    let reported = found(&rig);
    assert!(
        reported.len() == 1 && reported[0].starts_with("1 of 1 Pods"),
        "{reported:?}"
    );
    rig.put(&pod("10.0.1.7"));
    assert_eq!(found(&rig), [""; 0]);
    rig.put(&node_with_pods(&[]));
    let reported = found(&rig);
    assert!(
        reported.len() == 1 && reported[0].contains("10.0.1.0/24 any more"),
        "{reported:?}"
    );
}
