//! Virtual and real servers of nodes that serve by IPVS: totals of a node, and details of one
//! Service.

use std::cmp::Reverse;
use std::time::Duration;

use kplane_proto::v1 as pb;
use serde::Serialize;

use super::{KeyView, more_text};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, plural, short_count};
use crate::time::age;
use crate::wire::{FromWire, view_of};

/// Most real servers that a table shows before it refers to `-o wide`.
const REALS_SHOWN: usize = 20;

view_of! {
    /// The virtual servers of one family of a node, as last read back.
    pub struct ServersView: ServerStats {
        virtual_servers: u64,
        real_servers: u64,
        draining: u64,
        active_connections: u64,
        inactive_connections: u64,
        /// The busiest of the draining servers.
        draining_servers: Vec<DrainView> = drains,
    }

    /// A real server that keeps its connections and gets no new ones.
    pub struct DrainView: DrainingServer {
        #[serde(flatten)]
        key: KeyView,
        virtual_server: String,
        address: String,
        active_connections: u64,
        inactive_connections: u64,
    }
}

impl ServersView {
    /// Returns the totals of a node, and which servers drain; nothing where a family has no
    /// Services.
    pub fn notes(&self, family: &str) -> Vec<Span> {
        if self.virtual_servers == 0 {
            return Vec::new();
        }
        let total = format!(
            "{family}: {}, {}, {} draining; {}",
            many(self.virtual_servers, "virtual server"),
            many(self.real_servers, "real server"),
            self.draining,
            connections(self.active_connections, self.inactive_connections),
        );
        let mut notes = vec![Span::plain(total)];
        notes.extend(self.draining_servers.iter().map(|drain| {
            let text = format!(
                "draining: {} of {} at {}: {}",
                drain.address,
                drain.key,
                drain.virtual_server,
                connections(drain.active_connections, drain.inactive_connections)
            );
            Span::new(text, Tone::Warn)
        }));
        let named = self.draining_servers.len() as u64;
        if self.draining > named {
            let more = format!("and {} more draining", self.draining - named);
            notes.push(Span::plain(more));
        }
        notes
    }
}

fn connections(active: u64, inactive: u64) -> String {
    format!("{}, {inactive} inactive", many(active, "active connection"))
}

fn many(count: u64, noun: &str) -> String {
    plural(usize::try_from(count).unwrap_or(usize::MAX), noun)
}

view_of! {
    /// The virtual servers that a node has for one Service.
    pub struct ServiceServersView: ServiceServers {
        virtual_servers: Vec<VirtualServerView> = servers,
        /// The number of real servers that are not listed.
        omitted_real_servers: u64 = more,
        /// Time since connections were counted.
        age_milliseconds: u64 = age_ms,
        /// The reason why the state is not known, or not in full.
        error: String,
    }
}

/// One virtual server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualServerView {
    pub(crate) port_name: String,
    pub(crate) protocol: &'static str,
    pub(crate) family: &'static str,
    /// Address and port.
    pub(crate) address: String,
    /// The scheduler; empty if another program changed the virtual server's behaviour.
    pub(crate) scheduler: String,
    /// The persistence; `null` where clients do not keep their real server.
    pub(crate) persistence_seconds: Option<u32>,
    pub(crate) real_servers: Vec<RealServerView>,
}

view_of! {
    /// One real server.
    pub struct RealServerView: RealServer {
        /// Address and port.
        address: String,
        weight: u32,
        active_connections: u64,
        inactive_connections: u64,
        /// Whether the server gets no new connections, and is removed after its last one.
        draining: bool,
    }
}

impl FromWire<pb::VirtualServer> for VirtualServerView {
    fn from_wire(server: pb::VirtualServer) -> Self {
        let key = KeyView::from_wire(server.key);
        Self {
            port_name: key.port_name,
            protocol: key.protocol,
            family: key.family,
            address: server.address,
            scheduler: server.scheduler,
            persistence_seconds: FromWire::from_wire(server.persistent_s),
            real_servers: FromWire::from_wire(server.real_servers),
        }
    }
}

