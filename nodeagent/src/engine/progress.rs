//! How far the kernel is with one family of Services or NetworkPolicies, and which position all of them have reached.

use crate::desired::Position;

/// How far one family is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FamilyProgress {
    /// The position that the kernel holds.
    pub(super) held: Option<Position>,
    pub(super) excused: Excused,
}

/// The first and last of the positions that did not need a family, while its kernel refuses it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Excused(Option<(Position, Position)>);

impl Excused {
    /// Records that the kernel refuses a position, and whether that needs the family.
    pub(super) fn refused(&mut self, position: Position, is_needed: bool) {
        let first = self.0.map_or(position, |(first, _)| first);
        self.0 = (!is_needed).then_some((first, position));
    }

    /// Records that a position may need the family after all.
    pub(super) fn retract(&mut self, position: Position) {
        self.0.take_if(|(_, last)| *last == position);
    }
}

/// Returns the position that all families have reached. A family that its kernel refuses has also reached positions that do
/// not need it, but none before these. A family that is still in another epoch than `epoch` is behind every family in it. Of two
/// other epochs nobody knows which came first: there is no such position.
pub(super) fn common(
    mut families: impl Iterator<Item = FamilyProgress> + Clone,
    epoch: Option<u64>,
) -> Option<Position> {
    let progress = |at: Position| (Some(at.epoch) == epoch, at.revision);
    let furthest = |family: FamilyProgress| {
        let excused = family.excused.0.map(|(_, last)| last);
        [family.held, excused].into_iter().flatten().max_by_key(|at| progress(*at))
    };
    let reached: Option<Vec<_>> = families.clone().map(furthest).collect();
    let reached = reached?.into_iter().min_by_key(|at| progress(*at))?;
    let is_past = |at: Position, other: Position| {
        let is_comparable = at.epoch == other.epoch || Some(at.epoch) == epoch;
        is_comparable && progress(at) >= progress(other)
    };
    let has_reached = |family: FamilyProgress| {
        let excused = family.excused.0.map(|(first, _)| first);
        family.held.is_some_and(|held| is_past(held, reached))
            || excused.is_some_and(|first| is_past(reached, first))
    };
    families.all(has_reached).then_some(reached)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(revision: u64) -> Position {
        Position { epoch: 1, revision }
    }

    fn holds(revision: u64) -> FamilyProgress {
        FamilyProgress {
            held: Some(at(revision)),
            excused: Excused::default(),
        }
    }

    fn reached(families: &[FamilyProgress]) -> Option<u64> {
        common(families.iter().copied(), Some(1)).map(|at| at.revision)
    }

    #[test]
    fn the_slowest_family_counts() {
        assert_eq!(reached(&[holds(4), holds(3), holds(5)]), Some(3));
        assert_eq!(reached(&[holds(4), FamilyProgress::default()]), None);
    }

    #[test]
    fn a_family_of_an_earlier_epoch_is_behind() {
        let earlier = FamilyProgress {
            held: Some(Position {
                epoch: 7,
                revision: 9,
            }),
            ..FamilyProgress::default()
        };
        let families = [holds(2), earlier];
        assert_eq!(common(families.into_iter(), Some(1)), earlier.held);
    }

    #[test]
    fn families_of_two_earlier_epochs_have_nothing_in_common() {
        let of = |epoch| FamilyProgress {
            held: Some(Position { epoch, revision: 9 }),
            ..FamilyProgress::default()
        };
        assert_eq!(common([of(7), of(8)].into_iter(), Some(1)), None);
        assert_eq!(common([of(7), of(7)].into_iter(), Some(1)), of(7).held);
    }

    #[test]
    fn a_refused_family_has_reached_what_does_not_need_it() {
        let mut refused = FamilyProgress::default();
        refused.excused.refused(at(3), false);
        assert_eq!(reached(&[holds(3), refused]), Some(3));
        // The other family is at a position before those, which may have needed this one.
        assert_eq!(reached(&[holds(2), refused]), None);
        refused.held = Some(at(2));
        assert_eq!(reached(&[holds(2), refused]), Some(2));
        refused.held = Some(at(1));
        assert_eq!(reached(&[holds(2), refused]), None);
    }

    #[test]
    fn the_positions_begin_anew_when_the_family_was_needed() {
        let mut refused = FamilyProgress::default();
        refused.excused.refused(at(3), false);
        refused.excused.refused(at(4), true);
        assert_eq!(reached(&[holds(4), refused]), None);
        refused.excused.refused(at(5), false);
        assert_eq!(reached(&[holds(4), refused]), None);
        assert_eq!(reached(&[holds(5), refused]), Some(5));
        refused.excused.retract(at(5));
        assert_eq!(reached(&[holds(5), refused]), None);
    }
}
