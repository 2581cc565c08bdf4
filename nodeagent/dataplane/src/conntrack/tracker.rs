//! The facts about ServicePorts that identify stale flows, and the scans that a commit requires. This module is pure.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{Cidr, EndpointAddr, Family, Protocol, ServiceKey, ServiceName};

use crate::backend::{Change, Failure};
use crate::plan::{FrontendAddr, ServicePlan};
use crate::proxy_address::proxy_address;
use kplane_netlink::conntrack::Flow;

/// Most frontends and endpoints that are named one by one. More are gone at once only if most of a large cluster
/// is. Then all flows are scanned, and the flows of further frontends are left to time out.
const MAX_NAMED: usize = 1 << 17;

/// The ServicePorts of one family as the data path holds them.
#[derive(Debug, Default)]
pub struct Tracker {
    services: HashMap<ServiceKey, Arc<Service>>,
    /// The owner of each place.
    owners: HashMap<FrontendAddr, Arc<Service>>,
    /// Destinations on which node ports are served, if they are the node's own addresses.
    nodeport_ips: Vec<Cidr>,
    nodeport_localhost: bool,
    /// What ServicePorts that failed would be: the kernel may hold them, if an earlier answer of it was lost.
    unsure: HashMap<ServiceKey, Service>,
}

#[derive(Debug, PartialEq, Eq)]
struct Service {
    name: ServiceName,
    /// The frontends, sorted.
    frontends: Box<[FrontendAddr]>,
    /// Endpoints to which flows of UDP may go on (F2), or connections may begin. Sorted.
    serving: Box<[EndpointAddr]>,
    /// Endpoints on dead nodes that no place leads to. Sorted.
    dead: Box<[EndpointAddr]>,
}

impl Service {
    fn new(plan: &ServicePlan) -> Self {
        let mut frontends: Vec<_> = plan.frontends.iter().map(|frontend| frontend.at).collect();
        frontends.sort_unstable();
        let (serving, mut dead) = match plan.key.protocol {
            Protocol::Udp => (plan.serving.clone(), Vec::new()),
            Protocol::Tcp | Protocol::Sctp => (chosen(plan), plan.dead.clone()),
        };
        dead.retain(|at| serving.binary_search(at).is_err());
        Self {
            name: plan.key.service.clone(),
            frontends: frontends.into(),
            serving: serving.into(),
            dead: dead.into(),
        }
    }
}

/// Returns the endpoints that packets at some place of a ServicePort may reach, sorted.
fn chosen(plan: &ServicePlan) -> Vec<EndpointAddr> {
    let mut lists: Vec<_> = plan
        .frontends
        .iter()
        .flat_map(|at| [Some(&at.endpoints), at.inside.as_ref()])
        .flatten()
        .collect();
    // Most places have the same list.
    lists.dedup();
    let mut chosen: Vec<_> = lists.into_iter().flatten().copied().collect();
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

/// The decision about a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The flow does not concern kplane, or leads to the right endpoint.
    Keep,
    /// The flow is stale: its next packet must be balanced anew.
    Stale,
    /// The flow is stale if its destination is one of the node's own addresses. It uses the number of a node
    /// port, which may mean anything on another address.
    StaleIfLocal,
}

/// The flows to scan, and facts about them that the tracker has forgotten since.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Whether to scan all UDP flows for stale ones.
    pub everything: bool,
    /// Places that belong to another ServicePort or are gone; those of UDP, also if they are new.
    pub frontends: HashSet<FrontendAddr>,
    /// Endpoints that no longer serve a ServicePort, and its protocol.
    pub retired: BTreeSet<(Protocol, EndpointAddr)>,
    /// Endpoints that are newly on a dead node, and their protocol.
    pub dead: BTreeSet<(Protocol, EndpointAddr)>,
    /// Addresses that are new among the endpoints of a ServicePort.
    pub came: HashSet<IpAddr>,
    /// Addresses that may do less by policies than before: the engine judges their flows.
    pub judged: HashSet<IpAddr>,
}

