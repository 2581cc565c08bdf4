//! HTML: the one place where text becomes markup, and the frame around every sheet.

use std::fmt::{self, Display, Write as _};
use std::sync::LazyLock;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kplane_model::is_hidden;
use kplane_view::style::Tone;
use kplane_view::time::Time;
use ring::digest::{SHA256, digest};

/// The style of all sheets.
const STYLE: &str = include_str!("page.css");
/// The script of all sheets.
const SCRIPT: &str = include_str!("page.js");

/// The policy that lets a browser run and show nothing but these two, whatever gets into a sheet.
pub(super) static POLICY: LazyLock<String> = LazyLock::new(|| {
    format!(
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; img-src data:; form-action 'self'; \
         base-uri 'none'; frame-ancestors 'none'",
        hash(STYLE),
        hash(SCRIPT)
    )
});

fn hash(text: &str) -> String {
    BASE64_STANDARD.encode(digest(&SHA256, text.as_bytes()))
}

/// Number of characters of a cluster's identity that a title has.
const SHORT: usize = 8;

/// Text that is shown as it is, whatever characters it has.
pub(super) struct Escaped<'a>(pub(super) &'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '<' => f.write_str("&lt;"),
                '>' => f.write_str("&gt;"),
                '&' => f.write_str("&amp;"),
                '"' => f.write_str("&quot;"),
                '\'' => f.write_str("&#39;"),
                '\n' | '\t' => f.write_char(c),
                // As in a terminal: text must not reorder what is around it.
                c if is_hidden(c) => f.write_char('?'),
                c => f.write_char(c),
            }?;
        }
        Ok(())
    }
}

/// Markup. Text gets into it through [`Html::text`] and the methods that say so, and is escaped there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Html {
    markup: String,
    /// The columns of the table that has begun.
    columns: &'static [&'static str],
    /// The column of its next cell.
    column: usize,
}

impl Html {
    /// Adds markup that is written in this program.
    pub(super) fn raw(&mut self, markup: &'static str) -> &mut Self {
        self.markup.push_str(markup);
        self
    }

    /// Adds text.
    pub(super) fn text(&mut self, text: impl Display) -> &mut Self {
        // Writing to a string cannot fail.
        let _ = write!(self.markup, "{}", Escaped(&text.to_string()));
        self
    }

    /// Adds other markup.
    pub(super) fn push(&mut self, other: &Self) -> &mut Self {
        self.markup.push_str(&other.markup);
        self
    }

    /// Adds an element with text, and a class if that is not empty.
    pub(super) fn element(
        &mut self,
        name: &'static str,
        class: &'static str,
        text: impl Display,
    ) -> &mut Self {
        self.raw("<").raw(name);
        if !class.is_empty() {
            self.raw(" class=\"").raw(class).raw("\"");
        }
        self.raw(">").text(text).raw("</").raw(name).raw(">")
    }