/// The name of a node, and the virtual servers that it has for the Service.
pub(super) type OnNode<'a> = (&'a str, &'a ServiceServersView);

/// A real server, with its virtual server and its node.
struct ServerRow<'a> {
    node: &'a str,
    servers: &'a ServiceServersView,
    server: &'a VirtualServerView,
    real: &'a RealServerView,
}

/// Returns all real servers: draining ones first, then the busiest.
fn rows<'a>(nodes: &[OnNode<'a>]) -> Vec<ServerRow<'a>> {
    let mut rows = Vec::new();
    for &(node, servers) in nodes {
        for server in &servers.virtual_servers {
            rows.extend(server.real_servers.iter().map(|real| ServerRow {
                node,
                servers,
                server,
                real,
            }));
        }
    }
    rows.sort_by_key(|row| {
        let real = row.real;
        Reverse((
            real.draining,
            real.active_connections,
            real.inactive_connections,
        ))
    });
    rows
}

/// Returns a line about all real servers; nothing if no node has any.
pub(super) fn totals(nodes: &[OnNode<'_>]) -> Vec<Span> {
    if nodes.is_empty() {
        return Vec::new();
    }
    let rows = rows(nodes);
    let sum = |of: fn(&RealServerView) -> u64| rows.iter().map(|row| of(row.real)).sum::<u64>();
    let mut spans = vec![
        Span::plain(plural(nodes.len(), "node")),
        Span::plain(many(sum(|r| r.active_connections), "active connection")),
        Span::plain(format!("{} inactive", sum(|r| r.inactive_connections))),
    ];
    let draining = rows.iter().filter(|row| row.real.draining).count();
    if draining > 0 {
        let text = format!("{} draining", plural(draining, "real server"));
        spans.push(Span::new(text, Tone::Warn));
    }
    spans
}

/// Returns the table of real servers, after an empty line; an empty text if there are none.
pub(super) fn text(nodes: &[OnNode<'_>], canvas: &Canvas) -> String {
    let rows = rows(nodes);
    if rows.is_empty() {
        return String::new();
    }
    let limit = if canvas.wide { rows.len() } else { REALS_SHOWN };
    let shown = &rows[..limit.min(rows.len())];
    let table = Table::new(shown)
        .text(Column::new("REAL SERVER").elastic(18), |row| {
            &row.real.address
        })
        .text(Column::new("WEIGHT"), |row| row.real.weight.to_string())
        .text(Column::new("ACTIVE"), |row| {
            short_count(row.real.active_connections)
        })
        .text(Column::new("INACTIVE"), |row| {
            short_count(row.real.inactive_connections)
        })
        .column(Column::new("STATE"), |row| {
            if row.real.draining {
                Span::new("Draining", Tone::Warn)
            } else {
                Span::new("Serving", Tone::Good)
            }
        })
        .text(Column::new("VIRTUAL SERVER").elastic(14), |row| {
            format!("{}/{}", row.server.address, row.server.protocol)
        })
        .text(Column::wide("SCHEDULER"), |row| &row.server.scheduler)
        .column(Column::wide("PERSISTENCE"), |row| {
            let seconds = row.server.persistence_seconds;
            let span = |s| Span::plain(age(Duration::from_secs(u64::from(s))));
            seconds.map_or_else(Span::none, span)
        })
        .text(Column::new("NODE").elastic(6), |row| row.node)
        .column(Column::wide("COUNTED"), |row| {
            let ago = Duration::from_millis(row.servers.age_milliseconds);
            Span::plain(format!("{} ago", age(ago)))
        })
        .render(canvas);
    let more = more_text(rows.len() - shown.len(), "real server");
    format!("\n{table}{more}")
}

/// Returns what is not known of a node.
pub(super) fn notes(servers: &ServiceServersView) -> Vec<Span> {
    let mut notes = Vec::new();
    if !servers.error.is_empty() {
        let text = format!("real servers: {}", servers.error);
        notes.push(Span::new(text, Tone::Warn));
    }
    if servers.omitted_real_servers > 0 {
        let more = many(servers.omitted_real_servers, "real server");
        notes.push(Span::plain(format!("{more} more, not listed by the agent")));
    }
    notes
}
