//! The overview of the fleet: numbers, what lags and why, and what is wrong with the input.

use std::collections::BTreeMap;
use std::time::Duration;

use kplane_proto::v1 as pb;
use kplane_view::nodes::state::NodeStateView;
use kplane_view::text::plural;
use kplane_view::time::{age, human};

use super::html::{Html, Section, class, query};
use super::terminal;
use crate::server::Overview;

/// Nodes with the same trouble that are named.
const NAMED: usize = 6;
/// Kinds of trouble on the sheet.
const ROWS: usize = 50;

/// Returns the sections of the sheet.
pub(super) fn sections(overview: &Overview) -> [Section; 3] {
    let mut summary = Section::new("summary", "Summary", summary(overview));
    summary.polite = true;
    [
        summary,
        Section::new("lagging", "What lags, and why", lagging(overview)),
        Section::new("facts", "Control plane", facts(overview)),
    ]
}

fn summary(overview: &Overview) -> Html {
    let nodes: usize = overview.states.values().sum();
    let in_sync = overview.count(pb::NodeState::InSync);
    let (remarked, errors) = overview.remarked();
    let mut html = Html::default();
    let tone = if in_sync == nodes && remarked == 0 { "good" } else { "warn" };
    html.raw("<p class=\"big\"><strong class=\"")
        .raw(tone)
        .raw("\">")
        .text(in_sync)
        .raw("</strong> of ")
        .text(plural(nodes, "node"))
        .raw(" in sync</p><ul class=\"states\">");
    let mut states: Vec<_> = overview.states.iter().filter(|(_, count)| **count > 0).collect();
    states.sort_by_key(|(state, _)| NodeStateView::from(**state).urgency());
    for (state, count) in states {
        let view = NodeStateView::from(*state);
        html.raw("<li><a")
            .attribute("class", class(view.tone()))
            .attribute("href", format_args!("nodes?state={}", query(view.word())))
            .raw("><strong>")
            .text(count)
            .raw("</strong> ")
            .text(view.word())
            .raw("</a></li>");
    }
    if remarked > 0 {
        let tone = if errors > 0 { "bad" } else { "warn" };
        html.raw("<li><a href=\"#findings\"")
            .attribute("class", tone)
            .raw("><strong>")
            .text(remarked)
            .raw("</strong> with findings</a></li>");
    }
    html.raw("</ul>");
    html
}

/// Nodes with the same trouble.
struct Group<'a> {
    state: NodeStateView,
    error: &'a str,
    nodes: Vec<&'a pb::NodeStatus>,
}

impl Group<'_> {
    /// Returns for how long the first of them has been in the state.
    fn since(&self, now_ms: u64) -> String {
        let since = self.nodes.iter().map(|node| node.since_ms);
        since
            .filter(|since| *since > 0)
            .min()
            .map(|since| now_ms.saturating_sub(since) / 1000)
            .map_or_else(String::new, |seconds| human(Duration::from_secs(seconds)))
    }
}

fn groups(overview: &Overview) -> Vec<Group<'_>> {
    let mut groups = BTreeMap::<(u8, &str), Group<'_>>::new();
    for node in &overview.out_of_sync {
        let state = NodeStateView::from(node.state());
        let error = node.last_error.as_str();
        let group = groups.entry((state.urgency(), error)).or_insert(Group {
            state,
            error,
            nodes: Vec::new(),
        });
        group.nodes.push(node);
    }
    groups.into_values().collect()
}

fn lagging(overview: &Overview) -> Html {
    let mut html = Html::default();
    html.element("h2", "", "What lags, and why");
    let groups = groups(overview);
    if groups.is_empty() {
        html.element("p", "", "Every node is in sync.");
        return html;
    }
    html.begin_table(&["State", "Since", "Nodes", "Why"]);
    for group in groups.iter().take(ROWS) {
        html.begin_row()
            .cell(class(group.state.tone()), group.state.word())
            .cell("", group.since(overview.control_plane.now_ms))
            .begin_cell("");
        if group.nodes.len() > NAMED {
            html.text(group.nodes.len()).raw(": ");
        }
        let named = group.nodes.iter().take(NAMED).map(|node| &node.name);
        terminal::nodes(named, &mut html);
        html.raw(if group.nodes.len() > NAMED { ", .." } else { "" });
        let why = match group.error {
            "" => "the kernel does not hold the newest state yet",
            error => error,
        };
        html.raw("</td>").cell("", why).raw("</tr>");
    }
    html.end_table();
    if overview.more > 0 {
        let more = plural(overview.more, "more node");
        html.element("p", "faint", format_args!("and {more} in these states"));
    }
    html
}

fn facts(overview: &Overview) -> Html {
    let plane = &overview.control_plane;
    let mut html = Html::default();
    html.element("h2", "", "Control plane").raw("<dl>");
    let mut fact = |name: &'static str, tone: &'static str, value: String| {
        html.element("dt", "", name).element("dd", tone, value);
    };
    let since = |ms: u64| human(Duration::from_secs(plane.now_ms.saturating_sub(ms) / 1000));
    fact("Version", "", plane.version.clone());
    fact("Up", "", since(plane.started_at_ms));
    let contact = Duration::from_millis(plane.upstream_age_ms);
    let tone = if contact > Duration::from_secs(30) { "warn" } else { "" };
    let source = format!("{}, last contact {} ago", plane.source, age(contact));
    fact("Source", tone, source);
    if !plane.synced {
        fact("Input", "warn", "not complete yet".to_owned());
    }
    if !plane.doubt.is_empty() {
        fact("Input", "warn", format!("incomplete: {}", plane.doubt));
    }
    if let Some(held) = &plane.held {
        let text = format!("{}: kpctl approve, if the source is complete", held.reason);
        fact("Held", "warn", text);
    }
    let revision = format!("{}, {} ago", plane.revision, since(plane.revision_at_ms));
    fact("Revision", "", revision);
    fact("Services", "", plane.services.to_string());
    fact("Endpoints", "", plane.endpoints.to_string());
    let (tone, policies) = policies(plane);
    fact("Policies", tone, policies);
    if overview.replicas > 0 {
        let missing = overview.missing.len();
        let tone = match missing {
            0 => "",
            _ => "bad",
        };
        let text = format!("{} answered, {missing} missing", overview.replicas);
        fact("Replicas", tone, text);
    }
    for replica in &overview.missing {
        let text = format!("{}: {}", replica.address, replica.reason);
        fact("Missing", "bad", text);
    }
    if !plane.plain_text_ports.is_empty() {
        let ports = plane.plain_text_ports.join(", ");
        fact(
            "Plain text",
            "bad",
            format!(
                "{ports}: any machine that reaches these ports can pose as any node or user (--insecure)"
            ),
        );
    }
    html.raw("</dl>");
    html
}

/// Returns the tone and the words for what nodes enforce of NetworkPolicies.
fn policies(plane: &pb::ControlPlaneStatus) -> (&'static str, String) {
    match plane.enforcement() {
        pb::Enforcement::Unspecified => ("", "not enforced, without --network-policy".to_owned()),
        pb::Enforcement::Off => ("", "not enforced, by --network-policy=off".to_owned()),
        pb::Enforcement::Unread => ("warn", "not read yet".to_owned()),
        pb::Enforcement::On if plane.cluster_policies_absent => (
            "",
            format!(
                "{}; no ClusterNetworkPolicies, whose definition (CRD) the API server does not have",
                plane.policies
            ),
        ),
        pb::Enforcement::On => ("", plane.policies.to_string()),
    }
}
