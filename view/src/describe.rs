//! One Service: its description, and what every node holds of it.

use std::collections::HashMap;

use kplane_proto::v1 as pb;

use super::convergence::ConvergenceView;
use super::endpoints::EndpointView;
use super::findings::{self, FindingView};
use super::fold::{self, Folded};
use super::proxied::ProxiedView;
use super::replicas::missing_text;
use super::servers::{self, ServiceServersView};
use super::services::{PortView, ServiceView, affinity};
use super::{IssueView, KeyView, View, issues_text, latency, next_steps_text, progress};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, field, long_field, paragraph};
use crate::time::Time;
use crate::wire::view_of;

view_of! {
    /// The endpoints of one port that new connections on one node may reach.
    pub struct NodePortView: NodeEndpoints {
        #[serde(flatten)]
        key: KeyView,
        /// The endpoints for policy Cluster.
        cluster: Vec<String>,
        /// The endpoints for policy Local.
        local: Vec<String>,
    }

    /// The state of the Service on one node.
    pub struct ServiceNodeView: NodeServiceStatus {
        node: String,
        programmed: bool,
        /// The reason why the Service is not programmed.
        reason: String,
        wanted_revision: u64,
        applied_revision: u64,
        endpoints: Vec<NodePortView>,
        /// The last change; `null` when none is remembered.
        last_change: Option<ChangeView>,
        /// The virtual servers; `null` for backends without them.
        ipvs: Option<ServiceServersView> = servers,
    }

    /// A change of the Service's endpoints that the node's kernel holds.
    pub struct ChangeView: ProgrammedChange {
        /// Time from the change in the cluster until the kernel held it.
        latency_milliseconds: u64 = latency_ms,
        time: Option<Time> = at_ms,
    }

    /// The view of `kpctl describe service`.
    pub struct DescriptionView: ServiceDescription as "ServiceDescription" {
        namespace: String = _,
        name: String = _,
        /// The Service; `null` when nothing of it is served.
        service: Option<ServiceView> = ports => |ports| ServiceView::group(ports).pop(),
        /// How far the newest state has come; `null` when the control plane does not tell.
        convergence: Option<ConvergenceView>,
        nodes: Vec<ServiceNodeView>,
        /// What the nodes' userspace proxies know; `null` unless the Service asks for them.
        proxied: Option<ProxiedView> = _,
        /// The reason why that is not known.
        proxied_error: Option<String> = _,
        /// Causes and fixes, the worst first.
        findings: Vec<FindingView>,
        issues: Vec<IssueView> => IssueView::list,
        /// The current time, for ages.
        #[serde(skip)]
        now: Option<Time> = now_ms,
    }
}

