//! Real clusters: kubelets, containers, kube-proxy and CoreDNS, and what is left when they end.

use std::process::ExitCode;

use anyhow::Result;
use kplane_rig::harness::{self, Arguments, Test};
use kplane_rig::privilege;
use kplane_rig::real::{self, NodePrograms};

mod both;
mod left;
mod nodes;

const TESTS: &[Test] = kplane_rig::tests!(
    nodes::pods_of_two_nodes_reach_each_other_by_service_and_by_name,
    both::services_of_both_families_are_served_in_mode_iptables,
    left::the_end_of_the_holding_process_ends_everything,
);

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    if left::is_holder() {
        return left::hold();
    }
    harness::prepared(arguments, 1, prepare, TESTS.iter().copied())
}

/// Builds the programs, before the machine's network is left: Go may have to download. Returns whether a
/// cluster can run.
fn prepare() -> Result<bool> {
    Ok(real::require()? && privilege::available(NodePrograms::ensure())?.is_some())
}
