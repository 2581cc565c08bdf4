//! Programs built by Go into a folder of the cache. A program in that folder is complete, because it is
//! moved there after its build.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};

/// The lock held while building.
const LOCK: &str = "build.lock";
/// Linker flags that leave out what only debuggers read.
pub(crate) const STRIP: &str = "-s -w";

/// Programs that share a folder of the cache.
#[derive(Debug)]
pub(crate) struct Build {
    /// The folder with `go.mod`.
    pub(crate) module: PathBuf,
    /// The folder of the result, whose name has the versions: programs are in its `bin`.
    pub(crate) folder: PathBuf,
    /// The names and versions of the projects, and how long their first build takes, for messages.
    pub(crate) what: String,
    pub(crate) recipes: Vec<Recipe>,
}

/// Programs that one command builds, because they share most packages.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recipe {
    /// The names of the programs. A single program may be called otherwise than its package's folder.
    pub(crate) programs: Vec<&'static str>,
    /// The packages of the programs, in the same order.
    pub(crate) packages: Vec<String>,
    pub(crate) ld_flags: String,
    pub(crate) tags: &'static str,
    /// Whether to build without C, so that the programs need no library.
    pub(crate) is_static: bool,
    /// Whether the package's tests are the program. Such a recipe has one program.
    pub(crate) is_test: bool,
}

impl Build {
    /// Returns the folder of the programs.
    pub(crate) fn bin(&self) -> PathBuf {
        self.folder.join("bin")
    }

    /// Builds missing programs, and returns their folder. If two processes want to build, one waits.
    ///
    /// # Errors
    /// Go is missing, a download or a build failed, or the checkout is not writable.
    pub(crate) fn ensure(&self) -> Result<PathBuf> {
        let bin = self.bin();
        if self.missing().is_empty() {
            return Ok(bin);
        }
        fs::create_dir_all(&bin).with_context(|| format!("create {}", bin.display()))?;
        let lock = File::create(self.folder.join(LOCK)).context("create the lock of the build")?;
        lock.lock()
            .context("wait for another process that builds")?;
        let missing = self.missing();
        if !missing.is_empty() {
            self.build(&missing)?;
        }
        Ok(bin)
    }

    fn missing(&self) -> Vec<&'static str> {
        let all = self.recipes.iter().flat_map(|recipe| &recipe.programs);
        let bin = self.bin();
        all.copied()
            .filter(|program| !bin.join(program).is_file())
            .collect()
    }

    fn build(&self, missing: &[&str]) -> Result<()> {
        eprintln!("building {} with Go ({})", missing.join(", "), self.what);
        let began = Instant::now();
        let fresh = self.folder.join("building");
        if fresh.exists() {
            fs::remove_dir_all(&fresh).with_context(|| fresh.display().to_string())?;
        }
        fs::create_dir_all(&fresh).with_context(|| fresh.display().to_string())?;
        for recipe in &self.recipes {
            let wanted = recipe.only(missing);
            if !wanted.programs.is_empty() {
                run(&mut wanted.command(&self.module, &fresh))?;
            }
        }
        for program in missing {
            fs::rename(fresh.join(program), self.bin().join(program))
                .with_context(|| format!("Go has built no {program}"))?;
        }
        eprintln!("built in {:.0} s", began.elapsed().as_secs_f64());
        fs::remove_dir(&fresh).with_context(|| fresh.display().to_string())
    }
}

impl Recipe {
    /// Returns the recipe for some of its programs.
    fn only(&self, wanted: &[&str]) -> Self {
        let (mut programs, mut packages) = (Vec::new(), Vec::new());
        for (program, package) in self.programs.iter().zip(&self.packages) {
            if wanted.contains(program) {
                programs.push(*program);
                packages.push(package.clone());
            }
        }
        Self {
            programs,
            packages,
            ..self.clone()
        }
    }

    fn command(&self, module: &Path, into: &Path) -> Command {
        let mut go = Command::new("go");
        let build: &[&str] = if self.is_test {
            &["test", "-c"]
        } else {
            &["build"]
        };
        go.current_dir(module)
            .args(build)
            .args(["-mod=readonly", "-trimpath"])
            .args(["-ldflags", &self.ld_flags, "-tags", self.tags, "-o"]);
        match &*self.programs {
            [single] => go.arg(into.join(single)),
            _ => go.arg(format!("{}/", into.display())),
        };
        if self.is_static {
            go.env("CGO_ENABLED", "0");
        }
        go.args(&self.packages);
        go
    }
}

