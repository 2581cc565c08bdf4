//! The server side of `AgentService`, for answers that many streams share.
//!
//! tonic's generated server takes a `ServerMessage`, encodes it into a buffer of each stream, and keeps that buffer. Here
//! a stream yields bytes that [`frame`] made once. They go to the connection as they are: a snapshot for 10,000 agents
//! is in memory once.

use std::convert::Infallible;
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{BufMut as _, Bytes, BytesMut};
use http_body::{Body as _, Frame};
use prost::Message;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, StdError, http};
use tonic::metadata::GRPC_CONTENT_TYPE;
use tonic::server::NamedService;
use tonic::{Code, Request, Status};

use crate::MAX_MESSAGE_BYTES;
use crate::v1::AgentMessage;

/// Path of the only method.
const SYNC: &str = "/kplane.v1.AgentService/Sync";

/// Length of gRPC's prefix of a message: whether it is compressed, and its length.
pub const PREFIX: usize = 5;

/// Returns a message with gRPC's prefix, as streams yield it.
pub fn frame(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut framed = BytesMut::with_capacity(PREFIX + length);
    framed.put_u8(0);
    // No message is nearly as long as 4 GiB.
    framed.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    message.encode_raw(&mut framed);
    framed.freeze()
}

/// An agent's side of a stream. tonic's would keep a buffer of the largest message that the agent ever sent. This one has
/// no buffer between two messages.
pub struct Messages {
    body: Body,
    /// The bytes of the next messages that have arrived.
    buffer: BytesMut,
}

impl Messages {
    /// Creates the stream that a request's body carries.
    pub fn new<B>(body: B) -> Self
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<StdError> + 'static,
    {
        Self {
            body: Body::new(body),
            buffer: BytesMut::new(),
        }
    }

    /// Returns the next message; `None` at the end. Safe to drop at any time.
    ///
    /// # Errors
    /// The status with which the stream has to end.
    pub async fn message(&mut self) -> Result<Option<AgentMessage>, Status> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(Some(message));
            }
            let frame = poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx)).await;
            match frame.transpose() {
                Ok(Some(frame)) => {
                    // Anything else is trailers, which a client need not send.
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                // The agent has gone.
                Err(status) if status.code() == Code::Cancelled => return Ok(None),
                Err(status) => return Err(status),
                Ok(None) if self.buffer.is_empty() => return Ok(None),
                Ok(None) => return Err(Status::internal("the stream ends within a message")),
            }
        }
    }

    /// Takes a message out of the buffer, if it is there as a whole.
    fn take(&mut self) -> Result<Option<AgentMessage>, Status> {
        let Some((prefix, rest)) = self.buffer.split_first_chunk::<PREFIX>() else {
            return Ok(None);
        };
        let [compressed, length @ ..] = prefix;
        if *compressed != 0 {
            return Err(Status::unimplemented("send messages without compression"));
        }
        let length = u32::from_be_bytes(*length) as usize;
        // The control plane keeps agents' reports, so their size is limited.
        if length > MAX_MESSAGE_BYTES {
            return Err(Status::out_of_range(format!(
                "a message of {length} bytes is longer than {MAX_MESSAGE_BYTES}"
            )));
        }
        let Some(message) = rest.get(..length) else {
            return Ok(None);
        };
        let message = AgentMessage::decode(message)
            .map_err(|error| Status::invalid_argument(format!("cannot read a message: {error}")));
        let next = rest.get(length..).unwrap_or_default();
        self.buffer = BytesMut::from(next);
        message.map(Some)
    }
}

impl fmt::Debug for Messages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waiting = self.buffer.len();
        f.debug_struct("Messages").field("waiting", &waiting).finish_non_exhaustive()
    }
}

