//! The way that needs no right: each Service has an address of its own in 127.64.0.0/10, and node ports are sockets on the
//! addresses that the process may use (U51).

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kplane_model::{Family, FrontendAddr, Protocol, ServiceKey};
use kplane_userproxy::{ListenerId, PortSpec, Proxy, Role};
use parking_lot::Mutex;

use super::super::driver::{DataPath, Driver, StepError};
use super::super::{Applied, Backend, Change, Failure, OpenError, Side, Verification};
use super::addresses::Addresses;
use super::hosts::{Hosts, PortSocket};
use super::{LOOPBACK, UserspaceSettings, own, spec, start};
use crate::plan::{Frontend, ServicePlan};

/// Added to a port that the process may not use, as those below 1024 (`ip_unprivileged_port_start`).
const PORT_OFFSET: u16 = 10_000;

/// Time between two attempts to open sockets that another process had.
const RETRY: Duration = Duration::from_secs(2);

/// Opens both families.
pub(super) fn open(settings: &UserspaceSettings) -> Result<Backend, OpenError> {
    if settings.transparent {
        tracing::warn!(
            "--userspace-transparent has no effect without the right to change rules (CAP_NET_ADMIN)"
        );
    }
    let proxy = start(&LOOPBACK, settings, kplane_userproxy::Settings::default())?;
    let hosts = Arc::new(Mutex::new(Hosts::new(settings.hosts_file.clone())));
    let sides = Family::ALL.map(|family| {
        let path = Loopback {
            family,
            proxy: proxy.clone(),
            hosts: hosts.clone(),
        };
        Box::new(Driver::new(path)) as Box<dyn Side>
    });
    let backend = Backend::new(&LOOPBACK, sides);
    backend.proxy.set(&proxy);
    Ok(backend)
}

/// A socket that a frontend needs.
type WantedSocket = (FrontendAddr, SocketAddr);

/// A ServicePort that is served.
#[derive(Debug)]
struct ServedPort {
    frontends: Vec<FrontendAddr>,
    wanted: Vec<WantedSocket>,
}

/// An open socket.
#[derive(Debug)]
struct Socket {
    id: ListenerId,
    at: SocketAddr,
}

/// Everything that one family serves.
#[derive(Debug, Default)]
pub(super) struct LoopbackSockets {
    held: HashMap<ServiceKey, ServedPort>,
    addresses: Addresses,
    sockets: HashMap<WantedSocket, Socket>,
    /// Sockets that could not be opened.
    failed: HashMap<WantedSocket, String>,
}

/// A change, worked out.
#[derive(Debug, Default)]
pub(super) struct StagedSockets {
    specs: Vec<(ServiceKey, Option<PortSpec>)>,
    held: Vec<(ServiceKey, ServedPort)>,
    /// Failures that no socket causes.
    failures: Vec<Failure>,
    /// Whether the change names everything.
    complete: bool,
}

/// One family.
pub(super) struct Loopback {
    family: Family,
    proxy: Arc<Proxy>,
    hosts: Arc<Mutex<Hosts>>,
}

impl DataPath for Loopback {
    type Content = LoopbackSockets;
    type Staged = StagedSockets;

    fn family(&self) -> Family {
        self.family
    }

    fn adopt(&mut self) -> Result<LoopbackSockets, StepError> {
        // Sockets end with their process.
        Ok(LoopbackSockets::default())
    }