/// Returns the root of the checkout.
pub(crate) fn checkout() -> Result<&'static Path> {
    let rig = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = rig.ancestors().nth(2);
    root.context("the rig lies in a checkout")
}

/// Returns the folder of a module: `tests/cluster` or one below.
pub(crate) fn module(name: impl AsRef<OsStr>) -> Result<PathBuf> {
    Ok(checkout()?
        .join("tests/cluster")
        .join(Path::new(name.as_ref())))
}

/// Returns the folder of what the clusters are made of, below the root of the checkout: without symbolic links,
/// because a node sees the folder and not the links.
pub(crate) fn cache() -> Result<PathBuf> {
    let folder = checkout()?.join(".cache/cluster");
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    fs::canonicalize(&folder).with_context(|| folder.display().to_string())
}

/// Returns the version that a `require` of a go.mod names, such as `v1.36.3`.
pub(crate) fn version(go_mod: &Path, module: &str) -> Result<String> {
    let text = fs::read_to_string(go_mod).with_context(|| go_mod.display().to_string())?;
    required(&text, module).with_context(|| format!("{}: no version of {module}", go_mod.display()))
}

fn required(go_mod: &str, module: &str) -> Option<String> {
    let mut lines = go_mod.lines().map(|line| {
        let line = line.trim();
        line.strip_prefix("require ").unwrap_or(line)
    });
    lines.find_map(|line| {
        let mut words = line.split_whitespace();
        let named = words.next() == Some(module);
        let version = words.next().filter(|version| version.starts_with('v'))?;
        named.then(|| version.to_owned())
    })
}

fn run(command: &mut Command) -> Result<()> {
    let status = match command.status() {
        Err(error) if error.kind() == ErrorKind::NotFound => bail!(
            "the tests' Kubernetes cluster is built by Go, which is not installed: get go 1.26 or \
             newer from https://go.dev/dl or your distribution and put it on the PATH"
        ),
        status => status.context("start go")?,
    };
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// Returns the path of a program that is alone in its module `name` of `tests/cluster`; `source` is the Go module that
/// has it under `cmd`. Go builds it the first time, which takes as long as `takes` says.
///
/// # Errors
/// Go is missing, a download or the build failed, or the checkout is not writable.
pub(in crate::cluster) fn command(
    program: &'static str,
    source: &str,
    tags: &'static str,
    takes: &str,
) -> Result<PathBuf> {
    let module = module(program)?;
    let version = version(&module.join("go.mod"), source)?;
    let recipe = Recipe {
        programs: vec![program],
        packages: vec![format!("{source}/cmd/{program}")],
        ld_flags: STRIP.to_owned(),
        tags,
        ..Recipe::default()
    };
    let build = Build {
        module,
        folder: cache()?.join(format!("{program}-{version}")),
        what: format!("{program} {version}: {takes} the first time, then never again"),
        recipes: vec![recipe],
    };
    Ok(build.ensure()?.join(program))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_those_of_go_mod() {
        let text = "tool (\n\tgo.etcd.io/etcd/server/v3\n)\nrequire k8s.io/kubernetes v1.36.3 // x\n\
            require (\n\tk8s.io/kubernetes-not v9.9.9\n\tgo.etcd.io/etcd/server/v3 v3.6.8 // y\n)\n";
        assert_eq!(required(text, "k8s.io/kubernetes").unwrap(), "v1.36.3");
        assert_eq!(
            required(text, "go.etcd.io/etcd/server/v3").unwrap(),
            "v3.6.8"
        );
        assert_eq!(required(text, "k8s.io/absent"), None);
    }

    #[test]
    fn a_recipe_builds_only_what_is_missing() {
        let recipe = Recipe {
            programs: vec!["a", "b"],
            packages: vec!["x/a".to_owned(), "x/b".to_owned()],
            ..Recipe::default()
        };
        assert_eq!(recipe.only(&["b"]).packages, ["x/b"]);
    }
}
