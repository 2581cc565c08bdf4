//! The style of text: tones, and the abilities of the place where text is shown.
//!
//! Views always use colours; `output` removes them where they do not belong.

use owo_colors::{OwoColorize, Style};

/// The meaning of a piece of text for its reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tone {
    /// Ordinary text.
    #[default]
    Plain,
    /// A good state.
    Good,
    /// A state that deserves attention, or that will pass.
    Warn,
    /// An error.
    Bad,
    /// Text of little interest.
    Faint,
    /// A heading.
    Strong,
}

impl Tone {
    /// Returns the text in this tone.
    pub fn paint(self, text: &str) -> String {
        let style = match self {
            Self::Plain => return text.to_owned(),
            Self::Good => Style::new().green(),
            Self::Warn => Style::new().yellow(),
            Self::Bad => Style::new().red(),
            Self::Faint => Style::new().dimmed(),
            Self::Strong => Style::new().bold(),
        };
        text.style(style).to_string()
    }
}

/// The properties of the place where text is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Canvas {
    /// The number of columns that a line may take.
    pub columns: usize,
    /// Whether to show everything, in lines of any length (`-o wide`).
    pub wide: bool,
    /// Whether to list every row, also those that are usually counted only (`--all`).
    pub all: bool,
    /// Whether tables have a line with titles.
    pub headers: bool,
    /// Whether Unicode may be used. Text of users is never changed for lack of it.
    pub unicode: bool,
    /// The name by which the user calls this program: `kpctl` or `kubectl kplane`.
    pub program: &'static str,
}

impl Canvas {
    /// Returns the mark for text that was left out.
    pub fn ellipsis(&self) -> &'static str {
        if self.unicode { "…" } else { ".." }
    }

    /// Returns the same canvas with a margin on its left.
    pub fn inset(self, margin: usize) -> Self {
        Self {
            columns: self.columns.saturating_sub(margin),
            ..self
        }
    }
}
