//! `cargo xtask`: kplane's only scripts. This program builds and starts what does the work, and has next to no
//! dependencies, so that it is ready in seconds.

mod bench;
mod book;
mod build;
mod cargo;
mod clients;
mod faults;
mod figures;
mod fleet;
mod images;
mod progress;
mod simulate;
mod start;
mod test;
mod tool;
mod weigh;

use std::process::ExitCode;

const HELP: &str = "\
kplane's scripts

Usage: cargo xtask COMMAND [OPTIONS]

Commands:
  demo      See kplane work: a small cluster on this machine, real packets
  test      Check everything that must hold before a change lands: CI runs exactly this
  bench     Measure how long changes take, in a real kernel, and print tables
  fleet     Simulate thousands of agents at real control planes, and print a table
  simulate  Play thousands of small clusters with faults, and check what must hold at each moment
  images    Make the images of the control plane and the agent, and their bills of materials
  dist      Make the archive of programs, unit files, manual pages and completions
  weigh     Count the lines of each crate, and compare them with its budget
  book      Build the documents as a book to read offline
  clients   Generate a Python package and a Go module with the API, for programs of other projects
  cluster   Start a real Kubernetes API server, or a whole cluster, on this machine, to try things with
  vm        Start a virtual machine whose kernel has IPVS, to try things with

`cargo xtask COMMAND --help` lists the options of a command.
";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let task = args.next().unwrap_or_default();
    let args: Vec<String> = args.collect();
    let done = match &*task {
        "demo" => start::demo(args),
        "test" => test::run(&args),
        "bench" => bench::run(args),
        "simulate" => simulate::run(&args),
        "fleet" => fleet::run(args),
        "book" => book::run(&args),
        "clients" => clients::run(&args),
        "images" => images::run(args),
        "weigh" => weigh::run(&args),
        "dist" => images::dist(args),
        "cluster" | "vm" => start::dev(&task, &args),
        "help" | "--help" | "-h" => {
            print!("{HELP}");
            Ok(ExitCode::SUCCESS)
        }
        "" => {
            eprint!("{HELP}");
            Ok(ExitCode::from(2))
        }
        _ => {
            eprint!("xtask: there is no command {task:?}\n\n{HELP}");
            Ok(ExitCode::from(2))
        }
    };
    done.unwrap_or_else(|error| {
        eprintln!("xtask: {error:#}");
        ExitCode::FAILURE
    })
}
