//! Services, as the control plane understands them.

use std::collections::BTreeSet;

use kplane_proto::v1 as pb;
use serde::Serialize;

use super::endpoints::EndpointView;
use super::findings::FindingView;
use super::{API_VERSION, KeyView, List, SeverityView, View, policy};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, none_text};
use crate::time::age;

/// One port of a Service in one family.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PortView {
    /// The name; empty for the only port of a Service.
    pub(crate) name: String,
    pub(crate) protocol: &'static str,
    pub(crate) family: &'static str,
    #[serde(rename = "clusterIP")]
    pub(crate) cluster_ip: String,
    pub(crate) port: u32,
    pub(crate) node_port: Option<u32>,
    /// The revision of the port's last change.
    pub(crate) revision: u64,
    pub(crate) ready_endpoints: usize,
    pub(crate) endpoints: Vec<EndpointView>,
}

impl PortView {
    /// Returns `80/TCP`, or `80:30080/TCP` with a node port, as kubectl writes it.
    pub fn numbers(&self) -> String {
        match self.node_port {
            Some(node_port) => format!("{}:{node_port}/{}", self.port, self.protocol),
            None => format!("{}/{}", self.port, self.protocol),
        }
    }

    /// Returns whether a key is this port of its Service.
    pub fn is(&self, key: &KeyView) -> bool {
        (self.name.as_str(), self.protocol, self.family)
            == (key.port_name.as_str(), key.protocol, key.family)
    }
}

/// A Service with all its ports and families.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceView {
    pub(crate) namespace: String,
    pub(crate) name: String,
    #[serde(rename = "clusterIPs")]
    pub(crate) cluster_ips: Vec<String>,
    #[serde(rename = "externalIPs")]
    pub(crate) external_ips: Vec<String>,
    #[serde(rename = "loadBalancerIPs")]
    pub(crate) load_balancer_ips: Vec<String>,
    pub(crate) load_balancer_source_ranges: Vec<String>,
    pub(crate) internal_traffic_policy: &'static str,
    pub(crate) external_traffic_policy: &'static str,
    /// The timeout of session affinity; `null` without session affinity.
    pub(crate) session_affinity_timeout_seconds: Option<u32>,
    pub(crate) health_check_node_port: Option<u32>,
    /// The IPVS scheduler; `null` means each node's own setting.
    pub(crate) ipvs_scheduler: Option<String>,
    /// What the Service asks of the userspace proxy; `null` means that each node's backend serves it.
    pub(crate) data_path: Option<String>,
    /// The worst error or warning; `null` if there is none, or it was not asked for.
    pub(crate) finding: Option<FindingView>,
    pub(crate) ports: Vec<PortView>,
}

impl ServiceView {
    /// Groups ports by Service. Ports come sorted by namespace and name.
    pub fn group(ports: Vec<pb::ServiceView>) -> Vec<Self> {
        let mut services: Vec<Self> = Vec::new();
        for port in ports {
            let key = KeyView::from(port.key.clone().unwrap_or_default());
            match services.last_mut() {
                Some(last) if last.namespace == key.namespace && last.name == key.service => {
                    last.join(key, port);
                }
                _ => services.push(Self::new(key, port)),
            }
        }
        services
    }

    fn new(key: KeyView, port: pb::ServiceView) -> Self {
        let mut service = Self {
            namespace: key.namespace.clone(),
            name: key.service.clone(),
            cluster_ips: Vec::new(),
            external_ips: Vec::new(),
            load_balancer_ips: Vec::new(),
            load_balancer_source_ranges: Vec::new(),
            internal_traffic_policy: policy(port.internal_policy()),
            external_traffic_policy: policy(port.external_policy()),
            session_affinity_timeout_seconds: Some(port.affinity_timeout_s).filter(|s| *s > 0),
            health_check_node_port: Some(port.health_check_node_port).filter(|port| *port > 0),
            ipvs_scheduler: Some(port.ipvs_scheduler.clone()).filter(|name| !name.is_empty()),
            data_path: port.proxied.as_ref().map(data_path),
            finding: port.finding.clone().map(FindingView::from),
            ports: Vec::new(),
        };
        service.join(key, port);
        service
    }

    fn join(&mut self, key: KeyView, port: pb::ServiceView) {
        // A headless Service has no ClusterIP.
        let cluster_ip = Some(port.cluster_ip.clone()).filter(|ip| !ip.is_empty());
        extend(&mut self.cluster_ips, cluster_ip);
        extend(&mut self.external_ips, port.external_ips);
        extend(&mut self.load_balancer_ips, port.load_balancer_ips);
        extend(&mut self.load_balancer_source_ranges, port.source_ranges);
        let endpoints: Vec<_> = port.endpoints.into_iter().map(EndpointView::from).collect();
        self.ports.push(PortView {
            name: key.port_name,
            protocol: key.protocol,
            family: key.family,
            cluster_ip: port.cluster_ip,
            port: port.port,
            node_port: Some(port.node_port).filter(|port| *port > 0),
            revision: port.revision,
            ready_endpoints: endpoints.iter().filter(|e| e.conditions.ready).count(),
            endpoints,
        });
    }
}

