//! The agent's connection to a relay: in the place of its own watches.
//!
//! A relay that is away changes nothing: the objects that the agent has stay. It tries the relays
//! in turn, and continues where it was if the relay is the same and still has the changes since.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use fqdn_proto::relay::{FollowRequest, cluster_relay_client::ClusterRelayClient};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::{
    Code, Status,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};

use super::{
    receive::{FrameError, Received, Receiver},
    settings::{RelaySettings, TlsError},
};
use crate::{
    kubernetes::{
        backoff::Backoff,
        client::chain,
        health::ClusterHealth,
        resource::{Absence, RESOURCES},
    },
    policy::source::cluster::{Batch, Seen},
};

/// Longest time until a connection is there.
const CONNECT: Duration = Duration::from_secs(5);
/// Longest time until a stream begins.
const ANSWER: Duration = Duration::from_secs(10);
/// A relay that sends nothing for so long is gone: it sends a view every five seconds.
const SILENCE: Duration = Duration::from_secs(20);
/// Octets of a frame: the largest object of an API server with room to spare.
const FRAME_MAX: usize = 16 << 20;
/// Octets that a relay may send before the agent has read them.
const WINDOW: u32 = 1 << 20;
/// How rustls reports that the other side refuses the connection.
const ALERT: &str = "received fatal alert";
/// A stream that lasted so long was in order.
const IN_ORDER: Duration = Duration::from_secs(10);

/// Why there is no stream.
#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error("{0}")]
    Files(#[from] TlsError),
    #[error(
        "the certificates cannot be used: {0}; correct --k8s-relay-ca, --k8s-relay-cert and --k8s-relay-key"
    )]
    Tls(String),
    #[error("{0}")]
    Unreachable(String),
    #[error(
        "its certificate is not trusted: {0}; write the CA that signed it to --k8s-relay-ca, and its name to --k8s-relay-server-name"
    )]
    Untrusted(String),
    #[error(
        "it does not accept the agent's certificate: {0}; write one that the relay's --client-ca signed to --k8s-relay-cert"
    )]
    Refused(String),
    #[error(
        "it closed the connection before it answered: {0}; if it does not accept the agent's certificate, write one that the relay's --client-ca signed to --k8s-relay-cert"
    )]
    Closed(String),
    #[error("{0}")]
    Status(String),
    #[error("it sends an unreadable message: {0}")]
    Frame(#[from] FrameError),
    #[error("no message within {0:?}")]
    Silent(Duration),
    #[error("the stream ended")]
    Ended,
    #[error("the agent stops")]
    Stopped,
}

/// The task.
#[derive(Debug)]
pub(crate) struct Follower {
    pub(crate) settings: RelaySettings,
    /// Name of this node.
    pub(crate) node: String,
    pub(crate) health: ClusterHealth,
    pub(crate) send: mpsc::Sender<Batch>,
    /// `--k8s-service-cidr` is given.
    pub(crate) has_service_blocks: bool,
}

impl Follower {
    /// Runs until the agent stops.
    pub(crate) async fn run(self, stop: CancellationToken) {
        stop.run_until_cancelled_owned(self.follow_always()).await;
    }

    async fn follow_always(self) {
        let mut receiver = Receiver::default();
        let mut backoff = Backoff::default();
        // Of each relay, since the last stream.
        let mut failures: BTreeMap<&str, String> = BTreeMap::new();
        let relays = self.settings.addresses.len().max(1);
        let random = RandomState::new().hash_one(0_u8);
        // Agents that start at once do not all begin with the first relay.
        let first = usize::try_from(random % u64::try_from(relays).unwrap_or(1)).unwrap_or(0);
        for attempt in 0_usize.. {
            let Some(address) = self.settings.addresses.get((first + attempt) % relays) else {
                return;
            };
            let begin = tokio::time::Instant::now();
            let Err(error) = self.follow(address, &mut receiver).await;
            match &error {
                StreamError::Stopped => return,
                StreamError::Frame(_) => receiver.forget_position(),
                _ => {}
            }
            if self.health.set_relay(None) {
                failures.clear();
            }
            failures.insert(address.as_str(), error.to_string());
            let failed = failures
                .iter()
                .map(|(relay, error)| format!("relay {relay}: {error}"));
            let reason = failed.collect::<Vec<_>>().join("; ");
            for resource in RESOURCES {
                self.health.set_stale(resource, reason.clone());
            }
            if begin.elapsed() >= IN_ORDER {
                backoff = Backoff::default();
            }
            // Each relay is tried once before a pause.
            if attempt % relays == relays - 1 {
                tokio::time::sleep(backoff.next()).await;
            }
        }
    }

