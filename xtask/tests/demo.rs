//! The demo is a test: it checks everything that it shows. Here it is played as a user would play
//! it, with programs built like these tests.

#![allow(clippy::unwrap_used, reason = "a test that cannot prepare its input has failed")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

use kplane_tests::privilege::is_strict;

/// Exit code of the demo where the machine does not allow network namespaces.
const IMPOSSIBLE: i32 = 3;

/// One at a time: both count connections that fail, and the machine may be a small one.
static STAGE: Mutex<()> = Mutex::new(());

#[test]
fn the_shop() {
    let shown = play(&[]);
    for expected in ["NodePort: a client outside", "kpctl describe service shop/api"] {
        assert!(shown.contains(expected), "{shown}");
    }
}

#[test]
fn a_real_cluster() {
    let dump = workspace().join("tests/data/cluster-dump.yaml");
    let shown = play(&["--objects", dump.to_str().unwrap()]);
    assert!(shown.contains("ingress/gateway"), "{shown}");
    assert!(shown.contains("6 nodes"), "{shown}");
}

#[test]
fn what_cannot_be_played_says_so() {
    let missing = demo(&["--bin-dir", "/nowhere"]);
    assert_eq!(missing.status.code(), Some(1));
    let stderr = String::from_utf8(missing.stderr).unwrap();
    assert_eq!(stderr, "demo: there is no /nowhere/kp-controlplane\n");
}

/// Plays it to its end, where all checks have passed, and returns what it has shown.
fn play(args: &[&str]) -> String {
    let _alone = STAGE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = programs();
    let output = demo(&[&["--bin-dir", folder.to_str().unwrap()], args].concat());
    let shown = String::from_utf8(output.stdout).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(IMPOSSIBLE) && !is_strict() {
        println!("skipped: {stderr}");
        // Whatever is looked for in it was not shown.
        std::process::exit(0);
    }
    assert!(output.status.success(), "{shown}\n{stderr}");
    let last = shown.lines().last().unwrap();
    let words: Vec<&str> = last.split(' ').collect();
    let ["demo:", passed, "of", all, "checks", "passed", "in", _, "s"] = words[..] else {
        panic!("{last}");
    };
    assert_eq!(passed, all);
    // Nothing but ASCII where nobody looks.
    assert!(shown.is_ascii(), "{shown}");
    shown
}

fn demo(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_xtask")).arg("demo").args(args).output().unwrap()
}

/// Builds the programs as these tests are built, and returns their folder.
fn programs() -> PathBuf {
    let xtask = Path::new(env!("CARGO_BIN_EXE_xtask"));
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet"]).current_dir(workspace());
    cargo.args(["-p", "kp-controlplane", "-p", "kp-nodeagent", "-p", "kpctl"]);
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    assert!(cargo.status().unwrap().success());
    xtask.parent().unwrap().to_owned()
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}
