//! The program behind `cargo xtask`: the demo, the tests' cluster, and the tests' virtual machine.

mod cluster;
mod demo;
mod e2e;
mod images;
mod rollouts;
mod tools;
mod vm;

use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Starts kplane's demo, and the cluster and the virtual machine of its tests.
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
    /// A real Kubernetes API server, or a whole cluster, on this machine, to try things with
    Cluster(cluster::Args),
    /// A virtual machine whose kernel has IPVS, to try things with
    Vm(vm::Args),
    /// Images of kplane's programs, for a registry or a node
    Images(images::Args),
    /// The programs for machines without a registry, as one archive
    Dist(images::tarball::Args),
    /// Kubernetes' own end-to-end tests of networks, with kplane and with kube-proxy
    #[command(name = "test-e2e", bin_name = "cargo xtask test e2e", hide = true)]
    E2e(e2e::Args),
    /// Connections that fail while Pods and nodes go, with kplane and with kube-proxy
    #[command(
        bin_name = "cargo xtask bench --against kube-proxy-rollouts",
        hide = true
    )]
    Rollouts(rollouts::Args),
    /// Install what the tests need beyond Rust
    #[command(hide = true)]
    Tools,
}

fn main() -> ExitCode {
    match Cli::parse().task {
        Task::Demo(args) => demo::run(&args),
        Task::Cluster(args) => exit(cluster::run(&args)),
        Task::Vm(args) => vm::run(&args).unwrap_or_else(|error| exit(Err(error))),
        Task::Images(args) => exit(images::run(&args)),
        Task::Dist(args) => exit(images::tarball::run(&args)),
        Task::E2e(args) => exit(e2e::run(&args)),
        Task::Rollouts(args) => exit(rollouts::run(&args)),
        Task::Tools => exit(tools::install()),
    }
}

/// The workspace's folder.
fn workspace() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package)
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
