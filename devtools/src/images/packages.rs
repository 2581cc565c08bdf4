//! The crates that a program contains, as cargo names them.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use anyhow::{Context as _, Result};
use kplane_rig::process::output;
use serde::Deserialize;
use serde_json::{Value, json};

/// The crates of a program.
#[derive(Debug)]
pub(super) struct Crates {
    /// By name and version. The program itself is among them.
    all: BTreeMap<(String, String), Crate>,
    root: (String, String),
}

/// A crate, and those that it uses.
#[derive(Debug)]
struct Crate {
    /// An SPDX expression, if the crate names one.
    licence: Option<String>,
    /// Whether the crate comes from a registry; otherwise it is of this workspace.
    from_registry: bool,
    uses: BTreeSet<(String, String)>,
}

/// The part of `cargo metadata` that is used here.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Target {
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Deserialize)]
struct DependencyKind {
    kind: Option<String>,
}

/// The features of the programs in images, as `xtask/src/images.rs` builds them: the agent has no control plane inside.
const FEATURES: [&str; 3] = [
    "--no-default-features",
    "--features",
    "kp-nodeagent/userspace",
];

/// Returns what cargo says about the workspace, built for a target. `quick` stands for the programs of the tests.
///
/// # Errors
/// Cargo fails.
pub(super) fn metadata(target: &str, quick: bool) -> Result<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .current_dir(crate::workspace())
        .args(["metadata", "--format-version", "1", "--locked"])
        .args(["--filter-platform", target]);
    if !quick {
        command.args(FEATURES);
    }
    output(command)
}

impl Crates {
    /// Returns the crates that are linked into a program: without those that only run while it is built.
    ///
    /// # Errors
    /// The metadata does not name the program.
    pub(super) fn of(program: &str, metadata: &str) -> Result<Self> {
        let metadata: Metadata =
            serde_json::from_str(metadata).context("cannot read the output of cargo metadata")?;
        let packages: BTreeMap<&str, &Package> =
            metadata.packages.iter().map(|p| (&*p.id, p)).collect();
        let nodes: BTreeMap<&str, &Node> =
            metadata.resolve.nodes.iter().map(|node| (&*node.id, node)).collect();
        let mut named = metadata.packages.iter().filter(|p| p.name == program);
        let root = named
            .next()
            .with_context(|| format!("the workspace has no program {program}"))?;
        let mut all = BTreeMap::new();
        let mut open = vec![root];
        while let Some(package) = open.pop() {
            if all.contains_key(&package.key()) {
                continue;
            }
            let dependencies = nodes.get(&*package.id).map(|node| &*node.deps);
            let linked: Vec<&Package> = dependencies
                .unwrap_or_default()
                .iter()
                .filter(|dependency| dependency.is_normal())
                .filter_map(|dependency| packages.get(&*dependency.pkg).copied())
                .filter(|package| !package.is_macro())
                .collect();
            let found = Crate {
                licence: package.license.as_ref().map(|text| text.replace('/', " OR ")),
                from_registry: package.source.is_some(),
                uses: linked.iter().map(|package| package.key()).collect(),
            };
            all.insert(package.key(), found);
            open.extend(linked);
        }
        let root = root.key();
        Ok(Self { all, root })
    }

    /// Returns the list of dependencies that `cargo auditable` puts into programs, uncompressed.
    pub(super) fn auditable(&self) -> Value {
        let place = |key: &(String, String)| self.all.keys().position(|other| other == key);
        let packages = self.all.iter().map(|(key, found)| {
            let mut package = json!({
                "name": key.0,
                "version": key.1,
                "source": if found.from_registry { "crates.io" } else { "local" },
            });
            let uses: Vec<usize> = found.uses.iter().filter_map(place).collect();
            if !uses.is_empty() {
                package["dependencies"] = json!(uses);
            }
            if *key == self.root {
                package["root"] = json!(true);
            }
            package
        });
        json!({ "packages": Vec::from_iter(packages) })
    }

    /// Returns the program, as a component of a bill of materials.
    pub(super) fn program(&self) -> Value {
        let mut component = self.component(&self.root);
        component["type"] = json!("application");
        component
    }

    /// Returns the crates that the program uses, as components of a bill of materials.
    pub(super) fn components(&self) -> Vec<Value> {
        self.all
            .keys()
            .filter(|key| **key != self.root)
            .map(|key| self.component(key))
            .collect()
    }

    /// Returns which crate uses which, for a bill of materials.
    pub(super) fn dependencies(&self) -> Vec<Value> {
        self.all
            .iter()
            .map(|(key, found)| {
                let uses: Vec<String> = found.uses.iter().map(url).collect();
                json!({ "ref": url(key), "dependsOn": uses })
            })
            .collect()
    }

    fn component(&self, key: &(String, String)) -> Value {
        let mut component = json!({
            "type": "library",
            "bom-ref": url(key),
            "name": key.0,
            "version": key.1,
            "purl": url(key),
        });
        let licence = self.all.get(key).and_then(|found| found.licence.as_ref());
        if let Some(licence) = licence {
            component["licenses"] = json!([{ "expression": licence }]);
        }
        component
    }
}

impl Package {
    fn key(&self) -> (String, String) {
        (self.name.clone(), self.version.clone())
    }

    /// Returns whether the package is used by the compiler only.
    fn is_macro(&self) -> bool {
        self.targets
            .iter()
            .flat_map(|target| &target.kind)
            .any(|kind| kind == "proc-macro")
    }
}

impl Dependency {
    fn is_normal(&self) -> bool {
        self.dep_kinds.iter().any(|kind| kind.kind.is_none())
    }
}

/// Returns a crate's package URL.
fn url((name, version): &(String, String)) -> String {
    format!("pkg:cargo/{name}@{version}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_contains_what_it_links_and_no_tools_of_its_build() {
        let metadata = metadata("x86_64-unknown-linux-gnu", false).unwrap();
        let crates = Crates::of("kp-nodeagent", &metadata).unwrap();
        let names = |crates: &Crates| {
            crates.all.keys().map(|(name, _)| name.clone()).collect::<BTreeSet<_>>()
        };
        let agent = names(&crates);
        for linked in [
            "kp-nodeagent",
            "kplane-netlink",
            "kplane-userproxy",
            "tokio",
        ] {
            assert!(agent.contains(linked), "{linked}");
        }
        for other in [
            "serde_derive",
            "protox",
            "tempfile",
            "kpctl",
            "kp-controlplane",
            "windows-sys",
        ] {
            assert!(!agent.contains(other), "{other}");
        }
        let controlplane = Crates::of("kp-controlplane", &metadata).unwrap();
        assert!(!names(&controlplane).contains("kplane-netlink"));
        assert!(Crates::of("kp-nothing", &metadata).is_err());
    }

    #[test]
    fn the_list_for_auditors_has_one_root_and_no_place_outside_of_it() {
        let metadata = metadata("x86_64-unknown-linux-gnu", true).unwrap();
        let crates = Crates::of("kp-controlplane", &metadata).unwrap();
        let list = crates.auditable();
        let packages = list["packages"].as_array().unwrap();
        let roots: Vec<_> = packages.iter().filter(|p| p["root"] == true).collect();
        assert_eq!(roots.len(), 1);
        assert_eq!(roots[0]["name"], "kp-controlplane");
        let mut places = packages
            .iter()
            .filter_map(|p| p["dependencies"].as_array())
            .flatten()
            .map(|place| place.as_u64().unwrap());
        assert!(places.all(|place| place < packages.len() as u64));
    }
}
