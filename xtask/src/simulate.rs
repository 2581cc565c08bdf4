//! `cargo xtask simulate`: plays the deterministic simulation, and finds deliberate faults.

use std::process::ExitCode;

use anyhow::Result;

use crate::cargo::{cargo, status};
use crate::faults;

const HELP: &str = "\
Play the deterministic simulation of control planes and agents

Usage: cargo xtask simulate [OPTIONS]

Options:
      --seeds N        Play this many seeds [default: 10000]
      --from SEED      Begin with this seed [default: 0]
      --seed SEED      Play one seed, and tell what happens
      --faults [NAME]  Run tests on a copy of the product with one deliberate fault at a time: 100 seeds, and the unit
                       tests of the fault's crate. With each fault of nodeagent/tests/simulation/faults, after a run
                       without one; or with those that have NAME in their names or files. docs/seeded-faults.md gets
                       what is found. The copy has a target folder of its own: its first build takes ten minutes
      --thorough       With what is not found then, also play 4,900 seeds, and run all other unit tests, and integration
                       tests that need no cluster and no virtual machine
";

/// Number of seeds that `cargo xtask test --all` plays.
pub(crate) const SEEDS: &str = "10000";

/// The simulation's test program.
const TEST: [&str; 5] = ["test", "--package", "kp-nodeagent", "--test", "simulation"];

pub(crate) fn run(args: &[String]) -> Result<ExitCode> {
    match args.first().map(String::as_str) {
        Some("--help" | "-h") => print!("{HELP}"),
        Some("--faults") => {
            let name = args[1..].iter().find(|arg| !arg.starts_with('-'));
            let thorough = args.iter().any(|arg| arg == "--thorough");
            faults::find(name.map_or("", String::as_str), thorough)?;
        }
        Some("--seed" | "--seeds") => play(args)?,
        _ => {
            let args = [&["--seeds".to_owned(), SEEDS.to_owned()], args].concat();
            play(&args)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn play(args: &[String]) -> Result<()> {
    status(cargo()?.args(TEST).arg("--").args(args))
}
