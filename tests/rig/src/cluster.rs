//! A real Kubernetes API server: etcd and kube-apiserver in a network namespace, and on demand
//! kube-controller-manager and a small kubelet. No container engine, no root.
//!
//! ```no_run
//! use kplane_rig::cluster::{Cluster, Options};
//! use serde_json::json;
//!
//! # fn main() -> anyhow::Result<()> {
//! kplane_rig::userns::enter()?; // first: before any thread
//! let cluster = Cluster::start(&Options::default())?;
//! cluster.api().apply(&json!({
//!     "kind": "Service",
//!     "metadata": { "name": "web", "namespace": "default" },
//!     "spec": { "selector": { "app": "web" }, "ports": [{ "port": 80 }] },
//! }))?;
//! let mut kubectl = cluster.programs().command("kubectl");
//! kubectl.arg("--kubeconfig").arg(cluster.kubeconfig()).args(["get", "services", "-A"]);
//! println!("{}", cluster.ns().output(kubectl)?);
//! # Ok(())
//! # }
//! ```
//!
//! [`Programs`] builds the programs with Go, once. Ready in about 5 s, 8 s with controllers. All
//! processes end with the [`Cluster`], or with this process.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;
use tempfile::TempDir;

use crate::netns::NetNs;
use crate::process::Process;
use crate::topology::NodeSpec;
use crate::wait::eventually;

pub mod api;
mod credentials;
mod etcd;
pub mod guard;
mod kinds;
mod kubelet;
pub mod objects;
mod options;
pub(crate) mod programs;
mod server;

pub use api::Api;
pub use options::{Kubelets, Options};
pub use programs::{Programs, helm, promtool};

use credentials::{Credentials, write_kubeconfig};
use guard::Guard;
use kubelet::Kubelet;
pub(crate) use server::API_PORT;
use server::{ApiServer, Files};

/// The API server's address in its own namespace. The range is reserved for documentation (RFC 5737),
/// so no other machine has it.
pub const OWN_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 10));
/// Ranges of both families; the first is the default of Services that name no family.
pub const DUAL_STACK: &str = "10.96.0.0/16,fd96::/112";

/// Longest wait for a program to be ready, on a busy machine.
const READY: Duration = Duration::from_secs(60);

/// A running cluster. Dropping it kills all its processes and removes its temporary folder.
#[derive(Debug)]
pub struct Cluster {
    // Fields drop in order: processes before what they use.
    kubelet: Option<Kubelet>,
    running: Mutex<Running>,
    api: Api,
    guard: Guard,
    ns: NetNs,
    address: IpAddr,
    options: Options,
    programs: Programs,
    credentials: Credentials,
    files: Files,
    _temporary: Option<TempDir>,
}

/// The programs that run; `None` while a test has stopped one.
#[derive(Debug, Default)]
struct Running {
    scheduler: Option<Process>,
    controllers: Option<Process>,
    apiserver: Option<Process>,
    etcd: Option<Process>,
}

impl Cluster {
    /// Starts a cluster and waits until the API server serves. Builds missing programs first: see
    /// [`Programs::ensure`].
    ///
    /// # Errors
    /// A program is missing or does not become ready; the message has the end of its log.
    pub fn start(options: &Options) -> Result<Self> {
        let programs = Programs::ensure()?;
        let (folder, temporary) = match &options.folder {
            Some(folder) => (folder.clone(), None),
            None => {
                let made = tempfile::Builder::new()
                    .prefix("kplane-cluster-")
                    .tempdir()
                    .context("make a temporary folder")?;
                (made.path().to_owned(), Some(made))
            }
        };
        let files = Files::new(&folder)?;
        let (ns, address) = match &options.at {
            Some((ns, address)) => (ns.clone(), *address),
            None => (own_namespace()?, OWN_ADDRESS),
        };
        let credentials = Credentials::in_folder(&files.folder)?;
        let guard = Guard::new(&ns)?;
        let mut running = Running {
            etcd: Some(start_etcd(&ns, &guard, &programs, &files)?),
            ..Running::default()
        };
        let server = api::url(address, API_PORT);
        let token = &credentials.admin_token;
        write_kubeconfig(&files.kubeconfig(), &server, &files.ca(), token)?;
        let more = &options.apiserver_flags;
        let flags = ApiServer {
            address,
            service_ranges: &options.service_ranges,
            credentials: &credentials,
            kubelets: options.kubelets.as_ref(),
            more,
        };
        let command = server::apiserver(&programs, &files, &flags)?;
        let mut apiserver = guard.start(command)?;
        // The server creates its certificate at the first start, and a client cannot be created
        // without it.
        ready(&mut apiserver, "kube-apiserver", &files, || {
            // There must be two: the server's, and the one that signed it.
            let file = fs::read_to_string(files.ca()).context("it has no certificate")?;
            let written = file.matches("END CERTIFICATE").count();
            ensure!(written == 2, "its certificate is being written");
            Ok(())
        })?;
        running.apiserver = Some(apiserver);
        let mut cluster = Self {
            kubelet: None,
            api: Api::open(&ns, &files.kubeconfig())?,
            running: Mutex::new(running),
            guard,
            ns,
            address,
            options: options.clone(),
            programs,
            credentials,
            files,
            _temporary: temporary,
        };
        cluster.wait_ready()?;
        if options.controllers || options.kubelets.is_some() {
            cluster.start_controllers()?;
        }
        if options.kubelets.is_some() {
            cluster.start_scheduler()?;
        }
        let kubelet = |grace| Kubelet::start(&cluster.api, grace);
        cluster.kubelet = options.kubelet.map(kubelet);
        Ok(cluster)
    }

