//! The metrics of `--count-connections`.

use std::fmt;

use kplane_http::metrics::{Metric, alone};
use prometheus_client::encoding::DescriptorEncoder;

use super::numbers::float;
use super::service_labels;
use crate::service_connections::ServiceConnections;

/// Writes the connections by ServicePort.
pub(super) fn write(
    connections: &ServiceConnections,
    to: &mut DescriptorEncoder<'_>,
) -> fmt::Result {
    let (counts, losses) = connections.read();
    let series = counts.iter().map(|(key, count)| (service_labels(key), float(*count)));
    Metric::new("kplane_agent_service_connections")
        .help("Connections that began, and that this node led to an endpoint")
        .counter(to, series)?;
    Metric::new("kplane_agent_service_connections_losses")
        .help("Times when connections were not counted, because the kernel reported more than the agent could read")
        .counter(to, [alone(float(losses))])
}
