//! Connections that clients of a node have begun, and what the agent's tracker has the kernel delete of them.
//!
//! Each endpoint of each place gets two of them after each change: one that it answered, and one that it has not answered
//! yet. The tracker is the product's.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use kplane_dataplane::backend::{Change, Failure};
use kplane_dataplane::conntrack::{
    Flow, IPS_DST_NAT, IPS_SEEN_REPLY, Tracker, Tuple, Verdict, Work,
};
use kplane_model::{FrontendAddr, Protocol};

use crate::oracle::{Entry, Side};

/// A place of a Service, and the endpoint that was chosen.
type Way = (FrontendAddr, SocketAddr);

/// The entries of one family in a node's kernel.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    answered: BTreeSet<Way>,
    /// What the last change has the kernel delete of them. The scan may come after the next change.
    ending: BTreeSet<Way>,
    waiting: BTreeSet<Way>,
}

/// The sweeper of one family in an agent.
#[derive(Debug, Default)]
pub(crate) struct Sweeps {
    tracker: Tracker,
    /// What the change before requires, for which the second scan may come after the next change.
    before: Work,
}

impl Sweeps {
    /// Scans after a change that the kernel acknowledged. `before` is without what the kernel had refused, of which the
    /// agent may know nothing. Returns what is wrong.
    pub(crate) fn committed(
        &mut self,
        change: &Change<'_>,
        failures: &[Failure],
        (before, after): (&Side, &Side),
        connections: &mut Connections,
    ) -> Option<String> {
        let work = self.tracker.commit(change, failures);
        let mut both = std::mem::replace(&mut self.before, work.clone());
        both.merge(work);
        let deletes = |way: &Way, status| {
            flow(way, status)
                .is_some_and(|flow| self.tracker.verdict(&flow, &both) != Verdict::Keep)
        };
        let mut wrong = None;
        for way in std::mem::take(&mut connections.ending) {
            if deletes(&way, IPS_SEEN_REPLY) && !is_dead(after, &way) {
                wrong = Some(format!("{way:?} is deleted, and is no longer dead"));
            }
        }
        connections.answered.retain(|way| {
            let is_deleted = deletes(way, IPS_SEEN_REPLY);
            let (was_dead, is_dead) = (is_dead(before, way), is_dead(after, way));
            if is_deleted && !is_dead {
                wrong = Some(format!("{way:?} is answered and deleted, and is not dead"));
            }
            let is_known = !change.complete && owners(before, way.0).next().is_some();
            if is_known && is_dead && !was_dead && !is_deleted {
                wrong = Some(format!("{way:?} stays, and is dead"));
            }
            if is_deleted {
                connections.ending.insert(*way);
            }
            !is_deleted
        });
        connections.waiting.retain(|way| {
            let is_deleted = deletes(way, 0);
            if is_deleted && leads(after, way) {
                wrong = Some(format!("{way:?} is deleted, and the endpoint serves"));
            }
            let went = !change.complete && leads(before, way) && !leads(after, way);
            let is_shared = owners(after, way.0).nth(1).or(owners(before, way.0).nth(1)).is_some();
            if went && !is_shared && !is_deleted {
                wrong = Some(format!("{way:?} waits for an endpoint out of service"));
            }
            !is_deleted
        });
        wrong
    }
}

impl Connections {
    /// Clients connect to all endpoints that they may reach. Node ports are left out: which addresses the node has is not
    /// simulated.
    pub(crate) fn begin(&mut self, side: &Side) {
        let places = side.values().flat_map(|entry| &entry.places);
        for (at, place) in places.filter(|(at, _)| matches!(at, FrontendAddr::Address { .. })) {
            let ways = place.endpoints.iter().map(|endpoint| (*at, *endpoint));
            self.answered.extend(ways.clone());
            self.waiting.extend(ways);
        }
    }
}

fn owners(side: &Side, at: FrontendAddr) -> impl Iterator<Item = &Entry> {
    side.values()
        .filter(move |entry| entry.places.iter().any(|(place, _)| *place == at))
}

/// Returns whether a ServicePort at the place leads to the endpoint somewhere.
fn leads(side: &Side, (at, endpoint): &Way) -> bool {
    let mut owners = owners(side, *at);
    owners.any(|entry| entry.places.iter().any(|(_, place)| place.leads_to(endpoint)))
}

/// Returns whether a ServicePort at the place has the endpoint as a dead one.
fn is_dead(side: &Side, (at, endpoint): &Way) -> bool {
    owners(side, *at).any(|entry| entry.dead.contains(endpoint))
}

/// Returns a client's entry; `None` for a node port.
fn flow((at, endpoint): &Way, status: u32) -> Option<Flow> {
    let FrontendAddr::Address { ip, port, .. } = *at else {
        return None;
    };
    let client = if ip.is_ipv4() {
        SocketAddr::from(([198, 51, 100, 7], 40_000))
    } else {
        SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, 7], 40_000))
    };
    Some(Flow {
        protocol: Protocol::Tcp,
        original: Tuple {
            source: client,
            destination: SocketAddr::new(ip, port),
        },
        reply: Tuple {
            source: *endpoint,
            destination: client,
        },
        status: IPS_DST_NAT | status,
        id: None,
        zone: None,
        original_zone: None,
    })
}
