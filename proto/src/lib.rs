//! The wire protocol `kplane.v1`: generated types and their conversions to and from the model.
//!
//! Wire types stop here: programs convert at once and work with `kplane_model` types.

pub mod convert;
pub mod shared;

/// Generated from `proto/kplane/v1/*.proto`.
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
}

/// Version of the agent protocol that this build speaks.
pub const PROTOCOL_VERSION: u32 = 1;

/// Version of the object encoding under the digest (`ResumeToken.schema`).
pub const DIGEST_SCHEMA: u32 = 1;

/// How the reason of every `ObjectFailure` begins that is about a health check node port.
pub const HEALTH_CHECK_PORT: &str = "health check node port ";

/// Largest message that either side sends, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 256 * 1024;
