//! A load balancer as a cloud has it: Services of type LoadBalancer get an address, and their traffic reaches nodes.
//!
//! It works by routes beside the control plane. There is also a client with an address outside of the nodes' range.
//! A Service with `externalTrafficPolicy: Local` has the nodes whose `healthCheckNodePort` answers 200; any other has
//! all nodes. Connections are spread by their addresses and ports, or all go to one node with session affinity.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_model::{Cidr, Family};
use serde_json::{Value, json};

use super::RealCluster;
use crate::cluster::Api;
use crate::cluster::api::key_of;
use crate::link::Route;
use crate::process::output;

/// The range of load balancers' addresses, by family; the last number is counted.
const ADDRESSES: [&str; 2] = ["172.31.78.", "fd31::78:"];
/// The address of clients beside the control plane.
const CLIENTS: [&str; 2] = ["172.31.79.1", "fd31::79:1"];
/// The ranges of load balancers' addresses.
const BALANCERS: [&str; 2] = ["172.31.78.0/24", "fd31::78:0/112"];
/// What nodes route to the control plane's host: the ranges of balancers and of clients.
const RANGES: [&str; 2] = ["172.31.78.0/23", "fd31::/96"];
/// The interval at which all Services are listed.
const PAUSE: Duration = Duration::from_millis(500);
/// Longest wait for a node's health check.
const ANSWER: Duration = Duration::from_secs(1);
/// Keeps a Service until its routes are removed.
const FINALIZER: &str = "service.kubernetes.io/load-balancer-cleanup";
/// Spreads by ports, too, forwards between nodes, and tells no client a shorter way.
const SETTINGS: &[(&str, &str)] = &[
    ("net.ipv4.fib_multipath_hash_policy", "1"),
    ("net.ipv6.fib_multipath_hash_policy", "1"),
    ("net.ipv4.ip_forward", "1"),
    ("net.ipv6.conf.all.forwarding", "1"),
    ("net.ipv4.conf.all.send_redirects", "0"),
    ("net.ipv4.conf.eth0.send_redirects", "0"),
];

/// A load balancer. Dropping it stops its work; routes stay.
#[derive(Debug)]
pub struct Balancer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Balancer {
    /// Starts a load balancer for the nodes that the cluster has now. Its troubles are written to the file
    /// `balancer.log` in the cluster's folder.
    ///
    /// # Errors
    /// Routes cannot be set.
    pub fn start(cluster: &RealCluster) -> Result<Self> {
        connect(cluster)?;
        let log = cluster.folder().join("balancer.log");
        let mut work = Work {
            api: cluster.api().clone(),
            nodes: cluster.nodes().iter().map(|node| node.spec().ips.clone()).collect(),
            log: File::create(&log).with_context(|| format!("create {}", log.display()))?,
            given: BTreeMap::new(),
            routes: BTreeMap::new(),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let reported = stop.clone();
        let thread = cluster.ns().spawn(move || {
            while !reported.load(Ordering::Relaxed) {
                let round = work.round();
                work.note(round);
                thread::sleep(PAUSE);
            }
        })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed.
            let _ = thread.join();
        }
    }
}

/// Makes the host of the control plane a router between its clients, load balancers and nodes.
fn connect(cluster: &RealCluster) -> Result<()> {
    cluster.ns().sysctl(SETTINGS)?;
    let topology = cluster.topology();
    let control = topology.host("control")?;
    for (client, range) in CLIENTS.iter().zip(RANGES) {
        let single = Cidr::single(client.parse()?);
        control.netlink().add_address("lo", single.first(), single.prefix_len())?;
        let range: Cidr = range.parse()?;
        let gateway = control.ip(range.family())?;
        for node in topology.nodes() {
            node.netlink().add_route(&Route::to(range).via(gateway))?;
        }
    }
    // The fabric swallows packets to an address that no Service has, as the internet does. Without this route a client
    // would get an error at once.
    for (range, fabric) in BALANCERS.iter().zip(topology.gateways()) {
        let route = Route::to(range.parse()?).via(fabric);
        control.netlink().add_route(&route)?;
    }
    Ok(())
}

/// What the thread knows.
struct Work {
    api: Api,
    /// The addresses of each node.
    nodes: Vec<Vec<IpAddr>>,
    log: File,
    /// The number of each Service's addresses, by the Service's UID.
    given: BTreeMap<String, u8>,
    /// The nodes to which an address is routed.
    routes: BTreeMap<IpAddr, Vec<IpAddr>>,
}

impl Work {
    fn round(&mut self) -> Result<()> {
        let services = self.api.list("Service", None)?;
        let mut seen = BTreeSet::new();
        for service in &services {
            if is_ours(service) {
                seen.extend(service["metadata"]["uid"].as_str().map(str::to_owned));
                let served = self.serve(service);
                self.note(served);
            } else {
                let released = self.release(service);
                self.note(released);
            }
        }
        let gone: Vec<_> = self.given.extract_if(.., |uid, _| !seen.contains(uid)).collect();
        for (_, number) in gone {
            for family in 0..ADDRESSES.len() {
                let ip = address(family, number)?;
                if self.routes.remove(&ip).is_some() {
                    route(ip, "del", &[])?;
                }
            }
        }
        Ok(())
    }

