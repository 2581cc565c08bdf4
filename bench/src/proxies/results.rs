//! What was measured, and its tables.

use std::collections::BTreeMap;

use crate::proxies::contender::Contender;
use crate::proxies::rows::Row;

/// The rounds of each row and contender.
#[derive(Default)]
pub(crate) struct Results(BTreeMap<(u8, u8), Vec<Vec<f64>>>);

impl Results {
    pub(crate) fn add(&mut self, row: Row, contender: Contender, values: Vec<f64>) {
        let rounds = self.0.entry((row as u8, contender as u8)).or_default();
        rounds.push(values);
    }

    /// Returns a column's values, by round.
    pub(crate) fn column(&self, row: Row, contender: Contender, column: usize) -> Option<Vec<f64>> {
        let rounds = self.0.get(&(row as u8, contender as u8))?;
        Some(rounds.iter().map(|values| values[column]).collect())
    }

    /// Returns a row's table as Markdown: medians, and the lowest and highest.
    pub(crate) fn table(&self, row: Row, contenders: &[Contender]) -> String {
        let columns = row.columns();
        let headings: Vec<&str> = columns.iter().map(|(heading, _)| *heading).collect();
        let mut text = format!(
            "| {} | {} |\n| --- |{}\n",
            row.heading(),
            headings.join(" | "),
            " ---: |".repeat(columns.len())
        );
        for contender in contenders.iter().filter(|contender| row.has(**contender)) {
            let cells: Vec<String> = columns
                .iter()
                .enumerate()
                .map(|(column, (_, decimals))| {
                    let values = self.column(row, *contender, column);
                    values.map_or_else(|| "-".to_owned(), |values| cell(values, *decimals))
                })
                .collect();
            text += &format!("| {} | {} |\n", contender.name(), cells.join(" | "));
        }
        text
    }
}

/// Returns the median, and the lowest and highest value.
pub(crate) fn cell(mut values: Vec<f64>, decimals: usize) -> String {
    values.sort_by(f64::total_cmp);
    let (Some(least), Some(most)) = (values.first().copied(), values.last().copied()) else {
        return "-".to_owned();
    };
    let median = median(values);
    if most > 0.0 {
        format!("{median:.decimals$} ({least:.decimals$} to {most:.decimals$})")
    } else {
        "0".to_owned()
    }
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        _ if values.is_empty() => f64::NAN,
        1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}
