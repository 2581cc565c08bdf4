//! A real Kubernetes cluster on this machine: besides what [`crate::cluster`] runs also kube-scheduler, and nodes
//! in namespaces of their own (network, mount, PID, UTS, IPC, cgroup) with kubelet, containerd, runc and the
//! plugins of CNI. CoreDNS and kube-proxy run in Pods. Needs root, and cgroups of version 1.
//!
//! ```no_run
//! use kplane_rig::real::{self, NodePrograms, Options, RealCluster};
//!
//! # fn main() -> anyhow::Result<()> {
//! NodePrograms::ensure()?; // before the machine's network is left: Go may have to download
//! kplane_rig::userns::isolate()?; // first: before any thread
//! let cluster = RealCluster::start(&Options::default())?;
//! cluster.api().apply(&real::pod("default", "web", "node-1"))?;
//! cluster.wait_for_pods("default", "app=web", 1)?;
//! println!("{}", cluster.kubectl(&["get", "pods", "-A", "-o", "wide"])?);
//! println!("{}", cluster.node("node-1")?.exec("nft", &["list", "ruleset"])?);
//! # Ok(())
//! # }
//! ```
//!
//! Nodes are joined by the fabric of a [`Topology`], and Pods by routes. Images come from archives: no registry is
//! asked. All processes, mounts, namespaces and cgroups end with the [`RealCluster`], or with this process.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context as _, Result, bail};
use kplane_model::Family;
use serde_json::Value;
use tempfile::TempDir;

use crate::cluster::{self, Api, Cluster, objects};
use crate::netns::NetNs;
use crate::process;
use crate::topology::{NodeSpec, Topology};

mod addons;
mod authority;
mod balancer;
mod cgroups;
pub mod e2e;
mod image;
mod images;
mod janitor;
mod machine;
mod node;
mod options;
mod programs;
mod require;
mod settings;
mod waiting;
mod workload;

pub use balancer::Balancer;
pub use images::{POD, kube_proxy as kube_proxy_image};
pub use node::Node;
pub use options::{Mode, Options, Proxy};
pub use programs::NodePrograms;
pub use require::require;
pub use workload::{deployment, pod, service};

use authority::Authority;
use janitor::Janitor;
use node::Common;

/// Names of zones; nodes are spread over them in turn.
const ZONES: [&str; 3] = ["a", "b", "c"];

/// A running cluster. Dropping it ends all its processes and removes its temporary folder.
#[derive(Debug)]
pub struct RealCluster {
    // Fields drop in order: nodes before what they use.
    nodes: Mutex<BTreeMap<String, Arc<Node>>>,
    plane: Cluster,
    topology: Mutex<Topology>,
    authority: Authority,
    common: Common,
    images: Mutex<Vec<PathBuf>>,
    options: Options,
    folder: PathBuf,
    _temporary: Option<TempDir>,
    _janitor: Janitor,
}

