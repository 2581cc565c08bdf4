//! The world of most tests: a cluster, two replicas of the control plane, a node with an agent for
//! each. One test after another uses it; one that fails takes it down.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Error, Result, anyhow, ensure};
use kplane_dataplane::backend::nftables::{Data, Key, read_elements};
use kplane_model::{Family, Protocol};
use kplane_netlink::NfSocket;
use kplane_proto::v1::Fleet;
use kplane_tests::cluster::api::key_of;
use kplane_tests::cluster::guard::{Guard, command};
use kplane_tests::cluster::{Api, Cluster, DUAL_STACK, Options};
use kplane_tests::netns::NetNs;
use kplane_tests::process::{Process, last_words};
use kplane_tests::product::Product;
use kplane_tests::status::Status;
use kplane_tests::topology::{NodeSpec, Topology};
use kplane_tests::wait::eventually;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::audit::Audit;
use super::kpctl::says;
use super::oracle::{self, Tables};

/// Controllers retry after seconds, control planes after more, and the machine may be busy.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);
/// How long deleted Pods are terminating.
pub(crate) const GRACE: Duration = Duration::from_secs(2);
/// Where the objects of tests are.
pub(crate) const NAMESPACE: &str = "default";
/// Nodes that have an agent, and their zones.
pub(crate) const NODES: [(&str, &str); 2] = [("node-1", "a"), ("node-2", "b")];
/// Two further replicas, which ask each other: the port of the status API of each, and the node whose agent it has.
pub(crate) const PAIR: [(u16, u16, &str); 2] = [(11, 7576, "node-1"), (12, 7586, "node-2")];
/// All Pods, for agents.
const CLUSTER_CIDR: &str = "--cluster-cidr=10.244.0.0/16,fd44::/32";
/// The rights of control planes: these and no others.
const RBAC: &str = "deploy/kubernetes/rbac.yaml";
/// The ServiceAccount in it.
pub(crate) const ACCOUNT: &str = "kplane/kplane-controlplane";
/// The binding that gives it its rights.
pub(crate) const BINDING: &str = "kplane-controlplane";

/// What control planes log: what they do by default, and each event that they write.
const LOG: &str = "info,kplane_agents::events=debug";

/// Kinds that tests make in [`NAMESPACE`], owners first.
const LEFTOVERS: [&str; 5] = ["Deployment", "Service", "EndpointSlice", "Pod", "ConfigMap"];

static PRODUCT: OnceLock<Product> = OnceLock::new();
static WORLD: Mutex<Option<World>> = Mutex::new(None);

/// Says where kplane's programs are; once, before the first test.
pub(crate) fn set_product(product: Product) {
    PRODUCT.get_or_init(|| product);
}

/// kplane's programs.
pub(crate) fn product() -> Result<&'static Product> {
    PRODUCT.get().context("set before the first test")
}

/// Runs a test in the world, which is made first if there is none, and tidied up afterwards.
pub(crate) fn with_world(test: impl FnOnce(&mut World) -> Result<()>) -> Result<()> {
    within(|world| {
        world.end_pair()?;
        test(world)
    })
}

/// Runs a test in the world with the replicas of [`PAIR`], which stay for the next such test.
pub(crate) fn with_pair(test: impl FnOnce(&mut World) -> Result<()>) -> Result<()> {
    within(|world| {
        world.start_pair()?;
        test(world)?;
        world.rejoin_pair()
    })
}

fn within(test: impl FnOnce(&mut World) -> Result<()>) -> Result<()> {
    let mut slot = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    let mut world = match slot.take() {
        Some(world) => world,
        None => World::start()?,
    };
    test(&mut world)
        .and_then(|()| world.tidy())
        .map_err(|error| world.explain(&error))?;
    *slot = Some(world);
    Ok(())
}

/// Ends the world.
pub(crate) fn end() {
    drop(WORLD.lock().unwrap_or_else(PoisonError::into_inner).take());
}

