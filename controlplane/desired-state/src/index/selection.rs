//! Which ServicePorts a reader wants, and pages of them.

use std::collections::BTreeSet;

use kplane_model::{ServiceKey, ServiceName};

use super::PortView;

/// Size in bytes of a message with the ServicePorts of a page, unless a single one is larger. gRPC's usual limit is
/// 4 MiB.
const PAGE_BYTES: usize = 3 << 20;

/// The ServicePorts that a reader wants.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Only in this namespace; empty = all.
    pub namespace: String,
    /// Only of Services with this name; empty = all.
    pub name: String,
    /// Only with an endpoint on this node; empty = all.
    pub node: String,
    /// Only of these Services; `None` = all.
    pub among: Option<BTreeSet<ServiceName>>,
    /// Only behind this ServicePort; `None` = from the first one on.
    pub after: Option<ServiceKey>,
    /// Most ServicePorts in a page; 0 = as many as fit.
    pub most: usize,
}

/// A page of ServicePorts.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// ServicePorts, sorted by key.
    pub ports: Vec<PortView>,
    /// There are more ServicePorts behind these.
    pub more: bool,
}

impl Selection {
    /// Returns whether ServicePorts of a Service may be in the page.
    pub fn wants(&self, service: &ServiceName) -> bool {
        let wanted = |wanted: &str, is: &str| wanted.is_empty() || wanted == is;
        wanted(&self.namespace, &service.namespace)
            && wanted(&self.name, &service.name)
            && self.after.as_ref().is_none_or(|after| *service >= after.service)
    }

    /// Returns the ServicePorts that fit into a page. They come sorted by key, and are computed as they are needed.
    pub fn page(&self, ports: impl Iterator<Item = PortView>) -> Page {
        let on_node = |port: &PortView| {
            let mut endpoints = port.endpoints.iter();
            self.node.is_empty() || endpoints.any(|of| of.node.as_deref() == Some(&*self.node))
        };
        let behind = |port: &PortView| self.after.as_ref().is_none_or(|key| port.port.key > *key);
        let (mut page, mut bytes) = (Page::default(), 0);
        for port in ports.filter(|port| behind(port) && on_node(port)) {
            bytes += size_of(&port);
            let is_full = bytes > PAGE_BYTES || (self.most > 0 && page.ports.len() == self.most);
            if is_full && !page.ports.is_empty() {
                page.more = true;
                break;
            }
            page.ports.push(port);
        }
        page
    }
}

/// Returns the most bytes that a ServicePort takes in a message.
fn size_of(view: &PortView) -> usize {
    /// Longest address with a port, IPv6 in brackets.
    const ADDRESS: usize = 48;
    /// Numbers, and what each field costs besides its content.
    const FIXED: usize = 160;
    let port = &view.port;
    let key = &port.key;
    let names = key.service.namespace.len() + key.service.name.len() + key.port_name.len();
    let addresses =
        port.external_ips.len() + port.load_balancer_ips.len() + port.source_ranges.len();
    let endpoints = view.endpoints.iter().map(|endpoint| {
        let hints: usize = endpoint
            .zone_hints
            .iter()
            .chain(&endpoint.node_hints)
            .map(|hint| hint.len() + 3)
            .sum();
        ADDRESS + 16 + endpoint.node.as_deref().map_or(0, str::len) + hints
    });
    FIXED + names + addresses * ADDRESS + endpoints.sum::<usize>()
}
