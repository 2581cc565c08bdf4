//! Tables that fit: columns are dropped and elided by rank until a line is short enough.

use unicode_width::UnicodeWidthStr;

use crate::style::{Canvas, Tone};
use crate::text::{Span, elide, paragraph};

/// Blanks between two columns.
const GAP: usize = 2;

/// Indentation of notes below their row.
const NOTE_INDENT: usize = 2;

/// The title of a column, and how it may shrink for lack of room.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    title: &'static str,
    /// The width down to which cells may be elided.
    least: Option<usize>,
    /// The rank of a column that may be dropped for lack of room, the lowest rank first.
    rank: Option<u8>,
    /// Whether only wide tables show the column.
    wide: bool,
    /// Whether cells are names, whose common end may be cut.
    names: bool,
}

impl Column {
    /// Creates a column that is always shown in full.
    pub const fn new(title: &'static str) -> Self {
        Self {
            title,
            least: None,
            rank: None,
            wide: false,
            names: false,
        }
    }

    /// Creates a column of wide tables.
    pub const fn wide(title: &'static str) -> Self {
        Self {
            wide: true,
            ..Self::new(title)
        }
    }

    /// Marks cells as names: on a terminal that is too narrow, the end that all names have is cut, and shown once.
    pub const fn names(self) -> Self {
        Self {
            names: true,
            ..self
        }
    }

    /// Lets cells be elided, down to `least` columns.
    pub const fn elastic(self, least: usize) -> Self {
        Self {
            least: Some(least),
            ..self
        }
    }

    /// Lets the column be dropped, those of lower rank first.
    pub const fn optional(self, rank: u8) -> Self {
        Self {
            rank: Some(rank),
            ..self
        }
    }
}

/// A table of `rows`, built column by column.
pub struct Table<'a, T> {
    rows: &'a [T],
    columns: Vec<Filled>,
    notes: Vec<Vec<Span>>,
}

/// A column with its cells.
struct Filled {
    column: Column,
    cells: Vec<Span>,
    /// The width of the widest cell, including the title.
    natural: usize,
    /// The width on the canvas.
    width: usize,
}

impl Filled {
    fn least(&self) -> usize {
        self.column.least.map_or(self.natural, |least| {
            least.max(self.column.title.len()).min(self.natural)
        })
    }
}

impl<'a, T> Table<'a, T> {
    /// Creates a table without columns.
    pub fn new(rows: &'a [T]) -> Self {
        Self {
            rows,
            columns: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Adds a column; `cell` fills it for a row.
    pub fn column(self, column: Column, cell: impl Fn(&T) -> Span) -> Self {
        let cells = self.rows.iter().map(cell).collect();
        self.filled(column, cells)
    }

    fn filled(mut self, column: Column, cells: Vec<Span>) -> Self {
        let widest = cells.iter().map(Span::width).max().unwrap_or(0);
        let natural = widest.max(column.title.len());
        self.columns.push(Filled {
            column,
            cells,
            natural,
            width: natural,
        });
        self
    }

    /// Adds a column of plain text.
    pub fn text<S: AsRef<str>>(self, column: Column, cell: impl Fn(&'a T) -> S) -> Self {
        let cells = self.rows.iter().map(|row| Span::plain(cell(row)));
        self.filled(column, cells.collect())
    }

    /// Adds a column if `is`.
    pub fn column_if(self, is: bool, column: Column, cell: impl Fn(&T) -> Span) -> Self {
        if is { self.column(column, cell) } else { self }
    }

    /// Adds notes, which are shown below their row, wrapped.
    pub fn notes(mut self, notes: impl Fn(&T) -> Vec<Span>) -> Self {
        self.notes = self.rows.iter().map(notes).collect();
        self
    }

    /// Returns the table as text, with colours.
    pub fn render(mut self, canvas: &Canvas) -> String {
        self.columns.retain(|filled| canvas.wide || !filled.column.wide);
        let mut ends = Vec::new();
        if !canvas.wide {
            if taken(&self.columns) > canvas.columns {
                ends = cut_ends(&mut self.columns);
            }
            fit(&mut self.columns, canvas.columns);
        }
        let titles = self.columns.iter().map(|filled| {
            let title = Span::new(filled.column.title, Tone::Strong);
            (title, filled.width)
        });
        let mut out = if canvas.headers { line(titles, canvas) } else { String::new() };
        for row in 0..self.rows.len() {
            let cells = self.columns.iter().map(|filled| (filled.cells[row].clone(), filled.width));
            out.push_str(&line(cells, canvas));
            for note in self.notes.get(row).into_iter().flatten() {
                out.push_str(&paragraph(note, canvas, NOTE_INDENT));
            }
        }
        for (title, end) in ends {
            let text = format!("All names in {title} end in {end}");
            out.push_str(&paragraph(&Span::new(text, Tone::Faint), canvas, 0));
        }
        out
    }
}

/// Returns the width of a line with all cells in full.
fn taken(columns: &[Filled]) -> usize {
    let gaps = columns.len().saturating_sub(1) * GAP;
    columns.iter().map(|column| column.natural).sum::<usize>() + gaps
}

/// Cuts the common end of the names in each column, and returns the titles with the ends.
fn cut_ends(columns: &mut [Filled]) -> Vec<(&'static str, String)> {
    let mut cut = Vec::new();
    for filled in columns.iter_mut().filter(|filled| filled.column.names) {
        // Cells with blanks count rows, and are no names.
        let is_name = |text: &str| !text.contains(' ');
        let names: Vec<&str> = filled
            .cells
            .iter()
            .map(|cell| cell.text.as_str())
            .filter(|text| is_name(text))
            .collect();
        let Some(end) = common_end(&names).map(str::to_owned) else {
            continue;
        };
        for cell in &mut filled.cells {
            let rest = cell.text.len() - end.len().min(cell.text.len());
            if is_name(&cell.text) {
                cell.text.truncate(rest);
            }
        }
        let widest = filled.cells.iter().map(Span::width).max().unwrap_or(0);
        filled.natural = widest.max(filled.column.title.len());
        filled.width = filled.natural;
        cut.push((filled.column.title, end));
    }
    cut
}

/// Returns the longest end that all names have, from a dot on; `None` if there are less than two names.
fn common_end<'a>(names: &[&'a str]) -> Option<&'a str> {
    let (first, rest) = names.split_first()?;
    if rest.is_empty() {
        return None;
    }
    first
        .match_indices('.')
        .map(|(at, _)| at)
        .filter(|at| *at > 0)
        .map(|at| &first[at..])
        .find(|end| {
            let shared = |name: &&str| name.len() > end.len() && name.ends_with(end);
            rest.iter().all(shared)
        })
}

