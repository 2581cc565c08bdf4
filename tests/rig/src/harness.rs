//! The `main` of a test program with suites, whose tests may use namespaces (`harness = false` in `Cargo.toml`).
//!
//! libtest starts threads before a test can run, and a process with threads cannot enter a user
//! namespace. Such programs therefore have this `main`, with libtest's own options and output.
//!
//! A program has several suites, because one program is linked faster than many. Its first argument
//! names the suite: `it netns --exact nat::dnat`.

use std::env;
use std::ffi::OsString;
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
pub use libtest_mimic::Arguments;
use libtest_mimic::{Failed, Trial};

use crate::privilege::{Skipped, available, require_netns};
use crate::userns;

/// Duration above which a test is named at the end.
const LONG: Duration = Duration::from_secs(2);

/// A test: its name and its body.
pub type Test = (&'static str, fn() -> Result<()>);

/// A suite of tests: its name, and its `main`, which gets the arguments after the name.
pub type Suite = (&'static str, fn(&Arguments) -> ExitCode);

/// Converts the named functions to [`Test`]s: `const TESTS: &[Test] =
/// kplane_rig::tests!(nat::dnat);`
#[macro_export]
macro_rules! tests {
    ($($test:path),+ $(,)?) => {
        &[$((stringify!($test), $test)),+]
    };
}

/// Runs the suite that the first argument names. Without a name, this program starts itself once for each
/// suite, one after the other, with the same options.
pub fn suites(all: &[Suite]) -> ExitCode {
    let mut words = env::args_os();
    let program = words.next().unwrap_or_default();
    let mut words = words.peekable();
    let Some(named) = words.next_if(|word| !word.to_string_lossy().starts_with('-')) else {
        let options: Vec<OsString> = words.collect();
        return each(all, &options);
    };
    let Some((_, suite)) = all.iter().find(|(name, _)| named == *name) else {
        let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
        let (named, names) = (named.display(), names.join(", "));
        eprintln!("there is no suite {named}; the first argument is one of: {names}");
        return ExitCode::from(2);
    };
    suite(&Arguments::from_iter([program].into_iter().chain(words)))
}

/// Runs all suites. Each needs a process of its own, which enters namespaces before it has threads.
fn each(all: &[Suite], options: &[OsString]) -> ExitCode {
    let mut failed = Vec::new();
    for (name, _) in all {
        println!("\n== {name}");
        let run = || {
            let mut again = Command::new(env::current_exe()?);
            again.arg(name).args(options).status()
        };
        match run().with_context(|| format!("start the suite {name}")) {
            Ok(status) if status.success() => {}
            Ok(status) => failed.push(format!("{name}: {status}")),
            Err(error) => failed.push(format!("{error:#}")),
        }
    }
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("failed suites: {}", failed.join(", "));
    ExitCode::FAILURE
}

/// Runs tests, at most `threads` at a time unless `--test-threads` says otherwise. They run in
/// namespaces apart from the machine's, as root or not.
pub fn run<N, B>(
    arguments: &Arguments,
    threads: usize,
    tests: impl IntoIterator<Item = (N, B)>,
) -> ExitCode
where
    N: Into<String>,
    B: FnOnce() -> Result<()> + Send + 'static,
{
    prepared(arguments, threads, || Ok(true), tests)
}

/// Runs tests as [`run`] does, after a preparation that still has the machine's network. If this returns
/// `false`, all tests are skipped.
pub fn prepared<N, B>(
    arguments: &Arguments,
    threads: usize,
    prepare: impl FnOnce() -> Result<bool>,
    tests: impl IntoIterator<Item = (N, B)>,
) -> ExitCode
where
    N: Into<String>,
    B: FnOnce() -> Result<()> + Send + 'static,
{
    let isolate = || {
        let usable = userns::isolate().and_then(|_| require_netns());
        Ok::<_, anyhow::Error>(available(usable)?.unwrap_or(false))
    };
    // Names alone need neither programs nor namespaces.
    let usable = if arguments.list {
        Ok(true)
    } else {
        prepare().and_then(|usable| Ok(usable && isolate()?))
    };
    match usable {
        Ok(usable) => play(arguments, Some(threads), usable, tests),
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs tests that need no namespaces, where this process is, on all processors.
pub fn run_here<N, B>(arguments: &Arguments, tests: impl IntoIterator<Item = (N, B)>) -> ExitCode
where
    N: Into<String>,
    B: FnOnce() -> Result<()> + Send + 'static,
{
    play(arguments, None, true, tests)
}

/// Skips all tests.
pub fn skip<N, B>(arguments: &Arguments, tests: impl IntoIterator<Item = (N, B)>) -> ExitCode
where
    N: Into<String>,
    B: FnOnce() -> Result<()> + Send + 'static,
{
    play(arguments, None, false, tests)
}

fn play<N, B>(
    arguments: &Arguments,
    threads: Option<usize>,
    usable: bool,
    tests: impl IntoIterator<Item = (N, B)>,
) -> ExitCode
where
    N: Into<String>,
    B: FnOnce() -> Result<()> + Send + 'static,
{
    let mut arguments = arguments.clone();
    arguments.test_threads = arguments.test_threads.or(threads);
    let times = Times::default();
    let trial = |(name, body): (N, B)| {
        let (name, times) = (name.into(), times.clone());
        let timed = name.clone();
        let body = move || {
            let outcome = match times.take(timed, body) {
                Err(error) if error.is::<Skipped>() => Ok(()),
                outcome => outcome,
            };
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
