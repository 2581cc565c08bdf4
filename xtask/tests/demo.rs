//! The demo's own messages. The demo itself is a step of `cargo xtask test`.

#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot prepare its input has failed"
)]

use std::process::Command;

#[test]
fn what_cannot_be_played_says_so() {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_xtask"));
    let output = demo
        .args(["demo", "--bin-dir", "/nowhere"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().is_ascii());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(stderr, "demo: there is no /nowhere/kp-controlplane\n");
}
