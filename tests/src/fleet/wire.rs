//! The client side of `AgentService`, for answers that many agents share: a message stays bytes until somebody needs
//! it, so that a process with thousands of agents decodes what all of them get once.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use hyper_util::rt::TokioIo;
use kplane_proto::v1::AgentMessage;
use kplane_tls::{ClientConfig, greet};
use prost::Message as _;
use prost::bytes::{Buf as _, Bytes};
use tokio::net::TcpSocket;
use tokio_stream::Stream;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};

/// Path of the method.
const SYNC: &str = "/kplane.v1.AgentService/Sync";

/// Length of gRPC's prefix of a message.
pub(super) const PREFIX: u64 = 5;

/// Connects over TLS from an address of loopback: as in a cluster, each client has one of its own.
///
/// # Errors
/// The server cannot be reached, or refuses the client.
pub async fn connect(
    own: Ipv4Addr,
    server: SocketAddr,
    config: &Arc<ClientConfig>,
) -> anyhow::Result<Channel> {
    let config = Arc::clone(config);
    let connect = move |_| {
        let config = Arc::clone(&config);
        async move {
            let socket = TcpSocket::new_v4()?;
            socket.bind((own, 0).into())?;
            let stream = socket.connect(server).await?;
            greet(stream, Some(config), "localhost").await.map(TokioIo::new)
        }
    };
    let endpoint = Endpoint::from_static("https://localhost");
    let channel = endpoint.connect_with_connector(tower::service_fn(connect));
    Ok(channel.await?)
}

/// Opens a stream.
pub(super) async fn sync(
    channel: Channel,
    messages: impl Stream<Item = AgentMessage> + Send + 'static,
) -> Result<Streaming<Bytes>, Status> {
    let mut client = Grpc::new(channel);
    let ready = client.ready().await;
    ready.map_err(|error| Status::unavailable(error.to_string()))?;
    let path = PathAndQuery::from_static(SYNC);
    let answer = client.streaming(Request::new(messages), path, Raw).await?;
    Ok(answer.into_inner())
}

/// A codec that leaves the control plane's messages as they are.
#[derive(Debug, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = AgentMessage;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = AgentMessage;
    type Error = Status;

    fn encode(&mut self, message: AgentMessage, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        let encoded = message.encode(buffer);
        encoded.map_err(|error| Status::internal(error.to_string()))
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}
