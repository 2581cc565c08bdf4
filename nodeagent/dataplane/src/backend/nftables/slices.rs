//! Reads a table back in slices, between which the engine does other work.
//!
//! The elements of a set are summed up as they come, and not kept: a sum that differs from what the transactions up to now
//! lead to says that another program changed the set. What differs then is found by a read of everything at once.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};

use super::access::TableAccess;
use super::affinity::Group;
use super::element::Element;
use super::frontend::Ops;
use super::guarded::repair;
use super::readback::{ListedSet, ReadError};
use super::repair::{Contents, unreadable};
use super::schema::Set;
use super::watch::Drift;
use crate::backend::Verification;
use crate::backend::driver::StepError;

/// Pieces of lists in a slice: other work waits as long. The kernel takes up to two milliseconds for one of a large set, whose
/// elements it counts from the first one each time.
const PIECES: u32 = 4;

/// Most lists of one set. A list is torn by each transaction of kplane on the set meanwhile, and may lack elements while the
/// kernel enlarges the set, which it does in the background some time after many elements were added.
const LISTS: u32 = 8;

/// The sums of a table's sets after all transactions of kplane.
#[derive(Debug, Default)]
pub(super) struct Expected {
    sets: HashMap<Set, Sum>,
    hasher: RandomState,
}

/// The sum of the elements of a set, in whatever order they come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    hashes: u64,
    /// Number of elements added and deleted, by which two moments differ.
    changes: u64,
}

impl Expected {
    /// Returns the sums of a table that holds these elements.
    pub(super) fn of(elements: &[Element]) -> Self {
        let mut expected = Self::default();
        for element in elements {
            expected.change(element, u64::wrapping_add);
        }
        expected
    }

    /// Records operations that the kernel has carried out.
    pub(super) fn record<'a>(&mut self, groups: impl IntoIterator<Item = &'a Ops>) {
        for ops in groups {
            for element in &ops.delete {
                self.change(element, u64::wrapping_sub);
            }
            for element in &ops.add {
                self.change(element, u64::wrapping_add);
            }
        }
    }

    fn change(&mut self, element: &Element, how: fn(u64, u64) -> u64) {
        let hash = self.hasher.hash_one(element);
        let sum = self.sets.entry(element.set).or_default();
        sum.hashes = how(sum.hashes, hash);
        sum.changes += 1;
    }

    fn sum(&self, set: Set) -> Sum {
        self.sets.get(&set).copied().unwrap_or_default()
    }
}

/// A read that has begun.
#[derive(Debug, Default)]
pub(super) struct SlicedRead {
    /// Sets that are not read yet; `None` = nor are the chains.
    rest: Option<Vec<Set>>,
    list: Option<Box<SummedList>>,
    /// Number of lists of the next set up to now.
    lists: u32,
}

/// A list of a set that is on its way.
#[derive(Debug)]
struct SummedList {
    list: ListedSet,
    hashes: u64,
    /// The expectation when it began.
    begun: Sum,
}

/// What a slice says.
enum Slice {
    /// Nothing is wrong so far.
    Unfinished,
    /// The table holds what it should.
    Equal,
    /// Something differs, or changes all the time.
    Different,
}

/// Reads the next slice of a table. What differs is repaired at once, with a read of everything.
pub(super) fn check(
    kernel: &mut dyn TableAccess,
    table: &impl Contents,
    expected: &Expected,
    read: &mut SlicedRead,
) -> Result<Verification, StepError> {
    let reported = kernel.drift().map_err(unreadable)?;
    if reported.is_none() {
        match read.go_on(kernel, expected, || table.groups()) {
            Ok(Slice::Unfinished) => return Ok(Verification::Unfinished),
            Ok(Slice::Equal) => return Ok(Verification::Equal),
            Ok(Slice::Different) | Err(ReadError::Different(_)) => *read = SlicedRead::default(),
            Err(ReadError::Netlink(error)) => {
                *read = SlicedRead::default();
                return Err(unreadable(error));
            }
        }
    }
    let by = reported.and_then(|reported| reported.by);
    repair(kernel, table, Drift::anything_by(by))
}

