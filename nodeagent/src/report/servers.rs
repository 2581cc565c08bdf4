//! Virtual servers in the wire format.

use kplane_proto::v1 as pb;
use prost::Message as _;

use kplane_dataplane::backend::{Drain, Inspection, RealServer, ServerCounts, VirtualServer};

/// Most bytes of a family's draining servers in a report.
const DRAINS_BYTES: usize = 16 << 10;

/// Returns a family's part of the report.
pub(super) fn counts(counts: &ServerCounts) -> pb::ServerStats {
    pb::ServerStats {
        virtual_servers: counts.virtual_servers,
        real_servers: counts.real_servers,
        draining: counts.draining,
        active_connections: counts.connections.active,
        inactive_connections: counts.connections.inactive,
        drains: drains(&counts.drains),
    }
}

/// Returns as many draining servers as fit: names may be long.
fn drains(all: &[Drain]) -> Vec<pb::DrainingServer> {
    let mut room = DRAINS_BYTES;
    let fits = |drain: &pb::DrainingServer| {
        let bytes = drain.encoded_len();
        room = room.saturating_sub(bytes);
        room > 0
    };
    all.iter().map(drain).take_while(fits).collect()
}

fn drain(drain: &Drain) -> pb::DrainingServer {
    pb::DrainingServer {
        key: Some((&drain.key).into()),
        virtual_server: drain.server.to_string(),
        address: drain.at.to_string(),
        active_connections: drain.connections.active,
        inactive_connections: drain.connections.inactive,
    }
}

/// Returns the answer to a question; `None` means that the backend has no virtual servers.
pub(crate) fn inspection(token: u64, told: Option<Inspection>) -> pb::Inspection {
    let Some(Inspection {
        servers,
        age,
        error,
    }) = told
    else {
        return pb::Inspection {
            token,
            error: "this agent's backend has no virtual servers".to_owned(),
            ..Default::default()
        };
    };
    let mut servers = servers.iter().map(server).collect();
    let more = kplane_proto::bound_servers(&mut servers) as u64;
    pb::Inspection {
        token,
        more,
        servers,
        age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        error,
    }
}

fn server(server: &VirtualServer) -> pb::VirtualServer {
    pb::VirtualServer {
        key: Some((&server.key).into()),
        address: server.at.to_string(),
        scheduler: server.scheduler.to_owned(),
        persistent_s: server.persistent_s.unwrap_or_default(),
        real_servers: server.reals.iter().map(real).collect(),
    }
}

fn real(real: &RealServer) -> pb::RealServer {
    pb::RealServer {
        address: real.at.to_string(),
        weight: real.weight,
        active_connections: real.connections.active,
        inactive_connections: real.connections.inactive,
        draining: real.draining,
    }
}

#[cfg(test)]
mod tests;
