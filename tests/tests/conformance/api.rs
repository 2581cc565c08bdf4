//! The API server that both proxies read: etcd and kube-apiserver in a namespace of their own, on a
//! small network with a link to every node.

use std::fs::{self, File};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::link::Netlink;
use kplane_tests::netns::NetNs;
use kplane_tests::privilege::is_strict;
use kplane_tests::process::{Process, output};
use kplane_tests::wait::eventually;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Address of the API server; nodes are beside it.
const SERVER: [u8; 4] = [192, 168, 100, 1];
const PREFIX_LEN: u8 = 24;
const BRIDGE: &str = "management";
/// A node's link to it.
const LINK: &str = "mgmt0";
const TOKEN: &str = "conformance";
/// How soon it must be ready, on a busy machine.
const READY: Duration = Duration::from_secs(60);

/// A running API server; dropped = gone, with all it stored.
pub(crate) struct Api {
    // Processes first: they write into the folder.
    _apiserver: Process,
    _etcd: Process,
    ns: NetNs,
    netlink: Netlink,
    /// Number of nodes connected so far.
    links: std::cell::Cell<u8>,
    folder: TempDir,
    bin: PathBuf,
}

impl Api {
    /// Starts both programs and waits until the server is ready.
    pub(crate) fn start(bin: &Path) -> Result<Self> {
        let ns = NetNs::new("api")?;
        let netlink = ns.netlink()?;
        netlink.bridge(BRIDGE)?;
        netlink.add_address(BRIDGE, IpAddr::from(SERVER), PREFIX_LEN)?;
        let folder = tempfile::tempdir()?;
        let at = |name: &str| folder.path().join(name);
        fs::write(
            at("tokens"),
            format!("{TOKEN},admin,admin,system:masters\n"),
        )?;
        let mut key = Command::new("openssl");
        key.args(["genrsa", "-out"]).arg(at("sa.key")).arg("2048");
        output(key).context("make a key for service accounts")?;
        let etcd = ns.command(etcd(bin, folder.path())?)?;
        let apiserver = ns.command(apiserver(bin, folder.path())?)?;
        let api = Self {
            _apiserver: apiserver,
            _etcd: etcd,
            ns,
            netlink,
            links: std::cell::Cell::new(0),
            folder,
            bin: bin.to_owned(),
        };
        fs::write(api.kubeconfig(), kubeconfig().to_string())?;
        eventually(READY, "the API server is ready", || {
            api.kubectl(&["get", "--raw", "/readyz"])
        })?;
        Ok(api)
    }

    /// A file with which clients on any connected node may do everything.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    /// A folder that lives as long as this.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Gives a node a link to the API server.
    pub(crate) fn connect(&self, node: &NetNs) -> Result<()> {
        let number = self.links.get() + 1;
        self.links.set(number);
        let near = format!("node{number}");
        self.netlink.veth(&near, node, LINK)?;
        self.netlink.attach(&near, BRIDGE)?;
        let inside = node.netlink()?;
        inside.up(LINK)?;
        let [a, b, c, server] = SERVER;
        let ip = IpAddr::from([a, b, c, server + number]);
        inside.add_address(LINK, ip, PREFIX_LEN)
    }

    /// Creates or changes objects, their status included.
    pub(crate) fn apply(&self, objects: &[Value]) -> Result<()> {
        if objects.is_empty() {
            return Ok(());
        }
        let file = self.write(objects)?;
        let apply = ["apply", "--server-side", "--force-conflicts", "-f", &file];
        self.kubectl(&apply)?;
        let (nodes, others): (Vec<_>, Vec<_>) = objects
            .iter()
            .partition(|object| object["kind"] == json!("Node"));
        for node in nodes {
            let name = node["metadata"]["name"].as_str().context("a node's name")?;
            let status = json!({"status": node["status"]}).to_string();
            // Two addresses of a type are the same claim to server-side apply.
            let patch = [
                "patch",
                "node",
                name,
                "--subresource=status",
                "--type=merge",
            ];
            self.kubectl(&[&patch[..], &["-p", &status]].concat())?;
        }
        let with_status = |object: &&Value| !object["status"].is_null();
        let status: Vec<Value> = others.into_iter().filter(with_status).cloned().collect();
        if !status.is_empty() {
            let file = self.write(&status)?;
            let apply = ["apply", "--server-side", "--force-conflicts", "-f", &file];
            self.kubectl(&[&apply[..], &["--subresource=status"]].concat())?;
        }
        Ok(())
    }

