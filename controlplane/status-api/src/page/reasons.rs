//! The explanations of reasons: `docs/reasons.md`, which is a part of this program.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use pulldown_cmark::{CowStr, Event, HeadingLevel, Options, Parser, Tag, TagEnd, html};

use super::html::Html;

const TEXT: &str = include_str!("../../../../docs/reasons.md");

static CODES: LazyLock<BTreeSet<&str>> = LazyLock::new(|| {
    TEXT.lines()
        .filter_map(|line| line.strip_prefix("### "))
        .map(str::trim)
        .collect()
});

static SHEET: LazyLock<Html> = LazyLock::new(render);

/// Adds a word, as a link to its explanation if it is the code of a reason.
pub(super) fn name(word: &str, html: &mut Html) {
    if is_code(word) {
        html.link(link(word), word)
    } else {
        html.text(word)
    };
}

/// Returns whether a word is the code of a reason.
fn is_code(word: &str) -> bool {
    CODES.contains(word)
}

/// Returns the link to a reason's explanation.
fn link(code: &str) -> String {
    format!("reasons#{}", code.to_ascii_lowercase())
}

/// Returns all explanations.
pub(super) fn sheet() -> &'static Html {
    &SHEET
}

/// Renders the page without its title. Links to other pages of the book lead nowhere here and become text.
fn render() -> Html {
    let mut in_title = false;
    let mut ids = headings();
    let events = Parser::new_ext(TEXT, Options::ENABLE_TABLES).filter_map(|event| match event {
        Event::Start(Tag::Heading {
            level: HeadingLevel::H1,
            ..
        }) => {
            in_title = true;
            None
        }
        Event::End(TagEnd::Heading(HeadingLevel::H1)) => {
            in_title = false;
            None
        }
        _ if in_title => None,
        Event::Start(Tag::Heading {
            level,
            classes,
            attrs,
            ..
        }) => Some(Event::Start(Tag::Heading {
            level,
            id: ids.next().map(CowStr::from),
            classes,
            attrs,
        })),
        Event::Start(Tag::Link { .. }) | Event::End(TagEnd::Link) => None,
        event => Some(event),
    });
    let mut text = String::new();
    html::push_html(&mut text, events);
    let mut sheet = Html::default();
    sheet.trusted(&text);
    sheet
}

/// Returns the anchors of all headings but the title, in their order.
fn headings() -> impl Iterator<Item = String> {
    TEXT.lines().filter_map(|line| {
        let heading = line.strip_prefix("## ").or_else(|| line.strip_prefix("### "))?;
        Some(heading.trim().to_ascii_lowercase().replace(' ', "-"))
    })
}

#[cfg(test)]
mod tests {
    use kplane_model::Reason;

    use super::*;

    #[test]
    fn every_reason_has_an_anchor() {
        let sheet = sheet().as_str();
        for reason in Reason::ALL {
            let code = reason.code();
            assert!(is_code(code), "{code}");
            let anchor = format!("id=\"{}\"", code.to_ascii_lowercase());
            assert!(sheet.contains(&anchor), "{code}");
        }
        assert!(
            !sheet.contains("<script") && !sheet.contains("<a "),
            "links lead out"
        );
    }
}
