//! Tests of the whole product, in suites: `it netns` runs the suite `netns`, and `it` runs all.

mod chart;
mod cluster;
mod conformance;
mod installed;
mod netns;
mod vm;

use std::process::ExitCode;

use kplane_tests::harness;

fn main() -> ExitCode {
    harness::suites(&[
        ("chart", chart::main),
        ("netns", netns::main),
        ("cluster", cluster::main),
        ("conformance", conformance::main),
        ("installed", installed::main),
        ("vm", vm::main),
    ])
}
