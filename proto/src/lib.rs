//! The wire protocol `kplane.v1`: generated types and their conversions to and from the model.
//!
//! Programs convert wire types at once and work with `kplane_model` types.

// Bytes and texts from outside must not end the program.
#![deny(clippy::indexing_slicing)]

pub mod convert;
pub mod packed;
pub mod ranking;
pub mod shared;
#[cfg(test)]
mod tests;

use prost::Message;

/// Types generated from `proto/kplane/v1/*.proto`.
#[allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    rustdoc::all,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    reason = "generated; documented in the .proto files"
)]
pub mod v1 {
    tonic::include_proto!("kplane.v1");

    /// Encoded file descriptors of this package, for gRPC reflection.
    pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

    /// The same with the options that methods and fields declare.
    pub const DECLARED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/declared.bin"));
}

/// The services between kplane's own programs, which no tool can use.
const INTERNAL: [&str; 2] = ["AgentService", "PeerService"];

/// Returns the right that a method needs, by the path of its requests: `/PACKAGE.SERVICE/METHOD`. `None` if there is no such
/// method. A method that declares none does not compile.
pub fn right_of(path: &str) -> Option<v1::Right> {
    let number = include!(concat!(env!("OUT_DIR"), "/rights.rs"));
    v1::Right::try_from(number)
        .ok()
        .filter(|right| *right != v1::Right::Unspecified)
}

/// Returns the encoded file descriptors of what tools can use, for gRPC reflection.
///
/// # Errors
/// The descriptors of this build are not readable, which is a mistake of the build.
pub fn public_descriptors() -> Result<Vec<u8>, prost::DecodeError> {
    let mut set = prost_types::FileDescriptorSet::decode(v1::DESCRIPTORS)?;
    for file in &mut set.file {
        let services = &mut file.service;
        services.retain(|service| !INTERNAL.contains(&service.name()));
    }
    Ok(set.encode_to_vec())
}

/// Shows nothing of the token, so that no log has it.
impl std::fmt::Debug for v1::Renewal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Renewal(..)")
    }
}

/// Version of the agent protocol that this build speaks.
pub const PROTOCOL_VERSION: u32 = 1;

/// Version of the object encoding under the digest (`ResumeToken.schema`).
pub const DIGEST_SCHEMA: u32 = 1;

/// Start of the reason of every `ObjectFailure` that is about a health check node port.
pub const HEALTH_CHECK_PORT: &str = "health check node port ";

/// Largest message that either side sends, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 256 * 1024;

/// Largest number of virtual servers of one Service that an agent reports: the Service's addresses,
/// and for each node port the node's addresses.
pub const MAX_SERVERS: usize = 256;
/// Largest size of these virtual servers without their real servers, in bytes: names may be long.
const SERVERS_BYTES: usize = 128 * 1024;
/// Largest number of real servers of one Service that an agent reports. With 90 bytes for each of
/// them, and 300 for each virtual server, the answer stays below [`MAX_MESSAGE_BYTES`].
pub const MAX_REAL_SERVERS: usize = 1024;

/// Cuts the report about one Service to these limits; returns how many real servers were removed.
pub fn bound_servers(servers: &mut Vec<v1::VirtualServer>) -> usize {
    let count = |servers: &[v1::VirtualServer]| -> usize {
        servers.iter().map(|server| server.real_servers.len()).sum()
    };
    let all = count(servers);
    let mut bytes = 0;
    let fit = servers
        .iter()
        .take(MAX_SERVERS)
        .take_while(|server| {
            let key = server.key.as_ref().map_or(0, Message::encoded_len);
            bytes += key + server.address.len() + server.scheduler.len() + 16;
            bytes <= SERVERS_BYTES
        })
        .count();
    servers.truncate(fit);
    let mut room = MAX_REAL_SERVERS;
    for server in &mut *servers {
        server.real_servers.truncate(room);
        room -= server.real_servers.len();
    }
    all - count(servers)
}
