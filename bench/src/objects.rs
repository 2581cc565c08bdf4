//! What the API server holds: Services with a number of endpoints each, written directly.

use std::io::{IsTerminal as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use kplane_rig::cluster::{Api, objects};
use serde_json::{Value, json};

/// The namespace of everything.
pub(crate) const NAMESPACE: &str = "bench";
/// Nodes on which the endpoints live.
const NODES: u32 = 10;
/// Requests under way at a time.
const WRITERS: u32 = 8;
/// How often the line of progress is written, on a terminal and elsewhere.
const PROGRESS: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(10)];

/// The node of whoever is measured.
pub(crate) fn node() -> String {
    node_name(0)
}

fn node_name(n: u32) -> String {
    format!("node-{}", n % NODES)
}

/// The endpoint with a number; those of Services come first.
fn endpoint(n: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(Ipv4Addr::new(10, 128, 0, 0).to_bits() + n)
}

/// The endpoint that a Service's last one becomes at a change: never seen before.
pub(crate) fn fresh(change: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(Ipv4Addr::new(10, 132, 0, 1).to_bits() + change)
}

/// An endpoint that a Service has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Programmed {
    /// The address.
    pub(crate) endpoint: Ipv4Addr,
    /// The Service's number.
    pub(crate) service: u32,
}

/// Where a Service is asked.
pub(crate) fn address(service: u32) -> SocketAddr {
    SocketAddr::new(cluster_ip(service).into(), 80)
}

/// Above those that the API server gives away itself.
fn cluster_ip(service: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(Ipv4Addr::new(10, 96, 32, 0).to_bits() + service)
}

/// What there is besides Services.
pub(crate) fn prepare(api: &Api) -> Result<()> {
    api.apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}))?;
    for n in 0..NODES {
        let name = node_name(n);
        api.apply(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}))?;
        let address = format!("172.31.255.{}", n + 1);
        let status = json!({"addresses": [{"type": "InternalIP", "address": address}]});
        api.patch_status("Node", &name, &status)?;
    }
    Ok(())
}

/// Services with so many endpoints each, at least one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Each(pub(crate) u32);

/// Two endpoints: what is measured unless something else is asked for.
pub(crate) const PAIRS: Each = Each(2);

impl Each {
    /// All endpoints of so many Services.
    pub(crate) fn endpoints(self, services: u32) -> Vec<Programmed> {
        (0..services * self.0)
            .map(|n| Programmed {
                endpoint: endpoint(n),
                service: n / self.0,
            })
            .collect()
    }

    /// The first endpoint of a Service.
    pub(crate) fn first(self, service: u32) -> Ipv4Addr {
        endpoint(service * self.0)
    }

    fn last(self, service: u32) -> Ipv4Addr {
        endpoint(service * self.0 + self.0 - 1)
    }

    /// Writes the Services from `have` to `want`, and says how far it is.
    pub(crate) fn grow(self, api: &Api, have: u32, want: u32) -> Result<()> {
        let (next, done) = (AtomicU32::new(have), AtomicU32::new(have));
        thread::scope(|scope| {
            let writers: Vec<_> = (0..WRITERS)
                .map(|_| {
                    scope.spawn(|| -> Result<()> {
                        loop {
                            let n = next.fetch_add(1, Ordering::Relaxed);
                            if n >= want {
                                return Ok(());
                            }
                            api.create(&service(n))?;
                            api.create(&self.slice(n, self.last(n)))?;
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            let mut progress = Progress::new("writing Services", want);
            while !writers.iter().all(thread::ScopedJoinHandle::is_finished) {
                progress.show(done.load(Ordering::Relaxed));
                thread::sleep(Duration::from_millis(20));
            }
            progress.end(done.load(Ordering::Relaxed));
            for writer in writers {
                writer.join().ok().context("a writer panicked")??;
            }
            Ok(())
        })
    }

    /// Makes an address the last endpoint of a Service.
    pub(crate) fn change(self, api: &Api, service: u32, last: Ipv4Addr) -> Result<()> {
        api.replace(&self.slice(service, last)).map(drop)
    }

    /// Makes a Service what it was at first.
    pub(crate) fn restore(self, api: &Api, service: u32) -> Result<()> {
        self.change(api, service, self.last(service))
    }

    fn slice(self, n: u32, last: Ipv4Addr) -> Value {
        let name = format!("service-{n:05}");
        let others = (0..self.0 - 1).map(|index| endpoint(n * self.0 + index));
        let endpoints: Vec<Value> = others
            .chain([last])
            .zip(n..)
            .map(|(ip, n)| objects::endpoint(ip, &node_name(n)))
            .collect();
        let mut slice = objects::slice(NAMESPACE, &format!("{name}-x"), &name, endpoints);
        let labels = &mut slice["metadata"]["labels"];
        labels["endpointslice.kubernetes.io/managed-by"] = json!("kplane-bench");
        slice
    }
}

fn service(n: u32) -> Value {
    let spec = json!({
        "clusterIP": cluster_ip(n), "ports": [{"name": "http", "port": 80, "targetPort": 8080}],
    });
    objects::service(NAMESPACE, &format!("service-{n:05}"), spec)
}

/// A line that is written again and again on a terminal, and seldom elsewhere.
pub(crate) struct Progress {
    what: String,
    of: u32,
    began: Instant,
    shown: Instant,
    terminal: bool,
}

impl Progress {
    /// Begins now; `of` is what there is to do.
    pub(crate) fn new(what: impl Into<String>, of: u32) -> Self {
        let now = Instant::now();
        Self {
            what: what.into(),
            of,
            began: now,
            shown: now,
            terminal: std::io::stderr().is_terminal(),
        }
    }

    /// Writes the line, unless it was written a moment ago.
    pub(crate) fn show(&mut self, done: u32) {
        if self.shown.elapsed() < PROGRESS[usize::from(!self.terminal)] {
            return;
        }
        self.shown = Instant::now();
        if self.terminal {
            eprint!("\r{}", self.line(done));
            // A progress line that cannot be written is not worth failing for.
            let _ = std::io::stderr().flush();
        } else {
            eprintln!("{}", self.line(done));
        }
    }

    /// Writes the last line.
    pub(crate) fn end(&self, done: u32) {
        let begin = if self.terminal { "\r" } else { "" };
        eprintln!("{begin}{}", self.line(done));
    }

    fn line(&self, done: u32) -> String {
        let took = self.began.elapsed().as_secs_f64();
        format!("{}: {done} of {}, {took:.0} s", self.what, self.of)
    }
}