    /// Returns the namespace in which the cluster runs.
    pub fn ns(&self) -> &NetNs {
        &self.ns
    }

    /// Returns the API server's address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Returns the administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.files.kubeconfig()
    }

    /// Returns the certificates that clients of the API server trust.
    pub(crate) fn ca(&self) -> PathBuf {
        self.files.ca()
    }

    /// Returns the folder of state and logs.
    pub fn folder(&self) -> &Path {
        &self.files.folder
    }

    /// Returns the programs of the cluster.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// Returns the administrator's client.
    pub fn api(&self) -> &Api {
        &self.api
    }

    /// Returns the id of the API server's process.
    ///
    /// # Errors
    /// The API server does not run.
    pub fn apiserver(&self) -> Result<u32> {
        let running = self.running();
        let process = running.apiserver.as_ref();
        Ok(process.context("kube-apiserver does not run")?.id())
    }

    /// Returns a client with another kubeconfig.
    ///
    /// # Errors
    /// The kubeconfig cannot be used.
    pub fn api_as(&self, kubeconfig: &Path) -> Result<Api> {
        Api::open(&self.ns, kubeconfig)
    }

    /// Writes a kubeconfig of a ServiceAccount (`namespace/name`, which must exist) with a token
    /// for an hour, and returns its path.
    ///
    /// # Errors
    /// There is no such ServiceAccount.
    pub fn account_kubeconfig(&self, account: &str) -> Result<PathBuf> {
        let token = self.api.token(account, None, 3600)?;
        self.token_kubeconfig(&account.replace('/', "."), &token)
    }

    /// Writes a kubeconfig with any token, good or bad, and returns its path.
    ///
    /// # Errors
    /// The cluster's folder is not writable.
    pub fn token_kubeconfig(&self, name: &str, token: &str) -> Result<PathBuf> {
        let path = self.files.folder.join(format!("kubeconfig-{name}"));
        let server = api::url(self.address, API_PORT);
        write_kubeconfig(&path, &server, &self.files.ca(), token)?;
        Ok(path)
    }

    /// Adds a Node that is ready, or changes one: its addresses, the ranges of its Pods, its zone.
    ///
    /// # Errors
    /// The server's error.
    pub fn add_node(&self, spec: &NodeSpec, zone: &str) -> Result<()> {
        let node = objects::node(&spec.name, &spec.pod_cidrs, zone);
        self.api.apply(&node)?;
        let status = objects::node_status(&spec.ips);
        self.api.patch_status("Node", &spec.name, &status)?;
        Ok(())
    }

    /// Makes a running Pod ready or not, as a readiness probe does.
    ///
    /// # Errors
    /// There is no such Pod.
    pub fn set_pod_ready(&self, key: &str, ready: bool) -> Result<()> {
        let status = json!({ "conditions": kubelet::conditions(ready) });
        self.api.patch_status("Pod", key, &status).map(drop)
    }

    /// Kills the API server as a crash would: connections break at once.
    ///
    /// # Errors
    /// The API server does not run.
    pub fn kill_apiserver(&self) -> Result<()> {
        let process = self.running().apiserver.take();
        process.context("kube-apiserver does not run").map(drop)
    }

    /// Starts the API server again and waits until it serves.
    ///
    /// # Errors
    /// The API server runs already, or does not become ready.
    pub fn start_apiserver(&self) -> Result<()> {
        let mut running = self.running();
        ensure!(running.apiserver.is_none(), "kube-apiserver runs");
        let flags = ApiServer {
            address: self.address,
            service_ranges: &self.options.service_ranges,
            credentials: &self.credentials,
            kubelets: self.options.kubelets.as_ref(),
            more: &self.options.apiserver_flags,
        };
        let command = server::apiserver(&self.programs, &self.files, &flags)?;
        running.apiserver = Some(self.guard.start(command)?);
        drop(running);
        self.wait_ready()
    }

    /// Starts kube-controller-manager; it is ready a few seconds later.
    ///
    /// # Errors
    /// The program runs already.
    pub fn start_controllers(&self) -> Result<()> {
        let mut running = self.running();
        ensure!(
            running.controllers.is_none(),
            "kube-controller-manager runs"
        );
        let all = self.options.kubelets.is_some();
        let mut command = server::controller_manager(&self.programs, &self.files, all)?;
        command.args(&self.options.controller_flags);
        running.controllers = Some(self.guard.start(command)?);
        Ok(())
    }

    /// Starts kube-scheduler; it is ready a few seconds later.
    fn start_scheduler(&self) -> Result<()> {
        let command = server::scheduler(&self.programs, &self.files)?;
        self.running().scheduler = Some(self.guard.start(command)?);
        Ok(())
    }

    /// Compacts etcd to the newest state; returns its revision. A watch that is resumed from an
    /// earlier revision ends with 410, unless the API server has buffered that revision.
    ///
    /// # Errors
    /// etcd does not run.
    pub fn compact(&self) -> Result<i64> {
        self.ns.run(etcd::compact)
    }

    /// Copies etcd's data into a folder that must not exist, for [`Cluster::restore`]. All programs
    /// are killed before and started after.
    ///
    /// # Errors
    /// See the message.
    pub fn save(&self, to: &Path) -> Result<()> {
        self.without_programs(|| copy_folder(&self.files.data(), to))
    }

    /// Makes a saved state the cluster's state, as restoring a backup does: revisions go back, too.
    /// All programs are killed before and started after.
    ///
    /// # Errors
    /// See the message.
    pub fn restore(&self, from: &Path) -> Result<()> {
        self.without_programs(|| {
            let data = self.files.data();
            fs::remove_dir_all(&data).with_context(|| data.display().to_string())?;
            copy_folder(from, &data)
        })
    }

    fn without_programs(&self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let before = std::mem::take(&mut *self.running());
        let (controllers, scheduler) = (before.controllers.is_some(), before.scheduler.is_some());
        drop(before);
        work()?;
        let etcd = start_etcd(&self.ns, &self.guard, &self.programs, &self.files)?;
        self.running().etcd = Some(etcd);
        self.start_apiserver()?;
        if controllers {
            self.start_controllers()?;
        }
        if scheduler {
            self.start_scheduler()?;
        }
        Ok(())
    }

    /// Waits for the Service by which Pods reach the server: the server creates it last at its first
    /// start.
    fn wait_ready(&self) -> Result<()> {
        let mut running = self.running();
        let process = running.apiserver.as_mut().context("kube-apiserver does not run")?;
        ready(process, "kube-apiserver", &self.files, || {
            self.api.text("/readyz")?;
            let own = self.api.get("Service", "default/kubernetes")?;
            own.context("no Service kubernetes yet").map(drop)
        })
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        // A panic cannot spoil a handle, which is there or not.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Creates a namespace that only the cluster uses.
fn own_namespace() -> Result<NetNs> {
    let ns = NetNs::new("cluster")?;
    ns.netlink()?.add_address("lo", OWN_ADDRESS, 32)?;
    Ok(ns)
}

fn start_etcd(ns: &NetNs, guard: &Guard, programs: &Programs, files: &Files) -> Result<Process> {
    let mut process = guard.start(server::etcd(programs, files)?)?;
    ready(&mut process, "etcd", files, || ns.run(etcd::is_ready))?;
    Ok(process)
}

/// Waits until a program is ready; fails if the program ends first.
fn ready(
    process: &mut Process,
    name: &str,
    files: &Files,
    mut look: impl FnMut() -> Result<()>,
) -> Result<()> {
    let what = format!("{name} is ready");
    let seen = eventually(READY, &what, || match process.try_wait() {
        Ok(None) => look().map(|()| None),
        Ok(Some(status)) => Ok(Some(status)),
        Err(error) => Err(error.into()),
    });
    let log = || format!("the log of {name} ends with\n{}", files.tail(name));
    match seen.with_context(log)? {
        None => Ok(()),
        Some(status) => bail!("{name} has ended ({status}); {}", log()),
    }
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to).with_context(|| format!("create {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target)
                .with_context(|| format!("copy to {}", target.display()))?;
        }
    }
    Ok(())
}
