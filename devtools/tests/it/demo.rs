//! The demo's own messages. The demo itself is a step of `cargo xtask test`.

use std::process::Command;

#[test]
fn what_cannot_be_played_says_so() {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_kplane-dev"));
    let output = demo.args(["demo", "--bin-dir", "/nowhere"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().is_ascii());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(stderr, "demo: there is no /nowhere/kp-controlplane\n");
}

/// `cargo xtask` prints it without building anything.
#[test]
fn the_help_of_the_demo_names_its_flags() {
    let short = include_str!("../../../xtask/src/demo.txt");
    let mut demo = Command::new(env!("CARGO_BIN_EXE_kplane-dev"));
    let help = demo.args(["demo", "--help"]).output().unwrap().stdout;
    let help = String::from_utf8(help).unwrap();
    let flags = help.split_whitespace().filter(|word| word.starts_with("--"));
    for flag in flags {
        assert!(short.contains(flag), "{flag}: {short}");
    }
}