    fn frontends<'c>(content: &'c LoopbackSockets, key: &ServiceKey) -> &'c [FrontendAddr] {
        content.held.get(key).map_or(&[], |held| &held.frontends)
    }

    fn stage(
        &mut self,
        content: &mut LoopbackSockets,
        change: Change<'_>,
        applied: &mut Applied,
    ) -> Result<StagedSockets, StepError> {
        let mut staged = StagedSockets {
            complete: change.complete,
            ..StagedSockets::default()
        };
        let node_addresses = own::addresses(self.family, &change.node.nodeport_ips);
        for (key, plan) in change.services {
            let Some(plan) = plan else {
                staged.specs.push((key.clone(), None));
                continue;
            };
            staged.specs.push((key.clone(), Some(spec::spec(plan))));
            let wanted = wanted(plan, &mut content.addresses, &node_addresses);
            staged.failures.extend(unserved(plan, &node_addresses));
            let frontends = plan.frontends.iter().map(|frontend| frontend.at).collect();
            staged.held.push((key.clone(), ServedPort { frontends, wanted }));
        }
        if change.complete {
            let named: HashSet<&ServiceKey> = change.services.iter().map(|(key, _)| key).collect();
            let gone = content.held.keys().filter(|key| !named.contains(key));
            staged.specs.extend(gone.map(|key| (key.clone(), None)));
        }
        applied.operations += staged.specs.len() as u64;
        Ok(staged)
    }

    fn commit(
        &mut self,
        content: &mut LoopbackSockets,
        staged: &mut StagedSockets,
        applied: &mut Applied,
    ) -> Result<(), StepError> {
        let started = Instant::now();
        let specs = std::mem::take(&mut staged.specs);
        let gone: Vec<(ServiceKey, ServedPort)> =
            specs.iter().filter_map(|(key, _)| content.held.remove_entry(key)).collect();
        self.proxy.table().change(specs);
        let mut to_open = Vec::new();
        for (key, held) in std::mem::take(&mut staged.held) {
            content.addresses.hold(&key.service);
            to_open.extend_from_slice(&held.wanted);
            content.held.insert(key, held);
        }
        let still: HashSet<WantedSocket> = to_open.iter().copied().collect();
        let mut differs = false;
        for (key, held) in gone {
            content.addresses.release(&key.service);
            for wanted in held.wanted.iter().filter(|wanted| !still.contains(wanted)) {
                differs |= self.close(content, wanted);
            }
        }
        differs |= self.listen(content, to_open);
        if staged.complete {
            // Sockets of an earlier agent for which there is no place any more.
            self.proxy.settle(self.family);
        }
        if differs {
            self.publish(content);
        }
        applied.failures.append(&mut staged.failures);
        applied.failures.extend(failures(content));
        applied.kernel += started.elapsed();
        Ok(())
    }

    fn accept(&mut self, _: &mut LoopbackSockets, _: StagedSockets, _: &mut Applied) {}

    fn check(&mut self, content: &mut LoopbackSockets) -> Result<Verification, StepError> {
        let failed: Vec<WantedSocket> = content.failed.keys().copied().collect();
        if !self.listen(content, failed) {
            return Ok(Verification::Equal);
        }
        self.publish(content);
        let what = "an address that another process had is free now";
        Ok(Verification::Outdated(what.to_owned()))
    }

    fn has_services(&mut self) -> bool {
        false
    }

    fn probe_interval(&self) -> Option<Duration> {
        Some(RETRY)
    }
}

impl Loopback {
    /// Closes a socket; returns whether it was open.
    fn close(&self, content: &mut LoopbackSockets, wanted: &WantedSocket) -> bool {
        content.failed.remove(wanted);
        let socket = content.sockets.remove(wanted);
        if let Some(socket) = &socket {
            self.proxy.close(socket.id);
        }
        socket.is_some()
    }

    /// Opens the sockets that are not open; returns whether one was opened.
    fn listen(&self, content: &mut LoopbackSockets, wanted: Vec<WantedSocket>) -> bool {
        let mut differs = false;
        for place in wanted {
            if content.sockets.contains_key(&place) {
                continue;
            }
            match self.open(place) {
                Ok(socket) => {
                    differs = true;
                    content.failed.remove(&place);
                    content.sockets.insert(place, socket);
                }
                Err(error) => {
                    let why = format!("cannot listen on {}: {error}", place.1);
                    content.failed.insert(place, why);
                }
            }
        }
        differs
    }

