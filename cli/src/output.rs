//! The only module that writes to standard output.

use std::io::{self, IsTerminal, Write};
use std::str::FromStr;
use std::time::{Duration, Instant};

use anstream::adapter::strip_str;
use anstream::{AutoStream, ColorChoice};
use unicode_width::UnicodeWidthStr;

use crate::columns::Columns;
use crate::jsonpath::Template;
use kplane_view::View;
use kplane_view::style::{Canvas, Tone};
use kplane_view::text::{Span, elide, paragraph, visible};

/// Width of a terminal that does not tell its size.
const DEFAULT_COLUMNS: usize = 80;

/// Least width of a table, even on narrower terminals.
const LEAST_COLUMNS: usize = 60;

/// Least time between two lines about progress in a log.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Moves the cursor to the upper left corner.
const HOME: &str = "\x1b[H";
/// Clears the rest of the line.
const CLEAR_LINE: &str = "\x1b[K";
/// Clears the rest of the screen.
const CLEAR_REST: &str = "\x1b[J";
/// Clears the screen.
const CLEAR_ALL: &str = "\x1b[2J";

/// The format of a result.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Format {
    /// As wide as the terminal; complete without one.
    Table,
    /// All columns, in lines of any length.
    Wide,
    /// One object; one object a line with --watch.
    Json,
    /// One document; more documents with --watch.
    Yaml,
    /// Names such as `node/node-1`, one a line.
    Name,
    /// A graph for Graphviz.
    Dot,
    /// A template with paths into the JSON.
    JsonPath(Template),
    /// A table of fields of the JSON.
    Columns(Columns),
}

/// The formats, as the user types them.
pub(crate) const FORMATS: [&str; 8] = [
    "table",
    "wide",
    "json",
    "yaml",
    "name",
    "dot",
    "custom-columns=",
    "jsonpath=",
];

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "table" => Self::Table,
            "wide" => Self::Wide,
            "json" => Self::Json,
            "yaml" => Self::Yaml,
            "name" => Self::Name,
            "dot" => Self::Dot,
            _ => match text.split_once('=') {
                Some(("jsonpath", template)) => Self::JsonPath(template.parse()?),
                Some(("custom-columns", columns)) => Self::Columns(columns.parse()?),
                _ => return Err(format!("expected {}TEMPLATE", FORMATS.join(", "))),
            },
        })
    }
}

/// What tables leave out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// List every row.
    pub(crate) all: bool,
    /// Show the titles of columns.
    pub(crate) headers: bool,
}

impl Default for Extent {
    fn default() -> Self {
        Self {
            all: false,
            headers: true,
        }
    }
}

/// The error of `-o name` where nothing has a name.
const NO_NAMES: &str = "the result is no list of names: use -o name with get and status";

/// The error for `-o dot` of views that are no graphs.
const NO_GRAPH: &str = "-o dot is for kpctl get graph; other results are no graphs";

/// A terminal's size, in columns and lines.
type Size = (usize, usize);

/// The destination of results.
pub(crate) struct Output<W> {
    writer: W,
    format: Format,
    extent: Extent,
    program: &'static str,
    /// Whether to write escape codes for colours.
    colour: bool,
    /// Returns the size of the terminal, if it can move its cursor.
    terminal: fn() -> Option<Size>,
    unicode: bool,
    /// Whether more results follow.
    watch: bool,
    /// The last result shown; empty at first.
    shown: String,
    /// The last trouble printed on stderr; empty when all is well.
    trouble: String,
}

impl Output<io::Stdout> {
    /// Creates an output to standard output.
    pub(crate) fn stdout(format: Format, program: &'static str, watch: bool) -> Self {
        let stdout = io::stdout();
        Self {
            format,
            extent: Extent::default(),
            program,
            colour: AutoStream::choice(&stdout) != ColorChoice::Never,
            terminal,
            unicode: terminal().is_some() && utf8_locale(),
            watch,
            shown: String::new(),
            trouble: String::new(),
            writer: stdout,
        }
    }
}

