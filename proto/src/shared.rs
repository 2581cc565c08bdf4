//! The server side of `AgentService`, for answers that many streams share.
//!
//! tonic's generated server takes a `ServerMessage`, encodes it into a buffer of each stream, and keeps that buffer. Here
//! a stream yields bytes that [`frame`] made once. They go to the connection as they are: a snapshot for 10,000 agents
//! is in memory once.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{BufMut as _, Bytes, BytesMut};
use http_body::Frame;
use prost::Message as _;
use tonic::body::Body;
use tonic::codec::BufferSettings;
use tonic::codegen::{BoxFuture, Service, StdError, http};
use tonic::metadata::GRPC_CONTENT_TYPE;
use tonic::server::NamedService;
use tonic::{Request, Status, Streaming};
use tonic_prost::{ProstCodec, ProstDecoder};

use crate::MAX_MESSAGE_BYTES;
use crate::v1::{AgentMessage, ServerMessage};

/// Path of the only method.
const SYNC: &str = "/kplane.v1.AgentService/Sync";

/// Length of gRPC's prefix of a message: whether it is compressed, and its length.
pub const PREFIX: usize = 5;

/// Size of a stream's buffer for messages of an agent, in bytes. It holds what most messages need, and grows for
/// others: tonic's default of 8 KiB would be a good part of what an idle agent costs.
const BUFFER: usize = 1024;

/// Returns a message with gRPC's prefix, as streams yield it.
#[must_use]
pub fn frame(message: &ServerMessage) -> Bytes {
    let length = message.encoded_len();
    let mut framed = BytesMut::with_capacity(PREFIX + length);
    framed.put_u8(0);
    // No message is nearly as long as 4 GiB.
    framed.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    message.encode_raw(&mut framed);
    framed.freeze()
}

/// Returns the decoder of agents' messages.
#[must_use]
pub fn decoder() -> ProstDecoder<AgentMessage> {
    let buffers = BufferSettings::new(BUFFER, BUFFER);
    ProstCodec::<ServerMessage, AgentMessage>::raw_decoder(buffers)
}

/// The handler of agents' streams.
pub trait AgentService: Send + Sync + 'static {
    /// The answers of a stream, each with its [`frame`]. Several items may together be one message. The first error
    /// ends the stream.
    type Frames: futures_core::Stream<Item = Result<Bytes, Status>> + Send + Unpin + 'static;

    /// Handles the stream of one agent.
    fn sync(
        &self,
        request: Request<Streaming<AgentMessage>>,
    ) -> impl Future<Output = Result<Self::Frames, Status>> + Send;
}

/// The gRPC server of an [`AgentService`].
#[derive(Debug)]
pub struct AgentServiceServer<T>(Arc<T>);

impl<T> AgentServiceServer<T> {
    /// Creates a server.
    #[must_use]
    pub fn new(service: T) -> Self {
        Self(Arc::new(service))
    }
}

impl<T> Clone for AgentServiceServer<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> NamedService for AgentServiceServer<T> {
    const NAME: &'static str = "kplane.v1.AgentService";
}

impl<T, B> Service<http::Request<B>> for AgentServiceServer<T>
where
    T: AgentService,
    B: http_body::Body + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let service = Arc::clone(&self.0);
        Box::pin(async move {
            let answered = match check(&request) {
                Ok(()) => service.sync(messages(request)).await,
                Err(status) => Err(status),
            };
            Ok(answered.map_or_else(Status::into_http, answer))
        })
    }
}

/// Refuses methods that do not exist, and compression, which neither side offers.
fn check<B>(request: &http::Request<B>) -> Result<(), Status> {
    if request.uri().path() != SYNC {
        return Err(Status::unimplemented(
            "AgentService has the method Sync only",
        ));
    }
    let encoding = request.headers().get("grpc-encoding");
    if encoding.is_some_and(|encoding| encoding != "identity") {
        return Err(Status::unimplemented("send messages without compression"));
    }
    Ok(())
}

fn messages<B>(request: http::Request<B>) -> Request<Streaming<AgentMessage>>
where
    B: http_body::Body + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    // The control plane keeps agents' reports, so their size is limited.
    let limit = Some(MAX_MESSAGE_BYTES);
    Request::from_http(request.map(|body| Streaming::new_request(decoder(), body, None, limit)))
}

fn answer<F>(frames: F) -> http::Response<Body>
where
    F: futures_core::Stream<Item = Result<Bytes, Status>> + Send + Unpin + 'static,
{
    let mut response = http::Response::new(Body::new(Answer(Some(frames))));
    let headers = response.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, GRPC_CONTENT_TYPE);
    response
}

/// The body of a response; `None` after its trailers.
struct Answer<F>(Option<F>);

impl<F> http_body::Body for Answer<F>
where
    F: futures_core::Stream<Item = Result<Bytes, Status>> + Unpin,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Some(frames) = &mut self.0 else {
            return Poll::Ready(None);
        };
        let end = match std::task::ready!(Pin::new(frames).poll_next(cx)) {
            Some(Ok(bytes)) => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
            Some(Err(status)) => status,
            None => Status::ok(""),
        };
        self.0 = None;
        let mut trailers = http::HeaderMap::new();
        Poll::Ready(Some(
            end.add_header(&mut trailers)
                .map(|()| Frame::trailers(trailers)),
        ))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}