/// See the module.
pub(crate) struct World {
    // Fields drop in order: processes before what they use.
    agents: BTreeMap<&'static str, Process>,
    pub(crate) planes: Vec<Plane>,
    /// The replicas of [`PAIR`], if a test has needed them.
    pub(crate) pair: Vec<Plane>,
    guards: Vec<Guard>,
    pub(crate) cluster: Cluster,
    /// The credentials of control planes. They are written once: programs read them.
    pub(crate) account: PathBuf,
    pub(crate) topology: Topology,
    /// What control planes asked of the API server.
    pub(crate) audit: Audit,
    logs: PathBuf,
}

/// A replica of the control plane.
pub(crate) struct Plane {
    process: Process,
    status: Status,
}

impl Plane {
    /// The fleet as it sees it.
    pub(crate) fn fleet(&self) -> Result<Fleet> {
        self.status.fleet()
    }

    /// All reasons of all its issues.
    pub(crate) fn issues(&self) -> Result<Vec<String>> {
        let plane = self.fleet()?.control_plane.context("no control plane")?;
        Ok(plane
            .issues
            .into_iter()
            .map(|i| format!("{} {}/{}: {}", i.kind, i.namespace, i.name, i.reason))
            .collect())
    }

    /// How it has ended.
    pub(crate) fn ended(&mut self) -> Result<ExitStatus> {
        let ended = self.process.try_wait()?;
        ended.context("it runs")
    }

    /// Stops its clock, or lets it run again (SIGSTOP, SIGCONT).
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }
}

impl World {
    fn start() -> Result<Self> {
        let topology = Topology::standard(2)?;
        let control = topology.host("control")?;
        let address = control.ip(Family::V4)?;
        let audit = Audit::new()?;
        // As in every cluster that has a Service proxy: agents set kernel settings.
        let mut apiserver_flags = vec!["--allow-privileged".to_owned()];
        apiserver_flags.extend(audit.flags());
        let cluster = Cluster::start(&Options {
            at: Some((control.ns().clone(), address)),
            service_ranges: DUAL_STACK.to_owned(),
            controllers: true,
            kubelet: Some(GRACE),
            apiserver_flags,
            ..Options::default()
        })?;
        for (name, zone) in NODES {
            let node = topology.node(name)?;
            let spec = NodeSpec {
                name: name.to_owned(),
                ips: node.ips().to_vec(),
                pod_cidrs: node.pod_cidrs().to_vec(),
            };
            cluster.add_node(&spec, zone)?;
        }
        let logs = cluster.folder().join("logs");
        grant(&cluster)?;
        let account = cluster.account_kubeconfig(ACCOUNT)?;
        let mut world = Self {
            agents: BTreeMap::new(),
            planes: Vec::new(),
            pair: Vec::new(),
            guards: vec![Guard::new(control.ns())?],
            cluster,
            account,
            topology,
            audit,
            logs,
        };
        for (replica, (node, _)) in (0_u16..).zip(NODES) {
            let plane = world.replica(replica, &[])?;
            world.planes.push(plane);
            let place = SocketAddr::new(address, agent_port(replica));
            world.start_agent(node, &format!("http://{place}"), &[])?;
        }
        world.settle().map_err(|error| world.explain(&error))?;
        Ok(world)
    }

    /// What is wrong first, then logs: they are long, and reports of failures are cut.
    fn explain(&self, error: &Error) -> Error {
        anyhow!("{error:#}\n{}", self.last_words())
    }

    /// The administrator's client.
    pub(crate) fn api(&self) -> &Api {
        self.cluster.api()
    }

    /// A node's namespace.
    pub(crate) fn ns(&self, node: &str) -> Result<&NetNs> {
        Ok(self.topology.node(node)?.ns())
    }

    /// Starts another replica of the control plane with any kubeconfig.
    pub(crate) fn plane(&self, replica: u16, kubeconfig: &Path) -> Result<Plane> {
        self.plane_with(replica, kubeconfig, &[])
    }