    /// Opens a socket; at a higher port if the process may not use this one.
    fn open(&self, (place, at): WantedSocket) -> io::Result<Socket> {
        let listen = |at| self.proxy.listen(at, protocol(place), Role::Place(place));
        let opened = match listen(at) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && at.port() < 1024 => {
                listen(SocketAddr::new(at.ip(), at.port() + PORT_OFFSET))
            }
            // All Services share the one loopback address of IPv6.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && shares(place, at) => {
                listen(SocketAddr::new(at.ip(), 0))
            }
            opened => opened,
        };
        opened.map(|(id, at)| Socket { id, at })
    }

    /// Writes down where Services can be reached.
    fn publish(&self, content: &LoopbackSockets) {
        let mut hosts = self.hosts.lock();
        if !hosts.is_wanted() {
            return;
        }
        let mut frontends = Vec::with_capacity(content.sockets.len());
        for (key, held) in &content.held {
            let sockets =
                held.wanted.iter().filter_map(|wanted| content.sockets.get_key_value(wanted));
            frontends.extend(sockets.map(|((at, _), socket)| PortSocket {
                key: key.clone(),
                at: *at,
                socket: socket.at,
            }));
        }
        if let Err(error) = hosts.replace(self.family, frontends) {
            tracing::warn!(
                %error,
                "cannot write --hosts-file; Services work, but the file is out of date. Check that its folder exists and \
                 that this user may write to it"
            );
        }
    }
}

fn protocol(place: FrontendAddr) -> Protocol {
    match place {
        FrontendAddr::Address { protocol, .. } | FrontendAddr::NodePort { protocol, .. } => {
            protocol
        }
    }
}

/// Returns whether other ServicePorts may want the same socket.
fn shares(place: FrontendAddr, at: SocketAddr) -> bool {
    at.is_ipv6() && matches!(place, FrontendAddr::Address { .. })
}

/// Returns the sockets that a plan needs. A frontend without endpoints has none, so that clients are refused (U10).
fn wanted(
    plan: &ServicePlan,
    addresses: &mut Addresses,
    node_addresses: &[IpAddr],
) -> Vec<WantedSocket> {
    let mut wanted = Vec::new();
    if plan.key.protocol == Protocol::Sctp {
        return wanted;
    }
    for frontend in plan.frontends.iter().filter(|frontend| is_served(frontend)) {
        let at = frontend.at;
        match at {
            FrontendAddr::NodePort { port, .. } => {
                wanted.extend(node_addresses.iter().map(|ip| (at, SocketAddr::new(*ip, port))));
            }
            FrontendAddr::Address { ip, port, .. } if ip == plan.cluster_ip => {
                let own = match ip {
                    IpAddr::V4(ip) => addresses.assign(&plan.key.service, ip).into(),
                    IpAddr::V6(_) => IpAddr::from(Ipv6Addr::LOCALHOST),
                };
                wanted.push((at, SocketAddr::new(own, port)));
            }
            // Addresses of load balancers, and external ones, belong to other machines.
            FrontendAddr::Address { .. } => {}
        }
    }
    wanted
}

/// Returns whether a frontend has an endpoint for any client.
fn is_served(frontend: &Frontend) -> bool {
    !frontend.endpoints.is_empty()
        || frontend.inside.as_ref().is_some_and(|inside| !inside.is_empty())
}

/// Returns what sockets cannot serve.
fn unserved(plan: &ServicePlan, node_addresses: &[IpAddr]) -> Option<Failure> {
    let key = &plan.key;
    let node_port = |frontend: &Frontend| matches!(frontend.at, FrontendAddr::NodePort { .. });
    if plan.key.protocol == Protocol::Sctp {
        let reason = "the userspace backend has no SCTP; use mode nftables, iptables or ipvs";
        return Some(Failure::unserved(key, reason));
    }
    let frontend = plan.frontends.iter().find(|frontend| node_port(frontend))?;
    node_addresses.is_empty().then(|| {
        let at = frontend.at;
        let reason =
            "none of this machine's addresses is one of the node's; set --nodeport-addresses";
        Failure::degraded(key, format!("{at}: {reason}"))
    })
}

/// Returns the ServicePorts that lack sockets.
fn failures(content: &LoopbackSockets) -> Vec<Failure> {
    if content.failed.is_empty() {
        return Vec::new();
    }
    let failure = |(key, held): (&ServiceKey, &ServedPort)| {
        let reasons: Vec<String> = held
            .wanted
            .iter()
            .filter_map(|wanted| {
                content.failed.get(wanted).map(|why| format!("{}: {why}", wanted.0))
            })
            .collect();
        (!reasons.is_empty()).then(|| Failure {
            key: key.clone(),
            degraded: reasons.len() < held.wanted.len(),
            reason: reasons.join("; "),
        })
    };
    content.held.iter().filter_map(failure).collect()
}
