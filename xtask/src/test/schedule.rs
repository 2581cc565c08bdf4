//! Runs suites beside each other: those that wait beside those that compute.

use std::fs::{self, File};
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::report::{self, Outcome};
use super::suites::{FILLER, Suite, calm};

/// How often running suites are checked.
const POLL: Duration = Duration::from_millis(50);
/// How often a log that is no terminal says what is running.
const REMIND: Duration = Duration::from_secs(60);
/// Ticks of a processor's time a second, as the kernel counts them for programs (`USER_HZ`).
const TICKS: u64 = 100;
/// The place of the session among the fields of `/proc/PID/stat` after the program's name.
const SESSION: usize = 3;
/// Fields of `/proc/PID/stat` before the processor times, counted after the program's name.
const BEFORE_TIMES: usize = 11;

/// A suite that runs. It is killed when this is dropped.
struct Running {
    suite: Suite,
    /// Whether the priority of the suite's session is as it shall be.
    is_calm: bool,
    child: Child,
    log: PathBuf,
    began: Instant,
}

/// Runs all suites, shows each outcome when it is there, and returns them all. A suite that fails does not stop the
/// others.
///
/// # Errors
/// A suite cannot be started, or its log cannot be read.
pub(super) fn run(
    mut waiting: Vec<Suite>,
    programs: &Path,
    logs: &Path,
    show: impl Fn(&Outcome),
) -> Result<Vec<Outcome>> {
    fs::create_dir_all(logs).with_context(|| logs.display().to_string())?;
    let capacity = capacity();
    let mut running: Vec<Running> = Vec::new();
    let mut outcomes = Vec::new();
    let mut shown = Instant::now();
    while !(waiting.is_empty() && running.is_empty()) {
        while let Some(next) = next(&waiting, &running, capacity) {
            running.push(Running::start(waiting.remove(next), programs, logs)?);
        }
        thread::sleep(POLL);
        let mut still = Vec::new();
        for mut suite in running {
            match suite.cpu_time_if_ended()? {
                None => still.push(suite),
                Some(cpu) => {
                    clear_status();
                    let outcome = suite.end(cpu)?;
                    show(&outcome);
                    outcomes.push(outcome);
                }
            }
        }
        running = still;
        status(&running, waiting.len(), &mut shown);
    }
    Ok(outcomes)
}

/// Returns what may run at a time, in hundredths of a processor.
fn capacity() -> u32 {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    u32::try_from(processors).unwrap_or(u32::MAX).saturating_mul(100)
}

/// Returns the place of the first waiting suite for which there is room. One that is too large for the machine runs
/// alone.
fn next(waiting: &[Suite], running: &[Running], capacity: u32) -> Option<usize> {
    let mut loads = running.iter().map(|running| running.suite.load);
    let room = capacity.saturating_sub(loads.clone().sum());
    let has_filler = loads.any(|load| load == FILLER);
    let fits = waiting.iter().position(|suite| match suite.load {
        FILLER => !has_filler,
        load => load <= room,
    });
    fits.or_else(|| (running.is_empty() && !waiting.is_empty()).then_some(0))
}

impl Running {
    fn start(suite: Suite, programs: &Path, logs: &Path) -> Result<Self> {
        let log = logs.join(format!("{}.log", suite.name.replace(' ', "-")));
        let lines = File::create(&log).with_context(|| log.display().to_string())?;
        let errors = lines.try_clone()?;
        let mut command = suite.command(programs)?;
        command.stdin(Stdio::null()).stdout(lines).stderr(errors);
        command.env(report::SKIPPED, report::skips(&log));
        let _ = fs::remove_file(report::skips(&log));
        let child =
            command.spawn().with_context(|| format!("cannot start suite {}", suite.name))?;
        Ok(Self {
            is_calm: suite.load != FILLER,
            suite,
            child,
            log,
            began: Instant::now(),
        })
    }

    /// Returns the processor time of a program that has ended, and of all programs that it waited for. The kernel has
    /// it until the exit code is asked for.
    fn cpu_time_if_ended(&mut self) -> Result<Option<Duration>> {
        let fields = fields_of(self.child.id())?;
        // The session is the program's own from the moment on that the program has it.
        let session = fields.get(SESSION).and_then(|field| field.parse().ok());
        if !self.is_calm && session == Some(self.child.id()) {
            calm(self.child.id());
            self.is_calm = true;
        }
        let has_ended = fields.first().is_some_and(|state| state == "Z");
        Ok(has_ended.then(|| times(&fields)))
    }

    fn end(mut self, cpu: Duration) -> Result<Outcome> {
        let status = self.child.wait()?;
        report::outcome(&self.suite, status, &self.log, self.began.elapsed(), cpu)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Returns the processor time of all programs that this one has waited for, and of those that they waited for.
///
/// # Errors
/// The kernel does not say.
pub(super) fn cpu_time_of_all() -> Result<Duration> {
    let fields = fields_of(std::process::id())?;
    Ok(times(&fields))
}

/// Returns the fields of `/proc/PID/stat` after the program's name, which may contain anything.
fn fields_of(pid: u32) -> Result<Vec<String>> {
    let file = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&file).with_context(|| file.clone())?;
    let fields = text.rsplit_once(')').map_or("", |(_, fields)| fields);
    Ok(fields.split_whitespace().map(str::to_owned).collect())
}

/// Adds up the times of a program and of the programs that it waited for, in user space and in the kernel.
fn times(fields: &[String]) -> Duration {
    let times = fields.iter().skip(BEFORE_TIMES).take(4);
    let ticks: u64 = times.filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 1000 / TICKS)
}

/// Says what is running: in the last line of a terminal, or with a line from time to time.
fn status(running: &[Running], waiting: usize, shown: &mut Instant) {
    let names: Vec<String> = running
        .iter()
        .map(|running| {
            format!(
                "{} {}s",
                running.suite.name,
                running.began.elapsed().as_secs()
            )
        })
        .collect();
    if names.is_empty() {
        return;
    }
    let text = format!("running: {}; {waiting} wait", names.join(", "));
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K{}", text.chars().take(100).collect::<String>());
    } else if shown.elapsed() >= REMIND {
        println!("{text}");
        *shown = Instant::now();
    }
}

fn clear_status() {
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K");
    }
}

#[cfg(test)]
mod tests {
    use super::super::suites::Run;
    use super::*;

    fn suite(load: u32) -> Suite {
        Suite {
            name: "s".to_owned(),
            load,
            seconds: 1,
            run: Run::Dev(&[]),
        }
    }

    #[test]
    fn times_of_processors_are_those_of_the_kernel() {
        let stat = "S 1 2 3 4 5 6 7 8 9 10 100 50 20 30 99".split(' ');
        let fields: Vec<String> = stat.map(str::to_owned).collect();
        assert_eq!(times(&fields), Duration::from_secs(2));
        assert!(cpu_time_of_all().is_ok());
    }

    #[test]
    fn what_fits_is_started_and_what_is_too_large_runs_alone() {
        assert_eq!(next(&[suite(300), suite(100)], &[], 200), Some(1));
        assert_eq!(next(&[suite(300)], &[], 200), Some(0));
        assert_eq!(next(&[], &[], 200), None);
    }
}
