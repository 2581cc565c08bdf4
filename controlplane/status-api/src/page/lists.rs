//! Lists of nodes and of Services.

use std::time::Duration;

use clap::ValueEnum as _;
use kplane_proto::v1 as pb;
use kplane_view::nodes::state::NodeStateView;
use kplane_view::time::human;

use super::html::{Html, Section, class};
use super::sheet::{Filter, Sheet};
use super::{cards, reasons, strip, terminal};
use crate::findings::Remarks;

/// Returns the state of this name.
pub(super) fn state_named(word: &str) -> Option<pb::NodeState> {
    let mut states = NodeStateView::value_variants().iter();
    let state = states.find(|state| state.word() == word)?;
    Some(state.wire())
}

/// Returns the sections of the sheet of nodes.
pub(super) fn nodes(filter: &Filter, fleet: pb::Fleet) -> Vec<Section> {
    let states = NodeStateView::value_variants().iter().map(|state| state.word());
    let mut form = Html::default();
    form.raw("<form method=\"get\" action=\"nodes\" role=\"search\"><label>State <select name=\"state\"><option value=\"\">all</option>");
    for state in states {
        form.raw("<option");
        if state == filter.of {
            form.raw(" selected");
        }
        form.raw(">").text(state).raw("</option>");
    }
    form.raw("</select></label> <label>Name <input name=\"name\"")
        .attribute("value", &filter.name)
        .raw("></label> <button>Show</button></form>");
    let mut html = Html::default();
    html.begin_table(&[
        "Node",
        "State",
        "Zone",
        "Backend",
        "#Applied",
        "#Verified",
        "#Change p50",
        "Agent",
        "Trouble",
    ]);
    for node in &fleet.nodes {
        row(node, &mut html);
    }
    html.end_table();
    if fleet.nodes.is_empty() {
        html.element("p", "", "No node is like that.");
    }
    let sheet = |after| {
        Sheet::Nodes(Filter {
            after,
            ..filter.clone()
        })
    };
    further(sheet, fleet.next_page_token, &mut html);
    vec![
        Section::new("filter", "Filter", form),
        Section::new("list", "Nodes", html),
    ]
}

fn row(node: &pb::NodeStatus, html: &mut Html) {
    let state = NodeStateView::from(node.state());
    let report = node.report.as_ref();
    let here = if state == NodeStateView::Disconnected { None } else { report };
    let remarks = here.map(Remarks::of).unwrap_or_default();
    html.begin_row()
        .begin_name()
        .link(terminal::node(&node.name), &node.name)
        .raw("</th>")
        .cell(class(strip::tone(state, &remarks)), state.word())
        .cell("", &node.zone)
        .cell("", &node.backend);
    let applied = report.map_or(0, |report| report.applied_revision);
    let text = match applied {
        0 => "-".to_owned(),
        applied if applied < node.wanted_revision => format!("{applied}/{}", node.wanted_revision),
        applied => applied.to_string(),
    };
    html.cell("number", text);
    let verified = report.map_or(0, |report| report.verified_revision);
    html.cell(
        "number",
        match verified {
            0 => "-".to_owned(),
            verified => verified.to_string(),
        },
    );
    let latency = node.network_programming.as_ref().filter(|latency| latency.count > 0);
    let latency = latency.map_or_else(
        || "-".to_owned(),
        |latency| human(Duration::from_millis(latency.p50_ms)),
    );
    html.cell("number", latency)
        .cell("", &node.agent_version)
        .begin_cell("")
        .text(&node.last_error);
    for code in &remarks.codes {
        html.raw(" ");
        reasons::name(code, html);
    }
    html.raw("</td></tr>");
}

/// Returns the sections of the sheet of Services.
pub(super) fn services(filter: &Filter, page: pb::ListServicesResponse) -> Vec<Section> {
    let mut html = Html::default();
    html.begin_table(&[
        "Service",
        "Port",
        "Cluster address",
        "External",
        "#Node port",
        "#Ready",
        "#Endpoints",
        "Finding",
    ]);
    for port in &page.services {
        port_row(port, &mut html);
    }
    html.end_table();
    if page.services.is_empty() {
        html.element("p", "", "No Service is like that.");
    }
    let sheet = |after| {
        Sheet::Services(Filter {
            after,
            ..filter.clone()
        })
    };
    further(sheet, page.next_page_token, &mut html);
    let all = Filter {
        after: String::new(),
        bad: !filter.bad,
        ..filter.clone()
    };
    let other = if filter.bad { "All Services" } else { "Only those with a finding" };
    let mut form = by_namespace(filter, "services", "Name");
    form.html.raw("<p>").link(Sheet::Services(all).address(), other).raw("</p>");
    vec![form, Section::new("list", "Services", html)]
}

/// Returns the form of a sheet about Services of a namespace, or of a name.
pub(super) fn by_namespace(filter: &Filter, sheet: &'static str, name: &'static str) -> Section {
    let mut form = Html::default();
    form.raw("<form method=\"get\" role=\"search\"")
        .attribute("action", sheet)
        .raw("><label>Namespace <input name=\"namespace\"")
        .attribute("value", &filter.of)
        .raw("></label> <label>")
        .raw(name)
        .raw(" <input name=\"name\"")
        .attribute("value", &filter.name)
        .raw("></label>");
    if filter.bad {
        form.raw("<input type=\"hidden\" name=\"bad\" value=\"yes\">");
    }
    form.raw(" <button>Show</button></form>");
    Section::new("filter", "Filter", form)
}

fn port_row(port: &pb::ServiceView, html: &mut Html) {
    let key = port.key.clone().unwrap_or_default();
    html.begin_row()
        .begin_name()
        .link(
            terminal::service(&key.namespace, &key.name),
            format_args!("{}/{}", key.namespace, key.name),
        )
        .raw("</th>");
    let protocol = kplane_view::protocol(key.protocol());
    html.cell(
        "",
        format_args!("{} {}/{protocol}", key.port_name, port.port),
    )
    .cell("", &port.cluster_ip);
    let external: Vec<&str> = port
        .load_balancer_ips
        .iter()
        .chain(&port.external_ips)
        .map(String::as_str)
        .collect();
    html.cell("", external.join(", "));
    html.cell(
        "number",
        match port.node_port {
            0 => String::new(),
            number => number.to_string(),
        },
    );
    let ready = port.endpoints.iter().filter(|endpoint| endpoint.ready).count();
    let tone = match ready {
        0 => "number bad",
        _ => "number",
    };
    html.cell(tone, ready).cell("number", port.endpoints.len());
    match &port.finding {
        Some(finding) => {
            html.begin_cell(cards::severity(finding.severity()).0);
            reasons::name(&finding.code, html);
            html.raw("</td></tr>");
        }
        None => {
            html.cell("", "").raw("</tr>");
        }
    }
}

/// Adds a link to the next page.
fn further(sheet: impl Fn(String) -> Sheet, token: String, html: &mut Html) {
    if !token.is_empty() {
        html.raw("<p>").link(sheet(token).address(), "Next page").raw("</p>");
    }
}
