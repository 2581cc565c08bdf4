//! Programs of other projects that checks need: installed once by cargo, kept outside of the checkout.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use crate::cargo::run;

/// A program that is a crate.
pub(crate) struct Tool {
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
    /// Further arguments of `cargo install`.
    pub(crate) options: &'static [&'static str],
    /// How long the first build takes, in words.
    pub(crate) takes: &'static str,
}

impl Tool {
    /// Installs the program, unless it is there.
    pub(crate) fn install(&self) -> Result<()> {
        let root = self.root()?;
        if self.path(&root).exists() {
            return Ok(());
        }
        let Self {
            name,
            version,
            takes,
            ..
        } = self;
        println!("building {name} {version}, once: about {takes}");
        let into = root.to_string_lossy();
        let words = [
            "install",
            name,
            "--version",
            version,
            "--locked",
            // It runs for a second: optimisation would take longer than it saves.
            "--debug",
            "--root",
            &into,
        ];
        run(&[&words[..], self.options].concat())
    }

    /// Returns the path of the program.
    pub(crate) fn program(&self) -> Result<PathBuf> {
        let path = self.path(&self.root()?);
        let name = self.name;
        ensure!(
            path.exists(),
            "{name} is missing; run the step \"tools\" first"
        );
        Ok(path)
    }

    fn path(&self, root: &Path) -> PathBuf {
        root.join("bin").join(self.name)
    }

    fn root(&self) -> Result<PathBuf> {
        folder(self.name, self.version)
    }
}

/// Returns the folder of a program: shared by all checkouts of a user, one folder for each version.
pub(crate) fn folder(name: &str, version: &str) -> Result<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = cache.or_else(home).context("neither XDG_CACHE_HOME nor HOME is set")?;
    Ok(cache.join("kplane/tools").join(format!("{name}-{version}")))
}
