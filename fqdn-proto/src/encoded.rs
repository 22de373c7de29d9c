//! Responses that are received encoded and decoded later, outside of the task that receives them.
//! Decoding the snapshot of a large cluster takes longer than a peer waits for the answer to its
//! HTTP/2 ping.

use std::marker::PhantomData;

use prost::{DecodeError, Message, bytes::Buf as _, bytes::Bytes};
use tonic::{
    IntoStreamingRequest, Response, Status, Streaming,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::http::uri::PathAndQuery,
    transport::Channel,
};

use crate::fqdndata::{PolicyState, PolicyStateResponse};

/// A message as it was received.
#[derive(Clone, Debug)]
pub struct Encoded<T> {
    bytes: Bytes,
    message: PhantomData<fn() -> T>,
}

impl<T: Message + Default> Encoded<T> {
    /// Decodes the message. Fails if the bytes are not a valid message of this type.
    pub fn decode(self) -> Result<T, DecodeError> {
        T::decode(self.bytes)
    }
}

impl<T> From<Vec<u8>> for Encoded<T> {
    fn from(bytes: Vec<u8>) -> Self {
        Self {
            bytes: bytes.into(),
            message: PhantomData,
        }
    }
}

/// Calls `standalonednsproxy.FQDNData/StreamPolicyState`. A snapshot may have at most `largest`
/// bytes.
pub async fn stream_policy_state(
    channel: Channel,
    acks: impl IntoStreamingRequest<Message = PolicyStateResponse>,
    largest: usize,
) -> Result<Response<Streaming<Encoded<PolicyState>>>, Status> {
    let path = PathAndQuery::from_static("/standalonednsproxy.FQDNData/StreamPolicyState");
    let mut client = Grpc::new(channel).max_decoding_message_size(largest);
    client
        .ready()
        .await
        .map_err(|error| Status::unavailable(error.to_string()))?;
    client
        .streaming(
            acks.into_streaming_request(),
            path,
            EncodedCodec(PhantomData),
        )
        .await
}

/// Encodes `E` and does not decode `D`.
struct EncodedCodec<E, D>(PhantomData<fn() -> (E, D)>);

struct Out<E>(PhantomData<fn() -> E>);

struct In<D>(PhantomData<fn() -> D>);

impl<E, D> Codec for EncodedCodec<E, D>
where
    E: Message + 'static,
    D: 'static,
{
    type Encode = E;
    type Decode = Encoded<D>;
    type Encoder = Out<E>;
    type Decoder = In<D>;

    fn encoder(&mut self) -> Self::Encoder {
        Out(PhantomData)
    }

    fn decoder(&mut self) -> Self::Decoder {
        In(PhantomData)
    }
}

impl<E: Message> Encoder for Out<E> {
    type Item = E;
    type Error = Status;

    fn encode(&mut self, item: E, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        item.encode(buffer)
            .map_err(|error| Status::internal(error.to_string()))
    }
}

impl<D> Decoder for In<D> {
    type Item = Encoded<D>;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Self::Item>, Status> {
        let bytes = buffer.copy_to_bytes(buffer.remaining());
        Ok(Some(Encoded {
            bytes,
            message: PhantomData,
        }))
    }
}
