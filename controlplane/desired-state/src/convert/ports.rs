//! The ports of a Service.

use std::collections::HashSet;
use std::sync::Arc;

use kplane_model::{Protocol, Reason};

use super::report::Report;
use super::{MAX_SERVICE_PORTS, is_port_name, port_number, protocol};
use crate::k8s::{self, ServiceSpec};

/// A port that is served.
pub(super) struct Port {
    pub(super) name: Arc<str>,
    pub(super) protocol: Protocol,
    pub(super) port: u16,
    pub(super) node_port: Option<u16>,
}

/// Returns the ports that are served. Name and protocol identify a port; packets are matched by
/// port and protocol (A3, A7, Z7).
pub(super) fn ports(spec: &ServiceSpec, report: &mut Report<'_>) -> Vec<Port> {
    let written = spec.ports.as_deref().unwrap_or_default();
    if written.len() > MAX_SERVICE_PORTS {
        report.error(Reason::TooLarge, format!(
            "spec.ports has {} entries; only the first {MAX_SERVICE_PORTS} are served, split the \
             Service",
            written.len()
        ));
    }
    let mut names = HashSet::new();
    let mut numbers = HashSet::new();
    let mut ports = Vec::new();
    for (index, port) in written.iter().take(MAX_SERVICE_PORTS).enumerate() {
        match convert_port(port) {
            Err(reason) => {
                report.error(Reason::InvalidPort, format!("spec.ports[{index}] {reason}"));
            }
            Ok(port) if !names.insert((port.name.clone(), port.protocol)) => {
                report.error(Reason::InvalidPort, format!(
                    "spec.ports[{index}] has the name {:?} and protocol {} of an earlier port and \
                     is not served; rename it",
                    port.name, port.protocol
                ));
            }
            Ok(port) if !numbers.insert((port.port, port.protocol)) => {
                report.error(Reason::InvalidPort, format!(
                    "spec.ports[{index}] is {}/{} as an earlier port and is not served; remove it",
                    port.port, port.protocol
                ));
            }
            Ok(port) => ports.push(node_port(index, &written[index], port, report)),
        }
    }
    ports
}

fn convert_port(port: &k8s::ServicePort) -> Result<Port, String> {
    let name = port.name.clone().unwrap_or_default();
    if !is_port_name(&name) {
        return Err(format!(
            "has the name {name:?} and is not served; use up to 63 lower-case letters, digits and -"
        ));
    }
    Ok(Port {
        name,
        protocol: protocol(port.protocol.as_deref())
            .map_err(|error| format!("is not served: {error}"))?,
        port: port_number(port.port).ok_or_else(|| {
            format!(
                "has the port {} and is not served; use 1..=65535",
                port.port
            )
        })?,
        node_port: None,
    })
}

/// Adds the node port, or an issue if it is invalid; 0 = no node port (A7).
fn node_port(index: usize, from: &k8s::ServicePort, port: Port, report: &mut Report<'_>) -> Port {
    let written = from.node_port.unwrap_or(0);
    let node_port = port_number(written);
    if node_port.is_none() && written != 0 {
        report.error(
            Reason::InvalidPort,
            format!(
                "spec.ports[{index}].nodePort {written} is not served; use 1..=65535, or 0 for none"
            ),
        );
    }
    Port { node_port, ..port }
}