impl DescriptionView {
    /// Creates the view of a Service from the answer of the control plane.
    pub fn new(namespace: &str, name: &str, description: pb::ServiceDescription) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            ..description.into()
        }
    }

    /// Returns the virtual servers of the nodes that serve by IPVS.
    fn servers(&self) -> Vec<servers::OnNode<'_>> {
        self.nodes
            .iter()
            .filter_map(|node| Some((node.node.as_str(), node.ipvs.as_ref()?)))
            .collect()
    }

    /// Returns whether the Service asks for the userspace proxy.
    pub fn asks_for_proxy(&self) -> bool {
        self.service.iter().any(|service| service.data_path.is_some())
    }

    /// Adds what the nodes' userspace proxies know, or why that is not known.
    pub fn set_proxied(&mut self, proxied: Result<ProxiedView, String>) {
        match proxied {
            Ok(proxied) => self.proxied = Some(proxied),
            Err(reason) => self.proxied_error = Some(reason),
        }
    }

    /// Returns what the proxies know, below the field that says how the Service asks for them.
    fn proxied(&self, canvas: &Canvas) -> String {
        let mut out = String::new();
        if let Some(proxied) = &self.proxied {
            out.push_str(&field("Proxies", &[proxied.summary()], canvas));
            out.push_str(&proxied.avoided_text(canvas));
        }
        if let Some(reason) = &self.proxied_error {
            let service = format!("{}/{}", self.namespace, self.name);
            let text = format!(
                "not known: {reason}; try `{} get proxied {service}`",
                canvas.program
            );
            let unknown = Span::new(text, Tone::Warn);
            out.push_str(&field("Proxies", &[unknown], canvas));
        }
        out
    }

    fn programmed(&self) -> usize {
        self.nodes.iter().filter(|node| node.programmed).count()
    }

    fn header(&self, canvas: &Canvas) -> String {
        let title = Span::plain(format!("{}/{}", self.namespace, self.name));
        let mut out = field("Service", &[title], canvas);
        if let Some(service) = &self.service {
            out.push_str(&facts(service, canvas));
            out.push_str(&self.proxied(canvas));
        } else {
            let nothing = Span::new("none is served", Tone::Warn);
            out.push_str(&field("Ports", &[nothing], canvas));
        }
        out.push_str(&self.summary(canvas));
        out.push_str(&field("IPVS", &servers::totals(&self.servers()), canvas));
        out.push_str(&self.unchecked(canvas));
        out
    }

    /// Returns what nothing here says: whether the Pods' programs listen at `targetPort`.
    fn unchecked(&self, canvas: &Canvas) -> String {
        let mut ports = self.service.iter().flat_map(|service| &service.ports);
        let is_used = ports.any(|port| port.protocol == "TCP" && port.ready_endpoints > 0);
        let node = self.nodes.iter().find(|node| node.programmed);
        if !is_used {
            return String::new();
        }
        let Some(node) = node else {
            return String::new();
        };
        let text = format!(
            "whether programs listen at the endpoints; {} why {}/{} --from node/{} --try connects",
            canvas.program, self.namespace, self.name, node.node
        );
        long_field("Not checked", &Span::plain(text), canvas)
    }

    /// Returns on how many nodes the kernel holds the newest state, and why not on the others.
    fn summary(&self, canvas: &Canvas) -> String {
        if let Some(convergence) = &self.convergence {
            return convergence.fields(canvas);
        }
        let (programmed, all) = (self.programmed(), self.nodes.len());
        let tone = if programmed == all { Tone::Good } else { Tone::Warn };
        let text = format!("{programmed}/{all} hold the newest state");
        field("Nodes", &[Span::new(text, tone)], canvas)
    }

    fn next_steps(&self, canvas: &Canvas) -> Vec<String> {
        let mut steps = Vec::new();
        if self.programmed() < self.nodes.len() {
            steps.push(format!("{} status", canvas.program));
        }
        if let Some(issue) = self.issues.iter().find(|issue| issue.is_error()) {
            steps.push(super::next::fix(issue));
        }
        steps
    }
}

impl View for DescriptionView {
    fn text(&self, canvas: &Canvas) -> String {
        let mut out = self.header(canvas);
        out.push_str(&findings::text(&self.findings, canvas));
        for port in self.service.iter().flat_map(|service| &service.ports) {
            out.push('\n');
            out.push_str(&port_text(port, &self.nodes, canvas));
        }
        if !self.nodes.is_empty() {
            out.push('\n');
            let service = format!("{}/{}", self.namespace, self.name);
            out.push_str(&nodes_text(&service, &self.nodes, self.now, canvas));
        }
        let convergence = self.convergence.iter();
        let missing = convergence.flat_map(|convergence| &convergence.missing_replicas);
        out.push_str(&missing_text(missing, canvas));
        out.push_str(&servers::text(&self.servers(), canvas));
        out.push_str(&issues_text(&self.issues, 0, canvas));
        out.push_str(&next_steps_text(&self.next_steps(canvas), canvas));
        out
    }
}

