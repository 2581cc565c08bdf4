//! kplane beside kube-proxy: the same Kubernetes objects, from a real API server, the same network,
//! the same packets; every packet must meet the same fate with both.
//!
//! Two equal worlds stand side by side: on the nodes of one runs kube-proxy v1.37, on those of the
//! other `kp-nodeagent --standalone`, with the same configuration file; once in mode nftables, once in
//! mode iptables. All scenarios are Services of one cluster at the same time. What differs on purpose is
//! listed in [`expected`]; anything else fails, and so does a listed difference that is no more.

mod api;
mod chains;
mod compare;
mod expected;
mod generated;
mod proxy;
mod run;
mod scenario;
mod stand;
mod takeover;
mod text;

use std::process::ExitCode;

use kplane_tests::harness::{self, Arguments, Test};

const TESTS: &[Test] = &[
    (
        "nftables_the_same_packets_meet_the_same_fate",
        run::nftables,
    ),
    (
        "iptables_the_same_packets_meet_the_same_fate",
        run::iptables,
    ),
    (
        "iptables_i4_nobody_notices_the_way_from_kube_proxy_to_kplane_and_back",
        takeover::i4_nobody_notices_the_way_from_kube_proxy_to_kplane_and_back,
    ),
    (
        "nftables_i4_the_way_back_is_safe",
        takeover::i4_the_way_back_is_safe,
    ),
];

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    harness::prepared(arguments, 1, proxy::prepare, TESTS.iter().copied())
}
