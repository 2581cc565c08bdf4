//! `cargo xtask test`: everything that must hold before a change lands. CI runs exactly this.

mod compat;
mod ladder;
mod tidy;
mod tools;

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

/// Options of `cargo xtask test`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run only the steps whose name contains this, such as `lints` or `demo`.
    #[arg(value_name = "STEP")]
    only: Option<String>,
}

/// One step: its name, by which a developer selects it, and its function.
struct Step {
    name: &'static str,
    run: fn(&Path) -> Result<()>,
}

/// The path of this program at its start.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// The steps, cheap and often failing ones first.
const STEPS: [Step; 12] = [
    Step {
        name: "tools",
        run: tools::install,
    },
    Step {
        name: "format",
        run: |root| cargo(root, &["fmt", "--all", "--check"], &[]),
    },
    Step {
        name: "tidy",
        run: tidy::check,
    },
    Step {
        name: "compatibility page",
        run: compat::check,
    },
    Step {
        name: "ladder of crates",
        run: ladder::check,
    },
    Step {
        name: "lints",
        run: |root| {
            cargo(
                root,
                &[
                    "clippy",
                    "--workspace",
                    "--all-targets",
                    "--",
                    "-D",
                    "warnings",
                ],
                &[],
            )
        },
    },
    Step {
        name: "licences, bans, sources",
        run: tools::deny,
    },
    Step {
        name: "docs",
        run: |root| {
            let deny = [("RUSTDOCFLAGS", "-D warnings")];
            cargo(
                root,
                &[
                    "doc",
                    "--workspace",
                    "--no-deps",
                    "--document-private-items",
                ],
                &deny,
            )
        },
    },
    Step {
        name: "tests",
        run: |root| cargo(root, &["test", "--workspace"], &[]),
    },
    Step {
        name: "vm",
        run: in_vm,
    },
    Step {
        name: "demo",
        run: |root| demo(root, &[]),
    },
    Step {
        name: "demo on a real cluster's objects",
        run: |root| demo(root, &["--objects", "tests/data/cluster-dump.yaml"]),
    },
];

/// Runs the steps in order and stops at the first that fails.
pub(crate) fn run(args: &Args) -> Result<()> {
    let root = root()?;
    // The path is read first, because a build may replace this program.
    PROGRAM.get_or_init(|| env::current_exe().unwrap_or_default());
    let wanted = |step: &&Step| {
        args.only
            .as_ref()
            .is_none_or(|only| step.name.contains(only))
    };
    let steps: Vec<&Step> = STEPS.iter().filter(wanted).collect();
    ensure!(
        !steps.is_empty(),
        "no step is called so; there are: {}",
        names()
    );
    let mut took = Vec::new();
    for (n, step) in steps.iter().enumerate() {
        println!("== {}/{} {}", n + 1, steps.len(), step.name);
        let started = Instant::now();
        (step.run)(root).with_context(|| format!("step \"{}\" failed", step.name))?;
        took.push((step.name, started.elapsed()));
    }
    summary(&took);
    Ok(())
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

/// Returns the root of the workspace.
pub(crate) fn root() -> Result<&'static Path> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    root.context("xtask lies in a folder of the workspace")
}

/// Runs cargo in the workspace.
fn cargo(root: &Path, args: &[&str], envs: &[(&str, &str)]) -> Result<()> {
    let mut command = kplane_tests::product::cargo();
    command
        .current_dir(root)
        .args(args)
        .envs(envs.iter().copied());
    status(&mut command)
}

/// Runs the packet tests of the backend that this machine's kernel may not have. Two machines run at
/// a time, each with one processor. Both take about the same time.
fn in_vm(root: &Path) -> Result<()> {
    /// The tests of `netns` that have their own machine.
    const APART: &str = "ipvs::virtual_server_faults";
    let words = ["test", "--package", "kplane-tests", "--test"];
    let build = ["vm", "--test", "netns", "--no-run"];
    cargo(root, &[&words[..], &build].concat(), &[])?;
    let test = |more: &[&str]| {
        let mut command = kplane_tests::product::cargo();
        command.current_dir(root).args(words).args(more);
        command.env(kplane_tests::vm::IN_VM, "1");
        command
    };
    let mut others = [test(&["vm"]), test(&["netns", "--", APART])];
    // Their output is shown when the first machine is done, so that lines do not mix.
    let others = thread::spawn(move || others.each_mut().map(Command::output));
    let first = status(&mut test(&["netns", "--", "ipvs::", "--skip", APART]));
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
fn demo(root: &Path, args: &[&str]) -> Result<()> {
    let me = PROGRAM.get().context("set when the steps begin")?;
    let programs = me.parent().context("programs lie in a folder")?;
    cargo(root, &["build", "--workspace", "--bins"], &[])?;
    let mut command = Command::new(me);
    command
        .current_dir(root)
        .args(["demo", "--bin-dir"])
        .arg(programs)
        .args(args);
    status(&mut command)
}

fn status(command: &mut Command) -> Result<()> {
    let shown = format!("{command:?}").replace('"', "");
    let status = command
        .status()
        .with_context(|| format!("cannot run {shown}"))?;
    if !status.success() {
        bail!("{shown}: {status}");
    }
    Ok(())
}
