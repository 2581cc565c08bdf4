//! The command lines of the programs, and their files.

use std::fs::{self, File};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use super::Kubelets;
use super::credentials::Credentials;
use super::guard;
use super::programs::Programs;

/// The port of the API server, on all addresses.
pub(crate) const API_PORT: u16 = 6443;
/// The port of etcd, on 127.0.0.1 only.
pub(super) const ETCD_PORT: u16 = 2379;
const ETCD_PEER_PORT: u16 = 2380;
/// Issuer and audience of ServiceAccount tokens.
const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

/// The controllers that proxies and their tests need; not those for ServiceAccount tokens as
/// Secrets or the node life cycle.
const CONTROLLERS: [&str; 10] = [
    "daemonset-controller",
    "deployment-controller",
    "replicaset-controller",
    "endpointslice-controller",
    "endpointslice-mirroring-controller",
    "serviceaccount-controller",
    "root-ca-certificate-publisher-controller",
    "namespace-controller",
    "garbage-collector-controller",
    "service-cidr-controller",
];

/// All controllers but those that need a cloud. The rig itself gives nodes the ranges of their Pods.
const WITH_KUBELETS: [&str; 2] = ["*", "-node-ipam-controller"];

/// Number of log lines in an error's message.
const TAIL_LINES: usize = 15;

/// Files of a cluster, below one folder.
#[derive(Clone, Debug)]
pub(super) struct Files {
    pub(super) folder: PathBuf,
}

impl Files {
    pub(super) fn new(folder: &Path) -> Result<Self> {
        let files = Self {
            folder: std::path::absolute(folder)?,
        };
        for folder in [files.logs(), files.certificates()] {
            fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        }
        Ok(files)
    }

    pub(super) fn data(&self) -> PathBuf {
        self.folder.join("etcd")
    }

    pub(super) fn kubeconfig(&self) -> PathBuf {
        self.folder.join("kubeconfig")
    }

    pub(super) fn logs(&self) -> PathBuf {
        self.folder.join("logs")
    }

    fn certificates(&self) -> PathBuf {
        self.folder.join("certificates")
    }

    /// Returns the server's certificate and the one that signed it, which clients trust.
    pub(super) fn ca(&self) -> PathBuf {
        self.certificates().join("apiserver.crt")
    }

    /// Returns the end of a program's log.
    pub(super) fn tail(&self, program: &str) -> String {
        let log = fs::read_to_string(self.log(program)).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
    }

    fn log(&self, program: &str) -> PathBuf {
        self.logs().join(format!("{program}.log"))
    }

    /// Returns a command whose output is appended to the program's log.
    fn command(&self, programs: &Programs, program: &str) -> Result<Command> {
        let path = self.log(program);
        let log = File::options()
            .create(true)
            .append(true)
            .open(&path)
            .with_context(|| path.display().to_string())?;
        let mut command = guard::command(programs.bin().join(program));
        command
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("the log's descriptor")?)
            .stderr(log);
        Ok(command)
    }
}

/// The settings of the API server.
pub(super) struct ApiServer<'a> {
    pub(super) address: IpAddr,
    pub(super) service_ranges: &'a str,
    pub(super) credentials: &'a Credentials,
    pub(super) kubelets: Option<&'a Kubelets>,
    pub(super) more: &'a [String],
}

pub(super) fn etcd(programs: &Programs, files: &Files) -> Result<Command> {
    let clients = format!("http://127.0.0.1:{ETCD_PORT}");
    let peers = format!("http://127.0.0.1:{ETCD_PEER_PORT}");
    let mut command = files.command(programs, "etcd")?;
    command
        .arg("--data-dir")
        .arg(files.data())
        .args(["--listen-client-urls", &clients])
        .args(["--advertise-client-urls", &clients])
        .args(["--listen-peer-urls", &peers])
        .args(["--initial-advertise-peer-urls", &peers])
        .args(["--initial-cluster", &format!("default={peers}")])
        .args(["--log-level", "warn"])
        // A crash of the machine may cost the data of a test.
        .arg("--unsafe-no-fsync");
    Ok(command)
}

pub(super) fn apiserver(
    programs: &Programs,
    files: &Files,
    options: &ApiServer<'_>,
) -> Result<Command> {
    let credentials = options.credentials;
    let mut command = files.command(programs, "kube-apiserver")?;
    command
        .arg(format!("--etcd-servers=http://127.0.0.1:{ETCD_PORT}"))
        .arg("--bind-address=0.0.0.0")
        .arg(format!("--advertise-address={}", options.address))
        .arg(format!("--secure-port={API_PORT}"))
        .arg(flag("--cert-dir", &files.certificates()))
        .arg(flag("--token-auth-file", &credentials.tokens))
        .arg(flag(
            "--service-account-key-file",
            &credentials.account_public_key,
        ))
        .arg(flag(
            "--service-account-signing-key-file",
            &credentials.account_key,
        ))
        .arg(format!("--service-account-issuer={ISSUER}"))
        .arg(format!(
            "--service-cluster-ip-range={}",
            options.service_ranges
        ));
    match options.kubelets {
        // Every Pod would wait for its namespace's account, and have a volume with a token.
        None => command.args([
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
        ]),
        Some(kubelets) => command
            .arg("--authorization-mode=Node,RBAC")
            .arg("--enable-admission-plugins=NodeRestriction")
            .arg("--allow-privileged")
            .arg("--kubelet-preferred-address-types=InternalIP")
            .arg(flag("--client-ca-file", &kubelets.client_ca))
            .arg(flag("--kubelet-client-certificate", &kubelets.certificate))
            .arg(flag("--kubelet-client-key", &kubelets.key)),
    };
    command.args(options.more);
    Ok(command)
}

/// Returns the command of the controllers: those of [`CONTROLLERS`], or all that need no cloud.
pub(super) fn controller_manager(programs: &Programs, files: &Files, all: bool) -> Result<Command> {
    let names = if all { WITH_KUBELETS.join(",") } else { CONTROLLERS.join(",") };
    let mut command = files.command(programs, "kube-controller-manager")?;
    command
        .arg(flag("--kubeconfig", &files.kubeconfig()))
        .arg(flag("--root-ca-file", &files.ca()))
        .args(["--leader-elect=false", "--secure-port=0"])
        .arg(format!("--controllers={names}"));
    Ok(command)
}

pub(super) fn scheduler(programs: &Programs, files: &Files) -> Result<Command> {
    let mut command = files.command(programs, "kube-scheduler")?;
    command
        .arg(flag("--kubeconfig", &files.kubeconfig()))
        .args(["--leader-elect=false", "--secure-port=0"]);
    Ok(command)
}

fn flag(name: &str, path: &Path) -> String {
    format!("{name}={}", path.display())
}
