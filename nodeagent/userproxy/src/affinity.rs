//! Session affinity: the endpoint of each client (A11, U13). The table is bounded, and each entry lives as long as it is used.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use kplane_model::EndpointAddr;

/// The endpoint of a client, and when the client last came.
#[derive(Clone, Copy, Debug)]
struct Remembered {
    endpoint: EndpointAddr,
    at: Instant,
}

/// The clients of one ServicePort with session affinity.
///
/// Two generations bound the table: clients that come are in the young one. When that is full, it becomes the old one,
/// and the clients that did not come meanwhile are forgotten.
#[derive(Debug)]
pub(crate) struct Affinity {
    timeout: Duration,
    /// Most clients in one generation.
    capacity: usize,
    young: HashMap<IpAddr, Remembered>,
    old: HashMap<IpAddr, Remembered>,
}

impl Affinity {
    /// Creates an empty table for at most `limit` clients.
    pub(crate) fn new(timeout: Duration, limit: usize) -> Self {
        Self {
            timeout,
            capacity: (limit / 2).max(1),
            young: HashMap::new(),
            old: HashMap::new(),
        }
    }

    /// Changes the timeout, which counts for clients that are remembered already, too.
    pub(crate) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns the endpoint of a client.
    pub(crate) fn get(&self, client: IpAddr, now: Instant) -> Option<EndpointAddr> {
        let found = self.young.get(&client).or_else(|| self.old.get(&client))?;
        (now.duration_since(found.at) < self.timeout).then_some(found.endpoint)
    }

    /// Records that a client reached an endpoint.
    pub(crate) fn set(&mut self, client: IpAddr, endpoint: EndpointAddr, now: Instant) {
        if self.young.len() >= self.capacity && !self.young.contains_key(&client) {
            self.old = std::mem::take(&mut self.young);
        }
        self.old.remove(&client);
        let at = now;
        self.young.insert(client, Remembered { endpoint, at });
    }

    /// Returns all clients whose time is not over.
    pub(crate) fn clients(
        &self,
        now: Instant,
    ) -> impl Iterator<Item = (IpAddr, EndpointAddr, Duration)> {
        self.young.iter().chain(&self.old).filter_map(move |(client, found)| {
            let left = self.timeout.checked_sub(now.duration_since(found.at))?;
            Some((*client, found.endpoint, left))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(last: u8) -> EndpointAddr {
        EndpointAddr::new([10, 0, 0, last], 80)
    }

    fn client(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    #[test]
    fn a11_an_entry_lives_as_long_as_it_is_used() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let mut affinity = Affinity::new(10 * second, 100);
        affinity.set(client(1), endpoint(1), start);
        affinity.set(client(1), endpoint(1), start + 9 * second);
        assert_eq!(
            affinity.get(client(1), start + 18 * second),
            Some(endpoint(1))
        );
        assert_eq!(affinity.get(client(1), start + 19 * second), None);
        affinity.set_timeout(20 * second);
        assert_eq!(
            affinity.get(client(1), start + 19 * second),
            Some(endpoint(1))
        );
    }

    #[test]
    fn u13_the_table_is_bounded_and_keeps_the_clients_that_come() {
        let now = Instant::now();
        let mut affinity = Affinity::new(Duration::from_secs(60), 20);
        for number in 0..=255 {
            affinity.set(client(255), endpoint(9), now);
            affinity.set(client(number), endpoint(number), now);
            assert!(affinity.young.len() + affinity.old.len() <= 20);
        }
        assert_eq!(affinity.get(client(254), now), Some(endpoint(254)));
        assert_eq!(affinity.get(client(0), now), None);
    }
}
