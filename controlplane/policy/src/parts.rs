//! Parts of groups: as many as keep each of them small, so that a new member changes a small object, and a small group is
//! one object.

use kplane_model::PeerId;

/// Number of members that a part has on average before there are more parts. A new member sends some 8 KiB to each node
/// with the group; in a cluster of 5,000 nodes, a group of 8,192 members has 80,000 parts on nodes.
const MEMBERS: usize = 512;

/// Number of first bits of a member's identity that say which part it is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parts(u8);

impl Parts {
    /// Returns the parts of a group with so many members.
    pub(crate) fn of(members: usize) -> Self {
        let bits = [0, 2, 4, 6].into_iter();
        let enough = |bits: &u8| members <= MEMBERS << bits;
        Self(bits.into_iter().find(enough).unwrap_or(8))
    }

    /// Returns the number of parts.
    pub(crate) fn count(self) -> usize {
        1 << self.0
    }

    /// Returns the part of a member.
    pub(crate) fn part(self, member: &PeerId) -> u8 {
        member.0[0].checked_shr(self.shift()).unwrap_or(0)
    }

    /// Returns the first and the last identity of a part.
    pub(crate) fn range(self, part: u8) -> (PeerId, PeerId) {
        let (mut first, mut last) = ([0; 16], [u8::MAX; 16]);
        first[0] = part.checked_shl(self.shift()).unwrap_or(0);
        last[0] = first[0] | u8::MAX.checked_shr(u32::from(self.0)).unwrap_or(0);
        (PeerId(first), PeerId(last))
    }

    fn shift(self) -> u32 {
        8 - u32::from(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_members_once() {
        for (members, count) in [
            (0, 1),
            (512, 1),
            (513, 4),
            (2_048, 4),
            (8_192, 16),
            (32_768, 64),
            (32_769, 256),
        ] {
            let parts = Parts::of(members);
            assert_eq!(parts.count(), count);
            for byte in 0..=u8::MAX {
                let member = PeerId([byte; 16]);
                let (first, last) = parts.range(parts.part(&member));
                assert!(first <= member && member <= last, "{byte} of {count}");
            }
            let last = u8::try_from(count - 1).unwrap();
            let borders = (0..last).map(|part| (parts.range(part).1, parts.range(part + 1).0));
            for (end, next) in borders {
                assert_eq!(u128::from_be_bytes(end.0) + 1, u128::from_be_bytes(next.0));
            }
        }
    }
}
