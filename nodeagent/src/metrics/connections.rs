//! The metrics of `--count-connections`.

use std::fmt;

use kplane_http::metrics::{Labels, Name};
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
    let labelled = counts
        .iter()
        .map(|(key, count)| (service_labels(key), float(*count)));
    let labelled: Vec<_> = labelled.collect();
    let series = labelled.iter().map(|(labels, count)| (&labels[..], *count));
    Name(
        "kplane_agent_service_connections",
        "Connections that began, and that this node led to an endpoint",
    )
    .counter(to, series)?;
    Name(
        "kplane_agent_service_connections_losses",
        "Times when connections were not counted, because the kernel reported more than the agent could read",
    )
    .counter(to, [(&[] as &Labels<'_>, float(losses))])
}