impl Work {
    /// Returns whether there is nothing to scan.
    pub fn is_empty(&self) -> bool {
        !self.seeks_stale() && self.judged.is_empty()
    }

    /// Returns whether to scan for stale flows.
    pub(super) fn seeks_stale(&self) -> bool {
        self.everything
            || !self.frontends.is_empty()
            || !self.retired.is_empty()
            || !self.dead.is_empty()
    }

    /// Adds other work to this work.
    pub fn merge(&mut self, other: Self) {
        self.everything |= other.everything;
        self.frontends.extend(other.frontends);
        self.retired.extend(other.retired);
        self.dead.extend(other.dead);
        self.judged.extend(other.judged);
        self.bound();
    }

    fn bound(&mut self) {
        if self.frontends.len() + self.retired.len() > MAX_NAMED {
            self.everything = true;
            let frontends = std::mem::take(&mut self.frontends);
            self.frontends = frontends.into_iter().take(MAX_NAMED).collect();
        }
        if self.everything {
            // A scan of everything finds the flows of these endpoints without their names.
            self.retired.retain(|(protocol, _)| *protocol != Protocol::Udp);
        }
        for named in [&mut self.retired, &mut self.dead] {
            if named.len() > MAX_NAMED {
                named.clear();
            }
        }
    }

    /// Takes out what is about connections of TCP and SCTP without a reply: a reply may be on its way.
    pub(super) fn split_half_open(&mut self) -> Self {
        let is_half_open = |protocol| protocol != Protocol::Udp;
        let half_open = Self {
            retired: self.retired.extract_if(.., |(protocol, _)| is_half_open(*protocol)).collect(),
            frontends: self.frontends.extract_if(|at| is_half_open(at.protocol())).collect(),
            ..Self::default()
        };
        if half_open.retired.is_empty() { Self::default() } else { half_open }
    }

    /// Returns the part that is about connections without a reply to addresses that came back, as another Pod's: no reply
    /// is awaited there. Work: these addresses.
    pub(super) fn returned(&self, came: &HashSet<IpAddr>) -> Self {
        let at = |ip: IpAddr, port| EndpointAddr { ip, port };
        let back =
            |protocol, ip| self.retired.range((protocol, at(ip, 0))..=(protocol, at(ip, u16::MAX)));
        let places = came.iter().flat_map(|ip| [(Protocol::Tcp, *ip), (Protocol::Sctp, *ip)]);
        let retired: BTreeSet<_> = places.flat_map(|(of, ip)| back(of, ip)).copied().collect();
        let is_tcp = |at: &&FrontendAddr| !retired.is_empty() && at.protocol() != Protocol::Udp;
        Self {
            frontends: self.frontends.iter().filter(is_tcp).copied().collect(),
            retired,
            ..Self::default()
        }
    }

    /// Returns whether a flow may be stale.
    pub(super) fn concerns(&self, flow: &Flow) -> bool {
        self.may_move(flow) || self.may_end(flow)
    }

    /// Returns whether a flow is to be balanced anew if its endpoint does not serve: any one of UDP, and of other protocols
    /// one without a reply to an endpoint that was taken out of service.
    fn may_move(&self, flow: &Flow) -> bool {
        let endpoint = || (flow.protocol, EndpointAddr::from(flow.reply.source));
        flow.protocol == Protocol::Udp || !flow.is_replied() && self.retired.contains(&endpoint())
    }

    /// Returns whether a flow is to end if its endpoint is dead.
    fn may_end(&self, flow: &Flow) -> bool {
        self.dead.contains(&(flow.protocol, EndpointAddr::from(flow.reply.source)))
    }
}

