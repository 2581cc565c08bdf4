//! Digests of key ranges: what two sets of shared objects differ in, without a list of either.
//!
//! Each shared object belongs to one of a number of ranges by a hash of its key. Two sides compare the digests of their
//! ranges, and only ranges that differ have to be sent. The hash and the truncation are part of the protocol.

use std::hash::Hasher;
use std::net::IpAddr;

use siphasher::sip128::{Hasher128, SipHasher13};

use crate::{DesiredKey, Digest, ObjectHash, PolicyKey, ServiceKey, ServiceName};

/// Largest number of ranges. Their digests then have 1 KiB.
pub const MAX_RANGES: u16 = 256;

/// Smallest number of ranges.
const MIN_RANGES: u16 = 16;

/// Number of ServicePorts for which another range pays off: the digest of a range is small compared with one of its
/// ServicePorts.
const PORTS_A_RANGE: usize = 32;

/// Length of a range's digest on the wire, in bytes. A difference that it does not show is found by the digest of
/// everything that follows.
const DIGEST_BYTES: usize = 4;

/// Returns the number of ranges for so many ServicePorts: a power of two between 16 and [`MAX_RANGES`].
pub fn ranges_for(ports: usize) -> u16 {
    let wanted = (ports / PORTS_A_RANGE).next_power_of_two();
    u16::try_from(wanted).map_or(MAX_RANGES, |wanted| wanted.clamp(MIN_RANGES, MAX_RANGES))
}

/// Returns whether both sides can work with this number of ranges.
pub fn is_number_of_ranges(count: u32) -> bool {
    count.is_power_of_two() && (u32::from(MIN_RANGES)..=u32::from(MAX_RANGES)).contains(&count)
}

/// Returns the range of a shared object among a number of ranges, which is a power of two.
pub fn range_of(key: &DesiredKey, count: u16) -> u16 {
    let mut hasher = SipHasher13::new();
    match key {
        DesiredKey::Service(key) | DesiredKey::Local(key) => write_service(&mut hasher, key),
        DesiredKey::Policy(key) => write_policy(&mut hasher, key),
        DesiredKey::Node => {}
    }
    let hash = hasher.finish128().as_u128() & u128::from(count.saturating_sub(1));
    u16::try_from(hash).unwrap_or_default()
}

fn write_service(hasher: &mut SipHasher13, key: &ServiceKey) {
    write_text(hasher, &key.service.namespace);
    write_text(hasher, &key.service.name);
    write_text(hasher, &key.port_name);
    hasher.write_u8(key.protocol as u8);
    hasher.write_u8(key.family as u8);
}

fn write_policy(hasher: &mut SipHasher13, key: &PolicyKey) {
    let write_name = |hasher: &mut SipHasher13, name: &ServiceName| {
        write_text(hasher, &name.namespace);
        write_text(hasher, &name.name);
    };
    // No namespace of a Service is empty.
    hasher.write_u8(0);
    match key {
        PolicyKey::Peer(address) => {
            hasher.write_u8(1);
            write_ip(hasher, *address);
        }
        PolicyKey::Class(id) => {
            hasher.write_u8(2);
            hasher.write(&id.0);
        }
        PolicyKey::Group(id, part) => {
            hasher.write_u8(3);
            hasher.write(&id.0);
            hasher.write_u8(*part);
        }
        PolicyKey::Policy(name) => {
            hasher.write_u8(4);
            write_name(hasher, name);
        }
        PolicyKey::Pod(name) => {
            hasher.write_u8(5);
            write_name(hasher, name);
        }
        PolicyKey::Cluster(name) => {
            hasher.write_u8(6);
            write_text(hasher, name);
        }
        PolicyKey::Span(first, last) => {
            hasher.write_u8(7);
            write_ip(hasher, *first);
            write_ip(hasher, *last);
        }
        PolicyKey::Decisions(id, part) => {
            hasher.write_u8(8);
            hasher.write(&id.0);
            hasher.write_u8(*part);
        }
        PolicyKey::Namespace(name) => {
            hasher.write_u8(9);
            write_text(hasher, name);
        }
    }
}

fn write_ip(hasher: &mut SipHasher13, address: IpAddr) {
    match address {
        IpAddr::V4(address) => hasher.write(&address.octets()),
        IpAddr::V6(address) => hasher.write(&address.octets()),
    }
}

/// Writes a text and a byte that no name contains.
fn write_text(hasher: &mut SipHasher13, text: &str) {
    hasher.write(text.as_bytes());
    hasher.write_u8(0);
}

/// The digests of all ranges of a set of shared objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeDigests(Box<[Digest]>);

impl RangeDigests {
    /// Creates the digests of an empty set.
    pub fn new(count: u16) -> Self {
        Self(vec![Digest::default(); usize::from(count)].into())
    }

    /// Returns the number of ranges.
    pub fn count(&self) -> u16 {
        u16::try_from(self.0.len()).unwrap_or(MAX_RANGES)
    }

    /// Adds an object.
    pub fn add(&mut self, key: &DesiredKey, object: ObjectHash) {
        let range = range_of(key, self.count());
        if let Some(digest) = self.0.get_mut(usize::from(range)) {
            digest.add(object);
        }
    }

    /// Removes an object that is in the set.
    pub fn remove(&mut self, key: &DesiredKey, object: ObjectHash) {
        let range = range_of(key, self.count());
        if let Some(digest) = self.0.get_mut(usize::from(range)) {
            digest.remove(object);
        }
    }