/// The handler of agents' streams.
pub trait AgentService: Send + Sync + 'static {
    /// The answers of a stream, each with its [`frame`]. Several items may together be one message. The first error
    /// ends the stream.
    type Frames: futures_core::Stream<Item = Result<Bytes, Status>> + Send + Unpin + 'static;

    /// Handles the stream of one agent.
    fn sync(
        &self,
        request: Request<Messages>,
    ) -> impl Future<Output = Result<Self::Frames, Status>> + Send;
}

/// The gRPC server of an [`AgentService`].
#[derive(Debug)]
pub struct AgentServiceServer<T>(Arc<T>);

impl<T> AgentServiceServer<T> {
    /// Creates a server.
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
    B: http_body::Body<Data = Bytes> + Send + 'static,
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
                Ok(()) => service.sync(Request::from_http(request.map(Messages::new))).await,
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
            end.add_header(&mut trailers).map(|()| Frame::trailers(trailers)),
        ))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::task::Waker;

    use super::*;
    use crate::v1::{Ping, Report, agent_message::Kind};

    /// A body that is there as a whole, in pieces.
    struct Pieces(VecDeque<Bytes>);

    impl http_body::Body for Pieces {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(self.0.pop_front().map(|piece| Ok(Frame::data(piece))))
        }
    }

    fn framed(kinds: impl IntoIterator<Item = Kind>) -> Bytes {
        let mut bytes = BytesMut::new();
        for kind in kinds {
            let message = AgentMessage { kind: Some(kind) }.encode_to_vec();
            bytes.put_u8(0);
            bytes.put_u32(u32::try_from(message.len()).unwrap());
            bytes.put_slice(&message);
        }
        bytes.freeze()
    }

    fn next(messages: &mut Messages) -> Result<Option<Kind>, Code> {
        let mut next = Box::pin(messages.message());
        match next.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(message)) => Ok(message.and_then(|message| message.kind)),
            Poll::Ready(Err(status)) => Err(status.code()),
            Poll::Pending => panic!("the body is there"),
        }
    }

    fn ping(token: u64) -> Kind {
        Kind::Ping(Ping { token })
    }

    #[test]
    fn messages_come_whole_however_they_are_cut() {
        let bytes = framed((0..40).map(ping));
        for size in 1..64 {
            let pieces = bytes.chunks(size).map(Bytes::copy_from_slice);
            let mut messages = Messages::new(Pieces(pieces.collect()));
            for token in 0..40 {
                assert_eq!(next(&mut messages), Ok(Some(ping(token))));
            }
            assert_eq!(next(&mut messages), Ok(None));
        }
    }

    #[test]
    fn a_large_message_leaves_no_buffer_behind() {
        let report = Report {
            families: vec![crate::v1::FamilyStatus {
                error: "x".repeat(230_000),
                ..Default::default()
            }],
            ..Report::default()
        };
        let pieces = [framed([Kind::Report(report)]), framed([ping(1)])];
        let mut messages = Messages::new(Pieces(pieces.into()));
        assert!(matches!(next(&mut messages), Ok(Some(Kind::Report(_)))));
        assert_eq!(messages.buffer.capacity(), 0);
        assert_eq!(next(&mut messages), Ok(Some(ping(1))));
        assert_eq!(messages.buffer.capacity(), 0);
    }

    #[test]
    fn what_is_no_message_ends_the_stream() {
        let after = |bytes: &[u8]| {
            let pieces = [Bytes::copy_from_slice(bytes)];
            next(&mut Messages::new(Pieces(pieces.into())))
        };
        let too_long = u32::try_from(MAX_MESSAGE_BYTES + 1).unwrap().to_be_bytes();
        let too_long = [&[0], &too_long[..]].concat();
        assert_eq!(after(&too_long), Err(Code::OutOfRange));
        assert_eq!(after(&[1, 0, 0, 0, 0]), Err(Code::Unimplemented));
        assert_eq!(after(&[0, 0, 0, 0, 1, 0xff]), Err(Code::InvalidArgument));
        assert_eq!(after(&[0, 0, 0, 0, 2, 0]), Err(Code::Internal));
        assert_eq!(after(&[]), Ok(None));
    }
}
