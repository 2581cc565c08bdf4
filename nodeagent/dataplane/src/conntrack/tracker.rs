//! The facts about UDP ServicePorts that identify stale flows, and the scans that a commit requires. This
//! module is pure.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{Cidr, EndpointAddr, Family, Protocol, ServiceKey};

use crate::backend::{Change, Failure};
use crate::plan::{FrontendAddr, ServicePlan};
use crate::proxy_address::proxy_address;
use kplane_netlink::conntrack::Flow;

/// Most frontends and endpoints that are named one by one. More are gone at once only if most of a large cluster
/// is. Then all flows are scanned, and the flows of further frontends are left to time out.
const MAX_NAMED: usize = 1 << 17;

/// The UDP ServicePorts of one family as the data path holds them.
#[derive(Debug, Default)]
pub struct Tracker {
    services: HashMap<ServiceKey, Arc<Service>>,
    /// The owner of each place.
    owners: HashMap<FrontendAddr, Arc<Service>>,
    /// Destinations on which node ports are served, if they are the node's own addresses.
    nodeport_ips: Vec<Cidr>,
    nodeport_localhost: bool,
}

#[derive(Debug, PartialEq, Eq)]
struct Service {
    /// The frontends, sorted.
    frontends: Vec<FrontendAddr>,
    /// Endpoints to which flows may go on (F2), sorted.
    serving: Vec<EndpointAddr>,
}

impl Service {
    fn new(plan: &ServicePlan) -> Self {
        let mut frontends: Vec<_> = plan.frontends.iter().map(|frontend| frontend.at).collect();
        frontends.sort_unstable();
        Self {
            frontends,
            serving: plan.serving.clone(),
        }
    }
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
    /// Places that are new, that belong to another ServicePort, or that are gone.
    pub frontends: HashSet<FrontendAddr>,
    /// Endpoints that no longer serve a ServicePort.
    pub retired: HashSet<EndpointAddr>,
    /// Addresses that may do less by policies than before: the engine judges their flows.
    pub judged: HashSet<IpAddr>,
}

impl Work {
    /// Returns whether there is nothing to scan.
    pub fn is_empty(&self) -> bool {
        !self.seeks_stale() && self.judged.is_empty()
    }

    /// Returns whether to scan for stale UDP flows.
    pub(super) fn seeks_stale(&self) -> bool {
        self.everything || !self.frontends.is_empty() || !self.retired.is_empty()
    }

    /// Adds other work to this work.
    pub fn merge(&mut self, other: Self) {
        self.everything |= other.everything;
        self.frontends.extend(other.frontends);
        self.retired.extend(other.retired);
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
            self.retired = HashSet::new();
        }
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
        if change.complete {
            let named: HashSet<&ServiceKey> = change.services.iter().map(|(key, _)| key).collect();
            let unnamed = |key: &&ServiceKey| !named.contains(key) && !failed.contains(key);
            let gone: Vec<_> = self.services.keys().filter(unnamed).cloned().collect();
            for key in gone {
                self.replace(&key, None, &mut work);
            }
        }
        for (key, plan) in change.services {
            if key.protocol == Protocol::Udp && !failed.contains(key) {
                self.replace(key, plan.as_ref(), &mut work);
            }
        }
        work.everything |= change.complete;
        self.nodeport_localhost = change.node.nodeport_localhost;
        if self.nodeport_ips != change.node.nodeport_ips {
            self.nodeport_ips.clone_from(&change.node.nodeport_ips);
            let is_node_port = |at: &FrontendAddr| matches!(at, FrontendAddr::NodePort { .. });
            work.everything |= self.owners.keys().any(is_node_port);
        }
        if work.everything {
            // In a scan of everything, only frontends without an owner need to be named.
            work.frontends.retain(|at| !self.owners.contains_key(at));
        }
        if self.owners.is_empty() && work.frontends.is_empty() {
            return Work::default();
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
        let Some(new) = new else { return };
        for at in &new.frontends {
            self.owners.insert(*at, new.clone());
            if !old.as_ref().is_some_and(|old| old.has_place(at)) {
                work.frontends.insert(*at);
            }
        }
        let served = old.iter().flat_map(|old| &old.serving);
        work.retired.extend(served.filter(|at| !new.serves(at)));
    }

    /// Returns whether a flow leads elsewhere than its Service would send it now.
    pub fn verdict(&self, flow: &Flow, work: &Work) -> Verdict {
        let to = flow.original.destination;
        if flow.is_zoned() && !flow.is_translated() {
            // A switch made this entry, in its own zone, on the flow's way to kplane's rules. The rules do not
            // translate entries of that zone.
            return Verdict::Keep;
        }
        let address = FrontendAddr::Address {
            ip: to.ip(),
            protocol: Protocol::Udp,
            port: to.port(),
        };
        match self.is_stale_at(&address, flow, work) {
            Some(true) => return Verdict::Stale,
            Some(false) => return Verdict::Keep,
            None => {}
        }
        let node_port = FrontendAddr::NodePort {
            protocol: Protocol::Udp,
            port: to.port(),
        };
        match self.is_stale_at(&node_port, flow, work) {
            // On addresses of other machines, the same port number may belong to something else.
            Some(true) if self.serves_node_ports(to.ip()) => Verdict::StaleIfLocal,
            _ => Verdict::Keep,
        }
    }

    /// Returns whether a flow to this place is stale; `None` when no ServicePort has or had this place.
    fn is_stale_at(&self, at: &FrontendAddr, flow: &Flow, work: &Work) -> Option<bool> {
        let from = flow.reply.source;
        let server = EndpointAddr::from(from);
        match self.owners.get(at) {
            // In a flow that began before the rules existed, the server is the Service's address itself (F3).
            // The userspace proxy follows endpoints itself.
            Some(_) if server.ip == proxy_address(Family::of(server.ip)) => Some(false),
            Some(owner) => Some(!owner.serves(&server)),
            // No rule translates to this place any more. A flow that was never translated does not concern
            // kplane.
            None => work.frontends.contains(at).then(|| flow.is_translated()),
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
}