    /// Starts another replica with further flags.
    pub(crate) fn plane_with(
        &self,
        replica: u16,
        kubeconfig: &Path,
        flags: &[String],
    ) -> Result<Plane> {
        let ns = self.topology.host("control")?.ns();
        let local = |port| SocketAddr::new(IpAddr::from([127, 0, 0, 1]), port);
        let status = local(agent_port(replica) + 1);
        let mut plane = self.program(&product()?.control_plane, &format!("plane-{replica}"))?;
        plane
            .env("RUST_LOG", LOG)
            .arg("--insecure")
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .arg(format!("--agent-listen=0.0.0.0:{}", agent_port(replica)))
            .arg(format!("--status-listen={status}"))
            .arg(format!("--http-listen={}", local(agent_port(replica) + 2)))
            .args(flags);
        Ok(Plane {
            process: self.guards[0].start(plane)?,
            status: Status::at(ns, status)?,
        })
    }

    /// Starts another replica with the credentials of control planes and further flags.
    pub(crate) fn replica(&self, replica: u16, flags: &[String]) -> Result<Plane> {
        self.plane_with(replica, &self.account, flags)
    }

    /// Starts a replica of [`PAIR`].
    pub(crate) fn one_of_pair(&self, replica: u16) -> Result<Plane> {
        let places = PAIR.map(|(_, port, _)| format!("127.0.0.1:{port}"));
        let flags = [
            format!("--peers={}", places.join(",")),
            "--userspace-services=default".to_owned(),
            // Servers are at addresses of nodes.
            "--userspace-endpoints=any".to_owned(),
        ];
        self.replica(replica, &flags)
    }

    /// Gives the agents to the replicas of [`PAIR`], and waits until both know both.
    fn start_pair(&mut self) -> Result<()> {
        if self.pair.is_empty() {
            let planes = PAIR.map(|(replica, ..)| self.one_of_pair(replica));
            self.pair = planes.into_iter().collect::<Result<_>>()?;
        }
        self.agents.clear();
        self.rejoin_pair()?;
        for (_, port, _) in PAIR {
            let nodes = ["status", "--check=nodes"];
            says(self, port, &nodes, 0, &["2/2 in sync"])?;
        }
        Ok(())
    }

    /// Starts the agents that a test has ended.
    fn rejoin_pair(&mut self) -> Result<()> {
        for (replica, _, node) in PAIR {
            if !self.agents.contains_key(node) {
                self.restart_agent_with(node, replica, &["--userspace-endpoints=any"])?;
            }
        }
        Ok(())
    }

    fn end_pair(&mut self) -> Result<()> {
        if self.pair.is_empty() {
            return Ok(());
        }
        self.pair.clear();
        self.give_back()
    }

    /// Starts a node's agent anew, at any replica of the control plane.
    pub(crate) fn restart_agent(&mut self, node: &'static str, replica: u16) -> Result<()> {
        self.restart(node, &[replica], &[])
    }

    /// Kills a node's agent.
    pub(crate) fn stop_agent(&mut self, node: &str) {
        drop(self.agents.remove(node));
    }

    /// Stops the clock of a node's agent, or lets it run again (SIGSTOP, SIGCONT).
    pub(crate) fn signal_agent(&self, node: &str, signal: Signal) -> Result<()> {
        let agent = self.agents.get(node).context("no agent")?;
        agent.signal(signal)
    }

    /// Stops a node's agent for a time, and returns at once. Another thread lets it go on in time, however long the test's
    /// own steps take on a busy machine.
    pub(crate) fn hang_agent(
        &self,
        node: &str,
        time: Duration,
    ) -> Result<JoinHandle<nix::Result<()>>> {
        let agent = self.agents.get(node).context("no agent")?;
        agent.signal(Signal::SIGSTOP)?;
        let agent = Pid::from_raw(agent.id().try_into()?);
        Ok(thread::spawn(move || {
            thread::sleep(time);
            kill(agent, Signal::SIGCONT)
        }))
    }

