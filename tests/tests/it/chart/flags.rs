//! The arguments in the chart are those that the programs have.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use kplane_tests::process::output;
use kplane_tests::product::Product;
use serde_json::Value;

use super::{Rendering, renderings};

/// Returns the program of each container and its arguments.
pub(super) fn containers(objects: &[Value]) -> Vec<(String, Vec<String>)> {
    objects
        .iter()
        .map(|object| &object["spec"]["template"]["spec"])
        .flat_map(|pod| [&pod["initContainers"], &pod["containers"]])
        .filter_map(Value::as_array)
        .flatten()
        .map(|container| {
            let args = container["args"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|arg| arg.as_str().unwrap_or_default())
                .map(|arg| arg.replace("$(NODE_NAME)", "node-1"));
            let name = container["name"].as_str().unwrap_or_default();
            (name.to_owned(), args.collect())
        })
        .collect()
}

/// A program checks each argument, also its value, before it comes to `--help`.
pub(in crate::chart) fn the_programs_accept_all_arguments() -> Result<()> {
    let renderings = renderings()?;
    let product = Product::build()?;
    let mut checked = BTreeSet::new();
    for Rendering { settings, objects } in renderings {
        let found = containers(objects);
        let names: Vec<_> = found.iter().map(|(name, _)| &**name).collect();
        ensure!(names == ["init", "nodeagent", "controlplane"], "{names:?}");
        for (name, args) in found {
            if !checked.insert((name.clone(), args.clone())) {
                continue;
            }
            let mut program = Command::new(match &*name {
                "controlplane" => &product.control_plane,
                _ => &product.node_agent,
            });
            program.args(&args).arg("--help");
            output(program).with_context(|| format!("{settings:?}: {name} {args:?}"))?;
        }
    }
    ensure!(checked.len() > 10, "{}", checked.len());
    let flows = |(_, args): &&(String, Vec<String>)| args.iter().any(|arg| arg == "--flows");
    ensure!(
        checked.iter().filter(flows).count() == 2,
        "agent.flows=true"
    );
    // The check can fail.
    let mut program = Command::new(&product.control_plane);
    program.args(["--cliff-guard=some", "--help"]);
    ensure!(output(program).is_err(), "an invalid value is accepted");
    Ok(())
}

/// The agent reads its whole configuration, with kube-proxy's file as the chart mounts it.
pub(in crate::chart) fn agents_start_with_the_arguments_and_kube_proxys_file() -> Result<()> {
    let renderings = renderings()?;
    let product = Product::build()?;
    let folder = tempfile::tempdir()?;
    for Rendering { settings, objects } in renderings {
        let config = objects.iter().find(|o| o["metadata"]["name"] == "kplane-kube-proxy-config");
        let text = config.map(|config| config["data"]["config.conf"].as_str());
        let text = match text {
            Some(text) => text.context("no config.conf")?,
            None => "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n",
        };
        let file = folder.path().join("config.conf");
        std::fs::write(&file, text)?;
        for (name, args) in containers(objects).into_iter().filter(|(name, _)| name == "nodeagent")
        {
            let local = |arg: String| arg.replace("/etc/kube-proxy/config.conf", &path(&file));
            let mut program = Command::new(&product.node_agent);
            program.args(args.into_iter().map(local)).arg("--check-config");
            let output = program.output()?;
            // 2: there are warnings.
            let code = output.status.code();
            let errors = String::from_utf8_lossy(&output.stderr);
            ensure!(
                matches!(code, Some(0 | 2)),
                "{settings:?}: {name}: {errors}"
            );
        }
    }
    Ok(())
}

fn path(file: &Path) -> String {
    file.display().to_string()
}
