//! Answers to questions of the control plane, and virtual servers, in the wire format.

use std::net::SocketAddr;

use kplane_proto::convert::{family, protocol};
use kplane_proto::v1 as pb;
use prost::Message as _;

use kplane_dataplane::backend::{
    Drain, Inspection, KernelState, Kind, PacketTarget, RealServer, ServerCounts, VirtualServer,
};
use kplane_model::{EndpointAddr, parse_ip};

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
pub(crate) fn inspection(token: u64, reported: Option<Inspection>) -> pb::Inspection {
    let Some(Inspection {
        servers,
        age,
        error,
    }) = reported
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
        ..pb::Inspection::default()
    }
}

/// Reads what the kernel does with packets to a destination.
pub(crate) fn kernel(backend: &str, destination: &pb::Destination) -> pb::KernelState {
    let target = target(destination);
    let known = Kind::named(backend)
        .zip(target)
        .ok_or_else(|| "the agent does not understand the question".to_owned())
        .and_then(|(kind, target)| kind.look_up(target));
    match known {
        Ok(state) => state_to_wire(&state),
        Err(error) => pb::KernelState {
            error,
            ..pb::KernelState::default()
        },
    }
}

/// Returns the destination that a question means.
fn target(destination: &pb::Destination) -> Option<PacketTarget> {
    let protocol = protocol(destination.protocol).ok()?;
    let port = u16::try_from(destination.port).ok()?;
    Some(match destination.address.as_str() {
        "" => PacketTarget::NodePort {
            family: family(destination.family).ok()?,
            protocol,
            port,
        },
        ip => PacketTarget::Address {
            at: SocketAddr::new(parse_ip(ip).ok()?, port),
            protocol,
        },
    })
}

fn state_to_wire(state: &KernelState) -> pb::KernelState {
    let texts = |all: &[EndpointAddr]| all.iter().map(ToString::to_string).collect();
    pb::KernelState {
        places: state.frontends.clone(),
        endpoints: texts(&state.endpoints),
        inside_apart: state.inside.is_some(),
        inside_endpoints: state.inside.as_deref().map(texts).unwrap_or_default(),
        refuses: state.refuses,
        drops: state.drops,
        guarded: Some(state.guarded),
        more: state.more as u64,
        error: String::new(),
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
