//! `cargo xtask simulate`: plays the deterministic simulation, also on copies of the product with deliberate faults.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail, ensure};

use crate::cargo::{cargo, files, output, root, status};

const HELP: &str = "\
Play the deterministic simulation of control planes and agents

Usage: cargo xtask simulate [OPTIONS]

Options:
      --seeds N        Play this many seeds [default: 10000]
      --from SEED      Begin with this seed [default: 0]
      --seed SEED      Play one seed, and tell what happens
      --faults [NAME]  Play on copies of the product, each with one deliberate fault, and expect that each fault is
                       found: all of nodeagent/tests/simulation/faults, or those whose names contain NAME. The copies
                       have a target folder of their own: the first build takes five minutes on two cores
";

/// Number of seeds that `cargo xtask test --all` plays.
pub(crate) const SEEDS: &str = "10000";

/// The simulation's test program.
const TEST: [&str; 5] = ["test", "--package", "kp-nodeagent", "--test", "simulation"];

/// The folder of deliberate faults.
const FAULTS: &str = "nodeagent/tests/simulation/faults";

/// The folder of the faulty copy, and its target folder. The copy is not part of the workspace.
const COPY: &str = "target/faults/tree";
const TARGET: &str = "target/faults/target";

/// What to do about a fault whose place in the product has changed.
const MISFIT: &str = "the fault does not fit the product any more; write it anew";

pub(crate) fn run(args: &[String]) -> Result<ExitCode> {
    match args.first().map(String::as_str) {
        Some("--help" | "-h") => print!("{HELP}"),
        Some("--faults") => faults(args.get(1).map_or("", String::as_str))?,
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

/// Plays on a copy of the product with each fault.
fn faults(name: &str) -> Result<()> {
    let root = root()?;
    let copy = root.join(COPY);
    copy_tree(root, &copy)?;
    let mut names = patches(root)?;
    names.retain(|path| path.to_string_lossy().contains(name));
    ensure!(!names.is_empty(), "no fault has the name {name:?}");
    let mut missed = Vec::new();
    for patch in &names {
        let name = patch.file_stem().unwrap_or_default().to_string_lossy();
        apply(root, patch, &[])?;
        let found = find(root, &copy);
        apply(root, patch, &["--reverse"])?;
        match found.with_context(|| name.to_string())? {
            Some(how) => println!("found   {name}: {how}"),
            None => {
                println!("MISSED  {name}");
                missed.push(name);
            }
        }
    }
    ensure!(missed.is_empty(), "not found: {}", missed.join(", "));
    Ok(())
}

/// Returns the deliberate faults, sorted.
fn patches(root: &Path) -> Result<Vec<PathBuf>> {
    let mut patches: Vec<PathBuf> = fs::read_dir(root.join(FAULTS))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    patches.sort();
    Ok(patches)
}

/// Checks that each deliberate fault fits the product as it is.
pub(crate) fn fit(root: &Path) -> Result<()> {
    for patch in patches(root)? {
        let mut git = Command::new("git");
        git.current_dir(root).args(["apply", "-C1", "--check"]);
        status(git.arg(&patch)).context(MISFIT)?;
    }
    Ok(())
}

/// Copies all files that belong to the workspace.
fn copy_tree(root: &Path, copy: &Path) -> Result<()> {
    let files = files(root, "*")?;
    if copy.exists() {
        fs::remove_dir_all(copy)?;
    }
    for file in files.lines() {
        let (from, to) = (root.join(file), copy.join(file));
        if !from.is_file() {
            continue;
        }
        fs::create_dir_all(to.parent().unwrap_or(copy))?;
        fs::copy(&from, &to).with_context(|| format!("cannot copy {file}"))?;
    }
    Ok(())
}

/// Applies a fault to the copy, or takes it back.
fn apply(root: &Path, patch: &Path, how: &[&str]) -> Result<()> {
    let mut git = Command::new("git");
    git.current_dir(root).arg("apply").arg("-C1").args(how);
    git.arg(format!("--directory={COPY}")).arg(patch);
    status(&mut git).context(MISFIT)
}

/// Builds the copy and plays on it; returns how the fault is found.
fn find(root: &Path, copy: &Path) -> Result<Option<String>> {
    let test = || -> Result<Command> {
        let mut command = cargo()?;
        command.current_dir(copy).args(TEST);
        command.env("CARGO_TARGET_DIR", root.join(TARGET));
        Ok(command)
    };
    output(test()?.args(["--quiet", "--no-run"]))?;
    let played = test()?.args(["--quiet", "--", "--brief", "--seeds", SEEDS]).output()?;
    if played.status.success() {
        return Ok(None);
    }
    let reported = String::from_utf8_lossy(&played.stdout);
    let Some(found) = reported.lines().find(|line| line.starts_with("seed ")) else {
        bail!("the simulation did not say what it found: {reported}");
    };
    Ok(Some(found.to_owned()))
}
