//! The programs of a cluster: built once by Go, from the versions that `tests/cluster/go.mod` pins.
//!
//! They are in `~/.cache/kplane/cluster/etcd-<version>-kubernetes-<version>-<sum>/bin`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

pub(crate) mod build;
mod helm;
mod promtool;

pub use helm::helm;
pub use promtool::promtool;

use build::{Build, Recipe, STRIP, module, version};

use crate::cache;

/// The programs of Kubernetes that every cluster needs.
const KUBERNETES: [&str; 4] = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kubectl",
];
/// The programs of Kubernetes that a cluster with real nodes needs, too.
const NODES: [&str; 2] = ["kube-scheduler", "kubelet"];
pub(crate) const KUBERNETES_MODULE: &str = "k8s.io/kubernetes";
/// The program's name, which must be given, since its folder is called `v3`.
const ETCD: &str = "etcd";
const ETCD_MODULE: &str = "go.etcd.io/etcd/server/v3";

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
    /// Go is missing, a download or a build failed, or the cache is not writable.
    pub fn ensure() -> Result<Self> {
        Self::with(&[&KUBERNETES[..], &[ETCD]].concat())
    }

    /// Finds also `kubelet` and `kube-scheduler`, and builds missing programs first.
    ///
    /// # Errors
    /// As [`Programs::ensure`].
    pub(crate) fn for_nodes() -> Result<Self> {
        Self::with(&[&KUBERNETES[..], &NODES, &[ETCD]].concat())
    }

    fn with(programs: &[&str]) -> Result<Self> {
        let kubernetes = [&KUBERNETES[..], &NODES].concat();
        let module = module("")?;
        let versions = Versions::read(&module.join("go.mod"))?;
        let packages =
            kubernetes.iter().map(|program| format!("{KUBERNETES_MODULE}/cmd/{program}"));
        let of_kubernetes = Recipe {
            packages: packages.collect(),
            programs: kubernetes,
            ld_flags: ld_flags(&versions.kubernetes)?,
            ..Recipe::default()
        };
        let etcd = Recipe {
            programs: vec![ETCD],
            packages: vec![ETCD_MODULE.to_owned()],
            ld_flags: STRIP.to_owned(),
            ..Recipe::default()
        };
        let build = Build {
            module,
            part: cache::CLUSTER,
            name: versions.folder(),
            what: versions.message(),
            recipes: vec![of_kubernetes, etcd],
        };
        let bin = build.ensure_some(programs)?;
        Ok(Self { bin })
    }

    /// Returns the version of Kubernetes, such as `v1.37.2`.
    ///
    /// # Errors
    /// The checkout cannot be read.
    pub fn kubernetes_version() -> Result<String> {
        version(&module("go.mod")?, KUBERNETES_MODULE)
    }

    /// Returns the folder with `etcd`, `kube-apiserver`, `kube-controller-manager`, `kube-proxy`
    /// and `kubectl`.
    pub fn bin(&self) -> &Path {
        &self.bin
    }

    /// Returns a command that runs one of them.
    pub fn command(&self, program: &str) -> Command {
        Command::new(self.bin.join(program))
    }
}

/// The versions that `go.mod` pins.
struct Versions {
    kubernetes: String,
    etcd: String,
}

impl Versions {
    fn read(go_mod: &Path) -> Result<Self> {
        Ok(Self {
            kubernetes: version(go_mod, KUBERNETES_MODULE)?,
            etcd: version(go_mod, ETCD_MODULE)?,
        })
    }

    fn folder(&self) -> String {
        let (etcd, kubernetes) = (&self.etcd, &self.kubernetes);
        format!("etcd-{etcd}-kubernetes-{kubernetes}").replace("-v", "-")
    }

    fn message(&self) -> String {
        let (etcd, kubernetes) = (&self.etcd, &self.kubernetes);
        format!(
            "Kubernetes {kubernetes}, etcd {etcd}: 4 to 7 minutes the first time, then never again"
        )
    }
}

/// Returns the linker flags with the version of Kubernetes. Without them the programs call themselves
/// `v0.0.0-master`, and kubectl complains.
pub(crate) fn ld_flags(version: &str) -> Result<String> {
    let mut parts = version.trim_start_matches('v').split('.');
    let (Some(major), Some(minor)) = (parts.next(), parts.next()) else {
        bail!("{version} of {KUBERNETES_MODULE} is no version");
    };
    let at = "k8s.io/component-base/version";
    Ok(format!(
        "{STRIP} -X {at}.gitVersion={version} -X {at}.gitMajor={major} -X {at}.gitMinor={minor}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_names_both_versions() {
        let versions = Versions {
            kubernetes: "v1.36.3".to_owned(),
            etcd: "v3.6.8".to_owned(),
        };
        assert_eq!(versions.folder(), "etcd-3.6.8-kubernetes-1.36.3");
        assert!(ld_flags(&versions.kubernetes).unwrap().contains("gitMinor=36"));
    }
}
