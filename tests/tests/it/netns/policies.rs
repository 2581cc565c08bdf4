//! Traffic policies Local (A12, A13, A16, A17, A18) and draining endpoints (B3, B5).

use anyhow::Result;

use crate::netns::addresses::on_both_nodes;
use kplane_tests::support::{
    ALL, ALL_MASQUERADED, At, DROPPED, HERE, HERE_MASQUERADED, REFUSED, Row, Scenario, Setup, Svc,
    ep, svc,
};

/// The same at all addresses for which the external policy counts.
fn external(wants: [kplane_tests::support::Want; 4]) -> [Row; 3] {
    [At::ExternalIp, At::LoadBalancer, At::NodePort].map(|at| (at, wants))
}

/// To ClusterIPs with policy Cluster.
const INTERNAL: Row = (At::ClusterIp, [ALL_MASQUERADED, ALL, ALL, ALL_MASQUERADED]);

fn play(setup: Setup, service: Svc, rows: impl IntoIterator<Item = Row>) -> Result<()> {
    let rows = rows.into_iter().collect();
    Scenario {
        setup,
        service,
        rows,
    }
    .play()
}

pub(crate) fn a16_outside_reaches_local_endpoints_and_pods_and_nodes_all_of_a_local_policy()
-> Result<()> {
    external_local().play()
}

/// External policy Local with endpoints on both nodes.
pub(crate) fn external_local() -> Scenario {
    Scenario {
        setup: Setup::PodRanges,
        service: on_both_nodes().external_local(),
        rows: [INTERNAL]
            .into_iter()
            .chain(external([HERE, ALL, ALL, ALL_MASQUERADED]))
            .collect(),
    }
}

pub(crate) fn a16_without_pod_ranges_pods_reach_local_endpoints_only() -> Result<()> {
    let wants = [HERE, HERE, HERE, ALL_MASQUERADED];
    play(
        Setup::NoPodRanges,
        on_both_nodes().external_local(),
        external(wants),
    )
}

pub(crate) fn a18_outside_is_dropped_where_a_local_policy_has_no_endpoint() -> Result<()> {
    // The endpoint is on node-2.
    let service = svc(1).everywhere().external_local().endpoints([ep("c")]);
    let rows = external([DROPPED, ALL, ALL, ALL_MASQUERADED]);
    play(
        Setup::PodRanges,
        service,
        [INTERNAL].into_iter().chain(rows),
    )
}

pub(crate) fn a18_without_pod_ranges_pods_are_dropped_too() -> Result<()> {
    let service = svc(1).everywhere().external_local().endpoints([ep("c")]);
    let wants = [DROPPED, DROPPED, HERE, ALL_MASQUERADED];
    play(Setup::NoPodRanges, service, external(wants))
}

pub(crate) fn a18_a_local_policy_without_endpoints_anywhere_refuses() -> Result<()> {
    let service = svc(1).everywhere().external_local().internal_local();
    play(
        Setup::PodRanges,
        service,
        At::ALL.map(|at| (at, [REFUSED; 4])),
    )
}

pub(crate) fn a12_internal_policy_local_is_for_cluster_ips_only() -> Result<()> {
    let wants = [HERE_MASQUERADED, HERE, HERE, HERE_MASQUERADED];
    let rows = [(At::ClusterIp, wants)].into_iter().chain(external([ALL_MASQUERADED; 4]));
    play(Setup::PodRanges, on_both_nodes().internal_local(), rows)
}

pub(crate) fn a18_internal_policy_local_drops_where_no_endpoint_is() -> Result<()> {
    let service = svc(1).everywhere().internal_local().endpoints([ep("c")]);
    let rows = [(At::ClusterIp, [DROPPED, DROPPED, HERE, DROPPED])]
        .into_iter()
        .chain(external([ALL_MASQUERADED; 4]));
    play(Setup::PodRanges, service, rows)
}

pub(crate) fn a12_a13_both_policies_local() -> Result<()> {
    let wants = [HERE_MASQUERADED, HERE, HERE, HERE_MASQUERADED];
    let rows =
        [(At::ClusterIp, wants)]
            .into_iter()
            .chain(external([HERE, ALL, ALL, ALL_MASQUERADED]));
    let service = on_both_nodes().internal_local().external_local();
    play(Setup::PodRanges, service, rows)
}

/// Nothing is ready: all draining endpoints serve.
pub(crate) fn b3_draining_endpoints_serve_when_nothing_is_ready() -> Result<()> {
    let draining = ["a", "b", "c"].map(|pod| ep(pod).draining());
    let rows = external([ALL_MASQUERADED; 4]);
    let service = svc(1).everywhere().endpoints(draining);
    play(
        Setup::PodRanges,
        service,
        [INTERNAL].into_iter().chain(rows),
    )
}

/// `a` drains on node-1 while `c` is ready on node-2: who may reach only node-1 reaches `a`.
pub(crate) fn b5_a_draining_endpoint_serves_a_local_policy_when_no_other_is_on_the_node()
-> Result<()> {
    let service = svc(1).everywhere().external_local().endpoints([ep("a").draining(), ep("c")]);
    let rows = external([HERE, ALL, ALL, ALL_MASQUERADED]);
    play(
        Setup::PodRanges,
        service,
        [INTERNAL].into_iter().chain(rows),
    )
}
