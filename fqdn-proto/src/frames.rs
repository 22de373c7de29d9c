//! Frames of relays that are encoded once for all agents, and the server that sends them.

use std::{convert::Infallible, sync::Arc};

use prost::{
    Message,
    bytes::{BufMut as _, Bytes},
};
use tonic::{
    Request, Response, Status,
    body::Body,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::{self, BoxFuture, Context, Poll, StdError, http, tokio_stream::Stream},
    server::{Grpc, NamedService, ServerStreamingService},
};

use crate::relay::{FollowRequest, Frame, Step, cluster_relay_server::SERVICE_NAME};

/// Maximum length of a request, in bytes. A request has a version, a node's name and a position.
const REQUEST_MAX: usize = 16 << 10;

/// A [`Frame`] as encoded parts. Protobuf messages in sequence decode as one merged message.
#[derive(Clone, Debug, Default)]
pub struct EncodedFrame(pub Vec<Bytes>);

/// A part with one step.
pub fn part(step: Step) -> Bytes {
    let frame = Frame {
        steps: vec![step],
        sequence: 0,
    };
    frame.encode_to_vec().into()
}

/// The part that ends a frame: the position of the relay.
pub fn position(sequence: u64) -> Bytes {
    let frame = Frame {
        steps: Vec::new(),
        sequence,
    };
    frame.encode_to_vec().into()
}

/// The implementation of the call `holdfast.relay.v1.ClusterRelay/Follow`.
pub trait Follow: Send + Sync + 'static {
    /// Stream of the frames that one agent receives.
    type Frames: Stream<Item = Result<EncodedFrame, Status>> + Send + 'static;

    /// Serves the call of an agent that follows the cluster. An error ends the call with its
    /// status.
    fn follow(&self, request: Request<FollowRequest>) -> Result<Self::Frames, Status>;
}

/// The service. In contrast to the generated service it sends [`EncodedFrame`]s.
#[derive(Debug)]
pub struct RelayServer<T>(Arc<T>);

impl<T> RelayServer<T> {
    /// A service that passes its calls to `follow`.
    pub fn new(follow: T) -> Self {
        Self(Arc::new(follow))
    }
}

impl<T> Clone for RelayServer<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> NamedService for RelayServer<T> {
    const NAME: &'static str = SERVICE_NAME;
}

impl<T, B> codegen::Service<http::Request<B>> for RelayServer<T>
where
    T: Follow,
    B: codegen::Body + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let method = Method(Arc::clone(&self.0));
        let is_known = request
            .uri()
            .path()
            .strip_prefix('/')
            .and_then(|path| path.split_once('/'))
            == Some((SERVICE_NAME, "Follow"));
        Box::pin(async move {
            if !is_known {
                let unknown = Status::unimplemented("the relay serves Follow only");
                return Ok(unknown.into_http());
            }
            let mut grpc =
                Grpc::new(FrameCodec).apply_max_message_size_config(Some(REQUEST_MAX), None);
            Ok(grpc.server_streaming(method, request).await)
        })
    }
}

struct Method<T>(Arc<T>);

impl<T: Follow> ServerStreamingService<FollowRequest> for Method<T> {
    type Response = EncodedFrame;
    type ResponseStream = T::Frames;
    type Future = BoxFuture<Response<T::Frames>, Status>;

    fn call(&mut self, request: Request<FollowRequest>) -> Self::Future {
        let follow = Arc::clone(&self.0);
        Box::pin(async move { follow.follow(request).map(Response::new) })
    }
}

/// Codec of the service: it sends frames that are encoded already, and decodes requests.
struct FrameCodec;

struct Out;

struct In;

impl Codec for FrameCodec {
    type Encode = EncodedFrame;
    type Decode = FollowRequest;
    type Encoder = Out;
    type Decoder = In;

    fn encoder(&mut self) -> Out {
        Out
    }

    fn decoder(&mut self) -> In {
        In
    }
}

impl Encoder for Out {
    type Item = EncodedFrame;
    type Error = Status;

    fn encode(&mut self, item: EncodedFrame, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        for part in item.0 {
            buffer.put(part);
        }
        Ok(())
    }
}

impl Decoder for In {
    type Item = FollowRequest;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<FollowRequest>, Status> {
        let request = FollowRequest::decode(buffer);
        let request = request.map_err(|error| Status::invalid_argument(error.to_string()))?;
        Ok(Some(request))
    }
}
