//! Kernel tests run in a network namespace of their own, on a thread of their own.

use std::process::Command;
use std::thread;

use nix::sched::{CloneFlags, unshare};

/// Runs `test` in an empty network namespace. Without the privilege to make one the test is
/// skipped with a printed line, or fails when `CI` or `REQUIRE_NETNS=1` is set.
pub(crate) fn in_netns(test: impl FnOnce() + Send) {
    let outcome = thread::scope(|scope| scope.spawn(|| enter_and(test)).join());
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

fn enter_and(test: impl FnOnce()) {
    match unshare(CloneFlags::CLONE_NEWNET) {
        Ok(()) => test(),
        Err(errno) if must_run() => panic!("cannot make a network namespace: {errno}"),
        Err(errno) => println!("skipped: cannot make a network namespace: {errno}"),
    }
}

fn must_run() -> bool {
    let is = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    is("CI") || std::env::var("REQUIRE_NETNS").is_ok_and(|value| value == "1")
}

/// Runs `nft` in this thread's namespace, with `script` on its standard input if it is not empty.
/// Panics unless it succeeds silently; returns what it prints.
pub(crate) fn nft(arguments: &[&str], script: &str) -> String {
    use std::io::Write;
    use std::process::Stdio;
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
