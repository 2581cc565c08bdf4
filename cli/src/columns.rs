//! `-o custom-columns=TITLE:FIELD,..`: a table of fields of the JSON, as kubectl has it.

use std::str::FromStr;

use serde_json::Value;
use unicode_width::UnicodeWidthStr;

use crate::jsonpath::Path;

/// Blanks between two columns.
const GAP: usize = 3;

/// What stands for a field that a row does not have, as in kubectl.
const NONE: &str = "<none>";

/// The titles and fields of the columns.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Columns(Vec<(String, Path)>);

impl FromStr for Columns {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let column = |text: &str| match text.split_once(':') {
            Some((title, field)) if !title.is_empty() => Ok((title.to_owned(), field.parse()?)),
            _ => Err(format!(
                "'{text}' is no column: write NAME:.name,STATE:.state"
            )),
        };
        text.split(',').map(column).collect::<Result<_, _>>().map(Self)
    }
}

impl Columns {
    /// Returns the table of a document's list, or of the document if it is none.
    pub(crate) fn table(&self, document: &Value, headers: bool) -> String {
        let titles = self.0.iter().map(|(title, _)| title.clone()).collect::<Vec<_>>();
        let titles = headers.then_some(titles);
        let rows = rows(document).iter().map(|row| self.cells(row));
        let lines: Vec<Vec<String>> = titles.into_iter().chain(rows).collect();
        let width = |at: usize| lines.iter().map(|line| line[at].width()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.0.len()).map(width).collect();
        lines.iter().map(|cells| line(cells, &widths)).collect()
    }

    fn cells(&self, row: &Value) -> Vec<String> {
        let cell = |(_, field): &(String, Path)| {
            let texts: Vec<String> = field.values(row).into_iter().filter_map(text).collect();
            if texts.is_empty() { NONE.to_owned() } else { texts.join(",") }
        };
        self.0.iter().map(cell).collect()
    }
}

fn line(cells: &[String], widths: &[usize]) -> String {
    let mut out = String::new();
    for (cell, width) in cells.iter().zip(widths) {
        out.push_str(cell);
        out.push_str(&" ".repeat(width + GAP - cell.width()));
    }
    format!("{}\n", out.trim_end())
}

/// Returns a document's first list of objects; the document itself if it has none.
fn rows(document: &Value) -> &[Value] {
    document
        .as_object()
        .into_iter()
        .flat_map(|of| of.values())
        .filter_map(Value::as_array)
        .find(|list| list.first().is_none_or(Value::is_object))
        .map_or(std::slice::from_ref(document), Vec::as_slice)
}

/// Returns a value on one line; `None` if there is none.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text.replace(['\n', '\t'], " ")),
        value => Some(value.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_become_columns() {
        let list = json!({ "kind": "List", "items": [
            { "name": "web", "ports": [{ "port": 80 }, { "port": 443 }], "zone": null },
            { "name": "a-longer-name", "ports": [], "zone": "z1" },
        ], "others": [] });
        let columns: Columns = "NAME:.name,PORTS:ports[*].port,ZONE:.zone".parse().unwrap();
        let rows = "web             80,443   <none>\na-longer-name   <none>   z1\n";
        assert_eq!(columns.table(&list, false), rows);
        let titles = "NAME            PORTS    ZONE\n";
        assert_eq!(columns.table(&list, true), format!("{titles}{rows}"));
        // A result that is no list is one row.
        let one: Columns = "KIND:.kind".parse().unwrap();
        assert_eq!(one.table(&json!({ "kind": "Node" }), true), "KIND\nNode\n");
        assert_eq!(
            one.table(&json!({ "kind": "Node", "items": [] }), false),
            ""
        );
    }

    #[test]
    fn a_column_needs_a_title_and_a_field() {
        for wrong in ["", "name", ":.name", "A:.a,", "A:.a[", "A:.a,B"] {
            assert!(wrong.parse::<Columns>().is_err(), "{wrong}");
        }
    }
}
