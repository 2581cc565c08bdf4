//! The walls of the house: which crate may use which, that no modules of a crate use each other in a ring, and that the
//! agent does not name its backends.

mod backends;
mod rings;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cargo::output;

/// A crate of the workspace, or the benchmarks: its folder, its name, and the crates of the workspace that it may use.
const CRATES: [(&str, &str, &[&str]); 23] = [
    ("model", "kplane-model", &[]),
    ("proto", "kplane-proto", &["kplane-model"]),
    ("http", "kplane-http", &[]),
    ("tls", "kplane-tls", &[]),
    ("util", "kplane-util", &["kplane-tls"]),
    ("view", "kplane-view", &["kplane-model", "kplane-proto"]),
    ("controlplane/policy", "kplane-policy", &["kplane-model"]),
    (
        "controlplane/desired-state",
        "kplane-desired-state",
        &[
            "kplane-model",
            "kplane-policy",
            "kplane-proto",
            "kplane-tls",
            "kplane-util",
        ],
    ),
    (
        "controlplane/agents",
        "kplane-agents",
        &[
            "kplane-http",
            "kplane-model",
            "kplane-desired-state",
            "kplane-policy",
            "kplane-proto",
            "kplane-tls",
            "kplane-util",
        ],
    ),
    (
        "controlplane/status-api",
        "kplane-status-api",
        &[
            "kplane-agents",
            "kplane-model",
            "kplane-desired-state",
            "kplane-policy",
            "kplane-proto",
            "kplane-view",
            "kplane-util",
        ],
    ),
    (
        "controlplane",
        "kp-controlplane",
        &[
            "kplane-agents",
            "kplane-http",
            "kplane-model",
            "kplane-status-api",
            "kplane-desired-state",
            "kplane-proto",
            "kplane-tls",
            "kplane-util",
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
            "kplane-desired-state",
            "kplane-proto",
            "kplane-tls",
            "kplane-util",
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
            "kplane-agents",
            "kplane-http",
            "kplane-model",
            "kplane-netlink",
            "kplane-desired-state",
            "kplane-proto",
            "kplane-rig",
            "kplane-tls",
            "kplane-util",
        ],
    ),
    (
        "bench",
        "kplane-bench",
        &[
            "kp-controlplane",
            "kp-nodeagent",
            "kplane-dataplane",
            "kplane-agents",
            "kplane-model",
            "kplane-netlink",
            "kplane-desired-state",
            "kplane-proto",
            "kplane-rig",
            "kplane-tests",
            "kplane-tls",
            "kplane-util",
        ],
    ),
    (
        "devtools",
        "kplane-dev",
        &[
            "kplane-model",
            "kplane-desired-state",
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
        let rings = rings::find(&root.join(folder).join("src"))?;
        let ring = |ring| format!("modules of {name} use each other in a ring: {ring}");
        problems.extend(rings.into_iter().map(ring));
    }
    problems.extend(backends::find(&root.join("nodeagent"))?);
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
    manifest
        .lines()
        .skip_while(|line| *line != "[dependencies]")
        .skip(1)
        .take_while(|line| !line.starts_with('['))
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
    Ok(tree
        .lines()
        .filter_map(|line| line.split(' ').next())
        .map(str::to_owned)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

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