impl RealCluster {
    /// Starts a cluster and waits until its nodes are ready and, with kube-proxy, until kube-proxy and CoreDNS run.
    /// Builds missing programs first: see [`NodePrograms::ensure`].
    ///
    /// # Errors
    /// A program is missing or does not become ready; the message has the end of its log.
    pub fn start(options: &Options) -> Result<Self> {
        let programs = NodePrograms::ensure()?;
        let (folder, temporary) = folder(options.folder.as_deref())?;
        let janitor = Janitor::start(temporary.as_ref().map(TempDir::path))?;
        let mut images = images::archives(&programs)?;
        images.extend(options.images.iter().cloned());
        let topology = Topology::standard(0)?;
        let authority = Authority::new(&folder.join("authority"))?;
        let control = topology.host("control")?;
        let plane = cluster::Options {
            at: Some((control.ns().clone(), control.ip(Family::V4)?)),
            folder: Some(folder.clone()),
            service_ranges: options.service_ranges(),
            kubelets: Some(authority.kubelets()),
            apiserver_flags: options.apiserver_flags.clone(),
            controller_flags: options.controller_flags.clone(),
            ..cluster::Options::default()
        };
        let common = Common {
            // In this order, because the second may be in the first.
            shared: vec![programs.cache()?, folder.clone()],
            programs,
            client_ca: authority.ca(),
            dns: Options::dns(),
        };
        let topology = Mutex::new(topology);
        let specs: Vec<NodeSpec> =
            (1..=options.nodes).map(|number| spec(number, options)).collect::<Result<_>>()?;
        // The control plane and all nodes start side by side.
        let (plane, nodes) = thread::scope(|scope| {
            let plane = scope.spawn(|| Cluster::start(&plane));
            let boot = |spec: NodeSpec| {
                let (topology, images) = (&topology, &images);
                let node = unregistered(spec, &folder, &common);
                scope.spawn(move || boot(node, topology, images))
            };
            let nodes: Vec<_> = specs.into_iter().map(boot).collect();
            let nodes: Result<Vec<Node>> = nodes.into_iter().map(joined).collect();
            (joined(plane), nodes)
        });
        let cluster = Self {
            nodes: Mutex::default(),
            plane: plane?,
            topology,
            authority,
            common,
            images: Mutex::new(images),
            options: options.clone(),
            folder,
            _temporary: temporary,
            _janitor: janitor,
        };
        cluster.install()?;
        for node in nodes? {
            cluster.register(node)?;
        }
        cluster.wait_until_up()?;
        Ok(cluster)
    }

    /// Returns the administrator's client.
    pub fn api(&self) -> &Api {
        self.plane.api()
    }

    /// Returns the control plane, such as for its kubeconfig or to kill its API server.
    pub fn plane(&self) -> &Cluster {
        &self.plane
    }

    /// Returns the administrator's kubeconfig. Use it in the namespace [`RealCluster::ns`], or on a node.
    pub fn kubeconfig(&self) -> PathBuf {
        self.plane.kubeconfig()
    }

    /// Returns the URL of the API server, as nodes and Pods without Services reach it.
    pub fn server(&self) -> String {
        cluster::api::url(self.plane.address(), cluster::API_PORT)
    }

    /// Returns the network namespace of the control plane, which reaches nodes and Pods.
    pub fn ns(&self) -> &NetNs {
        self.plane.ns()
    }

    /// Returns the network namespace of a machine outside of the cluster, which reaches nodes.
    ///
    /// # Errors
    /// Does not fail in a cluster that has started.
    pub fn client(&self) -> Result<NetNs> {
        Ok(self.topology().host("client")?.ns().clone())
    }

