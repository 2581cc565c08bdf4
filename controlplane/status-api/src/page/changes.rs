//! What the control plane noticed, the newest first. Events of a kind that follow each other are folded.

use kplane_proto::v1 as pb;
use kplane_view::style::Tone;
use kplane_view::time::Time;

use super::html::{Html, Section, class};
use super::terminal;

/// Objects that the line above folded events names.
const NAMED: usize = 3;

/// Returns the tone of a kind of events.
fn tone(kind: &str) -> Tone {
    match kind {
        "NodeLost" | "NodeSuspected" | "NodeDead" | "NodeFailing" | "ProblemAppeared" | "Held" => {
            Tone::Bad
        }
        "NodeRecovered" | "NodeReached" | "ProblemGone" | "Released" => Tone::Good,
        "Repaired" => Tone::Warn,
        _ => Tone::Plain,
    }
}

/// Returns the section of events.
pub(super) fn section(list: &pb::NoticedList) -> Section {
    let mut html = Html::default();
    html.element("h2", "", "Events of this replica");
    let newest: Vec<&pb::Noticed> = list.events.iter().rev().collect();
    for run in newest.chunk_by(|a, b| a.kind == b.kind) {
        match run {
            [one] => line(one, &mut html),
            run => folded(run, &mut html),
        }
    }
    let since = Time::from_wire(list.since_ms).map_or_else(|| "?".to_owned(), Time::local);
    html.element("p", "faint", format_args!("The record begins at {since}."));
    Section::new("events", "Events", html)
}

/// Adds several events of one kind, of which there is at least one.
fn folded(run: &[&pb::Noticed], html: &mut Html) {
    html.raw("<details><summary>");
    moment(run[0], html);
    html.text(format_args!(" {} times: ", run.len()));
    for (place, event) in run.iter().take(NAMED).enumerate() {
        html.raw(if place > 0 { ", " } else { "" });
        html.text(short(&event.object));
    }
    html.raw(if run.len() > NAMED { ", .." } else { "" }).raw("</summary>");
    run.iter().for_each(|event| line(event, html));
    html.raw("</details>");
}

/// Adds when, and what.
fn moment(event: &pb::Noticed, html: &mut Html) {
    let at = Time::from_wire(event.at_ms).map_or_else(|| "?".to_owned(), Time::local);
    html.element("span", "faint", at).raw(" ").element(
        "strong",
        class(tone(&event.kind)),
        &event.kind,
    );
}

fn line(event: &pb::Noticed, html: &mut Html) {
    html.raw("<p class=\"event\">");
    moment(event, html);
    html.raw(" ");
    let object = event.object.as_str();
    let parts: Vec<&str> = object.split('/').collect();
    match parts[..] {
        ["Node", name] => html.link(terminal::node(name), name),
        ["Service", namespace, name] => {
            html.link(terminal::service(namespace, name), short(object))
        }
        _ => html.text(object),
    };
    html.raw(" ").text(&event.text).raw("</p>");
}

/// Returns an object's name without its kind.
fn short(object: &str) -> &str {
    object.split_once('/').map_or(object, |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(number: u64, kind: &str, object: &str) -> pb::Noticed {
        pb::Noticed {
            number,
            at_ms: 1_700_000_000_000 + number,
            kind: kind.to_owned(),
            object: object.to_owned(),
            text: format!("<{number}>"),
        }
    }

    #[test]
    fn the_newest_event_comes_first_and_those_of_a_kind_are_folded() {
        let events = vec![
            event(1, "Held", ""),
            event(2, "NodeLost", "Node/n1"),
            event(3, "NodeLost", "Node/n2"),
            event(4, "ProblemGone", "Service/shop/web"),
        ];
        let html = section(&pb::NoticedList {
            events,
            ..pb::NoticedList::default()
        })
        .html;
        let text = html.as_str();
        let places: Vec<usize> = [
            "ProblemGone",
            "2 times: n2, n1",
            "&lt;3&gt;",
            "&lt;2&gt;",
            "Held",
        ]
        .iter()
        .map(|word| text.find(word).unwrap_or_else(|| panic!("{word}: {text}")))
        .collect();
        assert!(places.is_sorted(), "{places:?}");
        assert!(
            text.contains("href=\"service?namespace=shop&amp;name=web\""),
            "{text}"
        );
        assert_eq!(text.matches("<details>").count(), 1);
    }
}