/// Drops columns until the others fit at their least width, then shares the remaining room.
fn fit(columns: &mut Vec<Filled>, room: usize) {
    let gaps = |columns: &[Filled]| columns.len().saturating_sub(1) * GAP;
    while columns.iter().map(Filled::least).sum::<usize>() + gaps(columns) > room {
        let ranks = columns.iter().enumerate();
        let lowest = ranks.filter_map(|(i, filled)| Some((filled.column.rank?, i))).min();
        let Some((_, index)) = lowest else { break };
        columns.remove(index);
    }
    for _ in room..taken(columns) {
        let elastic = columns.iter_mut().filter(|c| c.width > c.least());
        let Some(widest) = elastic.max_by_key(|c| c.width) else {
            break;
        };
        widest.width -= 1;
    }
}

/// Returns one line of cells, each padded to its width, without blanks at the end.
fn line(cells: impl Iterator<Item = (Span, usize)>, canvas: &Canvas) -> String {
    let mut out = String::new();
    let mut pending = 0;
    for (cell, width) in cells {
        let text = elide(&cell.text, width, canvas.ellipsis());
        out.push_str(&" ".repeat(pending));
        out.push_str(&cell.tone.paint(&text));
        pending = GAP + width.saturating_sub(text.width());
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_fits, canvas, plain};
    use expect_test::expect;

    fn sample(columns: usize) -> String {
        let rows = [
            ("a", "short", "1"),
            ("b", "a-rather-long-name-of-something", "22"),
        ];
        let table = Table::new(&rows)
            .text(Column::new("ID"), |row| row.0)
            .text(Column::new("NAME").elastic(12), |row| row.1)
            .text(Column::new("COUNT").optional(1), |row| row.2)
            .text(Column::wide("MORE"), |_| "more")
            .notes(|row| {
                let wrong = row.0 == "b";
                wrong
                    .then(|| Span::new("something is wrong with this one", Tone::Bad))
                    .into_iter()
                    .collect()
            });
        let canvas = Canvas {
            columns,
            ..canvas()
        };
        plain(&table.render(&canvas))
    }

    #[test]
    fn names_lose_their_common_end_once_and_only_for_lack_of_room() {
        let names = [
            "ip-10-0-12-34.eu-west-1.compute.internal",
            "ip-10-0-9-7.eu-west-1.compute.internal",
            "7 nodes",
        ];
        let render = |names: &[&str], columns| {
            let table = Table::new(names)
                .text(Column::new("NODE").elastic(8).names(), |name| name)
                .text(Column::new("STATE"), |_| "InSync");
            let canvas = Canvas {
                columns,
                ..canvas()
            };
            plain(&table.render(&canvas))
        };
        expect![[r#"
            NODE           STATE
            ip-10-0-12-34  InSync
            ip-10-0-9-7    InSync
            7 nodes        InSync
            All names in NODE end in
              .eu-west-1.compute.internal
        "#]]
        .assert_eq(&render(&names, 30));
        for (names, columns) in [
            (&names[..], 80),
            (&names[..], usize::MAX),
            (&names[..1], 30),
        ] {
            let text = render(names, columns);
            assert!(!text.contains("end in"), "{text}");
        }
        let mixed = render(&[names[0], "node-1"], 30);
        assert!(!mixed.contains("end in"), "{mixed}");
        // Nothing would be left of the second name.
        assert_eq!(common_end(&["a.b.c", "b.c"]), Some(".c"));
    }

    #[test]
    fn narrow_tables_elide_then_drop() {
        expect![[r#"
            ID  NAME                             COUNT
            a   short                            1
            b   a-rather-long-name-of-something  22
              something is wrong with this one
        "#]]
        .assert_eq(&sample(80));
        expect![[r#"
            ID  NAME               COUNT
            a   short              1
            b   a-rather-..ething  22
              something is wrong with
                this one
        "#]]
        .assert_eq(&sample(28));
        expect![[r#"
            ID  NAME
            a   short
            b   a-rather-l..ething
              something is wrong
                with this one
        "#]]
        .assert_eq(&sample(22));
        for columns in 22..60 {
            assert_fits(&sample(columns), columns);
        }
    }
}
