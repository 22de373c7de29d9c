//! The agent's connection to a relay, which replaces its own watches.
//!
//! If the relay does not answer, nothing changes: the objects that the agent has stay. The agent tries the relays in
//! turn. If it reaches the same relay again, and this relay still has the later changes, the agent continues at its
//! position.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    hash::{BuildHasher as _, RandomState},
    io,
    pin::pin,
    sync::Arc,
    time::Duration,
};

use agent_core::{
    high_scale::scope::PodScope,
    policy::source::cluster::{Batch, Seen},
};
use fqdn_proto::relay::{FollowRequest, cluster_relay_client::ClusterRelayClient};
use hyper::Uri;
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpStream,
    sync::{mpsc, watch},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{
    Status,
    transport::{Channel, Endpoint},
};

use super::{
    credentials::Credentials,
    progress::Progress,
    receive::{Received, Receiver},
    renewal,
    stream_error::{StreamError, broken, refused, unanswered},
};
use crate::{
    api::{backoff::Backoff, client::chain},
    health::ClusterHealth,
    relay_settings::{RelaySettings, TlsFiles},
    resource::{Absence, Resource},
};

/// Longest time to establish a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Longest time until a stream begins.
const ANSWER: Duration = Duration::from_secs(10);
/// A relay that sends nothing for this long is gone. A relay sends a *view* (how current its objects are) every five
/// seconds.
const SILENCE: Duration = Duration::from_secs(20);
/// A relay that sends fewer bytes in [`SILENCE`] counts as one that sends nothing: pings are smaller.
const SILENT_BYTES: u64 = 256;
/// Maximum size of a frame, in bytes: the largest object of an API server, with room to spare.
const FRAME_MAX: usize = 16 << 20;
/// Maximum number of bytes that a relay may send before the agent has read them.
const WINDOW: u32 = 256 << 10;
/// A stream that lasted this long was in order.
const IN_ORDER: Duration = Duration::from_secs(10);

/// The agent's task that follows one relay at a time.
#[derive(Debug)]
pub(crate) struct Follower {
    pub(crate) settings: RelaySettings,
    /// Name of this node, which the relays log.
    pub(crate) node: String,
    pub(crate) health: ClusterHealth,
    pub(crate) send: mpsc::Sender<Batch>,
    /// Kinds that this agent follows.
    pub(crate) resources: &'static [Resource],
    /// Whether `--k8s-service-cidr` is given. The kind ServiceCIDR may then be absent.
    pub(crate) has_service_blocks: bool,
    /// Pods that this agent reads; relays send all pods.
    pub(crate) pods: PodScope,
    pub(crate) tasks: TaskTracker,
    /// Time between two reads of the certificates' files.
    pub(super) renewal: Duration,
}

/// The credentials for relays as they are now; `None` = plain text.
type Current = Option<watch::Receiver<Arc<Credentials>>>;

impl Follower {
    /// Runs until the agent stops.
    pub(crate) async fn run(self, stop: CancellationToken) {
        stop.run_until_cancelled_owned(self.follow_renewed()).await;
    }

    /// Follows the relays and meanwhile reads renewed certificates. Without TLS there are none to
    /// read.
    async fn follow_renewed(self) {
        let Some(files) = self.settings.tls.clone() else {
            return self.follow_always(None).await;
        };
        let credentials = self.credentials(&files).await;
        let (send, current) = watch::channel(Arc::new(credentials));
        let health = self.health.clone();
        let report = move |problem| health.set_relay_certificates(problem);
        let tasks = self.tasks.clone();
        tokio::select! {
            () = renewal::follow(files, send, report, self.renewal, tasks) => {}
            () = self.follow_always(Some(current)) => {}
        }
    }

    /// Reads the credentials from the files until it succeeds: the files could be used when the program started.
    async fn credentials(&self, files: &TlsFiles) -> Credentials {
        let mut backoff = Backoff::default();
        loop {
            let error = match Credentials::load(files) {
                Ok(credentials) => return credentials,
                Err(error) => error.to_string(),
            };
            for resource in self.resources {
                self.health.set_stale(resource, error.clone());
            }
            tokio::time::sleep(backoff.pause()).await;
        }
    }

