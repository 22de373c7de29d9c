//! The mapping stream of one proxy. The proxy sends batches of mappings, and the agent sends results and revocations.

use agent_core::core::event::{Event, MappingEvent, RevokeAck};
use dns_policy::epoch::Epoch;
use fqdn_proto::native::{
    MappingDown, MappingResults, MappingUp, mapping_down::Kind as Down, mapping_up::Kind as Up,
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use super::convert;
use crate::{
    proxies::{Results, StreamGuard, ToStream},
    runner::CoreHandle,
};

/// Answers to the proxy; a closed channel ends the stream.
pub(super) type Answers = mpsc::Sender<Result<MappingDown, Status>>;

/// Serves one stream until either end closes it.
pub(super) async fn serve(
    core: CoreHandle,
    epoch: Epoch,
    guard: StreamGuard,
    mut results: Results,
    mut requests: Streaming<MappingUp>,
    answers: Answers,
    stop: CancellationToken,
) {
    let first = MappingDown {
        kind: Some(Down::Epoch(convert::epoch(&epoch))),
    };
    if answers.send(Ok(first)).await.is_err()
        || core.send(Event::StreamUp(guard.id())).await.is_err()
    {
        return;
    }
    let down = async {
        while let Some(message) = results.recv().await {
            for message in to_messages(message) {
                if answers.send(Ok(message)).await.is_err() {
                    return;
                }
            }
        }
        // The registry closed the stream, because the proxy read results too slowly.
        let slow = Status::resource_exhausted("results were not fetched; connect again");
        let _ended = answers.try_send(Err(slow));
    };
    let up = async {
        while let Ok(Some(request)) = requests.message().await {
            if take(&core, &guard, &answers, request).await.is_none() {
                return;
            }
        }
    };
    tokio::select! {
        () = down => {}
        () = up => {}
        () = stop.cancelled() => {}
    }
    let _stopped = core.send(Event::StreamDown(guard.id())).await;
}

async fn take(
    core: &CoreHandle,
    guard: &StreamGuard,
    answers: &Answers,
    request: MappingUp,
) -> Option<()> {
    match request.kind {
        Some(Up::Batch(batch)) => {
            let mut events = Vec::with_capacity(batch.mappings.len());
            let mut refused = Vec::new();
            for message in &batch.mappings {
                match convert::mapping(message) {
                    Some(mapping) => events.push(MappingEvent {
                        stream: guard.id(),
                        sequence: message.sequence,
                        mapping,
                    }),
                    None => refused.push(convert::invalid(message.sequence)),
                }
            }
            if !refused.is_empty() {
                let number = u64::try_from(refused.len()).unwrap_or(u64::MAX);
                guard.proxies().add_unreadable(number);
                let results = MappingResults { results: refused };
                let message = MappingDown {
                    kind: Some(Down::Results(results)),
                };
                answers.send(Ok(message)).await.ok()?;
            }
            if !events.is_empty() {
                guard.took(events.len());
                core.send(Event::Mappings(events)).await.ok()?;
            }
        }
        Some(Up::RevokedAck(ack)) => {
            let ack = RevokeAck {
                stream: guard.id(),
                id: ack.id,
            };
            core.send(Event::RevokeAcked(vec![ack])).await.ok()?;
        }
        // A message of a later release: ignored.
        None => {}
    }
    Some(())
}

fn to_messages(message: ToStream) -> Vec<MappingDown> {
    let kinds = match message {
        ToStream::Results(results) => vec![Down::Results(MappingResults {
            results: results.iter().map(convert::result).collect(),
        })],
        ToStream::Revoke(revocations) => {
            let revoked = revocations.iter().map(|one| convert::revoked(one));
            revoked.map(Down::Revoked).collect()
        }
    };
    let messages = kinds.into_iter();
    messages
        .map(|kind| MappingDown { kind: Some(kind) })
        .collect()
}
