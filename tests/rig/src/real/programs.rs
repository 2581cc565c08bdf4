//! The programs of real nodes: Kubernetes' own, containerd, CoreDNS and the pods' program, built by Go, and
//! programs of Debian packages that are unpacked, not installed.

use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::cluster::Programs;
use crate::cluster::programs::build::{Build, Recipe, STRIP, cache, module, version};
use crate::debian;

const CONTAINERD_MODULE: &str = "github.com/containerd/containerd/v2";
/// containerd, the process between it and a container, and its command line.
const CONTAINERD: [&str; 3] = ["containerd", "containerd-shim-runc-v2", "ctr"];
/// Leaves out kinds of storage that no cluster here uses.
const CONTAINERD_TAGS: &str = "no_btrfs,no_devmapper,no_zfs,no_tracing";
const COREDNS_MODULE: &str = "github.com/coredns/coredns";
/// Debian's packages with the runtime of containers and the plugins of their network.
const PACKAGES: [&str; 2] = ["runc", "containernetworking-plugins"];
/// The folder of the plugins in their package.
const CNI: &str = "usr/lib/cni";
/// A file that exists once packages are unpacked.
const UNPACKED: &str = "complete";

/// The folders of all programs of a real cluster.
#[derive(Clone, Debug)]
pub struct NodePrograms {
    kubernetes: Programs,
    containerd: PathBuf,
    coredns: PathBuf,
    pod: PathBuf,
    debian: PathBuf,
    images: PathBuf,
}

impl NodePrograms {
    /// Finds the programs, and builds or downloads missing ones first: 15 minutes the first time on a machine.
    /// Prints its progress on standard error. If two processes want to build, one waits.
    ///
    /// # Errors
    /// Go is missing, a download or a build failed, or the checkout is not writable.
    pub fn ensure() -> Result<Self> {
        let cache = cache()?;
        Ok(Self {
            kubernetes: Programs::for_nodes()?,
            containerd: containerd(&cache)?,
            coredns: coredns(&cache)?,
            pod: pod(&cache)?,
            debian: debian(&cache.join("debian"))?,
            images: cache.join("images"),
        })
    }

    /// Returns the programs of the control plane, with `kubelet` and `kube-scheduler`.
    #[must_use]
    pub fn kubernetes(&self) -> &Programs {
        &self.kubernetes
    }

    /// Returns the path of one of containerd's programs.
    pub(super) fn containerd(&self, program: &str) -> PathBuf {
        self.containerd.join(program)
    }

    pub(super) fn kubelet(&self) -> PathBuf {
        self.kubernetes.bin().join("kubelet")
    }

    pub(super) fn kube_proxy(&self) -> PathBuf {
        self.kubernetes.bin().join("kube-proxy")
    }

    pub(super) fn coredns(&self) -> PathBuf {
        self.coredns.join("coredns")
    }

    pub(super) fn pod(&self) -> PathBuf {
        self.pod.join("pod")
    }

    pub(super) fn runc(&self) -> PathBuf {
        self.debian.join("usr/sbin/runc")
    }

    /// Returns the folder of the network's plugins.
    pub(super) fn cni(&self) -> PathBuf {
        self.debian.join(CNI)
    }

    /// Returns the folder of the images that the rig makes.
    pub(super) fn images(&self) -> &Path {
        &self.images
    }

    /// Returns the folder that contains all others.
    pub(super) fn cache(&self) -> Result<PathBuf> {
        cache()
    }

    /// Returns the `PATH` of a node's programs.
    #[must_use]
    pub fn path(&self) -> OsString {
        let folders = [
            self.kubernetes.bin(),
            &self.containerd,
            Path::new("/usr/local/sbin"),
            Path::new("/usr/local/bin"),
            Path::new("/usr/sbin"),
            Path::new("/usr/bin"),
            Path::new("/sbin"),
            Path::new("/bin"),
        ];
        // No folder of these contains a colon, unless the checkout's path does.
        std::env::join_paths(folders).unwrap_or_default()
    }
}

fn containerd(cache: &Path) -> Result<PathBuf> {
    let module = module("containerd")?;
    let version = version(&module.join("go.mod"), CONTAINERD_MODULE)?;
    let packages = CONTAINERD.map(|program| format!("{CONTAINERD_MODULE}/cmd/{program}"));
    let recipe = Recipe {
        programs: CONTAINERD.to_vec(),
        packages: packages.to_vec(),
        ld_flags: format!("{STRIP} -X {CONTAINERD_MODULE}/version.Version={version}"),
        tags: CONTAINERD_TAGS,
        is_static: true,
        ..Recipe::default()
    };
    let build = Build {
        module,
        folder: cache.join(format!("containerd-{}", version.trim_start_matches('v'))),
        what: format!("containerd {version}: 4 minutes the first time, then never again"),
        recipes: vec![recipe],
    };
    build.ensure()
}

fn coredns(cache: &Path) -> Result<PathBuf> {
    let module = module("coredns")?;
    let version = version(&module.join("go.mod"), COREDNS_MODULE)?;
    let folder = format!("coredns-{}", version.trim_start_matches('v'));
    let what = format!("CoreDNS {version}: 2 minutes the first time, then never again");
    own(cache, "coredns", module, &folder, what)
}

fn pod(cache: &Path) -> Result<PathBuf> {
    let what = "the tests' pods".to_owned();
    own(cache, "pod", module("pod")?, "pod", what)
}

/// Builds a program whose source is in the checkout. The folder's name has a sum of the source.
fn own(
    cache: &Path,
    name: &'static str,
    module: PathBuf,
    folder: &str,
    what: String,
) -> Result<PathBuf> {
    let source = module.join("main.go");
    let text = fs::read(&source).with_context(|| source.display().to_string())?;
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    let recipe = Recipe {
        programs: vec![name],
        packages: vec![".".to_owned()],
        ld_flags: STRIP.to_owned(),
        tags: "",
        is_static: true,
        ..Recipe::default()
    };
    let build = Build {
        module,
        folder: cache.join(format!("{folder}-{:016x}", hasher.finish())),
        what,
        recipes: vec![recipe],
    };
    build.ensure()
}

/// Unpacks Debian's packages, once.
fn debian(folder: &Path) -> Result<PathBuf> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let lock = File::create(folder.with_extension("lock")).context("create the lock")?;
    lock.lock()
        .context("wait for another process that downloads")?;
    if !folder.join(UNPACKED).exists() {
        eprintln!("fetching {}", PACKAGES.join(", "));
        for package in PACKAGES {
            debian::unpack(package, folder)?;
        }
        File::create(folder.join(UNPACKED)).context("note what is unpacked")?;
    }
    Ok(folder.to_owned())
}