    /// Adds the beginning of a table, whose rows are cards where it is too wide. Columns whose titles begin with `#` have
    /// numbers.
    pub(super) fn begin_table(&mut self, columns: &'static [&'static str]) -> &mut Self {
        self.columns = columns;
        self.raw("<div class=\"scroll\" tabindex=\"0\"><table class=\"rows\"><thead><tr>");
        for column in columns {
            match column.strip_prefix('#') {
                Some(title) => self.raw("<th scope=\"col\" class=\"number\">").text(title),
                None => self.raw("<th scope=\"col\">").text(column),
            };
            self.raw("</th>");
        }
        self.raw("</tr></thead><tbody>")
    }

    /// Adds the beginning of a row of a table.
    pub(super) fn begin_row(&mut self) -> &mut Self {
        self.column = 0;
        self.raw("<tr>")
    }

    /// Adds the beginning of the next cell of a row, with the name of its column, which a card shows.
    pub(super) fn begin_cell(&mut self, class: &'static str) -> &mut Self {
        let title = self.columns.get(self.column).copied();
        self.column += 1;
        self.raw("<td");
        if !class.is_empty() {
            self.attribute("class", class);
        }
        let title = title.unwrap_or_default();
        self.attribute("data-of", title.trim_start_matches('#')).raw(">")
    }

    /// Adds a cell with text.
    pub(super) fn cell(&mut self, class: &'static str, text: impl Display) -> &mut Self {
        self.begin_cell(class).text(text).raw("</td>")
    }

    /// Adds the beginning of the cell that names a row.
    pub(super) fn begin_name(&mut self) -> &mut Self {
        self.column += 1;
        self.raw("<th scope=\"row\">")
    }

    /// Adds the end of a table.
    pub(super) fn end_table(&mut self) -> &mut Self {
        self.raw("</tbody></table></div>")
    }

    /// Adds a link; `to` is relative, with parts that [`query`] has encoded.
    pub(super) fn link(&mut self, to: impl Display, text: impl Display) -> &mut Self {
        self.raw("<a href=\"").text(to).raw("\">").text(text).raw("</a>")
    }

    /// Adds an attribute's value; both quotation marks are written around it.
    pub(super) fn attribute(&mut self, name: &'static str, value: impl Display) -> &mut Self {
        self.raw(" ").raw(name).raw("=\"").text(value).raw("\"")
    }

    /// Adds markup that another program made of text of this program.
    pub(super) fn trusted(&mut self, markup: &str) -> &mut Self {
        self.markup.push_str(markup);
        self
    }

    /// Returns the markup.
    pub(super) fn as_str(&self) -> &str {
        &self.markup
    }
}

/// Returns a value for the query of a link.
pub(super) fn query(value: &str) -> String {
    form_urlencoded::byte_serialize(value.as_bytes()).collect()
}

/// Returns the class of text in a tone.
pub(super) fn class(tone: Tone) -> &'static str {
    match tone {
        Tone::Plain => "",
        Tone::Good => "good",
        Tone::Warn => "warn",
        Tone::Bad => "bad",
        Tone::Faint => "faint",
        Tone::Strong => "strong",
    }
}

/// A part of a sheet that changes as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Section {
    /// Its id in the document.
    pub(super) id: &'static str,
    /// Its name for screen readers.
    pub(super) label: &'static str,
    /// Whether screen readers read changes of it.
    pub(super) polite: bool,
    pub(super) html: Html,
}

impl Section {
    pub(super) fn new(id: &'static str, label: &'static str, html: Html) -> Self {
        Self {
            id,
            label,
            polite: false,
            html,
        }
    }
}

/// Where the answers come from, and when.
#[derive(Clone, Copy, Default)]
pub(super) struct Origin<'a> {
    /// The name that people gave the cluster; empty = none.
    pub(super) name: &'a str,
    /// The cluster's identity; empty = not known.
    pub(super) cluster: &'a str,
    /// The Node on which the replica runs; empty = not known.
    pub(super) replica: &'a str,
    /// The time, in milliseconds since 1970; 0 = not known.
    pub(super) now_ms: u64,
}

impl Origin<'_> {
    /// Returns the cluster's name, or else the first characters of its identity, which tell it from others.
    fn short(&self) -> &str {
        if !self.name.is_empty() {
            return self.name;
        }
        let end = self.cluster.floor_char_boundary(SHORT);
        &self.cluster[..end]
    }

    fn html(&self, html: &mut Html) {
        html.raw("<p class=\"faint place\">");
        if !self.short().is_empty() {
            html.raw("cluster <span")
                .attribute("title", self.cluster)
                .raw(">")
                .text(self.short())
                .raw("</span>");
        }
        if !self.replica.is_empty() {
            html.text(format_args!(", replica on {}", self.replica));
        }
        if let Some(time) = Time::from_wire(self.now_ms / 1000 * 1000) {
            html.text(format_args!(", loaded {}", time));
        }
        html.raw("</p>");
    }
}

