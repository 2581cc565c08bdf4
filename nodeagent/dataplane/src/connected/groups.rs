//! Connections in groups: one for each client, ServicePort and endpoint. Pure.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use kplane_netlink::conntrack::{Stage, Traffic};

/// Maximum number of groups that are kept while tables are read: some 4 MB.
const KEPT: usize = 16_384;

/// The table that has a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConnectionTable {
    /// The kernel's connection tracking.
    Conntrack,
    /// The kernel's table of IPVS.
    Ipvs,
    /// The userspace proxy.
    Proxy,
}

/// The identity of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupKey {
    /// Index of the ServicePort in the question.
    pub port: usize,
    /// The client's address.
    pub client: IpAddr,
    /// The endpoint.
    pub endpoint: SocketAddr,
    /// The table.
    pub table: ConnectionTable,
}

/// The sums of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupSums {
    /// Connections that are established, or packets of UDP that went both ways.
    pub established: u64,
    /// Connections of which nothing has come back from the endpoint.
    pub unreplied: u64,
    /// Connections to which the endpoint has answered, and that are not established yet.
    pub handshake: u64,
    /// Connections that one side has closed.
    pub closing: u64,
    /// Age of the newest and of the oldest, if it is known.
    pub ages: Option<(Duration, Duration)>,
    /// Bytes to the endpoint and to the clients, where they are counted.
    pub bytes: Option<[u64; 2]>,
    /// Packets to the endpoint and to the clients, where they are counted.
    pub packets: Option<[u64; 2]>,
}

impl GroupSums {
    /// Returns the number of connections.
    pub fn connections(&self) -> u64 {
        self.established + self.unreplied + self.handshake + self.closing
    }

    fn add(&mut self, one: &Single) {
        let count = match one.stage {
            Stage::Established => &mut self.established,
            Stage::Unreplied => &mut self.unreplied,
            Stage::Handshake => &mut self.handshake,
            Stage::Closing | Stage::Closed => &mut self.closing,
        };
        *count += 1;
        self.ages = match (self.ages, one.age) {
            (Some((newest, oldest)), Some(age)) => Some((newest.min(age), oldest.max(age))),
            (ages, age) => ages.or(age.map(|age| (age, age))),
        };
        add(&mut self.bytes, one.bytes);
        add(&mut self.packets, one.packets);
    }
}

/// Adds numbers that may not be known.
fn add(sums: &mut Option<[u64; 2]>, more: Option<[u64; 2]>) {
    if let Some(more) = more {
        let [to, back] = sums.unwrap_or_default();
        *sums = Some([to.saturating_add(more[0]), back.saturating_add(more[1])]);
    }
}

/// What a table says of one connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Single {
    pub(super) stage: Stage,
    pub(super) age: Option<Duration>,
    pub(super) bytes: Option<[u64; 2]>,
    pub(super) packets: Option<[u64; 2]>,
}

impl Single {
    /// Creates what the kernel's connection tracking says.
    pub(super) fn tracked(
        stage: Stage,
        age: Option<Duration>,
        traffic: Option<[Traffic; 2]>,
    ) -> Self {
        Self {
            stage,
            age,
            bytes: traffic.map(|ways| ways.map(|way| way.bytes)),
            packets: traffic.map(|ways| ways.map(|way| way.packets)),
        }
    }
}

/// The groups while tables are read.
#[derive(Debug, Default)]
pub(super) struct ConnectionGroups {
    groups: HashMap<GroupKey, GroupSums>,
    /// Connections of groups for which there was no room.
    more: u64,
}

impl ConnectionGroups {
    pub(super) fn add(&mut self, key: GroupKey, one: &Single) {
        let has_room = self.groups.len() < KEPT;
        match self.groups.get_mut(&key) {
            Some(sums) => sums.add(one),
            None if has_room => self.groups.entry(key).or_default().add(one),
            None => self.more += 1,
        }
    }

    /// Returns those with the most connections, and the number of connections of the others.
    pub(super) fn largest(self, most: usize) -> (Vec<(GroupKey, GroupSums)>, u64) {
        let mut groups: Vec<_> = self.groups.into_iter().collect();
        groups.sort_unstable_by_key(|(key, sums)| (Reverse(sums.connections()), *key));
        let rest: u64 = groups
            .get(most..)
            .unwrap_or_default()
            .iter()
            .map(|(_, sums)| sums.connections())
            .sum();
        groups.truncate(most);
        (groups, self.more + rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(client: u32) -> GroupKey {
        GroupKey {
            port: 0,
            client: IpAddr::V4(client.into()),
            endpoint: "10.0.0.5:80".parse().unwrap(),
            table: ConnectionTable::Conntrack,
        }
    }

    fn one(stage: Stage, age_s: Option<u64>, bytes: Option<u64>) -> Single {
        let way = |bytes| Traffic { packets: 1, bytes };
        let traffic = bytes.map(|bytes| [way(bytes), way(2 * bytes)]);
        Single::tracked(stage, age_s.map(Duration::from_secs), traffic)
    }

    #[test]
    fn a_group_has_the_sums_of_its_connections() {
        let mut groups = ConnectionGroups::default();
        for single in [
            one(Stage::Established, Some(5), Some(100)),
            one(Stage::Established, Some(90), None),
            one(Stage::Unreplied, None, Some(10)),
            one(Stage::Handshake, Some(7), None),
            one(Stage::Closing, Some(1), None),
        ] {
            groups.add(key(1), &single);
        }
        let (found, more) = groups.largest(10);
        let expected = GroupSums {
            established: 2,
            unreplied: 1,
            handshake: 1,
            closing: 1,
            ages: Some((Duration::from_secs(1), Duration::from_secs(90))),
            bytes: Some([110, 220]),
            packets: Some([2, 2]),
        };
        assert_eq!((found, more), (vec![(key(1), expected)], 0));
    }

    #[test]
    fn groups_are_bounded_and_the_largest_are_listed() {
        let mut groups = ConnectionGroups::default();
        let all = u32::try_from(KEPT).unwrap() + 10;
        for client in 0..all {
            groups.add(key(client), &one(Stage::Established, None, None));
        }
        // A group that is kept goes on to count.
        for _ in 0..3 {
            groups.add(key(77), &one(Stage::Established, None, None));
        }
        assert_eq!((groups.groups.len(), groups.more), (KEPT, 10));
        let (found, more) = groups.largest(2);
        assert_eq!((found[0].0, found[0].1.connections()), (key(77), 4));
        assert_eq!((found[1].0, found.len()), (key(0), 2));
        assert_eq!(more, u64::from(all) + 3 - 5);
    }
}