    /// Follows one relay; it ends with an error only.
    async fn follow(
        &self,
        address: &str,
        receiver: &mut Receiver,
    ) -> Result<std::convert::Infallible, StreamError> {
        let channel = self.connect(address).await?;
        let mut client = ClusterRelayClient::new(channel).max_decoding_message_size(FRAME_MAX);
        let request = FollowRequest {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            node: self.node.clone(),
            after: receiver.begin(),
        };
        let begun = tokio::time::timeout(ANSWER, client.follow(request)).await;
        let begun = begun.map_err(|_| StreamError::Silent(ANSWER))?;
        let mut frames = begun
            .map_err(|status| match refused(&status) {
                // The alert of a relay that refuses the certificate is lost if the relay closes the
                // connection while the request is on its way.
                StreamError::Status(reason)
                    if self.settings.tls.is_some()
                        && matches!(status.code(), Code::Cancelled | Code::Unknown) =>
                {
                    StreamError::Closed(reason)
                }
                error => error,
            })?
            .into_inner();
        loop {
            let frame = tokio::time::timeout(SILENCE, frames.message()).await;
            let frame = frame.map_err(|_| StreamError::Silent(SILENCE))?;
            let frame = frame.map_err(|status| refused(&status))?;
            let frame = frame.ok_or(StreamError::Ended)?;
            let received = receiver.take(frame)?;
            self.give(address, received).await?;
        }
    }

    async fn connect(&self, address: &str) -> Result<Channel, StreamError> {
        let scheme = match self.settings.tls {
            Some(_) => "https",
            None => "http",
        };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{address}"));
        let endpoint = endpoint.map_err(|error| StreamError::Unreachable(chain(&error)))?;
        let mut endpoint = endpoint
            .connect_timeout(CONNECT)
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .http2_keep_alive_interval(SILENCE / 2)
            .keep_alive_timeout(SILENCE / 2)
            .keep_alive_while_idle(true)
            .tcp_nodelay(true);
        if let Some(files) = &self.settings.tls {
            // Read for each connection: certificates are renewed while the agent runs.
            let texts = files.read()?;
            let tls = ClientTlsConfig::new()
                .ca_certificate(Certificate::from_pem(texts.authority))
                .identity(Identity::from_pem(texts.certificate, texts.key))
                .domain_name(&self.settings.server_name);
            let with_tls = endpoint.tls_config(tls);
            endpoint = with_tls.map_err(|error| StreamError::Tls(chain(&error)))?;
        }
        let connected = endpoint.connect().await;
        connected.map_err(|error| broken(chain(&error)))
    }

    /// Passes on what came with a frame.
    async fn give(&self, address: &str, received: Received) -> Result<(), StreamError> {
        if let Some(version) = received.version {
            let relay = format!("{address} (version {version})");
            self.health.set_relay(Some(relay));
        }
        for batch in received.batches {
            let resource = RESOURCES.iter().find(|one| one.kind == batch.kind);
            let is_listed = batch.seen.iter().any(|seen| matches!(seen, Seen::Listed));
            let sent = self.send.send(batch).await;
            sent.map_err(|_| StreamError::Stopped)?;
            if let Some(resource) = resource
                && is_listed
            {
                self.health.set_listed(resource);
            }
        }
        let Some(view) = received.view else {
            return Ok(());
        };
        for resource in RESOURCES {
            let is_replaced = resource.absence == Absence::Release && self.has_service_blocks;
            let stale = view.iter().find(|stale| stale.kind == resource.kind);
            match stale.filter(|_| !is_replaced) {
                None => self.health.set_fresh(resource),
                Some(stale) => {
                    let age = Duration::from_secs(stale.seconds);
                    let reason = format!("relay {address}: {}", stale.reason);
                    self.health.set_stale_for(resource, age, reason);
                }
            }
        }
        Ok(())
    }
}

/// Why the relay ended the stream, or the connection broke.
fn refused(status: &Status) -> StreamError {
    let reason = match status.message() {
        "" => chain(status),
        message => message.to_owned(),
    };
    let causes = chain(status);
    if let Some((_, alert)) = causes.split_once(ALERT) {
        // The causes contain the debug form of an error of hyper.
        let alert = alert.split(['"', '\\']).next().unwrap_or_default();
        return StreamError::Refused(format!("{ALERT}{alert}"));
    }
    match status.code() {
        Code::Unavailable | Code::ResourceExhausted | Code::Aborted => StreamError::Status(reason),
        code => StreamError::Status(format!("{code:?}: {reason}")),
    }
}

/// Why there is no connection.
fn broken(reason: String) -> StreamError {
    if reason.contains("invalid peer certificate") {
        StreamError::Untrusted(reason)
    } else if reason.contains(ALERT) {
        // With TLS 1.3 the agent learns only after the handshake that its certificate is refused.
        StreamError::Refused(reason)
    } else {
        StreamError::Unreachable(reason)
    }
}