    async fn follow_always(&self, mut current: Current) {
        let mut receiver = Receiver::of(self.resources, self.pods.clone());
        let mut backoff = Backoff::default();
        // Failures of each relay since the last stream.
        let mut failures: BTreeMap<&str, String> = BTreeMap::new();
        let relays = self.settings.addresses.len().max(1);
        let random = RandomState::new().hash_one(0_u8);
        // So agents that start at the same time do not all begin with the first relay.
        let first = usize::try_from(random % u64::try_from(relays).unwrap_or(1)).unwrap_or(0);
        let mut attempt = 0_usize;
        loop {
            let Some(address) = self.settings.addresses.get((first + attempt) % relays) else {
                return;
            };
            let begin = tokio::time::Instant::now();
            let Err(error) = self.follow(address, &mut receiver, &mut current).await;
            match &error {
                StreamError::Stopped => return,
                StreamError::Renewed => continue,
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
            for resource in self.resources {
                self.health.set_stale(resource, reason.clone());
            }
            if begin.elapsed() >= IN_ORDER {
                backoff = Backoff::default();
            }
            // Each relay is tried once before a pause.
            if attempt % relays == relays - 1 {
                tokio::time::sleep(backoff.pause()).await;
            }
            attempt = attempt.wrapping_add(1);
        }
    }

    /// Follows one relay. Returns only with an error.
    async fn follow(
        &self,
        address: &str,
        receiver: &mut Receiver,
        current: &mut Current,
    ) -> Result<Infallible, StreamError> {
        let progress = Progress::default();
        let used = current
            .as_mut()
            .map(|current| Arc::clone(&current.borrow_and_update()));
        let channel = self.connect(address, used.as_deref(), &progress).await?;
        let mut client = ClusterRelayClient::new(channel).max_decoding_message_size(FRAME_MAX);
        let request = FollowRequest {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            node: self.node.clone(),
            after: receiver.begin(),
        };
        let begun = alive(&progress, ANSWER, client.follow(request)).await?;
        let has_tls = used.is_some();
        let begun = begun.map_err(|status: Status| unanswered(&status, has_tls));
        let mut frames = begun?.into_inner();
        loop {
            let frame = tokio::select! {
                frame = alive(&progress, SILENCE, frames.message()) => frame?,
                () = other_authority(current, used.as_deref()) => return Err(StreamError::Renewed),
            };
            let frame = frame.map_err(|status| refused(&status))?;
            let frame = frame.ok_or(StreamError::Ended)?;
            let received = receiver.take(frame)?;
            self.give(address, received).await?;
        }
    }

    async fn connect(
        &self,
        address: &str,
        credentials: Option<&Credentials>,
        progress: &Progress,
    ) -> Result<Channel, StreamError> {
        let scheme = match credentials {
            Some(_) => "https",
            None => "http",
        };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{address}"));
        let endpoint = endpoint.map_err(|error| StreamError::Unreachable(chain(&error)))?;
        // No pings: their answers would wait behind a snapshot. See `alive`.
        let mut endpoint = endpoint
            .connect_timeout(CONNECT)
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW);
        if let Some(credentials) = credentials {
            let with_tls = endpoint.tls_config(credentials.client(&self.settings.server_name));
            endpoint = with_tls.map_err(|error| StreamError::Tls(chain(&error)))?;
        }
        let (address, progress) = (address.to_owned(), progress.clone());
        let dial = tower::service_fn(move |_: Uri| {
            let (address, progress) = (address.clone(), progress.clone());
            async move {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                Ok::<_, io::Error>(TokioIo::new(progress.count(stream)))
            }
        });
        let connected = endpoint.connect_with_connector(dial).await;
        connected.map_err(|error| broken(chain(&error)))
    }

    /// Passes on what came with a frame.
    async fn give(&self, address: &str, received: Received) -> Result<(), StreamError> {
        if let Some(version) = received.version {
            let relay = format!("{address} (version {version})");
            self.health.set_relay(Some(relay));
        }
        for batch in received.batches {
            let resource = self.resources.iter().find(|one| one.kind == batch.kind);
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
        for resource in self.resources {
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

/// Waits as long as the relay sends something.
async fn alive<T>(
    progress: &Progress,
    limit: Duration,
    answer: impl Future<Output = T>,
) -> Result<T, StreamError> {
    let mut answer = pin!(answer);
    loop {
        let before = progress.read();
        let waited = tokio::time::timeout(limit, &mut answer).await;
        if let Ok(answer) = waited {
            return Ok(answer);
        }
        if progress.read() - before < SILENT_BYTES {
            return Err(StreamError::Silent(limit));
        }
    }
}

/// Waits until the files name another authority than that of `used`. The other authority may not accept this relay.
async fn other_authority(current: &mut Current, used: Option<&Credentials>) {
    while let (Some(current), Some(used)) = (current.as_mut(), used)
        && current.changed().await.is_ok()
    {
        if !current.borrow_and_update().has_authority_of(used) {
            return;
        }
    }
    std::future::pending().await
}