/// Returns what a Service asks of the userspace proxy, human-readable.
fn data_path(asked: &pb::Proxied) -> String {
    let attempts = if asked.no_retry { ", one attempt" } else { "" };
    format!("userspace{attempts}")
}

/// Adds items that are not in the list yet, in the order of arrival.
fn extend(list: &mut Vec<String>, items: impl IntoIterator<Item = String>) {
    for item in items {
        if !list.contains(&item) {
            list.push(item);
        }
    }
}

/// The view of `kpctl get services`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceListView {
    api_version: &'static str,
    kind: &'static str,
    items: Vec<ServiceView>,
    /// The namespace, if the user asked for a single one.
    #[serde(skip)]
    namespace: Option<String>,
}

impl ServiceListView {
    /// Creates the view from the ports of all Services, or of those in one namespace.
    pub fn new(ports: Vec<pb::ServiceView>, namespace: Option<&str>) -> Self {
        let mut items = ServiceView::group(ports);
        items.sort_by_key(|of| of.finding.as_ref().map_or(SeverityView::Info, |of| of.severity));
        Self {
            api_version: API_VERSION,
            kind: "ServiceList",
            items,
            namespace: namespace.map(str::to_owned),
        }
    }
}

/// One line of the table: a Service in one family.
struct Row<'a> {
    service: &'a ServiceView,
    ports: Vec<&'a PortView>,
}

impl<'a> Row<'a> {
    fn all(service: &'a ServiceView) -> impl Iterator<Item = Self> {
        let families: BTreeSet<_> = service.ports.iter().map(|port| port.family).collect();
        families.into_iter().map(move |family| {
            let ports = service.ports.iter().filter(|port| port.family == family).collect();
            Self { service, ports }
        })
    }

    fn cluster_ip(&self) -> Span {
        Span::plain(self.ports.first().map_or("", |port| &port.cluster_ip))
    }

    fn ports(&self) -> Span {
        let ports: Vec<_> = self.ports.iter().map(|port| port.numbers()).collect();
        Span::plain(ports.join(","))
    }

    /// Returns the ready and all endpoints of the port that has the fewest.
    fn endpoints(&self) -> Span {
        let counts = self.ports.iter().map(|port| (port.ready_endpoints, port.endpoints.len()));
        let (ready, all) = counts.min().unwrap_or_default();
        let tone = match ready {
            0 => Tone::Bad,
            ready if ready < all => Tone::Warn,
            _ => Tone::Plain,
        };
        Span::new(format!("{ready}/{all}"), tone)
    }
}

impl List for ServiceListView {
    type Item = ServiceView;

    fn items(&mut self) -> &mut Vec<ServiceView> {
        &mut self.items
    }
}

impl View for ServiceListView {
    fn names(&self) -> Option<Vec<String>> {
        Some(
            self.items
                .iter()
                .map(|of| format!("service/{}/{}", of.namespace, of.name))
                .collect(),
        )
    }

    fn text(&self, canvas: &Canvas) -> String {
        if self.items.is_empty() {
            return none_text("Services", self.namespace.as_deref());
        }
        let rows: Vec<_> = self.items.iter().flat_map(Row::all).collect();
        let mut table = Table::new(&rows);
        if self.namespace.is_none() {
            table = table.text(Column::new("NAMESPACE").elastic(9), |row| {
                &row.service.namespace
            });
        }
        table
            .text(Column::new("NAME").elastic(20), |row| &row.service.name)
            .column(Column::new("CLUSTER-IP").elastic(15), Row::cluster_ip)
            .column(Column::new("EXTERNAL-IP").optional(1), |row| {
                external_ip(row.service)
            })
            .column(Column::new("PORTS").elastic(14), Row::ports)
            .column(Column::new("READY"), Row::endpoints)
            .column_if(
                self.items.iter().any(|of| of.finding.is_some()),
                Column::new("FINDING").elastic(16),
                |row| {
                    let finding = row.service.finding.as_ref();
                    finding.map_or_else(Span::none, FindingView::code_span)
                },
            )
            .text(Column::wide("INTERNAL"), |row| {
                row.service.internal_traffic_policy
            })
            .text(Column::wide("EXTERNAL"), |row| {
                row.service.external_traffic_policy
            })
            .text(Column::wide("AFFINITY"), |row| {
                affinity(row.service).unwrap_or_default()
            })
            .text(Column::wide("SOURCES"), |row| {
                row.service.load_balancer_source_ranges.join(",")
            })
            .column(Column::wide("REVISION"), |row| {
                let newest = row.ports.iter().map(|port| port.revision).max();
                Span::plain(newest.unwrap_or_default().to_string())
            })
            .render(canvas)
    }
}

/// Returns how long a client keeps its endpoint.
pub fn affinity(service: &ServiceView) -> Option<String> {
    let seconds = service.session_affinity_timeout_seconds?;
    Some(age(std::time::Duration::from_secs(seconds.into())))
}

fn external_ip(service: &ServiceView) -> Span {
    let (balancers, externals) = (&service.load_balancer_ips, &service.external_ips);
    let all: Vec<_> = balancers.iter().chain(externals).map(String::as_str).collect();
    Span::plain(all.join(","))
}
