//! What is needed of UDP ServicePorts to tell stale flows, and what a commit makes worth looking
//! at. Pure.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{Cidr, EndpointAddr, Protocol, ServiceKey};

use crate::backend::{Change, Failure};
use crate::plan::{FrontendAddr, ServicePlan};
use kplane_netlink::conntrack::Flow;

/// Places and endpoints that are looked at one by one. So many are gone at once only when most of a
/// large cluster is; then everything is looked at, and places beyond are left to time out.
const MAX_NAMED: usize = 1 << 17;

/// The UDP ServicePorts of one family as the data path holds them.
#[derive(Debug, Default)]
pub struct Tracker {
    services: HashMap<ServiceKey, Arc<Service>>,
    /// Whose packets arrive where.
    owners: HashMap<FrontendAddr, Arc<Service>>,
    /// Destinations on which node ports are served, as far as they are the node's own.
    nodeport_ips: Vec<Cidr>,
}

#[derive(Debug, PartialEq, Eq)]
struct Service {
    /// Sorted.
    places: Vec<FrontendAddr>,
    /// Endpoints to which flows may go on (F2), sorted.
    serving: Vec<EndpointAddr>,
}

impl Service {
    fn new(plan: &ServicePlan) -> Self {
        let mut places: Vec<_> = plan.frontends.iter().map(|frontend| frontend.at).collect();
        places.sort_unstable();
        Self {
            places,
            serving: plan.serving.clone(),
        }
    }
}

/// What to do with a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is none of ours, or leads where it should.
    Keep,
    /// Its next packet must be balanced anew.
    Stale,
    /// The same, if its destination is one of the node's own addresses: it uses the number of a
    /// node port, which may be anything elsewhere.
    StaleIfLocal,
}

/// What has to be looked at, and what is known of it that the tracker has forgotten since.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// All UDP flows.
    pub everything: bool,
    /// Places that are new, that belong to another ServicePort, or that are gone.
    pub places: HashSet<FrontendAddr>,
    /// Endpoints that no longer serve a ServicePort.
    pub retired: HashSet<EndpointAddr>,
}

impl Work {
    /// Whether there is nothing to look at.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.everything && self.places.is_empty() && self.retired.is_empty()
    }

    /// Adds other work to this.
    pub fn merge(&mut self, other: Self) {
        self.everything |= other.everything;
        self.places.extend(other.places);
        self.retired.extend(other.retired);
        self.bound();
    }

    fn bound(&mut self) {
        if self.places.len() + self.retired.len() > MAX_NAMED {
            self.everything = true;
            let places = std::mem::take(&mut self.places);
            self.places = places.into_iter().take(MAX_NAMED).collect();
        }
        if self.everything {
            // Whoever looks at everything finds their flows without a name.
            self.retired = HashSet::new();
        }
    }
}

impl Tracker {
    /// Takes in a change that the data path holds now, and says what is worth looking at. What
    /// failed within it stays as it was.
    ///
    /// A complete change is about everything: the rules may have been away, and flows that began
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
        if self.nodeport_ips != change.node.nodeport_ips {
            self.nodeport_ips.clone_from(&change.node.nodeport_ips);
            let is_node_port = |at: &FrontendAddr| matches!(at, FrontendAddr::NodePort { .. });
            work.everything |= self.owners.keys().any(is_node_port);
        }
        if work.everything {
            // Only what is gone needs a name.
            work.places.retain(|at| !self.owners.contains_key(at));
        }
        if self.owners.is_empty() && work.places.is_empty() {
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
            for at in &old.places {
                // Somebody else may have taken the place in the same change.
                if self
                    .owners
                    .get(at)
                    .is_some_and(|owner| Arc::ptr_eq(owner, old))
                {
                    self.owners.remove(at);
                }
                if !new.as_ref().is_some_and(|new| new.has_place(at)) {
                    work.places.insert(*at);
                }
            }
        }
        let Some(new) = new else { return };
        for at in &new.places {
            self.owners.insert(*at, new.clone());
            if !old.as_ref().is_some_and(|old| old.has_place(at)) {
                work.places.insert(*at);
            }
        }
        let served = old.iter().flat_map(|old| &old.serving);
        work.retired.extend(served.filter(|at| !new.serves(at)));
    }

    /// Whether a flow leads elsewhere than its Service would send it now.
    #[must_use]
    pub fn verdict(&self, flow: &Flow, work: &Work) -> Verdict {
        let to = flow.original.destination;
        if flow.is_zoned() && !flow.is_translated() {
            // Seen by a switch on its way to our rules: not theirs to translate.
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
            // Others may use the same number as port of something else.
            Some(true) if self.serves_node_ports(to.ip()) => Verdict::StaleIfLocal,
            _ => Verdict::Keep,
        }
    }

    /// `None` when no ServicePort has or had this place.
    fn is_stale_at(&self, at: &FrontendAddr, flow: &Flow, work: &Work) -> Option<bool> {
        let from = flow.reply.source;
        let server = EndpointAddr {
            ip: from.ip(),
            port: from.port(),
        };
        match self.owners.get(at) {
            // Before the rules existed the server was the Service's address itself (F3).
            Some(owner) => Some(!owner.serves(&server)),
            // Nothing translates to there any more; what was never translated is none of ours.
            None => work.places.contains(at).then(|| flow.is_translated()),
        }
    }

    /// Node ports are never served on loopback (A21).
    fn serves_node_ports(&self, ip: IpAddr) -> bool {
        !ip.is_loopback() && self.nodeport_ips.iter().any(|cidr| cidr.contains(ip))
    }
}

impl Service {
    fn has_place(&self, at: &FrontendAddr) -> bool {
        self.places.binary_search(at).is_ok()
    }

    fn serves(&self, server: &EndpointAddr) -> bool {
        self.serving.binary_search(server).is_ok()
    }
}
