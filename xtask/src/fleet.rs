//! `cargo xtask fleet`: thousands of simulated agents at real control planes, on this machine.

use std::process::{Command, ExitCode};

use anyhow::Result;

use crate::bench::build;
use crate::cargo::status;

const HELP: &str = "\
Simulate a fleet on this machine: how fast, how large, and what happens when replicas go

Usage: cargo xtask fleet [OPTIONS]

Control planes are real programs. Agents are simulated in one process: each has a connection with mutual TLS and an
address of its own, and checks the digest of what it holds after every update. Nothing is written to any kernel.
Everything is on loopback in a network namespace of its own; it needs root or user namespaces.

Options:
      --agents <N>        Number of agents [default: 1000]
      --services <N>      Number of Services that each agent holds [default: 1000]
      --replicas <N>      Number of control planes [default: 1]
      --changes <N>       Single changes of one endpoint, one after the other [default: 20]
      --churn <N>         Changes a second, as a further step and while replicas are away [default: 0]
      --seconds <N>       Duration of that step [default: 60]
      --stall <N>         Further step: so many agents stop reading
      --partition <N>     Further step: so many replicas are cut off from their agents without a word
      --restart           Further step: all control planes are killed and started again
      --kill <N>          Last step: so many replicas are killed, and later started again
      --settle <SECONDS>  Time after which the memory of the remaining replicas is compared [default: 60]
      --api-server        Instead: compare what an API server does for kube-proxies on as many nodes as agents, and for
                          one and three control planes; needs --churn
      --cursors <N,..>    Instead: memory and CPU of so many agents in one process with the control plane, without a
                          network: what a change costs that concerns all of them, 1 % of them, or none
      --reports <BOOL>    Whether agents report after each update, as real ones do [default: true]
      --trace <FILE>      Write a line of JSON every second
      --write             Write the table to docs/benchmarks.md
  -h, --help              Print help

Examples:
  Does one control plane suffice for 3,000 nodes and 5,000 Services with 20 changes a second?
    cargo xtask fleet --agents 3000 --services 5000 --churn 20
  What happens when one of three replicas dies?
    cargo xtask fleet --agents 3000 --services 5000 --replicas 3 --churn 20 --kill 1 --trace fleet.jsonl
  What does the API server save?
    cargo xtask fleet --agents 1000 --churn 20 --seconds 30 --api-server
";

/// Builds the control plane and the simulator with optimisation, and runs them.
pub(crate) fn run(mut args: Vec<String>) -> Result<ExitCode> {
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        print!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    if !args
        .iter()
        .any(|arg| arg.starts_with("--agents") || arg.starts_with("--cursors"))
    {
        args.extend(["--agents".to_owned(), "1000".to_owned()]);
    }
    println!("Building the control plane and the simulator with optimisation.");
    let program = build("release")?;
    status(Command::new(program).arg("fleet").args(args))?;
    Ok(ExitCode::SUCCESS)
}
