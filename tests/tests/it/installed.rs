//! The chart, installed by Helm on real clusters: kubelets, containers and Pods.

mod flapping;
mod gone;
mod nodes;
mod nothing;
mod over;
mod support;
mod typed;

use std::process::ExitCode;

use anyhow::Result;
use kplane_tests::harness::{self, Arguments, Test};
use kplane_tests::privilege;
use kplane_tests::real;

const TESTS: &[Test] = kplane_tests::tests!(
    nothing::from_nothing_to_all_nodes_verified_and_off_again,
    over::kube_proxy_in_mode_nftables_hands_over_node_by_node_and_takes_back,
    over::kube_proxy_in_mode_iptables_gets_all_nodes_back_from_either_mode_of_kplane,
);

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    let code = harness::prepared(arguments, 1, prepare, TESTS.iter().copied());
    support::end();
    code
}

/// Builds everything before the machine's network is left. Returns whether a cluster can run.
fn prepare() -> Result<bool> {
    Ok(real::require()? && privilege::available(support::build())?.is_some())
}
