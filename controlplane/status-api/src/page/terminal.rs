//! Text with the colours of a terminal, as markup: the words of `kpctl` on a sheet.

use kplane_view::View;
use kplane_view::style::{Canvas, Tone};

use super::html::{Html, class, query};

/// Columns of text on a sheet.
const COLUMNS: usize = 110;

/// The place where views are shown.
const CANVAS: Canvas = Canvas {
    columns: COLUMNS,
    wide: false,
    all: false,
    headers: true,
    unicode: true,
    program: "kpctl",
};

/// Returns a view as `kpctl` prints it.
pub(super) fn pre(view: &impl View) -> Html {
    on(&CANVAS, view)
}

/// Returns a view as `kpctl -o wide` prints it.
pub(super) fn wide(view: &impl View) -> Html {
    let canvas = Canvas {
        wide: true,
        ..CANVAS
    };
    on(&canvas, view)
}

fn on(canvas: &Canvas, view: &impl View) -> Html {
    let mut html = Html::default();
    // Wide text is scrolled, for which it must be reachable by keyboard.
    html.raw("<pre tabindex=\"0\">");
    paint(&view.text(canvas), &mut html);
    html.raw("</pre>");
    html
}

/// Turns the colours of text into spans, and the codes of reasons into links.
fn paint(text: &str, html: &mut Html) {
    let mut tone = Tone::Plain;
    let mut pieces = text.split('\u{1b}');
    words(pieces.next().unwrap_or_default(), tone, html);
    for piece in pieces {
        // Views make no other sequences, and texts from outside have no control characters.
        let Some((codes, rest)) = piece.strip_prefix('[').and_then(|piece| piece.split_once('m'))
        else {
            continue;
        };
        tone = of_codes(codes);
        words(rest, tone, html);
    }
}

fn of_codes(codes: &str) -> Tone {
    match codes {
        "32" => Tone::Good,
        "33" => Tone::Warn,
        "31" => Tone::Bad,
        "2" => Tone::Faint,
        "1" => Tone::Strong,
        _ => Tone::Plain,
    }
}

fn words(text: &str, tone: Tone, html: &mut Html) {
    if text.is_empty() {
        return;
    }
    match class(tone) {
        "" => linked(text, html),
        class => {
            html.raw("<span class=\"").raw(class).raw("\">");
            linked(text, html);
            html.raw("</span>");
        }
    }
}

/// Adds text in which each code of a reason is a link to its explanation.
fn linked(text: &str, html: &mut Html) {
    for word in text.split_inclusive(|c: char| !c.is_ascii_alphanumeric()) {
        let code = word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
        super::reasons::name(code, html);
        html.text(&word[code.len()..]);
    }
}

/// Returns the link to a node's sheet.
pub(super) fn node(name: &str) -> String {
    format!("node?name={}", query(name))
}

/// Adds links to the sheets of nodes.
pub(super) fn nodes<'a>(names: impl Iterator<Item = &'a String>, html: &mut Html) {
    for (place, name) in names.enumerate() {
        html.raw(if place > 0 { ", " } else { "" });
        html.link(node(name), name);
    }
}

/// Returns the link to a Service's sheet.
pub(super) fn service(namespace: &str, name: &str) -> String {
    format!(
        "service?namespace={}&name={}",
        query(namespace),
        query(name)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_become_classes_and_codes_become_links() {
        let mut html = Html::default();
        paint("a \u{1b}[31mError\u{1b}[0m Headless <b>", &mut html);
        let wanted = "a <span class=\"bad\">Error</span> <a href=\"reasons#headless\">Headless</a> &lt;b&gt;";
        assert_eq!(html.as_str(), wanted);
    }

    #[test]
    fn every_tone_is_read_back() {
        for tone in [
            Tone::Plain,
            Tone::Good,
            Tone::Warn,
            Tone::Bad,
            Tone::Faint,
            Tone::Strong,
        ] {
            let mut html = Html::default();
            paint(&tone.paint("a"), &mut html);
            let wanted = match class(tone) {
                "" => "a".to_owned(),
                class => format!("<span class=\"{class}\">a</span>"),
            };
            assert_eq!(html.as_str(), wanted);
        }
    }

    #[test]
    fn a_broken_sequence_ends_nothing() {
        let mut html = Html::default();
        paint("a\u{1b}[3", &mut html);
        paint("\u{1b}", &mut html);
        assert_eq!(html.as_str(), "a");
    }
}
