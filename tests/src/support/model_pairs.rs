//! Which cases to play: every pair of values of any two parameters, and random ones on top.

use std::collections::BTreeSet;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::model::Choice;

/// Rows tried at random for each row that is taken.
const CANDIDATES: usize = 8;

/// Different choices, at least this many: first such that every two values of two parameters that
/// may go together do so in one of them, then at random. The same for the same seed.
pub fn choices(seed: u64, at_least: usize) -> Vec<Choice> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut missing = Missing::all();
    let mut rows = Vec::new();
    while missing.count > 0 {
        let candidates = (0..CANDIDATES).map(|_| missing.row(&mut rng));
        let best = candidates.max_by_key(|row| missing.gain(row));
        if let Some(row) = best {
            missing.remove(&row);
            rows.push(row);
        }
    }
    let mut seen: BTreeSet<Choice> = rows.iter().copied().collect();
    while rows.len() < at_least {
        let row = any(&mut rng);
        if seen.insert(row) {
            rows.push(row);
        }
    }
    rows
}

/// Any choice whose values may go together.
pub fn any(rng: &mut StdRng) -> Choice {
    loop {
        let row = Choice(Choice::SIZES.map(|size| rng.random_range(0..size)));
        let fits = pairs(&row).all(|(one, other)| Choice::may_go_together(one, other));
        if fits {
            return row;
        }
    }
}

/// A value of a parameter: the parameter's number and the value's.
type Value = (usize, usize);

fn pairs(row: &Choice) -> impl Iterator<Item = (Value, Value)> {
    let row = row.0;
    (0..Choice::PARAMETERS).flat_map(move |one| {
        (one + 1..Choice::PARAMETERS).map(move |other| ((one, row[one]), (other, row[other])))
    })
}

/// Pairs of values that no row has yet.
struct Missing {
    /// By number of one value times the number of values, plus that of the other.
    flags: Vec<bool>,
    count: usize,
}

impl Missing {
    const VALUES: usize = {
        let (mut sum, mut parameter) = (0, 0);
        while parameter < Choice::PARAMETERS {
            sum += Choice::SIZES[parameter];
            parameter += 1;
        }
        sum
    };

    fn all() -> Self {
        let mut missing = Self {
            flags: vec![false; Self::VALUES * Self::VALUES],
            count: 0,
        };
        for (one, size) in Choice::SIZES.into_iter().enumerate() {
            for (other, other_size) in Choice::SIZES.into_iter().enumerate().skip(one + 1) {
                for pair in (0..size).flat_map(|a| (0..other_size).map(move |b| (a, b))) {
                    let pair = ((one, pair.0), (other, pair.1));
                    if Choice::may_go_together(pair.0, pair.1) {
                        missing.flags[Self::index(pair)] = true;
                        missing.count += 1;
                    }
                }
            }
        }
        missing
    }

    fn index(((one, value), (other, other_value)): (Value, Value)) -> usize {
        let number = |parameter, value| Choice::SIZES[..parameter].iter().sum::<usize>() + value;
        number(one, value) * Self::VALUES + number(other, other_value)
    }

    fn has(&self, pair: (Value, Value)) -> bool {
        self.flags[Self::index(pair)]
    }

    /// How many missing pairs a row has.
    fn gain(&self, row: &Choice) -> usize {
        pairs(row).filter(|pair| self.has(*pair)).count()
    }

    fn remove(&mut self, row: &Choice) {
        for pair in pairs(row) {
            let flag = &mut self.flags[Self::index(pair)];
            self.count -= usize::from(std::mem::take(flag));
        }
    }

    /// A row that has at least one missing pair: begins with one, then takes for each other
    /// parameter, in random order, the value with most missing pairs.
    fn row(&self, rng: &mut StdRng) -> Choice {
        let Some((first, second)) = self.any_pair(rng) else {
            return any(rng);
        };
        let mut row: [Option<usize>; Choice::PARAMETERS] = [None; Choice::PARAMETERS];
        row[first.0] = Some(first.1);
        row[second.0] = Some(second.1);
        let start = rng.random_range(0..Choice::PARAMETERS);
        for parameter in (0..Choice::PARAMETERS).map(|n| (n + start) % Choice::PARAMETERS) {
            if row[parameter].is_none() {
                row[parameter] = Some(self.best(parameter, &row, rng));
            }
        }
        Choice(row.map(Option::unwrap_or_default))
    }

    fn any_pair(&self, rng: &mut StdRng) -> Option<(Value, Value)> {
        let nth = rng.random_range(0..self.count.max(1));
        let mut set = self.flags.iter().enumerate().filter(|(_, set)| **set);
        let (index, _) = set.nth(nth)?;
        let value = |number: usize| {
            let mut number = number;
            for (parameter, size) in Choice::SIZES.into_iter().enumerate() {
                if number < size {
                    return (parameter, number);
                }
                number -= size;
            }
            (0, 0)
        };
        Some((value(index / Self::VALUES), value(index % Self::VALUES)))
    }

    /// The value of a parameter that fits what is chosen and covers most.
    fn best(
        &self,
        parameter: usize,
        row: &[Option<usize>; Choice::PARAMETERS],
        rng: &mut StdRng,
    ) -> usize {
        let chosen =
            || row.iter().enumerate().filter_map(|(other, value)| Some((other, (*value)?)));
        let fits = |value: &usize| {
            chosen().all(|other| Choice::may_go_together((parameter, *value), other))
        };
        let gain = |value: usize| {
            let ordered =
                |other: Value| ((parameter, value).min(other), (parameter, value).max(other));
            chosen().filter(|other| self.has(ordered(*other))).count()
        };
        let values = (0..Choice::SIZES[parameter]).filter(fits);
        let best = values.max_by_key(|value| (gain(*value), rng.random_range(0..1000)));
        best.unwrap_or_default()
    }
}