/// Returns the fields that the ports of a Service share.
fn facts(service: &ServiceView, canvas: &Canvas) -> String {
    let list = |items: &[String]| items.iter().map(Span::plain).collect::<Vec<_>>();
    let optional = |text: Option<String>| text.map(Span::plain).into_iter().collect::<Vec<_>>();
    let policies = [
        format!("internal {}", service.internal_traffic_policy),
        format!("external {}", service.external_traffic_policy),
    ];
    let affinity = affinity(service).map(|age| format!("by client address for {age}"));
    let health = service.health_check_node_port.map(|port| port.to_string());
    let fields: [(&str, Vec<Span>); 9] = [
        ("Cluster IP", list(&service.cluster_ips)),
        ("External IP", list(&service.external_ips)),
        ("Load balancer", list(&service.load_balancer_ips)),
        ("Sources", list(&service.load_balancer_source_ranges)),
        ("Policy", list(&policies)),
        ("Affinity", optional(affinity)),
        ("Health port", optional(health)),
        ("IPVS scheduler", optional(service.ipvs_scheduler.clone())),
        ("Data path", optional(service.data_path.clone())),
    ];
    fields.iter().map(|(key, values)| field(key, values, canvas)).collect()
}

/// Returns one port: its addresses, its endpoints, and the number of nodes for which each endpoint
/// is chosen.
fn port_text(port: &PortView, nodes: &[ServiceNodeView], canvas: &Canvas) -> String {
    let name = if port.name.is_empty() { String::new() } else { format!("{} ", port.name) };
    let node_port = port.node_port.map_or(String::new(), |port| format!(", node port {port}"));
    let heading = format!(
        "Port {name}{}/{} ({}){node_port}, revision {}",
        port.port, port.protocol, port.family, port.revision
    );
    let mut out = paragraph(&Span::new(heading, Tone::Strong), canvas, 0);
    let chosen = chosen(port, nodes);
    let chosen_for = |endpoint: &EndpointView| {
        let count = chosen.get(endpoint.address.as_str()).copied().unwrap_or(0);
        Span::plain(format!("{count}/{}", nodes.len()))
    };
    if !port.endpoints.is_empty() {
        let table = Table::new(&port.endpoints)
            .text(Column::new("ENDPOINT"), |e| &e.address)
            .text(Column::new("NODE").elastic(12).optional(2), |e| &e.node)
            .column(Column::new("STATE"), EndpointView::state)
            .column(Column::new("NODES").optional(1), chosen_for)
            .column(
                Column::new("HINTS").elastic(12).optional(0),
                EndpointView::hints,
            )
            .render(&canvas.inset(2));
        out.extend(table.lines().map(|line| format!("  {line}\n")));
    }
    if let Some(warning) = without_ready(port) {
        out.push_str(&paragraph(&Span::new(warning, Tone::Bad), canvas, 2));
    }
    out
}

/// Explains what it means that no endpoint is ready.
fn without_ready(port: &PortView) -> Option<&'static str> {
    let conditions = || port.endpoints.iter().map(|endpoint| endpoint.conditions);
    let draining = conditions().any(|of| of.serving && of.terminating);
    let all_end = !port.endpoints.is_empty() && conditions().all(|of| of.terminating);
    match (port.ready_endpoints, draining, all_end) {
        (1.., _, _) => None,
        (0, true, true) => Some("all endpoints are about to end: draining ones are still used"),
        (0, true, false) => Some("no endpoint is ready: draining endpoints are still used"),
        (0, false, true) => Some("all endpoints are about to end: connections fail"),
        (0, false, false) => Some("no endpoint is ready: connections fail"),
    }
}

/// Returns for how many nodes each endpoint of a port is chosen, under either policy. The nodes
/// need not hold it yet.
fn chosen<'a>(port: &PortView, nodes: &'a [ServiceNodeView]) -> HashMap<&'a str, usize> {
    let mut chosen = HashMap::new();
    for node in nodes {
        for held in node.endpoints.iter().filter(|held| port.is(&held.key)) {
            let local = held.local.iter().filter(|a| !held.cluster.contains(a));
            for address in held.cluster.iter().chain(local) {
                *chosen.entry(address.as_str()).or_default() += 1;
            }
        }
    }
    chosen
}

