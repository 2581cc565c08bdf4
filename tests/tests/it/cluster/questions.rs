//! Questions that kpctl asks the agents of all nodes, with real agents of two replicas and real kernels.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kplane_model::Family;
use kplane_tests::cluster::objects;
use kplane_tests::netns::NetNs;
use kplane_tests::wait::eventually;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::cluster::support::kpctl::{kpctl, says};
use crate::cluster::support::with_pair;
use crate::cluster::support::world::{DEADLINE, PAIR, World};

/// Any replica may be asked.
const PORT: u16 = PAIR[0].1;

/// A server on node-2, and a Service whose only endpoint it is.
struct Served {
    server: TcpListener,
    name: &'static str,
    to: SocketAddr,
}

impl Served {
    fn new(world: &World, name: &'static str, spec: Value) -> Result<Self> {
        let node = world.topology.node("node-2")?;
        let ip = node.ip(Family::V4)?;
        let server = node.ns().run(|| Ok(TcpListener::bind((ip, 0))?))?;
        let service = world.api().apply(&objects::service("default", name, spec))?;
        let to = service["spec"]["clusterIP"].as_str().context("no address")?;
        let to = SocketAddr::new(to.parse()?, 80);
        let served = Self { server, name, to };
        served.endpoint(world, json!({ "ready": true }))?;
        world.leads("node-1", (to.ip(), 80), &[ip].into())?;
        Ok(served)
    }

    /// Writes the endpoint with these conditions.
    fn endpoint(&self, world: &World, conditions: Value) -> Result<()> {
        let at = self.server.local_addr()?;
        let mut endpoint = objects::endpoint(at.ip(), "node-2");
        endpoint["conditions"] = conditions;
        let slice = format!("{}-own", self.name);
        let mut slice = objects::slice("default", &slice, self.name, [endpoint]);
        slice["ports"][0]["port"] = json!(at.port());
        world.api().apply(&slice).map(drop)
    }

    /// Connects from node-1 through the Service.
    fn connect(&self, world: &World) -> Result<(TcpStream, TcpStream)> {
        let patience = Duration::from_secs(5);
        let connect = || Ok(TcpStream::connect_timeout(&self.to, patience)?);
        let client = world.ns("node-1")?.run(connect)?;
        Ok((client, self.server.accept()?.0))
    }

    fn delete(self, world: &World) -> Result<()> {
        let name = format!("default/{}", self.name);
        world.api().delete("Service", &name)?;
        world.api().delete("EndpointSlice", &format!("{name}-own"))
    }
}

