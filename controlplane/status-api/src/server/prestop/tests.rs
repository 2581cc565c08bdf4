//! A control plane that has just started says of no Pod that it is gone.

use kplane_agents::fleet::Session;
use kplane_desired_state::admission::Admission;
use kplane_desired_state::index::{Suspicion, Suspicions};
use kplane_desired_state::k8s::Kind;
use kplane_desired_state::source::manifests::parse;
use kplane_desired_state::source::{Batch, Event};
use kplane_model::ServiceKey;
use tokio::sync::oneshot;

use super::*;

/// A Service with the Pods p, which is terminating, and q.
const OBJECTS: &str = "
{apiVersion: v1, kind: Node, metadata: {name: n1}}
---
{apiVersion: v1, kind: Service, metadata: {name: web, namespace: shop}, spec: {clusterIP: 10.96.0.9, ports: [{port: 80}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: '', port: 8080}]
endpoints:
- {addresses: [10.244.0.1], nodeName: n1, conditions: {ready: false, terminating: true}, targetRef: {kind: Pod, name: p}}
- {addresses: [10.244.0.2], nodeName: n1, conditions: {ready: true}, targetRef: {kind: Pod, name: q}}
";

fn batch() -> Batch {
    Batch::sample(&Kind::ALL, parse(OBJECTS.into()).objects)
}

/// Asks about Pod p (1) or q (2), with a time for one that is not terminating; returns the outcome.
async fn ask_of(hub: &Arc<Hub>, pod: u8, times: [Duration; 2]) -> Option<LeavingOutcome> {
    let (answer, answered) = oneshot::channel();
    let [until, unless_terminating] = times.map(|time| Instant::now() + time);
    let leaving = Leaving {
        node: "n1".into(),
        addresses: vec![[10, 244, 0, pod].into()],
        port: 0,
        until,
        unless_terminating,
        answer,
    };
    Depart::answer(Arc::clone(hub), None, leaving).await;
    answered.await.ok()
}

async fn ask(hub: &Arc<Hub>, within: Duration) -> Option<LeavingOutcome> {
    ask_of(hub, 1, [within, within]).await
}

#[tokio::test]
async fn no_pod_is_gone_before_the_source_is_read_and_agents_are_back() {
    let (hub, source) = Hub::sample_with_index("test", Admission::default());
    assert_eq!(ask(&hub, Duration::from_millis(50)).await, None);
    source.send(batch()).await.unwrap();
    let outcome = ask(&hub, Duration::from_millis(300)).await;
    assert_eq!(outcome, Some(LeavingOutcome::Bound));
    let latest = hub.streams().departures.latest();
    assert_eq!(latest.last().unwrap().1.reason, "n1 did not confirm");
}

/// Probes and restarts of containers ask about Pods that go on.
#[tokio::test]
async fn the_time_of_a_hook_counts_for_a_pod_that_is_terminating() {
    let (hub, source) = Hub::sample_with_index("test", Admission::default());
    source.send(batch()).await.unwrap();
    let short = Duration::from_millis(20);
    let serving = ask_of(&hub, 2, [Duration::from_secs(30), short]).await;
    assert_eq!(serving, Some(LeavingOutcome::Bound));
    let first = hub.streams().departures.latest().last().unwrap().1.clone();
    assert!(first.waited_ms < 30_000, "{first:?}");
    let reason = first.reason.clone();
    assert!(
        reason.contains("still counted as ready for shop/web"),
        "{reason}"
    );
    let long = Duration::from_millis(300);
    assert_eq!(
        ask_of(&hub, 1, [long, short]).await,
        Some(LeavingOutcome::Bound)
    );
    let last = hub.streams().departures.latest().last().unwrap().1.clone();
    assert_eq!(last.reason, "n1 did not confirm");
    assert!(last.waited_ms >= 300, "{last:?}");
}

fn web() -> ServiceName {
    ServiceName::new("shop", "web")
}

/// The same without the slice.
fn without_slices() -> Batch {
    let objects = OBJECTS.split("---").take(2).collect::<Vec<_>>().join("---");
    Batch::sample(&Kind::ALL, parse(objects.into()).objects)
}

/// What this control plane reads may be late: the nodes of another replica may lead to a Pod that it does not know yet.
#[tokio::test(start_paused = true)]
async fn a_pod_that_no_slice_names_is_looked_for() {
    let (hub, source) = Hub::sample_with_index("test", Admission::default());
    source.send(without_slices()).await.unwrap();
    let long = Duration::from_secs(30);
    let began = Instant::now();
    assert_eq!(ask(&hub, long).await, Some(LeavingOutcome::Gone));
    assert_eq!(began.elapsed(), UNKNOWN);
    let mut asked = Box::pin(ask(&hub, long));
    let early = timeout_at(Instant::now() + UNKNOWN / 2, &mut asked).await;
    assert!(early.is_err(), "{early:?}");
    source.send(batch()).await.unwrap();
    assert_eq!(asked.await, Some(LeavingOutcome::Bound));
}

/// A node that does not believe that a Service is gone goes on to lead to its Pods.
#[tokio::test]
async fn a_node_that_keeps_services_does_not_confirm_for_one_that_is_gone() {
    let report = |hub: &Hub, services| pb::Report {
        epoch: hub.store().epoch(),
        applied_revision: u64::MAX,
        held: Some(pb::Held {
            services,
            ..pb::Held::default()
        }),
        ..pb::Report::default()
    };
    for (emptied, services, outcome) in [
        (true, 1, LeavingOutcome::Bound),
        (true, 0, LeavingOutcome::Gone),
        (false, 1, LeavingOutcome::Gone),
    ] {
        let (hub, source) = Hub::sample_with_index("test", Admission::default());
        source.send(batch()).await.unwrap();
        let session = Session::sample(&hub, "n1");
        let within = if outcome == LeavingOutcome::Gone { 30_000 } else { 200 };
        let asking = Arc::clone(&hub);
        let mut asked =
            tokio::spawn(async move { ask(&asking, Duration::from_millis(within)).await });
        let early = timeout_at(Instant::now() + Duration::from_millis(20), &mut asked).await;
        assert!(early.is_err(), "n1 has reported nothing: {early:?}");
        if emptied {
            let (before, _) = OBJECTS.split_once("endpoints:").unwrap();
            let all = parse(format!("{before}endpoints: []").into()).objects;
            let mut emptied = without_slices();
            emptied.events = all.into_iter().map(|of| Event::Apply(Box::new(of))).collect();
            source.send(emptied).await.unwrap();
            let is_emptied = || hub.index().look(|index| index.is_without_endpoints(&web()));
            while !is_emptied().await.unwrap() {
                sleep(PAUSE).await;
            }
        }
        session.report(report(&hub, services));
        let what = format!("emptied: {emptied}, keeps {services}");
        assert_eq!(asked.await.unwrap(), Some(outcome), "{what}");
    }
}

/// A node confirms by a report of this control plane's state or a later one, in which the kernel holds the Service.
#[tokio::test]
async fn only_a_kernel_that_holds_the_service_confirms() {
    let failure = |name: &str, degraded| pb::ObjectFailure {
        key: Some((&ServiceKey::sample("shop", name)).into()),
        degraded,
        ..pb::ObjectFailure::default()
    };
    for (failures, is_behind, is_of_another, confirms) in [
        (vec![], false, false, true),
        (vec![], true, false, false),
        (vec![], false, true, false),
        (vec![failure("web", false)], false, false, false),
        (vec![failure("web", true)], false, false, true),
        (vec![failure("other", false)], false, false, true),
        (
            vec![failure("other", false), failure("web", false)],
            false,
            false,
            false,
        ),
    ] {
        let what = format!("{failures:?}, behind: {is_behind}, of another: {is_of_another}");
        let (hub, source) = Hub::sample_with_index("test", Admission::default());
        source.send(batch()).await.unwrap();
        let session = Session::sample(&hub, "n1");
        let within = Duration::from_millis(if confirms { 30_000 } else { 60 });
        let mut asked = Box::pin(ask(&hub, within));
        let early = timeout_at(Instant::now() + Duration::from_millis(20), &mut asked).await;
        assert!(early.is_err(), "n1 has reported nothing: {early:?}");
        let revision = hub.store().wanted("n1");
        session.report(pb::Report {
            epoch: hub.store().epoch() + u64::from(is_of_another),
            applied_revision: if is_behind { 0 } else { revision },
            failures,
            ..pb::Report::default()
        });
        let expected = if confirms { LeavingOutcome::Gone } else { LeavingOutcome::Bound };
        assert_eq!(asked.await, Some(expected), "{what}");
    }
}

#[tokio::test]
async fn a_node_that_its_neighbours_do_not_reach_need_not_confirm() {
    let (hub, source) = Hub::sample_with_index("test", Admission::default());
    source.send(batch()).await.unwrap();
    let long = Duration::from_secs(30);
    let mut asked = Box::pin(ask(&hub, long));
    let early = timeout_at(Instant::now() + Duration::from_millis(50), &mut asked).await;
    assert!(early.is_err(), "n1 has not confirmed: {early:?}");
    let suspicion = Suspicion {
        since: SystemTime::now(),
        missed: 3,
        asked: 3,
    };
    let nodes = [("n1".into(), suspicion)].into();
    hub.suspects().replace(Suspicions {
        nodes,
        ..Suspicions::default()
    });
    assert_eq!(asked.await, Some(LeavingOutcome::Gone));
}
