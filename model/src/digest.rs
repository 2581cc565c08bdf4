//! A digest of a set of objects that is cheap to keep up to date.
//!
//! The digest of a set is the sum, modulo 2^128, of a 128-bit hash of each object. Adding or
//! removing an object is one addition or subtraction, in any order, on both ends of a stream. The
//! digest detects accidents (a lost delta, a bug), not attacks: the stream itself is authenticated.

use std::fmt;
use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

/// Hash of one object: its kind, key and content as encoded for the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectHash(u128);

impl ObjectHash {
    /// Hashes the encoded form of an object. The encoding contains kind and key, so equal hashes
    /// mean that kind, key and content are equal.
    pub fn of(encoded: &[u8]) -> Self {
        let mut hasher = SipHasher13::new();
        hasher.write(encoded);
        Self(hasher.finish128().as_u128())
    }
}

/// Digest of a set of objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Digest(u128);

impl Digest {
    /// Adds an object to the set.
    pub fn add(&mut self, object: ObjectHash) {
        self.0 = self.0.wrapping_add(object.0);
    }

    /// Removes an object that is in the set.
    pub fn remove(&mut self, object: ObjectHash) {
        self.0 = self.0.wrapping_sub(object.0);
    }

    /// Returns the digest of the union of two disjoint sets; also adds up corrections.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self(self.0.wrapping_add(other.0))
    }

    /// Returns the digest of a set without a subset; also takes corrections back.
    #[must_use]
    pub fn minus(self, other: Self) -> Self {
        Self(self.0.wrapping_sub(other.0))
    }

    /// Returns the digest for the wire: 16 bytes, big endian.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    /// Reads a digest from the wire.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_be_bytes(bytes))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_does_not_matter_and_removal_undoes() {
        let [a, b, c] = [b"a", b"b", b"c"].map(|x| ObjectHash::of(x));
        let mut one = Digest::default();
        one.add(a);
        one.add(b);
        one.add(c);
        one.remove(b);
        let mut two = Digest::default();
        two.add(c);
        two.add(a);
        assert_eq!(one, two);
        assert_eq!(Digest::from_bytes(one.to_bytes()), one);
    }

    /// The value is part of the protocol: two versions of kplane must agree on it.
    #[test]
    fn hash_is_stable() {
        let mut d = Digest::default();
        d.add(ObjectHash::of(b"kplane"));
        assert_eq!(d.to_string(), "9a74867323de21c24e774ae3171a6e6d");
    }
}
