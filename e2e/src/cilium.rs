//! A stand-in for a Cilium agent (1.19 and later): its FQDNData service with the behaviour that a
//! client must handle, and the node that it would have set up.
//!
//! ```text
//!  holdfast-sdp ──HTTP/2──► keepalive (counts pings, sends its own) ──► service
//!                                                                         │
//!  test ── world: endpoints, rules, prefixes ─────────────────────────────┘
//!       ◄─ seen: acks, mappings, what a client must not do
//! ```

pub mod conntrack;
pub(crate) mod keepalive;
pub mod place;
pub mod restart;
mod service;
pub mod setup;
pub mod world;

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use fqdn_proto::fqdndata as wire;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Code;
use tonic::transport::Server;
use wire::fqdn_data_server::FqdnDataServer;

use self::keepalive::Timing;
use self::service::Service;
use self::world::World;
use crate::listening::listen;
use crate::netns::Netns;

/// TCP port of the FQDNData service.
pub const PORT: u16 = 10095;
/// Maximum number of accepted connections that wait for the service.
const CONNECTIONS: usize = 16;

/// Behaviour of the stand-in agent, which a test sets.
#[derive(Clone, Debug)]
pub struct Manner {
    /// Timing of the agent's keepalive, and the agent's limits for the client's keepalive.
    pub timing: Timing,
    /// Pause between two snapshots of one stream.
    pub pause: Duration,
    /// Error codes for mappings of names that begin with this text.
    pub errors: Vec<(&'static str, Code)>,
    /// How long the agent takes to plumb an address.
    pub plumbing: Duration,
    /// Maximum number of mappings and reports that are stored for [`CiliumAgent::seen`].
    pub kept: usize,
}

impl Default for Manner {
    fn default() -> Self {
        Self {
            timing: Timing::default(),
            pause: Duration::from_secs(1),
            errors: Vec::new(),
            plumbing: Duration::from_millis(1),
            kept: usize::MAX,
        }
    }
}

/// Messages and events that the agent received.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub connections: u64,
    /// Snapshots that the agent sent.
    pub states: u64,
    /// Bytes of the largest snapshot.
    pub largest_state: usize,
    pub acks: Vec<wire::PolicyStateResponse>,
    /// Every mapping and notice, in order.
    pub mappings: Vec<wire::FqdnMapping>,
    /// Messages that would make the real agent fail or log an error.
    pub violations: Vec<String>,
    pub client_pings: u64,
    /// Connections ended because of too many pings.
    pub too_many_pings: u64,
    /// Pings of this agent that were answered.
    pub answered_pings: u64,
    /// Connections ended because a ping was not answered.
    pub unanswered_pings: u64,
}

impl Seen {
    /// Responses with addresses for a name (final dot included).
    pub fn learned(&self, name: &str) -> Vec<wire::FqdnMapping> {
        let of_name = self.mappings.iter().filter(|m| m.fqdn == name);
        of_name.filter(|m| service::teaches(m)).cloned().collect()
    }
}

#[derive(Clone, Debug)]
struct Shared {
    world: watch::Receiver<World>,
    seen: Arc<Mutex<Seen>>,
    manner: Manner,
    hung: watch::Receiver<bool>,
}

/// A running agent. Dropping it has the effect of a crash.
#[derive(Debug)]
pub struct CiliumAgent {
    world: watch::Sender<World>,
    hung: watch::Sender<bool>,
    seen: Arc<Mutex<Seen>>,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl CiliumAgent {
    /// Starts an agent in `netns` at its port of 127.0.0.1.
    pub fn start(netns: &Netns, world: World, manner: Manner) -> Result<Self> {
        Self::start_at(
            netns,
            SocketAddr::from(([127, 0, 0, 1], PORT)),
            world,
            manner,
        )
    }

    /// Like [`Self::start`], at another address.
    pub fn start_at(netns: &Netns, at: SocketAddr, world: World, manner: Manner) -> Result<Self> {
        let (sender, receiver) = watch::channel(world);
        let (hung, hangs) = watch::channel(false);
        let seen = Arc::<Mutex<Seen>>::default();
        let stop = CancellationToken::new();
        let shared = Shared {
            world: receiver,
            seen: seen.clone(),
            manner,
            hung: hangs,
        };
        // Bound here, so that a port in use fails the test and not a thread.
        let listener = netns.enter(|| listen(at))?;
        let listener = listener.with_context(|| format!("bind {at}"))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            if let Err(error) = runtime.block_on(serve(listener, shared, stopped)) {
                eprintln!("the stand-in agent ended: {error:#}");
            }
        });
        Ok(Self {
            world: sender,
            hung,
            seen,
            stop,
            thread: Some(thread),
        })
    }

    /// Changes endpoints, rules or prefixes. A snapshot follows.
    pub fn change(&self, change: impl FnOnce(&mut World)) {
        self.world.send_modify(change);
    }

    /// Sets whether mappings stay without an answer.
    pub fn hang(&self, hangs: bool) {
        self.hung.send_replace(hangs);
    }

    /// The messages and events so far.
    pub fn seen(&self) -> Seen {
        self.seen.lock().clone()
    }
}

impl Drop for CiliumAgent {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn serve(
    listener: std::net::TcpListener,
    shared: Shared,
    stop: CancellationToken,
) -> Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let tasks = TaskTracker::new();
    let (connections, incoming) = mpsc::channel(CONNECTIONS);
    let service = FqdnDataServer::new(Service::new(shared.clone(), tasks.clone()));
    let server = Server::builder()
        .add_service(service)
        .serve_with_incoming(ReceiverStream::new(incoming));
    tokio::pin!(server);
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            ended = &mut server => return Ok(ended?),
            accepted = listener.accept() => {
                let (stream, _) = accepted?;
                // As Go's listeners do.
                stream.set_nodelay(true)?;
                shared.seen.lock().connections += 1;
                let (ours, theirs) = tokio::io::duplex(1 << 20);
                tasks.spawn(keepalive::watch(
                    stream,
                    ours,
                    shared.manner.timing,
                    shared.seen.clone(),
                ));
                connections.send(Ok::<_, std::io::Error>(theirs)).await?;
            }
        }
    }
}
