//! Programs built by Go into a folder of the cache. A program in that folder is complete, because it is
//! moved there after its build.

use std::collections::BTreeSet;
use std::env::consts::{ARCH, OS};
use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};

use crate::cache;

/// The lock held while building.
const LOCK: &str = "build.lock";
/// Linker flags that leave out what only debuggers read.
pub(crate) const STRIP: &str = "-s -w";

/// Programs that share a folder of the cache.
#[derive(Debug)]
pub(crate) struct Build {
    /// The folder with `go.mod`.
    pub(crate) module: PathBuf,
    /// The part of the cache.
    pub(crate) part: &'static str,
    /// The name of the result's folder, with the versions. A sum of everything that decides about the programs follows
    /// it.
    pub(crate) name: String,
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
    /// Builds missing programs, and returns the folder of all. If two processes want to build, one waits.
    ///
    /// # Errors
    /// Go is missing, a download or a build failed, or the cache is not writable.
    pub(crate) fn ensure(&self) -> Result<PathBuf> {
        let all = self.recipes.iter().flat_map(|recipe| &recipe.programs);
        self.ensure_some(&all.copied().collect::<Vec<_>>())
    }

    /// Builds those of some programs that are missing, and returns the folder of all.
    ///
    /// # Errors
    /// As [`Build::ensure`].
    pub(crate) fn ensure_some(&self, programs: &[&str]) -> Result<PathBuf> {
        let folder = cache::folder(self.part)?.join(self.folder()?);
        let bin = folder.join("bin");
        let missing = || -> Vec<&str> {
            programs
                .iter()
                .copied()
                .filter(|program| !bin.join(program).is_file())
                .collect()
        };
        if missing().is_empty() {
            return Ok(bin);
        }
        fs::create_dir_all(&bin).with_context(|| format!("create {}", bin.display()))?;
        let _lock = cache::lock(&folder.join(LOCK))?;
        let missing = missing();
        if !missing.is_empty() {
            self.build(&missing, &folder)?;
        }
        Ok(bin)
    }

    /// Returns the name of the result's folder.
    fn folder(&self) -> Result<String> {
        let mut parts = vec![ARCH.as_bytes().to_vec(), OS.as_bytes().to_vec()];
        for file in sources(&self.module)? {
            parts.push(file.file_name().unwrap_or_default().as_bytes().to_vec());
            parts.push(fs::read(&file).with_context(|| file.display().to_string())?);
        }
        for recipe in &self.recipes {
            let command = recipe.command(Path::new(""), Path::new(""));
            let words = command.get_args().map(OsStr::as_bytes);
            parts.extend(words.map(<[u8]>::to_vec));
            parts.extend(command.get_envs().map(|set| format!("{set:?}").into_bytes()));
        }
        Ok(format!("{}-{}", self.name, cache::sum(parts)))
    }

    fn build(&self, missing: &[&str], folder: &Path) -> Result<()> {
        eprintln!("building {} with Go ({})", missing.join(", "), self.what);
        let began = Instant::now();
        let fresh = cache::empty(folder.join("building"))?;
        for recipe in &self.recipes {
            let wanted = recipe.only(missing);
            if !wanted.programs.is_empty() {
                run(&mut wanted.command(&self.module, &fresh))?;
            }
        }
        for program in missing {
            fs::rename(fresh.join(program), folder.join("bin").join(program))
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
        let build: &[&str] = if self.is_test { &["test", "-c"] } else { &["build"] };
        go.current_dir(module).args(build).args(["-mod=readonly", "-trimpath"]).args([
            "-ldflags",
            &self.ld_flags,
            "-tags",
            self.tags,
            "-o",
        ]);
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
    Ok(checkout()?.join("tests/cluster").join(Path::new(name.as_ref())))
}

/// Returns the files of a module that decide what Go builds: versions, their sums, and source.
fn sources(module: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut files = BTreeSet::new();
    for entry in module.read_dir().with_context(|| module.display().to_string())? {
        let path = entry?.path();
        let kind = path.extension().and_then(OsStr::to_str);
        files.extend(matches!(kind, Some("go" | "mod" | "sum")).then_some(path));
    }
    Ok(files)
}

/// Returns the version that a `require` of a go.mod names, such as `v1.36.3`.
pub(crate) fn version(go_mod: &Path, module: &str) -> Result<String> {
    let text = fs::read_to_string(go_mod).with_context(|| go_mod.display().to_string())?;
    required(&text, module).with_context(|| format!("{}: no version of {module}", go_mod.display()))
}

fn required(go_mod: &str, module: &str) -> Option<String> {
    go_mod
        .lines()
        .map(|line| {
            let line = line.trim();
            line.strip_prefix("require ").unwrap_or(line)
        })
        .find_map(|line| {
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
/// Go is missing, a download or the build failed, or the cache is not writable.
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
        part: cache::CLUSTER,
        name: format!("{program}-{version}"),
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
    fn another_recipe_has_another_folder() {
        let module = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(module.path().join(name), text).unwrap();
        let folder = |tags| {
            let recipe = Recipe {
                tags,
                ..Recipe::default()
            };
            let build = Build {
                module: module.path().to_owned(),
                part: cache::CLUSTER,
                name: "a-1.2".to_owned(),
                what: String::new(),
                recipes: vec![recipe],
            };
            build.folder().unwrap()
        };
        write("go.mod", "module a");
        let first = folder("");
        assert_eq!(folder(""), first);
        assert_ne!(folder("some"), first);
        write("README.md", "read me");
        assert_eq!(folder(""), first);
        write("go.sum", "a sum");
        assert_ne!(folder(""), first);
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
