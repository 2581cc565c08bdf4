//! The walls of the house: which crate may use which, and that no modules of a crate use each other in a ring.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cargo::output;

/// A crate of the workspace: its folder, its name, and the crates of the workspace that it may use.
const CRATES: [(&str, &str, &[&str]); 17] = [
    ("model", "kplane-model", &[]),
    ("proto", "kplane-proto", &["kplane-model"]),
    ("http", "kplane-http", &[]),
    ("tls", "kplane-tls", &[]),
    ("view", "kplane-view", &["kplane-model", "kplane-proto"]),
    (
        "controlplane",
        "kp-controlplane",
        &[
            "kplane-http",
            "kplane-model",
            "kplane-proto",
            "kplane-tls",
            "kplane-view",
        ],
    ),
    ("nodeagent/netlink", "kplane-netlink", &["kplane-model"]),
    ("nodeagent/userproxy", "kplane-userproxy", &["kplane-model"]),
    (
        "nodeagent/dataplane",
        "kplane-dataplane",
        &["kplane-model", "kplane-netlink", "kplane-userproxy"],
    ),
    (
        "nodeagent/kube-proxy-config",
        "kplane-kube-proxy-config",
        &["kplane-model"],
    ),
    (
        "nodeagent",
        "kp-nodeagent",
        &[
            "kp-controlplane",
            "kplane-dataplane",
            "kplane-http",
            "kplane-kube-proxy-config",
            "kplane-model",
            "kplane-proto",
            "kplane-tls",
        ],
    ),
    (
        "cli",
        "kpctl",
        &["kplane-model", "kplane-proto", "kplane-tls", "kplane-view"],
    ),
    ("cli/tests/samples", "kpctl-samples", &["kplane-proto"]),
    (
        "tests/rig",
        "kplane-rig",
        &["kplane-model", "kplane-proto", "kplane-tls"],
    ),
    (
        "tests",
        "kplane-tests",
        &[
            "kp-controlplane",
            "kp-nodeagent",
            "kplane-dataplane",
            "kplane-http",
            "kplane-model",
            "kplane-netlink",
            "kplane-proto",
            "kplane-rig",
            "kplane-tls",
        ],
    ),
    (
        "devtools",
        "kplane-dev",
        &[
            "kp-controlplane",
            "kplane-model",
            "kplane-proto",
            "kplane-rig",
            "kplane-tls",
        ],
    ),
    ("xtask", "xtask", &[]),
];

/// Crates that a crate must not depend on, not even indirectly.
const BANS: [(&str, &[&str]); 5] = [
    (
        "kplane-model",
        &[
            "serde",
            "nix",
            "netlink-sys",
            "tokio",
            "prost",
            "tonic",
            "kube",
            "k8s-openapi",
        ],
    ),
    (
        "kplane-netlink",
        &["tokio", "prost", "tonic", "kube", "clap"],
    ),
    (
        "kplane-userproxy",
        &["tokio", "prost", "tonic", "kube", "clap"],
    ),
    (
        "kplane-dataplane",
        &["tokio", "prost", "tonic", "kube", "clap"],
    ),
    (
        "kplane-kube-proxy-config",
        &["netlink-sys", "tokio", "prost", "tonic", "kube", "clap"],
    ),
];

/// Which modules of a crate use which others of it.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// Checks every crate.
pub(super) fn check(root: &Path) -> Result<()> {
    let mut problems = Vec::new();
    for (folder, name, may_use) in CRATES {
        let manifest = read(&root.join(folder).join("Cargo.toml"))?;
        let used = dependencies(&manifest);
        let ours = CRATES.map(|(_, name, _)| name);
        let beyond = ours
            .into_iter()
            .filter(|other| used.contains(other) && !may_use.contains(other));
        problems.extend(beyond.map(|other| format!("{name} must not use {other}")));
        let uses = uses(&root.join(folder).join("src"))?;
        problems.extend(ring(&uses).map(|ring| {
            format!(
                "modules of {name} use each other in a ring: {}",
                ring.join(" -> ")
            )
        }));
    }
    for (name, banned) in BANS {
        let tree = tree(root, name)?;
        let found = banned.iter().filter(|banned| tree.contains(**banned));
        problems.extend(found.map(|banned| format!("{name} must not depend on {banned}")));
    }
    ensure!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The names in the section `[dependencies]` of a manifest.
fn dependencies(manifest: &str) -> BTreeSet<&str> {
    let section = manifest
        .lines()
        .skip_while(|line| *line != "[dependencies]");
    let lines = section.skip(1).take_while(|line| !line.starts_with('['));
    lines
        .filter_map(|line| line.split(['.', ' ', '=']).next())
        .filter(|name| !name.is_empty() && !name.starts_with('#'))
        .collect()
}

/// Everything that a crate depends on, tests aside.
fn tree(root: &Path, name: &str) -> Result<BTreeSet<String>> {
    let args = [
        "tree",
        "--package",
        name,
        "--edges",
        "normal",
        "--prefix",
        "none",
    ];
    let tree = output(Command::new("cargo").args(args).current_dir(root))?;
    let names = tree.lines().filter_map(|line| line.split(' ').next());
    Ok(names.map(str::to_owned).collect())
}

/// Reads a crate's modules. The root of the crate, programs and tests may use everything.
fn uses(src: &Path) -> Result<Uses> {
    let mut files = Vec::new();
    list(src, &mut files)?;
    let module = |file: &str| {
        let first = file.split('/').next().unwrap_or_default();
        first.trim_end_matches(".rs").to_owned()
    };
    let modules: BTreeSet<String> = files.iter().map(|file| module(file)).collect();
    let mut uses = Uses::new();
    for file in &files {
        let name = module(file);
        if ["lib", "main"].contains(&&*name) || file.contains("tests") {
            continue;
        }
        let text = read(&src.join(file))?;
        let used = named(&text)
            .into_iter()
            .filter(|other| modules.contains(other));
        let others = used.filter(|other| *other != name);
        uses.entry(name.clone()).or_default().extend(others);
    }
    Ok(uses)
}

/// Lists Rust files below a folder by their paths from `src`.
fn list(src: &Path, files: &mut Vec<String>) -> Result<()> {
    fn below(src: &Path, folder: &Path, files: &mut Vec<String>) -> Result<()> {
        let entries = std::fs::read_dir(folder);
        let entries = entries.with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                below(src, &path, files)?;
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let short = path.strip_prefix(src)?;
                files.push(short.to_string_lossy().into_owned());
            }
        }
        Ok(())
    }
    below(src, src, files)
}

