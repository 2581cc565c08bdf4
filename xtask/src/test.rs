//! `cargo xtask test`: everything that must hold before a change lands. CI runs exactly this.

mod beside;
mod compat;
mod e2e;
mod ladder;
mod links;
mod literals;
mod tidy;
mod tools;
mod wording;

use std::path::Path;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use self::beside::Beside;
use crate::book;
use crate::cargo::{self, programs, root, status};
use crate::simulate;

const HELP: &str = "\
Check everything that must hold before a change lands: CI runs exactly this

Usage: cargo xtask test [STEP]
       cargo xtask test e2e [OPTIONS]

Arguments:
  [STEP]  Run only the steps whose name contains this, such as `lints` or `demo`
  e2e     Run Kubernetes' own end-to-end tests, which are no step; `e2e --help` lists the options
";

/// One step: a name that a person can ask for, and what it does.
struct Step {
    name: &'static str,
    run: fn(&Path) -> Result<()>,
}

/// A step that needs nothing but processors: it begins together with [`TESTS`], which mostly wait.
const SIMULATION: &str = "simulation";
const TESTS: &str = "tests";

/// Plays the simulation. The whole workspace is named, or cargo would build the crates with other features again.
const PLAY: [&str; 7] = [
    "test",
    "--workspace",
    "--test",
    "simulation",
    "--",
    "--seeds",
    simulate::SEEDS,
];

/// Cheap and often failing first.
const STEPS: [Step; 17] = [
    Step {
        name: "tools",
        run: tools::install,
    },
    Step {
        name: "format",
        run: |_| cargo::run(&["fmt", "--all", "--check"]),
    },
    Step {
        name: "tidy",
        run: tidy::check,
    },
    Step {
        name: "wording",
        run: wording::check,
    },
    Step {
        name: "compatibility page",
        run: compat::check,
    },
    Step {
        name: "links",
        run: links::check,
    },
    Step {
        name: "ladder of crates",
        run: ladder::check,
    },
    Step {
        name: "lints",
        run: |_| {
            cargo::run(&[
                "clippy",
                "--workspace",
                "--all-targets",
                "--",
                "-D",
                "warnings",
            ])
        },
    },
    Step {
        name: "licences, bans, sources",
        run: tools::deny,
    },
    Step {
        name: "docs",
        run: docs,
    },
    Step {
        name: "book",
        run: book::build,
    },
    Step {
        name: TESTS,
        run: |_| cargo::run(&["test", "--workspace"]),
    },
    Step {
        name: SIMULATION,
        run: |_| cargo::run(&PLAY),
    },
    Step {
        name: "vm",
        run: in_vm,
    },
    Step {
        name: "demo",
        run: |_| demo(&[]),
    },
    Step {
        name: "demo on a real cluster's objects",
        run: |_| demo(&["--objects", "tests/data/cluster-dump.yaml"]),
    },
    Step {
        name: "demo without rights",
        run: |_| demo(&["--userspace"]),
    },
];

/// Runs the steps in order and stops at the first that fails.
pub(crate) fn run(args: &[String]) -> Result<ExitCode> {
    let only = match args {
        [] => "",
        [help] if help == "--help" || help == "-h" => {
            print!("{HELP}");
            return Ok(ExitCode::SUCCESS);
        }
        [e2e, options @ ..] if e2e == "e2e" => return e2e::run(options),
        [only] => only,
        more => anyhow::bail!("give one step at most: {}", more.join(" ")),
    };
    let root = root()?;
    let steps = STEPS.iter().filter(|step| step.name.contains(only));
    let steps: Vec<&Step> = steps.collect();
    ensure!(
        !steps.is_empty(),
        "no step has this name; the steps are: {}",
        names()
    );
    let plays = steps.iter().any(|step| step.name == SIMULATION);
    let mut simulation = None;
    let mut took = Vec::new();
    for (n, step) in steps.iter().enumerate() {
        println!("== {}/{} {}", n + 1, steps.len(), step.name);
        let started = Instant::now();
        if step.name == TESTS && plays {
            simulation = Some(Beside::start(SIMULATION, &PLAY)?);
        }
        let done = match simulation.take_if(|_| step.name == SIMULATION) {
            Some(simulation) => simulation.finish(),
            None => (step.run)(root),
        };
        done.with_context(|| format!("step \"{}\" failed", step.name))?;
        took.push((step.name, started.elapsed()));
    }
    summary(&took);
    Ok(ExitCode::SUCCESS)
}

fn names() -> String {
    STEPS.map(|step| step.name).join(", ")
}

fn summary(took: &[(&str, Duration)]) {
    println!();
    for (name, took) in took {
        println!("ok  {name:<34} {:>6.1} s", took.as_secs_f64());
    }
    let total: Duration = took.iter().map(|(_, took)| *took).sum();
    println!(
        "\nall {} steps passed in {:.0} s",
        took.len(),
        total.as_secs_f64()
    );
}

/// Builds the pages of every crate; a broken link fails.
fn docs(_: &Path) -> Result<()> {
    let args = [
        "doc",
        "--workspace",
        "--no-deps",
        "--document-private-items",
    ];
    status(
        cargo::cargo()?
            .args(args)
            .env("RUSTDOCFLAGS", "-D warnings"),
    )
}

/// Runs the packet tests of the backend that this machine's kernel may not have: in two machines at a
/// time, as each has one processor; what one runs takes as long as what the other does.
fn in_vm(_: &Path) -> Result<()> {
    /// Has these tests run in the virtual machine, as `kplane_tests::vm::IN_VM` says.
    const IN_VM: &str = "KPLANE_IN_VM";
    /// Tests of `netns` that have a machine of their own.
    const APART: &str = "ipvs::virtual_server_faults";
    let words = ["test", "--package", "kplane-tests", "--test"];
    let build = ["vm", "--test", "netns", "--no-run"];
    cargo::run(&[&words[..], &build].concat())?;
    let test = |more: &[&str]| -> Result<Command> {
        let mut command = cargo::cargo()?;
        command.args(words).args(more).env(IN_VM, "1");
        Ok(command)
    };
    let mut others = [test(&["vm"])?, test(&["netns", "--", APART])?];
    // Shown when the first is done, so that their lines do not mix.
    let others = thread::spawn(move || others.each_mut().map(Command::output));
    let first = status(&mut test(&["netns", "--", "ipvs::", "--skip", APART])?);
    let others = others.join();
    let others = others.map_err(|_| anyhow::anyhow!("the other machine's thread has panicked"))?;
    let mut failed = first.is_err();
    for output in others {
        let output = output.context("cannot run tests in the other machine")?;
        print!("{}", String::from_utf8_lossy(&output.stdout));
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        failed |= !output.status.success();
    }
    ensure!(!failed, "tests in a virtual machine have failed");
    Ok(())
}

/// Runs the demo as a check, on programs that are built as the tests are.
fn demo(args: &[&str]) -> Result<()> {
    cargo::run(&["build", "--workspace", "--bins"])?;
    let folder = programs("dev")?;
    let mut command = Command::new(folder.join("kplane-dev"));
    command.current_dir(root()?);
    status(command.args(["demo", "--bin-dir"]).arg(&folder).args(args))
}