    /// Deletes objects.
    pub(crate) fn delete(&self, objects: &[Value]) -> Result<()> {
        let file = self.write(objects)?;
        self.kubectl(&["delete", "--wait=false", "-f", &file])?;
        Ok(())
    }

    fn write(&self, objects: &[Value]) -> Result<String> {
        let file = self.folder.path().join("objects.json");
        let mut items = objects.to_vec();
        for item in &mut items {
            if item["kind"] == json!("Node") {
                item["status"] = Value::Null;
            }
            without_nulls(item);
        }
        let list = json!({"apiVersion": "v1", "kind": "List", "items": items});
        fs::write(&file, list.to_string())?;
        file.into_os_string()
            .into_string()
            .ok()
            .context("a path of text")
    }

    fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(self.bin.join("kubectl"));
        command.arg("--kubeconfig").arg(self.kubeconfig());
        command.args(arguments);
        self.ns.output(command)
    }
}

fn etcd(bin: &Path, folder: &Path) -> Result<Command> {
    const CLIENTS: &str = "http://127.0.0.1:2379";
    let mut command = Command::new(bin.join("etcd"));
    command
        .arg("--data-dir")
        .arg(folder.join("etcd"))
        .args(["--unsafe-no-fsync", "--listen-client-urls", CLIENTS])
        .args(["--advertise-client-urls", CLIENTS])
        .args(["--listen-peer-urls", "http://127.0.0.1:0"])
        .stdout(Stdio::null())
        .stderr(log(folder, "etcd")?.1);
    Ok(command)
}

fn apiserver(bin: &Path, folder: &Path) -> Result<Command> {
    let server = IpAddr::from(SERVER).to_string();
    let file = |name: &str| folder.join(name).display().to_string();
    let mut command = Command::new(bin.join("kube-apiserver"));
    command
        .args(["--etcd-servers", "http://127.0.0.1:2379"])
        .args(["--cert-dir", &file("certs")])
        .args(["--service-cluster-ip-range", "10.96.0.0/16,fd96::/64"])
        .args(["--token-auth-file", &file("tokens")])
        .args(["--service-account-key-file", &file("sa.key")])
        .args(["--service-account-signing-key-file", &file("sa.key")])
        .args(["--service-account-issuer", "https://kubernetes.default.svc"])
        .args(["--disable-admission-plugins", "ServiceAccount"])
        .args(["--authorization-mode", "RBAC"])
        .args(["--bind-address", &server, "--advertise-address", &server])
        .stdout(Stdio::null())
        .stderr(log(folder, "kube-apiserver")?.1);
    Ok(command)
}

/// A new file for what a program says.
pub(crate) fn log(folder: &Path, name: &str) -> Result<(PathBuf, File)> {
    let path = folder.join(format!("{name}.log"));
    let file = File::create(&path).with_context(|| path.display().to_string())?;
    Ok((path, file))
}

fn kubeconfig() -> Value {
    let server = IpAddr::from(SERVER);
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "admin"}}],
        "clusters": [{"name": "it", "cluster": {
            "server": format!("https://{server}:6443"), "insecure-skip-tls-verify": true,
        }}],
        "users": [{"name": "admin", "user": {"token": TOKEN}}],
    })
}

/// In a manifest null is the same as nothing; as a claim of a field it is not.
fn without_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(without_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(without_nulls),
        _ => {}
    }
}

/// The folder with kube-proxy and the others, where the rig builds them; none where a test may be
/// skipped.
pub(crate) fn programs() -> Result<Option<PathBuf>> {
    let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/cluster");
    let versions = fs::read_dir(&cache).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = versions.map(|entry| entry.path().join("bin")).collect();
    folders.push(cache.join("bin"));
    let wanted = ["etcd", "kube-apiserver", "kubectl", "kube-proxy"];
    let is_complete = |bin: &PathBuf| wanted.iter().all(|program| bin.join(program).is_file());
    if let Some(bin) = folders.into_iter().find(is_complete) {
        return Ok(Some(bin.canonicalize()?));
    }
    let missing = format!("one of {wanted:?} is missing in {}", cache.display());
    ensure!(!is_strict(), "{missing}");
    println!("skipped: {missing}");
    Ok(None)
}
