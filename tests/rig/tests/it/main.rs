//! Tests of the rig, in suites: `it rig` runs the suite `rig`, and `it` runs all.

mod real;
mod rig;

use std::process::ExitCode;

use kplane_rig::harness;

fn main() -> ExitCode {
    harness::suites(&[("rig", rig::main), ("real", real::main)])
}