impl Tracker {
    /// Records a change that the data path holds now, and returns the scan that it requires. ServicePorts
    /// that failed within the change stay as they were.
    ///
    /// A complete change requires a scan of everything: the rules may have been missing, and flows that began
    /// meanwhile are not translated (F3).
    pub fn commit(&mut self, change: &Change<'_>, failures: &[Failure]) -> Work {
        let mut work = Work::default();
        let failed: HashSet<&ServiceKey> = failures
            .iter()
            .filter(|failure| !failure.degraded)
            .map(|failure| &failure.key)
            .collect();
        work.everything = change.complete;
        if change.complete {
            let named: HashSet<&ServiceKey> = change.services.iter().map(|(key, _)| key).collect();
            let unnamed = |key: &&ServiceKey| !named.contains(key) && !failed.contains(key);
            let gone: Vec<_> = self.services.keys().filter(unnamed).cloned().collect();
            for key in gone {
                self.replace(&key, None, &mut work);
            }
            self.unsure.clear();
        }
        for (key, plan) in change.services {
            if !failed.contains(key) {
                self.unsure.remove(key);
                self.replace(key, plan.as_ref(), &mut work);
            } else if let Some(plan) = plan {
                self.unsure.insert(key.clone(), Service::new(plan));
            }
        }
        self.nodeport_localhost = change.node.nodeport_localhost;
        if self.nodeport_ips != change.node.nodeport_ips {
            self.nodeport_ips.clone_from(&change.node.nodeport_ips);
            work.everything |=
                self.owners.keys().any(|at| matches!(at, FrontendAddr::NodePort { .. }));
        }
        if work.everything {
            // In a scan of everything, only frontends without an owner need to be named.
            work.frontends.retain(|at| !self.owners.contains_key(at));
            let mut places = self.owners.keys().chain(&work.frontends);
            work.everything = places.any(|at| at.protocol() == Protocol::Udp);
        }
        work.bound();
        work
    }

    fn replace(&mut self, key: &ServiceKey, plan: Option<&ServicePlan>, work: &mut Work) {
        let new = plan.map(|plan| Arc::new(Service::new(plan)));
        if self.services.get(key) == new.as_ref() {
            return;
        }
        let old = match &new {
            Some(new) => self.services.insert(key.clone(), new.clone()),
            None => self.services.remove(key),
        };
        if let Some(old) = &old {
            for at in &old.frontends {
                // Another ServicePort may have taken the place in the same change.
                if self.owners.get(at).is_some_and(|owner| Arc::ptr_eq(owner, old)) {
                    self.owners.remove(at);
                }
                if !new.as_ref().is_some_and(|new| new.has_place(at)) {
                    work.frontends.insert(*at);
                }
            }
        }
        let is_udp = key.protocol == Protocol::Udp;
        if let Some(old) = &old {
            let stays = |at: &FrontendAddr| new.as_ref().is_some_and(|new| new.has_place(at));
            // Flows of UDP at a place that is lost are found by the place.
            let lost_place = !is_udp && !old.frontends.iter().all(stays);
            let serves = |at: &&EndpointAddr| match &new {
                Some(new) => !lost_place && new.serves(at),
                None => is_udp,
            };
            let retired = old.serving.iter().filter(|at| !serves(at));
            work.retired.extend(retired.map(|at| (key.protocol, *at)));
        }
        let Some(new) = new else { return };
        if !work.everything {
            let before = |ip: &IpAddr| old.as_ref().is_some_and(|old| old.serves_on(*ip));
            work.came.extend(new.serving.iter().map(|at| at.ip).filter(|ip| !before(ip)));
        }
        // After a start, a mark may be out of date.
        if let Some(old) = &old {
            let dies = new.dead.iter().filter(|at| !old.is_dead(at));
            work.dead.extend(dies.map(|at| (key.protocol, *at)));
        }
        for at in &new.frontends {
            self.owners.insert(*at, new.clone());
            if is_udp && !old.as_ref().is_some_and(|old| old.has_place(at)) {
                work.frontends.insert(*at);
            }
        }
    }

