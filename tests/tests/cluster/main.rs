//! kplane's programs with a real Kubernetes API server.

mod rig;

use std::process::ExitCode;

use kplane_tests::cluster::Programs;
use kplane_tests::harness::{self, Test};
use kplane_tests::privilege;

const TESTS: &[Test] = &[
    (
        "rig::objects_are_made_changed_and_deleted",
        rig::objects_are_made_changed_and_deleted,
    ),
    (
        "rig::deployments_have_endpoints_that_come_terminate_and_go",
        rig::deployments_have_endpoints_that_come_terminate_and_go,
    ),
];

fn main() -> ExitCode {
    // Before the machine's network is left: Go may have to download.
    match Programs::ensure() {
        Ok(_) => harness::run(TESTS),
        Err(error) if privilege::is_strict() => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
        Err(error) => {
            println!("skipped: {error:#}");
            ExitCode::SUCCESS
        }
    }
}
