//! The `main` of a test program whose tests use namespaces (`harness = false` in `Cargo.toml`).
//!
//! libtest starts threads before a test can run, and a process with threads cannot enter a user
//! namespace. Such programs therefore have this `main`, with libtest's own options and output.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};

use crate::privilege::require_netns;
use crate::userns;

/// Duration above which a test is named at the end.
const LONG: Duration = Duration::from_secs(2);

/// A test: its name and its body.
pub type Test = (&'static str, fn() -> Result<()>);

/// Converts the named functions to [`Test`]s: `const TESTS: &[Test] =
/// kplane_rig::tests!(nat::dnat);`
#[macro_export]
macro_rules! tests {
    ($($test:path),+ $(,)?) => {
        &[$((stringify!($test), $test)),+]
    };
}

/// Defines a `main` that runs the named functions: `kplane_rig::main!(nat::dnat, nat::hairpin);`
#[macro_export]
macro_rules! main {
    ($($test:path),+ $(,)?) => {
        fn main() -> ::std::process::ExitCode {
            let tests: &[$crate::harness::Test] = $crate::tests!($($test),+);
            $crate::harness::run(1, tests.iter().copied())
        }
    };
}

/// Runs tests, at most `threads` at a time unless `--test-threads` says otherwise. They run in
/// namespaces apart from the machine's, as root or not.
#[must_use]
pub fn run<N, B>(threads: usize, tests: impl IntoIterator<Item = (N, B)>) -> ExitCode
where
    N: Into<String>,
    B: FnOnce() -> Result<()> + Send + 'static,
{
    let usable = userns::isolate().and_then(|_| require_netns());
    let usable = match usable.or_else(skip_unless_strict) {
        Ok(usable) => usable,
        Err(error) => {
            eprintln!("{error:#}");
            return ExitCode::FAILURE;
        }
    };
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(threads);
    let times = Times::default();
    let trial = |(name, body): (N, B)| {
        let (name, times) = (name.into(), times.clone());
        let timed = name.clone();
        let body = move || {
            let outcome = times.take(timed, body);
            // The error is printed without a backtrace, so that it is readable at the end of a long
            // log.
            outcome.map_err(|error| Failed::from(format!("{error:#}")))
        };
        Trial::test(name, body).with_ignored_flag(!usable)
    };
    let trials = tests.into_iter().map(trial).collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    times.print();
    conclusion.exit_code()
}

/// The duration of each test.
#[derive(Clone, Debug, Default)]
struct Times(Arc<Mutex<Vec<(Duration, String)>>>);

impl Times {
    fn take<T>(&self, name: String, body: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let outcome = body();
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push((start.elapsed(), name));
        outcome
    }

    /// Prints the long tests, longest first.
    fn print(&self) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|(took, _)| *took > LONG);
        all.sort_by(|a, b| b.cmp(a));
        for (took, name) in all.iter() {
            println!("{:>6.1} s  {name}", took.as_secs_f64());
        }
    }
}

fn skip_unless_strict(error: anyhow::Error) -> Result<bool> {
    if crate::privilege::is_strict() {
        return Err(error.context("namespaces are required here"));
    }
    println!("skipped: {error:#}");
    Ok(false)
}