    /// Returns the digests for the wire: the last 4 bytes of each.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0
            .iter()
            .map(|digest| digest.to_bytes())
            .flat_map(|[.., a, b, c, d]| [a, b, c, d])
            .collect()
    }

    /// Returns the ranges that differ from digests from the wire; `None` if these are of another number of ranges.
    pub fn differing(&self, other: &[u8]) -> Option<Ranges> {
        if other.len() != self.0.len() * DIGEST_BYTES {
            return None;
        }
        let own = self.to_bytes();
        let pairs = own.chunks(DIGEST_BYTES).zip(other.chunks(DIGEST_BYTES));
        let mut ranges = Ranges::none(self.count());
        for (range, (own, other)) in pairs.enumerate() {
            if own != other {
                ranges.insert(u16::try_from(range).ok()?);
            }
        }
        Some(ranges)
    }
}

/// A set of ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranges {
    /// One bit for each range, the lowest bit of the first byte first.
    bits: Vec<u8>,
}

impl Ranges {
    fn none(count: u16) -> Self {
        Self {
            bits: vec![0; usize::from(count / 8)],
        }
    }

    fn insert(&mut self, range: u16) {
        if let Some(byte) = self.bits.get_mut(usize::from(range / 8)) {
            *byte |= 1 << (range % 8);
        }
    }

    /// Returns whether a range is in the set.
    pub fn contains(&self, range: u16) -> bool {
        let byte = self.bits.get(usize::from(range / 8));
        byte.is_some_and(|byte| byte >> (range % 8) & 1 == 1)
    }

    /// Returns whether the range of a key is in the set.
    pub fn contain(&self, key: &DesiredKey) -> bool {
        self.contains(range_of(key, self.count()))
    }

    /// Returns the ranges in the set, in order.
    pub fn iter(&self) -> impl Iterator<Item = u16> {
        (0..self.count()).filter(|range| self.contains(*range))
    }

    /// Returns the number of ranges that a set may contain.
    pub fn count(&self) -> u16 {
        u16::try_from(self.bits.len() * 8).unwrap_or(MAX_RANGES)
    }

    /// Returns the set for the wire.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.bits.clone()
    }

    /// Reads a set from the wire; `None` if it is not of a [number of ranges](is_number_of_ranges).
    pub fn from_bytes(bits: &[u8]) -> Option<Self> {
        let count = u32::try_from(bits.len() * 8).ok()?;
        is_number_of_ranges(count).then(|| Self {
            bits: bits.to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PeerId;

    fn key(number: usize) -> DesiredKey {
        DesiredKey::Service(ServiceKey::sample("shop", &format!("web-{number}")))
    }

    fn hash(number: usize) -> ObjectHash {
        ObjectHash::of(&number.to_be_bytes())
    }

    #[test]
    fn only_ranges_with_a_difference_differ() {
        let mut ours = RangeDigests::new(64);
        (0..500).for_each(|n| ours.add(&key(n), hash(n)));
        let mut theirs = ours.clone();
        let same = ours.differing(&theirs.to_bytes()).unwrap();
        assert_eq!(same.iter().count(), 0);
        theirs.remove(&key(7), hash(7));
        theirs.add(&key(7), hash(1_000));
        theirs.remove(&key(8), hash(8));
        theirs.add(&key(501), hash(501));
        let differing = ours.differing(&theirs.to_bytes()).unwrap();
        let expected = [7, 8, 501].map(|n| range_of(&key(n), 64));
        assert!(expected.into_iter().all(|range| differing.contains(range)));
        assert!([7, 8, 501].iter().all(|n| differing.contain(&key(*n))));
        assert!(differing.iter().all(|range| expected.contains(&range)));
        assert_eq!(Ranges::from_bytes(&differing.to_bytes()), Some(differing));
    }

    #[test]
    fn what_the_other_side_says_is_checked() {
        let digests = RangeDigests::new(16);
        for bytes in [0, 1, 63, 65, 128] {
            assert_eq!(digests.differing(&vec![0; bytes]), None, "{bytes}");
        }
        for bytes in [0, 1, 3, 31, 33, 64, 1 << 20] {
            assert_eq!(Ranges::from_bytes(&vec![1; bytes]), None, "{bytes}");
        }
        for count in [0, 1, 8, 17, 512, u32::MAX] {
            assert!(!is_number_of_ranges(count), "{count}");
        }
        assert_eq!(
            [0, 1_000, 10_000, 1_000_000].map(ranges_for),
            [16, 32, 256, 256]
        );
    }

    /// The value is part of the protocol: two versions of kplane must agree on it.
    #[test]
    fn ranges_are_stable() {
        let ranges = [0, 1, 2, 3].map(|n| range_of(&key(n), MAX_RANGES));
        assert_eq!(ranges, [134, 15, 139, 196]);
        let (id, name) = (PeerId([7; 16]), ServiceName::new("shop", "web"));
        let keys = [
            PolicyKey::Peer([10, 0, 0, 1].into()),
            PolicyKey::Class(id),
            PolicyKey::Group(id, 7),
            PolicyKey::Policy(name),
            PolicyKey::Cluster("web".into()),
            PolicyKey::Span([10, 0, 0, 1].into(), [10, 0, 0, 9].into()),
            PolicyKey::Decisions(id, 7),
            PolicyKey::Namespace("shop".into()),
        ];
        let ranges = keys.map(|key| range_of(&DesiredKey::Policy(key), MAX_RANGES));
        assert_eq!(ranges, [126, 122, 162, 24, 157, 117, 164, 219]);
    }
}
