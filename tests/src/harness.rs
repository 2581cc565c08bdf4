//! The `main` of a test program whose tests use namespaces (`harness = false` in `Cargo.toml`).
//!
//! libtest starts threads before a test can run, and a process with threads cannot enter a user
//! namespace; so such programs have this `main`, with libtest's own options and output.

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use libtest_mimic::{Arguments, Failed, Trial};
use nix::sched::{CloneFlags, unshare};

use crate::link::Netlink;
use crate::privilege::require_netns;
use crate::userns::{self, Entry};

/// A test: its name and its body.
pub type Test = (&'static str, fn() -> Result<()>);

/// The functions named, as [`Test`]s: `const TESTS: &[Test] = kplane_tests::tests!(nat::dnat);`
#[macro_export]
macro_rules! tests {
    ($($test:path),+ $(,)?) => {
        &[$((stringify!($test), $test)),+]
    };
}

/// Defines `main` to run the functions named: `kplane_tests::main!(nat::dnat, nat::hairpin);`
#[macro_export]
macro_rules! main {
    ($($test:path),+ $(,)?) => {
        fn main() -> ::std::process::ExitCode {
            let tests: &[$crate::harness::Test] = $crate::tests!($($test),+);
            $crate::harness::run(1, tests.iter().copied())
        }
    };
}

/// Runs tests, so many at a time unless `--test-threads` says otherwise, in namespaces apart from the
/// machine's, as root or not.
#[must_use]
pub fn run<N, B>(threads: usize, tests: impl IntoIterator<Item = (N, B)>) -> ExitCode
where
    N: Into<String>,
    B: FnOnce() -> Result<()> + Send + 'static,
{
    let usable = isolate().and_then(|()| require_netns());
    let usable = match usable.or_else(skip_unless_strict) {
        Ok(usable) => usable,
        Err(error) => {
            eprintln!("{error:#}");
            return ExitCode::FAILURE;
        }
    };
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(threads);
    let trial = |(name, body): (N, B)| {
        let body = move || body().map_err(|error| Failed::from(format!("{error:?}")));
        Trial::test(name, body).with_ignored_flag(!usable)
    };
    libtest_mimic::run(&arguments, tests.into_iter().map(trial).collect()).exit_code()
}

/// Leaves the machine's network namespace, so that a mistake in a test cannot reach it.
fn isolate() -> Result<()> {
    if userns::enter()? == Entry::Privileged {
        unshare(CloneFlags::CLONE_NEWNET).context("leave the machine's network namespace")?;
        Netlink::open()?.up("lo")?;
    }
    Ok(())
}

fn skip_unless_strict(error: anyhow::Error) -> Result<bool> {
    if crate::privilege::is_strict() {
        return Err(error.context("namespaces are required here"));
    }
    println!("skipped: {error:#}");
    Ok(false)
}
