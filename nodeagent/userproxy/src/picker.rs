//! The choice of the endpoint for the next connection: members take turns (U12). Pure; the caller has the
//! clock.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kplane_model::{EndpointAddr, ProxyEndpoint};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::health::Health;

/// One of the two lists of endpoints of a ServicePort; the traffic policy of a place decides which one counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pool {
    /// Endpoints of the whole cluster.
    Cluster,
    /// Endpoints on this node.
    Local,
}

/// The endpoints of a ServicePort, as desired.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Endpoints {
    /// Endpoints for policy Cluster.
    pub cluster: Vec<EndpointAddr>,
    /// Endpoints for policy Local.
    pub local: Vec<EndpointAddr>,
    /// Further endpoints to which UDP flows may go on (F2).
    pub serving: Vec<EndpointAddr>,
    /// Those on this node.
    pub here: BTreeSet<EndpointAddr>,
}

/// An endpoint, and what is known about it.
#[derive(Clone, Debug)]
struct Member {
    addr: EndpointAddr,
    is_here: bool,
    health: Health,
    /// Open connections.
    open: u32,
}

impl Member {
    fn is_usable(&self, tried: &[EndpointAddr], now: Instant) -> bool {
        !tried.contains(&self.addr) && !self.health.is_avoided(now)
    }
}

/// The choice for one attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) endpoint: EndpointAddr,
    /// Time to wait before another endpoint is tried beside this one.
    pub(crate) patience: Duration,
    /// Whether the endpoint is on this node.
    pub(crate) is_here: bool,
}

/// The endpoints of a ServicePort, their health, and whose turn it is.
#[derive(Debug)]
pub(crate) struct Picker {
    /// Sorted by address.
    members: Vec<Member>,
    /// Positions in `members`, by pool.
    pools: [Vec<usize>; 2],
    /// The endpoint that had the last turn, by pool. A change of the endpoints keeps it (U12).
    last: [Option<EndpointAddr>; 2],
    chance: SmallRng,
}

