//! Pods as servers in this process: each answers with its name.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use kplane_model::{Protocol, ServiceName};

use super::on_loopback;
use crate::demo::objects::{Objects, short};

/// Longest wait for a client's question.
const PATIENCE: Duration = Duration::from_secs(5);

/// A server.
struct Pod {
    name: String,
    /// The Services that it serves, as the agent's file names them.
    services: BTreeSet<String>,
    at: SocketAddr,
    ended: Arc<AtomicBool>,
}

/// All servers.
pub(super) struct Pods(Vec<Pod>);

impl Pods {
    /// Starts a server for each port of each pod.
    pub(super) fn start(objects: &Objects) -> Result<Self> {
        let mut pods = Vec::new();
        for spec in &objects.pods {
            let ips = spec.ips.iter().filter_map(|ip| match ip {
                IpAddr::V4(v4) => Some((*ip, on_loopback(*v4))),
                IpAddr::V6(_) => None,
            });
            for (ip, own) in ips {
                for (protocol, port) in &spec.listens {
                    let pod = Pod {
                        name: short(&spec.name).to_owned(),
                        services: services(objects, ip, *port),
                        at: SocketAddr::new(own.into(), *port),
                        ended: Arc::default(),
                    };
                    serve(&pod, *protocol)
                        .with_context(|| format!("serve as {} at {}", spec.name, pod.at))?;
                    pods.push(pod);
                }
            }
        }
        Ok(Self(pods))
    }

    /// Returns the number of servers.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether a pod runs and serves a Service.
    pub(super) fn serves(&self, name: &str, service: &str) -> bool {
        self.of(service).any(|pod| pod.name == name)
    }

    /// Returns the number of pods that serve a Service.
    pub(super) fn count(&self, service: &str) -> usize {
        let names: BTreeSet<_> = self.of(service).map(|pod| &pod.name).collect();
        names.len()
    }

    fn of(&self, service: &str) -> impl Iterator<Item = &Pod> {
        let serves = move |pod: &&Pod| !pod.ended.load(Relaxed) && pod.services.contains(service);
        self.0.iter().filter(serves)
    }

    /// Ends a pod of a Service; returns its name.
    pub(super) fn end_one_of(&self, service: &str) -> Option<String> {
        let pod = self.of(service).next()?;
        pod.ended.store(true, Relaxed);
        // The server waits for a connection, which it closes unanswered, and its socket with it.
        while TcpStream::connect(pod.at).is_ok() {}
        Some(pod.name.clone())
    }
}

/// Returns the Services with this endpoint.
fn services(objects: &Objects, ip: IpAddr, port: u16) -> BTreeSet<String> {
    let has = |name: &ServiceName| format!("{}.{}", name.name, name.namespace);
    objects
        .services
        .iter()
        .filter(|service| {
            service
                .ports
                .iter()
                .flat_map(|port| &port.endpoints)
                .any(|endpoint| endpoint.addr.ip == ip && endpoint.addr.port == port)
        })
        .map(|service| has(&service.name))
        .collect()
}

fn serve(pod: &Pod, protocol: Protocol) -> Result<()> {
    let (name, ended) = (pod.name.clone(), pod.ended.clone());
    match protocol {
        Protocol::Tcp => {
            let listener = TcpListener::bind(pod.at)?;
            thread::spawn(move || {
                for stream in listener.incoming() {
                    if ended.load(Relaxed) {
                        return;
                    }
                    let name = name.clone();
                    thread::spawn(move || stream.map(|stream| answer(stream, &name)));
                }
            });
        }
        Protocol::Udp => {
            let socket = UdpSocket::bind(pod.at)?;
            thread::spawn(move || {
                let mut buffer = [0; 2048];
                while let Ok((_, from)) = socket.recv_from(&mut buffer) {
                    let _ = socket.send_to(name.as_bytes(), from);
                }
            });
        }
        // No Service of the userspace backend has it.
        Protocol::Sctp => {}
    }
    Ok(())
}

/// Answers what may be a request of HTTP.
fn answer(mut stream: TcpStream, name: &str) {
    let _ = stream.set_read_timeout(Some(PATIENCE));
    let _ = stream.read(&mut [0; 4096]);
    let length = name.len() + 1;
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close";
    let _ = write!(stream, "{head}\r\nContent-Length: {length}\r\n\r\n{name}\n");
}
