//! The stream that sends mappings to the agent, and receives results and revocations.

use std::time::Duration;

use dns_policy::{boot_time::BootTime, epoch::Epoch};
use fqdn_proto::native as wire;
use tokio::{
    sync::mpsc,
    time::{Interval, MissedTickBehavior, interval},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use wire::mapping_down::Kind;

use super::{
    Link, SessionError, answered, convert,
    native::{Client, Never},
};

const CALL: &str = "UpdateMappings";
/// Maximum number of messages queued for the connection. Further messages wait in the sink.
const AHEAD: usize = 4;
/// Interval at which collected refreshes that became due are sent.
const REFRESH_INTERVAL: Duration = Duration::from_millis(100);
/// How often the link notes that it has read all results, while an answer waits for a result.
const BEAT: Duration = Duration::from_millis(10);

/// A stream whose first message, the agent's epoch, has come.
#[derive(Debug)]
pub(super) struct Opened {
    up: mpsc::Sender<wire::MappingUp>,
    down: Streaming<wire::MappingDown>,
    epoch: Epoch,
}

/// Opens the stream and waits for its first message, the agent's epoch.
pub(super) async fn open(client: &mut Client) -> Result<Opened, SessionError> {
    let (up, sent) = mpsc::channel(AHEAD);
    let call = client.update_mappings(ReceiverStream::new(sent));
    let mut down = answered(CALL, call).await?.into_inner();
    let first = answered(CALL, down.message())
        .await?
        .ok_or(SessionError::Closed { what: CALL })?;
    let Some(Kind::Epoch(epoch)) = first.kind else {
        return Err(SessionError::Protocol(
            "mapping results before its epoch".into(),
        ));
    };
    Ok(Opened {
        up,
        down,
        epoch: convert::epoch(epoch),
    })
}

impl Opened {
    pub(super) fn epoch(&self) -> &Epoch {
        &self.epoch
    }

    /// Moves messages until the stream ends.
    pub(super) async fn run(self, link: &Link) -> Result<Never, SessionError> {
        let Self { up, down, .. } = self;
        tokio::select! {
            // Receiving comes first, so that every message is read when the sending branch notes a
            // beat.
            biased;
            ended = receive(link, down) => ended,
            ended = send(link, up) => ended,
        }
    }
}

async fn send(link: &Link, up: mpsc::Sender<wire::MappingUp>) -> Result<Never, SessionError> {
    let mut refresh = interval(REFRESH_INTERVAL);
    let mut beat = interval(BEAT);
    refresh.set_missed_tick_behavior(MissedTickBehavior::Delay);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let waits = link.sink.is_waiting();
        tokio::select! {
            () = link.sink.has_work() => {}
            _ = refresh.tick() => {}
            _ = beat.tick(), if waits => {
                link.sink.read_all(BootTime::now());
                continue;
            }
        }
        loop {
            // Waits for room first, because a batch that was taken cannot be merged with later
            // mappings.
            let room = room(link, &up, &mut beat).await?;
            let mut messages =
                convert::batch_out(link.sink.next_batch(BootTime::now())).into_iter();
            let Some(first) = messages.next() else { break };
            room.send(first);
            for message in messages {
                self::room(link, &up, &mut beat).await?.send(message);
            }
        }
    }
}

/// Waits for room. An agent that reads nothing counts as one that answers nothing.
async fn room<'u>(
    link: &Link,
    up: &'u mpsc::Sender<wire::MappingUp>,
    beat: &mut Interval,
) -> Result<mpsc::Permit<'u, wire::MappingUp>, SessionError> {
    loop {
        tokio::select! {
            permit = up.reserve() => {
                return permit.map_err(|_| SessionError::Closed { what: CALL });
            }
            _ = beat.tick() => link.sink.read_all(BootTime::now()),
        }
    }
}

async fn receive(
    link: &Link,
    mut down: Streaming<wire::MappingDown>,
) -> Result<Never, SessionError> {
    loop {
        let message = down
            .message()
            .await
            .map_err(|status| SessionError::Status {
                what: CALL,
                status: Box::new(status),
            })?;
        match message.ok_or(SessionError::Closed { what: CALL })?.kind {
            Some(Kind::Results(results)) => {
                link.sink
                    .results(results.results.iter().map(convert::result).collect());
            }
            Some(Kind::Revoked(revoked)) => {
                let (id, name, addresses) = convert::revocation(&revoked);
                link.sink.revoke(id, name.as_ref(), &addresses);
            }
            // A second epoch, or a kind of message that a later version added.
            Some(Kind::Epoch(_)) | None => {}
        }
    }
}