/// A connection is held open on the node of another replica, and its agent is gone.
pub(crate) fn who_is_connected_is_asked_of_the_nodes_of_all_replicas() -> Result<()> {
    with_pair(|world| {
        let served = Served::new(world, "q-flows", json!({}))?;
        let flows = ["flows", "service/default/q-flows"];
        let none = ["No client is connected; 2 of 2 nodes", "kpctl probe"];
        says(world, PORT, &flows, 0, &none)?;
        let held = served.connect(world)?;
        let endpoint = served.server.local_addr()?.to_string();
        let all = [
            "1 open, from 1 client to 1 endpoint; 2 of 2 nodes answered",
            "node/node-1",
            "established",
            &endpoint,
        ];
        for (_, port, _) in PAIR {
            says(world, port, &flows, 0, &all)?;
        }
        let ask = |option: &[&'static str]| [&flows[..], option].concat();
        let from = ask(&["--from", "node/node-1", "--to", "node/node-2"]);
        says(world, PORT, &from, 0, &all[..1])?;
        let others = ask(&["--from", "node/node-2"]);
        says(
            world,
            PORT,
            &others,
            0,
            &["Without --from, --to and --node"],
        )?;
        let to = ask(&["--to", "node/node-1"]);
        says(world, PORT, &to, 1, &["has no endpoint on node node-1"])?;
        let pod = ask(&["--from", "pod/default/client"]);
        says(world, PORT, &pod, 1, &["name the client's address"])?;
        let node = ask(&["--node", "node-2"]);
        says(world, PORT, &node, 0, &["1 of 1 nodes answered"])?;

        world.stop_agent("node-1");
        let unknown = "Unknown: node-1: its agent is not connected";
        says(world, PORT, &flows, 6, &["No client is connected", unknown])?;
        drop(held);
        served.delete(world)
    })
}

/// Neither agent counts at first, and then one.
pub(crate) fn who_talked_to_whom_is_asked_of_the_nodes_of_all_replicas() -> Result<()> {
    with_pair(|world| {
        let served = Served::new(world, "q-graph", json!({}))?;
        let graph = ["graph", "default/q-graph", "--since", "10m"];
        let off = [
            "0 of 2 nodes answered",
            "2 nodes (node-1, node-2): its agent does not count",
            "--flows",
        ];
        says(world, PORT, &graph, 6, &off)?;
        let flags = ["--userspace-endpoints=any", "--flows"];
        world.restart_agent_with("node-1", PAIR[0].0, &flags)?;
        let none = ["No connection", "1 of 2 nodes answered"];
        says(world, PORT, &graph, 6, &none)?;
        // The agent counts for Services that it knows.
        in_sync(world)?;
        let held = served.connect(world)?;
        let endpoint = served.server.local_addr()?.to_string();
        let all = [
            "1 began in ",
            " 0 failed, from 1 client to 1 Service port; 1 of 2 nodes answered",
            "node/node-1",
            "default/q-graph",
            &endpoint,
            "node-1: counts for less time",
            "Unknown: node-2: its agent does not count",
        ];
        for (_, port, _) in PAIR {
            says(world, port, &graph, 6, &all)?;
        }
        let namespace = ["graph", "-n", "default"];
        says(world, PORT, &namespace, 6, &["default/q-graph", &endpoint])?;
        let other = ["graph", "default/other"];
        says(world, PORT, &other, 6, &none)?;
        drop(held);
        served.delete(world)
    })
}

/// A client is stuck at an endpoint, and is listed.
pub(crate) fn a_client_that_is_remembered_is_listed() -> Result<()> {
    with_pair(|world| {
        let served = Served::new(world, "q-sticky", json!({ "sessionAffinity": "ClientIP" }))?;
        let plain = Served::new(world, "q-plain", json!({}))?;
        let get = ["get", "affinity", "default/q-sticky"];
        says(
            world,
            PORT,
            &get,
            0,
            &["No client is remembered", "2 of 2 nodes"],
        )?;
        let held = served.connect(world)?;
        let client = held.0.local_addr()?.ip().to_string();
        let endpoint = served.server.local_addr()?.to_string();
        let parts = [client.as_str(), "node-1", &endpoint, "2 of 2 nodes"];
        for (_, port, _) in PAIR {
            says(world, port, &get, 0, &parts)?;
        }
        let of = |client: &'static str| [&get[..], &["--client", client]].concat();
        says(
            world,
            PORT,
            &of("192.0.2.7"),
            0,
            &["No client is remembered", "2 of 2 nodes"],
        )?;
        let wrong = "has no IPv6 addresses, so it cannot remember the client fd00::9";
        says(world, PORT, &of("fd00::9"), 1, &[wrong])?;
        let unsure = ["get", "affinity", "default/q-plain"];
        let not_client = ["spec.sessionAffinity is not ClientIP"];
        says(world, PORT, &unsure, 1, &not_client)?;
        let unknown = ["get", "affinity", "default/q-stick"];
        says(world, PORT, &unknown, 1, &["q-stick", "q-sticky"])?;
        drop(held);
        world.stop_agent("node-1");
        let unknown = [
            "No client is remembered",
            "Unknown: node-1: its agent is not connected",
        ];
        says(world, PORT, &get, 6, &unknown)?;
        served.delete(world)?;
        plain.delete(world)
    })
}

/// The rules of a node are flushed, then its agent's clock stops, then it is gone; an endpoint ends.
pub(crate) fn probe_tells_the_data_path_from_the_control_path() -> Result<()> {
    with_pair(|world| {
        let served = Served::new(world, "q-canary", json!({ "type": "NodePort" }))?;
        let acceptor = Acceptor::start(&served.server)?;
        let probe = ["probe", "default/q-canary"];
        let works = ["2 of 2 work", "node-1", "node-2"];
        for (_, port, _) in PAIR {
            says(world, port, &probe, 0, &works)?;
        }
        rules_are_flushed(world, &probe, &works)?;
        agent_goes(world, &probe, &works)?;

        let only = ["probe", "default/q-canary:80", "--node", "node-1"];
        says(world, PORT, &only, 0, &["1 of 1 work"])?;
        let none = ["probe", "default/q-canary:81"];
        says(
            world,
            PORT,
            &none,
            1,
            &["no port of TCP with name or number \"81\""],
        )?;
        let none = ["probe", "default/q-canari"];
        says(world, PORT, &none, 1, &["q-canari", "q-canary"])?;
        let Served { server, name, .. } = served;
        drop((acceptor, server));
        let silent = [
            "2 without an endpoint that answers",
            "the endpoints, or a NetworkPolicy",
        ];
        says(world, PORT, &probe, 1, &silent)?;
        let name = format!("default/{name}");
        world.api().delete("Service", &name)?;
        world.api().delete("EndpointSlice", &format!("{name}-own"))
    })
}

/// Both nodes hold everything.
fn in_sync(world: &World) -> Result<()> {
    let nodes = ["status", "--check=nodes"];
    says(world, PORT, &nodes, 0, &["2/2 in sync"])
}

/// The rules of node-1 are flushed, while its control path is fine.
fn rules_are_flushed(world: &mut World, probe: &[&str], works: &[&str]) -> Result<()> {
    // In mode nftables the agent repairs that within milliseconds; here it hears of it after an hour.
    let iptables = ["--backend=iptables", "--iptables-probe-interval=1h"];
    world.restart_agent_with("node-1", PAIR[0].0, &iptables)?;
    says(world, PORT, probe, 0, works)?;
    let broken = [
        "1 with a broken data path, 1 with a silent neighbour",
        "nothing comes back through",
        "of node-1 does not answer",
    ];
    // It reads its tables back a moment after it has written them, and repairs the first flush.
    eventually(DEADLINE, "the probe sees that rules are missing", || {
        flush(world.ns("node-1")?)?;
        let (code, text, _) = kpctl(world, PAIR[1].1, probe)?;
        ensure!(code == Some(1), "{code:?}:\n{text}");
        ensure!(broken.iter().all(|part| text.contains(part)), "{text}");
        anyhow::Ok(())
    })?;
    in_sync(world)?;
    world.restart_agent("node-1", PAIR[0].0)?;
    says(world, PORT, probe, 0, works)?;
    Ok(())
}

/// The agent of node-2 stops, and goes.
fn agent_goes(world: &mut World, probe: &[&str], works: &[&str]) -> Result<()> {
    // Its rules work on without it, as its neighbour sees.
    world.signal_agent("node-2", Signal::SIGSTOP)?;
    let stopped = [
        "1 of 2 work, 1 unknown",
        "its agent is connected, and did not answer in time",
        "its node port answers node-1: its data path works, its control path does not",
    ];
    let patient = [probe, &["--timeout", "40s"]].concat();
    let started = Instant::now();
    let (code, text, _) = kpctl(world, PORT, &patient)?;
    let took = started.elapsed();
    ensure!(code == Some(6), "{code:?}:\n{text}");
    ensure!(stopped.iter().all(|part| text.contains(part)), "{text}");
    ensure!(took <= Duration::from_secs(10), "{took:?}");
    world.signal_agent("node-2", Signal::SIGCONT)?;
    says(world, PORT, probe, 0, works)?;
    world.stop_agent("node-2");
    says(
        world,
        PORT,
        probe,
        6,
        &["its agent is not connected", stopped[2]],
    )?;
    world.restart_agent("node-2", PAIR[1].0)?;
    Ok(())
}

/// A Service asks for the userspace proxy, and what the nodes' proxies know of it is shown.
pub(crate) fn a_service_that_asks_for_the_proxy_is_seen_in_it() -> Result<()> {
    with_pair(|world| {
        let served = Served::new(world, "q-proxied", json!({}))?;
        let get = ["get", "proxied", "default/q-proxied"];
        let none = "No node's userspace proxy serves it; 2 of 2 nodes answered";
        says(world, PORT, &get, 0, &[none])?;
        let describe = ["describe", "service", "default/q-proxied"];
        let path = |name: &str| {
            let mut service = objects::service("default", "q-proxied", json!({}));
            service["metadata"]["annotations"] = json!({ "kplane.io/data-path": name });
            world.api().apply(&service)
        };
        path("best")?;
        let ignored = "annotation kplane.io/data-path \"best\" is ignored";
        says(world, PORT, &describe, 0, &[ignored])?;
        path("userspace")?;
        says(world, PORT, &describe, 0, &["Data path       userspace"])?;
        let described = ["Proxies", "0 open, 0 failed; 2 of 2 nodes answered"];
        says(world, PORT, &describe, 0, &described)?;
        let idle = [
            "0 open, 0 failed; 2 of 2 nodes answered",
            "node-1",
            "node-2",
        ];
        says(world, PORT, &get, 0, &idle)?;
        let held = served.connect(world)?;
        for (_, port, _) in PAIR {
            let open = "1 open, 0 failed; 2 of 2 nodes answered";
            says(world, port, &get, 0, &[open])?;
        }
        drop(held);
        says(world, PORT, &get, 0, &idle)?;
        let wrong = ["get", "proxied", "default/q-proxed"];
        says(world, PORT, &wrong, 1, &["q-proxed", "q-proxied"])?;
        served.delete(world)
    })
}

/// Empties the chains of a node's Services.
fn flush(node: &NetNs) -> Result<()> {
    for tool in ["iptables-nft", "iptables-legacy"] {
        let mut flush = Command::new(tool);
        flush.args(["-t", "nat", "-F"]);
        let flushed = node.run(|| Ok(flush.status()?))?;
        ensure!(flushed.success(), "{tool}: {flushed}");
    }
    Ok(())
}

/// Takes connections and ends them, so that the server's queue never fills; until it is dropped.
struct Acceptor {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    fn start(server: &TcpListener) -> Result<Self> {
        let server = server.try_clone()?;
        server.set_nonblocking(true)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if server.accept().is_err() {
                    thread::sleep(Duration::from_millis(5));
                }
            }
        });
        let thread = Some(thread);
        Ok(Self { stop, thread })
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
