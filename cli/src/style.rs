//! How text looks: tones, and what the place it is shown in can do.
//!
//! Views always colour; `output` removes colours where they do not belong.

use owo_colors::{OwoColorize, Style};

/// What a piece of text means to its reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Tone {
    /// Ordinary.
    #[default]
    Plain,
    /// As it should be.
    Good,
    /// Worth a look, or passing.
    Warn,
    /// Wrong.
    Bad,
    /// Of little interest.
    Faint,
    /// A heading.
    Strong,
}

impl Tone {
    /// The text in this tone.
    pub(crate) fn paint(self, text: &str) -> String {
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

/// What text is drawn on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Canvas {
    /// Columns that a line may take.
    pub(crate) columns: usize,
    /// Show everything, and let lines be as long as they are (`-o wide`).
    pub(crate) wide: bool,
    /// Unicode may be used; what users wrote is never changed for lack of it.
    pub(crate) unicode: bool,
    /// How the user calls this program: `kpctl` or `kubectl kplane`.
    pub(crate) program: &'static str,
}

impl Canvas {
    /// Stands for text that was left out.
    pub(crate) fn ellipsis(&self) -> &'static str {
        if self.unicode { "…" } else { ".." }
    }

    /// The same canvas with a margin on its left.
    pub(crate) fn inset(self, margin: usize) -> Self {
        Self {
            columns: self.columns.saturating_sub(margin),
            ..self
        }
    }
}
