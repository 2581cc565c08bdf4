//! The server side of `AgentService` with answers that are already encoded.
//!
//! The ordinary generated server takes a `ServerMessage` and encodes it for each stream. Here a
//! stream yields the message's bytes, so that an object is encoded once for all agents.

use bytes::{BufMut, Bytes};
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, EncodeBuf, Encoder};
use tonic_prost::{ProstCodec, ProstDecoder};

use crate::v1::{AgentMessage, ServerMessage};

#[allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    reason = "generated; the service is documented in agent.proto"
)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/kplane.v1.AgentService.rs"));
}

pub use generated::agent_service_server::{AgentService, AgentServiceServer};

/// Size of a stream's buffer in each direction, in bytes. It holds what most messages need, and grows for others:
/// tonic's default of 8 KiB would be most of what an idle agent costs.
const BUFFER: usize = 1024;
/// Size of an encoded batch of messages at which a stream lets others go on, in bytes; tonic's default.
const YIELD: usize = 32 * 1024;

fn buffers() -> BufferSettings {
    BufferSettings::new(BUFFER, YIELD)
}

/// Decodes `AgentMessage`s; sends encoded `ServerMessage`s as they are.
#[derive(Debug, Default)]
pub struct SharedCodec;

impl Codec for SharedCodec {
    type Encode = Bytes;
    type Decode = AgentMessage;
    type Encoder = SharedEncoder;
    type Decoder = ProstDecoder<AgentMessage>;

    fn encoder(&mut self) -> Self::Encoder {
        SharedEncoder
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<ServerMessage, AgentMessage>::raw_decoder(buffers())
    }
}

/// Copies encoded messages into a stream's buffer.
#[derive(Debug)]
pub struct SharedEncoder;

impl Encoder for SharedEncoder {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buf: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buf.put(item);
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        buffers()
    }
}
