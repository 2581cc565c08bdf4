//! Questions for lists that the API declares: messages are read by their descriptors.

use kplane_model::ServiceName;
use kplane_view::declared::Listing;
use prost_reflect::prost::Message as _;
use prost_reflect::{DynamicMessage, MessageDescriptor, MethodDescriptor, ReflectMessage as _};
use tonic::codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Status};

use super::{Client, Error, MAX_ANSWER_BYTES};

impl Client {
    /// Returns a list. `service` is the one that the request names, if it does.
    pub(crate) async fn list(
        &self,
        listing: &Listing,
        request: DynamicMessage,
        service: Option<&ServiceName>,
    ) -> Result<DynamicMessage, Error> {
        let answer = self.call(&listing.method, request).await;
        match service {
            Some(service) => self.known(service, answer).await,
            None => answer,
        }
    }

    async fn call(
        &self,
        method: &MethodDescriptor,
        request: DynamicMessage,
    ) -> Result<DynamicMessage, Error> {
        let path = format!("/{}/{}", method.parent_service().full_name(), method.name());
        let path = PathAndQuery::try_from(path).map_err(|_| self.lost("the method has no path"))?;
        let over = InterceptedService::new(self.line.channel.clone(), self.line.bearer.clone());
        let mut grpc = tonic::client::Grpc::new(over)
            .accept_compressed(CompressionEncoding::Gzip)
            .max_decoding_message_size(MAX_ANSWER_BYTES);
        let answer = method.output();
        self.ask(async move {
            let ready = grpc.ready().await;
            ready.map_err(|error| Status::from_error(error.into()))?;
            grpc.unary(Request::new(request), path, ByDescriptor(answer)).await
        })
        .await
    }
}

/// Messages of a type that a descriptor describes.
struct ByDescriptor(MessageDescriptor);

impl Codec for ByDescriptor {
    type Encode = DynamicMessage;
    type Decode = DynamicMessage;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self(self.0.clone())
    }

    fn decoder(&mut self) -> Self {
        Self(self.0.clone())
    }
}

impl Encoder for ByDescriptor {
    type Item = DynamicMessage;
    type Error = Status;

    fn encode(&mut self, message: DynamicMessage, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        let name = message.descriptor().full_name().to_owned();
        message
            .encode(to)
            .map_err(|error| Status::internal(format!("cannot write a {name}: {error}")))
    }
}

impl Decoder for ByDescriptor {
    type Item = DynamicMessage;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<DynamicMessage>, Status> {
        let message = DynamicMessage::decode(self.0.clone(), from);
        message.map(Some).map_err(|error| {
            Status::internal(format!("the answer is no {}: {error}", self.0.full_name()))
        })
    }
}
