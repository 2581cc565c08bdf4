//! The choice of the endpoint for the next connection: four balancers over the same members (U54). Pure; the caller has the
//! clock.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use kplane_model::{Balance, EndpointAddr, ProxyEndpoint};
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
    /// Weights that are not 1, 1..=65535.
    pub weights: BTreeMap<EndpointAddr, u16>,
    /// Those on this node.
    pub here: BTreeSet<EndpointAddr>,
}

/// An endpoint, and what is known about it.
#[derive(Clone, Debug)]
struct Member {
    addr: EndpointAddr,
    weight: u16,
    is_here: bool,
    health: Health,
    /// Open connections.
    open: u32,
    /// Progress towards the endpoint's turn, in balancer [`Balance::Weighted`].
    turn: f64,
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
    balance: Balance,
    /// Sorted by address.
    members: Vec<Member>,
    /// Positions in `members`, by pool.
    pools: [Vec<usize>; 2],
    /// The endpoint that had the last turn, by pool. A change of the endpoints keeps it (U12).
    last: [Option<EndpointAddr>; 2],
    hashes: BuildHasherDefault<DefaultHasher>,
    chance: SmallRng,
}

impl Picker {
    /// Creates a picker without endpoints. All choices of chance follow from the seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            balance: Balance::default(),
            members: Vec::new(),
            pools: [Vec::new(), Vec::new()],
            last: [None, None],
            hashes: BuildHasherDefault::default(),
            chance: SmallRng::seed_from_u64(seed),
        }
    }

    /// Replaces endpoints and balancer. Endpoints that stay keep their health and their turn.
    pub(crate) fn configure(&mut self, balance: Balance, endpoints: &Endpoints) {
        self.balance = balance;
        let mut all: Vec<EndpointAddr> = endpoints
            .cluster
            .iter()
            .chain(&endpoints.local)
            .copied()
            .collect();
        all.sort_unstable();
        all.dedup();
        let before = std::mem::take(&mut self.members);
        let known = |addr| before.binary_search_by_key(&addr, |m: &Member| m.addr);
        let member = |addr| Member {
            weight: endpoints.weights.get(&addr).copied().unwrap_or(1),
            is_here: endpoints.here.contains(&addr),
            ..known(addr).map_or_else(
                |_| Member {
                    addr,
                    weight: 1,
                    is_here: false,
                    health: Health::default(),
                    open: 0,
                    turn: 0.0,
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
        client: IpAddr,
        wished: Option<EndpointAddr>,
        tried: &[EndpointAddr],
        now: Instant,
    ) -> Option<Choice> {
        let index = self
            .wished(pool, wished, tried, now)
            .or_else(|| match self.balance {
                Balance::RoundRobin => self.round_robin(pool, tried, now),
                Balance::LeastConnections => self.least_connections(pool, tried, now),
                Balance::Weighted => self.weighted(pool, tried, now),
                Balance::SourceHash => self.source_hash(pool, client, tried, now),
            })
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

    fn round_robin(&mut self, pool: Pool, tried: &[EndpointAddr], now: Instant) -> Option<usize> {
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

    fn least_connections(
        &mut self,
        pool: Pool,
        tried: &[EndpointAddr],
        now: Instant,
    ) -> Option<usize> {
        let usable = self.usable(pool, tried, now);
        let len = usable.len();
        let [one, two] = match len {
            0 => return None,
            1 => return usable.first().copied(),
            _ => {
                let one = self.chance.random_range(0..len);
                let other = self.chance.random_range(0..len - 1);
                [one, if other < one { other } else { other + 1 }]
            }
        };
        let load = |place: usize| {
            let member = &self.members[usable[place]];
            let share = f64::from(member.weight) * member.health.share(now);
            (f64::from(member.open) + 1.0) / share
        };
        let chosen = if load(two) < load(one) { two } else { one };
        usable.get(chosen).copied()
    }

    /// Chooses smoothly: every turn each endpoint gets its weight, and the one that has most pays the sum.
    fn weighted(&mut self, pool: Pool, tried: &[EndpointAddr], now: Instant) -> Option<usize> {
        let usable = self.usable(pool, tried, now);
        let mut sum = 0.0;
        for index in &usable {
            let member = &mut self.members[*index];
            let weight = f64::from(member.weight) * member.health.share(now);
            member.turn += weight;
            sum += weight;
        }
        let turn = |index: &usize| self.members[*index].turn;
        // Of equal ones the first, so that the order is that of the addresses.
        let chosen = usable
            .iter()
            .rev()
            .max_by(|a, b| turn(a).total_cmp(&turn(b)));
        let chosen = *chosen?;
        self.members[chosen].turn -= sum;
        Some(chosen)
    }

    /// Chooses by the highest of one random number for each endpoint, which client and endpoint determine. An endpoint
    /// that goes moves its own clients only.
    fn source_hash(
        &self,
        pool: Pool,
        client: IpAddr,
        tried: &[EndpointAddr],
        now: Instant,
    ) -> Option<usize> {
        let score = |index: &usize| {
            let member = &self.members[*index];
            let hash = self
                .hashes
                .hash_one((client, member.addr.ip, member.addr.port));
            let chance = (hash as f64 + 1.0) / (u64::MAX as f64 + 2.0);
            -f64::from(member.weight) / chance.ln()
        };
        let usable = self.usable(pool, tried, now);
        usable
            .into_iter()
            .max_by(|a, b| score(a).total_cmp(&score(b)))
    }

    fn usable(&self, pool: Pool, tried: &[EndpointAddr], now: Instant) -> Vec<usize> {
        let places = self.pools[pool as usize].iter().copied();
        places
            .filter(|place| self.members[*place].is_usable(tried, now))
            .collect()
    }

    /// Returns the endpoint that is avoided for the shortest time.
    fn last_resort(&self, pool: Pool, tried: &[EndpointAddr]) -> Option<usize> {
        let places = self.pools[pool as usize].iter().copied();
        let untried = places.filter(|place| !tried.contains(&self.members[*place].addr));
        untried.min_by_key(|place| self.members[*place].health.avoided_until())
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
        let members = self.members.iter();
        members
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
