//! Tests that need only a kernel: each gets its own network namespace, on its own thread.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "for tests"
)]

use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::netns::NetNs;
use crate::privilege::available;

/// Runs `test` in a [bare](NetNs::bare) network namespace. Without the privilege to create one, the
/// test is skipped with a printed line, or fails if [missing privileges are
/// failures](crate::privilege::is_strict).
///
/// # Panics
/// When the test panics.
pub fn in_netns(test: impl FnOnce() + Send) {
    if let Some(ns) = available(NetNs::bare("test")).unwrap() {
        ns.run(|| {
            test();
            Ok(())
        })
        .unwrap();
    }
}

/// Runs `nft` in this thread's namespace, with `script` on its standard input if that is not empty.
/// Returns its output.
///
/// # Panics
/// Unless `nft` succeeds without messages on standard error.
pub fn nft(arguments: &[&str], script: &str) -> String {
    let mut child = Command::new("nft")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("nft is installed");
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(script.as_bytes()).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && errors.is_empty(),
        "nft {arguments:?}: {}: {errors}",
        output.status
    );
    String::from_utf8(output.stdout).unwrap()
}
