//! Runs specs with Ginkgo, in several processes, beside the control plane.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use kplane_rig::process::last_words;
use kplane_rig::real::{RealCluster, e2e};

use super::report::{self, Outcome, Spec};
use super::specs::Selection;

/// Longest time of a run.
const LONGEST: &str = "90m";
/// The interval at which the log is read.
const PAUSE: Duration = Duration::from_secs(1);
const REPORT: &str = "report.json";
/// What Ginkgo prints when a spec has run.
const RAN: char = '•';

/// A cluster under test.
pub(super) struct Ginkgo<'a> {
    pub(super) tests: &'a e2e::Programs,
    pub(super) cluster: &'a RealCluster,
    /// The folder of logs and reports.
    pub(super) folder: &'a Path,
    pub(super) nodes: u8,
}

impl Ginkgo<'_> {
    /// Runs specs, `procs` at a time. Calls `half_way` once, when half of them have run.
    ///
    /// # Errors
    /// The tests do not start or do not report; a failed spec is no error.
    pub(super) fn run(
        &self,
        name: &str,
        selection: &Selection,
        procs: u8,
        half_way: impl FnOnce() -> Result<()> + Send,
    ) -> Result<Vec<Spec>> {
        let folder = self.folder.join(name);
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
        }
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let log = folder.join("log.txt");
        let command = self.command(&folder, &log, selection, procs)?;
        println!("running specs; the log is {}", log.display());
        self.cluster.ns().run(|| watch(command, &log, half_way))?;
        let report = folder.join(REPORT);
        ensure!(
            report.is_file(),
            "the tests have written no report; their log ends with\n{}",
            last_words(&log)
        );
        report::parse(&report)
    }

    /// Runs failed specs again, one at a time, and notes which pass.
    ///
    /// # Errors
    /// As [`Ginkgo::run`].
    pub(super) fn again_alone(&self, specs: &mut [Spec]) -> Result<()> {
        let failed = |spec: &&Spec| spec.outcome == Outcome::Failed;
        let names: Vec<_> = specs.iter().filter(failed).map(|spec| spec.name.clone()).collect();
        if names.is_empty() {
            return Ok(());
        }
        println!("failed, and tried again alone:\n{}", names.join("\n"));
        let selection = Selection::named(names.iter().map(String::as_str));
        let again = self.run("alone", &selection, 1, || Ok(()))?;
        for spec in again.iter().filter(|spec| spec.outcome == Outcome::Passed) {
            let mut all = specs.iter_mut();
            if let Some(first) = all.find(|first| first.name == spec.name) {
                first.outcome = Outcome::PassedAlone;
            }
        }
        Ok(())
    }

    fn command(
        &self,
        folder: &Path,
        log: &Path,
        selection: &Selection,
        procs: u8,
    ) -> Result<Command> {
        let file = File::create(log).with_context(|| format!("create {}", log.display()))?;
        let path = self.cluster.kubeconfig();
        let kubeconfig = path.display();
        // All of the tests' processes end with this one, even if this one is killed.
        let mut command = self.cluster.command("setpriv");
        command
            .args(["--pdeathsig", "KILL", "--", "unshare"])
            .args(["--pid", "--mount-proc", "--fork", "--kill-child", "--"])
            .arg(self.tests.ginkgo())
            .args(["run", "--no-color", "--keep-going", "--timeout", LONGEST])
            .arg(format!("--procs={procs}"))
            .arg(format!("--json-report={REPORT}"))
            .arg(format!("--output-dir={}", folder.display()));
        for focus in &selection.focus {
            command.arg(format!("--focus={focus}"));
        }
        for skip in &selection.skip {
            command.arg(format!("--skip={skip}"));
        }
        command
            .arg(self.tests.tests())
            .args(["--", "--provider=skeleton", "--disable-log-dump"])
            .arg(format!("--kubeconfig={kubeconfig}"))
            .arg(format!("--host={}", self.cluster.server()))
            .arg(format!("--num-nodes={}", self.nodes))
            .arg(format!("--e2e-output-dir={}", folder.display()))
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file);
        Ok(command)
    }
}

/// Runs the command to its end, from the calling thread, and calls `half_way` once.
fn watch(mut command: Command, log: &Path, half_way: impl FnOnce() -> Result<()>) -> Result<()> {
    let mut half_way = Some(half_way);
    let mut child = command.spawn().context("start ginkgo")?;
    let mut shown = 0;
    loop {
        let ended = child.try_wait().context("wait for ginkgo")?;
        let text = fs::read(log).with_context(|| log.display().to_string())?;
        let text = String::from_utf8_lossy(&text);
        let ran = text.matches(RAN).count();
        if let Some(all) = planned(&text) {
            if ran * 2 >= all
                && let Some(half_way) = half_way.take()
            {
                half_way()?;
            }
            if ran / 10 > shown / 10 {
                println!("{ran} of {all} specs have run");
                shown = ran;
            }
        }
        match ended {
            // A failed spec makes the exit code 1, and is in the report.
            Some(status) if status.code().is_some() => return Ok(()),
            Some(status) => bail!("ginkgo: {status}"),
            None => thread::sleep(PAUSE),
        }
    }
}

/// Returns the number of specs that Ginkgo says that it will run.
fn planned(log: &str) -> Option<usize> {
    let (_, rest) = log.split_once("Will run ")?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_specs_is_in_the_log() {
        let log = "Random Seed: 1\n\nWill run 141 of 7579 specs\nRunning in parallel";
        assert_eq!(planned(log), Some(141));
        assert_eq!(planned("Random Seed: 1"), None);
    }
}
