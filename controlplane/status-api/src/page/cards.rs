//! Findings as cards: what is the matter, where, and what to do, to be copied.

use std::time::Duration;

use kplane_desired_state::k8s::Kind;
use kplane_model::ObjectRef;
use kplane_proto::v1 as pb;
use kplane_view::time::human;

use super::html::{Html, Section};
use super::{reasons, terminal};
use crate::findings::Broken;

/// Nodes that a card names.
const NAMED: usize = 8;

/// Returns the tone and the word of a severity.
pub(super) fn severity(of: pb::Severity) -> (&'static str, &'static str) {
    match of {
        pb::Severity::Error | pb::Severity::Unspecified => ("bad", "Error"),
        pb::Severity::Warning => ("warn", "Warning"),
        pb::Severity::Info => ("faint", "Info"),
    }
}

/// Most cards on a sheet.
const CARDS: usize = 50;

/// Returns the section with a card for each finding.
pub(super) fn section(findings: &[pb::Finding]) -> Section {
    let mut html = Html::default();
    if !findings.is_empty() {
        html.element("h2", "", "Findings").raw("<div class=\"cards\">");
        for finding in findings.iter().take(CARDS) {
            card(finding, None, &mut html);
        }
        html.raw("</div>");
        let more = findings.len().saturating_sub(CARDS);
        if more > 0 {
            html.element("p", "faint", format_args!("{more} more"));
        }
    }
    Section::new("findings", "Findings", html)
}

/// Cards of the worst findings on the sheet of the fleet.
const WORST: usize = 12;
/// Further findings there, as rows of a table.
const ROWS: usize = 50;

/// Returns the sections with what is broken, the worst first: cards, and a table of further findings. `more` is the number of
/// findings that are not in `found`.
pub(super) fn worst_first(found: &[Broken], more: u64, now_ms: u64) -> [Section; 2] {
    let (worst, further) = found.split_at(found.len().min(WORST));
    let mut cards = Html::default();
    if !worst.is_empty() {
        cards.element("h2", "", "What is broken").raw("<div class=\"cards\">");
        for broken in worst {
            card(&broken.finding, Some((broken, now_ms)), &mut cards);
        }
        cards.raw("</div>");
    }
    let mut table = Html::default();
    if !further.is_empty() {
        table.element("h2", "", "Further findings");
        table.begin_table(&["Reason", "Object", "Cause"]);
        for broken in further.iter().take(ROWS) {
            let (tone, _) = severity(broken.finding.severity());
            table.begin_row().begin_cell(tone);
            reasons::name(&broken.finding.code, &mut table);
            table.raw("</td>").begin_cell("");
            object(broken, &mut table);
            table.raw("</td>").cell("", &broken.finding.text).raw("</tr>");
        }
        table.end_table();
        let more = further.len().saturating_sub(ROWS) as u64 + more;
        if more > 0 {
            let text = format!("{more} more: kpctl get findings");
            table.element("p", "faint", text);
        }
    }
    [
        Section::new("findings", "What is broken", cards),
        Section::new("further", "Further findings", table),
    ]
}

/// Adds the name of an object, which leads to its sheet if it has one.
fn object(broken: &Broken, html: &mut Html) {
    let name = broken.object();
    let ObjectRef {
        kind,
        namespace,
        name: own,
    } = &broken.object;
    if kind == Kind::Service.as_str() {
        html.link(terminal::service(namespace, own), name);
    } else if kind == Kind::Node.as_str() && !own.is_empty() {
        html.link(terminal::node(own), name);
    } else {
        html.text(name);
    }
}

/// Adds a card; with its object and the time now if the sheet is about more than this object.
fn card(finding: &pb::Finding, of: Option<(&Broken, u64)>, html: &mut Html) {
    let (tone, word) = severity(finding.severity());
    html.raw("<article class=\"card ").raw(tone).raw("\"><h3>").text(word).raw(" ");
    reasons::name(&finding.code, html);
    html.raw("</h3>");
    if let Some((broken, now_ms)) = of {
        html.raw("<p>");
        object(broken, html);
        if broken.since_ms > 0 {
            let age = Duration::from_secs(now_ms.saturating_sub(broken.since_ms) / 1000);
            html.text(format_args!(", for {}", human(age)));
        }
        html.raw("</p>");
    }
    html.element("p", "", &finding.text);
    if !finding.nodes.is_empty() {
        html.raw("<p>on ");
        terminal::nodes(finding.nodes.iter().take(NAMED), html);
        let unnamed = finding.nodes.len().saturating_sub(NAMED) as u64;
        let more = unnamed + finding.nodes_omitted;
        if more > 0 {
            html.text(format_args!(" and {more} more"));
        }
        html.raw("</p>");
    }
    if !finding.fix.is_empty() {
        html.element("p", "faint", "What to do:").element("p", "fix", &finding.fix);
    }
    html.raw("</article>");
}

#[cfg(test)]
mod tests {
    use kplane_model::ServiceName;

    use super::*;

    #[test]
    fn a_card_names_cause_nodes_and_fix() {
        let finding = pb::Finding {
            code: "Headless".to_owned(),
            severity: pb::Severity::Warning.into(),
            text: "no address <b>".to_owned(),
            fix: "kpctl describe".to_owned(),
            nodes: (0..10).map(|number| format!("n{number}")).collect(),
            nodes_omitted: 5,
        };
        let section = section(&[finding]);
        let html = section.html.as_str();
        for part in [
            "card warn",
            "Warning <a href=\"reasons#headless\">Headless</a>",
            "no address &lt;b&gt;",
            "<a href=\"node?name=n7\">n7</a> and 7 more",
            "<p class=\"fix\">kpctl describe</p>",
        ] {
            assert!(html.contains(part), "{part}: {html}");
        }
        assert!(!html.contains("n8"));
        assert_eq!(super::section(&[]).html, Html::default());
    }

    #[test]
    fn the_worst_are_cards_and_the_others_rows() {
        let broken = |name: &str| {
            let finding = pb::Finding {
                code: "NoReadyEndpoint".to_owned(),
                severity: pb::Severity::Error.into(),
                text: "no <endpoint>".to_owned(),
                ..pb::Finding::default()
            };
            Broken::of_service(&ServiceName::new("shop", name), finding).since(1_000)
        };
        let found: Vec<_> = (0..WORST + ROWS + 2).map(|n| broken(&format!("s{n}"))).collect();
        let [cards, table] = worst_first(&found, 30, 121_000).map(|section| section.html);
        let (cards, table) = (cards.as_str(), table.as_str());
        let link = |n: usize| {
            format!("<a href=\"service?namespace=shop&amp;name=s{n}\">service/shop/s{n}</a>")
        };
        for part in [
            &*link(0),
            &link(WORST - 1),
            ", for 2m",
            "no &lt;endpoint&gt;",
        ] {
            assert!(cards.contains(part), "{part}: {cards}");
        }
        assert!(!cards.contains(&link(WORST)), "{cards}");
        for part in [
            &*link(WORST),
            &link(WORST + ROWS - 1),
            "32 more: kpctl get findings",
            "no &lt;endpoint&gt;",
        ] {
            assert!(table.contains(part), "{part}: {table}");
        }
        assert!(!table.contains(&link(WORST + ROWS)), "{table}");
        let nothing = worst_first(&[], 0, 0).map(|section| section.html);
        assert_eq!(nothing, [Html::default(), Html::default()]);
    }
}
