//! Findings as cards: what is the matter, where, and what to do, to be copied.

use kplane_proto::v1 as pb;

use super::html::{Html, Section};
use super::{reasons, terminal};

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
            card(finding, &mut html);
        }
        html.raw("</div>");
        let more = findings.len().saturating_sub(CARDS);
        if more > 0 {
            html.element("p", "faint", format_args!("{more} more"));
        }
    }
    Section::new("findings", "Findings", html)
}

fn card(finding: &pb::Finding, html: &mut Html) {
    let (tone, word) = severity(finding.severity());
    html.raw("<article class=\"card ").raw(tone).raw("\"><h3>").text(word).raw(" ");
    reasons::name(&finding.code, html);
    html.raw("</h3>").element("p", "", &finding.text);
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
}