    /// Returns whether a flow leads elsewhere than its Service would send it now.
    pub fn verdict(&self, flow: &Flow, work: &Work) -> Verdict {
        let (to, protocol) = (flow.original.destination, flow.protocol);
        if !work.concerns(flow) {
            return Verdict::Keep;
        }
        if flow.is_zoned() && !flow.is_translated() {
            // A switch made this entry, in its own zone, on the flow's way to kplane's rules. The rules do not
            // translate entries of that zone.
            return Verdict::Keep;
        }
        let address = FrontendAddr::Address {
            ip: to.ip(),
            protocol,
            port: to.port(),
        };
        match self.is_stale_at(&address, flow, work) {
            Some(true) => return Verdict::Stale,
            Some(false) => return Verdict::Keep,
            None => {}
        }
        let node_port = FrontendAddr::NodePort {
            protocol,
            port: to.port(),
        };
        match self.is_stale_at(&node_port, flow, work) {
            // On addresses of other machines, the same port number may belong to something else.
            Some(true) if self.serves_node_ports(to.ip()) => Verdict::StaleIfLocal,
            _ => Verdict::Keep,
        }
    }

    /// Returns the Service that a flow was sent to; `None` if no ServicePort has its place now.
    pub(super) fn service_of(&self, flow: &Flow) -> Option<&ServiceName> {
        let (to, protocol) = (flow.original.destination, flow.protocol);
        let (ip, port) = (to.ip(), to.port());
        let places = [
            FrontendAddr::Address { ip, protocol, port },
            FrontendAddr::NodePort { protocol, port },
        ];
        places.iter().find_map(|at| self.owners.get(at)).map(|owner| &owner.name)
    }

    /// Returns whether a flow to this place is stale; `None` when no ServicePort has or had this place.
    fn is_stale_at(&self, at: &FrontendAddr, flow: &Flow, work: &Work) -> Option<bool> {
        let from = flow.reply.source;
        let server = EndpointAddr::from(from);
        let may_serve = |of: &Service| of.has_place(at) && of.serves(&server);
        let moves = || work.may_move(flow) && !self.unsure.values().any(may_serve);
        match self.owners.get(at) {
            // In a flow that began before the rules existed, the server is the Service's address itself (F3).
            // The userspace proxy follows endpoints itself.
            Some(_) if server.ip == proxy_address(Family::of(server.ip)) => Some(false),
            // The facts of now count: a node may have been reached since the work was made.
            Some(owner) => Some(
                moves() && !owner.serves(&server) || work.may_end(flow) && owner.is_dead(&server),
            ),
            // No rule translates to this place any more. A flow that was never translated does not concern
            // kplane.
            None => {
                let is_stale = || moves() && flow.is_translated();
                work.frontends.contains(at).then(is_stale)
            }
        }
    }

    /// Returns whether node ports are served on an address; on loopback only if the configuration says so (A21).
    fn serves_node_ports(&self, ip: IpAddr) -> bool {
        if ip.is_loopback() {
            self.nodeport_localhost
        } else {
            self.nodeport_ips.iter().any(|cidr| cidr.contains(ip))
        }
    }
}

impl Service {
    fn has_place(&self, at: &FrontendAddr) -> bool {
        self.frontends.binary_search(at).is_ok()
    }

    fn serves(&self, server: &EndpointAddr) -> bool {
        self.serving.binary_search(server).is_ok()
    }

    /// Returns whether an endpoint with this address serves, at whatever port.
    fn serves_on(&self, ip: IpAddr) -> bool {
        let first = EndpointAddr { ip, port: 0 };
        let at = self.serving.partition_point(|server| *server < first);
        self.serving.get(at).is_some_and(|server| server.ip == ip)
    }

    fn is_dead(&self, server: &EndpointAddr) -> bool {
        self.dead.binary_search(server).is_ok()
    }
}
