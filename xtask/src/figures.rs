//! Figures of the page of benchmarks: the part that `cargo xtask bench --against kube-proxy --write` generates, the numbers
//! with units of a text, and what has become worse from one table to another.

use std::collections::BTreeMap;

/// The page, and the lines around its generated part.
pub(crate) const PAGE: &str = "docs/benchmarks.md";
const BEGIN: &str = "<!-- begin: cargo xtask bench --against kube-proxy -->";
const END: &str = "<!-- end: cargo xtask bench --against kube-proxy -->";

/// Units, and how many of the smallest of their kind each is. `1/` is a share: 1/89 is 89 of it.
const UNITS: [(&str, f64); 10] = [
    ("µs", 1e-6),
    ("ms", 1e-3),
    ("s", 1.0),
    ("B", 1.0),
    ("kB", 1e3),
    ("MB", 1e6),
    ("MiB", 1.0),
    ("%", 1.0),
    ("times", 1.0),
    (SHARE, 1.0),
];
const SHARE: &str = "1/";

/// Growth of a number by which it has become worse.
const WORSE: f64 = 1.2;

/// A number with its unit, of [`UNITS`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Figure {
    number: f64,
    unit: &'static str,
    scale: f64,
}

impl Figure {
    fn new(number: f64, unit: &str) -> Option<Self> {
        let (unit, scale) = UNITS.into_iter().find(|(name, _)| *name == unit)?;
        Some(Self {
            number,
            unit,
            scale,
        })
    }

    fn value(self) -> f64 {
        self.number * self.scale
    }

    /// Returns the figure as a text has it.
    pub(crate) fn text(self) -> String {
        match self.unit {
            SHARE => format!("1/{}", self.number),
            unit => format!("{} {unit}", self.number),
        }
    }
}

/// Returns the generated part of the page.
pub(crate) fn generated(page: &str) -> Option<&str> {
    let (_, rest) = page.split_once(BEGIN)?;
    Some(rest.split_once(END)?.0)
}

/// Returns the numbers of a text that have a unit. In `99 (101) MiB`, both have one.
pub(crate) fn figures(text: &str) -> Vec<Figure> {
    let (mut found, mut numbers) = (Vec::new(), Vec::new());
    for word in text.split_whitespace() {
        let is_around = |c: char| "+(),;:.*|".contains(c);
        let word = word.trim_matches(is_around).replace(',', "");
        if let Ok(number) = word.parse() {
            numbers.push(number);
            continue;
        }
        let share = word.strip_prefix(SHARE).and_then(|rest| rest.parse().ok());
        found.extend(share.and_then(|number| Figure::new(number, SHARE)));
        found.extend(numbers.drain(..).filter_map(|it| Figure::new(it, &word)));
    }
    found
}

/// Returns what has become worse, by row and column: numbers are worse if they are higher.
pub(crate) fn regressions(old: &str, new: &str) -> Vec<String> {
    let (old, headings) = (rows(old), headings(new));
    let mut worse = Vec::new();
    for (row, cells) in rows(new) {
        let before = old.get(&row).into_iter().flatten();
        for ((heading, before), after) in headings.iter().skip(2).zip(before).zip(&cells) {
            let mut pairs = figures(before)
                .into_iter()
                .zip(figures(after))
                .filter(|(before, after)| after.value() > WORSE * before.value());
            if pairs.next().is_some() {
                let [services, proxy] = &row;
                worse.push(format!(
                    "{services} Services, {proxy}, {heading}: {before} -> {after}"
                ));
            }
        }
    }
    worse
}

/// Returns the rows of a table: the first two cells name a row.
fn rows(text: &str) -> BTreeMap<[String; 2], Vec<String>> {
    text.lines()
        .filter_map(|line| {
            let mut cells = cells(line);
            cells.first()?.parse::<u32>().ok()?;
            let rest = (cells.len() > 2).then(|| cells.split_off(2))?;
            Some((cells.try_into().ok()?, rest))
        })
        .collect()
}

fn headings(text: &str) -> Vec<String> {
    text.lines().map(cells).find(|cells| !cells.is_empty()).unwrap_or_default()
}

fn cells(line: &str) -> Vec<String> {
    let inside = line.strip_prefix('|').and_then(|it| it.strip_suffix('|'));
    inside
        .into_iter()
        .flat_map(|inside| inside.split('|'))
        .map(|cell| cell.trim().to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_with_their_units() {
        let texts = |text| figures(text).into_iter().map(Figure::text);
        let found: Vec<String> =
            texts("| 10,000 | 99 (101) MiB | +3.2 µs, 16.7 s | uses 1/2.0 of 21 times; v1.37 ms.")
                .collect();
        let wanted = ["99 MiB", "101 MiB", "3.2 µs", "16.7 s", "1/2", "21 times"];
        assert_eq!(found, wanted);
    }

    #[test]
    fn numbers_that_grow_by_more_than_a_fifth_are_worse() {
        let table = |cells| {
            format!(
                "2026-11-26\n\n| Services | proxy | cold start | memory |\n| -: | - | -: | -: |\n{cells}"
            )
        };
        let old =
            table("| 1000 | one | 900 ms | 77 (80) MiB |\n| 5000 | one | 2.0 s | 9 (9) MiB |\n");
        let new =
            table("| 1000 | one | 1.09 s | 50 (97) MiB |\n| 5000 | one | 2.3 s | 9 (9) MiB |\n");
        assert_eq!(
            regressions(&old, &new),
            [
                "1000 Services, one, cold start: 900 ms -> 1.09 s",
                "1000 Services, one, memory: 77 (80) MiB -> 50 (97) MiB",
            ]
        );
        assert!(regressions(&old, &old).is_empty());
        assert!(regressions("", &new).is_empty());
    }

    #[test]
    fn the_page_has_a_generated_part() {
        let root = crate::cargo::root().unwrap();
        let page = std::fs::read_to_string(root.join(PAGE)).unwrap();
        assert!(rows(generated(&page).unwrap()).len() >= 6);
    }
}
