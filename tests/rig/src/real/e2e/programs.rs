//! The programs, built by Go from the versions that `tests/cluster/e2e/go.mod` pins.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::cache;
use crate::cluster::programs::build::{Build, Recipe, STRIP, module, version};
use crate::cluster::programs::{KUBERNETES_MODULE, ld_flags};
use crate::process::output;

const TESTS: &str = "e2e.test";
/// Runs the tests in several processes at a time.
const GINKGO: &str = "ginkgo";
const GINKGO_MODULE: &str = "github.com/onsi/ginkgo/v2";
/// Programs that run in the tests' Pods.
const IN_PODS: [&str; 2] = ["agnhost", "regression-issue-74839"];

/// The programs of the tests.
#[derive(Clone, Debug)]
pub struct Programs {
    bin: PathBuf,
    version: String,
}

impl Programs {
    /// Finds the programs, and builds missing ones first: 4 to 14 minutes the first time on a machine. Prints its
    /// progress on standard error. If two processes want to build, one waits.
    ///
    /// # Errors
    /// Go is missing, a download or a build failed, or the cache is not writable.
    pub fn ensure() -> Result<Self> {
        let module = module("e2e")?;
        let version = version(&module.join("go.mod"), KUBERNETES_MODULE)?;
        let in_pods = Recipe {
            programs: IN_PODS.to_vec(),
            packages: IN_PODS
                .map(|program| format!("{KUBERNETES_MODULE}/test/images/{program}"))
                .to_vec(),
            ld_flags: STRIP.to_owned(),
            is_static: true,
            ..Recipe::default()
        };
        let ginkgo = Recipe {
            programs: vec![GINKGO],
            packages: vec![format!("{GINKGO_MODULE}/ginkgo")],
            ld_flags: STRIP.to_owned(),
            ..Recipe::default()
        };
        let tests = Recipe {
            programs: vec![TESTS],
            packages: vec![format!("{KUBERNETES_MODULE}/test/e2e")],
            ld_flags: ld_flags(&version)?,
            is_test: true,
            ..Recipe::default()
        };
        let build = Build {
            module,
            part: cache::E2E,
            name: format!("e2e-{}", version.trim_start_matches('v')),
            what: format!(
                "the tests of Kubernetes {version}: 4 to 14 minutes the first time, then never again"
            ),
            recipes: vec![in_pods, ginkgo, tests],
        };
        let bin = build.ensure()?;
        Ok(Self { bin, version })
    }

    /// Returns the version of Kubernetes, such as `v1.37.2`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Returns the path of `e2e.test`.
    pub fn tests(&self) -> PathBuf {
        self.bin.join(TESTS)
    }

    /// Returns the path of `ginkgo`.
    pub fn ginkgo(&self) -> PathBuf {
        self.bin.join(GINKGO)
    }

    /// Returns the path of a program that runs in Pods.
    pub(super) fn in_pods(&self, program: &str) -> PathBuf {
        self.bin.join(program)
    }

    /// Returns a file of Kubernetes' source.
    ///
    /// # Errors
    /// Go's folder of modules cannot be found.
    pub(super) fn source(&self, path: &str) -> Result<PathBuf> {
        let mut go = Command::new("go");
        go.current_dir(module("e2e")?)
            .args(["list", "-mod=readonly", "-m", "-f", "{{.Dir}}"])
            .arg(KUBERNETES_MODULE);
        let folder = output(go).context("find Kubernetes' source")?;
        Ok(Path::new(folder.trim()).join(path))
    }
}