/// The modules that a file names as `crate::module` or in `crate::{module, ..}`, up to its tests.
fn named(text: &str) -> BTreeSet<String> {
    let code = text
        .split("\n#[cfg(test)]\nmod tests")
        .next()
        .unwrap_or_default();
    let lines: Vec<&str> = code
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect();
    let code = lines.join("\n");
    let mut names = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        if let Some(list) = rest.strip_prefix('{') {
            // The first words of a list; what is nested in it is of one of these.
            let list = list.split("};").next().unwrap_or_default();
            names.extend(list.split([',', '{']).map(first_word));
        } else {
            names.insert(first_word(rest));
        }
    }
    names
}

fn first_word(text: &str) -> String {
    let is_word = |c: &char| c.is_ascii_alphanumeric() || *c == '_';
    text.trim_start().chars().take_while(is_word).collect()
}

/// A ring of modules, the first one again at the end.
fn ring(uses: &Uses) -> Option<Vec<String>> {
    let rings = uses.keys().filter_map(|start| way(uses, start, start));
    rings.min_by_key(Vec::len)
}

/// The shortest way along uses from one module to another, at least one step long.
fn way(uses: &Uses, from: &str, to: &str) -> Option<Vec<String>> {
    let mut ways = vec![vec![from.to_owned()]];
    let mut seen = BTreeSet::new();
    while !ways.is_empty() {
        let mut longer = Vec::new();
        for way in ways {
            let next = way.last().and_then(|last| uses.get(last));
            for name in next.into_iter().flatten() {
                let mut longer_way = way.clone();
                longer_way.push(name.clone());
                if name == to {
                    return Some(longer_way);
                }
                if seen.insert(name.clone()) {
                    longer.push(longer_way);
                }
            }
        }
        ways = longer;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses(edges: &[(&str, &str)]) -> Uses {
        let mut uses = Uses::new();
        for (from, to) in edges {
            let others = uses.entry((*from).to_owned()).or_default();
            others.insert((*to).to_owned());
        }
        uses
    }

    #[test]
    fn a_ring_is_named_with_all_its_modules() {
        assert_eq!(ring(&uses(&[("a", "b"), ("b", "c"), ("a", "c")])), None);
        let found = ring(&uses(&[("a", "b"), ("b", "c"), ("c", "b")]));
        assert_eq!(found.unwrap(), ["b", "c", "b"]);
    }

    #[test]
    fn names_in_code_count_and_those_in_comments_and_tests_do_not() {
        let text = "use crate::one::Two;\nuse crate::{three, four::{Five}};\n// crate::six\n\
                    #[cfg(test)]\nmod tests { use crate::seven; }\n";
        let names = named(text);
        for name in ["one", "three", "four"] {
            assert!(names.contains(name), "{name}");
        }
        assert!(
            !names.contains("six") && !names.contains("seven"),
            "{names:?}"
        );
    }

    #[test]
    fn dependencies_are_those_of_the_program() {
        let manifest = "[package]\nname = \"x\"\n\n[dependencies]\n# why\nkplane-model.workspace = true\n\
                        nix = { workspace = true }\n\n[dev-dependencies]\ntempfile.workspace = true\n";
        assert_eq!(
            dependencies(manifest),
            BTreeSet::from(["kplane-model", "nix"])
        );
    }
}
