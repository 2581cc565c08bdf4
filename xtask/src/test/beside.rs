//! A step that runs beside later ones, when those leave the processors idle.

use std::fs::{self, File};
use std::process::{Child, Command};

use anyhow::{Context as _, Result, ensure};

use crate::cargo::{self, root};

/// A running step. When it is dropped before its end, it is killed.
pub(super) struct Beside {
    name: &'static str,
    child: Child,
}

impl Beside {
    /// Starts cargo at the lowest priority. Its lines are kept in a file, so that they do not mix with those of other
    /// steps.
    pub(super) fn start(name: &'static str, args: &[&str]) -> Result<Self> {
        let program = cargo::cargo()?;
        let mut command = Command::new("nice");
        command.args(["-n", "19"]).arg(program.get_program());
        for (variable, value) in program.get_envs() {
            match value {
                Some(value) => command.env(variable, value),
                None => command.env_remove(variable),
            };
        }
        let log = File::create(log(name)?).context("cannot write the lines of a step")?;
        let errors = log
            .try_clone()
            .context("cannot write the lines of a step")?;
        command.current_dir(root()?).args(args);
        command.stdout(log).stderr(errors);
        let child = command.spawn().context("cannot run nice")?;
        Ok(Self { name, child })
    }

    /// Waits for the end, and prints all lines.
    pub(super) fn finish(mut self) -> Result<()> {
        let status = self.child.wait()?;
        print!("{}", fs::read_to_string(log(self.name)?)?);
        ensure!(status.success(), "{status}");
        Ok(())
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // Cargo does not take its test with it.
            let parent = self.child.id().to_string();
            let _ = Command::new("pkill").args(["--parent", &parent]).status();
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn log(name: &str) -> Result<std::path::PathBuf> {
    let folder = root()?.join("target");
    fs::create_dir_all(&folder)?;
    Ok(folder.join(format!("{name}.log")))
}