    /// Gives a Service its addresses, and routes them.
    fn serve(&mut self, service: &Value) -> Result<()> {
        let key = key_of(service)?;
        let mut finalizers = finalizers(service);
        if !finalizers.iter().any(|it| it == FINALIZER) {
            finalizers.push(FINALIZER.to_owned());
            let fields = json!({ "metadata": { "finalizers": finalizers } });
            self.api.patch("Service", &key, &fields)?;
        }
        let uid = service["metadata"]["uid"].as_str().unwrap_or_default();
        let number = self.number(uid)?;
        let families = service["spec"]["ipFamilies"].as_array();
        let mut ingress = Vec::new();
        for family in families.into_iter().flatten() {
            let family = usize::from(family == "IPv6");
            let ip = address(family, number)?;
            let nodes = self.nodes_of(service, Family::of(ip));
            if self.routes.get(&ip) != Some(&nodes) {
                route(ip, "replace", &nodes)?;
                self.routes.insert(ip, nodes);
            }
            ingress.push(json!({ "ip": ip }));
        }
        let has = &service["status"]["loadBalancer"]["ingress"];
        if has.as_array().map(Vec::len) != Some(ingress.len()) {
            let status = json!({ "loadBalancer": { "ingress": ingress } });
            self.api.patch_status("Service", &key, &status)?;
        }
        Ok(())
    }

    /// Takes the addresses from a Service that has another type now, or that is deleted.
    fn release(&self, service: &Value) -> Result<()> {
        let mut finalizers = finalizers(service);
        if !finalizers.iter().any(|it| it == FINALIZER) {
            return Ok(());
        }
        let key = key_of(service)?;
        if !service["status"]["loadBalancer"]["ingress"].is_null() {
            let status = json!({ "loadBalancer": { "ingress": null } });
            self.api.patch_status("Service", &key, &status)?;
        }
        finalizers.retain(|it| it != FINALIZER);
        let fields = json!({ "metadata": { "finalizers": finalizers } });
        self.api.patch("Service", &key, &fields).map(drop)
    }

    /// Returns the number of a Service's addresses: the first that no other Service has.
    fn number(&mut self, uid: &str) -> Result<u8> {
        if let Some(number) = self.given.get(uid) {
            return Ok(*number);
        }
        let free = (1..=254)
            .find(|number| !self.given.values().any(|it| it == number))
            .context("all addresses of load balancers are taken")?;
        self.given.insert(uid.to_owned(), free);
        Ok(free)
    }

    /// Returns the addresses of the nodes that get a Service's traffic.
    fn nodes_of(&self, service: &Value, family: Family) -> Vec<IpAddr> {
        let spec = &service["spec"];
        let all = self.nodes.iter().flatten().copied();
        let mut nodes: Vec<_> = all.filter(|ip| Family::of(*ip) == family).collect();
        if spec["externalTrafficPolicy"] == "Local" {
            let port = spec["healthCheckNodePort"].as_u64();
            let port = port.and_then(|port| u16::try_from(port).ok());
            nodes.retain(|ip| port.is_some_and(|port| is_healthy(SocketAddr::new(*ip, port))));
        }
        if spec["sessionAffinity"] == "ClientIP" {
            nodes.truncate(1);
        }
        nodes
    }

    fn note(&mut self, result: Result<()>) {
        if let Err(error) = result {
            // The next round tries again; a Service that has just been deleted is usual.
            let _ = writeln!(self.log, "{error:#}");
        }
    }
}

fn is_ours(service: &Value) -> bool {
    let spec = &service["spec"];
    spec["type"] == "LoadBalancer"
        && spec["loadBalancerClass"].is_null()
        && service["metadata"]["deletionTimestamp"].is_null()
}

fn finalizers(service: &Value) -> Vec<String> {
    service["metadata"]["finalizers"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|it| Some(it.as_str()?.to_owned()))
        .collect()
}

fn address(family: usize, number: u8) -> Result<IpAddr> {
    let prefix = ADDRESSES.get(family).context("no such family")?;
    Ok(format!("{prefix}{number}").parse()?)
}

/// Adds, replaces or deletes the route to an address, from the calling thread's namespace. Without nodes packets to the
/// address are rejected.
fn route(to: IpAddr, verb: &str, nodes: &[IpAddr]) -> Result<()> {
    let mut command = Command::new("ip");
    command.args(["route", verb]);
    if verb != "del" && nodes.is_empty() {
        command.arg("unreachable");
    }
    command.arg(Cidr::single(to).to_string());
    if !nodes.is_empty() {
        command.args(["src", CLIENTS[usize::from(to.is_ipv6())]]);
    }
    for node in nodes {
        command.args(["nexthop", "via", &node.to_string()]);
    }
    output(command).map(drop)
}

fn is_healthy(at: SocketAddr) -> bool {
    asked(at).is_ok()
}

/// Wants the status 200 from a health check.
fn asked(at: SocketAddr) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&at, ANSWER)?;
    stream.set_read_timeout(Some(ANSWER))?;
    write!(
        stream,
        "GET / HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n\r\n"
    )?;
    let mut start = [0; 12];
    stream.read_exact(&mut start)?;
    ensure!(start == *b"HTTP/1.1 200", "{}", start.escape_ascii());
    Ok(())
}