    /// Returns the folder of state and logs.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Runs kubectl as administrator and returns its standard output.
    ///
    /// # Errors
    /// kubectl's error.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.run("kubectl", args)
    }

    /// Runs a program of the cluster, or of this machine, beside the control plane and returns its standard output.
    /// `KUBECONFIG` is the administrator's.
    ///
    /// # Errors
    /// The program's error.
    pub fn run(&self, program: &str, args: &[&str]) -> Result<String> {
        let mut command = self.command(program);
        command.args(args);
        self.ns().output(command)
    }

    /// Returns a command like that of [`RealCluster::run`], to be started in [`RealCluster::ns`].
    pub fn command(&self, program: &str) -> Command {
        let own = self.plane.programs().bin().join(program);
        let mut command = if own.is_file() { Command::new(own) } else { Command::new(program) };
        command
            .env("PATH", self.common.programs.path())
            .env("KUBECONFIG", self.kubeconfig());
        command
    }

    /// Applies manifests in YAML or JSON, by kubectl.
    ///
    /// # Errors
    /// kubectl's error.
    pub fn apply(&self, manifests: &str) -> Result<String> {
        let mut file = tempfile::NamedTempFile::new().context("a file for manifests")?;
        std::io::Write::write_all(&mut file, manifests.as_bytes())?;
        let path = file.path().display().to_string();
        self.kubectl(&["apply", "-f", &path])
    }

    /// Runs a program in a Pod (`namespace/name`) through the API server and the kubelet, and returns its standard
    /// output.
    ///
    /// # Errors
    /// The program's error, or there is no such Pod.
    pub fn exec(&self, pod: &str, args: &[&str]) -> Result<String> {
        let (namespace, name) = pod.split_once('/').context("namespace/name of a Pod")?;
        let words = ["exec", "--namespace", namespace, name, "--"];
        self.kubectl(&[&words[..], args].concat())
    }

    /// Returns the network namespace of a running Pod (`namespace/name`), for the rig's probes, load and servers.
    ///
    /// # Errors
    /// The Pod does not run.
    pub fn pod_ns(&self, pod: &str) -> Result<NetNs> {
        let object = self.api().get("Pod", pod)?.with_context(|| format!("no Pod {pod}"))?;
        let node = object["spec"]["nodeName"].as_str().unwrap_or_default();
        let id = object["status"]["containerStatuses"][0]["containerID"].as_str();
        let id = id
            .and_then(|id| id.strip_prefix("containerd://"))
            .with_context(|| format!("the Pod {pod} does not run"))?;
        self.node(node)?.container_ns(pod, id)
    }

    /// Returns a node.
    ///
    /// # Errors
    /// There is no such node.
    pub fn node(&self, name: &str) -> Result<Arc<Node>> {
        let nodes = self.registered();
        let node = nodes.get(name);
        node.cloned().with_context(|| format!("no node {name}"))
    }

    /// Returns all nodes, by name.
    pub fn nodes(&self) -> Vec<Arc<Node>> {
        self.registered().values().cloned().collect()
    }

    /// Adds a node with a number that no node has, and waits until it is ready.
    ///
    /// # Errors
    /// There is a node with this number, or the node does not become ready.
    pub fn add_node(&self, number: u8) -> Result<Arc<Node>> {
        let spec = spec(number, &self.options)?;
        let name = spec.name.clone();
        let node = unregistered(spec, &self.folder, &self.common);
        let images = self.images().clone();
        self.register(boot(node, &self.topology, &images)?)?;
        self.wait_for_node(&name)?;
        self.node(&name)
    }

    /// Removes a node as if its machine were gone, with its Node object and its files.
    ///
    /// # Errors
    /// There is no such node.
    pub fn remove_node(&self, name: &str) -> Result<()> {
        let node = self.node(name)?;
        self.stop_node(name)?;
        self.registered().remove(name);
        self.api().delete("Node", name)?;
        let folder = self.folder.join(name);
        drop(node);
        fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))
    }

    /// Kills a node as a power failure would. Its files and its Node object stay.
    ///
    /// # Errors
    /// There is no such node.
    pub fn stop_node(&self, name: &str) -> Result<()> {
        self.node(name)?.halt();
        self.topology().remove_node(name)
    }

    /// Starts a node after [`RealCluster::stop_node`], with the files that it had.
    ///
    /// # Errors
    /// The node runs, or does not start.
    pub fn start_node(&self, name: &str) -> Result<()> {
        let node = self.node(name)?;
        node.boot(connect(&self.topology, node.spec())?)?;
        node.start_kubelet()
    }

    /// Kills a node, starts it, and waits until it is ready.
    ///
    /// # Errors
    /// There is no such node, or it does not become ready.
    pub fn reboot(&self, name: &str) -> Result<()> {
        self.stop_node(name)?;
        // The status of before the reboot says ready for a while.
        self.forget_ready(name)?;
        self.start_node(name)?;
        self.wait_for_node(name)
    }

    /// Imports images from archives on all nodes, and on nodes that are added later.
    ///
    /// # Errors
    /// See [`Node::import`].
    pub fn import(&self, archives: &[PathBuf]) -> Result<()> {
        for node in self.nodes() {
            node.import(archives)?;
        }
        self.images().extend(archives.iter().cloned());
        Ok(())
    }

    /// Creates the Node object of a booted node, and starts its kubelet.
    fn register(&self, node: Node) -> Result<()> {
        let spec = node.spec();
        let object = objects::node(&spec.name, &spec.pod_cidrs, node.zone());
        self.api().apply(&object)?;
        let ca = self.plane.ca();
        self.authority.write_kubeconfig(&spec.name, &self.server(), &ca)?;
        node.start_kubelet()?;
        let name = node.name().to_owned();
        self.registered().insert(name, Arc::new(node));
        Ok(())
    }

    /// Creates the objects that every cluster has.
    fn install(&self) -> Result<()> {
        let mut objects = addons::coredns(self.common.dns);
        if let Proxy::KubeProxy(mode) = self.options.proxy {
            let config = addons::kube_proxy_config(
                mode,
                self.options.localhost_node_ports,
                &self.options.pod_ranges()?,
            );
            let proxy = addons::kube_proxy_objects(&config, &self.server())?;
            objects.extend(proxy);
        }
        let apply = |object: &Value| self.api().apply(object).map(drop);
        objects.iter().try_for_each(apply)
    }

    fn registered(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Node>>> {
        // A panic cannot spoil a handle, which is there or not.
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn images(&self) -> MutexGuard<'_, Vec<PathBuf>> {
        self.images.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn topology(&self) -> MutexGuard<'_, Topology> {
        self.topology.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the folder of a cluster, without symbolic links, and the handle that removes a temporary one.
fn folder(given: Option<&Path>) -> Result<(PathBuf, Option<TempDir>)> {
    if let Some(folder) = given {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        return Ok((fs::canonicalize(folder)?, None));
    }
    let made = tempfile::Builder::new()
        .prefix("kplane-real-")
        .tempdir()
        .context("make a temporary folder")?;
    Ok((fs::canonicalize(made.path())?, Some(made)))
}

/// Returns a node's addresses, of the cluster's families.
fn spec(number: u8, options: &Options) -> Result<NodeSpec> {
    let mut spec = NodeSpec::standard(number)?;
    spec.pod_cidrs.truncate(options.families().len());
    Ok(spec)
}

fn unregistered(spec: NodeSpec, folder: &Path, common: &Common) -> Node {
    let number: usize =
        spec.name.rsplit('-').next().and_then(|number| number.parse().ok()).unwrap_or(1);
    let zone = ZONES[(number - 1) % ZONES.len()];
    let own = folder.join(&spec.name);
    let kubeconfig = Authority::kubeconfig(&folder.join("authority"), &spec.name);
    Node::new(spec, zone, own, kubeconfig, common.clone())
}

/// Connects a node, starts its machine and containerd, and imports images.
fn boot(node: Node, topology: &Mutex<Topology>, images: &[PathBuf]) -> Result<Node> {
    node.boot(connect(topology, node.spec())?)?;
    node.import(images)?;
    Ok(node)
}

/// Adds a node to the network, with routes between its Pods and the control plane.
fn connect(topology: &Mutex<Topology>, spec: &NodeSpec) -> Result<NetNs> {
    let mut topology = topology.lock().unwrap_or_else(PoisonError::into_inner);
    topology.add_node(spec.clone())?;
    let (node, control) = (topology.node(&spec.name)?, topology.host("control")?);
    for cidr in &spec.pod_cidrs {
        control.route(*cidr, node)?;
    }
    Ok(node.ns().clone())
}

fn joined<T>(thread: thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    match thread.join() {
        Ok(result) => result,
        Err(_) => bail!("a thread that starts the cluster has panicked"),
    }
}

/// Returns the addresses of a Pod or of a Service, from its status or its specification.
pub fn ips(object: &Value) -> Vec<IpAddr> {
    let pods = object["status"]["podIPs"].as_array();
    let services = object["spec"]["clusterIPs"].as_array();
    pods.into_iter()
        .flatten()
        .map(|entry| &entry["ip"])
        .chain(services.into_iter().flatten())
        .filter_map(|ip| ip.as_str()?.parse().ok())
        .collect()
}
