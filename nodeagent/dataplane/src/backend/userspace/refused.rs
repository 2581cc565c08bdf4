//! The endpoints to which the proxy must not connect: it would do so with the rights of the node, which its firewall
//! trusts (`iif lo`), and Pods are filtered as Pods.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use kplane_model::{EndpointAddr, ProxyEndpoints};

use crate::own_addresses;
use crate::plan::ServicePlan;

/// Time for which the list of this machine's addresses counts.
const FRESH: Duration = Duration::from_secs(10);

/// The operator's choice, and the addresses of this machine.
#[derive(Debug)]
pub(super) struct Refused {
    allowed: ProxyEndpoints,
    /// `None` as long as they cannot be listed: any endpoint may be one of them.
    own: Option<HashSet<IpAddr>>,
    since: Option<Instant>,
}

impl Refused {
    pub(super) fn new(allowed: ProxyEndpoints) -> Self {
        Self {
            allowed,
            own: None,
            since: None,
        }
    }

    /// Lists the machine's addresses again, if that was long ago or `now` says so.
    pub(super) fn look(&mut self, now: bool) {
        let is_fresh = self.since.is_some_and(|since| since.elapsed() < FRESH);
        if self.allowed != ProxyEndpoints::Any && (now || !is_fresh) {
            self.own = own_addresses().ok().or(self.own.take());
            self.since = Some(Instant::now());
        }
    }

    /// Returns an endpoint of a plan to which the proxy must not connect.
    pub(super) fn endpoint(&self, plan: &ServicePlan) -> Option<EndpointAddr> {
        if self.allowed == ProxyEndpoints::Any {
            return None;
        }
        plan.frontends
            .iter()
            .flat_map(|frontend| [Some(&frontend.endpoints), frontend.inside.as_ref()])
            .flatten()
            .flatten()
            .find(|endpoint| self.is_refused(endpoint.ip))
            .copied()
    }

    fn is_refused(&self, ip: IpAddr) -> bool {
        let is_own = self.own.as_ref().is_none_or(|own| own.contains(&ip));
        ip.is_loopback() || is_own || !self.allowed.contain(ip)
    }
}
