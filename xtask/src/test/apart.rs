//! The workspaces of benchmarks and of fuzzing: what they have as a copy agrees with the product's workspace. Benchmarks then
//! measure what is shipped, and cargo compiles the dependencies of both once.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::cargo;

/// Checks lints, the versions of dependencies, and that lock files know what crates of the product depend on.
pub(super) fn check(root: &Path) -> Result<()> {
    let read = |file| std::fs::read_to_string(root.join(file)).context(file);
    let (product, bench) = (read("Cargo.toml")?, read("bench/Cargo.toml")?);
    ensure!(
        lints(&product) == lints(&bench),
        "bench/Cargo.toml has other lints than Cargo.toml: copy them"
    );
    let (product, bench) = (read("Cargo.lock")?, read("bench/Cargo.lock")?);
    let (product, mut others) = (versions(&product), versions(&bench));
    others.retain(|name, versions| {
        let product = product.get(name);
        product.is_some_and(|product| !versions.is_subset(product))
    });
    ensure!(
        others.is_empty(),
        "bench/Cargo.lock has other versions than Cargo.lock: {others:?}; \
         `cargo update --manifest-path bench/Cargo.toml NAME --precise VERSION` sets them"
    );
    for manifest in ["bench/Cargo.toml", "fuzz/Cargo.toml"] {
        let mut metadata = cargo::cargo()?;
        metadata.args([
            "metadata",
            "--format-version=1",
            "--locked",
            "--manifest-path",
            manifest,
        ]);
        cargo::output(metadata.current_dir(root)).with_context(|| {
            format!("the lock file beside {manifest} is out of date: `cargo metadata --manifest-path {manifest}` brings it up to date")
        })?;
    }
    Ok(())
}

/// Returns the lines of a manifest's lints.
fn lints(manifest: &str) -> Vec<&str> {
    let mut is_inside = false;
    manifest
        .lines()
        .filter(|line| {
            if line.starts_with('[') {
                is_inside = line.starts_with("[workspace.lints");
            }
            is_inside && !line.is_empty() && !line.starts_with('#')
        })
        .collect()
}

/// Returns the versions of each package in a lock file.
fn versions(lock: &str) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut versions: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for package in lock.split("[[package]]\n").skip(1) {
        let value =
            |key| package.lines().find_map(|line| line.strip_prefix(key)?.strip_suffix('"'));
        if let (Some(name), Some(version)) = (value("name = \""), value("version = \"")) {
            versions.entry(name).or_default().insert(version);
        }
    }
    versions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lints_are_read_without_comments_and_other_sections() {
        let manifest = "[workspace]\na = 1\n[workspace.lints.rust]\nb = 2\n\n[workspace.lints.clippy]\n# c\nd = 3\n\n\
                        # e\n[profile.dev]\nf = 4\n";
        let wanted = [
            "[workspace.lints.rust]",
            "b = 2",
            "[workspace.lints.clippy]",
            "d = 3",
        ];
        assert_eq!(lints(manifest), wanted);
    }

    #[test]
    fn a_package_may_have_several_versions() {
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1\"\n\n[[package]]\nname = \"a\"\nversion = \"2\"\n";
        assert_eq!(
            versions(lock),
            BTreeMap::from([("a", BTreeSet::from(["1", "2"]))])
        );
    }
}