impl SlicedRead {
    fn go_on(
        &mut self,
        kernel: &mut dyn TableAccess,
        expected: &Expected,
        groups: impl FnOnce() -> BTreeSet<Group>,
    ) -> Result<Slice, ReadError> {
        if self.rest.is_none() {
            match kernel.structure()? {
                Some(found) if found.iter().copied().eq(groups()) => {}
                _ => return Ok(Slice::Different),
            }
            self.rest = Some(kernel.sets());
        }
        for _ in 0..PIECES {
            let Some(set) = self.rest.as_ref().and_then(|rest| rest.last().copied()) else {
                *self = Self::default();
                return Ok(Slice::Equal);
            };
            self.read_piece(kernel, expected, set)?;
            if self.lists == LISTS {
                return Ok(Slice::Different);
            }
        }
        Ok(Slice::Unfinished)
    }

    /// Reads the next piece of a set.
    fn read_piece(
        &mut self,
        kernel: &mut dyn TableAccess,
        expected: &Expected,
        set: Set,
    ) -> Result<(), ReadError> {
        let now = expected.sum(set);
        let summed = match &mut self.list {
            Some(list) => list,
            none => none.insert(Box::new(SummedList {
                list: kernel.list(set)?,
                hashes: 0,
                begun: now,
            })),
        };
        let (elements, is_last) = summed.list.next()?;
        let hashes = elements.iter().map(|element| expected.hasher.hash_one(element));
        summed.hashes = hashes.fold(summed.hashes, u64::wrapping_add);
        if is_last {
            let is_equal = summed.begun == now && summed.hashes == now.hashes;
            self.list = None;
            if is_equal {
                self.rest.as_mut().and_then(Vec::pop);
            }
            self.lists = if is_equal { 0 } else { self.lists + 1 };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kplane_model::Family;

    use super::super::access::{Guard, KernelTables as _};
    use super::super::element::Key;
    use super::super::memory::MemoryKernel;
    use super::super::schema::TableSettings;
    use super::super::table_kind::TableKind;
    use super::*;

    const SET: Set = Set::ClusterIps;

    fn ops(delete: &[u8], add: &[u8]) -> [Ops; 1] {
        let elements = |octets: &[u8]| {
            octets
                .iter()
                .map(|octet| Element {
                    set: SET,
                    key: Key::Ip([10, 96, 0, *octet].into()),
                    data: None,
                })
                .collect()
        };
        [Ops {
            delete: elements(delete),
            add: elements(add),
            ..Ops::default()
        }]
    }

    /// Reads a table that changes after the first piece of its list was asked for; says how the read ends.
    fn read_while(change: impl FnOnce(&MemoryKernel, &mut dyn FnMut([Ops; 1]))) -> Slice {
        let memory = MemoryKernel::default();
        let mut table = memory.start().table(Family::V4, TableSettings::default().into());
        let mut expected = Expected::default();
        let first = ops(&[], &[1, 2]);
        table.commit(true, Guard::None, &first).unwrap();
        expected.record(&first);
        let mut read = SlicedRead {
            rest: Some(vec![SET]),
            list: Some(Box::new(SummedList {
                list: table.list(SET).unwrap(),
                hashes: 0,
                begun: expected.sum(SET),
            })),
            lists: 0,
        };
        change(&memory, &mut |ops| {
            table.commit(false, Guard::None, &ops).unwrap();
            expected.record(&ops);
        });
        let slices = || read.go_on(&mut *table, &expected, BTreeSet::new).unwrap();
        let mut ends =
            std::iter::repeat_with(slices).filter(|slice| !matches!(slice, Slice::Unfinished));
        ends.next().unwrap()
    }

    #[test]
    fn a_set_that_changes_while_it_is_listed_is_listed_again() {
        let slice = read_while(|_, commit| commit(ops(&[1], &[3])));
        assert!(matches!(slice, Slice::Equal));
    }

    #[test]
    fn what_another_program_takes_is_missed() {
        let slice = read_while(|memory, commit| {
            commit(ops(&[], &[3]));
            let table = (TableKind::Services, Family::V4);
            memory.show(table, |held| {
                held.remove(|_, element| ops(&[2], &[])[0].delete == [*element])
            });
        });
        assert!(matches!(slice, Slice::Different));
    }
}