    /// Starts a node's agent anew, with several replicas of the control plane.
    pub(crate) fn restart_agent_among(
        &mut self,
        node: &'static str,
        replicas: &[u16],
    ) -> Result<()> {
        self.restart(node, replicas, &[])
    }

    /// Starts a node's agent anew, with further flags.
    pub(crate) fn restart_agent_with(
        &mut self,
        node: &'static str,
        replica: u16,
        flags: &[&str],
    ) -> Result<()> {
        self.restart(node, &[replica], flags)
    }

    fn restart(&mut self, node: &'static str, replicas: &[u16], flags: &[&str]) -> Result<()> {
        // Killed before its successor begins.
        drop(self.agents.remove(node));
        let control = self.topology.host("control")?.ip(Family::V4)?;
        let planes = replicas.iter().map(|replica| {
            let place = SocketAddr::new(control, agent_port(*replica));
            format!("http://{place}")
        });
        self.start_agent(node, &planes.collect::<Vec<_>>().join(","), flags)
    }

    /// Gives the agents back to the replicas of all tests.
    pub(crate) fn give_back(&mut self) -> Result<()> {
        for (replica, (node, _)) in (0..).zip(NODES) {
            self.restart_agent(node, replica)?;
        }
        self.settle()
    }

    fn start_agent(&mut self, node: &'static str, planes: &str, flags: &[&str]) -> Result<()> {
        let guard = Guard::new(self.topology.node(node)?.ns())?;
        let mut agent = self.program(&product()?.node_agent, node)?;
        agent
            .arg("--insecure")
            .arg(format!("--control-plane={planes}"))
            .arg("--cache-dir=")
            .args(flags);
        let given = |name: &str| flags.iter().any(|flag| flag.starts_with(name));
        if !given("--node-name") {
            agent.arg(format!("--node-name={node}"));
        }
        if !given("--cluster-cidr") {
            agent.arg(CLUSTER_CIDR);
        }
        self.agents.insert(node, guard.start(agent)?);
        self.guards.push(guard);
        Ok(())
    }

    /// A command whose output goes into a log.
    pub(crate) fn program(&self, path: &Path, log: &str) -> Result<Command> {
        let log = File::create(self.log(log))?;
        let mut command = command(path);
        command
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        Ok(command)
    }

    fn log(&self, name: &str) -> PathBuf {
        self.logs.join(format!("{name}.log"))
    }

    /// What a program has logged so far.
    pub(crate) fn logged(&self, name: &str) -> Result<String> {
        Ok(fs::read_to_string(self.log(name))?)
    }

    /// Waits until each agent's kernel holds what a fresh start makes of the API's objects.
    pub(crate) fn settle(&self) -> Result<()> {
        self.settle_within(DEADLINE)
    }

    /// Waits for longer than [`World::settle`], or less.
    pub(crate) fn settle_within(&self, deadline: Duration) -> Result<()> {
        let mut known: Option<(Value, Vec<Tables>)> = None;
        eventually(deadline, "kernels hold what the API says", || {
            let objects = oracle::listing(self.api())?;
            if known.as_ref().is_none_or(|(listed, _)| *listed != objects) {
                let tables = NODES
                    .map(|(node, _)| self.expected(node, &objects))
                    .into_iter()
                    .collect::<Result<_>>()?;
                known = Some((objects, tables));
            }
            let (_, expected) = known.as_ref().context("just made")?;
            for ((node, _), expected) in NODES.iter().zip(expected) {
                let tables = Tables::read(self.ns(node)?)?;
                tables.ensure_same(expected).with_context(|| (*node).to_owned())?;
            }
            Ok::<_, Error>(())
        })
    }

    fn expected(&self, node: &str, objects: &Value) -> Result<Tables> {
        let flags = [CLUSTER_CIDR.to_owned()];
        oracle::expected(product()?, self.cluster.folder(), (node, &flags), objects)
    }

