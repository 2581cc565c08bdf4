//! Triggers that are remembered from agents' reports.

use std::sync::LazyLock;
use std::time::Duration;

use kplane_desired_state::publish::{Publication, Published, Trigger};
use kplane_model::{ServiceName, ServicePort};

use super::*;

const EPOCH: u64 = 7;

fn at(seconds: u64) -> Instant {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    *START + Duration::from_secs(seconds)
}

/// A store that has given numbers 1.. to changes of these Services.
fn store(services: &[&str]) -> Store {
    let store = Store::new(EPOCH);
    for name in services {
        let service = ServiceName::new("shop", name);
        let key = ServiceKey::sample("shop", name);
        let published = Published::new(ServicePort::sample(key.clone()), &[]);
        store.publish(Publication {
            triggers: vec![Trigger {
                at_ms: 1,
                service,
                family: Family::V4,
            }],
            ..Publication::sample(vec![(key, Some(published))], vec![])
        });
    }
    store
}

fn report(programmed: impl IntoIterator<Item = (u64, u64)>) -> pb::Report {
    let programmed = programmed.into_iter();
    pb::Report {
        epoch: EPOCH,
        triggers_programmed: programmed
            .map(|(id, latency_ms)| pb::TriggerProgrammed { id, latency_ms })
            .collect(),
        ..pb::Report::default()
    }
}

#[test]
fn h_latencies_are_told_by_service_and_in_sum() {
    let store = store(&["web", "api"]);
    let mut latencies = Latencies::default();
    assert_eq!(latencies.summary(), None);
    let mut first = report([(1, 30), (2, 10), (99, 1)]);
    latencies.remember(take_programmed(&mut first, &store, at(5)));
    assert!(first.triggers_programmed.is_empty(), "told once");
    let mut second = report([(1, 20)]);
    latencies.remember(take_programmed(&mut second, &store, at(6)));
    let of = |name: &str| {
        let last = latencies.of(&ServiceName::new("shop", name))?;
        Some((last.latency_ms, last.at))
    };
    assert_eq!(of("web"), Some((20, at(6))));
    assert_eq!(of("api"), Some((10, at(5))));
    assert_eq!(of("cart"), None);
    let summary = LatencySummary {
        count: 3,
        last_ms: 20,
        p50_ms: 20,
        max_ms: 30,
        last_at: at(6),
    };
    assert_eq!(latencies.summary(), Some(summary));
}

#[test]
fn h_reports_of_another_control_plane_mean_nothing() {
    let store = store(&["web"]);
    let mut foreign = report([(1, 30)]);
    foreign.epoch = EPOCH + 1;
    assert_eq!(take_programmed(&mut foreign, &store, at(5)), []);
    assert!(foreign.triggers_programmed.is_empty());
}

#[test]
fn h_a_service_that_the_kernel_refuses_was_not_programmed() {
    let store = store(&["web", "api"]);
    let mut refused = report([(1, 30), (2, 10)]);
    refused.failures = ["web", "api"]
        .map(|name| pb::ObjectFailure {
            key: Some(pb::ServiceKey {
                namespace: "shop".into(),
                name: name.into(),
                protocol: pb::Protocol::Tcp.into(),
                family: pb::Family::Ipv4.into(),
                ..pb::ServiceKey::default()
            }),
            // Served, though not in every respect.
            degraded: name == "api",
            ..pb::ObjectFailure::default()
        })
        .into();
    let programmed = take_programmed(&mut refused, &store, at(5));
    let names: Vec<_> = programmed.iter().map(|p| &*p.service.name).collect();
    assert_eq!(names, ["api"]);
}

#[test]
fn memory_is_bounded_whatever_an_agent_says() {
    let store = store(&["web"]);
    let mut latencies = Latencies::default();
    for _ in 0..3 {
        let mut flood = report((0..10_000).map(|n| (1, n)));
        latencies.remember(take_programmed(&mut flood, &store, at(5)));
    }
    let summary = latencies.summary().unwrap();
    assert_eq!((summary.count, summary.last_ms), (REMEMBERED, 9_999));
    assert_eq!(latencies.0.capacity(), REMEMBERED);
    assert_eq!(size_of::<Programmed>(), 32);
}
