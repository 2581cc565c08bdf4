//! `kpctl check --pre`: a cluster and a machine before an installation.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tokio::task::spawn_blocking;

use super::super::migrate::Cluster;
use super::nodes;
use crate::args::Cli;
use crate::args::check::CheckArgs;
use crate::check::before::{Facts, RIGHTS, findings};
use crate::check::{Finding, external};
use crate::connection::{Asked, Route};
use crate::failure::Failure;

/// The program that knows the kernel.
const AGENT: &str = "kp-nodeagent";

/// Returns all findings.
pub(super) async fn run(cli: &Cli, args: &CheckArgs) -> Vec<Finding> {
    let mut all = Vec::new();
    let mut configuration = None;
    if !args.no_cluster {
        match of_cluster(cli, args).await {
            Ok((findings, text)) => {
                all.extend(findings);
                configuration = text;
            }
            Err(error) => all.push(Finding::unknown(
                "api-server",
                error.to_string(),
                "kubectl get --raw /readyz",
            )),
        }
    }
    if args.local {
        let program = args.agent.clone().unwrap_or_else(program);
        all.extend(match local(&program, configuration.as_deref()).await {
            Ok(findings) => findings,
            Err(error) => vec![Finding::unknown(
                "kernel",
                format!("{} --preflight: {error}", program.display()),
                "kpctl check --pre --local --agent PATH",
            )],
        });
    }
    all
}

/// Returns the findings about the cluster, and kube-proxy's configuration.
async fn of_cluster(
    cli: &Cli,
    args: &CheckArgs,
) -> Result<(Vec<Finding>, Option<String>), Failure> {
    let objects = Route::objects(&cli.options).await?;
    let mut cluster = Cluster::new(objects, &cli.options, args.target.kube_proxy.clone());
    let gathered = cluster.gather_objects().await?;
    let namespace = cluster.namespace().to_owned();
    let path = format!("/api/v1/namespaces/{namespace}");
    let mut facts = Facts {
        version: cluster
            .objects()
            .get::<Value>("/version", Asked("get /version"))
            .await?
            .unwrap_or_default(),
        namespace: cluster.objects().get(&path, Asked("get namespaces")).await?,
        denied: Vec::new(),
    };
    for (verb, group, resource) in RIGHTS {
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": { "resourceAttributes": { "verb": verb, "group": group, "resource": resource } },
        });
        let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
        let asked = Asked("create selfsubjectaccessreviews");
        let answer = cluster.objects().ask(path, &review, asked).await?;
        if answer["status"]["allowed"] != true {
            facts.denied.push(format!("{verb} {resource}"));
        }
    }
    let configuration = cluster.configuration().await?;
    let mut found = findings(&facts, &gathered, &namespace);
    let services = cluster.objects().list("/api/v1/services", "", Asked("list services"));
    found.push(match services.await {
        Ok(listed) => external::finding(&listed, &gathered.nodes),
        Err(error) => Finding::skipped(external::CHECK, error.to_string()),
    });
    if args.nodes {
        found.extend(match nodes::run(&cluster, args).await {
            Ok(findings) => findings,
            Err(error) => vec![Finding::unknown(
                "nodes",
                error.to_string(),
                "kubectl get pods --all-namespaces -l app.kubernetes.io/component=check",
            )],
        });
    }
    Ok((found, configuration))
}

/// Returns the program beside kpctl, or else the one in PATH.
fn program() -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    let beside = own.with_file_name(AGENT);
    if beside.is_file() { beside } else { AGENT.into() }
}

/// Lets the agent's program check this machine, with kube-proxy's configuration if there is one.
async fn local(program: &Path, configuration: Option<&str>) -> io::Result<Vec<Finding>> {
    let mut command = Command::new(program);
    command.arg("--preflight").stdin(Stdio::null());
    // The file goes away with the folder, whatever happens.
    let folder = configuration.map(Scratch::new).transpose()?;
    if let Some(folder) = &folder {
        command.arg("--config").arg(folder.file());
    }
    let output = spawn_blocking(move || command.output()).await.map_err(io::Error::other)??;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().last().unwrap_or_default();
        return Err(io::Error::other(format!("{}: {last}", output.status)));
    }
    serde_json::from_slice(&output.stdout).map_err(io::Error::other)
}

/// A folder with a file that is removed in the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(text: &str) -> io::Result<Self> {
        let name: String = format!(
            "kpctl-{}-{:?}",
            std::process::id(),
            std::time::Instant::now()
        )
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .collect();
        let folder = std::env::temp_dir().join(name);
        // Fails if another user has made it.
        std::fs::create_dir(&folder)?;
        let scratch = Self(folder);
        std::fs::write(scratch.file(), text)?;
        Ok(scratch)
    }

    fn file(&self) -> PathBuf {
        self.0.join("config.conf")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A file that stays is a copy of a ConfigMap, and small.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
