//! The book of a limiter's connections; it decides which connection has to make room. No I/O.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

use super::{ConnectionGuard, Limits};

/// Time for which a connection whose peer has spoken makes no room for newer ones. When a whole fleet connects, work
/// that has begun would otherwise be thrown away, and begin again.
const GRACE: Duration = Duration::from_secs(5);

/// The connections of a limiter.
#[derive(Debug, Default)]
pub(super) struct Book {
    last: u64,
    /// All connections by number, which grows with time, with their addresses.
    open: HashMap<u64, IpAddr>,
    /// The waiting connections.
    waiting: BTreeMap<u64, WaitingConnection>,
    /// Those of them whose peers have not spoken.
    silent: BTreeSet<u64>,
    addresses: HashMap<IpAddr, Address>,
}

#[derive(Debug)]
struct WaitingConnection {
    connection: ConnectionGuard,
    since: Instant,
}

/// The connections from one address.
#[derive(Debug, Default)]
struct Address {
    open: usize,
    waiting: BTreeSet<u64>,
    silent: BTreeSet<u64>,
}

/// The decision about a new connection.
#[derive(Debug)]
pub(super) enum Verdict {
    /// The connection is admitted with this number.
    Admitted(u64),
    /// The connection is admitted with this number, and another one has to be closed.
    InsteadOf(ConnectionGuard, u64),
    /// The connection is refused for this reason.
    Refused(&'static str),
}

impl Book {
    /// Returns the number of connections, and the number of those that wait.
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.open.len(), self.waiting.len())
    }

    /// Admits a connection if there is room, or if a waiting connection can be closed for it: the oldest whose peer is
    /// silent, or else the oldest, once it had its time. When the limiter is full, an address with more waiting connections
    /// than the others gives one up at once.
    pub(super) fn admit(&mut self, from: IpAddr, limits: &Limits) -> Verdict {
        let from = network(from);
        let here = self.addresses.get(&from);
        let (open, waiting) = here.map_or((0, 0), |here| (here.open, here.waiting.len()));
        let crowded = open >= limits.per_address || waiting >= limits.waiting_per_address;
        let full = self.open.len() >= limits.connections || self.waiting.len() >= limits.waiting;
        if !crowded && !full {
            return Verdict::Admitted(self.enter(from));
        }
        let (silent, oldest) = if crowded && let Some(here) = here {
            (here.silent.first(), here.waiting.first())
        } else {
            (self.silent.first(), self.waiting.keys().next())
        };
        let any_waits = oldest.is_some();
        let goes = silent
            .or_else(|| oldest.filter(|oldest| self.had_its_time(**oldest)))
            .or_else(
                || {
                    if crowded { None } else { self.of_largest_crowd(waiting + 1) }
                },
            )
            .copied();
        let Some(goes) = goes.and_then(|goes| self.leave(goes)) else {
            return Verdict::Refused(if any_waits {
                "too many peers connect at the same time; they try again"
            } else if crowded {
                "too many connections from this address; see --max-connections-per-address"
            } else {
                "too many connections; see --max-connections"
            });
        };
        Verdict::InsteadOf(goes, self.enter(from))
    }

    /// Returns the oldest waiting connection of the address with most of them, if these are more than `than`. So no
    /// address takes the places of others.
    fn of_largest_crowd(&self, than: usize) -> Option<&u64> {
        let crowds = self.addresses.values().map(|address| &address.waiting);
        let largest = crowds.max_by_key(|waiting| waiting.len())?;
        if largest.len() > than { largest.first() } else { None }
    }

    fn had_its_time(&self, number: u64) -> bool {
        let waiting = self.waiting.get(&number);
        waiting.is_some_and(|waiting| waiting.since.elapsed() >= GRACE)
    }

    fn enter(&mut self, from: IpAddr) -> u64 {
        self.last += 1;
        self.open.insert(self.last, from);
        self.addresses.entry(from).or_default().open += 1;
        self.last
    }

    /// Records that a connection waits, or waits again. Does nothing for an unknown connection.
    pub(super) fn waits(&mut self, number: u64, connection: &ConnectionGuard) {
        if let Some(from) = self.open.get(&number) {
            let waiting = WaitingConnection {
                connection: connection.clone(),
                since: Instant::now(),
            };
            self.waiting.insert(number, waiting);
            self.silent.insert(number);
            let here = self.addresses.entry(*from).or_default();
            here.waiting.insert(number);
            here.silent.insert(number);
        }
    }

    /// Records that the peer of a connection has sent something.
    pub(super) fn speaks(&mut self, number: u64) {
        let from = self.open.get(&number);
        if let Some(here) = from.and_then(|from| self.addresses.get_mut(from)) {
            here.silent.remove(&number);
        }
        self.silent.remove(&number);
    }

    /// Records that a connection is in use.
    pub(super) fn is_used(&mut self, number: u64) -> Option<ConnectionGuard> {
        self.speaks(number);
        let from = self.open.get(&number)?;
        if let Some(here) = self.addresses.get_mut(from) {
            here.waiting.remove(&number);
        }
        let waiting = self.waiting.remove(&number);
        waiting.map(|waiting| waiting.connection)
    }

    /// Removes a connection that is gone or about to be. Returns it if it was waiting.
    pub(super) fn leave(&mut self, number: u64) -> Option<ConnectionGuard> {
        let waited = self.is_used(number);
        if let Some(from) = self.open.remove(&number)
            && let Some(here) = self.addresses.get_mut(&from)
        {
            here.open -= 1;
            if here.open == 0 {
                self.addresses.remove(&from);
            }
        }
        waited
    }
}

/// Returns the part of an address that counts: the owner of an IPv6 address has its whole network.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    /// The part of an IPv6 address that its host chooses.
    const HOST: u128 = u64::MAX as u128;
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((u128::from(address) & !HOST).into()),
        v4 => v4,
    }
}