/// A whole document.
pub(super) struct Document<'a> {
    /// What the sheet is about.
    pub(super) title: &'a str,
    pub(super) origin: Origin<'a>,
    /// The sheet in the navigation that it belongs to.
    pub(super) current: &'static str,
    pub(super) sections: &'a [Section],
    /// The command that shows the same.
    pub(super) command: Option<&'a str>,
    /// Where changes are announced; `None` = the sheet does not change.
    pub(super) live: Option<&'a str>,
}

/// The sheets in the navigation: where they are, and their names.
const SHEETS: [(&str, &str); 6] = [
    ("fleet", "Fleet"),
    ("nodes", "Nodes"),
    ("services", "Services"),
    ("map", "Map"),
    ("changes", "Changes"),
    ("reasons", "Reasons"),
];

impl Document<'_> {
    pub(super) fn html(&self) -> Html {
        let mut html = Html::default();
        html.raw("<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">")
            .raw("<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">")
            .raw("<meta name=\"color-scheme\" content=\"light dark\">")
            .raw("<link rel=\"icon\" href=\"data:,\"><title>")
            .text(self.title)
            .raw(" - ")
            .text(self.origin.short())
            .raw(" kplane</title><style>")
            .raw(STYLE)
            .raw("</style></head><body><a class=\"skip\" href=\"#main\">Skip to the content</a>")
            .raw("<header><span class=\"brand\">kplane</span><nav aria-label=\"Sheets\"><ul>");
        for (to, name) in SHEETS {
            html.raw("<li><a");
            if to == self.current {
                html.raw(" aria-current=\"page\"");
            }
            html.attribute("href", to).raw(">").text(name).raw("</a></li>");
        }
        html.raw("</ul></nav>");
        self.origin.html(&mut html);
        html.raw("<p id=\"live\" class=\"faint\" role=\"status\"></p></header><main id=\"main\" tabindex=\"-1\"");
        if let Some(live) = self.live {
            html.attribute("data-live", live);
        }
        html.raw("><h1>").text(self.title).raw("</h1>");
        for section in self.sections {
            html.raw("<section")
                .attribute("id", section.id)
                .attribute("aria-label", section.label);
            if section.polite {
                html.raw(" aria-live=\"polite\"");
            }
            html.raw(">").push(&section.html).raw("</section>");
        }
        html.raw("</main><footer>");
        if let Some(command) = self.command {
            html.raw("<p>The same in a terminal: <code>").text(command).raw("</code></p>");
        }
        html.raw("</footer><script>").raw(SCRIPT).raw("</script></body></html>");
        html
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_gets_out_of_its_place() {
        let hostile = "\"'><script>alert(1)</script>&\u{202e}\u{1b}\u{9b}";
        let mut html = Html::default();
        html.element("td", "bad", hostile)
            .link(format_args!("node?name={}", query(hostile)), hostile)
            .attribute("title", hostile);
        let text = html.as_str().replace("<td class=\"bad\">", "").replace("</td>", "");
        assert!(
            !text.contains("<script") && !text.contains(['\u{202e}', '\u{1b}', '\u{9b}']),
            "{text}"
        );
        assert_eq!(text.matches('<').count(), 2, "only the link: {text}");
        let document = Document {
            title: hostile,
            origin: Origin {
                name: "",
                cluster: hostile,
                replica: hostile,
                now_ms: 1,
            },
            current: "fleet",
            sections: &[],
            command: Some(hostile),
            live: Some(hostile),
        };
        let html = document.html();
        assert_eq!(html.as_str().matches("<script").count(), 1);
    }

    #[test]
    fn the_policy_names_style_and_script() {
        assert!(POLICY.contains("default-src 'none'"));
        assert!(POLICY.contains(&hash(STYLE)) && POLICY.contains(&hash(SCRIPT)));
        assert!(!POLICY.contains("unsafe"));
        // The hash is of exactly what is between the tags.
        assert!(!STYLE.contains("</") && !SCRIPT.contains("</"));
    }
}