    /// Waits until a destination of TCP leads to these addresses, on a node.
    pub(crate) fn leads(
        &self,
        node: &str,
        to: (IpAddr, u16),
        endpoints: &BTreeSet<IpAddr>,
    ) -> Result<()> {
        let ns = self.ns(node)?;
        eventually(DEADLINE, &format!("{to:?} leads to {endpoints:?}"), || {
            let now = reaches(ns, to)?;
            ensure!(now == *endpoints, "on {node} it leads to {now:?}");
            Ok::<_, Error>(())
        })
    }

    /// Waits until every replica has, or no replica has, an issue that says something.
    pub(crate) fn wait_issue(&self, says: &[&str], there: bool) -> Result<()> {
        let what = format!("an issue with {says:?}: {there}");
        eventually(DEADLINE, &what, || {
            for plane in &self.planes {
                let issues = plane.issues()?;
                let found = issues.iter().any(|issue| says.iter().all(|word| issue.contains(word)));
                ensure!(found == there, "{issues:?}");
            }
            Ok::<_, Error>(())
        })
    }

    /// Removes what a test has made.
    pub(crate) fn tidy(&mut self) -> Result<()> {
        let api = self.api();
        for kind in LEFTOVERS {
            for object in api.list(kind, Some(NAMESPACE))? {
                let key = key_of(&object)?;
                // The server makes these itself, again and again.
                if matches!(
                    key.as_str(),
                    "default/kubernetes" | "default/kube-root-ca.crt"
                ) {
                    continue;
                }
                let options = json!({ "gracePeriodSeconds": 0 });
                // Its owner may have taken it along.
                let _ = api.delete_with(kind, &key, &options);
            }
        }
        for node in api.list("Node", None)? {
            let key = key_of(&node)?;
            match NODES.iter().find(|(name, _)| *name == key) {
                None => api.delete("Node", &key)?,
                Some((_, zone)) => {
                    let labels = json!({ "topology.kubernetes.io/zone": zone });
                    let fields = json!({ "metadata": { "labels": labels } });
                    api.patch("Node", &key, &fields)?;
                }
            }
        }
        for process in self.agents.values_mut() {
            let ended = process.try_wait()?;
            ensure!(ended.is_none(), "an agent has ended: {ended:?}");
        }
        self.settle().context("after everything was deleted")
    }

    /// The ends of our programs' logs.
    fn last_words(&self) -> String {
        let names = [
            "plane-0",
            "plane-1",
            "plane-secure-0",
            "plane-secure-1",
            "node-1",
            "node-2",
        ];
        let tail = |name: &str| format!("{name}:\n{}\n", last_words(&self.log(name)));
        names.into_iter().filter(|name| self.log(name).exists()).map(tail).collect()
    }
}

/// The port of a replica for agents; those for its status and its metrics follow.
pub(crate) fn agent_port(replica: u16) -> u16 {
    7465 + 10 * replica
}

/// The addresses behind a destination of TCP in a namespace's kernel.
pub(crate) fn reaches(ns: &NetNs, (ip, port): (IpAddr, u16)) -> Result<BTreeSet<IpAddr>> {
    let family = Family::of(ip);
    let elements = ns.run(|| Ok(read_elements(&mut NfSocket::open()?, family)?))?;
    Ok(elements
        .into_iter()
        .filter(|element| {
            matches!(element.key, Key::ServiceSlot(to, _)
            if to.ip == ip && to.port == port && to.protocol == Protocol::Tcp)
        })
        .filter_map(|element| element.data.and_then(Data::endpoint))
        .map(|endpoint| endpoint.ip)
        .collect())
}

/// Gives control planes the account and the rights that deploy/kubernetes/rbac.yaml has.
pub(crate) fn grant(cluster: &Cluster) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let manifest = root.context("tests lies in a checkout")?.join(RBAC);
    let mut kubectl = cluster.programs().command("kubectl");
    kubectl
        .arg("--kubeconfig")
        .arg(cluster.kubeconfig())
        .args(["apply", "--server-side", "--force-conflicts", "--filename"])
        .arg(manifest);
    cluster.ns().output(kubectl).map(drop)
}
