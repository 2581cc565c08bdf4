//! A bundle: its file, and its parts.

use serde::Serialize;

use super::{API_VERSION, View};
use crate::style::{Canvas, Tone};
use crate::text::{Span, grouped, paragraph, plural};

/// The view of `kpctl bundle`, and `bundle.json` in the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BundleView {
    api_version: &'static str,
    kind: &'static str,
    /// Version of this program.
    kpctl_version: &'static str,
    pub(crate) file: String,
    /// The size of the file; `null` in the file itself.
    pub bytes: Option<usize>,
    /// Whether addresses are hashed.
    hashed: bool,
    /// The parts.
    pub parts: Vec<PartView>,
}

/// A part of a bundle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PartView {
    /// The name of the file in the bundle.
    pub name: String,
    /// The size before compression; `null` = the part is missing.
    pub bytes: Option<usize>,
    /// The reason why the part is missing.
    pub problem: Option<String>,
}

impl BundleView {
    /// Creates the view of a file without parts.
    pub fn new(file: String, hashed: bool) -> Self {
        Self {
            api_version: API_VERSION,
            kind: "Bundle",
            kpctl_version: env!("CARGO_PKG_VERSION"),
            file,
            bytes: None,
            hashed,
            parts: Vec::new(),
        }
    }

    /// Returns whether a part is missing.
    pub fn lacks_parts(&self) -> bool {
        self.parts.iter().any(|part| part.problem.is_some())
    }
}

impl View for BundleView {
    fn text(&self, canvas: &Canvas) -> String {
        let there = self.parts.iter().filter(|part| part.problem.is_none());
        let size = grouped(self.bytes.unwrap_or_default() as u64);
        let head = format!(
            "{}: {}, {size} bytes",
            self.file,
            plural(there.count(), "part")
        );
        let mut text = paragraph(&Span::new(head, Tone::Strong), canvas, 0);
        for part in &self.parts {
            if let Some(problem) = &part.problem {
                let line = format!("{} is missing: {problem}", part.name);
                text += &paragraph(&Span::new(line, Tone::Bad), canvas, 0);
            }
        }
        if !self.hashed {
            let hint = "It names Services, nodes and addresses: --hash-addresses hides addresses.";
            text += &paragraph(&Span::new(hint, Tone::Faint), canvas, 0);
        }
        text
    }
}
