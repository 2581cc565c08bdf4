//! The programs of a cluster: built once by Go, from the versions that `tests/cluster/go.mod` pins.
//!
//! They are in `.cache/cluster/etcd-<version>-kubernetes-<version>/bin` of the checkout. A program
//! in that folder is complete, because it is moved there after its build.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};

/// The programs of Kubernetes. One command builds them, because they share most packages.
const KUBERNETES: [&str; 4] = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kubectl",
];
const KUBERNETES_MODULE: &str = "k8s.io/kubernetes";
/// The program's name, which must be given, since its folder is called `v3`.
const ETCD: &str = "etcd";
const ETCD_MODULE: &str = "go.etcd.io/etcd/server/v3";
/// The lock held while building.
const LOCK: &str = "build.lock";

/// The folder with the programs of a cluster.
#[derive(Clone, Debug)]
pub struct Programs {
    bin: PathBuf,
}

impl Programs {
    /// Finds the programs, and builds missing ones first: 4 to 7 minutes the first time on a
    /// machine, about 15 s when Go has compiled them before. Prints its progress on standard error.
    /// If two processes want to build, one waits.
    ///
    /// # Errors
    /// Go is missing, a download or a build failed, or the checkout is not writable.
    pub fn ensure() -> Result<Self> {
        let module = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("cluster");
        let root = module
            .ancestors()
            .nth(2)
            .context("tests lies in a checkout")?;
        let versions = Versions::read(&module.join("go.mod"))?;
        let folder = root.join(".cache/cluster").join(versions.folder());
        let programs = Self {
            bin: folder.join("bin"),
        };
        if programs.missing().is_empty() {
            return Ok(programs);
        }
        fs::create_dir_all(&programs.bin)
            .with_context(|| format!("create {}", programs.bin.display()))?;
        let lock = File::create(folder.join(LOCK)).context("create the lock of the build")?;
        lock.lock()
            .context("wait for another process that builds")?;
        let missing = programs.missing();
        if !missing.is_empty() {
            build(&module, &folder, &versions, &missing)?;
        }
        Ok(programs)
    }

    /// Returns the folder with `etcd`, `kube-apiserver`, `kube-controller-manager`, `kube-proxy`
    /// and `kubectl`.
    #[must_use]
    pub fn bin(&self) -> &Path {
        &self.bin
    }

    /// Returns a command that runs one of them.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        Command::new(self.bin.join(program))
    }

    fn missing(&self) -> Vec<&'static str> {
        let mut all = KUBERNETES.to_vec();
        all.push(ETCD);
        all.retain(|program| !self.bin.join(program).is_file());
        all
    }
}

/// The versions that `go.mod` pins.
struct Versions {
    kubernetes: String,
    etcd: String,
}

impl Versions {
    fn read(go_mod: &Path) -> Result<Self> {
        let text = fs::read_to_string(go_mod).with_context(|| go_mod.display().to_string())?;
        let version = |module| {
            version(&text, module)
                .with_context(|| format!("{}: no version of {module}", go_mod.display()))
        };
        Ok(Self {
            kubernetes: version(KUBERNETES_MODULE)?,
            etcd: version(ETCD_MODULE)?,
        })
    }

    fn folder(&self) -> String {
        let (etcd, kubernetes) = (&self.etcd, &self.kubernetes);
        format!("etcd-{etcd}-kubernetes-{kubernetes}").replace("-v", "-")
    }

    /// Returns the linker flags with the version. Without them the programs call themselves
    /// `v0.0.0-master`, and kubectl complains.
    fn ld_flags(&self) -> Result<String> {
        let version = &self.kubernetes;
        let mut parts = version.trim_start_matches('v').split('.');
        let (Some(major), Some(minor)) = (parts.next(), parts.next()) else {
            bail!("{version} of {KUBERNETES_MODULE} is no version");
        };
        let at = "k8s.io/component-base/version";
        Ok(format!(
            "-s -w -X {at}.gitVersion={version} -X {at}.gitMajor={major} -X {at}.gitMinor={minor}"
        ))
    }
}

/// Returns the version that a `require` of a go.mod names, such as `v1.36.3`.
fn version(go_mod: &str, module: &str) -> Option<String> {
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

fn build(module: &Path, folder: &Path, versions: &Versions, missing: &[&str]) -> Result<()> {
    let Versions { kubernetes, etcd } = versions;
    eprintln!(
        "building {} (Kubernetes {kubernetes}, etcd {etcd}) with Go: 4 to 7 minutes the first \
         time, then never again",
        missing.join(", ")
    );
    let began = Instant::now();
    let fresh = folder.join("building");
    if fresh.exists() {
        fs::remove_dir_all(&fresh).with_context(|| fresh.display().to_string())?;
    }
    fs::create_dir_all(&fresh).with_context(|| fresh.display().to_string())?;
    let of_kubernetes: Vec<&str> = missing.iter().copied().filter(|p| *p != ETCD).collect();
    if !of_kubernetes.is_empty() {
        let packages = of_kubernetes
            .iter()
            .map(|program| format!("{KUBERNETES_MODULE}/cmd/{program}"));
        let mut go = go(module, &versions.ld_flags()?);
        go.arg("-o").arg(format!("{}/", fresh.display()));
        run(go.args(packages))?;
    }
    if missing.contains(&ETCD) {
        let mut go = go(module, "-s -w");
        run(go.arg("-o").arg(fresh.join(ETCD)).arg(ETCD_MODULE))?;
    }
    for program in missing {
        fs::rename(fresh.join(program), folder.join("bin").join(program))
            .with_context(|| format!("Go has built no {program}"))?;
    }
    eprintln!("built in {:.0} s", began.elapsed().as_secs_f64());
    fs::remove_dir(&fresh).with_context(|| fresh.display().to_string())
}

fn go(module: &Path, ld_flags: &str) -> Command {
    let mut command = Command::new("go");
    command
        .current_dir(module)
        .args(["build", "-mod=readonly", "-trimpath", "-ldflags", ld_flags]);
    command
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_those_of_go_mod() {
        let text = "tool (\n\tgo.etcd.io/etcd/server/v3\n)\nrequire k8s.io/kubernetes v1.36.3 // x\n\
            require (\n\tk8s.io/kubernetes-not v9.9.9\n\tgo.etcd.io/etcd/server/v3 v3.6.8 // y\n)\n";
        assert_eq!(version(text, KUBERNETES_MODULE).unwrap(), "v1.36.3");
        assert_eq!(version(text, ETCD_MODULE).unwrap(), "v3.6.8");
        assert_eq!(version(text, "k8s.io/absent"), None);
    }

    #[test]
    fn the_folder_names_both_versions() {
        let versions = Versions {
            kubernetes: "v1.36.3".to_owned(),
            etcd: "v3.6.8".to_owned(),
        };
        assert_eq!(versions.folder(), "etcd-3.6.8-kubernetes-1.36.3");
        assert!(versions.ld_flags().unwrap().contains("gitMinor=36"));
    }
}
