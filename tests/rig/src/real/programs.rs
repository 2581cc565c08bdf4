//! The programs of real nodes: Kubernetes' own, containerd, CoreDNS and the pods' program, built by Go, and
//! programs of Debian packages that are unpacked, not installed.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::cache::{self, CLUSTER};
use crate::cluster::Programs;
use crate::cluster::programs::build::{Build, Recipe, STRIP, module, version};
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
    /// Go is missing, a download or a build failed, or the cache is not writable.
    pub fn ensure() -> Result<Self> {
        Ok(Self {
            kubernetes: Programs::for_nodes()?,
            containerd: containerd()?,
            coredns: coredns()?,
            pod: pod()?,
            debian: debian::unpacked(&PACKAGES)?,
            images: cache::folder(CLUSTER)?.join("images"),
        })
    }

    /// Returns the programs of the control plane, with `kubelet` and `kube-scheduler`.
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
        cache::folder(CLUSTER)
    }

    /// Returns the `PATH` of a node's programs.
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
        // No folder of these contains a colon, unless the path of the cache does.
        std::env::join_paths(folders).unwrap_or_default()
    }
}

fn containerd() -> Result<PathBuf> {
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
        part: CLUSTER,
        name: format!("containerd-{}", version.trim_start_matches('v')),
        what: format!("containerd {version}: 4 minutes the first time, then never again"),
        recipes: vec![recipe],
    };
    build.ensure()
}

fn coredns() -> Result<PathBuf> {
    let module = module("coredns")?;
    let version = version(&module.join("go.mod"), COREDNS_MODULE)?;
    let folder = format!("coredns-{}", version.trim_start_matches('v'));
    let what = format!("CoreDNS {version}: 2 minutes the first time, then never again");
    own("coredns", module, folder, what)
}

fn pod() -> Result<PathBuf> {
    let what = "the tests' pods".to_owned();
    own("pod", module("pod")?, "pod".to_owned(), what)
}

/// Builds a program whose source is in the checkout.
fn own(name: &'static str, module: PathBuf, folder: String, what: String) -> Result<PathBuf> {
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
        part: CLUSTER,
        name: folder,
        what,
        recipes: vec![recipe],
    };
    build.ensure()
}