impl Output<io::Stderr> {
    /// Creates an output of tables to standard error, for the user at the terminal.
    pub(crate) fn stderr(program: &'static str) -> Self {
        let stderr = io::stderr();
        Self {
            format: Format::Table,
            extent: Extent::default(),
            program,
            colour: AutoStream::choice(&stderr) != ColorChoice::Never,
            terminal,
            unicode: false,
            watch: false,
            shown: String::new(),
            trouble: String::new(),
            writer: stderr,
        }
    }
}

/// Returns the size of the terminal behind standard output, if there is one that can do more than
/// print.
fn terminal() -> Option<Size> {
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    if dumb || !io::stdout().is_terminal() {
        return None;
    }
    let size = terminal_size::terminal_size_of(io::stdout());
    Some(
        size.map(|(width, height)| (width.0.into(), height.0.into()))
            .unwrap_or((DEFAULT_COLUMNS, usize::MAX)),
    )
}

/// Returns whether the locale uses UTF-8. As in the C library, the first variable that is set
/// decides.
fn utf8_locale() -> bool {
    let names = ["LC_ALL", "LC_CTYPE", "LANG"];
    let mut values = names.iter().filter_map(|name| std::env::var(name).ok());
    let locale = values.find(|value| !value.is_empty()).unwrap_or_default().to_ascii_lowercase();
    locale.contains("utf-8") || locale.contains("utf8")
}

impl<W: Write> Output<W> {
    /// Sets what tables leave out.
    pub(crate) fn with(self, extent: Extent) -> Self {
        Self { extent, ..self }
    }

    /// Sets what the next tables leave out.
    pub(crate) fn set(&mut self, extent: Extent) {
        self.extent = extent;
    }

    /// Returns whether each result is drawn over the previous one.
    pub(crate) fn redraws(&self) -> bool {
        self.watch && self.is_table() && (self.terminal)().is_some()
    }

    fn is_table(&self) -> bool {
        matches!(self.format, Format::Table | Format::Wide)
    }

    /// Shows a result, over the previous one or after it.
    pub(crate) fn show<V: View>(&mut self, view: &V) -> io::Result<()> {
        let text = self.render(view)?;
        if self.redraws() {
            self.draw(&text)?;
        } else {
            if self.watch && self.is_table() && !self.shown.is_empty() {
                self.writer.write_all(b"\n")?;
            }
            self.writer.write_all(text.as_bytes())?;
        }
        self.shown = text;
        self.trouble.clear();
        self.writer.flush()
    }

    /// Reports that the shown result is out of date, and why: above the result, or once on stderr.
    pub(crate) fn show_trouble(&mut self, trouble: &str) -> io::Result<()> {
        let span = Span::new(format!("error: {trouble}; trying again"), Tone::Bad);
        if self.redraws() {
            let text = self.finish(paragraph(&span, &self.canvas(), 0));
            return self.draw(&format!("{text}\n{}", self.shown));
        }
        if self.trouble != span.text {
            anstream::eprintln!("{}", span.text);
            self.trouble = span.text;
        }
        Ok(())
    }

    fn canvas(&self) -> Canvas {
        let columns = (self.terminal)().map(|(columns, _)| columns.max(LEAST_COLUMNS));
        let wide = self.format == Format::Wide;
        Canvas {
            // Programs and files get whole lines: a name that is cut names nothing.
            columns: columns.unwrap_or(usize::MAX),
            wide,
            all: self.extent.all || wide,
            headers: self.extent.headers,
            unicode: self.unicode,
            program: self.program,
        }
    }

