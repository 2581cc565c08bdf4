//! Programs and libraries of this machine's Debian packages, for images whose program needs them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use kplane_rig::oci::{EXECUTABLE, Layer, READABLE, libraries};
use kplane_rig::process::output;
use serde_json::{Value, json};

/// The programs of modes iptables and ipvs: where they are in an image, and in which Debian package.
const PROGRAMS: [(&str, &str); 4] = [
    ("usr/sbin/xtables-nft-multi", "iptables"),
    ("usr/sbin/xtables-legacy-multi", "iptables"),
    ("usr/sbin/ipset", "ipset"),
    // Mode ipvs loads the kernel module ip_vs.
    ("usr/sbin/modprobe", "kmod"),
];
/// The commands of iptables, each of which both kinds have.
const COMMANDS: [&str; 2] = ["iptables", "ip6tables"];
/// The extensions of iptables that are about IP packets, by the beginnings of their names.
const EXTENSIONS: [&str; 3] = ["libxt_", "libipt_", "libip6t_"];

/// A Debian package.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Package {
    name: String,
    version: String,
    architecture: String,
}

impl Package {
    /// Returns the package as a component of a bill of materials.
    pub(super) fn component(&self) -> Value {
        let Self {
            name,
            version,
            architecture,
        } = self;
        // A package URL encodes these two characters of versions.
        let encoded = version.replace('+', "%2B").replace(':', "%3A");
        let url = format!("pkg:deb/debian/{name}@{encoded}?arch={architecture}");
        json!({ "type": "library", "bom-ref": url, "name": name, "version": version, "purl": url })
    }

    /// Returns the package in which a file of this machine is.
    fn owner(file: &Path) -> Result<Self> {
        let real = fs::canonicalize(file).with_context(|| file.display().to_string())?;
        // Packages name files below /usr by their older paths.
        let older = real.strip_prefix("/usr").map(|rest| Path::new("/").join(rest));
        let paths = [Some(real), older.ok(), Some(file.to_owned())];
        let search = |path: PathBuf| output(Command::new("dpkg-query").arg("--search").arg(path));
        let found = paths
            .into_iter()
            .flatten()
            .find_map(|path| search(path).ok())
            .with_context(|| format!("{} is of no Debian package", file.display()))?;
        let (name, _) = found
            .split_once(": ")
            .with_context(|| format!("dpkg-query printed {found:?}"))?;
        let format = "--showformat=${Package} ${Version} ${Architecture}";
        let shown = output(Command::new("dpkg-query").arg("--show").arg(format).arg(name))?;
        match *shown.split(' ').collect::<Vec<_>>() {
            [name, version, architecture] => Ok(Self {
                name: name.to_owned(),
                version: version.to_owned(),
                architecture: architecture.to_owned(),
            }),
            _ => anyhow::bail!("dpkg-query printed {shown:?}"),
        }
    }
}

/// Files of Debian packages that become a layer.
#[derive(Debug, Default)]
pub(super) struct Collection {
    pub(super) layer: Layer,
    packages: BTreeSet<Package>,
    libraries: BTreeSet<PathBuf>,
}

impl Collection {
    /// Collects iptables of both kinds, ipset and modprobe, with their libraries.
    ///
    /// # Errors
    /// A package is not installed.
    pub(super) fn of_netfilter() -> Result<Self> {
        let mut collection = Self::default();
        for (path, package) in PROGRAMS {
            let file = Path::new("/").join(path);
            ensure!(
                file.exists(),
                "{} is missing: apt-get install {package}",
                file.display()
            );
            collection.add(path, &file)?;
        }
        for command in COMMANDS {
            for (kind, program) in [
                ("", "xtables-nft-multi"),
                ("-nft", "xtables-nft-multi"),
                ("-legacy", "xtables-legacy-multi"),
            ] {
                for action in ["", "-save", "-restore"] {
                    let path = format!("usr/sbin/{command}{kind}{action}");
                    collection.layer.link(&path, program);
                }
            }
        }
        collection.add_extensions()?;
        collection.add_copyrights();
        Ok(collection)
    }

    /// Adds the libraries that a program needs; none if it is static.
    ///
    /// # Errors
    /// A library cannot be read.
    pub(super) fn add_libraries(&mut self, program: &Path) -> Result<()> {
        for library in libraries(program) {
            // Asking for a file's package takes a quarter of a second, and most programs share their libraries.
            if self.libraries.insert(library.clone()) {
                self.packages.insert(Package::owner(&library)?);
                let path = library.display().to_string();
                self.layer.copy(&path, EXECUTABLE, &library);
            }
        }
        Ok(())
    }

    /// Returns the packages of all files.
    pub(super) fn packages(&self) -> Vec<Package> {
        self.packages.iter().cloned().collect()
    }

    fn add(&mut self, path: &str, file: &Path) -> Result<()> {
        self.packages.insert(Package::owner(file)?);
        self.layer.copy(path, EXECUTABLE, file);
        self.add_libraries(file)
    }

    fn add_extensions(&mut self) -> Result<()> {
        let folder = format!("/usr/lib/{}-linux-gnu/xtables", std::env::consts::ARCH);
        let files = fs::read_dir(&folder).with_context(|| format!("cannot list {folder}"))?;
        for file in files {
            let file = file?;
            let name = file.file_name().to_string_lossy().into_owned();
            if !EXTENSIONS.iter().any(|start| name.starts_with(start)) {
                continue;
            }
            let path = format!("{folder}/{name}");
            if file.file_type()?.is_symlink() {
                let target = fs::read_link(file.path())?;
                self.layer.link(&path, &target.to_string_lossy());
            } else {
                // All extensions are in the package of the programs.
                self.layer.copy(&path, EXECUTABLE, &file.path());
                self.add_libraries(&file.path())?;
            }
        }
        Ok(())
    }

    /// Adds the licences of all packages, if this machine has them.
    fn add_copyrights(&mut self) {
        for package in self.packages() {
            let path = format!("usr/share/doc/{}/copyright", package.name);
            let file = Path::new("/").join(&path);
            if file.exists() {
                self.layer.copy(&path, READABLE, &file);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `cargo xtask test tools` installs the packages.
    #[test]
    fn the_programs_of_iptables_come_with_their_libraries_and_extensions_and_no_shell() {
        let collection = Collection::of_netfilter().unwrap();
        let paths: BTreeSet<&str> = collection.layer.paths().collect();
        for path in [
            "usr/sbin/iptables-nft-restore",
            "usr/sbin/ip6tables-legacy-save",
            "usr/sbin/ipset",
        ] {
            assert!(paths.contains(path), "{path}");
        }
        let has = |end: &str| paths.iter().any(|path| path.ends_with(end));
        for end in [
            "/libc.so.6",
            "/libxtables.so.12",
            "/xtables/libxt_comment.so",
            "/iptables/copyright",
        ] {
            assert!(has(end), "{end}: {paths:?}");
        }
        assert!(!has("/sh") && !has("/bash"), "{paths:?}");
        let names: Vec<_> = collection.packages.iter().map(|p| &*p.name).collect();
        assert!(
            names.contains(&"iptables") && names.contains(&"libc6"),
            "{names:?}"
        );
    }
}
