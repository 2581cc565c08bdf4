//! `cargo xtask`: kplane's only scripts.

mod bench;
mod cluster;
mod demo;
mod test;
mod vm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// kplane's scripts.
#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    disable_help_subcommand = true
)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// See kplane work: a small cluster on this machine, real packets, in under a minute
    Demo(demo::Args),
    /// Check everything that must hold before a change lands: CI runs exactly this
    Test(test::Args),
    /// Measure how long changes take, in a real kernel, and print tables
    Bench(bench::Args),
    /// A real Kubernetes API server on this machine, to try things with
    Cluster(cluster::Args),
    /// A virtual machine whose kernel has IPVS, to try things with
    Vm(vm::Args),
    /// Stand in a network namespace until standard input ends (`demo --keep` uses it)
    #[command(hide = true)]
    Hold,
}

fn main() -> ExitCode {
    match Cli::parse().task {
        Task::Demo(args) => demo::run(&args),
        Task::Test(args) => exit(test::run(&args)),
        Task::Bench(args) => exit(bench::run(&args)),
        Task::Cluster(args) => exit(cluster::run(&args)),
        Task::Vm(args) => vm::run(&args).unwrap_or_else(|error| exit(Err(error))),
        Task::Hold => demo::hold(),
    }
}

fn exit(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
