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
use kplane_tests::harness::{self, Test};
use kplane_tests::privilege;
use kplane_tests::real;

const TESTS: &[Test] = kplane_rig::tests!(
    nothing::from_nothing_to_all_nodes_verified_and_off_again,
    over::kube_proxy_in_mode_nftables_hands_over_node_by_node_and_takes_back,
    over::kube_proxy_in_mode_iptables_gets_all_nodes_back_from_either_mode_of_kplane,
);

fn main() -> ExitCode {
    match prepare() {
        Ok(true) => harness::run(1, TESTS.iter().copied()),
        Ok(false) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Builds everything before the machine's network is left. Returns whether a cluster can run.
fn prepare() -> Result<bool> {
    Ok(real::require()? && privilege::available(support::build())?.is_some())
}