    /// Returns the result as the text to write.
    fn render<V: View>(&self, view: &V) -> io::Result<String> {
        let text = match &self.format {
            Format::Table | Format::Wide => return Ok(self.finish(view.text(&self.canvas()))),
            Format::Json if self.watch => serde_json::to_string(view)? + "\n",
            Format::Json => serde_json::to_string_pretty(view)? + "\n",
            Format::Yaml => {
                let separator = if self.watch { "---\n" } else { "" };
                let yaml = serde_saphyr::to_string(view).map_err(io::Error::other)?;
                format!("{separator}{}\n", yaml.trim_end())
            }
            Format::Name => match view.names() {
                Some(names) => names.iter().map(|name| format!("{name}\n")).collect(),
                None => return Err(io::Error::other(NO_NAMES)),
            },
            Format::Dot => view.dot().ok_or_else(|| io::Error::other(NO_GRAPH))?,
            Format::JsonPath(template) => template.fill(&serde_json::to_value(view)?),
            Format::Columns(columns) => {
                columns.table(&serde_json::to_value(view)?, self.extent.headers)
            }
        };
        // The same terminal shows what programs read.
        Ok(visible(text))
    }

    /// Removes colours if the output should have none.
    fn finish(&self, text: String) -> String {
        if self.colour { text } else { strip_str(&text).to_string() }
    }

    /// Draws over the content of the screen, without flicker, and no more than fits.
    fn draw(&mut self, text: &str) -> io::Result<()> {
        let (columns, height) = (self.terminal)().unwrap_or((DEFAULT_COLUMNS, usize::MAX));
        let (all, fits) = fitting(text, columns, height);
        let mut frame = String::from(if self.shown.is_empty() { CLEAR_ALL } else { "" });
        frame.push_str(HOME);
        for line in text.lines().take(fits) {
            frame.push_str(line);
            frame.push_str(CLEAR_LINE);
            frame.push('\n');
        }
        if fits < all {
            let more = format!("{} more lines: make the terminal higher", all - fits);
            frame.push_str(&self.finish(Tone::Faint.paint(&more)));
        }
        frame.push_str(CLEAR_REST);
        self.writer.write_all(frame.as_bytes())?;
        self.writer.flush()
    }
}

/// Returns the number of lines, and how many of them fit on a screen with the cursor below them.
/// The terminal breaks lines that are too wide. If not all fit, one more line is kept free.
fn fitting(text: &str, columns: usize, height: usize) -> (usize, usize) {
    let high = |line: &str| {
        let width = strip_str(line).to_string().width();
        width.div_ceil(columns.max(1)).max(1)
    };
    let ends: Vec<usize> = text
        .lines()
        .scan(0, |end, line| {
            *end += high(line);
            Some(*end)
        })
        .collect();
    let within = |room: usize| ends.iter().take_while(|end| **end <= room).count();
    match within(height.saturating_sub(1)) {
        all if all == ends.len() => (all, all),
        _ => (ends.len(), within(height.saturating_sub(2))),
    }
}

/// A line on standard error that is written over itself, for a user at a terminal. The line goes away with the value.
/// Elsewhere, such as in the log of a pipeline, a line comes now and then if it says something new.
pub(crate) struct Progress {
    columns: Option<usize>,
    shown: bool,
    /// The last line of a log, and its time.
    logged: Option<(Instant, String)>,
}

impl Progress {
    /// Creates the line.
    pub(crate) fn stderr() -> Self {
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let size = terminal_size::terminal_size_of(io::stderr());
        let columns = size.map_or(DEFAULT_COLUMNS, |(width, _)| width.0.into());
        Self {
            columns: (!dumb && io::stderr().is_terminal()).then_some(columns),
            shown: false,
            logged: None,
        }
    }

    /// Shows a text in place of the one before, or logs it.
    pub(crate) fn show(&mut self, text: &str) {
        if let Some(columns) = self.columns {
            let text = Span::plain(text).text;
            let text = elide(&text, columns.saturating_sub(1), "..");
            anstream::eprint!("\r{text}{CLEAR_LINE}");
            self.shown = true;
            return;
        }
        let last = self.logged.as_ref();
        if last.is_none_or(|(at, last)| last != text && at.elapsed() >= LOG_INTERVAL) {
            anstream::eprintln!("waiting: {}", Span::plain(text).text);
            self.logged = Some((Instant::now(), text.to_owned()));
        }
    }

    /// Removes the line.
    pub(crate) fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            anstream::eprint!("\r{CLEAR_LINE}");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests;
