//! The table of a run, for a terminal and for docs/benchmarks.md.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

/// Rows of what happened, what was measured, and what is wanted.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: Vec<[String; 3]>,
}

impl Table {
    /// Adds a row and prints it.
    pub(crate) fn row(&mut self, what: impl Into<String>, measured: String, goal: &str) {
        let row = [what.into(), measured, goal.to_owned()];
        println!("{:<36} {}", row[0], row[1]);
        self.rows.push(row);
    }

    /// Returns the table as Markdown.
    pub(crate) fn markdown(&self) -> String {
        let rows = self.rows.iter().map(|row| format!("| {} |\n", row.join(" | ")));
        format!(
            "| what | measured | goal |\n| ---- | -------- | ---- |\n{}",
            rows.collect::<String>()
        )
    }
}

/// Puts a text between the markers of docs/benchmarks.md for a command.
pub(crate) fn write(command: &str, text: &str) -> Result<()> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("docs");
    let path = docs.join("benchmarks.md");
    let before = fs::read_to_string(&path)?;
    let after = replaced(&before, command, text)
        .with_context(|| format!("docs/benchmarks.md lacks the markers of `{command}`"))?;
    fs::write(path, after)?;
    Ok(())
}

fn replaced(document: &str, command: &str, text: &str) -> Option<String> {
    let [begin, end] = ["begin", "end"].map(|mark| format!("<!-- {mark}: {command} -->"));
    let (head, rest) = document.split_once(&begin)?;
    let (_, tail) = rest.split_once(&end)?;
    Some(format!("{head}{begin}\n\n{text}\n{end}{tail}"))
}