/// Returns the table of what every node holds, folded if it is long. `-o wide` lists the endpoints themselves.
fn nodes_text(
    service: &str,
    nodes: &[ServiceNodeView],
    now: Option<Time>,
    canvas: &Canvas,
) -> String {
    let problem = |node: &ServiceNodeView| {
        // Revisions and process numbers differ, and the problem is the same.
        let notes: Vec<String> = node_notes(node, canvas)
            .into_iter()
            .map(|span| span.text.replace(|c: char| c.is_ascii_digit(), ""))
            .collect();
        (!node.programmed || !notes.is_empty()).then_some((node.programmed, notes))
    };
    let folded = Folded::new(nodes, canvas, problem, |node| node.programmed);
    let command = format!("{} describe service {service}", canvas.program);
    let rest = folded.rest("hold it", &command);
    if folded.rows.is_empty() {
        rest
    } else {
        nodes_table(&folded.rows, now, canvas) + &rest
    }
}

fn nodes_table(rows: &[Vec<&ServiceNodeView>], now: Option<Time>, canvas: &Canvas) -> String {
    let latest = |row: &Vec<&ServiceNodeView>| {
        row.iter()
            .filter_map(|node| node.last_change.clone())
            .max_by_key(|change| change.time)
    };
    let changed = |row: &Vec<&ServiceNodeView>| {
        let at = latest(row).and_then(|change| change.time);
        match (at, now) {
            (Some(at), Some(now)) => Span::plain(format!("{} ago", at.age_text(now))),
            _ => Span::none(),
        }
    };
    // Nodes that are alike need not have the same endpoints.
    let total = |row: &Vec<&ServiceNodeView>, list: fn(&NodePortView) -> &Vec<String>| {
        let count = |node: &&ServiceNodeView| -> usize {
            node.endpoints.iter().map(|of| list(of).len()).sum()
        };
        let counts = row.iter().map(count);
        let (least, most) = (counts.clone().min(), counts.max().unwrap_or(0));
        Span::plain(match least {
            Some(least) if least < most => format!("{least}-{most}"),
            _ => most.to_string(),
        })
    };
    Table::new(rows)
        .column(Column::new("NODE").elastic(20).names(), |row| {
            fold::name_span(row, |node| &node.node)
        })
        .column(Column::new("PROGRAMMED"), |row| {
            if row[0].programmed {
                Span::new("Yes", Tone::Good)
            } else {
                Span::new("No", Tone::Bad)
            }
        })
        .column(Column::new("APPLIED"), |row| {
            let behind = row.iter().min_by_key(|node| node.applied_revision);
            behind.map_or(Span::none(), |node| {
                progress(Some(node.applied_revision), node.wanted_revision)
            })
        })
        .column(Column::new("CLUSTER"), |row| total(row, |of| &of.cluster))
        .column(Column::new("LOCAL"), |row| total(row, |of| &of.local))
        .column(Column::new("LATENCY").optional(1), |row| {
            latency(latest(row).map(|change| change.latency_milliseconds))
        })
        .column(Column::new("CHANGED").optional(0), changed)
        .notes(|row| {
            let names = fold::names_note(row, |node| &node.node);
            let notes = node_notes(row[0], canvas);
            names.into_iter().chain(notes).collect()
        })
        .render(canvas)
}

fn node_notes(node: &ServiceNodeView, canvas: &Canvas) -> Vec<Span> {
    let mut notes = Vec::new();
    if !node.reason.is_empty() {
        let tone = if node.programmed { Tone::Warn } else { Tone::Bad };
        notes.push(Span::new(&node.reason, tone));
    }
    notes.extend(node.ipvs.iter().flat_map(servers::notes));
    if canvas.wide {
        notes.extend(node.endpoints.iter().map(|of| {
            let [cluster, local] = [&of.cluster, &of.local].map(|list| match list.as_slice() {
                [] => "none".to_owned(),
                list => list.join(" "),
            });
            Span::plain(format!("{}: cluster {cluster}; local {local}", of.key))
        }));
    }
    notes
}