impl Picker {
    /// Creates a picker without endpoints. All choices of chance follow from the seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            members: Vec::new(),
            pools: [Vec::new(), Vec::new()],
            last: [None, None],
            chance: SmallRng::seed_from_u64(seed),
        }
    }

    /// Replaces the endpoints. Endpoints that stay keep their health and their turn.
    pub(crate) fn configure(&mut self, endpoints: &Endpoints) {
        let mut all: Vec<EndpointAddr> =
            endpoints.cluster.iter().chain(&endpoints.local).copied().collect();
        all.sort_unstable();
        all.dedup();
        let before = std::mem::take(&mut self.members);
        let known = |addr| before.binary_search_by_key(&addr, |m: &Member| m.addr);
        let member = |addr| Member {
            is_here: endpoints.here.contains(&addr),
            ..known(addr).map_or_else(
                |_| Member {
                    addr,
                    is_here: false,
                    health: Health::default(),
                    open: 0,
                },
                |index| before[index].clone(),
            )
        };
        self.members = all.into_iter().map(member).collect();
        self.pools = [&endpoints.cluster, &endpoints.local].map(|list| {
            let mut places: Vec<usize> = list.iter().filter_map(|addr| self.find(*addr)).collect();
            places.sort_unstable();
            places.dedup();
            places
        });
    }

    fn find(&self, addr: EndpointAddr) -> Option<usize> {
        self.members.binary_search_by_key(&addr, |m| m.addr).ok()
    }

    /// Returns whether an endpoint is one of the members.
    pub(crate) fn has(&self, addr: EndpointAddr) -> bool {
        self.find(addr).is_some()
    }

    /// Chooses an endpoint that was not tried yet. `wished` comes first, if it is usable. Endpoints that are avoided
    /// come last: a connection fails only if none of all endpoints takes it.
    pub(crate) fn pick(
        &mut self,
        pool: Pool,
        wished: Option<EndpointAddr>,
        tried: &[EndpointAddr],
        now: Instant,
    ) -> Option<Choice> {
        let index = self
            .wished(pool, wished, tried, now)
            .or_else(|| self.next(pool, tried, now))
            .or_else(|| self.last_resort(pool, tried))?;
        let member = &self.members[index];
        Some(Choice {
            endpoint: member.addr,
            patience: member.health.patience(),
            is_here: member.is_here,
        })
    }

    fn wished(
        &self,
        pool: Pool,
        wished: Option<EndpointAddr>,
        tried: &[EndpointAddr],
        now: Instant,
    ) -> Option<usize> {
        let index = self.find(wished?)?;
        let usable = self.members[index].is_usable(tried, now);
        (usable && self.pools[pool as usize].binary_search(&index).is_ok()).then_some(index)
    }

    /// Chooses the one after the last, as kube-proxy's userspace mode did.
    fn next(&mut self, pool: Pool, tried: &[EndpointAddr], now: Instant) -> Option<usize> {
        let places = &self.pools[pool as usize];
        // Not the first one everywhere: many ServicePorts on many nodes begin at the same time.
        let last = self.last[pool as usize].or_else(|| {
            let index = self.chance.random_range(0..places.len().max(1));
            Some(self.members[*places.get(index)?].addr)
        });
        let after = |place: &usize| Some(self.members[*place].addr) <= last;
        let first = places.partition_point(after);
        let mut slow = None;
        let mut chosen = None;
        for index in places[first..].iter().chain(&places[..first]).copied() {
            let member = &self.members[index];
            if !member.is_usable(tried, now) {
                continue;
            }
            let share = member.health.share(now);
            if share >= 1.0 || self.chance.random::<f64>() < share {
                chosen = Some(index);
                break;
            }
            slow.get_or_insert(index);
        }
        let chosen = chosen.or(slow)?;
        self.last[pool as usize] = Some(self.members[chosen].addr);
        Some(chosen)
    }

    /// Returns the endpoint that is avoided for the shortest time.
    fn last_resort(&self, pool: Pool, tried: &[EndpointAddr]) -> Option<usize> {
        self.pools[pool as usize]
            .iter()
            .copied()
            .filter(|place| !tried.contains(&self.members[*place].addr))
            .min_by_key(|place| self.members[*place].health.avoided_until())
    }

    /// Records a connection to an endpoint.
    pub(crate) fn opened(&mut self, addr: EndpointAddr) {
        if let Some(index) = self.find(addr) {
            self.members[index].open += 1;
        }
    }

    /// Records that an endpoint answered after so long.
    pub(crate) fn answered(&mut self, addr: EndpointAddr, took: Duration, now: Instant) {
        if let Some(index) = self.find(addr) {
            self.members[index].health.succeeded(now, took);
        }
    }

    /// Records the end of a connection. The endpoint may be gone.
    pub(crate) fn closed(&mut self, addr: EndpointAddr) {
        if let Some(index) = self.find(addr) {
            let open = &mut self.members[index].open;
            *open = open.saturating_sub(1);
        }
    }

    /// Records a failed attempt; returns whether new connections avoid the endpoint from now on. At most half of the
    /// endpoints, rounded up, are avoided, and never all of them (U53).
    pub(crate) fn failed(&mut self, addr: EndpointAddr, now: Instant) -> bool {
        let Some(index) = self.find(addr) else {
            return false;
        };
        let chance = self.chance.random();
        let most = self.members.len().div_ceil(2).min(self.members.len() - 1);
        let avoided = |member: &&Member| member.health.is_avoided(now);
        let may_avoid = self.members.iter().filter(avoided).count() < most;
        self.members[index].health.failed(now, chance, || may_avoid)
    }

    /// Returns the endpoints that new connections avoid, or avoided within the last minute without a success since.
    pub(crate) fn avoided_lately(&self, now: Instant) -> impl Iterator<Item = EndpointAddr> {
        self.members
            .iter()
            .filter(move |member| member.health.was_avoided_lately(now))
            .map(|member| member.addr)
    }

    /// Returns the state of all endpoints.
    pub(crate) fn states(&self, now: Instant) -> Vec<ProxyEndpoint> {
        let state = |member: &Member| ProxyEndpoint {
            addr: member.addr,
            open: member.open,
            avoided_for: member
                .health
                .avoided_until()
                .and_then(|until| until.checked_duration_since(now))
                .filter(|left| !left.is_zero()),
        };
        self.members.iter().map(state).collect()
    }
}
