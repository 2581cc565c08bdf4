//! Commands as an administrator types them, in the words of the documentation. The test `chart` looks for the
//! documents' commands among those that are given here.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::real::RealCluster;

use crate::installed::support::built;

/// The address of the API server in the documents.
const DOCUMENTED_SERVER: &str = "192.0.2.1";

/// Where programs are put on a node.
const PROGRAMS: &str = "/usr/local/bin";

/// Runs a command and returns what it prints. The documents' address stands for the API server's.
pub(crate) fn typed(cluster: &RealCluster, line: &str) -> Result<String> {
    typed_with(cluster, line, &[])
}

/// Runs a command with more arguments, such as `--yes` in place of an answer.
pub(crate) fn typed_with(cluster: &RealCluster, line: &str, more: &[&str]) -> Result<String> {
    let (program, args) = words(cluster, line)?;
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let printed = cluster.run(&program, &[&args[..], more].concat());
    printed.with_context(|| format!("`{line}`"))
}

/// Runs a command of kpctl on a node, as root, and returns what it prints. It is copied there with the agent, which it
/// starts: a node has a `/tmp` of its own, in which the checkout may be.
pub(crate) fn typed_on(cluster: &RealCluster, node: &str, line: &str) -> Result<String> {
    let (program, args) = words(cluster, line)?;
    let node = cluster.node(node)?;
    let folder = node.path(PROGRAMS)?;
    let built = Path::new(&program).parent().context("no folder")?;
    // Not by this process: a child of another test would hold the copies open for writing, and nothing may run them then.
    let mut copy = Command::new("cp");
    copy.args(["kpctl", "kp-nodeagent"].map(|name| built.join(name)));
    let copied = copy.arg(&folder).status().context("run cp")?;
    ensure!(copied.success(), "copy the programs to the node");
    let kubeconfig = format!("KUBECONFIG={}", cluster.kubeconfig().display());
    let all = [vec![kubeconfig, format!("{PROGRAMS}/kpctl")], args].concat();
    let printed = node.exec("env", &all);
    for name in ["kpctl", "kp-nodeagent"] {
        fs::remove_file(folder.join(name)).with_context(|| format!("remove {name}"))?;
    }
    printed.with_context(|| format!("`{line}`"))
}

/// Runs a command that may fail, and returns its exit code with what it prints.
pub(crate) fn tried(
    cluster: &RealCluster,
    line: &str,
    more: &[&str],
) -> Result<(Option<i32>, String)> {
    let (program, args) = words(cluster, line)?;
    let mut command: Command = cluster.command(&program);
    command.args(args).args(more);
    let output = cluster.ns().run(|| Ok(command.output()?))?;
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8_lossy(&printed).into_owned();
    Ok((output.status.code(), printed))
}

/// Returns the program and the arguments of a command.
fn words(cluster: &RealCluster, line: &str) -> Result<(String, Vec<String>)> {
    let built = built()?;
    let server = cluster.server();
    let host = server.trim_start_matches("https://");
    let (host, _) = host.rsplit_once(':').context("no port")?;
    let chart = built.root.join("deploy/chart").display().to_string();
    let mut words = line.split_whitespace().map(|word| match word {
        "deploy/chart" => chart.clone(),
        word => word.replace(DOCUMENTED_SERVER, host),
    });
    let program = match words.next().context("an empty command")?.as_str() {
        "helm" => built.helm.display().to_string(),
        "kpctl" => built.kpctl.display().to_string(),
        other => other.to_owned(),
    };
    Ok((program, words.collect()))
}
