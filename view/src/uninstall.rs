//! The outcome of `kpctl uninstall`.

use serde::Serialize;

use super::{API_VERSION, View, next_steps_text};
use crate::style::{Canvas, Tone};
use crate::text::{Span, paragraph};

/// The view.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UninstallView {
    api_version: &'static str,
    kind: &'static str,
    /// What was removed.
    removed: Vec<String>,
    /// What is still there, and why.
    pub left: Vec<String>,
    /// Commands to type next.
    next: Vec<String>,
}

impl UninstallView {
    /// Builds the view.
    pub fn new(removed: Vec<String>, left: Vec<String>, next: Vec<String>) -> Self {
        Self {
            api_version: API_VERSION,
            kind: "Uninstall",
            removed,
            left,
            next,
        }
    }
}

impl View for UninstallView {
    fn text(&self, canvas: &Canvas) -> String {
        let line = |tone: Tone, verb: &str, what: &String| {
            paragraph(&Span::new(format!("{verb} {what}"), tone), canvas, 0)
        };
        let mut text = String::new();
        for what in &self.removed {
            text += &line(Tone::Plain, "removed", what);
        }
        if self.removed.is_empty() {
            text += &paragraph(&Span::plain("there was nothing to remove"), canvas, 0);
        }
        for what in &self.left {
            text += &line(Tone::Bad, "left:", what);
        }
        text + &next_steps_text(&self.next, canvas)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::table;

    #[test]
    fn what_is_left_is_named() {
        let some = |text: &str| vec![text.to_owned()];
        let view = UninstallView::new(
            some("rules of node-1"),
            some("node-2: not Ready"),
            some("helm uninstall kplane"),
        );
        let expected =
            "removed rules of node-1\nleft: node-2: not Ready\n\nNext\n  helm uninstall kplane\n";
        assert_eq!(table(&view), expected);
    }
}
