//! The guest's kernel: the newest stock kernel of the distribution, from its archive.
//!
//! It is in `~/.cache/kplane/vm/<package>_<version>_<recipe>`. A folder there is complete, because it is moved
//! there after everything in it is done.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result};

use crate::cache;
use crate::debian;
use crate::process::output;

use super::{initramfs, script};

/// The package that depends on the package of the newest kernel.
const META_PACKAGE: &str = "linux-image-amd64";
/// The prefix of kernel packages, before the kernel's version.
const PACKAGE: &str = "linux-image-";
/// The end of the folders' names: a number to increase when [`Kernel::complete`] does something else.
const RECIPE: &str = "_1";
/// The lock held while fetching.
const LOCK: &str = "fetch.lock";
const INITRAMFS: &str = "initramfs";
/// The kernel itself, an ELF file, without the code that unpacks it: under emulation, unpacking takes
/// longer than the rest of the boot.
const UNPACKED: &str = "vmlinux";
/// Offsets in the first sectors of the kernel's image (`Documentation/arch/x86/boot.rst`).
const SETUP_SECTORS: usize = 0x1f1;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
const SECTOR: usize = 512;
/// The first bytes of a payload in the xz format.
const XZ: [u8; 6] = [0xfd, b'7', b'z', b'X', b'Z', 0];
/// Bytes behind the compressed kernel, which hold its size.
const SIZE_BEHIND: usize = 4;
/// The modules that the first program of the guest needs; all others are loaded on use.
const EARLY_MODULES: [&str; 6] = [
    "virtio_pci",
    "9p",
    "9pnet_virtio",
    "overlay",
    "virtio_console",
    "virtio_rng",
];

/// A kernel that is unpacked and ready.
#[derive(Debug)]
pub(super) struct Kernel {
    folder: PathBuf,
    /// The version, as in `uname -r`.
    pub(super) version: String,
}

impl Kernel {
    /// Finds the newest kernel of the cache, or fetches one.
    pub(super) fn ensure() -> Result<Self> {
        let folder = cache::folder(cache::VM)?;
        let _lock = cache::lock(&folder.join(LOCK))?;
        let kernel = match Self::find(&folder)? {
            Some(kernel) => kernel,
            None => Self::fetch(&folder)?,
        };
        kernel.build_initramfs()?;
        Ok(kernel)
    }

    /// Returns the image that qemu starts.
    pub(super) fn image(&self) -> PathBuf {
        let unpacked = self.folder.join(UNPACKED);
        if unpacked.exists() {
            return unpacked;
        }
        self.packed()
    }

    fn packed(&self) -> PathBuf {
        self.folder.join("boot").join(format!("vmlinuz-{}", self.version))
    }

    pub(super) fn initramfs(&self) -> PathBuf {
        let parts = [script::INIT].into_iter().chain(EARLY_MODULES);
        let name = format!("{INITRAMFS}-{}", cache::sum(parts));
        self.folder.join(name)
    }

    /// Returns the folder of modules, by version.
    pub(super) fn modules(&self) -> PathBuf {
        self.folder.join("lib/modules")
    }

    fn find(folder: &Path) -> Result<Option<Self>> {
        let mut found = Vec::new();
        for entry in folder.read_dir().context("list the folder of kernels")? {
            let name = entry?.file_name();
            let name = name.to_str().and_then(|name| name.strip_suffix(RECIPE));
            let named = name.and_then(|name| name.strip_prefix(PACKAGE)?.split_once('_'));
            found.extend(named.map(|(kernel, package)| (kernel.to_owned(), package.to_owned())));
        }
        found.sort_unstable();
        let newest = found.pop();
        Ok(newest.map(|(version, package)| Self {
            folder: folder.join(format!("{PACKAGE}{version}_{package}{RECIPE}")),
            version,
        }))
    }

    fn fetch(into: &Path) -> Result<Self> {
        let began = Instant::now();
        let package = newest_package().or_else(|_| {
            debian::update()?;
            newest_package()
        })?;
        eprintln!("fetching {package} for tests in a virtual machine: 70 MB, once");
        let fresh = cache::empty(into.join("fetching"))?;
        let of_package = debian::unpack(&package, &fresh)?;
        let version = package.strip_prefix(PACKAGE).context("asked for")?;
        let mut kernel = Self {
            version: version.to_owned(),
            folder: fresh.clone(),
        };
        kernel.complete()?;
        kernel.folder = into.join(format!("{package}_{of_package}{RECIPE}"));
        fs::rename(&fresh, &kernel.folder).with_context(|| kernel.folder.display().to_string())?;
        eprintln!("fetched in {:.0} s", began.elapsed().as_secs_f64());
        Ok(kernel)
    }

    /// Does what installing the package would do, which is an index of modules. Unpacks the kernel, if
    /// it is packed as Debian 12 does it.
    fn complete(&self) -> Result<()> {
        let packed = self.packed();
        let image = fs::read(&packed).with_context(|| packed.display().to_string())?;
        if let Some(payload) = payload(&image).filter(|payload| payload.starts_with(&XZ)) {
            let archive = self.folder.join(UNPACKED).with_extension("xz");
            fs::write(&archive, payload).context("write the packed kernel")?;
            let mut unpack = Command::new("xz");
            unpack.arg("-d").arg(&archive);
            output(unpack)?;
        }
        let mut index = Command::new("depmod");
        index.arg("-b").arg(&self.folder).arg(&self.version);
        output(index)?;
        Ok(())
    }

    /// Builds the first file system, again if this program now builds a different one.
    fn build_initramfs(&self) -> Result<()> {
        let file = self.initramfs();
        if file.exists() {
            return Ok(());
        }
        let mut modules = Vec::new();
        for name in EARLY_MODULES {
            let mut show = Command::new("modprobe");
            show.arg("-d")
                .arg(&self.folder)
                .args(["-S", &self.version, "--show-depends", name]);
            for line in output(show)?.lines() {
                // A line "builtin NAME" has no file.
                let file = line.strip_prefix("insmod ").map(|rest| PathBuf::from(rest.trim()));
                modules.extend(file.filter(|file| !modules.contains(file)));
            }
        }
        let busybox = which("busybox")?;
        let archive = initramfs::build(&busybox, &modules)?;
        // Other processes see all of the file or nothing.
        let fresh = file.with_extension("new");
        fs::write(&fresh, archive).context("write the initramfs")?;
        fs::rename(&fresh, &file).context("name the initramfs")
    }
}

fn newest_package() -> Result<String> {
    let mut ask = Command::new("apt-cache");
    ask.args(["depends", META_PACKAGE]);
    let answer = output(ask)?;
    let words = answer.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    let package = words
        .map(str::trim)
        .find(|name| name.starts_with(PACKAGE))
        .with_context(|| format!("{META_PACKAGE} depends on no {PACKAGE}*"))?;
    Ok(package.to_owned())
}

/// Returns the compressed kernel inside an image.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let number = |at: usize| {
        let bytes = image.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let begin = (usize::from(*image.get(SETUP_SECTORS)?) + 1) * SECTOR + number(PAYLOAD_OFFSET)?;
    let length = number(PAYLOAD_LENGTH)?.checked_sub(SIZE_BEHIND)?;
    image.get(begin..begin.checked_add(length)?)
}

fn which(program: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
        .with_context(|| format!("{program} is not on the PATH"))
}
