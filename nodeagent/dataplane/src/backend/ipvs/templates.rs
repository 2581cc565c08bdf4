//! What the persistence of IPVS remembers: templates among its connections.

use std::time::Duration;

use kplane_model::EndpointAddr;

use crate::backend::affinity::{AffinityClient, AffinityClients, AffinityPort, ClientQuery, LATE};
use crate::chain;
use crate::ipvs_table::each;

/// Reads which clients are remembered.
pub(in crate::backend) fn remembered(
    ports: &[AffinityPort],
    wanted: ClientQuery,
) -> Result<AffinityClients, String> {
    let mut clients = AffinityClients::default();
    let read = each(wanted.until, |connection| {
        if !connection.is_template() || !wanted.wants(connection.client.ip()) {
            return;
        }
        let is_its = |port: &AffinityPort| {
            let protocol = connection.protocol;
            protocol.is_none_or(|protocol| protocol == port.key.protocol)
                && port.has(connection.server)
        };
        if let Some(port) = ports.iter().position(is_its) {
            clients.add(AffinityClient {
                port,
                client: connection.client.ip(),
                endpoint: Some(EndpointAddr::from(connection.endpoint)),
                expires: Some(Duration::from_secs(connection.expires_s)),
            });
        }
    });
    match read.map_err(|error| chain(&error))? {
        Some(_) => Ok(clients),
        None => Err(LATE.to_owned()),
    }
}
