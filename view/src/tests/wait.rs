//! The end of a wait at 80 columns.

use std::time::Duration;

use expect_test::expect;
use kplane_proto::v1 as pb;

use super::super::convergence::ConvergenceView;
use super::super::testing::{has, table, wide};
use super::super::wait::WaitView;
use crate::goal::Goal;
use kpctl_samples as samples;

fn waited(goal: Goal, threshold: &str, services: Vec<pb::Convergence>) -> WaitView {
    let services = services.into_iter().map(ConvergenceView::from).collect();
    let limit = Duration::from_secs(60);
    WaitView::new(goal, threshold.parse().unwrap(), limit, services)
}

fn in_state(state: pb::ServiceState, reason: &str) -> pb::Convergence {
    pb::Convergence {
        state: state.into(),
        reason: reason.to_owned(),
        durations: None,
        ..samples::converged()
    }
}

#[test]
fn reached() {
    let view = waited(Goal::Programmed, "100%", vec![samples::converged()]);
    expect![[r#"
        service/shop/web: in the kernel of 5,000 of 5,000 nodes; p50 9ms, p99 40ms, max
          1.3s
    "#]]
    .assert_eq(&table(&view));
    let view = waited(Goal::Verified, "98%", vec![samples::lagging()]);
    expect![[r#"
        service/shop/web: in the kernel of 4,987 of 5,000 nodes; p50 9ms, p99 40ms, max 1.3s; verified on 4,900
    "#]].assert_eq(&wide(&view));
    let deleted = in_state(pb::ServiceState::Deleted, "");
    let unknown = in_state(pb::ServiceState::Unknown, "it does not exist");
    let view = waited(Goal::Deleted, "100%", vec![deleted, unknown]);
    expect![[r#"
        service/shop/web: deleted; gone from the kernel of 5,000 of 5,000 nodes
        service/shop/web: not served: it does not exist
    "#]]
    .assert_eq(&table(&view));
}

#[test]
fn not_reached() {
    let view = waited(Goal::Programmed, "100%", vec![samples::lagging()]);
    expect![[r#"
        not programmed within 1m: service/shop/web: in the kernel of 4,987 of 5,000
          nodes; p50 9ms, p99 40ms, max 1.3s
        NODE    STATE         SINCE  APPLIED
        node-c  Failing       14m    4650/4711
          node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy);
            stop it or choose another port
        node-d  Disconnected  1m     4650/4711
          applied revision 4650 of 4711; the agent is not connected
        node-e  NoAgent       30s    -
          no agent has connected for this node
        and 10 more nodes

        Next
          kpctl describe service shop/web
    "#]]
    .assert_eq(&table(&view));
    let view = waited(Goal::Verified, "99.9%", vec![samples::lagging()]);
    expect![[r#"
        not verified on 99.9% of the nodes within 1m: service/shop/web: in the kernel of
          4,987 of 5,000 nodes; p50 9ms, p99 40ms, max 1.3s; verified on 4,900
        NODE    STATE         SINCE  APPLIED
        node-c  Failing       14m    4650/4711
          node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy);
            stop it or choose another port
        node-d  Disconnected  1m     4650/4711
          applied revision 4650 of 4711; the agent is not connected
        node-e  NoAgent       30s    -
          no agent has connected for this node
        node-g  Unverified    -      4711
          read back at revision 4650 of 4711
        and 96 more nodes

        Next
          kpctl describe service shop/web
    "#]]
    .assert_eq(&table(&view));
    let unknown = in_state(pb::ServiceState::Unknown, "no Service of this name");
    let uncertain = in_state(pb::ServiceState::Uncertain, "the source was not read");
    let both = vec![unknown, uncertain, samples::converged()];
    let view = waited(Goal::Programmed, "100%", both);
    expect![[r#"
        not programmed within 1m: service/shop/web: not served: no Service of this name

        not programmed within 1m: service/shop/web: not known: the source was not read

        service/shop/web: in the kernel of 5,000 of 5,000 nodes; p50 9ms, p99 40ms, max
          1.3s

        Next
          kpctl get services -n shop
          kpctl status
    "#]]
    .assert_eq(&table(&view));
}

#[test]
fn the_next_step_fits_the_state() {
    let step = |goal, service| {
        let text = table(&waited(goal, "100%", vec![service]));
        text.rsplit_once("Next\n  ").unwrap().1.trim().to_owned()
    };
    let lagging = |state: pb::ServiceState| pb::Convergence {
        state: state.into(),
        ..samples::lagging()
    };
    let served = lagging(pb::ServiceState::Served);
    assert_eq!(
        step(Goal::Deleted, served),
        "kpctl describe service shop/web"
    );
    let unknown = lagging(pb::ServiceState::Unknown);
    assert_eq!(step(Goal::Deleted, unknown.clone()), "kpctl status");
    assert_eq!(
        step(Goal::Verified, unknown.clone()),
        "kpctl get services -n shop"
    );
    let mut held = unknown;
    held.laggards[0].state = pb::LagState::Holding.into();
    assert_eq!(step(Goal::Deleted, held), "kpctl approve");
}

#[test]
fn nothing_is_programmed_without_nodes() {
    let nowhere = pb::Convergence {
        nodes: 0,
        programmed: 0,
        ..samples::converged()
    };
    let reached = |goal| waited(goal, "1%", vec![nowhere.clone()]).reached;
    assert!(!reached(Goal::Programmed) && !reached(Goal::Verified));
    let gone = pb::Convergence {
        state: pb::ServiceState::Deleted.into(),
        ..nowhere.clone()
    };
    assert!(waited(Goal::Deleted, "100%", vec![gone]).reached);
}

#[test]
fn text_of_agents_is_harmless() {
    let mut lagging = samples::lagging();
    lagging.laggards[0].reason = "\u{1b}[2Jgone\nservice/shop/api: all is well".to_owned();
    let text = table(&waited(Goal::Programmed, "100%", vec![lagging]));
    has(&text, "  ?[2Jgone service/shop/api: all is well\n");
}
